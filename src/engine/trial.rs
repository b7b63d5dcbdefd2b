//! Decode steps of a slice of a model, to be timed before the model is loaded.
//!
//! A slice has few of the model's layers, and zeros for the weights that would be resident; its experts are the model's,
//! read from its files by what reads them in a run. Arithmetic takes as long over zeros as over weights, and goes through the
//! same code, norms and calls and all, as it does in a run; reads come in the pattern of a run, beside arithmetic. The
//! router's choice would be no choice, so the experts of a step are drawn: as many as are asked for from those that the
//! cache does not have. And so are guesses of them, as many of them right as in a run.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::measure::shuffled;
use millstream_io::{Arena, DeviceConfig, FileSet, SlabPool, open_device, settle};

use super::predict::{GUESSED, Slice, Times};
use super::{EngineConfig, EngineError, Switch, context_of, experts, forms_of, sparse_of, spread};
use crate::checkpoint::arch::MoeArch;
use crate::checkpoint::{Arch, Checkpoint, ExpertIndex, ExpertSource};
use crate::forward::{
    self, ExpertCall, ExpertExecutor, ExpertScratch, Form, ForwardError, Guess, KvCache, Logits, Model, State, Step,
    Streamed, rope_of,
};
use crate::kernels::Kernels;
use crate::meter::{Meter, Stage};
use crate::model::resident::Blank;
use crate::ops::Compute;
use crate::ops::room::Room;
use crate::store::{ExpertStore, ExpertTable, Notice, SlabSize, Watch};

/// Positions that a step finds in its context, where the model has as many: those of a short prompt and an answer begun.
const POSITIONS: usize = 128;

/// Selections that leave no doubt that an expert is worth keeping.
const OFTEN: u64 = 1 << 20;

/// See the module's description.
pub struct Trial {
    model: Model,
    experts: Drawn,
    kv: KvCache,
    state: State,
    meter: Meter,
    form: Form,
    positions: usize,
    files: Arc<FileSet>,
    nodes: Vec<Vec<usize>>,
}

/// What a step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Arithmetic.
    pub times: Times,
    /// Seconds in all.
    pub wall_s: f64,
    /// Experts that were read in each routed layer, on average.
    pub reads: f64,
    /// Bytes that were read, of each routed layer on average.
    pub bytes: f64,
    /// Seconds during which a read was under way, of each routed layer on average.
    pub busy_s: f64,
}

