//! The numbers that verdict and advice follow from: of the model and its settings before a run, of the run after it.

use crate::checkpoint::Checkpoint;
use crate::cli::args::RunArgs;
use crate::cli::config::{RunConfig, Setting};
use crate::cli::machine::Machine;
use crate::engine::stats::{OverlapStats, Stats, Verdict};
use crate::engine::{Activations, Dsa, Switch};

use super::{Advice, Facts, advise};

/// What is known before the run.
pub struct Known {
    /// What the run would allow itself if nothing were said.
    budget_most: u64,
    cores: usize,
    tuned: bool,
    reading_flags: Vec<&'static str>,
    serial: bool,
    no_prefetch: bool,
    kernels_given: bool,
    exact: bool,
    dense_attention: bool,
    expert_bits: f64,
}

/// What bound the run, and what to change.
pub struct Judgement {
    /// In a word.
    pub verdict: Verdict,
    /// In a sentence with its numbers.
    pub why: String,
    /// What to change.
    pub advice: Advice,
}

impl Known {
    /// What flags, settings and model tell.
    pub fn of(args: &RunArgs, machine: &Machine, config: &RunConfig, checkpoint: &Checkpoint) -> Known {
        let arch = &checkpoint.arch;
        let experts: Vec<_> = checkpoint.routed().flatten().collect();
        let weights = 3 * arch.moe.width * arch.hidden * experts.len();
        let bytes: u64 = experts.iter().map(|expert| expert.bytes()).sum();
        let given: [(&'static str, bool); 4] = [
            ("--io", args.engine.io.is_some()),
            ("--device", args.engine.device.is_some()),
            ("--depth", args.engine.depth.is_some()),
            ("--chunk", args.engine.chunk.is_some()),
        ];
        let integers =
            experts.iter().all(|expert| expert.gate.scales.is_some() && expert.gate.spec.format.is_integer());
        Known {
            budget_most: machine.memory.usable(),
            cores: machine.cores,
            tuned: config.settings.iter().any(is_tuned),
            reading_flags: given.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect(),
            serial: args.engine.pipeline == Some(Switch::Off),
            no_prefetch: args.engine.prefetch == Some(Switch::Off),
            kernels_given: args.engine.kernels.is_some(),
            exact: args.engine.activations == Some(Activations::F32) && integers,
            dense_attention: args.engine.dsa == Some(Dsa::Off) && arch.indexer.is_some(),
            expert_bits: 8.0 * bytes as f64 / weights.max(1) as f64,
        }
    }

    /// The verdict on a run, and what follows, where the drive can do `drive_most` GB/s; none where nothing was generated
    /// after the prompt.
    pub fn judge(&self, stats: &Stats, drive_most: Option<f64>) -> Option<Judgement> {
        let (verdict, overlap) = (stats.verdict?, stats.overlap.as_ref()?);
        let memory = &stats.memory;
        let threads = stats.settings.get("threads").and_then(|threads| threads.as_u64());
        let facts = Facts {
            verdict,
            budget: memory.budget,
            budget_most: self.budget_most,
            cache: memory.cache,
            cache_whole: memory.cache_whole,
            threads: threads.map_or(self.cores, |threads| threads as usize),
            cores: self.cores,
            drive_share: stats.io.gb_s.zip(drive_most).map(|(gb_s, most)| gb_s / most),
            tuned: self.tuned,
            reading_flags: self.reading_flags.clone(),
            serial: self.serial,
            no_prefetch: self.no_prefetch,
            kernels_given: self.kernels_given,
            exact: self.exact,
            dense_attention: self.dense_attention,
            expert_bits: self.expert_bits,
        };
        Some(Judgement { verdict, why: why(overlap), advice: advise(&facts) })
    }
}

fn is_tuned(setting: &Setting) -> bool {
    setting.name == "tuning" && setting.origin.starts_with("tuning profile")
}

/// The shares of the time that the verdict follows from.
fn why(overlap: &OverlapStats) -> String {
    let percent = |s: f64| 100.0 * s / overlap.wall_s.max(f64::MIN_POSITIVE);
    let (waited, computed) = (percent(overlap.wait_s), percent(overlap.compute_busy_s));
    format!("after the prompt {waited:.0} % of the time was spent waiting for the drive and {computed:.0} % computing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_in_shares_of_the_time_after_the_prompt() {
        let overlap = OverlapStats { wait_s: 6.0, compute_busy_s: 3.0, wall_s: 10.0, ..OverlapStats::default() };
        let expected = "after the prompt 60 % of the time was spent waiting for the drive and 30 % computing";
        assert_eq!(why(&overlap), expected);
        assert!(!why(&OverlapStats::default()).contains("NaN"));
    }
}
