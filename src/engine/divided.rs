//! A model about to be loaded: everything is decided and counted, memory is divided, and nothing is allocated yet.

use std::sync::Arc;

use millstream_io::{Access, FileId, FileSet, SlabPool, settle};

use super::budget::{Budget, Demand, Narrower, Slabs, TooSmall};
use super::config::Memory;
use super::sampler::Sampler;
use super::{EngineConfig, EngineError, context_of, experts, forms_of, rows, scales, sparse_of};
use crate::checkpoint::convert::{Width, Widths};
use crate::checkpoint::{Checkpoint, ExpertSource, mirror};
use crate::forward::{ExpertScratch, Form, KvCache, State, latent_shape, rope_of};
use crate::kernels::Kernels;
use crate::limits::{EXPERT_RECORD_BYTES, TENSOR_INDEX_BYTES, TIMELINE_EVENTS_MAX};
use crate::meter::Lap;
use crate::model::resident::Plan;
use crate::ops::room::Room;
use crate::store::{ExpertTable, ReadRecord, SlabSize};

/// See the module's description.
pub struct Divided<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a EngineConfig,
    /// Everything that takes memory but the experts and what is known of them.
    fixed: Demand<'static>,
    pub(super) context: usize,
    pub(super) sparse: bool,
    pub(super) rows: usize,
    pub(super) kernels: &'static Kernels,
    pub(super) prompt_form: Form,
    pub(super) decode_form: Form,
    pub(super) files: Arc<FileSet>,
    /// Of every routed layer, the MTP layer too where it is loaded.
    pub(super) table: ExpertTable,
    /// Floats that experts are quantized with on their way.
    pub(super) requantized: usize,
    pub(super) plan: Plan,
    pub(super) budget: Budget,
}

impl<'a> Divided<'a> {
    /// Divides memory as `config` says. Fails where a model could not be loaded so.
    pub fn new(checkpoint: &'a Checkpoint, config: &'a EngineConfig) -> Result<Divided<'a>, EngineError> {
        config.check()?;
        checkpoint.check_computable()?;
        let arch = &checkpoint.arch;
        let context = context_of(config, arch)?;
        let sparse = sparse_of(config, arch, context)?;
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa).ok_or(EngineError::NoIsa(isa))?,
            None => Kernels::best(),
        };
        let (prompt_form, decode_form) = forms_of(config.attention, arch)?;
        let (mode, _) = settle(config.io, config.device)?;
        let mirrors = mirror::find(&config.mirrors, &checkpoint.tensors)?;
        let files = Arc::new(FileSet::open_mirrored(checkpoint.tensors.paths(), &mirrors, mode)?);
        let plan = Plan::new(checkpoint, files.clone(), config.load_mtp, &config.widths)?;
        let explicit = [prompt_form, decode_form].contains(&Form::Explicit);
        let requantized = experts::check(checkpoint, config)?;
        let rows = rows::choose(config, context, |rows| {
            demand(checkpoint, config, kernels, context, rows, sparse, explicit, &files, &plan)
        });
        let fixed = demand(checkpoint, config, kernels, context, rows, sparse, explicit, &files, &plan);
        let fixed = Demand { working: fixed.working + (requantized * size_of::<f32>()) as u64, ..fixed };
        let memory = config.memory;
        let (table, budget) = divide(checkpoint, config, &files, &fixed, memory).map_err(|error| match error {
            EngineError::TooSmall(e) => {
                EngineError::TooSmall(TooSmall { narrower: narrower(&plan, &config.widths), ..e })
            }
            other => other,
        })?;
        Ok(Divided {
            checkpoint,
            config,
            fixed,
            context,
            sparse,
            rows,
            kernels,
            prompt_form,
            decode_form,
            files,
            table,
            requantized,
            plan,
            budget,
        })
    }

    /// How memory is divided.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Whether scales of experts are kept in memory: what a configuration that allows slabs, and not memory, has to be told
    /// to read as this one does.
    pub fn keeps_scales(&self) -> bool {
        self.table.kept_scales().bytes > 0
    }

    /// The files of the model, and copies of them.
    pub fn files(&self) -> &Arc<FileSet> {
        &self.files
    }

    /// How `ram` bytes would be divided.
    pub fn of_ram(&self, ram: u64) -> Result<Budget, EngineError> {
        let memory = Memory::Total(Some(ram));
        // Scales that lie beside their weights come with them, however much there is.
        if !self.keeps_scales() && !self.table.is_scattered() {
            return with_table(memory, &self.fixed, self.checkpoint, &self.table);
        }
        Ok(divide(self.checkpoint, self.config, &self.files, &self.fixed, memory)?.1)
    }
}