impl Trial {
    /// Makes `slice` of a model, whose files are `files`, ready for steps; `reading` says whether any but the first is to
    /// read.
    pub fn open(
        checkpoint: &Checkpoint,
        files: &Arc<FileSet>,
        config: &EngineConfig,
        slice: &Slice,
        reading: bool,
    ) -> Result<Trial, EngineError> {
        let context = context_of(config, &checkpoint.arch)?;
        let sparse = sparse_of(config, &checkpoint.arch, context)?;
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa).ok_or(EngineError::NoIsa(isa))?,
            None => Kernels::best(),
        };
        let (_, kind) = settle(config.io, config.device)?;
        let least = usize::try_from(slice.least).unwrap_or(usize::MAX);
        let blank = Blank::slice(checkpoint, files, &slice.layers, slice.vocab, &config.widths, least)?;
        let arch = sliced(&checkpoint.arch, slice);
        let (table, pool, drawn) = slabs(checkpoint, config, slice, files, blank.bytes() as u64, reading)?;
        let device = DeviceConfig {
            kind,
            depth_bytes: config.depth.bytes(pool.largest_slab_bytes()),
            chunk_bytes: config.chunk_bytes,
            ..DeviceConfig::default()
        };
        let device = open_device(&device, Arc::clone(files), &pool)?;
        let scales = table.kept_scales().bytes;
        let mut store = ExpertStore::new(table, device, pool);
        if scales > 0 {
            store.set_scales(Arena::new(scales)?);
        }
        store.set_policy(config.policy);
        store.remember(chosen(&drawn, arch.moe.experts), arch.moe.top_k, Some(true));
        // What no drive answers ends the trial, and no more than that.
        let watch: Watch = Box::new(|what| match what {
            Notice::Hung(_) => ControlFlow::Break(()),
            Notice::Waiting | Notice::Answered { .. } => ControlFlow::Continue(()),
        });
        store.set_watch(watch, Arc::clone(files));
        let (guess, top_k) = (config.switches.guess, arch.moe.top_k);
        store.allow_guesses((1 + guess.layers) * top_k, top_k);
        let room = &mut Room::default();
        let requantized = experts::check(checkpoint, config)?;
        let mut inner = Streamed::new(store, ExpertScratch::new(kernels, &arch, 1, requantized, room));
        inner.pipeline = config.switches.pipeline != Switch::Off;
        inner.prefetch = config.switches.guesses().is_some();
        inner.ahead = guess.layers;
        let (_, form) = forms_of(config.attention, &arch)?;
        let positions = POSITIONS.min(context - 1);
        let compute =
            Compute { kernels, team: spread::team(config.threads, &config.nodes), activations: config.activations };
        let mut kv = KvCache::new(&arch, positions + 1, sparse, config.kv_bits);
        kv.advance(positions);
        Ok(Trial {
            state: State::new(kernels, &arch, 1, 1, positions + 1, config.threads, form == Form::Explicit, room),
            experts: Drawn { inner, layers: drawn },
            kv,
            meter: Meter::new(),
            form,
            positions,
            files: Arc::clone(files),
            nodes: config.nodes.clone(),
            model: Model {
                rope: rope_of(&arch, positions + 1, room),
                compute,
                resident: blank.make()?,
                sparse,
                guess_from: guess.from,
                arch,
            },
        })
    }

    /// The files of the model.
    pub fn files(&self) -> &FileSet {
        &self.files
    }

    /// Ends the trial. Reads that no drive answered are left to the end of the process: dropping their slabs would wait.
    pub fn leave(self) {
        if self.experts.inner.store.gave_up() {
            std::mem::forget(self);
        }
    }

    /// From now on computes on so many threads, no more than it was opened with.
    pub fn set_threads(&mut self, threads: usize) {
        self.model.compute.team = spread::team(threads, &self.nodes);
    }

    /// Experts of a layer that can be drawn so that a step must read them, at most.
    pub fn most_fresh(&self) -> usize {
        self.experts.layers.iter().flatten().map(|layer| layer.rest.len().min(layer.at_hand.len())).min().unwrap_or(0)
    }

    /// A step for which each routed layer must read `fresh` of its experts.
    pub fn step(&mut self, fresh: usize) -> Result<Sample, EngineError> {
        // What the step before guessed for nothing is no part of this one.
        self.experts.inner.store.drop_guesses();
        self.experts.draw(fresh);
        self.experts.inner.store.reset_stats();
        self.kv.truncate(self.positions);
        self.meter.restart();
        let step = Step { tokens: &[0], form: self.form, logits: Logits::Last, cancel: &AtomicBool::new(false) };
        let Trial { model, experts, kv, state, meter, .. } = self;
        forward::step(model, experts, kv, state, meter, &step)?;
        let store = &self.experts.inner.store;
        let (stats, device) = (store.stats(), store.device_stats());
        let routed = self.experts.layers.iter().flatten().count() as f64;
        let busy = |stages: &[Stage]| stages.iter().map(|&stage| self.meter.stage(stage).busy.as_secs_f64()).sum();
        Ok(Sample {
            times: Times {
                head: busy(&[Stage::Embed, Stage::Head]),
                attention: busy(&[Stage::Attention]),
                dense: busy(&[Stage::Dense]),
                choice: busy(&[Stage::Route, Stage::Request, Stage::Hint, Stage::Reduce]),
                shared: busy(&[Stage::Shared]),
                experts: busy(&[Stage::Experts]),
                quantize: busy(&[Stage::Quantize]),
            },
            wall_s: self.meter.wall().as_secs_f64(),
            reads: (stats.misses + stats.prefetched) as f64 / routed,
            bytes: device.bytes as f64 / routed,
            busy_s: device.busy_ns as f64 / 1e9 / routed,
        })
    }
}

/// What of the model is in the slice.
fn sliced(arch: &Arch, slice: &Slice) -> Arch {
    let layers = slice.layers.iter().map(|&layer| arch.layers[layer]).collect();
    let moe = MoeArch { top_k: slice.top_k, ..arch.moe };
    Arch { layers, vocab: slice.vocab, mtp: None, moe, ..arch.clone() }
}

