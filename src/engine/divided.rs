//! A model about to be loaded: everything is decided and counted, memory is divided, and nothing is allocated yet.

use std::sync::Arc;

use millstream_io::{Access, FileId, FileSet, IoMode, SlabPool, settle};

use super::budget::{Budget, Demand, Narrower, Slabs, TooSmall};
use super::config::{DEFAULT_PREFILL_ROWS, Memory};
use super::drafts::{DraftRule, DraftSource, Drafts};
use super::kvfile::KvFile;
use super::sampler::Sampler;
use super::session::Held;
use super::shaping::Shaper;
use super::space::unheld;
use super::{EngineConfig, EngineError, context_of, experts, forms_of, rows, scales, sparse_of};
use crate::checkpoint::convert::{Width, Widths};
use crate::checkpoint::{Checkpoint, ExpertSource, mirror};
use crate::forward::{ExpertScratch, Form, KvCache, State, latent_shape, rope_of};
use crate::kernels::Kernels;
use crate::limits::{DRAFT_CACHE_SHARE, EXPERT_RECORD_BYTES, TENSOR_INDEX_BYTES, TIMELINE_EVENTS_MAX};
use crate::meter::Lap;
use crate::model::resident::Plan;
use crate::ops::room::Room;
use crate::store::{ExpertTable, ReadRecord, SlabSize};

/// See the module's description.
pub struct Divided<'a> {
    checkpoint: &'a Checkpoint,
    config: &'a EngineConfig,
    pub(super) context: usize,
    pub(super) sparse: bool,
    pub(super) rows: usize,
    /// What drafts, as far as the model has it.
    pub(super) drafts: DraftRule,
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
        let plan = Plan::new(checkpoint, files.clone(), config.loads_mtp(), &config.widths)?;
        let explicit = [prompt_form, decode_form].contains(&Form::Explicit);
        let requantized = experts::check(checkpoint, config)?;
        let drafts = config.drafts.of(arch);
        let parts = Parts {
            drafts,
            checkpoint,
            config,
            kernels,
            context,
            sparse,
            explicit,
            files: &files,
            plan: &plan,
            requantized,
        };
        let (parts, divided) = parts.divide_with_drafts(config.memory);
        let drafts = parts.drafts;
        let (rows, table, budget) = divided.map_err(|error| match error {
            EngineError::TooSmall(e) => {
                EngineError::TooSmall(TooSmall { narrower: narrower(&plan, &config.widths), ..e })
            }
            other => other,
        })?;
        Ok(Divided {
            checkpoint,
            config,
            context,
            sparse,
            rows,
            drafts,
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
        // Where there is other memory there are other limits.
        let config = EngineConfig { space: None, ..self.config.clone() };
        let (parts, memory) = (Parts { config: &config, ..self.parts() }, Memory::Total(Some(ram)));
        // Scales that lie beside their weights come with them, however much there is.
        if !self.keeps_scales() && !self.table.is_scattered() {
            let least = parts.with_table(memory, parts.least_rows(), &self.table)?;
            return Ok(parts.lengthened(memory, &self.table, least).1);
        }
        Ok(parts.divide(memory)?.2)
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            checkpoint: self.checkpoint,
            config: self.config,
            kernels: self.kernels,
            context: self.context,
            sparse: self.sparse,
            drafts: self.drafts,
            explicit: [self.prompt_form, self.decode_form].contains(&Form::Explicit),
            files: &self.files,
            plan: &self.plan,
            requantized: self.requantized,
        }
    }
}

/// What is decided before memory is divided.
#[derive(Clone, Copy)]
struct Parts<'b> {
    checkpoint: &'b Checkpoint,
    config: &'b EngineConfig,
    kernels: &'static Kernels,
    context: usize,
    sparse: bool,
    drafts: DraftRule,
    explicit: bool,
    files: &'b FileSet,
    plan: &'b Plan,
    requantized: usize,
}

