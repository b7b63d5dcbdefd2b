//! Why an engine could not be opened or a job not be done.

use millstream_io::IoError;
use thiserror::Error;

use super::budget::{Bound, TooSmall};
use super::constraint::ConstraintError;
use super::sampler::{SampleError, SamplingError};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::mirror::MirrorError;
use crate::checkpoint::verify::Damage;
use crate::forward::ForwardError;
use crate::kernels::{Isa, Kernels};
use crate::model::load::LoadError;
use crate::store::{StoreError, TableError};

/// See the module's description.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The files are not a model this engine runs.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A directory is no mirror of the model.
    #[error(transparent)]
    Mirror(#[from] MirrorError),
    /// A file or the device failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Resident weights could not be loaded.
    #[error(transparent)]
    Resident(#[from] LoadError),
    /// The cancel flag was found up while the model was loaded.
    #[error("cancelled while the model was loaded")]
    Cancelled,
    /// A resident weight is not what was written.
    #[error("a weight is damaged: {0}")]
    Damaged(Box<Damage>),
    /// An expert does not fit a slab.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Not enough memory.
    #[error(transparent)]
    TooSmall(#[from] TooSmall),
    /// Too little memory to time a slice of the model in.
    #[error("timing takes {bytes} bytes of memory, more than half of what is available")]
    NoRoomToTry {
        /// Bytes that it would take.
        bytes: u64,
    },
    /// The machine lacks an instruction set that was asked for.
    #[error("this machine has no {0}")]
    NoIsa(Isa),
    /// A size in the configuration that no engine can have.
    #[error("{value} {name}: there must be {least} to {most}")]
    Size {
        /// Which size.
        name: &'static str,
        /// What it was set to.
        value: usize,
        /// Least that works.
        least: usize,
        /// Most that works.
        most: usize,
    },
    /// The context asked for is outside what the model and the engine allow.
    #[error("a context of {asked} positions was asked for; the model allows 1 to {most}")]
    Context {
        /// Positions asked for.
        asked: usize,
        /// Most that works.
        most: usize,
    },
    /// Sparse attention was asked for and the checkpoint has no indexer.
    #[error("the checkpoint has no indexer weights, so attention cannot be sparse")]
    NoIndexer,
    /// A form of attention was asked for that the model's kind of attention does not have.
    #[error("the model caches keys and values, not latents, so its attention has no other form")]
    OneForm,
    /// A draft was asked for and there is nothing that drafts.
    #[error("the MTP layer is not loaded")]
    NoMtp,
    /// A prompt without tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A prompt that leaves no room for an answer.
    #[error("the prompt has {tokens} tokens and the context {context}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the context.
        context: usize,
    },
    /// More positions are to stay in the context than are there.
    #[error("{keep} positions of the context were to stay, and it has {positions}")]
    NothingToKeep {
        /// Positions asked for.
        keep: usize,
        /// Positions there.
        positions: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Ids are below this.
        vocab: usize,
    },
    /// A sampling setting has no meaning.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A forward step failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// What constrains an answer cannot say how it goes on.
    #[error("the grammar cannot go on: {0}")]
    Constraint(#[from] ConstraintError),
}

impl EngineError {
    /// Whether nothing is wrong but that the cancel flag was up while the model was loaded.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, EngineError::Cancelled | EngineError::Resident(LoadError::Cancelled))
    }

    /// Whether the model's files are at fault, so that other copies of them would do.
    pub fn blames_files(&self) -> bool {
        match self {
            EngineError::Sample(SampleError::AllBanned { .. }) => false,
            EngineError::Checkpoint(_) | EngineError::Table(_) | EngineError::Sample(_) | EngineError::Damaged(_) => {
                true
            }
            EngineError::Resident(e) => {
                !matches!(e, LoadError::Memory { .. } | LoadError::Cancelled | LoadError::Requantized { .. })
            }
            EngineError::Forward(e) => {
                matches!(
                    e,
                    ForwardError::NotFinite { .. }
                        | ForwardError::Store(StoreError::Read { .. } | StoreError::Damaged(_) | StoreError::Unfit(_))
                )
            }
            _ => false,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            // A model that runs has no source to be fetched.
            EngineError::Checkpoint(CheckpointError::NotFinite { .. })
            | EngineError::Resident(LoadError::BadNumber(_) | LoadError::Checkpoint(CheckpointError::NotFinite { .. }))
            | EngineError::Forward(ForwardError::Store(StoreError::Unfit(_))) => Some(
                "this shard is damaged: convert or fetch it again; `millstream doctor --deep -m DIR` lists what else is".into(),
            ),
            EngineError::Sample(SampleError::AllBanned { .. }) => {
                Some("--logit-bias bans every token, or every one that may come next".into())
            }
            // Good weights and good arithmetic never come to this: see the assertions of `limits`.
            EngineError::Forward(ForwardError::NotFinite { .. }) | EngineError::Sample(_) => Some(
                "weights are damaged or a scale is wrong: `millstream doctor --deep -m DIR` says where; convert or fetch the \
                 model again; where it finds nothing, a --mirror or this machine's memory is at fault"
                    .into(),
            ),
            EngineError::Checkpoint(e) | EngineError::Resident(LoadError::Checkpoint(e)) => Some(e.hint().into()),
            EngineError::Resident(LoadError::Requantized { .. }) => Some(
                "give it no narrower width than it has (--expert-bits, --dense-bits, --io-bits, --indexer-bits), or convert \
                 the original weights"
                    .into(),
            ),
            EngineError::Mirror(e) => Some(e.hint().into()),
            EngineError::Resident(LoadError::Memory { .. }) => Some(
                "the weights that stay in memory take as much whatever --ram is: free memory, or raise `ulimit -v` or the \
                 cgroup's memory.max"
                    .into(),
            ),
            EngineError::Io(e)
            | EngineError::Resident(LoadError::Read { source: e, .. })
            | EngineError::Table(TableError { source: e, .. })
            | EngineError::Forward(ForwardError::Store(StoreError::Read { source: e, .. } | StoreError::Device(e))) => {
                e.hint()
            }
            EngineError::Forward(ForwardError::Store(StoreError::Spoilt(damaged))) if damaged.mirrored => Some(
                "run again without the copy that the warning names: leave that --mirror out, or copy its files anew"
                    .into(),
            ),
            EngineError::Damaged(_)
            | EngineError::Forward(ForwardError::Store(StoreError::Damaged(_) | StoreError::Spoilt(_))) => Some(
                "`millstream doctor --deep -m DIR` lists all that is damaged; convert or fetch the model again".into(),
            ),
            EngineError::TooSmall(e) => {
                let less = e.narrower.map_or_else(String::new, |narrower| format!("; {narrower}"));
                Some(match e.bound {
                    Bound::User => format!(
                        "the smallest --ram that works is {}; a shorter context (-c) needs less{less}",
                        e.typed()
                    ),
                    Bound::Machine => format!(
                        "free memory, or shorten the context with -c; the smallest --ram that works is {}{less}",
                        e.typed()
                    ),
                    Bound::Space { space, short } => {
                        format!("{}; a shorter context (-c) needs less{less}", e.raised(&space, short))
                    }
                })
            }
            EngineError::NoIsa(isa) => {
                let why = Kernels::why_missing(*isa).map_or_else(String::new, |why| format!("{why}; "));
                Some(format!("{why}leave --kernels out: the best one is found by itself"))
            }
            EngineError::PromptTooLong { .. } => Some("raise -c, or shorten the prompt".into()),
            EngineError::OneForm => Some("leave --attention out".into()),
            EngineError::NoIndexer => Some("leave --dsa out, or use a checkpoint that has `indexer` tensors".into()),
            _ => None,
        }
    }
}
