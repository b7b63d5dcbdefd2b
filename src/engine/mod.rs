//! From a directory and a configuration to generated tokens.

mod auto;
pub mod budget;
pub mod config;
pub mod error;
mod forced;
mod generate;
mod integrity;
pub mod overlap;
pub mod predict;
pub mod quality;
pub mod sampler;
mod scales;
pub mod stats;
pub mod stop;
mod switches;
pub mod timeline;
mod traced;
pub mod trial;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_io::{Access, Device, DeviceConfig, FileId, FileSet, SlabPool, open_device, settle};

use crate::checkpoint::arch::Arch;
use crate::checkpoint::convert::{Width, Widths};
use crate::checkpoint::{Checkpoint, ExpertSource, mirror};
pub use crate::forward::stages::StageGraph;
use crate::forward::{ExpertScratch, Form, KvCache, Model, State, Streamed, latent_shape, rope_of};
pub use crate::forward::{Guess, GuessFrom, GuessRule, Observer};
use crate::kernels::{Kernels, Team};
use crate::limits::{EXPERT_RECORD_BYTES, TENSOR_INDEX_BYTES, TIMELINE_EVENTS_MAX};
use crate::meter::{Lap, Meter};
pub use crate::model::load::Loaded;
use crate::model::load::{Content, Piece, fill};
use crate::model::resident::Plan;
pub use crate::ops::Activations;
use crate::ops::Compute;
use crate::ops::room::Room;
use crate::ops::rope::Rope;
pub use crate::store::policy::PolicyKind;
use crate::store::{ExpertStore, ExpertTable, ReadRecord, SlabSize, trace};
pub use crate::store::{Hung, Notice, Verify, Watch};
use budget::{Budget, Demand, Narrower, Slabs, TooSmall};
pub use config::{AttentionForm, Depth, Dsa, EngineConfig, Memory};
pub use error::EngineError;
pub use forced::Forced;
use generate::Times;
pub use generate::{Finish, Job, Outcome};
use sampler::Sampler;
use switches::Turning;
pub use switches::{Switch, Switches};

/// Rows of a chunk at which the explicit form must pay to be chosen by itself.
const AUTO_EXPLICIT_ROWS: usize = 128;

/// An opened model.
pub struct Engine {
    model: Model,
    experts: Streamed,
    kv: KvCache,
    state: State,
    meter: Meter,
    sampler: Sampler,
    prompt_form: Form,
    decode_form: Form,
    prefill_rows: usize,
    budget: Budget,
    notes: Vec<String>,
    files: Arc<FileSet>,
    /// What a routing trace of this model is of.
    traced: trace::Header,
    load: Duration,
    times: Times,
    turning: Turning,
}

/// Opens the device that expert reads go through; a test may put another in its place.
pub type OpenDevice<'a> = &'a dyn Fn(&Arc<FileSet>, &SlabPool) -> Result<Box<dyn Device>, EngineError>;

impl Engine {
    /// Divides memory, loads resident weights and opens the expert store of a model that is opened and checked.
    pub fn open(checkpoint: Checkpoint, config: &EngineConfig) -> Result<Engine, EngineError> {
        Engine::open_until(checkpoint, config, &AtomicBool::new(false))
    }

    /// As [`Engine::open`], until `cancel` is raised: it is looked at between the parts of loading, and in the longest of
    /// them, that which reads weights, every few megabytes. Then the error [is one of that](EngineError::is_cancelled).
    pub fn open_until(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        cancel: &AtomicBool,
    ) -> Result<Engine, EngineError> {
        Engine::open_followed(checkpoint, config, cancel, &Loaded::default())
    }

    /// As [`Engine::open_until`], telling `loaded` how far it is.
    pub fn open_followed(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        cancel: &AtomicBool,
        loaded: &Loaded,
    ) -> Result<Engine, EngineError> {
        let (_, kind) = settle(config.io, config.device)?;
        let device: OpenDevice = &|files, pool| {
            let device = DeviceConfig {
                kind,
                depth_bytes: config.depth.bytes(pool.slab_bytes()),
                chunk_bytes: config.chunk_bytes,
                ..DeviceConfig::default()
            };
            Ok(open_device(&device, files.clone(), pool)?)
        };
        Engine::load(checkpoint, config, device, cancel, loaded)
    }

    /// As [`Engine::open`], reading experts through the device that `device` makes.
    pub fn open_with(checkpoint: Checkpoint, config: &EngineConfig, device: OpenDevice) -> Result<Engine, EngineError> {
        Engine::load(checkpoint, config, device, &AtomicBool::new(false), &Loaded::default())
    }

