//! What every device promises, asked of the ring, the reader threads and the simulator alike.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};

use common::{Kind, Model, check_bytes, demand, kinds, lookahead, open, plan_of, span};
use millstream_io::{
    Access, Device, DeviceConfig, FileId, FileSet, FileSpan, IoError, IoMode, Priority, Read, RejectReason, Segment,
    Segments, SlabPool, Wait,
};

const MIB: u64 = 1 << 20;

fn for_every_device(test: impl Fn(Kind, IoMode)) {
    for kind in kinds() {
        for mode in kind.modes() {
            eprintln!("{kind:?}, {mode}");
            test(kind, mode);
        }
    }
}

fn reap_all(device: &mut dyn Device) -> Vec<millstream_io::Completion> {
    let mut all = Vec::new();
    while let Some(done) = device.reap(Wait::Block).unwrap() {
        all.push(done);
    }
    assert_eq!(device.in_flight(), 0);
    all
}

#[test]
fn bytes_are_the_files_own_at_any_offset_and_chunk() {
    let sizes = [5 * MIB + 4219, 3 * MIB, 777];
    let model = Model::new(&sizes);
    let wanted: Vec<Vec<FileSpan>> = vec![
        vec![span(0, 0, 5 * MIB + 4219)],
        vec![span(0, 4095, 2), span(0, 3 * MIB + 1, 70_000), span(1, 1, 2 * MIB), span(2, 0, 777)],
        vec![span(0, 5 * MIB, 4219), span(1, 3 * MIB - 1, 1)],
        vec![span(2, 776, 1)],
        vec![span(1, 12_345, 1_000_000), span(1, 12_345, 1_000_000), span(0, 1, 1)],
    ];
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(6 * MIB as usize, 3).unwrap();
        for chunk_bytes in [None, Some(65536), Some(1 << 20)] {
            for depth_bytes in [0, 1, 4 * MIB] {
                let cfg = DeviceConfig { chunk_bytes, depth_bytes, ..DeviceConfig::default() };
                let mut device = open(kind, &cfg, &files, &pool);
                let plans: Vec<_> = wanted.iter().map(|spans| plan_of(&files, spans)).collect();
                let (mut next, mut seen) = (0, Vec::new());
                while seen.len() < plans.len() {
                    while next < plans.len()
                        && let Some(mut slab) = pool.take()
                    {
                        slab.bytes_mut().fill(0x5A);
                        device.submit(demand(next as u64, &plans[next]), slab).unwrap();
                        next += 1;
                    }
                    let done = device.reap(Wait::Block).unwrap().unwrap();
                    done.result.as_ref().unwrap();
                    let tag = done.tag as usize;
                    check_bytes(&plans[tag], &wanted[tag], done.slab.bytes(), &format!("{kind:?} {mode} {cfg:?}"));
                    assert!(done.bytes >= wanted[tag].iter().map(|s| s.len).max().unwrap());
                    seen.push(tag);
                }
                seen.sort_unstable();
                assert_eq!(seen, [0, 1, 2, 3, 4]);
                assert!(device.reap(Wait::No).unwrap().is_none() && device.reap(Wait::Block).unwrap().is_none());
                let stats = device.stats();
                assert_eq!(stats.reads, 5);
                let want: u64 = plans.iter().flat_map(|p| p.segments.to_vec()).map(|s| u64::from(s.want)).sum();
                assert_eq!(stats.useful_bytes, want);
                assert!(stats.bytes >= want);
                match kind {
                    Kind::Sim => assert_eq!(stats.cpu_ns, None),
                    Kind::Threads | Kind::Map | Kind::Throttled => assert!(stats.cpu_ns.is_some_and(|ns| ns > 0)),
                    // Through the page cache workers of the kernel read.
                    Kind::Ring => {
                        let asks =
                            |access: &Access| matches!(access, Access::Direct { .. } | Access::SilentlyBuffered { .. });
                        assert_eq!(stats.cpu_ns.is_some(), files.accesses().all(asks), "{stats:?}");
                    }
                }
            }
        }
        assert_eq!(pool.free(), 3);
        assert_eq!(files.warnings(), Vec::<String>::new());
    });
}

