//! From a directory and a configuration to generated tokens.

pub mod budget;
pub mod config;
pub mod error;
mod generate;
pub mod sampler;
pub mod stats;
pub mod stop;

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_io::{Device, DeviceConfig, FileSet, SlabPool, open_device, settle};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::arch::Arch;
use crate::forward::{KvCache, Model, State, Streamed};
use crate::kernels::{Kernels, Team};
use crate::limits::MAX_CONTEXT;
use crate::meter::Meter;
use crate::model::resident::Plan;
pub use crate::ops::Activations;
use crate::ops::Compute;
use crate::ops::attention::Shape;
use crate::ops::rope::Rope;
use crate::store::{ExpertStore, ExpertTable};
use budget::{Budget, Demand};
pub use config::{AttentionForm, Depth, Dsa, EngineConfig, Memory};
pub use error::EngineError;
use generate::Times;
pub use generate::{Finish, Job, Outcome};
use sampler::Sampler;

/// An opened model.
pub struct Engine {
    model: Model,
    experts: Streamed,
    kv: KvCache,
    state: State,
    meter: Meter,
    sampler: Sampler,
    attention: AttentionForm,
    prefill_rows: usize,
    budget: Budget,
    notes: Vec<String>,
    files: Arc<FileSet>,
    load: Duration,
    times: Times,
}

/// Opens the device that expert reads go through; a test may put another in its place.
pub type OpenDevice<'a> = &'a dyn Fn(&Arc<FileSet>, &SlabPool) -> Result<Box<dyn Device>, EngineError>;

impl Engine {
    /// Checks the model, divides memory, loads resident weights and opens the expert store.
    pub fn open(config: &EngineConfig) -> Result<Engine, EngineError> {
        let (_, kind) = settle(config.io, config.device)?;
        Engine::open_with(config, &|files, pool| {
            let device = DeviceConfig {
                kind,
                depth_bytes: config.depth.bytes(pool.slab_bytes()),
                chunk_bytes: config.chunk_bytes,
                ..DeviceConfig::default()
            };
            Ok(open_device(&device, files.clone(), pool)?)
        })
    }

    /// As [`Engine::open`], reading experts through the device that `device` makes.
    pub fn open_with(config: &EngineConfig, device: OpenDevice) -> Result<Engine, EngineError> {
        let started = Instant::now();
        let checkpoint = Checkpoint::open(&config.dir)?;
        let arch = &checkpoint.arch;
        let context = context_of(config, arch)?;
        let sparse = sparse_of(config, arch, context)?;
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa).ok_or(EngineError::NoIsa(isa))?,
            None => Kernels::best(),
        };
        let (mode, _) = settle(config.io, config.device)?;
        let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), mode)?);
        let layers = arch.layers.len();
        let table = ExpertTable::build(&checkpoint.experts, &files, |layer| layer < layers || config.load_mtp)?;
        let plan = Plan::new(&checkpoint, &files, config.load_mtp)?;
        let budget = divide(config, arch, &table, plan.bytes() as u64, context, sparse)?;

        let mut notes = checkpoint.notes().to_vec();
        notes.extend(files.describe());
        notes.push(budget.to_string());
        let resident = plan.load()?;
        let pool = SlabPool::new(table.slab_bytes(), budget.slabs as usize)?;
        notes.extend(pool.report().note);
        let device = device(&files, &pool)?;
        notes.extend(device.describe().fallback.clone());
        notes.extend(device.describe().notes.iter().cloned());

        let rows = config.prefill_rows;
        let explicit = may_be_explicit(config, &shape_of(arch));
        let arch = checkpoint.arch;
        let moe = arch.moe;
        let store = ExpertStore::new(table, device, pool);
        Ok(Engine {
            experts: Streamed::new(store, rows, arch.hidden, moe.width, moe.top_k, moe.experts),
            kv: KvCache::new(&arch, context, sparse),
            state: State::new(&arch, rows, context, config.threads, explicit),
            meter: Meter::new(),
            sampler: Sampler::new(arch.vocab),
            attention: config.attention,
            prefill_rows: rows,
            budget,
            notes,
            files,
            load: started.elapsed(),
            times: Times::default(),
            model: Model {
                rope: Rope::new(arch.rope_theta, arch.attention.rope, context),
                compute: Compute { kernels, team: Team::new(config.threads), activations: config.activations },
                arch,
                resident,
                sparse,
            },
        })
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

    /// The expert store, for its counters, its pool and its device.
    pub fn store(&self) -> &ExpertStore {
        &self.experts.store
    }

    /// How memory was divided.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Warnings that came up while running, such as a file that turned out not to allow direct reads.
    pub fn warnings(&self) -> Vec<String> {
        self.files.warnings()
    }
}

fn context_of(config: &EngineConfig, arch: &Arch) -> Result<usize, EngineError> {
    let most = arch.max_context.min(MAX_CONTEXT);
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

fn shape_of(arch: &Arch) -> Shape {
    let a = &arch.attention;
    Shape { heads: a.heads, nope: a.nope, rope: a.rope, value: a.value, rank: a.kv_rank }
}

/// Whether any chunk may be computed in the explicit form, so that its buffers are needed.
fn may_be_explicit(config: &EngineConfig, shape: &Shape) -> bool {
    match config.attention {
        AttentionForm::Absorbed => false,
        AttentionForm::Explicit => true,
        AttentionForm::Auto => config.prefill_rows >= shape.explicit_pays_from(),
    }
}

fn divide(
    config: &EngineConfig,
    arch: &Arch,
    table: &ExpertTable,
    resident: u64,
    context: usize,
    sparse: bool,
) -> Result<Budget, EngineError> {
    let shape = shape_of(arch);
    let reconstruction = match may_be_explicit(config, &shape) {
        true => (config.threads * context * (shape.nope + shape.value) * size_of::<f32>()) as u64,
        false => 0,
    };
    let slab = SlabPool::stride_bytes(table.slab_bytes()) as u64;
    let demand = Demand {
        ram: None,
        available: config.available_bytes,
        resident,
        kv: KvCache::bytes(arch, context, sparse),
        reconstruction,
        activations: budget::activation_bytes(arch, config.prefill_rows),
        slab,
        experts: table.len() as u64,
    };
    let fixed = demand.resident + demand.kv + demand.reconstruction + demand.activations;
    let ram = match config.memory {
        Memory::Total(ram) => ram,
        Memory::Slabs(slabs) => Some(fixed + slab * slabs as u64),
    };
    Ok(Budget::divide(&Demand { ram, ..demand })?)
}