/// The experts of the slice, slabs for those of a token and where it reads of one more, and what a step draws from.
fn slabs(
    checkpoint: &Checkpoint,
    config: &EngineConfig,
    slice: &Slice,
    files: &FileSet,
    resident: u64,
    reading: bool,
) -> Result<(ExpertTable, SlabPool, Vec<Option<Draw>>), EngineError> {
    let layers = slice.layers.iter().map(|&layer| checkpoint.experts.layers[layer].clone()).collect();
    let index = ExpertIndex { layers };
    let held = |_, source: &ExpertSource| experts::held(usize::MAX, 0, source, &config.widths);
    let table = ExpertTable::build(&index, files, |_| true, held, config.keep_scales != Switch::Off)?;
    let (all, top_k) = (checkpoint.arch.moe.experts, slice.top_k);
    // Less than half of the rest stay in the cache after they were drawn: they are drawn again after all others.
    let spare = if reading { top_k.min((all - top_k) / 2).max(1) } else { 0 };
    let of_size = |size: &SlabSize| (size.slab_bytes, size.experts / all * (top_k + spare));
    let sizes: Vec<(usize, usize)> = table.sizes().iter().map(of_size).chain(table.staging()).collect();
    let strides = sizes.iter().map(|&(bytes, count)| (SlabPool::stride_bytes(bytes) * count) as u64);
    let bytes = resident + strides.sum::<u64>();
    if bytes > config.available_bytes / 2 {
        return Err(EngineError::NoRoomToTry { bytes });
    }
    let draw = |(at, experts): (usize, &Option<Vec<_>>)| {
        experts.as_ref().map(|_| {
            let order: Vec<u16> = shuffled(all, at as u64 + 1).into_iter().map(|expert| expert as u16).collect();
            let (at_hand, rest) = order.split_at(top_k);
            Draw { at_hand: at_hand.to_vec(), rest: rest.to_vec(), next: 0, now: vec![], guess: vec![] }
        })
    };
    let drawn = index.layers.iter().enumerate().map(draw).collect();
    Ok((table, SlabPool::of_sizes(&sizes)?, drawn))
}

/// A history by which those that are to be at hand are pinned.
fn chosen(drawn: &[Option<Draw>], experts: usize) -> Vec<u64> {
    let of_layer = |draw: &Draw| {
        let mut usage = vec![0; experts];
        draw.at_hand.iter().for_each(|&expert| usage[usize::from(expert)] = OFTEN);
        usage
    };
    drawn.iter().flatten().flat_map(of_layer).collect()
}

/// Streamed experts that are drawn, whatever the router chose.
struct Drawn {
    inner: Streamed,
    /// By layer of the slice; `None` for a dense one.
    layers: Vec<Option<Draw>>,
}

/// The experts of one layer.
struct Draw {
    /// As many as a token uses, which stay in the cache.
    at_hand: Vec<u16>,
    /// All others, in the order in which they are drawn.
    rest: Vec<u16>,
    /// How many of those have been drawn.
    next: usize,
    /// What the step uses, ascending.
    now: Vec<u16>,
    /// What it is guessed to use.
    guess: Vec<u16>,
}

impl Drawn {
    /// Draws the experts of a step, `fresh` of them from those that are not at hand.
    fn draw(&mut self, fresh: usize) {
        for Draw { at_hand, rest, next, now, guess } in self.layers.iter_mut().flatten() {
            let fresh = fresh.min(rest.len()).min(at_hand.len());
            now.clear();
            now.extend(&at_hand[fresh..]);
            now.extend((0..fresh).map(|at| rest[(*next + at) % rest.len()]));
            now.sort_unstable();
            // A wrong guess must be read as often as a right one, and is none of those that are drawn next.
            let (right, wrong) = (GUESSED * now.len() as f64, (1.0 - GUESSED) * fresh as f64);
            let far = *next + rest.len() / 2;
            guess.clear();
            guess.extend(&now[..right.round() as usize]);
            let others = (0..rest.len()).map(|at| rest[(far + at) % rest.len()]).filter(|other| !now.contains(other));
            guess.extend(others.take(wrong.round() as usize));
            *next += fresh;
        }
    }
}

/// Of a layer that asks for experts, or for which some are guessed: a routed one.
fn drawn(layers: &[Option<Draw>], layer: usize) -> &Draw {
    match layers.get(layer) {
        Some(Some(draw)) => draw,
        _ => unreachable!("layer {layer} has no experts"),
    }
}

