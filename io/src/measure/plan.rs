//! What is tried, and in which order. Pure.

use std::fmt;

use crate::access::IoMode;
use crate::arena::Pages;
use crate::device::{CHUNK_WHOLE, DEPTH_AUTO, DeviceConfig, DeviceKind};
use crate::limits::READER_THREADS;

/// Size of a single request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSize {
    /// The device's own choice.
    Auto,
    /// A slab is one request.
    Whole,
    /// This many bytes.
    Bytes(u32),
}

impl fmt::Display for ChunkSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChunkSize::Auto => f.write_str("auto"),
            ChunkSize::Whole => f.write_str("whole"),
            ChunkSize::Bytes(bytes) if bytes % (1 << 20) == 0 => write!(f, "{}M", bytes >> 20),
            ChunkSize::Bytes(bytes) => write!(f, "{}K", bytes >> 10),
        }
    }
}

/// One way of reading slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What reads.
    pub device: DeviceKind,
    /// How files are read.
    pub mode: IoMode,
    /// Slabs in flight.
    pub depth: u32,
    /// Size of a request.
    pub chunk: ChunkSize,
    /// Pages of the slabs.
    pub pages: Pages,
    /// Whether slabs are registered with the kernel.
    pub register: bool,
    /// Whether a kernel thread polls for submissions.
    pub sqpoll: bool,
    /// Whether completions are polled for.
    pub iopoll: bool,
}

impl Candidate {
    /// The ring, directly, as `run` uses it.
    pub const RING: Candidate = Candidate {
        device: DeviceKind::Uring,
        mode: IoMode::Direct,
        depth: 4,
        chunk: ChunkSize::Auto,
        pages: Pages::Auto,
        register: true,
        sqpoll: false,
        iopoll: false,
    };
    /// Reader threads, directly.
    pub const THREADS: Candidate = Candidate { device: DeviceKind::Threads, register: false, ..Candidate::RING };

    /// Reader threads this candidate runs, which are as many at every depth, since nobody can ask for others; 0 where it
    /// has none.
    pub fn threads(&self) -> usize {
        match self.device {
            DeviceKind::Threads | DeviceKind::Mmap => READER_THREADS,
            _ => 0,
        }
    }

    /// How the device for slabs of `slab_bytes` is opened.
    pub fn config(&self, slab_bytes: u64) -> DeviceConfig {
        let chunk_bytes = match self.chunk {
            ChunkSize::Auto => None,
            ChunkSize::Whole => Some(CHUNK_WHOLE),
            ChunkSize::Bytes(bytes) => Some(bytes),
        };
        DeviceConfig {
            kind: self.device,
            depth_bytes: (u64::from(self.depth) * slab_bytes).max(DEPTH_AUTO + 1),
            chunk_bytes,
            register: self.register,
            sqpoll: self.sqpoll,
            iopoll: self.iopoll,
            ..DeviceConfig::default()
        }
    }

    /// Whether mode, device, depth and request size are all that sets it apart: the rest is for comparison.
    pub fn is_offered(&self) -> bool {
        let default = if self.device == DeviceKind::Uring { Candidate::RING } else { Candidate::THREADS };
        (self.pages, self.register, self.sqpoll, self.iopoll)
            == (default.pages, default.register, default.sqpoll, default.iopoll)
    }

    /// Whether the bytes go through the page cache.
    pub fn uses_page_cache(&self) -> bool {
        self.mode != IoMode::Direct
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} depth {} chunk {}", self.device, self.mode, self.depth, self.chunk)?;
        if self.pages != Pages::Auto {
            write!(f, " pages {}", self.pages)?;
        }
        let switches = [
            (self.device == DeviceKind::Uring && !self.register, " unregistered"),
            (self.sqpoll, " sqpoll"),
            (self.iopoll, " iopoll"),
        ];
        switches.into_iter().filter(|(on, _)| *on).try_for_each(|(_, name)| f.write_str(name))
    }
}

/// How much is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// Every dimension at its interesting values.
    Full,
    /// Enough for a recommendation.
    Quick,
}

impl Sweep {
    /// The candidates for slabs of `slab_bytes` with at most `depth_max` in flight: none twice, and none that says
    /// nothing new, as a request larger than the slab.
    pub fn candidates(self, slab_bytes: u64, depth_max: u32) -> Vec<Candidate> {
        let mut all = Vec::new();
        let depths: (&[u32], &[u32], &[u32]) = match self {
            Sweep::Full => (&[1, 2, 3, 4, 8, 16], &[1, 2, 4, 8], &[1, 4, 8]),
            Sweep::Quick => (&[1, 2, 4, 8], &[4], &[4]),
        };
        let chunks: &[ChunkSize] = match self {
            Sweep::Full => &[
                ChunkSize::Whole,
                ChunkSize::Bytes(4 << 20),
                ChunkSize::Bytes(1 << 20),
                ChunkSize::Bytes(512 << 10),
                ChunkSize::Bytes(256 << 10),
            ],
            Sweep::Quick => &[ChunkSize::Whole],
        };
        let ring = Candidate::RING;
        let threads = Candidate::THREADS;
        all.extend(depths.0.iter().map(|&depth| Candidate { depth, ..ring }));
        all.extend(chunks.iter().map(|&chunk| Candidate { chunk, ..ring }));
        all.push(Candidate { register: false, ..ring });
        all.extend(depths.1.iter().map(|&depth| Candidate { depth, ..threads }));
        all.extend(depths.2.iter().map(|&depth| Candidate { depth, mode: IoMode::Buffered, ..threads }));
        if self == Sweep::Full {
            all.push(Candidate { chunk: ChunkSize::Whole, ..threads });
            all.push(Candidate { mode: IoMode::Buffered, ..ring });
            all.push(Candidate { mode: IoMode::DontCache, ..threads });
            all.push(Candidate { mode: IoMode::DontCache, ..ring });
            all.push(Candidate { mode: IoMode::Drop, ..threads });
            all.extend([1, 4].map(|depth| Candidate {
                depth,
                device: DeviceKind::Mmap,
                mode: IoMode::Mmap,
                ..threads
            }));
            all.push(Candidate { pages: Pages::HugeTlb, ..ring });
            all.push(Candidate { pages: Pages::Off, ..ring });
            all.push(Candidate { pages: Pages::Off, register: false, ..ring });
            all.push(Candidate { pages: Pages::Off, ..threads });
            all.push(Candidate { sqpoll: true, ..ring });
            all.push(Candidate { iopoll: true, ..ring });
        }
        let says_something = |candidate: &Candidate| match candidate.chunk {
            ChunkSize::Bytes(bytes) => u64::from(bytes) < slab_bytes,
            _ => true,
        };
        let mut kept: Vec<Candidate> = Vec::new();
        for candidate in all {
            let fitted = Candidate { depth: candidate.depth.min(depth_max.max(1)), ..candidate };
            if says_something(&fitted) && !kept.contains(&fitted) {
                kept.push(fitted);
            }
        }
        kept
    }
}

