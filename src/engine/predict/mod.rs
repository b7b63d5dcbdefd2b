//! How long a token will take, from what it needs and how fast drive and processor are. Pure arithmetic.
//!
//! A routed layer cannot ask for its experts before its attention is done, and what it asks for is computed as it comes:
//! the reads of a layer go on beside its shared expert and the experts that are at hand, and the expert that comes last
//! is computed after them. Experts that are quantized on their way are so by the threads that compute, once they were read.
//! A drive that reads several at once has them nearly at once too, and quantizing while it reads is slower, so that runs
//! take as long as if all of it came after the reads: it is added to them. Then the drive has nothing to do until the next
//! layer asks, unless that layer's experts were guessed: those are read in that time, as far as it goes. Attention to what
//! lies far back is left out, which makes a token slower.

mod answer;
mod found;
mod work;

pub use answer::Answer;
pub use found::Choice;
pub use work::{Costs, LayerWork, Slice, Times, Work};

/// Shares of the time at which one side is said to bind alone.
const ALONE: f64 = 1.25;
/// Where no more than one selection in a million must read, nothing need be known of the drive.
const NEARLY_ALL: f64 = 1.0 - 1e-6;
/// Of the experts that a layer chooses, the share that was guessed a layer ahead: what the model that was trained does, and
/// drawn ones do a little better.
pub const GUESSED: f64 = 0.77;

/// How long something takes for the experts of one layer that are read: so long for the first, so long for each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Line {
    /// Seconds that pass however many they are.
    pub first_s: f64,
    /// Seconds of each expert.
    pub each_s: f64,
}

impl Line {
    /// A drive that reads `gb_s` whatever is asked for, and experts of so many bytes.
    pub fn steady(gb_s: f64, expert_bytes: f64) -> Line {
        Line { first_s: 0.0, each_s: expert_bytes / (gb_s * 1e9) }
    }

    /// From what one expert took, and what `many` at once took. What many took is always met, as a layer with many misses
    /// weighs most; what one took, where the line between them is one that there can be: nothing is read in no time,
    /// and the first of many has no start that is owed to it.
    pub fn fitted(one_s: f64, many: u64, many_s: f64) -> Line {
        // What is a difference may have come out below nothing.
        let (one_s, many_s) = (one_s.max(0.0), many_s.max(0.0));
        if many < 2 {
            return Line { first_s: 0.0, each_s: one_s };
        }
        let each_s = ((many_s - one_s) / (many - 1) as f64).clamp(0.0, many_s / many as f64);
        Line { first_s: many_s - many as f64 * each_s, each_s }
    }

    /// This drive, `factor` times as fast.
    pub fn faster(self, factor: f64) -> Line {
        Line { first_s: self.first_s / factor, each_s: self.each_s / factor }
    }

    /// Several of this drive, each with all files.
    pub fn beside(self, drives: f64) -> Line {
        Line { each_s: self.each_s / drives, ..self }
    }

    fn seconds(self, reads: u64) -> f64 {
        if reads == 0 { 0.0 } else { self.first_s + self.each_s * reads as f64 }
    }
}

/// How fast processor and drive are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// The arithmetic of a token.
    pub costs: Costs,
    /// The drive; `None` where nothing is known of it.
    pub drive: Option<Line>,
}

/// What binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The drive.
    Disk,
    /// Arithmetic, which is memory bandwidth where weights are multiplied with one row.
    Arithmetic,
    /// One about as much as the other.
    Both,
}

impl Bottleneck {
    /// Of a token for which the drive and arithmetic take so long.
    fn of(disk_s: f64, compute_s: f64) -> Bottleneck {
        if disk_s > ALONE * compute_s {
            Bottleneck::Disk
        } else if compute_s > ALONE * disk_s {
            Bottleneck::Arithmetic
        } else {
            Bottleneck::Both
        }
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Bottleneck::Disk => "disk",
            Bottleneck::Arithmetic => "arithmetic",
            Bottleneck::Both => "disk and arithmetic",
        }
    }
}

/// A token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds in all.
    pub token_s: f64,
    /// Of them, the drive reads.
    pub disk_s: f64,
    /// Seconds of arithmetic.
    pub compute_s: f64,
    /// What binds.
    pub bottleneck: Bottleneck,
}

