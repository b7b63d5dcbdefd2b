//! How long a token will take, from what it needs and how fast drive and processor are. Pure arithmetic.
//!
//! A routed layer cannot ask for its experts before its attention is done, and what it asks for is computed as it comes:
//! the reads of a layer go on beside its shared expert and the experts that are at hand, and the expert that comes last
//! is computed after them. Then the drive has nothing to do until the next layer asks, unless that layer's experts were
//! guessed: those are read in that time, as far as it goes. Attention to what lies far back is left out, which makes a token
//! slower.

use std::collections::BTreeMap;

use crate::checkpoint::arch::MlpKind;
use crate::checkpoint::convert::Widths;
use crate::checkpoint::{Checkpoint, ExpertSource, Part};
use crate::kernels::{Format, MatrixSpec};

/// Shares of the time at which one side is said to bind alone.
const ALONE: f64 = 1.25;
/// Of the experts that a layer chooses, the share that was guessed a layer ahead: what the model that was trained does, and
/// drawn ones do a little better.
pub const GUESSED: f64 = 0.77;

/// Bytes of weights by format.
pub type Bytes = BTreeMap<Format, u64>;

/// What one token needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Weights that every token passes once: the head, dense layers.
    pub once: Bytes,
    /// Weights before the experts of one routed layer, on average: attention, norms and the router.
    pub before: Bytes,
    /// Weights of the shared expert of one layer.
    pub shared: Bytes,
    /// Weights of one routed expert, on average.
    pub expert: Bytes,
    /// Layers with routed experts.
    pub layers: u64,
    /// Experts that a token uses in each.
    pub top_k: u64,
    /// Experts in all.
    pub experts: u64,
}

impl Work {
    /// The work of a token of `checkpoint`, whose resident weights are held in `widths`.
    pub fn of(checkpoint: &Checkpoint, widths: &Widths) -> Work {
        let arch = &checkpoint.arch;
        let layers = arch.layers.iter().filter(|layer| layer.mlp == MlpKind::Sparse).count() as u64;
        let [mut once, mut before, mut shared, mut expert] = <[Bytes; 4]>::default();
        for tensor in Checkpoint::required(arch) {
            let routed =
                tensor.layer.and_then(|layer| arch.layers.get(layer)).is_some_and(|layer| layer.mlp == MlpKind::Sparse);
            let into = match tensor.part(arch) {
                Part::Mtp | Part::Indexer | Part::Experts => continue,
                // One row of it is looked up.
                Part::Embeddings if !arch.tied_head => continue,
                Part::Shared => &mut shared,
                _ if routed => &mut before,
                _ => &mut once,
            };
            // Opening the model resolved every one of them.
            if let Ok(source) = tensor.source(&checkpoint.tensors) {
                let MatrixSpec { format, rows, cols } = source.spec;
                // And what cannot be held so was refused when memory was divided.
                let held = widths.held(tensor.role, cols, format).unwrap_or(format);
                *into.entry(held).or_default() += held.data_bytes(rows, cols) as u64;
            }
        }
        let mut experts = 0;
        for matrix in checkpoint.routed().flatten().inspect(|_| experts += 1).flat_map(ExpertSource::matrices) {
            *expert.entry(matrix.spec.format).or_default() += matrix.spec.data_bytes() as u64;
        }
        for (bytes, count) in [(&mut before, layers), (&mut shared, layers), (&mut expert, experts)] {
            bytes.values_mut().for_each(|bytes| *bytes /= count.max(1));
        }
        Work { once, before, shared, expert, layers, top_k: arch.moe.top_k as u64, experts }
    }

    /// Formats that are computed with.
    pub fn formats(&self) -> Vec<Format> {
        let mut formats: Vec<Format> =
            [&self.once, &self.before, &self.shared, &self.expert].into_iter().flat_map(Bytes::keys).copied().collect();
        formats.sort_unstable();
        formats.dedup();
        formats
    }
}

