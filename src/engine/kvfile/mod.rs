//! A context that outlives its process: what the cache keeps of each position goes into a file as it is computed, and a later
//! generation takes from there what its prompt has in common with it.
//!
//! **Same bits.** What is taken is what would have been computed. Bits of a position depend on the tokens up to it, on the
//! model, on a few settings, and on the form of attention that it and those before it were computed in. All of that is in the
//! file; what differs from this run's is not taken. Neither chunks nor threads, kernels or the length of the context matter.
//! The last token of a prompt is always computed: its logits are in no file. A context that [lasts](super::session) has
//! positions of prompts and of answers, each in the form that it was computed in, and so has what is taken of it.
//!
//! **What is read is checked** before it is part of the context. The first block that is damaged or missing, or of another
//! token, ends what is taken, and everything from there on is computed.
//!
//! **A process may be killed at any time.** The file is only added to, but where a prompt goes another way than the file did:
//! there it is cut before it is added to. So all blocks before the place that is written at are whole at every moment. A
//! write that was cut short leaves a tail that is no whole block or has no right checksum, and the next write begins with
//! cutting it away. Nothing is made durable while tokens are computed, once at the end of a generation everything is: a
//! power cut costs what was computed since, and may cost order too, which the checksums' chain finds.
//!
//! Whatever is wrong with a file costs a line and the time to compute anew, and never an answer.

mod format;
mod kept;
#[cfg(test)]
mod tests;

pub use format::{HEADER_BYTES_MOST, Header, Mismatch};
pub use kept::{KvFile, KvFileStats, Storage};

use super::sampler::SampleError;
use super::{Engine, EngineConfig, EngineError, Finish};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::forward::{ForwardError, KvCache, Step};
use crate::meter::Stage;
use crate::store::StoreError;

/// What a file must be of, for a context of this model with these settings.
pub(super) fn header_of(
    checkpoint: &Checkpoint,
    config: &EngineConfig,
    sparse: bool,
    kv: &KvCache,
) -> Result<Header, CheckpointError> {
    let EngineConfig { activations, widths, .. } = config;
    // Another release may have arithmetic with other low bits.
    let arithmetic = format!("{} {activations:?} {widths:?} sparse {sparse}", env!("CARGO_PKG_VERSION"));
    Ok(Header {
        model: checkpoint.weights_id()?,
        arithmetic: xxhash_rust::xxh3::xxh3_64(arithmetic.as_bytes()),
        bits: kv.bits(),
        widths: kv.widths().map(|(row, key)| (row as u32, key as u32)).collect(),
    })
}

impl Engine {
    /// What a file must be of, to keep contexts of this engine; none where the configuration did not ask for that.
    pub fn kv_header(&self) -> Option<&Header> {
        self.kv_header.as_ref()
    }

    /// From now on generations begin with what `storage` has of their prompts, and leave their contexts there. It holds the
    /// header of [`Engine::kv_header`], and blocks after it, or what damage made of them. Nothing is written where it is not
    /// `writable`. The context is empty after this.
    pub fn keep_context(&mut self, storage: Box<dyn Storage>, writable: bool) {
        if let Some(header) = &self.kv_header {
            self.kv.truncate(0);
            self.kv_file = Some(KvFile::new(storage, header, self.kv.capacity(), writable));
        }
    }

    /// Whether there is a file that contexts are left in.
    pub fn keeps_context(&self) -> bool {
        self.kv_file.is_some()
    }

    /// Takes into the context, which is a beginning of `prompt`, what the file has more of it. Positions that are there now.
    pub(super) fn take_kept(&mut self, prompt: &[u32]) -> usize {
        let Engine { kv_file, kv, held, prompt_form, .. } = self;
        let form = (!held.lasts()).then_some(*prompt_form);
        if let Some(file) = kv_file {
            let taken = file.begin(kv, prompt, form);
            held.note(taken, &prompt[held.len()..taken]);
            self.meter.lap(Stage::Other);
        }
        self.times.cached_tokens = self.kv.len();
        self.kv.len()
    }

    /// Adds to the file what was computed and stays: called before a step, when what earlier ones drafted and took back is
    /// gone.
    pub(super) fn keep_computed(&mut self) {
        if let Some(file) = &mut self.kv_file
            && file.keep(&self.kv)
        {
            self.meter.lap(Stage::Other);
        }
    }

    /// Makes a note of what a step computed.
    pub(super) fn note_computed(&mut self, step: &Step) {
        if let Some(file) = &mut self.kv_file {
            file.note(&self.kv, step.tokens, step.form);
        }
    }

    /// Adds the rest of a generation that came to `result` and makes it durable, or takes back all of it where that says
    /// that numbers cannot be relied on.
    pub(super) fn end_kept(&mut self, result: &Result<Finish, EngineError>) {
        let sound = match result {
            Ok(_) => true,
            // What was not read was not used.
            Err(EngineError::Forward(ForwardError::Store(error))) => {
                matches!(error, StoreError::Read { .. } | StoreError::Device(_))
            }
            // What may come next says nothing of what came.
            Err(EngineError::Constraint(_) | EngineError::Sample(SampleError::AllBanned { .. })) => true,
            Err(_) => false,
        };
        let doubted = (!sound).then(|| match result {
            // Experts that were wrong may have been in use in all generations that the context is of.
            Err(EngineError::Forward(ForwardError::Store(StoreError::Spoilt(_)))) if self.held.lasts() => 0,
            _ => self.times.cached_tokens,
        });
        if let Some(file) = &mut self.kv_file {
            file.end(&self.kv, doubted);
        }
        if let Some(doubted) = doubted {
            self.forget(doubted);
        }
    }
}