impl Prediction {
    /// Predicts a token that finds `hit_rate` of its experts in memory, and of whose other experts the share `guessed` is
    /// known a layer ahead; `None` where it must read and nothing is known of the drive.
    pub fn of(work: &Work, speeds: &Speeds, hit_rate: f64, guessed: f64) -> Option<Prediction> {
        let drive = match speeds.drive {
            Some(drive) => drive,
            None if hit_rate >= NEARLY_ALL => Line { first_s: 0.0, each_s: 0.0 },
            None => return None,
        };
        let Costs { once_s, before_s: before, shared_s: shared, expert_s: expert, quantize_s, reading } = speeds.costs;
        // All experts but the last, which waits for nothing if it is at hand.
        let others = expert * (work.top_k - 1) as f64;
        let chances = missed(work.top_k, hit_rate);
        let (mut layer_s, mut read_s, mut reading_s) = (0.0, 0.0, 0.0);
        for (missed, &chance) in chances.iter().enumerate() {
            let reads = drive.seconds(missed as u64);
            read_s += chance * reads;
            reading_s += chance * (reading.seconds(missed as u64) + quantize_s * missed as f64);
            let ahead = guessed * drive.each_s * missed as f64;
            // How long the drive was free for them depends on the layer before.
            for (missed_before, &chance_before) in chances.iter().enumerate() {
                let free = (others - drive.seconds(missed_before as u64)).max(0.0) + expert + before;
                let left = reads - ahead.min(free);
                layer_s += chance * chance_before * (left.max(shared + others) + expert);
            }
        }
        let layers = work.routed() as f64;
        let (disk_s, compute_s) = (layers * read_s, speeds.costs.token_s(work) + layers * reading_s);
        let token_s = once_s + layers * (before + reading_s + layer_s);
        Some(Prediction { token_s, disk_s, compute_s, bottleneck: Bottleneck::of(disk_s, compute_s) })
    }

    /// Tokens a second.
    pub fn tok_s(&self) -> f64 {
        1.0 / self.token_s.max(f64::MIN_POSITIVE)
    }
}