/// How fast a drive reads the experts of one layer: so long for the first, so long for each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drive {
    /// Seconds that pass whatever is asked for.
    pub first_s: f64,
    /// Seconds of each expert.
    pub each_s: f64,
}

impl Drive {
    /// A drive that reads `gb_s` whatever is asked for, and experts of so many bytes.
    pub fn steady(gb_s: f64, expert_bytes: f64) -> Drive {
        Drive { first_s: 0.0, each_s: expert_bytes / (gb_s * 1e9) }
    }

    /// From what one expert took, and what `many` at once took. What many took is always met, as a layer with many misses
    /// weighs most; what one took, where the line between them is one that a drive can have: nothing is read in no time,
    /// and the first of many has no start that is owed to it.
    pub fn fitted(one_s: f64, many: u64, many_s: f64) -> Drive {
        if many < 2 {
            return Drive { first_s: 0.0, each_s: one_s };
        }
        let each_s = ((many_s - one_s) / (many - 1) as f64).clamp(0.0, many_s / many as f64);
        Drive { first_s: many_s - many as f64 * each_s, each_s }
    }

    /// This drive, `factor` times as fast.
    pub fn faster(self, factor: f64) -> Drive {
        Drive { first_s: self.first_s / factor, each_s: self.each_s / factor }
    }

    /// Several of this drive, each with all files.
    pub fn beside(self, drives: f64) -> Drive {
        Drive { each_s: self.each_s / drives, ..self }
    }

    fn seconds(self, reads: u64) -> f64 {
        if reads == 0 { 0.0 } else { self.first_s + self.each_s * reads as f64 }
    }
}

/// How fast processor and drive are.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// Bytes of weights of each format that are multiplied in a second.
    pub kernels: BTreeMap<Format, f64>,
    /// The drive; `None` where nothing is known of it.
    pub drive: Option<Drive>,
}

impl Speeds {
    fn compute_s(&self, bytes: &Bytes) -> f64 {
        bytes.iter().map(|(format, &bytes)| bytes as f64 / self.kernels.get(format).copied().unwrap_or(1e9)).sum()
    }
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
            None if hit_rate >= 1.0 => Drive { first_s: 0.0, each_s: 0.0 },
            None => return None,
        };
        let [before, shared, expert] = [&work.before, &work.shared, &work.expert].map(|bytes| speeds.compute_s(bytes));
        // All experts but the last, which waits for nothing if it is at hand.
        let others = expert * (work.top_k - 1) as f64;
        let chances = missed(work.top_k, hit_rate);
        let (mut layer_s, mut read_s) = (0.0, 0.0);
        for (missed, &chance) in chances.iter().enumerate() {
            let reads = drive.seconds(missed as u64);
            read_s += chance * reads;
            let ahead = guessed * drive.each_s * missed as f64;
            // How long the drive was free for them depends on the layer before.
            for (missed_before, &chance_before) in chances.iter().enumerate() {
                let free = (others - drive.seconds(missed_before as u64)).max(0.0) + expert + before;
                let left = reads - ahead.min(free);
                layer_s += chance * chance_before * (left.max(shared + others) + expert);
            }
        }
        let layers = work.layers as f64;
        let once = speeds.compute_s(&work.once);
        let (disk_s, compute_s) = (layers * read_s, once + layers * (before + shared + others + expert));
        let bottleneck = if disk_s > ALONE * compute_s {
            Bottleneck::Disk
        } else if compute_s > ALONE * disk_s {
            Bottleneck::Arithmetic
        } else {
            Bottleneck::Both
        };
        Some(Prediction { token_s: once + layers * (before + layer_s), disk_s, compute_s, bottleneck })
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

