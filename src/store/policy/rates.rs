//! How often each expert was chosen lately, over a longer and over a shorter while.

use super::{Key, Layers, Past, Wanted};

/// One selection.
const ONE: u32 = 1 << 16;

/// A visit takes one part in so many, as a power of two, from the longer average. More are better where nothing changes,
/// fewer where topics do.
const OFTEN: u32 = 8;
/// The same of the shorter one: many more would be late to notice another topic.
const LATELY: u32 = 5;

/// Averages and ages of every expert. Time is counted in visits of the expert's layer: a row of a batch is one.
pub(super) struct Rates {
    layers: Layers,
    often: Average,
    lately: Average,
    /// The visit of the last selection.
    last: Vec<u32>,
    /// Visits of each layer.
    visits: Vec<u32>,
}

impl Rates {
    /// No selection yet.
    pub(super) fn new(layers: &Layers) -> Rates {
        Rates {
            layers: layers.clone(),
            often: Average::new(layers, OFTEN),
            lately: Average::new(layers, LATELY),
            last: vec![0; layers.keys()],
            visits: vec![0; layers.count()],
        }
    }

    /// Begins as if each layer had been visited so often, at the rates of the past.
    pub(super) fn remember(&mut self, past: &Past) {
        for layer in 0..self.layers.count() {
            let range = self.layers.range(layer);
            let total: u64 = past.usage[range.clone()].iter().sum();
            if total == 0 {
                continue;
            }
            self.visits[layer] = past.visits;
            for average in [&mut self.often, &mut self.lately] {
                // More visits than the average is over are as good as that many.
                let weight = past.visits.min(1 << average.shift) * ONE;
                average.weight[layer] = weight;
                for key in range.clone() {
                    let share = u128::from(past.usage[key]) * u128::from(past.top_k) * u128::from(weight);
                    average.heat[key] = (share / u128::from(total)) as u32;
                }
            }
        }
    }

    /// `rows` rows of a layer chose `wanted`, which is not empty. Returns the layer.
    pub(super) fn visit(&mut self, rows: u32, wanted: &[Wanted]) -> usize {
        let layer = self.layers.of(wanted[0].key);
        self.visits[layer] = self.visits[layer].wrapping_add(rows);
        for &Wanted { key, .. } in wanted {
            self.last[key as usize] = self.visits[layer];
        }
        let range = self.layers.range(layer);
        self.often.visit(layer, range.clone(), rows, wanted);
        self.lately.visit(layer, range, rows, wanted);
        layer
    }

    /// Chances in 65536, at least one, that a visit of its layer chooses `key`.
    pub(super) fn often(&self, key: Key, layer: usize) -> u32 {
        self.often.rate(key, layer)
    }

    /// The same, by the last few visits.
    pub(super) fn lately(&self, key: Key, layer: usize) -> u32 {
        self.lately.rate(key, layer)
    }

    /// Visits of its layer from the last that chose `key` to the next: 1 where the last visit did.
    pub(super) fn age(&self, key: Key, layer: usize) -> u32 {
        self.visits[layer].wrapping_sub(self.last[key as usize]).saturating_add(1)
    }
}

/// An average whose past fades.
struct Average {
    /// A visit takes one part in so many, as a power of two, from what was before.
    shift: u32,
    /// Selections of each expert, in parts of [`ONE`], as far as they have not faded.
    heat: Vec<u32>,
    /// What an expert of the layer would have that every visit chose.
    weight: Vec<u32>,
}

impl Average {
    fn new(layers: &Layers, shift: u32) -> Average {
        Average { shift, heat: vec![0; layers.keys()], weight: vec![0; layers.count()] }
    }

    fn visit(&mut self, layer: usize, range: std::ops::Range<usize>, rows: u32, wanted: &[Wanted]) {
        // What is left of one after the rows, in parts of 2^32, and the weight of the rows together.
        let (mut left, mut gained) = (1u64 << 32, 0u64);
        for _ in 0..rows {
            gained += (left * u64::from(ONE)) >> 32;
            left -= left >> self.shift;
        }
        let fade = |value: u32| ((u64::from(value) * left) >> 32) as u32;
        self.heat[range].iter_mut().for_each(|heat| *heat = fade(*heat));
        self.weight[layer] = fade(self.weight[layer]) + gained as u32;
        // Which of the rows chose it is not known.
        for &Wanted { key, rows: chosen } in wanted {
            self.heat[key as usize] += (gained * u64::from(chosen) / u64::from(rows.max(1))) as u32;
        }
    }

    fn rate(&self, key: Key, layer: usize) -> u32 {
        // A quarter of a selection for what was never seen.
        let heat = u64::from(self.heat[key as usize] + ONE / 4);
        (heat * 65536 / u64::from(self.weight[layer].max(ONE))).clamp(1, 65536) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_batch_are_visits_one_after_another() {
        let layers = Layers::new([2]);
        let (mut batch, mut single) = (Rates::new(&layers), Rates::new(&layers));
        let wanted = |rows| [Wanted { key: 0, rows }];
        batch.visit(300, &wanted(300));
        (0..300).for_each(|_| _ = single.visit(1, &wanted(1)));
        for (key, rate) in [(0, 65536), (1, 0)] {
            for rates in [&batch, &single] {
                // A quarter of a selection is added to what counts as 177 visits and as 32.
                assert!(rates.often(key, 0).abs_diff(rate) < 100 && rates.lately(key, 0).abs_diff(rate) < 520);
            }
            assert_eq!(batch.age(key, 0), single.age(key, 0));
        }
    }

    #[test]
    fn the_shorter_average_follows_first() {
        let mut rates = Rates::new(&Layers::new([2]));
        (0..1000).for_each(|_| _ = rates.visit(1, &[Wanted { key: 0, rows: 1 }]));
        (0..32).for_each(|_| _ = rates.visit(1, &[Wanted { key: 1, rows: 1 }]));
        // Of what was: (1 - 1/256)^32 = 0.882 and (1 - 1/32)^32 = 0.362.
        let near = |rate: u32, chance: f64| (f64::from(rate) / 65536.0 - chance).abs() < 0.01;
        assert!(near(rates.often(0, 0), 0.882) && near(rates.lately(0, 0), 0.362));
        assert!(near(rates.often(1, 0), 0.118) && near(rates.lately(1, 0), 0.638));
        assert_eq!((rates.age(0, 0), rates.age(1, 0)), (33, 1));
    }

    #[test]
    fn a_past_is_remembered_as_so_many_visits() {
        let mut rates = Rates::new(&Layers::new([3]));
        rates.remember(&Past { usage: &[600, 300, 100], top_k: 1, visits: 64 });
        // A quarter of a selection in 64 visits is 0.004, in 32 visits 0.008.
        for (key, share) in [(0, 0.6), (1, 0.3), (2, 0.1)] {
            let near = |rate: u32, more: f64| (f64::from(rate) / 65536.0 - share - more).abs() < 0.001;
            assert!(near(rates.often(key, 0), 0.004) && near(rates.lately(key, 0), 0.008));
        }
    }
}
