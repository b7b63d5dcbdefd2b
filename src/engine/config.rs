//! Everything an engine is opened with.

use std::path::PathBuf;

use millstream_io::{DeviceKind, IoMode};

use crate::kernels::Isa;
use crate::ops::Activations;
use crate::store::Verify;

/// Context when neither the user nor a smaller model says otherwise: the cache of a longer one costs memory up front.
pub const DEFAULT_CONTEXT: usize = 4096;

/// Rows of a prefill chunk: enough that each expert read serves many rows, few enough that scratch stays small.
pub const DEFAULT_PREFILL_ROWS: usize = 128;

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

/// Everything an engine is opened with. Nothing here is looked up anywhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Model directory.
    pub dir: PathBuf,
    /// How expert files are read.
    pub io: IoMode,
    /// What reads them.
    pub device: DeviceKind,
    /// Bytes in flight; `None` for the device's default.
    pub depth_bytes: Option<u64>,
    /// Memory for experts.
    pub memory: Memory,
    /// Bytes the machine and its control group have left.
    pub available_bytes: u64,
    /// Compute threads, the caller included.
    pub threads: usize,
    /// Positions a sequence may have; `None` for the model's maximum, at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Rows of a prefill chunk, at most [`crate::limits::MAX_ROWS`].
    pub prefill_rows: usize,
    /// Instruction set; `None` for the best the machine has.
    pub isa: Option<Isa>,
    /// Precision of matmul inputs.
    pub activations: Activations,
    /// Attention arithmetic.
    pub attention: AttentionForm,
    /// Sparse attention.
    pub dsa: Dsa,
    /// Whether to load the MTP layer.
    pub load_mtp: bool,
    /// Which reads are compared with the container's checksums. [`Verify::All`] includes the resident weights, which
    /// are then read twice.
    pub verify: Verify,
    /// Decides which experts a sample takes.
    pub verify_seed: u64,
}

impl EngineConfig {
    /// The defaults of `run` for the model in `dir`, with one compute thread and `available_bytes` of memory.
    pub fn new(dir: impl Into<PathBuf>, available_bytes: u64) -> EngineConfig {
        EngineConfig {
            dir: dir.into(),
            io: IoMode::Auto,
            device: DeviceKind::Auto,
            depth_bytes: None,
            memory: Memory::Total(None),
            available_bytes,
            threads: 1,
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
