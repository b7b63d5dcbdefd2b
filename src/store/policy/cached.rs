//! The cached experts layer by layer, and which of a layer is worth least.
//!
//! What a policy thinks of an expert changes when its layer is visited, and not in between. So the least of each layer is
//! kept, and looking for a victim compares one expert a layer.

use super::{Key, Layers};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Least {
    /// To be looked for.
    Unknown,
    /// Of all that are cached, with its worth; none of nothing.
    Known(Option<(u64, Key)>),
}

pub(super) struct Cached {
    layers: Layers,
    /// The cached experts of each layer, in no order.
    keys: Vec<Vec<Key>>,
    /// Where each expert stands in its layer's.
    place: Vec<u32>,
    least: Vec<Least>,
}

const NOWHERE: u32 = u32::MAX;

impl Cached {
    /// None of the experts of `layers`.
    pub(super) fn new(layers: &Layers) -> Cached {
        Cached {
            keys: (0..layers.count()).map(|layer| Vec::with_capacity(layers.range(layer).len())).collect(),
            place: vec![NOWHERE; layers.keys()],
            least: vec![Least::Unknown; layers.count()],
            layers: layers.clone(),
        }
    }

    pub(super) fn insert(&mut self, key: Key) {
        let layer = self.layers.of(key);
        self.place[key as usize] = self.keys[layer].len() as u32;
        self.keys[layer].push(key);
        self.changed(layer);
    }

    /// Takes `key` out, where it is there.
    pub(super) fn remove(&mut self, key: Key) {
        let place = std::mem::replace(&mut self.place[key as usize], NOWHERE);
        if place == NOWHERE {
            return;
        }
        let layer = self.layers.of(key);
        self.keys[layer].swap_remove(place as usize);
        if let Some(&moved) = self.keys[layer].get(place as usize) {
            self.place[moved as usize] = place;
        }
        self.changed(layer);
    }

    /// Experts of `layer` are worth something else than before.
    pub(super) fn changed(&mut self, layer: usize) {
        self.least[layer] = Least::Unknown;
    }

    /// The expert of least worth that is not held, the lowest number first among equals. `worth` compares within a layer;
    /// `in_all` makes of it what compares between layers, without changing the order within one.
    pub(super) fn least(
        &mut self,
        worth: impl Fn(Key) -> u64,
        in_all: impl Fn(usize, u64) -> u64,
        held: &dyn Fn(Key) -> bool,
    ) -> Option<Key> {
        let mut best: Option<(u64, Key)> = None;
        for layer in 0..self.keys.len() {
            let Some((worth, key)) = self.least_of(layer, &worth, held) else { continue };
            let candidate = (in_all(layer, worth), key);
            if best.is_none_or(|best| candidate < best) {
                best = Some(candidate);
            }
        }
        best.map(|(_, key)| key)
    }

    fn least_of(
        &mut self,
        layer: usize,
        worth: &impl Fn(Key) -> u64,
        held: &dyn Fn(Key) -> bool,
    ) -> Option<(u64, Key)> {
        if let Least::Known(least) = self.least[layer]
            && least.is_none_or(|(_, key)| !held(key))
        {
            return least;
        }
        let keys = &self.keys[layer];
        let all = keys.iter().map(|&key| (worth(key), key)).min();
        if all.is_none_or(|(_, key)| !held(key)) {
            self.least[layer] = Least::Known(all);
            return all;
        }
        keys.iter().copied().filter(|&key| !held(key)).map(|key| (worth(key), key)).min()
    }
}