impl Parts<'_> {
    /// As [`Parts::divide`]; without drafts where the engine decides of them and they would take the place of experts.
    fn divide_with_drafts(self, memory: Memory) -> (Self, Result<(usize, ExpertTable, Budget), EngineError>) {
        let divided = self.divide(memory);
        if self.drafts.source != DraftSource::Auto {
            return (self, divided);
        }
        let parts = Parts { drafts: DraftRule { source: DraftSource::Off, ..self.drafts }, ..self };
        let without = parts.divide(memory);
        let experts = |divided: &Result<(_, _, Budget), _>| divided.as_ref().map_or(0, |(.., budget)| budget.experts());
        match divided.is_ok() && experts(&divided) >= experts(&without) / DRAFT_CACHE_SHARE * (DRAFT_CACHE_SHARE - 1) {
            true => (self, divided),
            false => (parts, without),
        }
    }

    /// How long chunks of a prompt are, a table of the experts, and `memory` divided among them and all else. What is too small
    /// is so for the shortest chunks.
    fn divide(&self, memory: Memory) -> Result<(usize, ExpertTable, Budget), EngineError> {
        let Parts { checkpoint, config, files, .. } = *self;
        let held =
            |layer, source: &ExpertSource| experts::held(checkpoint.arch.layers.len(), layer, source, &config.widths);
        let wanted = |layer| experts::is_loaded(checkpoint, config, layer);
        let build = |keep| ExpertTable::build(&checkpoint.experts, files, wanted, held, keep);
        let least = self.least_rows();
        let (table, budget) = scales::choose(config, build, |table| self.with_table(memory, least, table))?;
        let (rows, budget) = self.lengthened(memory, &table, budget);
        Ok((rows, table, budget))
    }

    /// Rows of the shortest chunks of a long prompt.
    fn least_rows(&self) -> usize {
        self.config.prefill_rows.min(self.context).min(DEFAULT_PREFILL_ROWS)
    }

    /// Chunks as long as they pay where the shortest leave what `least` says, and the division with those.
    fn lengthened(&self, memory: Memory, table: &ExpertTable, least: Budget) -> (usize, Budget) {
        let most = self.config.prefill_rows.min(self.context);
        let bytes = |fixed: Demand| fixed.activations + fixed.working;
        let rows = match memory {
            Memory::Total(_) => rows::choose(most, least.spare(), |rows| bytes(self.fixed(rows))),
            Memory::Slabs(_) => most,
        };
        match self.with_table(memory, rows, table) {
            Ok(budget) => (rows, budget),
            Err(_) => (self.least_rows(), least),
        }
    }

    /// `memory` divided where a step has up to `rows` rows.
    fn with_table(&self, memory: Memory, rows: usize, table: &ExpertTable) -> Result<Budget, EngineError> {
        let slabs = |size: &SlabSize| Slabs {
            bytes: SlabPool::stride_bytes(size.slab_bytes) as u64,
            count: size.experts as u64,
        };
        let fixed = self.fixed(rows);
        let demand = Demand {
            program: fixed.program + index_bytes(self.checkpoint, table),
            resident: fixed.resident + table.kept_scales().bytes as u64,
            staging: table.staging().map_or(0, |(bytes, slabs)| (SlabPool::stride_bytes(bytes) * slabs) as u64),
            experts: &table.sizes().iter().map(slabs).collect::<Vec<_>>(),
            ..fixed
        };
        match memory {
            Memory::Total(ram) => Ok(Budget::divide(&Demand { ram, ..demand })?),
            Memory::Slabs(slabs) => Ok(Budget::of_slabs(&demand, slabs as u64)),
        }
    }

    /// What everything but the experts and what is known of them will take where a step has up to `rows` rows, counted by
    /// what will allocate it.
    fn fixed(&self, rows: usize) -> Demand<'static> {
        let Parts { config, kernels, context, sparse, plan, .. } = *self;
        let (arch, threads) = (&self.checkpoint.arch, config.threads);
        let (mut room, mut working) = (Room::counting(), Room::counting());
        // What the explicit form rebuilds is counted by itself.
        let (drafts, step_rows) = (self.drafts, rows.max(self.drafts.rows()));
        State::new(kernels, arch, step_rows, drafts.rows(), context, threads, false, &mut room);
        ExpertScratch::new(kernels, arch, step_rows, self.requantized, &mut working);
        let no_position = || KvCache::for_mtp(arch, 0, sparse, config.kv_bits);
        Drafts::new(drafts, arch, context, no_position, &mut room);
        Held::new(context, &mut room);
        rope_of(arch, context, &mut room);
        room.add(Sampler::bytes(arch.vocab));
        Shaper::new(arch.vocab, context, &mut room);
        if config.timeline {
            room.add(TIMELINE_EVENTS_MAX * (size_of::<Lap>() + size_of::<ReadRecord>()));
        }
        let kv = KvCache::bytes(arch, context, sparse, config.kv_bits)
            + match drafts.source {
                DraftSource::Mtp => KvCache::bytes_for_mtp(arch, context, sparse, config.kv_bits),
                DraftSource::Off | DraftSource::Auto | DraftSource::Ngram | DraftSource::Grammar => 0,
            };
        if config.kv_file {
            room.add(KvFile::room_bytes(KvCache::bytes(arch, 1, sparse, config.kv_bits) as usize, context));
        }
        // The cache of the context is made once loading has given its own memory back.
        room.add(plan.scratch_bytes(threads).saturating_sub(kv as usize));
        let rebuilt = latent_shape(arch).filter(|_| self.explicit).map_or(0, |shape| shape.rebuilt(threads, context));
        Demand {
            ram: None,
            available: config.available_bytes,
            space: config.space,
            unheld: self.unheld(),
            program: config.program_bytes,
            resident: plan.bytes() as u64,
            saved: plan.stored_bytes().saturating_sub(plan.bytes()) as u64,
            kv,
            reconstruction: (rebuilt * size_of::<f32>()) as u64,
            activations: room.bytes(),
            working: working.bytes(),
            staging: 0,
            buffered: cached_bytes(self.files),
            experts: &[],
        }
    }

    /// What is mapped and takes no memory.
    fn unheld(&self) -> u64 {
        let Parts { config, files, .. } = *self;
        let counts = config.space.is_some_and(|space| space.of_files) && files.mode() == IoMode::Mmap;
        let mapped = files.entries().filter(|_| counts).map(|file| files.len_bytes(file)).sum();
        unheld(config.threads, files.drives(), self.checkpoint.tensors.len(), mapped)
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
