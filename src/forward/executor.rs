//! Where the routed experts of a layer are computed: a trait, and the streamed implementation behind it.

use super::state::{MlpScratch, quantized};
use super::{ForwardError, Guess};
use crate::checkpoint::arch::Arch;
use crate::kernels::{Input, Kernels, Quantized, Requantizer, Unfit};
use crate::meter::{Meter, Stage};
use crate::ops::Compute;
use crate::ops::room::Room;
use crate::store::{ExpertStore, ExpertWeights};

/// The routed experts of one layer for a batch of rows.
pub struct ExpertCall<'a> {
    /// Kernels, threads, precision.
    pub compute: &'a Compute,
    /// Model layer.
    pub layer: usize,
    /// Experts a row.
    pub top_k: usize,
    /// `[rows, hidden]`, already quantized where activations are int8.
    pub input: Input<'a>,
    /// `[rows, top_k]`, each row's ids ascending and distinct.
    pub ids: &'a [u16],
    /// `[rows, top_k]`.
    pub gates: &'a [f32],
    /// `[rows, hidden]`: for each row the sum over its slots, in slot order, of gate times expert output.
    pub out: &'a mut [f32],
}

/// Computes routed experts, on this machine or another.
pub trait ExpertExecutor {
    /// Begins to get what `call` needs. Arithmetic that needs no routed expert has its place between this and
    /// [`ExpertExecutor::serve`].
    fn request(&mut self, call: &ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError>;

    /// Layers ahead, from the next one on, of whose experts a guess is of use; 0 for none.
    fn hints(&self) -> usize {
        0
    }

    /// Told between the two what a later layer will probably ask for. Changes no result.
    fn hint(&mut self, guess: &Guess<'_>) {
        let _ = guess;
    }

    /// Computes the call that was requested last.
    fn serve(&mut self, call: ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError>;
}

/// Experts streamed from disk through an [`ExpertStore`].
pub struct Streamed {
    /// The store; the engine reads its counters.
    pub store: ExpertStore,
    /// Whether arithmetic and reads may overlap. Without, a layer reads everything it needs, then computes.
    pub pipeline: bool,
    /// Whether guesses are read ahead.
    pub prefetch: bool,
    /// Layers ahead that they are read for.
    pub ahead: usize,
    scratch: ExpertScratch,
}

/// Buffers of [`Streamed`].
pub struct ExpertScratch {
    /// `row * top_k + slot`, sorted by the expert chosen there.
    order: Vec<u32>,
    /// Distinct experts of the call, ascending.
    union: Vec<u16>,
    /// Where each expert's run in `order` starts; one more at the end.
    starts: Vec<u32>,
    gathered: Vec<f32>,
    output: Vec<f32>,
    /// `[rows, top_k, hidden]`: outputs wait here until all have come, so that they are summed in slot order.
    slots: Vec<f32>,
    quantized: Quantized,
    mlp: MlpScratch,
    /// For experts that are quantized on their way.
    requantizer: Requantizer,
}

impl ExpertScratch {
    /// Buffers for calls of up to `rows` rows, counted in `room`; `requantized` floats are for experts that are quantized
    /// on their way.
    pub fn new(k: &Kernels, arch: &Arch, rows: usize, requantized: usize, room: &mut Room) -> ExpertScratch {
        let (hidden, moe) = (arch.hidden, &arch.moe);
        ExpertScratch {
            order: room.empty(rows * moe.top_k),
            union: room.empty(moe.experts),
            starts: room.empty(moe.experts + 1),
            gathered: room.floats(rows * hidden),
            output: room.floats(rows * hidden),
            slots: room.floats(rows * moe.top_k * hidden),
            quantized: quantized(k, rows, hidden, room),
            mlp: MlpScratch::new(k, rows, moe.width, room),
            requantizer: Requantizer::new(room.floats(requantized)),
        }
    }

    /// Groups the picks by expert.
    fn group(&mut self, ids: &[u16]) {
        self.order.clear();
        self.order.extend(0..ids.len() as u32);
        self.order.sort_unstable_by_key(|&at| (ids[at as usize], at));
        self.union.clear();
        self.starts.clear();
        for (i, &at) in self.order.iter().enumerate() {
            let id = ids[at as usize];
            if self.union.last() != Some(&id) {
                self.union.push(id);
                self.starts.push(i as u32);
            }
        }
        self.starts.push(ids.len() as u32);
    }

    /// One expert for every row that chose it.
    fn compute(&mut self, call: &ExpertCall<'_>, expert: u16, w: &ExpertWeights<'_>) {
        let Ok(place) = self.union.binary_search(&expert) else {
            unreachable!("expert {expert} was lent but not asked for")
        };
        let run = &self.order[self.starts[place] as usize..self.starts[place + 1] as usize];
        let (hidden, n) = (call.input.cols, run.len());
        let rows = run.iter().map(|&at| at as usize / call.top_k);
        for (gathered, row) in self.gathered.chunks_exact_mut(hidden).zip(rows.clone()) {
            gathered.copy_from_slice(&call.input.values[row * hidden..][..hidden]);
        }
        let quantized = call.input.quantized.map(|all| {
            self.quantized.gather(all, rows);
            &self.quantized
        });
        let input = Input { rows: n, cols: hidden, values: &self.gathered[..n * hidden], quantized };
        self.mlp.gated(call.compute, &w.gate, &w.up, &w.down, &input, &mut self.output[..n * hidden]);
        for (output, &at) in self.output.chunks_exact(hidden).zip(run) {
            let gate = call.gates[at as usize];
            let slot = &mut self.slots[at as usize * hidden..][..hidden];
            for (s, &o) in slot.iter_mut().zip(output) {
                *s = gate * o;
            }
        }
    }

    /// Sums every row's slots in order.
    fn reduce(&self, call: &mut ExpertCall<'_>) {
        let hidden = call.input.cols;
        for (out, slots) in call.out.chunks_exact_mut(hidden).zip(self.slots.chunks_exact(call.top_k * hidden)) {
            out.fill(0.0);
            slots.chunks_exact(hidden).for_each(|slot| super::add(out, slot));
        }
    }
}

impl Streamed {
    /// Joins a store with its buffers.
    pub fn new(store: ExpertStore, scratch: ExpertScratch) -> Streamed {
        Streamed { store, pipeline: true, prefetch: false, ahead: 1, scratch }
    }
}

impl ExpertExecutor for Streamed {
    fn request(&mut self, call: &ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        self.scratch.group(call.ids);
        let ExpertScratch { union, starts, .. } = &self.scratch;
        let rows = call.ids.len() / call.top_k;
        self.store.request_for(rows as u32, call.layer, union, |i| starts[i + 1] - starts[i])?;
        meter.lap(Stage::Request);
        self.wait_unless_overlapped(meter)
    }

    fn hints(&self) -> usize {
        if self.prefetch { self.ahead } else { 0 }
    }

    fn hint(&mut self, guess: &Guess<'_>) {
        self.store.hint(guess.layer, guess.experts);
    }

    fn serve(&mut self, mut call: ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        loop {
            self.wait_unless_overlapped(meter)?;
            let Streamed { store, scratch, .. } = self;
            let at_once = store.poll()?;
            let Some(lease) = store.next_ready()? else { break };
            meter.lap(if at_once { Stage::Request } else { Stage::Wait });
            let (Compute { kernels, team, .. }, requantizer) = (call.compute, &mut scratch.requantizer);
            let quantized = store.quantize(&lease, |weights, held, data, scales| {
                let made = requantizer.run(kernels, team, weights, held.format, data, scales);
                made.map_err(|Unfit { row, col, value }| (row, col, value))
            })?;
            if quantized {
                meter.lap(Stage::Quantize);
            }
            scratch.compute(&call, lease.expert(), &store.weights(&lease));
            store.release(lease)?;
            meter.lap(Stage::Experts);
        }
        self.scratch.reduce(&mut call);
        Ok(())
    }
}

impl Streamed {
    /// The serial run of the same graph: nothing is computed while a read of the layer is under way.
    fn wait_unless_overlapped(&mut self, meter: &mut Meter) -> Result<(), ForwardError> {
        if !self.pipeline && self.store.is_reading() {
            self.store.wait_for_all()?;
            meter.lap(Stage::Wait);
        }
        Ok(())
    }
}
