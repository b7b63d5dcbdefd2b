//! `trace synth`: the trace of a made-up router.

use std::path::{Path, PathBuf};

use crate::limits::{MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K};
use crate::store::trace::synth::{Shape, synthesize};

use crate::cli::{Done, Failure, output};

/// Flags of `trace synth`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream trace synth skewed.trace --skew 1.2
  millstream trace synth glm.trace --layers 75 --experts 256 --top-k 8 --skew 0.8 --repeat 0.2 --topic 400 --tokens 1000")]
pub struct SynthArgs {
    /// Where the trace goes
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Routed layers
    #[arg(long, value_name = "N", default_value_t = 16)]
    layers: u16,
    /// Experts of a layer
    #[arg(long, value_name = "N", default_value_t = 64)]
    experts: u16,
    /// Experts a token
    #[arg(long, value_name = "N", default_value_t = 6)]
    top_k: u16,
    /// Tokens
    #[arg(long, value_name = "N", default_value_t = 2000)]
    tokens: u32,
    /// The expert of rank r is chosen in proportion to 1 / r^A; 0 chooses all alike
    #[arg(long, value_name = "A", default_value_t = 1.0)]
    skew: f64,
    /// Chance from 0 to 1 that a choice is one of the previous token's
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    repeat: f64,
    /// Tokens after which half of the ranks go to other experts; 0 is never
    #[arg(long, value_name = "N", default_value_t = 0)]
    topic: u32,
    /// Same seed, same trace
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Makes one up.
pub fn synth(args: &SynthArgs) -> Result<Done, Failure> {
    let within = |flag: &str, value: u64, most: usize| match (1..=most as u64).contains(&value) {
        true => Ok(()),
        false => Err(Failure::usage(format!("{flag} {value} is not between 1 and {most}"))),
    };
    within("--layers", args.layers.into(), MAX_LAYERS)?;
    within("--experts", args.experts.into(), MAX_EXPERTS)?;
    within("--top-k", args.top_k.into(), MAX_TOP_K.min(args.experts.into()))?;
    within("--tokens", args.tokens.into(), 1 << 24)?;
    if !(0.0..=8.0).contains(&args.skew) {
        return Err(Failure::usage(format!("--skew {} is not between 0 and 8", args.skew)));
    }
    if !(0.0..=1.0).contains(&args.repeat) {
        return Err(Failure::usage(format!("--repeat {} is not between 0 and 1", args.repeat)));
    }
    output::check::<&Path>(&args.out, "trace", &[])?;
    let &SynthArgs { layers, experts, top_k, skew, repeat, seed, .. } = args;
    let (tokens, topic) = (args.tokens as usize, args.topic as usize);
    let trace = synthesize(&Shape { layers, experts, top_k, tokens, skew, repeat, topic, seed });
    output::write(&args.out, "trace", trace.encode())?;
    Ok(Done::Whole)
}
