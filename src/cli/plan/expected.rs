//! What is expected of a model on this machine, and on others.

use crate::engine::predict::{Answer, Choice, Costs, Line, Prediction, Speeds, Work};

use super::Disk;
use super::change::Change;

/// Twice the cores that make of arithmetic no more than so much were not free, or wait for memory.
const ADDED: f64 = 1.15;

/// What is known of a model and of this machine.
pub struct Facts {
    pub work: Work,
    /// Bytes of an expert, on average.
    pub expert_bytes: f64,
    /// How experts are chosen.
    pub choice: Choice,
    /// Arithmetic, or why it was not timed.
    pub costs: Result<Costs, String>,
    pub drive: Option<Line>,
    pub disk: Disk,
    pub cores: u64,
    /// What twice the cores make of arithmetic: what the second half of them made, as it was measured; `None` of one core.
    pub doubled: Option<f64>,
    /// Of the experts that are read, the share that is known a layer ahead.
    pub guessed: f64,
    /// What is asked about.
    pub answer: Answer,
}

/// What is expected of a machine.
#[derive(Clone, Copy)]
pub struct Expected {
    pub slots: u64,
    /// The mean of the tokens of the answer.
    pub answer: Outlook,
    /// A token of a long one, behind the first use of every expert.
    pub long: Outlook,
    /// A token that finds none of its experts.
    pub worst: Option<Prediction>,
    /// What of it is not measured but assumed.
    pub assumed: Option<&'static str>,
}

/// Tokens of some kind.
#[derive(Clone, Copy)]
pub struct Outlook {
    pub hit_rate: f64,
    pub bytes_per_token: f64,
    pub prediction: Option<Prediction>,
}

impl Facts {
    /// What `change` would make of the answer, with memory for `slots` experts.
    pub fn expected(&self, change: &Change, slots: u64) -> Expected {
        let drive = self.changed_drive(change);
        let finding = self.finding(slots);
        let (faster, assumed) = self.faster(change);
        let predicted = |found: &[(f64, f64)]| {
            let costs = self.costs.as_ref().ok()?.faster(faster);
            Prediction::of_all(&self.work, &Speeds { costs, drive }, found, self.guessed)
        };
        let outlook = |found: &[(f64, f64)]| {
            let hit_rate = found.iter().map(|(share, hit_rate)| share * hit_rate).sum();
            let bytes_per_token = self.work.used() as f64 * self.expert_bytes * (1.0 - hit_rate);
            Outlook { hit_rate, bytes_per_token, prediction: predicted(found) }
        };
        Expected {
            slots,
            answer: outlook(&self.answer.found(&self.choice, finding)),
            long: outlook(&[(1.0, self.choice.at_last(finding))]),
            worst: predicted(&[(1.0, 0.0)]),
            assumed,
        }
    }

    /// Of so many slots those in which experts are found: guesses for a layer hold as many as it uses, unless there is a slot
    /// for every expert.
    fn finding(&self, slots: u64) -> u64 {
        let guesses = if self.guessed > 0.0 { self.work.top_k } else { 0 };
        if slots >= self.work.experts { slots } else { slots.saturating_sub(guesses) }
    }

    fn changed_drive(&self, change: &Change) -> Option<Line> {
        let mut drive = self.drive;
        if let Some(gb_s) = change.disk {
            drive = Some(match (drive, &self.disk) {
                (Some(drive), Ok((here, ..))) => drive.faster(gb_s / here),
                _ => Line::steady(gb_s, self.expert_bytes),
            });
        }
        if let Some(drives) = change.drives {
            drive = drive.map(|drive| drive.beside(drives as f64));
        }
        drive
    }

    /// How many times as fast arithmetic becomes, and what of that is not measured.
    fn faster(&self, change: &Change) -> (f64, Option<&'static str>) {
        let Some(cores) = change.cores else { return (1.0, None) };
        let doublings = (cores as f64 / self.cores as f64).log2();
        let assumed = match self.doubled {
            None if doublings > 0.0 => Some("each core is assumed to compute as much as the one here"),
            Some(doubled) if doublings > 0.0 && doubled < ADDED => {
                Some("half of the cores computed nearly as fast here: others had the rest, or memory binds")
            }
            Some(_) if doublings > 1.0 => Some("far from what was measured: memory may not keep up"),
            _ => None,
        };
        (self.doubled.unwrap_or(2.0).powf(doublings), assumed)
    }
}