impl ExpertExecutor for Drawn {
    fn request(&mut self, call: &ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        let ids = &drawn(&self.layers, call.layer).now;
        let ExpertCall { compute, layer, top_k, input, gates, .. } = *call;
        self.inner.request(&ExpertCall { compute, layer, top_k, input, ids, gates, out: &mut [] }, meter)
    }

    fn hints(&self) -> usize {
        self.inner.hints()
    }

    fn hint(&mut self, guess: &Guess<'_>) {
        let Draw { now, guess: experts, .. } = drawn(&self.layers, guess.layer);
        self.inner.hint(&Guess { ids: now, experts, ..*guess });
    }

    fn serve(&mut self, call: ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        let ids = &drawn(&self.layers, call.layer).now;
        self.inner.serve(ExpertCall { ids, ..call }, meter)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use millstream_io::IoMode;

    use super::*;
    use crate::engine::predict::Work;

    fn bundled() -> Checkpoint {
        Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap()
    }

    fn files(checkpoint: &Checkpoint) -> Arc<FileSet> {
        Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap())
    }

    #[test]
    fn a_step_reads_what_is_drawn_and_finds_the_rest() {
        let (checkpoint, config) = (bundled(), EngineConfig::new(1 << 30));
        // The layer without experts and two of the five with some, each of 32, four a token.
        let slice = Slice { layers: vec![0, 2, 4], vocab: 256, top_k: 4, least: u64::MAX };
        let mut trial = Trial::open(&checkpoint, &files(&checkpoint), &config, &slice, true).unwrap();
        assert_eq!(trial.most_fresh(), 4);
        assert_eq!(trial.step(0).unwrap().reads, 4.0, "the first finds none");
        let bytes = checkpoint.experts.layers[2].as_ref().unwrap()[0].bytes() as f64;
        for fresh in [0, 4, 0, 1, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0, 2, 0] {
            let step = trial.step(fresh).unwrap();
            assert_eq!(step.reads, fresh as f64);
            // Whole sectors are read, and of four one more that was guessed and is wrong; late guesses may be taken back.
            let most = (fresh + fresh / 4) as f64 * (bytes + 8192.0);
            assert!(step.bytes >= fresh as f64 * bytes && step.bytes <= most, "{step:?}");
            assert_eq!(step.busy_s > 0.0, fresh > 0, "{step:?}");
            assert!(step.times.sum() > 0.0 && step.times.sum() < step.wall_s + 1e-9, "{step:?}");
        }
        trial.leave();
    }

    #[test]
    fn the_whole_of_a_small_model_is_its_own_slice() {
        let checkpoint = bundled();
        let work = Work::of(&checkpoint, &EngineConfig::new(0).widths);
        let (slice, files) = (Slice::of(&work, 1 << 30, false), files(&checkpoint));
        let whole = Slice { layers: (0..6).collect(), vocab: checkpoint.arch.vocab, top_k: 4, least: 1 << 30 };
        assert_eq!(slice, whole);
        let mut trial = Trial::open(&checkpoint, &files, &EngineConfig::new(1 << 30), &slice, false).unwrap();
        assert_eq!([trial.step(0).unwrap().reads, trial.step(0).unwrap().reads], [4.0, 0.0]);
        let step = trial.step(0).unwrap();
        let Times { head, attention, dense, choice, shared, experts, quantize } = step.times;
        assert!([head, attention, dense, choice, shared, experts].into_iter().all(|time| time > 0.0), "{step:?}");
        assert_eq!(quantize, 0.0, "they are held as they are stored");
        // Two experts of the four stand for them where no more are needed, and weights that come again for all.
        let part = Slice { layers: vec![0, 2, 4], top_k: 2, least: 1 << 16, ..whole };
        let mut trial = Trial::open(&checkpoint, &files, &EngineConfig::new(1 << 30), &part, false).unwrap();
        assert_eq!([trial.step(0).unwrap().reads, trial.step(0).unwrap().reads], [2.0, 0.0]);
        let step = trial.step(0).unwrap();
        assert!(step.times.sum() > 0.0 && step.bytes == 0.0, "{step:?}");
        // Where memory is short nothing is tried.
        let short = Trial::open(&checkpoint, &files, &EngineConfig::new(1 << 20), &slice, false).err();
        assert!(matches!(short, Some(EngineError::NoRoomToTry { .. })), "{short:?}");
    }
}
