//! Tokens that are put through the model instead of being chosen by it: the same work and the same routing each time.

use std::sync::atomic::AtomicBool;

use super::{Engine, EngineError, Finish};
use crate::forward::Observer;

/// What to put through the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced<'a> {
    /// Leading positions that stay from what went through before; the rest of the context is forgotten.
    pub keep: usize,
    /// Tokens read as a prompt is, in chunks.
    pub prompt: &'a [u32],
    /// Tokens that follow one by one, as those of an answer do: each leaves the logits of its successor.
    pub answer: &'a [u32],
}

impl Engine {
    /// Puts `forced` through the model and leaves its positions in the context. [`Engine::stats`] then tells of the prompt
    /// and of as many decode steps as the answer has tokens; nothing is sampled. `cancel` and `observer` are those of
    /// [`Engine::generate_observed`].
    ///
    /// # Errors
    /// Where fewer positions than `keep` are there, all of it is longer than the context, or an id is beyond the
    /// vocabulary; else those of generating.
    pub fn force(
        &mut self,
        forced: &Forced,
        cancel: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<Finish, EngineError> {
        let Forced { keep, prompt, answer } = *forced;
        self.check_keep(keep, prompt.len() + answer.len())?;
        self.check_vocabulary(prompt)?;
        self.check_vocabulary(answer)?;
        self.begin_after(keep, prompt.len());
        let result = self.prefill(prompt, cancel, observer).and_then(|()| {
            for &id in answer {
                self.decode_step(&[id], cancel, observer)?;
            }
            Ok(Finish::Length)
        });
        self.end(result)
    }
}
