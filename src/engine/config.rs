//! Everything an engine is opened with.

use std::path::PathBuf;

use millstream_io::{DEPTH_AUTO, DeviceKind, IoMode};

use super::EngineError;
use super::drafts::{DraftRule, DraftSource};
use super::space::Space;
use super::switches::{Switch, Switches};
use crate::checkpoint::convert::Widths;
use crate::forward::KvBits;
use crate::kernels::Isa;
use crate::limits::{MAX_ROWS, MAX_THREADS, MIN_SLABS};
use crate::ops::Activations;
use crate::store::Verify;
use crate::store::policy::PolicyKind;

/// Context when neither the user nor a smaller model says otherwise: the cache of a longer one costs memory up front.
pub const DEFAULT_CONTEXT: usize = 4096;

/// Rows of a prefill chunk where nobody knows the prompt, and those that are always had where there is as much prompt.
pub const DEFAULT_PREFILL_ROWS: usize = 512;

/// Which arithmetic attention uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionForm {
    /// Explicit for the prompt where it costs less, absorbed for everything else.
    Auto,
    /// Always absorbed.
    Absorbed,
    /// Always explicit.
    Explicit,
}

/// Sparse attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dsa {
    /// On where the checkpoint has an indexer.
    Auto,
    /// On; an error where the checkpoint has none.
    On,
    /// Every position is attended to.
    Off,
}

/// How much memory experts get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Bytes for the whole process; experts get what is left. `None` takes a share of what the machine has available.
    Total(Option<u64>),
    /// This many slabs, whatever they take.
    Slabs(usize),
}

/// How much of the files is read at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// The device's default.
    #[default]
    Auto,
    /// As many experts as this, 1 or more.
    Slabs(u32),
    /// As many bytes; one request is always made.
    Bytes(u64),
}

impl Depth {
    /// In the terms of a device whose slabs have `slab_bytes`.
    pub fn bytes(self, slab_bytes: usize) -> u64 {
        match self {
            Depth::Auto => DEPTH_AUTO,
            Depth::Slabs(slabs) => u64::from(slabs.max(1)).saturating_mul(slab_bytes as u64),
            // No byte at all is how a device is asked for its default.
            Depth::Bytes(bytes) => bytes.max(1),
        }
    }
}

/// Everything an engine is opened with. Nothing here is looked up anywhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Directories on other drives that hold copies of the shards, whole or in part.
    pub mirrors: Vec<PathBuf>,
    /// How expert files are read.
    pub io: IoMode,
    /// What reads them.
    pub device: DeviceKind,
    /// How much is read at a time.
    pub depth: Depth,
    /// Largest single request, a multiple of 64 KiB or [`millstream_io::CHUNK_WHOLE`]; `None` for the device's default.
    pub chunk_bytes: Option<u32>,
    /// When experts are read, until [`super::Engine::set_switches`] says otherwise.
    pub switches: Switches,
    /// What drafts tokens of an answer, and how many.
    pub drafts: DraftRule,
    /// Whether to keep what was done when, for [`super::Engine::timeline`].
    pub timeline: bool,
    /// Which cached expert gives way to another.
    pub policy: PolicyKind,
    /// How often each expert was chosen in earlier runs, by layer, then by number; empty where nothing is known.
    pub history: Vec<u64>,
    /// Whether the hottest by that history are kept in memory whatever the policy says.
    pub pins: Switch,
    /// Whether scales of experts that lie apart from their weights are kept in memory, so that an expert is one read; left
    /// open, where they take little of what the experts get.
    pub keep_scales: Switch,
    /// Precision of weights that are quantized while they are loaded, and of experts while they are read; what has no width
    /// here is held as it is stored.
    pub widths: Widths,
    /// Precision of the key-value cache.
    pub kv_bits: KvBits,
    /// Whether contexts are kept in a file, for [`super::Engine::keep_context`]: memory has room for that, and index keys are
    /// cached however short the context is.
    pub kv_file: bool,
    /// Memory for experts.
    pub memory: Memory,
    /// Bytes the machine and its control group have left.
    pub available_bytes: u64,
    /// What this process may map, where that is limited.
    pub space: Option<Space>,
    /// What the process holds besides what an engine makes: the program, its tokenizer, its threads' stacks.
    pub program_bytes: u64,
    /// Compute threads, the caller included.
    pub threads: usize,
    /// Cores of each node of memory that they are spread over; empty leaves them where the system puts them.
    pub nodes: Vec<Vec<usize>>,
    /// Positions a sequence may have; `None` for the model's maximum, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Rows of a prefill chunk, at most [`MAX_ROWS`]; a shorter context takes no more than it has, and of more than
    /// [`DEFAULT_PREFILL_ROWS`] only those whose buffers leave the experts most of their memory.
    pub prefill_rows: usize,
    /// Instruction set; `None` for the best the machine has.
    pub isa: Option<Isa>,
    /// Precision of matmul inputs.
    pub activations: Activations,
    /// Attention arithmetic.
    pub attention: AttentionForm,
    /// Sparse attention.
    pub dsa: Dsa,
    /// Whether to load the MTP layer where nothing drafts with it.
    pub load_mtp: bool,
    /// Which reads are compared with the container's checksums. [`Verify::All`] includes the resident weights, which
    /// are then read twice.
    pub verify: Verify,
    /// Decides which experts a sample takes.
    pub verify_seed: u64,
}

impl EngineConfig {
    /// Whether the MTP layer is loaded, of a model that has one.
    pub(super) fn loads_mtp(&self) -> bool {
        self.load_mtp || self.drafts.source == DraftSource::Mtp
    }

    /// Refuses sizes that no engine can have.
    pub(super) fn check(&self) -> Result<(), EngineError> {
        let within = |name, value, range: std::ops::RangeInclusive<usize>| match range.contains(&value) {
            true => Ok(()),
            false => Err(EngineError::Size { name, value, least: *range.start(), most: *range.end() }),
        };
        self.widths.check()?;
        within("compute threads", self.threads, 1..=MAX_THREADS)?;
        self.switches.check()?;
        self.drafts.check()?;
        within("rows of a prefill chunk", self.prefill_rows, 1..=MAX_ROWS)?;
        match self.memory {
            Memory::Slabs(slabs) => within("slabs", slabs, MIN_SLABS..=u32::MAX as usize),
            Memory::Total(_) => Ok(()),
        }
    }

    /// The defaults of `run`, with one compute thread and `available_bytes` of memory.
    pub fn new(available_bytes: u64) -> EngineConfig {
        EngineConfig {
            mirrors: Vec::new(),
            io: IoMode::Auto,
            device: DeviceKind::Auto,
            depth: Depth::Auto,
            chunk_bytes: None,
            switches: Switches::default(),
            drafts: DraftRule::default(),
            timeline: false,
            policy: PolicyKind::default(),
            history: Vec::new(),
            pins: Switch::Auto,
            keep_scales: Switch::Auto,
            widths: Widths::default(),
            kv_bits: KvBits::default(),
            kv_file: false,
            memory: Memory::Total(None),
            available_bytes,
            space: None,
            program_bytes: 0,
            threads: 1,
            nodes: Vec::new(),
            context: None,
            prefill_rows: DEFAULT_PREFILL_ROWS,
            isa: None,
            activations: Activations::Int8,
            attention: AttentionForm::Auto,
            dsa: Dsa::Auto,
            load_mtp: false,
            verify: Verify::Sample,
            verify_seed: 0,
        }
    }
}
