//! What a token passes, and from how long a slice of it took, how long all of it takes.

use millstream_io::measure::median;

use super::Line;
use crate::checkpoint::convert::Widths;
use crate::checkpoint::required::Role;
use crate::checkpoint::{Checkpoint, ExpertSource, Part};
use crate::kernels::MatrixSpec;

/// Head rows are timed up to so many bytes of them; the rest takes as long in proportion.
const HEAD_BYTES: u64 = 16 << 20;
/// Rows that share a scale in the format that has most of them do so: a matrix is cut between them.
const HEAD_ROWS_STEP: u64 = 128;

/// What one token needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Bytes of the head's weights, and its rows.
    pub head: u64,
    /// Rows of the head.
    pub vocab: u64,
    /// Weights of each layer.
    pub layers: Vec<LayerWork>,
    /// Experts that a token uses in each routed layer.
    pub top_k: u64,
    /// Experts in all.
    pub experts: u64,
}

/// Bytes of weights that a token passes in one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerWork {
    /// Attention.
    pub attention: u64,
    /// The shared expert, or the feed-forward of a layer without experts.
    pub mlp: u64,
    /// A routed expert, on average; `None` where there are none.
    pub expert: Option<u64>,
}

impl Work {
    /// The work of a token of `checkpoint`, whose weights are held in `widths`.
    pub fn of(checkpoint: &Checkpoint, widths: &Widths) -> Work {
        let arch = &checkpoint.arch;
        let (mut layers, mut head) = (vec![LayerWork::default(); arch.layers.len()], 0);
        for tensor in Checkpoint::required(arch) {
            let layer = tensor.layer.and_then(|layer| layers.get_mut(layer));
            let into = match (tensor.part(arch), layer) {
                (Part::Attention, Some(layer)) => &mut layer.attention,
                (Part::Shared | Part::Dense, Some(layer)) => &mut layer.mlp,
                (Part::Head, None) => &mut head,
                (Part::Embeddings, None) if arch.tied_head => &mut head,
                // One row of the embeddings is looked up; norms and routers are small, and timed where they are.
                _ => continue,
            };
            // Opening the model resolved every one of them.
            if let Ok(source) = tensor.source(&checkpoint.tensors) {
                let MatrixSpec { format, rows, cols } = source.spec;
                // And what cannot be held so was refused when memory was divided.
                let held = widths.held(tensor.role, cols, format).unwrap_or(format);
                *into += held.data_bytes(rows, cols) as u64;
            }
        }
        let mut experts = 0;
        for (layer, sources) in layers.iter_mut().zip(&checkpoint.experts.layers) {
            let Some(sources) = sources else { continue };
            experts += sources.len() as u64;
            // As it is computed with: what it takes to read it is another thing.
            let held = |source: &ExpertSource| {
                let stored = || source.matrices().map(|matrix| matrix.spec);
                source.held(Role::Expert, widths).unwrap_or_default().unwrap_or_else(stored)
            };
            let bytes: u64 = sources.iter().flat_map(held).map(|spec| spec.data_bytes() as u64).sum();
            layer.expert = Some(bytes / sources.len().max(1) as u64);
        }
        Work { head, vocab: arch.vocab as u64, layers, top_k: arch.moe.top_k as u64, experts }
    }

    /// Layers with routed experts.
    pub fn routed(&self) -> u64 {
        self.layers.iter().filter(|layer| layer.expert.is_some()).count() as u64
    }

    /// Experts that a token uses.
    pub fn used(&self) -> u64 {
        self.routed() * self.top_k
    }

    /// Bytes of weights that a token passes.
    pub fn bytes(&self) -> u64 {
        self.head + self.layers.iter().map(|layer| self.layer_bytes(layer)).sum::<u64>()
    }

    fn layer_bytes(&self, layer: &LayerWork) -> u64 {
        layer.attention + layer.mlp + layer.expert.map_or(0, |expert| self.top_k * expert)
    }

    /// The sum of `bytes` over those layers of `layers` that have routed experts, or have none.
    fn sum(&self, layers: &[usize], routed: bool, bytes: impl Fn(&LayerWork) -> u64) -> f64 {
        let layers = layers.iter().map(|&layer| &self.layers[layer]);
        layers.filter(|layer| layer.expert.is_some() == routed).map(bytes).sum::<u64>() as f64
    }
}