/// `0..count` in an order that depends on the seed only.
pub fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = seed;
    for last in (1..count).rev() {
        let other = (next_random(&mut state) % (last as u64 + 1)) as usize;
        order.swap(last, other);
    }
    order
}

/// SplitMix64.
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Indices `0..count` over and over, each pass in another order: no place is read twice before all were read once.
#[derive(Clone, Debug)]
pub struct Walk {
    order: Vec<usize>,
    next: usize,
    seed: u64,
}

impl Walk {
    /// A walk over `count` places.
    pub fn new(count: usize, seed: u64) -> Walk {
        Walk { order: shuffled(count, seed), next: 0, seed }
    }

    /// Places left in this pass.
    pub fn left(&self) -> usize {
        self.order.len() - self.next
    }
}

impl Iterator for Walk {
    type Item = usize;

    /// Never ends, unless there is no place.
    fn next(&mut self) -> Option<usize> {
        if self.left() == 0 {
            self.seed = self.seed.wrapping_add(1);
            self.order = shuffled(self.order.len(), self.seed);
            self.next = 0;
        }
        let place = self.order.get(self.next).copied();
        self.next += usize::from(place.is_some());
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn an_order_is_a_permutation_that_the_seed_decides() {
        for count in [0, 1, 2, 7, 100] {
            let order = shuffled(count, 5);
            assert_eq!(order, shuffled(count, 5));
            assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), (0..count).collect());
            assert_eq!(order.len(), count);
        }
        assert_ne!(shuffled(100, 1), shuffled(100, 2));
        // Every element reaches every position.
        let firsts: BTreeSet<usize> = (0..200).map(|seed| shuffled(8, seed)[0]).collect();
        assert_eq!(firsts.len(), 8);
    }

    #[test]
    fn a_pass_visits_each_place_once_and_another_pass_follows() {
        let mut walk = Walk::new(9, 3);
        let first: Vec<usize> = walk.by_ref().take(9).collect();
        assert_eq!(walk.left(), 0);
        let second: Vec<usize> = walk.by_ref().take(9).collect();
        assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), 9);
        assert_eq!(second.iter().collect::<BTreeSet<_>>().len(), 9);
        assert_ne!(first, second);
        assert_eq!(Walk::new(0, 1).next(), None);
    }

    #[test]
    fn candidates_are_distinct_and_their_devices_open() {
        for sweep in [Sweep::Full, Sweep::Quick] {
            for (slab_bytes, depth_max) in [(19 << 20, 16), (19 << 20, 2), (64 << 10, 16), (4096, 1)] {
                let list = sweep.candidates(slab_bytes, depth_max);
                for (index, candidate) in list.iter().enumerate() {
                    assert!(!list[..index].contains(candidate), "{candidate} twice");
                    assert!(candidate.depth >= 1 && candidate.depth <= depth_max);
                    assert!(candidate.config(slab_bytes).check().is_ok(), "{candidate}");
                    if let ChunkSize::Bytes(bytes) = candidate.chunk {
                        assert!(u64::from(bytes) < slab_bytes);
                    }
                }
            }
        }
        assert!(Sweep::Quick.candidates(19 << 20, 16).len() < Sweep::Full.candidates(19 << 20, 16).len());
    }

    /// What flags cannot ask for must not differ: the figure of a candidate would be another's.
    #[test]
    fn what_is_offered_differs_from_the_defaults_only_in_what_can_be_asked_for() {
        for candidate in Sweep::Full.candidates(19 << 20, 16).iter().filter(|candidate| candidate.is_offered()) {
            let config = candidate.config(19 << 20);
            let DeviceConfig { kind, depth_bytes, chunk_bytes, .. } = config;
            // Registering is the ring's.
            let register = kind == DeviceKind::Uring;
            let asked_for = DeviceConfig { kind, depth_bytes, chunk_bytes, register, ..DeviceConfig::default() };
            assert_eq!(config, asked_for, "{candidate}");
            assert_eq!(candidate.threads(), if register { 0 } else { asked_for.threads }, "{candidate}");
        }
    }

    #[test]
    fn names_tell_candidates_apart() {
        let list = Sweep::Full.candidates(19 << 20, 16);
        let names: BTreeSet<String> = list.iter().map(Candidate::to_string).collect();
        assert_eq!(names.len(), list.len());
        assert!(
            names.contains("uring direct depth 4 chunk 256K") && names.contains("threads buffered depth 1 chunk auto")
        );
    }
}
