//! How often and how lately each expert was chosen.

use super::{Key, Layers, Past, Wanted};

/// Heat of one selection. Fixed point, so that halving keeps what a few selections leave.
const ONE: u32 = 256;

/// Visits of a layer after which its experts' heat is halved: a topic is a few hundred tokens. Of 64, 128, 256 and 1024
/// this came nearest the optimum over stationary and changing traces together.
const DECAY_VISITS: u32 = 128;

/// Counters of every expert. Time is counted in visits of the expert's layer: a row of a batch is one.
#[derive(Clone, Debug)]
pub(super) struct Counters {
    layers: Layers,
    /// Recent selections, halved every decay period.
    heat: Vec<u32>,
    /// The visit of the last selection.
    last: Vec<u32>,
    /// Visits of each layer.
    visits: Vec<u32>,
}

impl Counters {
    /// No selection yet.
    pub(super) fn new(layers: &Layers) -> Counters {
        let keys = layers.keys();
        Counters { layers: layers.clone(), heat: vec![0; keys], last: vec![0; keys], visits: vec![0; layers.count()] }
    }

    /// Begins as if each layer had been visited so often, at the rates of the past.
    pub(super) fn remember(&mut self, past: &Past) {
        for layer in 0..self.layers.count() {
            let range = self.layers.range(layer);
            let total: u64 = past.usage[range.clone()].iter().sum();
            if total == 0 {
                continue;
            }
            let heat_of_all = u128::from(past.top_k) * u128::from(past.visits) * u128::from(ONE);
            for key in range {
                self.heat[key] = (u128::from(past.usage[key]) * heat_of_all / u128::from(total)) as u32;
            }
            self.visits[layer] = past.visits;
        }
    }

    /// `rows` rows of a layer chose `wanted`, which is not empty. Returns the layer.
    pub(super) fn request(&mut self, rows: u32, wanted: &[Wanted]) -> usize {
        let layer = self.layers.of(wanted[0].key);
        let before = self.visits[layer];
        self.visits[layer] = before.wrapping_add(rows);
        let halvings = (u64::from(before % DECAY_VISITS) + u64::from(rows)) / u64::from(DECAY_VISITS);
        if halvings > 0 {
            let shift = halvings.min(31) as u32;
            self.heat[self.layers.range(layer)].iter_mut().for_each(|heat| *heat >>= shift);
        }
        // Of rows that span several periods, what is left of them is as much as the window holds.
        let most = u64::from(self.window(layer));
        for &Wanted { key, rows: chosen } in wanted {
            let kept = u64::from(ONE) * u64::from(chosen) * most.min(rows.into()) / u64::from(rows.max(1));
            self.heat[key as usize] = self.heat[key as usize].saturating_add(kept as u32);
            self.last[key as usize] = self.visits[layer];
        }
        layer
    }

    /// Frequency first; recency only breaks close calls.
    pub(super) fn score(&self, key: Key, layer: usize) -> u64 {
        let recency = 255u32.saturating_sub(self.visits[layer].wrapping_sub(self.last[key as usize]));
        u64::from(self.heat[key as usize]) * 256 / u64::from(ONE) + u64::from(recency)
    }

    /// Visits that heat remembers: those since the last halving, and a whole period's worth from before it.
    fn window(&self, layer: usize) -> u32 {
        let visits = self.visits[layer];
        visits.min(DECAY_VISITS + visits % DECAY_VISITS).max(1)
    }
}