/// A part of a model that stands for it where a step is timed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Its layers, in the model's order.
    pub layers: Vec<usize>,
    /// Rows of embedding and head.
    pub vocab: usize,
    /// Experts that a step uses in each routed layer.
    pub top_k: usize,
    /// Bytes of weights after which a step may meet the same ones again.
    pub least: u64,
}

impl Slice {
    /// The first layer without experts and as many with them as it takes to pass `least` bytes in a step, so that a step
    /// finds in the processor's caches as little as one of the whole model does: all of them where that is little itself.
    ///
    /// Where nothing is read, a few experts stand for those that a token uses in a layer: as many as are `least` bytes too.
    pub fn of(work: &Work, least: u64, reading: bool) -> Slice {
        let is_routed = |&layer: &usize| work.layers[layer].expert.is_some();
        let (routed, dense): (Vec<usize>, Vec<usize>) = (0..work.layers.len()).partition(is_routed);
        let rows = (work.vocab * HEAD_BYTES / work.head.max(1)).next_multiple_of(HEAD_ROWS_STEP).min(work.vocab);
        let mut layers: Vec<usize> = dense.into_iter().take(1).collect();
        let mut bytes =
            work.head.min(HEAD_BYTES) + layers.iter().map(|&at| work.layer_bytes(&work.layers[at])).sum::<u64>();
        for layer in routed {
            layers.push(layer);
            bytes += work.layer_bytes(&work.layers[layer]);
            if bytes >= least {
                break;
            }
        }
        layers.sort_unstable();
        let each: u64 = layers.iter().filter_map(|&layer| work.layers[layer].expert).sum();
        let top_k = if reading { work.top_k } else { least.div_ceil(each.max(1)).clamp(1, work.top_k) };
        Slice { layers, vocab: rows as usize, top_k: top_k as usize, least }
    }

    /// Its routed layers.
    pub fn routed(&self, work: &Work) -> f64 {
        self.layers.iter().filter(|&&layer| work.layers[layer].expert.is_some()).count() as f64
    }
}

/// Seconds of arithmetic in one step of a slice, added up over its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// Embedding and head.
    pub head: f64,
    /// Attention, of layers with experts and without.
    pub attention: f64,
    /// Feed-forwards of layers without experts.
    pub dense: f64,
    /// Choosing experts, looking them up, guessing others, and adding up what they give.
    pub choice: f64,
    /// Shared experts.
    pub shared: f64,
    /// Routed experts.
    pub experts: f64,
    /// Quantizing those that were read.
    pub quantize: f64,
}

impl Times {
    /// The median of each, over several steps.
    pub fn median(steps: &[Times]) -> Times {
        let of = |time: fn(&Times) -> f64| median(&steps.iter().map(time).collect::<Vec<_>>()).unwrap_or(0.0);
        Times {
            head: of(|t| t.head),
            attention: of(|t| t.attention),
            dense: of(|t| t.dense),
            choice: of(|t| t.choice),
            shared: of(|t| t.shared),
            experts: of(|t| t.experts),
            quantize: of(|t| t.quantize),
        }
    }

    /// All of it.
    pub fn sum(&self) -> f64 {
        self.head + self.attention + self.dense + self.choice + self.shared + self.experts + self.quantize
    }
}

/// Seconds of arithmetic of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// What every token passes once: embedding, head, layers without experts.
    pub once_s: f64,
    /// Of one routed layer, what does not go on beside its reads: attention, and the choice of experts.
    pub before_s: f64,
    /// The shared expert of one layer.
    pub shared_s: f64,
    /// One routed expert.
    pub expert_s: f64,
    /// What an expert that is read takes besides, where it is quantized before it is computed with.
    pub quantize_s: f64,
    /// What a layer that must read takes longer: to hand reads over and take them back, and to wake threads that had
    /// nothing to do.
    pub reading: Line,
}