/// How likely it is that 0, 1, ... of `top_k` experts are not at hand, each with the same chance.
fn missed(top_k: u64, hit_rate: f64) -> Vec<f64> {
    let miss = 1.0 - hit_rate.clamp(0.0, 1.0);
    let mut chances = vec![0.0; top_k as usize + 1];
    chances[0] = 1.0;
    for tried in 1..=top_k as usize {
        for count in (1..=tried).rev() {
            chances[count] = chances[count] * (1.0 - miss) + chances[count - 1] * miss;
        }
        chances[0] *= 1.0 - miss;
    }
    chances
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten routed layers of ten experts each, two a token. How many bytes they have is of no matter here.
    fn work() -> Work {
        let layer = LayerWork { expert: Some(1), ..LayerWork::default() };
        Work { head: 1, vocab: 1, layers: vec![layer; 10], top_k: 2, experts: 100 }
    }

    fn speeds(drive: Option<Line>) -> Speeds {
        Speeds {
            costs: Costs { once_s: 0.5, before_s: 0.05, shared_s: 0.05, expert_s: 0.1, ..Costs::default() },
            drive,
        }
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn with_everything_in_memory_a_token_is_its_arithmetic() {
        let p = Prediction::of(&work(), &speeds(None), 1.0, GUESSED).unwrap();
        // Once 0.5 s; ten layers of 0.05 s of attention, 0.05 s shared and twice 0.1 s.
        assert!(close(p.token_s, 3.5) && close(p.compute_s, 3.5) && p.disk_s == 0.0, "{p:?}");
        assert_eq!(p.bottleneck, Bottleneck::Arithmetic);
        assert!(Prediction::of(&work(), &speeds(None), 1.0 - 1e-9, 0.0).is_some(), "after a long prompt");
        assert!(
            Prediction::of(&work(), &speeds(None), 0.99, 0.0).is_none(),
            "it must read, and nothing is known of the drive"
        );
    }

    #[test]
    fn reads_go_on_beside_what_is_at_hand_and_the_last_expert_comes_after_them() {
        // Both experts missed: 0.5 + 2 * 1 s of reads, then 0.1 s for the last.
        let slow = Line { first_s: 0.5, each_s: 1.0 };
        let p = Prediction::of(&work(), &speeds(Some(slow)), 0.0, 0.0).unwrap();
        assert!(close(p.token_s, 1.0 + 10.0 * 2.6) && close(p.disk_s, 25.0), "{p:?}");
        assert_eq!(p.bottleneck, Bottleneck::Disk);
        // Reads that end before the shared expert and the other one are done cost nothing.
        let quick = Line { first_s: 0.0, each_s: 0.01 };
        let p = Prediction::of(&work(), &speeds(Some(quick)), 0.0, 0.0).unwrap();
        assert!(close(p.token_s, 3.5), "{p:?}");
        // Half of the time an expert is missed: neither with a quarter, one with a half, both with a quarter.
        let p = Prediction::of(&work(), &speeds(Some(slow)), 0.5, 0.0).unwrap();
        assert!(close(p.token_s, 1.0 + 10.0 * (0.25 * 0.25 + 0.5 * 1.6 + 0.25 * 2.6)), "{p:?}");
    }

    #[test]
    fn a_layer_that_reads_computes_longer() {
        let (quick, mut speeds) = (Line { first_s: 0.0, each_s: 0.01 }, speeds(None));
        speeds.drive = Some(quick);
        speeds.costs.reading = Line { first_s: 0.02, each_s: 0.005 };
        // Both experts missed: 0.03 s in each of ten layers, and the reads cost nothing.
        let p = Prediction::of(&work(), &speeds, 0.0, 0.0).unwrap();
        assert!(close(p.token_s, 3.8) && close(p.compute_s, 3.8), "{p:?}");
        // Half of the time an expert is missed: one with a half, both with a quarter.
        let p = Prediction::of(&work(), &speeds, 0.5, 0.0).unwrap();
        assert!(close(p.compute_s, 3.5 + 10.0 * (0.5 * 0.025 + 0.25 * 0.03)), "{p:?}");
        assert!(close(Prediction::of(&work(), &speeds, 1.0, 0.0).unwrap().token_s, 3.5), "none is read");
    }

    #[test]
    fn what_is_guessed_is_read_while_the_drive_has_nothing_else_to_do() {
        // Both experts missed, which reads for 2 s. Between the reads of two layers lie the last expert, 0.1 s, and
        // attention, 0.05 s: the drive reads through them if it knows what.
        let slow = Line { first_s: 0.0, each_s: 1.0 };
        let token = |guessed| Prediction::of(&work(), &speeds(Some(slow)), 0.0, guessed).unwrap().token_s;
        assert!(close(token(0.0), 0.5 + 10.0 * 2.15), "{}", token(0.0));
        assert!(close(token(1.0), 0.5 + 10.0 * 2.0) && close(token(0.5), token(1.0)), "it is never more than the time");
        assert!(close(token(0.05), 0.5 + 10.0 * 2.05), "nor more than what is guessed");
        // Half of the time an expert is missed. A layer with none leaves the drive 0.1 s more to the next.
        let quick = Line { first_s: 0.0, each_s: 0.3 };
        let p = Prediction::of(&work(), &speeds(Some(quick)), 0.5, 1.0).unwrap();
        // Seconds of reads left for none, one and two misses, after a layer with misses, and after one with none.
        let after = |free: f64| {
            let left = |reads: f64| (reads - reads.min(free)).max(0.15);
            0.25 * left(0.0) + 0.5 * left(0.3) + 0.25 * left(0.6)
        };
        let layer = 0.05 + 0.75 * after(0.15) + 0.25 * after(0.25) + 0.1;
        assert!(close(p.token_s, 0.5 + 10.0 * layer), "{p:?}");
    }

    #[test]
    fn quantizing_is_added_to_the_reads_and_shared_by_cores() {
        let predict = |hit_rate, faster| {
            let costs = Costs { quantize_s: 0.5, ..speeds(None).costs };
            let drive = Some(Line { first_s: 0.0, each_s: 1.0 });
            Prediction::of(&work(), &Speeds { costs: costs.faster(faster), drive }, hit_rate, 0.0).unwrap()
        };
        // Both experts missed: 2 s of reads, and 1 s for two.
        let p = predict(0.0, 1.0);
        assert!(close(p.token_s, 0.5 + 10.0 * (0.05 + 2.0 + 1.0 + 0.1)) && close(p.compute_s, 3.5 + 10.0), "{p:?}");
        let p = predict(0.0, 2.0);
        assert!(close(p.token_s, 0.25 + 10.0 * (0.025 + 2.0 + 0.5 + 0.05)) && close(p.compute_s, 1.75 + 5.0), "{p:?}");
        // Half of the experts found: one a layer on average.
        assert!(close(predict(0.5, 1.0).compute_s, 3.5 + 5.0));
        assert!(close(predict(1.0, 1.0).token_s, 3.5), "what is at hand was quantized before");
    }

    #[test]
    fn a_drive_is_fitted_to_one_and_many() {
        let drive = Line::fitted(0.010, 8, 0.045);
        assert!(close(drive.each_s, 0.005) && close(drive.first_s, 0.005) && close(drive.seconds(8), 0.045));
        // Many are read as it was measured, also where one took longer, and where one took less than its share.
        for one_s in [0.001, 0.010, 0.1] {
            let drive = Line::fitted(one_s, 8, 0.016);
            assert!(close(drive.seconds(8), 0.016) && drive.first_s >= 0.0 && drive.each_s >= 0.0, "{drive:?}");
        }
        assert_eq!(Line::fitted(-1.0, 8, -2.0), Line::default());
        assert!(close(drive.faster(2.0).seconds(8), 0.0225) && close(drive.beside(2.0).seconds(8), 0.025));
        // 2.5 GB/s, experts of 5 MB.
        assert!(close(Line::steady(2.5, 5e6).seconds(3), 0.006));
    }

    #[test]
    fn the_chances_of_misses_are_those_of_coins() {
        assert_eq!(missed(3, 0.5), [0.125, 0.375, 0.375, 0.125]);
        assert_eq!(missed(2, 1.0), [1.0, 0.0, 0.0]);
    }
}