    fn load(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        device: OpenDevice,
        cancel: &AtomicBool,
        loaded: &Loaded,
    ) -> Result<Engine, EngineError> {
        let started = Instant::now();
        let p = Prepared::new(&checkpoint, config)?;
        let mut notes = checkpoint.notes().to_vec();
        notes.extend(p.files.describe());
        notes.push(p.budget.to_string());
        notes.extend(scales::note(&p.table));
        notes.extend(narrow_note(&p.plan));
        let kept = p.table.kept_scales().clone();
        let (checks, note) = integrity::prepare(config, &checkpoint, &p.files, &p.table, device, cancel)?;
        notes.extend(note);
        let sizes: Vec<(usize, usize)> = (p.table.sizes().iter().zip(&p.budget.slabs))
            .map(|(size, slabs)| (size.slab_bytes, slabs.count as usize))
            .collect();
        go_on_unless(cancel)?;
        let pool = SlabPool::of_sizes(&sizes)?;
        let device = device(&p.files, &pool)?;
        let described = device.describe();
        notes.extend(pool.report().note.into_iter().chain(described.fallback.clone()).chain(described.notes.clone()));
        let mut store = ExpertStore::new(p.table, device, pool);
        store.set_checks(checks);
        store.set_policy(config.policy);
        let mut experts = Streamed::new(store, p.scratch);
        if !config.history.is_empty() {
            experts.store.remember(config.history.clone(), checkpoint.arch.moe.top_k, config.pins.asked());
        }
        // After the slabs: reading the weights fills memory with pages of their files, and leaves none in pieces as large as
        // slabs want.
        loaded.announce(p.plan.bytes() + kept.bytes);
        let resident = p.plan.load(config.threads, cancel, loaded)?;
        if kept.bytes > 0 {
            let piece =
                |(span, at)| Piece { tensor: "scales of experts".to_owned(), at, content: Content::Stored(span) };
            let pieces: Vec<Piece> = kept.pieces.into_iter().map(piece).collect();
            experts.store.set_scales(fill(&p.files, &pieces, kept.bytes, config.threads, cancel, loaded)?);
        }
        let opened_in = checkpoint.took();
        let traced = traced::header(&checkpoint, &experts.store);
        let arch = checkpoint.arch;
        let team = Team::new(config.threads);
        let compute = Compute { kernels: p.kernels, team, activations: config.activations };
        let kept = if config.timeline { TIMELINE_EVENTS_MAX } else { 0 };
        if config.timeline {
            experts.store.record_reads(kept);
        }
        let guess_from = config.switches.guess.from;
        let mut engine = Engine {
            experts,
            kv: KvCache::new(&arch, p.context, p.sparse),
            state: p.state,
            meter: Meter::with_timeline(kept),
            sampler: p.sampler,
            prompt_form: p.prompt_form,
            decode_form: p.decode_form,
            prefill_rows: p.rows,
            budget: p.budget,
            notes,
            files: p.files,
            traced,
            load: opened_in + started.elapsed(),
            times: Times::default(),
            turning: Turning::new(config.switches),
            model: Model { rope: p.rope, compute, arch, resident, sparse: p.sparse, guess_from },
        };
        engine.apply_switches();
        Ok(engine)
    }