impl Costs {
    /// What a token of `work` costs where a step of `slice` takes `times`. Layers that are wider than those of the slice,
    /// or stored in more bytes, take longer in proportion.
    pub fn of(work: &Work, slice: &Slice, times: &Times) -> Costs {
        let all: Vec<usize> = (0..work.layers.len()).collect();
        let sum = |layers: &[usize], routed, bytes: fn(&LayerWork) -> u64| work.sum(layers, routed, bytes);
        // Seconds of bytes of the whole model, from how long those of the slice took.
        let of = |seconds: f64, model: f64, sliced: f64| if sliced > 0.0 { seconds * model / sliced } else { 0.0 };
        let [attention, mlp, expert]: [fn(&LayerWork) -> u64; 3] =
            [|l| l.attention, |l| l.mlp, |l| l.expert.unwrap_or(0)];
        let attended = sum(&slice.layers, true, attention) + sum(&slice.layers, false, attention);
        let (routed, sliced) = (work.routed() as f64, slice.routed(work));
        let once_s = times.head * work.vocab as f64 / slice.vocab as f64
            + of(times.attention, sum(&all, false, attention), attended)
            + of(times.dense, sum(&all, false, mlp), sum(&slice.layers, false, mlp));
        let before_s = of(times.attention, sum(&all, true, attention), attended) / routed + times.choice / sliced;
        let shared_s = of(times.shared, sum(&all, true, mlp), sum(&slice.layers, true, mlp)) / routed;
        let experts_s = of(times.experts, sum(&all, true, expert), sum(&slice.layers, true, expert));
        let expert_s = experts_s / (routed * slice.top_k as f64);
        Costs { once_s, before_s, shared_s, expert_s, ..Costs::default() }
    }

    /// The same, with what is seen in steps of `slice` only where each routed layer reads one expert, or `many`: such
    /// steps take `one` and `all`, and those that read nothing `none`.
    pub fn with_reads(
        self,
        work: &Work,
        slice: &Slice,
        none: &Times,
        one: &Times,
        (many, all): (u64, &Times),
    ) -> Costs {
        let layers = slice.routed(work);
        let more = |times: &Times| (times.sum() - times.quantize - none.sum()) / layers;
        let quantize_s = all.quantize / (layers * many as f64);
        Costs { quantize_s, reading: Line::fitted(more(one), many, more(all)), ..self }
    }

    /// The same, with arithmetic `factor` times as fast.
    pub fn faster(self, factor: f64) -> Costs {
        let Costs { once_s, before_s, shared_s, expert_s, quantize_s, reading } = self;
        let parts = [once_s, before_s, shared_s, expert_s, quantize_s];
        let [once_s, before_s, shared_s, expert_s, quantize_s] = parts.map(|s| s / factor);
        // More threads hand over no faster.
        Costs { once_s, before_s, shared_s, expert_s, quantize_s, reading }
    }