/// What everything but the experts will take where a step has up to `rows` rows, counted by what will allocate it.
fn demand(
    checkpoint: &Checkpoint,
    config: &EngineConfig,
    kernels: &Kernels,
    context: usize,
    rows: usize,
    sparse: bool,
    explicit: bool,
    files: &FileSet,
    plan: &Plan,
) -> Demand<'static> {
    let (arch, threads) = (&checkpoint.arch, config.threads);
    let (mut room, mut working) = (Room::counting(), Room::counting());
    // What the explicit form rebuilds is counted by itself.
    State::new(kernels, arch, rows, context, threads, false, &mut room);
    // What experts are quantized with is counted where it is known how many need it.
    ExpertScratch::new(kernels, arch, rows, 0, &mut working);
    rope_of(arch, context, &mut room);
    room.add(Sampler::bytes(arch.vocab));
    if config.timeline {
        room.add(TIMELINE_EVENTS_MAX * (size_of::<Lap>() + size_of::<ReadRecord>()));
    }
    let kv = KvCache::bytes(arch, context, sparse, config.kv_bits);
    // The cache of the context is made once loading has given its own memory back.
    room.add(plan.scratch_bytes(threads).saturating_sub(kv as usize));
    let rebuilt = latent_shape(arch).filter(|_| explicit).map_or(0, |shape| shape.rebuilt(threads, context));
    Demand {
        ram: None,
        available: config.available_bytes,
        program: config.program_bytes,
        resident: plan.bytes() as u64,
        saved: plan.stored_bytes().saturating_sub(plan.bytes()) as u64,
        kv,
        reconstruction: (rebuilt * size_of::<f32>()) as u64,
        activations: room.bytes(),
        working: working.bytes(),
        staging: 0,
        buffered: cached_bytes(files),
        experts: &[],
    }
}

/// A table of the experts, and `memory` divided among them and all that is `fixed`.
fn divide(
    checkpoint: &Checkpoint,
    config: &EngineConfig,
    files: &FileSet,
    fixed: &Demand,
    memory: Memory,
) -> Result<(ExpertTable, Budget), EngineError> {
    let held =
        |layer, source: &ExpertSource| experts::held(checkpoint.arch.layers.len(), layer, source, &config.widths);
    let wanted = |layer| experts::is_loaded(checkpoint, config, layer);
    let build = |keep| ExpertTable::build(&checkpoint.experts, files, wanted, held, keep);
    scales::choose(config, build, |table| with_table(memory, fixed, checkpoint, table))
}

/// The same with a table that is there.
fn with_table(
    memory: Memory,
    fixed: &Demand,
    checkpoint: &Checkpoint,
    table: &ExpertTable,
) -> Result<Budget, EngineError> {
    let slabs =
        |size: &SlabSize| Slabs { bytes: SlabPool::stride_bytes(size.slab_bytes) as u64, count: size.experts as u64 };
    let demand = Demand {
        program: fixed.program + index_bytes(checkpoint, table),
        resident: fixed.resident + table.kept_scales().bytes as u64,
        staging: table.staging().map_or(0, |(bytes, slabs)| (SlabPool::stride_bytes(bytes) * slabs) as u64),
        experts: &table.sizes().iter().map(slabs).collect::<Vec<_>>(),
        ..*fixed
    };
    match memory {
        Memory::Total(ram) => Ok(Budget::divide(&Demand { ram, ..demand })?),
        Memory::Slabs(slabs) => Ok(Budget::of_slabs(&demand, slabs as u64)),
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

/// Memory that knowing the model takes: of its tensors, which is given back once it is open, and of its experts.
fn index_bytes(checkpoint: &Checkpoint, table: &ExpertTable) -> u64 {
    // Those of an MTP layer that is not loaded too.
    let known = checkpoint.experts.layers.iter().flatten().map(Vec::len).sum::<usize>();
    // Every size of slabs has tables over all experts.
    let of_cached = table.sizes().len() as u64 * EXPERT_RECORD_BYTES;
    checkpoint.tensors.len() as u64 * TENSOR_INDEX_BYTES
        + (known * size_of::<ExpertSource>()) as u64
        + table.own_bytes()
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
