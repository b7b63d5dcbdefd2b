//! A context that lasts from one generation to the next: each begins with the positions that its prompt has in common with it,
//! and computes the rest.
//!
//! A conversation is a prompt that grows. What its next turn adds is all that is computed, however long it is already; a
//! prompt that goes another way keeps what lies before the fork, to the position. The last token of a prompt is always
//! computed, for its logits.
//!
//! A position stays in the form of attention that it was computed in: an answer's in that of answers. Where the two forms
//! differ (`auto` for models whose prompts are cheaper otherwise), a conversation has the bits of a conversation, the same
//! each time it is held so, and other low bits than its text would have as one prompt.
//!
//! An engine has one context, which its memory was divided for. Who holds several sequences gives each a [`Sequence`] and
//! [exchanges](Engine::exchange) it for the engine's own when its turn comes.

use super::Engine;
use super::kvfile::KvFile;
use crate::forward::KvCache;
use crate::ops::room::Room;

/// The tokens of a context.
pub(super) struct Held {
    /// One for each position of the cache; what stands behind those is of none.
    tokens: Vec<u32>,
    /// Whether the next generation may begin with them.
    lasts: bool,
}

impl Held {
    /// Of a context of up to `context` positions, counted in `room`.
    pub(super) fn new(context: usize, room: &mut Room) -> Held {
        Held { tokens: room.empty(context), lasts: false }
    }

    /// Whether the next generation may begin with them.
    pub(super) fn lasts(&self) -> bool {
        self.lasts
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Of `positions` now, the last are those of `tokens`.
    pub(super) fn note(&mut self, positions: usize, tokens: &[u32]) {
        let before = positions - tokens.len();
        assert!(before <= self.tokens.len(), "tokens behind position {before}, and {} known", self.tokens.len());
        self.tokens.truncate(before);
        self.tokens.extend_from_slice(tokens);
    }
}

/// One of several sequences: its context, and the file that this is left in.
pub struct Sequence {
    kv: KvCache,
    held: Held,
    kv_file: Option<KvFile>,
}

impl Engine {
    /// From now on a generation begins with what the context has of its prompt.
    pub fn let_context_last(&mut self) {
        self.held.lasts = true;
    }

    /// Tokens of the context, a position each. That which ended an answer has none yet.
    pub fn held(&self) -> &[u32] {
        &self.held.tokens[..self.kv.len()]
    }

    /// An empty sequence as long as the engine's own, whose context lasts. Its memory is not part of the
    /// [budget](Engine::budget).
    pub fn new_sequence(&self) -> Sequence {
        let (arch, context) = (&self.model.arch, self.context());
        let held = Held { lasts: true, ..Held::new(context, &mut Room::default()) };
        Sequence { kv: KvCache::new(arch, context, self.model.sparse, self.kv.bits()), held, kv_file: None }
    }

    /// Goes on with `other`; what the engine held is there now.
    pub fn exchange(&mut self, other: &mut Sequence) {
        std::mem::swap(&mut self.kv, &mut other.kv);
        std::mem::swap(&mut self.held, &mut other.held);
        std::mem::swap(&mut self.kv_file, &mut other.kv_file);
    }

    /// Positions of the context that a generation of `prompt` may begin with.
    pub(super) fn held_of(&self, prompt: &[u32]) -> usize {
        let wanted = prompt.split_last().map_or(&[][..], |(_, before)| before);
        let same = self.held().iter().zip(wanted).take_while(|(held, wanted)| held == wanted).count();
        if self.held.lasts { same } else { 0 }
    }

    /// Forgets the positions of the context from `keep` on.
    pub(super) fn forget(&mut self, keep: usize) {
        self.kv.truncate(keep);
        self.held.tokens.truncate(keep);
        if let Some(file) = &mut self.kv_file {
            file.forget(keep);
        }
    }
}