    /// Seconds of a token of `work` that finds all its experts.
    pub fn token_s(&self, work: &Work) -> f64 {
        let layer = self.before_s + self.shared_s + work.top_k as f64 * self.expert_s;
        self.once_s + work.routed() as f64 * layer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    fn dense(attention: u64, mlp: u64) -> LayerWork {
        LayerWork { attention, mlp, expert: None }
    }

    fn routed(attention: u64, mlp: u64, expert: u64) -> LayerWork {
        LayerWork { attention, mlp, expert: Some(expert) }
    }

    /// Two layers of 10 + 20 MB, then three of 10 + 5 MB and two experts of 5 MB.
    fn work() -> Work {
        let layers = [vec![dense(10 * MB, 20 * MB); 2], vec![routed(10 * MB, 5 * MB, 5 * MB); 3]].concat();
        Work { head: 16 * MB, vocab: 1000, layers, top_k: 2, experts: 12 }
    }

    #[test]
    fn a_token_passes_what_its_layers_hold_and_as_many_experts_as_it_uses() {
        assert_eq!((work().routed(), work().used()), (3, 6));
        // 16, twice 30, three times 10 + 5 + 2 * 5.
        assert_eq!(work().bytes(), (16 + 60 + 75) * MB);
    }

    #[test]
    fn a_slice_is_as_large_as_caches_are_or_all_that_there_is() {
        let of = |least| Slice::of(&work(), least, true);
        let slice = |layers: &[usize], least| Slice { layers: layers.to_vec(), vocab: 1000, top_k: 2, least };
        // Head and first layer are 46 MB, each routed layer 25 more.
        assert_eq!(of(64 * MB), slice(&[0, 2], 64 * MB));
        assert_eq!(of(71 * MB), slice(&[0, 2], 71 * MB));
        assert_eq!(of(72 * MB), slice(&[0, 2, 3], 72 * MB));
        assert_eq!(of(1 << 40), slice(&[0, 2, 3, 4], 1 << 40));
        // Of a head of 1 GB one part in 64 of the rows, in whole steps.
        let large = Work { head: 1024 * MB, vocab: 100_000, ..work() };
        assert_eq!(Slice::of(&large, 64 * MB, true), Slice { vocab: 1_664, ..slice(&[0, 2], 64 * MB) });
        // Of eight experts of 5 MB in one layer, as many as are enough by themselves where nothing is read.
        let many = Work { top_k: 8, ..work() };
        let experts = [(4 * MB, 1), (6 * MB, 2), (31 * MB, 7), (80 * MB, 8)];
        for (least, top_k) in experts {
            assert_eq!(Slice::of(&many, least, false).top_k, top_k, "{least}");
            assert_eq!(Slice::of(&many, least, true).top_k, 8);
        }
    }

    #[test]
    fn what_a_slice_took_stands_for_the_whole() {
        // A head of ten rows of forty, a dense layer of three, two routed layers of four; the third has attention twice as
        // wide as the other ones, the last an expert twice as large.
        let layers = vec![
            dense(2, 6),
            dense(2, 6),
            dense(2, 3),
            routed(2, 4, 3),
            routed(2, 4, 3),
            routed(2, 4, 3),
            routed(4, 4, 6),
        ];
        let work = Work { head: 40, vocab: 40, layers, top_k: 2, experts: 32 };
        let slice = Slice { layers: vec![0, 3, 4], vocab: 10, top_k: 2, least: 1 };
        let times = Times {
            head: 1.0,
            attention: 6.0,
            dense: 3.0,
            choice: 4.0,
            shared: 2.0,
            experts: 12.0,
            ..Times::default()
        };
        let costs = Costs::of(&work, &slice, &times);
        // A second for each byte of attention: 6 in dense layers, 10 in four routed ones. Half a second for each byte of a
        // dense feed-forward: 15. A second for each byte of an expert that is used, of which one has 3.75 on average.
        let expected =
            Costs { once_s: 4.0 + 6.0 + 7.5, before_s: 2.5 + 2.0, shared_s: 1.0, expert_s: 3.75, ..Costs::default() };
        assert_eq!(costs, expected);
        // A layer's one expert of the two that a token uses, in half the time.
        let half = Times { experts: 6.0, ..times };
        assert_eq!(Costs::of(&work, &Slice { top_k: 1, ..slice.clone() }, &half), expected);
        assert_eq!(costs.token_s(&work), 17.5 + 4.0 * (4.5 + 1.0 + 2.0 * 3.75));
        assert_eq!(costs.faster(2.0).token_s(&work), costs.token_s(&work) / 2.0);
        // Steps whose two layers read: one expert each takes 0.5 s more to hand over and 0.75 s to quantize, two take 0.7 s
        // and 1.5 s. Twice the threads quantize twice as fast, and hand over no faster.
        let one = Times { choice: 4.25, shared: 2.25, quantize: 0.75, ..times };
        let two = Times { experts: 12.7, quantize: 1.5, ..times };
        let reads = costs.with_reads(&work, &slice, &times, &one, (2, &two)).faster(2.0);
        assert!((reads.quantize_s - 0.1875).abs() < 1e-9, "{reads:?}");
        assert!((reads.reading.each_s - 0.1).abs() < 1e-9 && (reads.reading.first_s - 0.15).abs() < 1e-9, "{reads:?}");
    }

    #[test]
    fn a_median_is_taken_of_each_part() {
        let step = |head, experts| Times { head, experts, ..Times::default() };
        let median = Times::median(&[step(1.0, 9.0), step(5.0, 2.0), step(2.0, 3.0)]);
        assert_eq!((median, median.sum()), (step(2.0, 3.0), 5.0));
    }
}
