//! A trace is recorded by whoever looks on while the engine runs.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::arch::{Arch, MlpKind};
use crate::forward::{Guess, Observer};
use crate::limits::LOOKAHEAD_LAYERS_MAX;
use crate::store::ExpertStore;
use crate::store::trace::{Header, Recorder};

/// What a trace of this model is of.
pub(super) fn header(checkpoint: &Checkpoint, store: &ExpertStore) -> Header {
    let Arch { layers, moe, .. } = &checkpoint.arch;
    let routed = layers.iter().enumerate().filter(|(_, layer)| layer.mlp == MlpKind::Sparse);
    Header {
        fingerprint: checkpoint.fingerprint(),
        layers: routed.map(|(layer, _)| layer as u16).collect(),
        experts: moe.experts as u16,
        top_k: moe.top_k as u16,
        expert_bytes: store.mean_expert_bytes() as u32,
    }
}

impl Observer for Recorder {
    fn chose(&mut self, layer: usize, ids: &[u16], _gates: &[f32]) {
        self.saw(layer, ids);
    }

    fn hints(&self) -> usize {
        LOOKAHEAD_LAYERS_MAX
    }

    fn guessed(&mut self, guess: &Guess<'_>) {
        self.foresaw(guess.layer, guess.ahead, guess.ids);
    }
}
