//! The expert that is worth least, as far as can be told, gives way: [`super::worths`] says what one is worth when its
//! layer is next.
//!
//! A model visits its layers in a circle, so that recency misleads: what a layer used just now is needed again a whole
//! round later at the earliest, while what the next layer used is needed soonest and was used longest ago. So the worth
//! of an expert is less the longer the way to its layer is. Where a guess was made of what a layer will ask for, it
//! replaces the expectation.

use super::cached::Cached;
use super::rates::Rates;
use super::worths::{self, Kind, Worths};
use super::{Key, Layers, Past, Policy, Wanted};

pub(super) struct Lookahead {
    forecast: Forecast,
    cached: Cached,
}

impl Lookahead {
    pub(super) fn new(layers: &Layers) -> Lookahead {
        Lookahead { forecast: Forecast::new(layers), cached: Cached::new(layers) }
    }
}

impl Policy for Lookahead {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        self.forecast.visit(rows, wanted);
        self.cached.changed(self.forecast.layer);
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let Lookahead { forecast, cached } = self;
        cached.least(|key| forecast.worth(key), |layer, worth| forecast.discounted(layer, worth), held)
    }

    fn evict(&mut self, key: Key) {
        self.cached.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.cached.insert(key);
    }

    fn forget(&mut self, key: Key) {
        self.cached.remove(key);
    }

    fn remember(&mut self, past: &Past) -> bool {
        self.forecast.remember(past);
        true
    }

    fn hint(&mut self, keys: &[Key]) {
        for &key in keys {
            self.cached.changed(self.forecast.guess(key));
        }
    }
}

/// What is known of an expert since the last visit of its layer.
#[derive(Clone, Copy, Default)]
struct Outlook {
    kind: Kind,
    /// Worth at the next visit by its rate alone; 0 before the first visit.
    by_rate: u32,
    /// Worth at the next visit.
    worth: u32,
}

/// What experts will be worth.
struct Forecast {
    layers: Layers,
    rates: Rates,
    worths: Worths,
    outlooks: Vec<Outlook>,
    guessed: Vec<bool>,
    /// Layers that a guess was made for.
    has_guess: Vec<bool>,
    /// The layer that asked last.
    layer: usize,
}

impl Forecast {
    fn new(layers: &Layers) -> Forecast {
        let keys = layers.keys();
        Forecast {
            layers: layers.clone(),
            rates: Rates::new(layers),
            worths: Worths::new(),
            outlooks: vec![Outlook::default(); keys],
            guessed: vec![false; keys],
            has_guess: vec![false; layers.count()],
            layer: 0,
        }
    }

    fn remember(&mut self, past: &Past) {
        self.rates.remember(past);
        for layer in 0..self.layers.count() {
            self.layers.range(layer).for_each(|key| self.foresee(key as Key, layer));
        }
    }

    /// Learns from what a layer chose, and foresees anew for all of its experts: nothing changes until its next visit.
    fn visit(&mut self, rows: u32, wanted: &[Wanted]) {
        self.layer = self.rates.visit(rows, wanted);
        let mut chosen = wanted.iter().map(|wanted| wanted.key).peekable();
        for key in self.layers.range(self.layer) {
            let was_chosen = chosen.next_if_eq(&(key as Key)).is_some();
            let Outlook { kind, by_rate, .. } = self.outlooks[key];
            self.foresee(key as Key, self.layer);
            // A batch of rows chooses nearly everything, which says nothing about one row.
            if rows == 1 && by_rate > 0 {
                // Not chosen, it was worth half of what it is worth now, a round later.
                let came = if was_chosen { worths::SURE } else { self.outlooks[key].worth / 2 };
                self.worths.saw(kind, by_rate, came);
            }
        }
        if std::mem::take(&mut self.has_guess[self.layer]) {
            self.guessed[self.layers.range(self.layer)].fill(false);
        }
    }

    /// Works out what `key` is worth at the next visit of its layer.
    fn foresee(&mut self, key: Key, layer: usize) {
        let rate = self.rates.often(key, layer);
        let kind = Kind::of(self.rates.age(key, layer), rate, self.rates.lately(key, layer));
        let by_rate = worths::by_rate(rate);
        self.outlooks[key as usize] = Outlook { kind, by_rate, worth: self.worths.worth(kind, by_rate) };
    }

    /// `key` is thought to be asked for at the next visit of its layer, which is returned.
    fn guess(&mut self, key: Key) -> usize {
        let layer = self.layers.of(key);
        self.has_guess[layer] = true;
        self.guessed[key as usize] = true;
        layer
    }

    /// What `key` is worth when its layer is next, by a guess where there is one.
    fn worth(&self, key: Key) -> u64 {
        let worth = u64::from(self.outlooks[key as usize].worth);
        match (self.has_guess[self.layers.of(key)], self.guessed[key as usize]) {
            (true, true) => worths::SURE.into(),
            (true, false) => worth / 2,
            (false, _) => worth,
        }
    }

    /// What an expert is worth here that will be worth so much when its `layer` is next: half of it where that is a round
    /// away, and in between by the way.
    fn discounted(&self, layer: usize, worth: u64) -> u64 {
        let count = self.layers.count();
        let way = if layer > self.layer { layer - self.layer } else { layer + count - self.layer };
        worth * (2 * count - way) as u64
    }
}
