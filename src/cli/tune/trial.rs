//! Short generations under one way of reading after another: the same prompt, the same tokens, cold expert reads.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::measure::Witness;

use crate::checkpoint::Checkpoint;
use crate::engine::sampler::Sampling;
use crate::engine::stats::Directness;
use crate::engine::{EngineConfig, Job};

use super::choose::Sample;
use crate::cli::job::engine_failure;
use crate::cli::prompt::{open_tokenizer, tokenizer_failure};
use crate::cli::reading::Reading;
use crate::cli::{Failure, cold};

/// What the generations continue.
const PROMPT: &str = "Once upon a time a miller's daughter followed the stream down to the sea, and on the way she met a \
                      fox, a king without a kingdom, and a clock that ran backwards.";

/// What every generation has in common.
pub struct Trial<'a> {
    dir: &'a Path,
    /// Everything but how files are read.
    config: EngineConfig,
    job: Job,
    witness: &'a Witness,
    stop: Arc<AtomicBool>,
    quiet: bool,
    /// The tokens of the first generation; those of all others must be the same.
    ids: Option<Vec<u32>>,
}

/// What one generation measured.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Its rate.
    pub sample: Sample,
    /// Bytes of experts that were read.
    pub bytes: u64,
    /// Time until the first token was chosen, opening the model included.
    pub before_s: f64,
    /// Whether reads went around the page cache.
    pub direct: bool,
}

impl<'a> Trial<'a> {
    /// Generations of `tokens` tokens by the model in `dir`. `stop` is raised when the user wants them to end; `quiet`
    /// keeps to itself that a drive hangs.
    pub fn new(
        dir: &'a Path,
        config: EngineConfig,
        prompt: Vec<u32>,
        tokens: usize,
        witness: &'a Witness,
        stop: Arc<AtomicBool>,
        quiet: bool,
    ) -> Trial<'a> {
        // The likeliest tokens end in a circle that needs few experts; chance with a fixed seed is always the same.
        let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 1 };
        let job = Job { prompt, max_tokens: tokens, sampling, stop_ids: Vec::new() };
        Trial { dir, config, job, witness, stop, quiet, ids: None }
    }

    /// From here on so many tokens are generated.
    pub fn ask(&mut self, tokens: usize) {
        self.job.max_tokens = tokens;
        self.ids = None;
    }

    /// One generation, with an empty expert cache and the files dropped from the page cache; `None` where the user
    /// stopped it.
    ///
    /// # Errors
    /// Those of opening the model and of generating, as a line; or that the tokens are others.
    pub fn run(&mut self, reading: &Reading) -> Result<Option<Measured>, Failure> {
        let subject =
            cold::Subject { dir: self.dir, witness: self.witness, stop: self.stop.clone(), quiet: self.quiet };
        let (config, mut ignored) = (reading.configure(self.config.clone()), |_| ControlFlow::Continue(()));
        let measured = subject.generate(&config, &self.job, &mut ignored, engine_failure)?;
        let Some(cold::Measured { outcome, stats, cached, took }) = measured else { return Ok(None) };
        if *self.ids.get_or_insert_with(|| outcome.ids.clone()) != outcome.ids {
            return Err(Failure::work("its tokens differ from those of the defaults: it reads other bytes"));
        }
        let before_s = took.as_secs_f64() - stats.decode_s;
        let direct = stats.io.direct == Directness::Direct;
        let sample = Sample { tok_s: stats.decode_tok_s.unwrap_or(0.0), cached };
        Ok(Some(Measured { sample, bytes: stats.io.bytes, before_s, direct }))
    }
}

/// Ids of the prompt, at most half a context.
pub fn prompt(checkpoint: &Checkpoint) -> Result<Vec<u32>, Failure> {
    let tokenizer = open_tokenizer(&checkpoint.dir, &checkpoint.arch, false)?;
    let Some(tokenizer) = tokenizer else { unreachable!("it is not optional") };
    let mut ids = tokenizer.encode_plain(PROMPT).map_err(|error| tokenizer_failure(&error))?;
    ids.truncate((checkpoint.arch.max_context / 2).max(1));
    Ok(ids)
}
