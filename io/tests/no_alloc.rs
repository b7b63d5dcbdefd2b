//! Once open, a device allocates nothing: not to submit, not to read, not to reap.
#![allow(unsafe_code, reason = "a global allocator that counts is unsafe to write")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Model, demand, kinds, lookahead, open, plan_of, span};
use millstream_io::{Device, DeviceConfig, SlabLayout, SlabPool, Wait};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator as it is; counting touches no memory of theirs.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, which is the system's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn read_some(device: &mut dyn Device, pool: &SlabPool, plans: &[SlabLayout]) {
    for round in 0..10 {
        for (tag, plan) in plans.iter().enumerate() {
            let tag = tag as u64;
            let Some(slab) = pool.take() else { panic!("a slab is missing") };
            let read = if (tag + round).is_multiple_of(2) { demand(tag, plan) } else { lookahead(tag, plan) };
            assert!(device.submit(read, slab).is_ok());
        }
        if round == 5 {
            device.cancel_lookahead();
        }
        while let Ok(Some(done)) = device.reap(Wait::Block) {
            drop(done);
        }
    }
}

#[test]
fn reading_allocates_nothing() {
    let model = Model::new(&[8 << 20]);
    for kind in kinds() {
        for mode in kind.modes() {
            let files = model.open(mode);
            let pool = SlabPool::new(2 << 20, 4).unwrap();
            let plans: Vec<_> = (0..4).map(|i| plan_of(&files, &[span(0, i * 1_500_001, 1_900_000)])).collect();
            let cfg = DeviceConfig { chunk_bytes: Some(65536), ..DeviceConfig::default() };
            let mut device = open(kind, &cfg, &files, &pool);
            // Threads may still be starting during the first windows; an allocation per read shows in all of them.
            let windows: Vec<u64> = (0..6)
                .map(|_| {
                    let before = ALLOCATIONS.load(Ordering::Relaxed);
                    read_some(&mut *device, &pool, &plans);
                    ALLOCATIONS.load(Ordering::Relaxed) - before
                })
                .collect();
            assert!(windows.contains(&0), "{kind:?}, {mode}: {windows:?} allocations in 40 reads");
        }
    }
}