/// The share of selections that a cache of `slots` experts finds that counts, from how often each expert was chosen: each
/// selection is held against a cache of those that all others choose most. One that was never seen before is no hit, so
/// that a short history does not promise what it cannot know; and of experts that were chosen exactly as often as one
/// another the one in question comes last, so that it errs low. `None` without selections.
pub fn hit_rate(selections: &[u64], slots: u64) -> Option<f64> {
    let all: u64 = selections.iter().sum();
    if all == 0 {
        return None;
    }
    let mut experts_of: BTreeMap<u64, u64> = BTreeMap::new();
    selections.iter().filter(|&&count| count > 0).for_each(|&count| *experts_of.entry(count).or_default() += 1);
    let mut hits = 0.0;
    let mut hotter = 0;
    for (&count, &experts) in experts_of.iter().rev() {
        // Without this selection the expert stands behind all others of its count, among those with one less.
        let (before, level) = (hotter + experts - 1, experts_of.get(&(count - 1)).copied().unwrap_or(0) + 1);
        let chance = ((slots as f64 - before as f64) / level as f64).clamp(0.0, 1.0);
        if count > 1 {
            hits += chance * (count * experts) as f64;
        }
        hotter += experts;
    }
    Some(hits / all as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn work() -> Work {
        Work {
            once: Bytes::from([(Format::Int8Row, 10_000)]),
            before: Bytes::from([(Format::Int8Row, 1_000)]),
            shared: Bytes::from([(Format::Int8Row, 1_000)]),
            expert: Bytes::from([(Format::Int4Row, 1_000)]),
            layers: 10,
            top_k: 2,
            experts: 100,
        }
    }

    /// A second for 20,000 bytes of int8, and for 10,000 of int4.
    fn speeds(drive: Option<Drive>) -> Speeds {
        Speeds { kernels: BTreeMap::from([(Format::Int8Row, 20_000.0), (Format::Int4Row, 10_000.0)]), drive }
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
        assert!(
            Prediction::of(&work(), &speeds(None), 0.99, 0.0).is_none(),
            "it must read, and nothing is known of the drive"
        );
    }

    #[test]
    fn reads_go_on_beside_what_is_at_hand_and_the_last_expert_comes_after_them() {
        // Both experts missed: 0.5 + 2 * 1 s of reads, then 0.1 s for the last.
        let slow = Drive { first_s: 0.5, each_s: 1.0 };
        let p = Prediction::of(&work(), &speeds(Some(slow)), 0.0, 0.0).unwrap();
        assert!(close(p.token_s, 1.0 + 10.0 * 2.6) && close(p.disk_s, 25.0), "{p:?}");
        assert_eq!(p.bottleneck, Bottleneck::Disk);
        // Reads that end before the shared expert and the other one are done cost nothing.
        let quick = Drive { first_s: 0.0, each_s: 0.01 };
        let p = Prediction::of(&work(), &speeds(Some(quick)), 0.0, 0.0).unwrap();
        assert!(close(p.token_s, 3.5), "{p:?}");
        // Half of the time an expert is missed: neither with a quarter, one with a half, both with a quarter.
        let p = Prediction::of(&work(), &speeds(Some(slow)), 0.5, 0.0).unwrap();
        assert!(close(p.token_s, 1.0 + 10.0 * (0.25 * 0.25 + 0.5 * 1.6 + 0.25 * 2.6)), "{p:?}");
    }

    #[test]
    fn what_is_guessed_is_read_while_the_drive_has_nothing_else_to_do() {
        // Both experts missed, which reads for 2 s. Between the reads of two layers lie the last expert, 0.1 s, and
        // attention, 0.05 s: the drive reads through them if it knows what.
        let slow = Drive { first_s: 0.0, each_s: 1.0 };
        let token = |guessed| Prediction::of(&work(), &speeds(Some(slow)), 0.0, guessed).unwrap().token_s;
        assert!(close(token(0.0), 0.5 + 10.0 * 2.15), "{}", token(0.0));
        assert!(close(token(1.0), 0.5 + 10.0 * 2.0) && close(token(0.5), token(1.0)), "it is never more than the time");
        assert!(close(token(0.05), 0.5 + 10.0 * 2.05), "nor more than what is guessed");
        // Half of the time an expert is missed. A layer with none leaves the drive 0.1 s more to the next.
        let quick = Drive { first_s: 0.0, each_s: 0.3 };
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
    fn a_drive_is_fitted_to_one_and_many() {
        let drive = Drive::fitted(0.010, 8, 0.045);
        assert!(close(drive.each_s, 0.005) && close(drive.first_s, 0.005) && close(drive.seconds(8), 0.045));
        // Many are read as it was measured, also where one took longer, and where one took less than its share.
        for one_s in [0.001, 0.010, 0.1] {
            let drive = Drive::fitted(one_s, 8, 0.016);
            assert!(close(drive.seconds(8), 0.016) && drive.first_s >= 0.0 && drive.each_s >= 0.0, "{drive:?}");
        }
        assert!(close(drive.faster(2.0).seconds(8), 0.0225) && close(drive.beside(2.0).seconds(8), 0.025));
        // 2.5 GB/s, experts of 5 MB.
        assert!(close(Drive::steady(2.5, 5e6).seconds(3), 0.006));
    }

    #[test]
    fn the_chances_of_misses_are_those_of_coins() {
        assert_eq!(missed(3, 0.5), [0.125, 0.375, 0.375, 0.125]);
        assert_eq!(missed(2, 1.0), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_history_promises_what_was_seen_more_than_once() {
        assert_eq!(hit_rate(&[0, 0], 2), None);
        // Every expert once: whatever the cache, none would have been there.
        assert_eq!(hit_rate(&[1, 1, 1, 1], 4), Some(0.0));
        // One slot: all ten find the first, held against the other nine; what came once finds nothing.
        assert_eq!(hit_rate(&[10, 1, 1], 1), Some(10.0 / 12.0));
        // Two experts of five and one slot: without the selection in question the other one is ahead.
        assert_eq!(hit_rate(&[5, 5], 1), Some(0.0));
        assert_eq!(hit_rate(&[5, 5], 2), Some(1.0));
        // No better than the share of the hottest.
        let history: Vec<u64> = (1..=100).collect();
        for slots in [1, 10, 50, 99, 100] {
            let best: u64 = history.iter().rev().take(slots).sum();
            let found = hit_rate(&history, slots as u64).unwrap();
            assert!(found <= best as f64 / 5050.0 + 1e-12 && found > best as f64 / 5050.0 - 0.05, "{slots}: {found}");
        }
    }
    proptest! {
        /// Selections drawn at known rates: what is promised is what the experts that were chosen most will be chosen.
        #[test]
        fn a_long_history_promises_what_a_cache_of_the_hottest_will_find(
            seed in any::<u64>(), experts in 20usize..200, skew in 0.0f64..1.5, share in 0.1f64..0.9,
        ) {
            let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-skew)).collect();
            let sum: f64 = weights.iter().sum();
            let (mut state, mut counts) = (seed | 1, vec![0u64; experts]);
            for _ in 0..200 * experts {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let mut at = (state >> 11) as f64 / (1u64 << 53) as f64 * sum;
                let drawn = weights.iter().position(|weight| { at -= weight; at < 0.0 });
                counts[drawn.unwrap_or(experts - 1)] += 1;
            }
            let slots = (share * experts as f64) as usize;
            let mut hottest: Vec<usize> = (0..experts).collect();
            hottest.sort_by_key(|&expert| std::cmp::Reverse(counts[expert]));
            let finds = hottest[..slots].iter().map(|&expert| weights[expert]).sum::<f64>() / sum;
            let promised = hit_rate(&counts, slots as u64).unwrap();
            prop_assert!((promised - finds).abs() < 0.02 + 1.5 / experts as f64, "{promised} promised, {finds} found");
        }
    }
}