#[test]
fn a_full_device_gives_the_slab_and_the_read_back() {
    let model = Model::new(&[MIB]);
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(MIB as usize, 3).unwrap();
        let plan = plan_of(&files, &[span(0, 0, MIB)]);
        let mut device = open(kind, &DeviceConfig { queue: 2, ..DeviceConfig::default() }, &files, &pool);
        for tag in 0..2 {
            device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
        }
        let slab = pool.take().unwrap();
        let index = slab.index();
        let rejected = device.submit(demand(2, &plan), slab).unwrap_err();
        assert_eq!((rejected.slab.index(), rejected.read, rejected.why), (index, demand(2, &plan), RejectReason::Full));
        // One reaped makes room for one.
        drop(device.reap(Wait::Block).unwrap().unwrap());
        device.submit(rejected.read, rejected.slab).unwrap();
        let mut tags: Vec<u64> = reap_all(&mut *device).iter().map(|done| done.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags.len(), 2);
        assert!(tags.contains(&2));
        drop(device);
        assert_eq!(pool.free(), 3);
    });
}

#[test]
fn requests_that_cannot_be_right_never_reach_the_kernel() {
    let model = Model::new(&[64 * 1024]);
    let good = Segment { file: FileId(0), offset: 0, len: 4096, at: 0, want: 4096 };
    let bad: Vec<(&str, Vec<Segment>)> = vec![
        ("no segment", vec![]),
        ("no byte", vec![Segment { len: 0, want: 0, ..good }]),
        ("nothing wanted", vec![Segment { want: 0, ..good }]),
        ("more wanted than asked for", vec![Segment { want: 4097, ..good }]),
        ("unaligned offset", vec![Segment { offset: 512 + 1, ..good }]),
        ("unaligned length", vec![Segment { len: 4097, ..good }]),
        ("unaligned place", vec![Segment { at: 8, ..good }]),
        ("past the slab", vec![Segment { at: 8192, ..good }]),
        ("longer than the slab", vec![Segment { len: 1 << 30, want: 1, ..good }]),
        ("offset above i64", vec![Segment { offset: 1 << 63, ..good }]),
        ("end above i64", vec![Segment { offset: (1 << 63) - 4096, ..good }]),
        ("end above u64", vec![Segment { offset: u64::MAX - 4095, ..good }]),
        ("no such file", vec![Segment { file: FileId(1), ..good }]),
        ("two to one place", vec![good, Segment { offset: 4096, ..good }]),
    ];
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(8192, 1).unwrap();
        let other = SlabPool::new(8192, 1).unwrap();
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        for (name, segments) in &bad {
            let segments = Segments::from_slice(segments).unwrap();
            let read = Read { tag: 9, priority: Priority::Demand, segments };
            let rejected = device.submit(read, pool.take().unwrap()).unwrap_err();
            assert!(
                matches!(rejected.why, RejectReason::Bad(IoError::BadRequest { .. })),
                "{name}: {:?}",
                rejected.why
            );
        }
        let plan = plan_of(&files, &[span(0, 0, 4096)]);
        let rejected = device.submit(demand(1, &plan), other.take().unwrap()).unwrap_err();
        assert!(matches!(rejected.why, RejectReason::Bad(IoError::BadRequest { .. })));
        drop(rejected);
        assert_eq!((device.in_flight(), pool.free(), other.free()), (0, 1, 1));
        assert_eq!(device.stats().bytes, 0);
        device.submit(demand(1, &plan), pool.take().unwrap()).unwrap();
        assert!(device.reap(Wait::Block).unwrap().unwrap().result.is_ok());
    });
}

/// As kernels that compute do, more threads than there are cores never wait for anything, and stop only once every byte has been
/// read: a device whose threads wait for an idle core never ends this.
#[test]
fn every_read_is_done_while_all_cores_compute() {
    let model = Model::new(&[4 * MIB]);
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(MIB as usize, 4).unwrap();
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        let computing = 2 * std::thread::available_parallelism().map_or(1, usize::from);
        let (begin, reads, read) = (Barrier::new(computing + 1), 32, AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..computing {
                scope.spawn(|| {
                    begin.wait();
                    while read.load(Relaxed) < reads {
                        std::hint::spin_loop();
                    }
                });
            }
            begin.wait();
            for tag in 0..reads as u64 {
                let spans = [span(0, tag * 4099, MIB / 2)];
                let plan = plan_of(&files, &spans);
                device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
                let done = device.reap(Wait::Block).unwrap().unwrap();
                assert_eq!((done.tag, &done.result), (tag, &Ok(())));
                check_bytes(&plan, &spans, done.slab.bytes(), "beside threads that compute");
                read.fetch_add(1, Relaxed);
            }
        });
        assert_eq!((read.into_inner(), device.in_flight()), (reads, 0));
    });
}

