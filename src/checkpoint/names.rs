//! Maps by the names of tensors, of which a large checkpoint has a hundred thousand, each looked up a dozen times.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Values by names.
pub(crate) type NameMap<V> = HashMap<String, V, Names>;

/// XXH3, which takes a quarter of the time of the default for names as long as these. Its seed is another one in every
/// process, so that no file can be made in which all names collide.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names(u64);

impl Default for Names {
    fn default() -> Names {
        static SEED: OnceLock<u64> = OnceLock::new();
        Names(*SEED.get_or_init(|| RandomState::new().hash_one(0u64)))
    }
}

impl BuildHasher for Names {
    type Hasher = NameHasher;

    fn build_hasher(&self) -> NameHasher {
        NameHasher(self.0)
    }
}

/// What was hashed so far is the seed of what comes.
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    /// What ends a string: one that is nothing but a name needs no end.
    fn write_u8(&mut self, _: u8) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_their_parts_are_found_and_spread() {
        let names = |i: usize| format!("model.layers.{}.mlp.experts.{i}.down_proj.weight", i % 78);
        let map: NameMap<usize> = (0..20_000).map(|i| (names(i), i)).collect();
        assert_eq!(map.len(), 20_000);
        assert!((0..20_000).all(|i| map.get(names(i).as_str()) == Some(&i)) && !map.contains_key("model"));
        // A table takes the upper seven bits and the lower ones: of 20,000 in 4,096 each, about five to each.
        for shift in [0, 52] {
            let mut counts = vec![0; 4096];
            map.keys().for_each(|name| counts[(map.hasher().hash_one(name) >> shift) as usize & 4095] += 1);
            assert!(counts.iter().all(|&count| count < 25), "{:?}", counts.iter().max());
        }
    }
}