    /// How memory would be divided, without loading anything. Fails as [`Engine::open`] would before it loads.
    pub fn plan(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<Budget, EngineError> {
        Ok(Prepared::new(checkpoint, config)?.budget)
    }

    /// Whether an engine with this configuration keeps scales of experts in memory: what a configuration that allows slabs,
    /// and not memory, has to be told to read as the other does.
    pub fn keeps_scales(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<bool, EngineError> {
        Ok(Prepared::new(checkpoint, config)?.table.kept_scales().bytes > 0)
    }

    /// From now on tells `watch` of reads that a generation waits for. It can end the generation, as [`Finish::Interrupted`];
    /// the reads stay in flight. The next generation waits for them, and so does dropping the engine: the kernel may
    /// write to their slabs until it answers.
    pub fn set_watch(&mut self, watch: Watch) {
        self.experts.store.set_watch(watch, self.files.clone());
    }

    /// Lines worth printing once: what is off, how files are read, how memory is divided.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Shapes and rules of the model.
    pub fn arch(&self) -> &Arch {
        &self.model.arch
    }

    /// Positions a sequence may have.
    pub fn context(&self) -> usize {
        self.kv.capacity()
    }

    /// Logits of what follows the last position that was decoded, or that ended a prompt: `[vocab]`.
    pub fn logits(&mut self) -> &[f32] {
        self.state.logits()
    }

    /// The expert store, for its counters, its pool and its device.
    pub fn store(&self) -> &ExpertStore {
        &self.experts.store
    }

    /// What a routing trace of this model is of.
    pub fn traced(&self) -> &trace::Header {
        &self.traced
    }

    /// How memory was divided.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Warnings that came up while running, such as a file that turned out not to allow direct reads.
    pub fn warnings(&self) -> Vec<String> {
        self.files.warnings()
    }

    /// Whether a warning is about bytes that failed their checksum: then the user must see it, however quiet he likes it.
    pub fn warns_of_damage(&self) -> bool {
        (0..self.files.drives()).any(|drive| self.files.was_wrong(drive))
    }
}

/// A model about to be loaded: everything is decided, memory is divided, no weight is read.
struct Prepared {
    context: usize,
    sparse: bool,
    rows: usize,
    kernels: &'static Kernels,
    prompt_form: Form,
    decode_form: Form,
    files: Arc<FileSet>,
    /// Of every routed layer, the MTP layer too where it is loaded.
    table: ExpertTable,
    plan: Plan,
    state: State,
    scratch: ExpertScratch,
    rope: Rope,
    sampler: Sampler,
    budget: Budget,
}

impl Prepared {
    fn new(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<Prepared, EngineError> {
        config.check()?;
        checkpoint.check_computable()?;
        let arch = &checkpoint.arch;
        let context = context_of(config, arch)?;
        let sparse = sparse_of(config, arch, context)?;
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa).ok_or(EngineError::NoIsa(isa))?,
            None => Kernels::best(),
        };
        let (mode, _) = settle(config.io, config.device)?;
        let mirrors = mirror::find(&config.mirrors, &checkpoint.tensors)?;
        let files = Arc::new(FileSet::open_mirrored(checkpoint.tensors.paths(), &mirrors, mode)?);
        let layers = arch.layers.len();
        let drafts = arch.mtp.is_some() && config.load_mtp;
        let build = |keep| ExpertTable::build(&checkpoint.experts, &files, |layer| layer < layers || drafts, keep);
        let plan = Plan::new(checkpoint, files.clone(), config.load_mtp, &config.resident)?;

        let (rows, threads) = (config.prefill_rows.min(context), config.threads);
        let (prompt_form, decode_form) = forms_of(config.attention, arch)?;
        let explicit = [prompt_form, decode_form].contains(&Form::Explicit);
        let mut room = Room::default();
        let state = State::new(arch, rows, context, threads, explicit, &mut room);
        let mut working = Room::default();
        let scratch = ExpertScratch::new(arch, rows, &mut working);
        let rope = rope_of(arch, context, &mut room);
        let sampler = Sampler::new(arch.vocab);
        room.add(sampler.bytes());
        if config.timeline {
            room.add(TIMELINE_EVENTS_MAX * (size_of::<Lap>() + size_of::<ReadRecord>()));
        }
        let rebuilt = latent_shape(arch).filter(|_| explicit).map_or(0, |shape| shape.rebuilt(threads, context));
        let slabs = |size: &SlabSize| Slabs {
            bytes: SlabPool::stride_bytes(size.slab_bytes) as u64,
            count: size.experts as u64,
        };
        let (kv, buffered) = (KvCache::bytes(arch, context, sparse), cached_bytes(&files));
        // The cache of the context is made once loading has given its own memory back.
        room.add(plan.scratch_bytes(threads).saturating_sub(kv as usize));
        let activations = room.bytes();
        let divided = |table: &ExpertTable| {
            let demand = Demand {
                ram: None,
                available: config.available_bytes,
                program: config.program_bytes + index_bytes(checkpoint, table),
                resident: (plan.bytes() + table.kept_scales().bytes) as u64,
                saved: plan.stored_bytes().saturating_sub(plan.bytes()) as u64,
                kv,
                reconstruction: (rebuilt * size_of::<f32>()) as u64,
                activations,
                working: working.bytes(),
                buffered,
                experts: &table.sizes().iter().map(slabs).collect::<Vec<_>>(),
            };
            divide(config, &demand)
        };
        let (table, budget) = scales::choose(config, build, divided).map_err(|error| match error {
            EngineError::TooSmall(e) => {
                EngineError::TooSmall(TooSmall { narrower: narrower(&plan, &config.resident), ..e })
            }
            other => other,
        })?;
        Ok(Prepared {
            context,
            sparse,
            rows,
            kernels,
            prompt_form,
            decode_form,
            files,
            table,
            plan,
            state,
            scratch,
            rope,
            sampler,
            budget,
        })
    }
}

/// Whether resident weights would take less memory, were those that have no width quantized to 8 bits.
fn narrower(plan: &Plan, widths: &Widths) -> Option<Narrower> {
    let eight = Some(Width::Bits8);
    let now = plan.bytes_in(widths)?;
    let saved = |asked: Widths| Some(now.saturating_sub(plan.bytes_in(&asked)?) as u64);
    let dense = saved(Widths { dense: widths.dense.or(eight), ..*widths })?;
    let io = saved(Widths { io: widths.io.or(eight), ..*widths })?;
    (dense + io > 0).then_some(Narrower { saves: dense + io, dense: dense > 0, io: io > 0 })
}

fn narrow_note(plan: &Plan) -> Option<String> {
    let (count, all) = (plan.narrow(), plan.matrices());
    (count > 0)
        .then(|| format!("{count} of {all} weights in memory are stored as narrow as asked, or narrower, and stay"))
}

/// Fails where the flag is up.
fn go_on_unless(cancel: &AtomicBool) -> Result<(), EngineError> {
    if cancel.load(Ordering::Relaxed) { Err(EngineError::Cancelled) } else { Ok(()) }
}

fn context_of(config: &EngineConfig, arch: &Arch) -> Result<usize, EngineError> {
    let most = arch.max_context;
    match config.context {
        None => Ok(most.min(config::DEFAULT_CONTEXT)),
        Some(asked) if (1..=most).contains(&asked) => Ok(asked),
        Some(asked) => Err(EngineError::Context { asked, most }),
    }
}

/// Whether sparse attention will ever select: it is on, and the context is longer than what the indexer keeps.
fn sparse_of(config: &EngineConfig, arch: &Arch, context: usize) -> Result<bool, EngineError> {
    match (config.dsa, arch.indexer) {
        (Dsa::Off, _) | (Dsa::Auto, None) => Ok(false),
        (Dsa::On, None) => Err(EngineError::NoIndexer),
        (Dsa::On | Dsa::Auto, Some(indexer)) => Ok(context > indexer.top_k),
    }
}

/// Forms of prompt and decode, fixed for the life of the engine: neither the length of a prompt nor its chunks change a bit.
fn forms_of(attention: AttentionForm, arch: &Arch) -> Result<(Form, Form), EngineError> {
    let prompt_pays = latent_shape(arch).map(|shape| shape.explicit_pays_from() <= AUTO_EXPLICIT_ROWS);
    match (attention, prompt_pays) {
        (AttentionForm::Absorbed | AttentionForm::Explicit, None) => Err(EngineError::OneForm),
        (AttentionForm::Explicit, _) => Ok((Form::Explicit, Form::Explicit)),
        (AttentionForm::Auto, Some(true)) => Ok((Form::Explicit, Form::Absorbed)),
        (AttentionForm::Absorbed | AttentionForm::Auto, _) => Ok((Form::Absorbed, Form::Absorbed)),
    }
}

/// Memory that knowing the model takes: of its tensors, which is given back once it is open, and of its experts.
fn index_bytes(checkpoint: &Checkpoint, table: &ExpertTable) -> u64 {
    // Those of an MTP layer that is not loaded too.
    let known = checkpoint.experts.layers.iter().flatten().map(Vec::len).sum::<usize>();
    // Every size of slabs has tables over all experts.
    let of_cached = ExpertTable::ENTRY_BYTES + table.sizes().len() as u64 * EXPERT_RECORD_BYTES;
    checkpoint.tensors.len() as u64 * TENSOR_INDEX_BYTES
        + (known * size_of::<ExpertSource>()) as u64
        + table.experts() as u64 * of_cached
}

/// Bytes of the files whose pages stay in the page cache once they are read.
fn cached_bytes(files: &FileSet) -> u64 {
    let ids = (0..files.len() as u32).map(FileId);
    let stays = |id: &FileId| {
        matches!(files.access(*id), Access::Buffered { .. } | Access::SilentlyBuffered { .. } | Access::Mapped)
    };
    ids.filter(stays).map(|id| files.len_bytes(id)).sum()
}

fn divide(config: &EngineConfig, demand: &Demand) -> Result<Budget, EngineError> {
    match config.memory {
        Memory::Total(ram) => Ok(Budget::divide(&Demand { ram, ..*demand })?),
        Memory::Slabs(slabs) => Ok(Budget::of_slabs(demand, slabs as u64)),
    }
}