#[test]
fn dropping_a_busy_device_gives_every_slab_back() {
    let model = Model::new(&[8 * MIB]);
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(4 * MIB as usize, 8).unwrap();
        for reaped in 0..4 {
            for depth_bytes in [0, MIB] {
                let cfg = DeviceConfig { depth_bytes, chunk_bytes: Some(65536), ..DeviceConfig::default() };
                let mut device = open(kind, &cfg, &files, &pool);
                for tag in 0..8 {
                    let plan = plan_of(&files, &[span(0, tag * 4099, 4 * MIB - 8192)]);
                    device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
                }
                for _ in 0..reaped {
                    drop(device.reap(Wait::Block).unwrap().unwrap());
                }
                drop(device);
                assert_eq!(pool.free(), 8, "{kind:?} after {reaped}");
            }
        }
        // What was in flight has landed: the slabs are nobody's but ours now.
        let mut slabs: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        slabs.iter_mut().for_each(|slab| slab.bytes_mut().fill(7));
        assert!(slabs.iter().all(|slab| slab.bytes().iter().all(|byte| *byte == 7)));
    });
}

#[test]
fn cancelled_lookahead_comes_back_and_demand_stays() {
    let model = Model::new(&[8 * MIB]);
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(MIB as usize, 12).unwrap();
        let cfg = DeviceConfig { depth_bytes: 1, chunk_bytes: Some(65536), ..DeviceConfig::default() };
        let mut device = open(kind, &cfg, &files, &pool);
        let plan = |tag: u64| plan_of(&files, &[span(0, tag * 65536, MIB)]);
        for tag in 0..12 {
            let read = if tag % 3 == 0 { demand(tag, &plan(tag)) } else { lookahead(tag, &plan(tag)) };
            device.submit(read, pool.take().unwrap()).unwrap();
        }
        let taken_back = device.cancel_lookahead();
        assert!(taken_back <= 8);
        let done = reap_all(&mut *device);
        assert_eq!(done.len(), 12);
        let cancelled = done.iter().filter(|done| done.result == Err(IoError::Cancelled)).inspect(|done| {
            assert!(done.tag % 3 != 0, "demand {} was cancelled", done.tag);
        });
        assert_eq!(cancelled.count(), taken_back);
        for done in done.iter().filter(|done| done.result.is_ok()) {
            check_bytes(&plan(done.tag), &[span(0, done.tag * 65536, MIB)], done.slab.bytes(), "kept");
        }
        assert_eq!(device.cancel_lookahead(), 0);
        drop(done);
        assert_eq!(pool.free(), 12);
    });
}

#[test]
fn a_promoted_read_is_no_longer_cancelled_and_comes_back_once() {
    let model = Model::new(&[8 * MIB]);
    for_every_device(|kind, mode| {
        let files = model.open(mode);
        let pool = SlabPool::new(MIB as usize, 12).unwrap();
        let cfg = DeviceConfig { depth_bytes: 1, chunk_bytes: Some(65536), ..DeviceConfig::default() };
        let mut device = open(kind, &cfg, &files, &pool);
        let plan = |tag: u64| plan_of(&files, &[span(0, tag * 65536, MIB)]);
        for tag in 0..12 {
            device.submit(lookahead(tag, &plan(tag)), pool.take().unwrap()).unwrap();
        }
        // Some of them may be under way or done already, and one does not exist.
        for tag in [11, 0, 5, 5, 99] {
            device.promote(tag);
        }
        assert!(device.cancel_lookahead() <= 9);
        let mut done = reap_all(&mut *device);
        done.sort_by_key(|done| done.tag);
        assert_eq!(done.iter().map(|done| done.tag).collect::<Vec<_>>(), (0..12).collect::<Vec<_>>());
        for done in &done {
            if [0, 5, 11].contains(&done.tag) {
                done.result.as_ref().unwrap();
                check_bytes(&plan(done.tag), &[span(0, done.tag * 65536, MIB)], done.slab.bytes(), "promoted");
            }
        }
        drop(done);
        assert_eq!(pool.free(), 12);
    });
}

#[test]
fn a_file_cut_short_is_an_error_with_the_numbers_and_the_device_lives_on() {
    for_every_device(|kind, mode| {
        let model = Model::new(&[4 * MIB, MIB]);
        let files = model.open(mode);
        let pool = SlabPool::new(4 * MIB as usize, 2).unwrap();
        let plan = plan_of(&files, &[span(0, MIB, 3 * MIB)]);
        let kept = 2 * MIB + 1000;
        std::fs::OpenOptions::new().write(true).open(&model.paths[0]).unwrap().set_len(kept).unwrap();
        for chunk_bytes in [None, Some(65536)] {
            let cfg = DeviceConfig { chunk_bytes, ..DeviceConfig::default() };
            let mut device = open(kind, &cfg, &files, &pool);
            device.submit(demand(0, &plan), pool.take().unwrap()).unwrap();
            let error = device.reap(Wait::Block).unwrap().unwrap().result.unwrap_err();
            let IoError::EndOfFile { range } = &error else { panic!("{kind:?}: {error:?}") };
            assert_eq!(&*range.path, model.paths[0]);
            assert_eq!((range.offset, range.wanted, range.got), (MIB, 3 * MIB, MIB + 1000), "{kind:?} {mode}");
            assert!(error.hint().is_some());
            // The other file, and what is left of this one, can still be read.
            let spans = [span(1, 0, MIB), span(0, 0, 2 * MIB + 1000)];
            let plan = plan_of(&files, &spans);
            device.submit(demand(1, &plan), pool.take().unwrap()).unwrap();
            let done = device.reap(Wait::Block).unwrap().unwrap();
            done.result.unwrap();
            check_bytes(&plan, &spans, done.slab.bytes(), "after the error");
        }
        assert!(matches!(files.check_unchanged(), Err(IoError::Changed { path, .. }) if *path == *model.paths[0]));
        assert_eq!(pool.free(), 2);
    });
}

