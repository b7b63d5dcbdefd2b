//! The generations of a sweep.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::measure::{Witness, median};

use crate::engine::Job;
use crate::engine::stats::Stats;
use crate::model::tokenizer::Tokenizer;

use super::Knob;
use crate::cli::args::RunArgs;
use crate::cli::bench_io::io_failure;
use crate::cli::config::RunConfig;
use crate::cli::job::{Files, Prepared};
use crate::cli::machine::Machine;
use crate::cli::printer::{Printer, Show};
use crate::cli::render::Waiting;
use crate::cli::{Failure, cold, interrupt, run};
use crate::engine::stop::StopMatcher;

/// A value and what was measured with it.
pub struct Arm {
    /// Bytes, or a count.
    pub value: u64,
    /// One a round.
    pub samples: Vec<Sample>,
    /// Why there are no more.
    pub failed: Option<Failure>,
}

/// One generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Steps a second after the prompt; none where there was no step.
    pub decode_tok_s: Option<f64>,
    /// Tokens of the prompt a second.
    pub prefill_tok_s: Option<f64>,
    /// Share of experts that were in memory.
    pub hit_rate: Option<f64>,
    /// Bytes that were read.
    pub bytes: u64,
    /// While the drive was busy.
    pub gb_s: Option<f64>,
    /// Share of the time that went by waiting for reads.
    pub waited: f64,
    /// Whether memory may have served some of the reads.
    pub cached: bool,
}

/// What all generations had in common.
#[derive(Default)]
pub struct Measured {
    /// Numbers of the first generation, whose tokens all others had.
    pub first: Stats,
    /// Whether the user stopped it.
    pub interrupted: bool,
}

impl Arm {
    /// Median, least and most of what `of` finds in the samples.
    pub fn spread(&self, of: impl Fn(&Sample) -> Option<f64>) -> Option<[f64; 3]> {
        let values: Vec<f64> = self.samples.iter().filter_map(of).collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        Some([median(&values)?, least, values.iter().copied().fold(f64::NEG_INFINITY, f64::max)])
    }

    /// The median of what `of` finds.
    pub fn median(&self, of: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        self.spread(of).map(|[median, ..]| median)
    }
}

/// What a generation needs besides the value.
struct Rig<'a> {
    knob: Knob,
    quiet: bool,
    config: RunConfig,
    files: Files,
    tokenizer: Option<Arc<Tokenizer>>,
    job: Job,
    stops: StopMatcher,
    context: usize,
    witness: Witness,
    machine: &'a Machine,
    stop: Arc<AtomicBool>,
}

/// Generates with every value, `rounds` times.
pub fn measure(
    knob: Knob,
    values: &[u64],
    rounds: usize,
    args: &RunArgs,
    machine: &Machine,
    prepared: Prepared,
) -> Result<(Vec<Arm>, Measured), Failure> {
    let mut arms: Vec<Arm> =
        values.iter().map(|&value| Arm { value, samples: Vec::with_capacity(rounds), failed: None }).collect();
    // Every generation begins with the same history, and none adds to it: it is the same run each time.
    let Prepared { config, usage: _, checkpoint, files, tokenizer, job, grammar: _, stops, context } = prepared;
    let witness = Witness::open(checkpoint.tensors.paths(), machine.root()).map_err(|error| io_failure(&error))?;
    let formats = checkpoint.formats().map(|format| format.to_string()).collect();
    let stop = interrupt::watch()?;
    drop(checkpoint);
    let rig = Rig { knob, quiet: args.quiet, config, files, tokenizer, job, stops, context, witness, machine, stop };
    let mut measured = Measured::default();
    let waiting = Waiting::begin("generating", args.quiet);
    let (mut order, mut number) = ((0..arms.len()).collect::<Vec<_>>(), 0);
    'rounds: for _ in 0..rounds {
        for &index in &order {
            number += 1;
            let arm = &mut arms[index];
            if arm.failed.is_some() {
                continue;
            }
            let value = knob.show(arm.value);
            waiting.say(format!("run {number} of {}, {} {value}", rounds * values.len(), knob.name()));
            match rig.generate(arm.value) {
                Ok(None) => {
                    measured.interrupted = true;
                    break 'rounds;
                }
                Ok(Some((stats, sample))) => {
                    if measured.first.prompt_tokens == 0 {
                        measured.first = stats;
                    } else if measured.first.ids != stats.ids {
                        return Err(differing(&value, knob));
                    }
                    arm.samples.push(sample);
                }
                Err(failure) => arm.failed = Some(failure),
            }
        }
        order.reverse();
    }
    drop(waiting);
    measured.first.model.formats = formats;
    Ok((arms, measured))
}

/// No setting that is varied may change a token.
fn differing(value: &str, knob: Knob) -> Failure {
    Failure::work(format!("with {} {value} the tokens are others", knob.name()))
        .cause("the same bits are promised whatever the memory and the threads are")
        .hint("this is a bug, or memory or the drive is damaged: millstream doctor --deep reads the whole model")
}

impl Rig<'_> {
    /// One generation from an empty expert cache, with the files dropped from the page cache; none where it was stopped.
    fn generate(&self, value: u64) -> Result<Option<(Stats, Sample)>, Failure> {
        let mut config = self.config.clone();
        match self.knob {
            Knob::Ram => config.ram = Some(value),
            Knob::Threads => config.threads = value as usize,
        }
        let mut printer = Printer::new(
            Show::Nothing,
            std::io::sink(),
            self.tokenizer.as_deref(),
            &self.job.stop_ids,
            self.stops.clone(),
            self.job.max_tokens,
        );
        let subject =
            cold::Subject { dir: &self.files.dir, witness: &self.witness, stop: self.stop.clone(), quiet: self.quiet };
        let mut on_token = |id| printer.token(id);
        let failure = |error| self.files.failure(error);
        let measured = subject.generate(&config.engine(self.context), &self.job, &mut on_token, failure)?;
        let Some(cold::Measured { outcome, mut stats, cached, .. }) = measured else { return Ok(None) };
        run::complete(&mut stats, &outcome, &config, self.machine, &self.files.dir);
        let sample = Sample {
            decode_tok_s: stats.decode_tok_s,
            prefill_tok_s: stats.prefill_tok_s,
            hit_rate: stats.experts.hit_rate,
            bytes: stats.io.bytes,
            gb_s: stats.io.gb_s,
            waited: if stats.wall_s > 0.0 { stats.io.wait_s / stats.wall_s } else { 0.0 },
            cached,
        };
        Ok(Some((stats, sample)))
    }
}