#[test]
fn an_io_error_fails_its_read_and_nothing_else() {
    let model = Model::new(&[MIB]);
    // Offset 0 of a process's memory is never mapped: the kernel answers EIO.
    let memory = std::path::PathBuf::from("/proc/self/mem");
    let probe = std::fs::File::open(&memory).and_then(|file| file.read_at(&mut [0; 16], 0));
    if !probe.is_err_and(|error| error.raw_os_error() == Some(libc::EIO)) {
        eprintln!("skipped: /proc/self/mem does not answer EIO here");
        return;
    }
    // A process's memory cannot be mapped.
    for kind in kinds().into_iter().filter(|kind| *kind != Kind::Map) {
        let files = Arc::new(FileSet::open(&[model.paths[0].clone(), memory.clone()], IoMode::Auto).unwrap());
        let pool = SlabPool::new(MIB as usize, 4).unwrap();
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        let broken = Segment { file: FileId(1), offset: 0, len: 8192, at: 0, want: 8192 };
        let plan = plan_of(&files, &[span(0, 0, MIB)]);
        for tag in 0..4 {
            let segments = if tag == 1 { Segments::from_slice(&[broken]).unwrap() } else { plan.segments };
            device.submit(Read { tag, priority: Priority::Demand, segments }, pool.take().unwrap()).unwrap();
        }
        for done in reap_all(&mut *device) {
            if done.tag == 1 {
                let error = done.result.unwrap_err();
                let IoError::Read { range, errno } = &error else { panic!("{error:?}") };
                assert_eq!((&*range.path, range.offset, range.wanted, range.got), (&*memory, 0, 8192, 0));
                assert_eq!(errno.name(), "EIO");
            } else {
                done.result.unwrap();
                check_bytes(&plan, &[span(0, 0, MIB)], done.slab.bytes(), "beside the error");
            }
        }
        assert_eq!(pool.free(), 4);
        assert_eq!(device.stats().retries, 1, "one retry for the damaged read");
    }
}

#[test]
fn a_ring_of_two_entries_serves_many_chunks() {
    let model = Model::new(&[8 * MIB]);
    for kind in kinds() {
        for ring_entries in [2, 3, 8] {
            let files = model.open(kind.mode());
            let pool = SlabPool::new(4 * MIB as usize, 2).unwrap();
            let cfg = DeviceConfig { ring_entries, chunk_bytes: Some(65536), threads: 1, ..DeviceConfig::default() };
            let mut device = open(kind, &cfg, &files, &pool);
            let spans = [[span(0, 0, 4 * MIB)], [span(0, 4 * MIB, 4 * MIB)]];
            for (tag, spans) in spans.iter().enumerate() {
                device.submit(demand(tag as u64, &plan_of(&files, spans)), pool.take().unwrap()).unwrap();
            }
            for done in reap_all(&mut *device) {
                done.result.unwrap();
                let spans = &spans[done.tag as usize];
                check_bytes(&plan_of(&files, spans), spans, done.slab.bytes(), "tiny ring");
            }
        }
    }
}

#[test]
fn a_child_process_started_mid_read_disturbs_nothing() {
    let model = Model::new(&[8 * MIB]);
    for kind in kinds() {
        let files = model.open(kind.mode());
        let pool = SlabPool::new(8 * MIB as usize, 3).unwrap();
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        let spans = [span(0, 0, 8 * MIB)];
        let plan = plan_of(&files, &spans);
        for tag in 0..3 {
            device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
            assert!(std::process::Command::new("/bin/sh").args(["-c", "exit 0"]).status().unwrap().success());
        }
        for done in reap_all(&mut *device) {
            done.result.unwrap();
            check_bytes(&plan, &spans, done.slab.bytes(), "with a child");
        }
    }
}
