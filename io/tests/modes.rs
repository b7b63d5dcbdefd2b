//! Every mode, device and switch against every other: the file's own bytes, or a refusal that names what was refused.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]
#![allow(unsafe_code, reason = "what the page cache holds is asked of the kernel")]

mod common;

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use common::{Model, byte_at, demand, plan_of, span, write_file};
use millstream_io::{
    Access, CHUNK_WHOLE, DeviceConfig, DeviceKind, FileId, FileSet, FileSpan, IoError, IoMode, Pages, SlabPool, Wait,
    open_device, settle,
};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 5 * MIB + 4219;
const SLAB_BYTES: usize = 5 * MIB as usize;
const CHUNKS: [Option<u32>; 7] =
    [None, Some(CHUNK_WHOLE), Some(4 << 20), Some(2 << 20), Some(1 << 20), Some(512 << 10), Some(256 << 10)];

fn content() -> Vec<u8> {
    (0..FILE_BYTES).map(|offset| byte_at(0, offset)).collect()
}

/// The mode or switch that was refused.
fn refused(error: &IoError) -> &'static str {
    match error {
        IoError::Refused { what, .. } => what,
        IoError::DirectRefused { .. } => "direct",
        IoError::RingRefused { .. } => "io_uring",
        other => panic!("not a refusal: {other}"),
    }
}

/// What [`read_all`] reads: the start of the file, its end, and two places inside the first.
fn wanted() -> [Vec<FileSpan>; 3] {
    [
        vec![span(0, 4095, 4 * MIB + 7777)],
        vec![span(0, FILE_BYTES - 70_001, 70_001)],
        vec![span(0, 10, 3), span(0, 2 * MIB - 1, 300_000)],
    ]
}

/// Reads three slabs with odd borders, one of them more than the largest chunk, another up to the last byte of the file.
fn read_all(
    cfg: &DeviceConfig,
    files: &Arc<FileSet>,
    pool: &SlabPool,
    content: &[u8],
    context: &str,
) -> Result<(), &'static str> {
    let mut device = open_device(cfg, Arc::clone(files), pool).map_err(|error| {
        assert!(error.hint().is_some(), "{context}: no hint for {error}");
        refused(&error)
    })?;
    let wanted = wanted();
    let plans: Vec<_> = wanted.iter().map(|spans| plan_of(files, spans)).collect();
    for (tag, plan) in plans.iter().enumerate() {
        let mut slab = pool.take().unwrap();
        slab.bytes_mut().fill(0x5A);
        device.submit(demand(tag as u64, plan), slab).unwrap();
    }
    for _ in &plans {
        let done = device.reap(Wait::Block).unwrap().unwrap();
        let tag = done.tag as usize;
        done.result.unwrap_or_else(|error| panic!("{context}: {error}"));
        for (place, span) in plans[tag].places.iter().zip(&wanted[tag]) {
            let expected = &content[span.offset as usize..][..span.len as usize];
            assert!(done.slab.bytes()[place.at as usize..][..place.len as usize] == *expected, "{context}: {span:?}");
        }
    }
    Ok(())
}

/// The refusals a combination may meet; empty where it must work. The ring and the switches below depend on the machine.
fn allowed(mode: IoMode, kind: DeviceKind, cfg: &DeviceConfig, direct: bool) -> Vec<&'static str> {
    if settle(mode, kind).is_err() {
        return vec!["mmap"];
    }
    let ring = kind == DeviceKind::Uring || (kind == DeviceKind::Auto && direct);
    let mut refusals = vec![];
    if cfg.sqpoll && !ring {
        refusals.push("sqpoll");
    }
    if cfg.iopoll {
        refusals.push("iopoll");
    }
    if ring && (kind == DeviceKind::Uring || cfg.sqpoll || cfg.iopoll) {
        refusals.push("io_uring");
    }
    refusals
}

/// Every combination over the file in `dir`; how many were right, and how many refused for each reason.
fn all_combinations(dir: &Path) -> BTreeMap<&'static str, usize> {
    let path = write_file(dir, 0, FILE_BYTES);
    let content = content();
    let mut outcomes = BTreeMap::new();
    for pages in Pages::ALL {
        let pool = match SlabPool::with_pages(SLAB_BYTES, 3, pages) {
            Ok(pool) => pool,
            Err(error) => {
                assert_eq!((pages, refused(&error)), (Pages::HugeTlb, "hugetlb"), "{error}");
                *outcomes.entry("hugetlb").or_default() += 1;
                continue;
            }
        };
        for (mode, kind) in IoMode::ALL.into_iter().flat_map(|mode| DeviceKind::ALL.map(|kind| (mode, kind))) {
            let opened_as = settle(mode, kind).map_or(mode, |(mode, _)| mode);
            let files = match FileSet::open(std::slice::from_ref(&path), opened_as) {
                Ok(files) => Arc::new(files),
                Err(error) => {
                    assert!(matches!(mode, IoMode::Direct | IoMode::DontCache), "{mode}: {error}");
                    assert_eq!(refused(&error), mode.name());
                    *outcomes.entry(mode.name()).or_default() += 1;
                    continue;
                }
            };
            let direct = matches!(files.access(FileId(0)), Access::Direct { .. });
            for chunk_bytes in CHUNKS {
                for switches in 0..16u32 {
                    let on = |bit: u32| switches >> bit & 1 == 1;
                    let cfg = DeviceConfig {
                        kind,
                        chunk_bytes,
                        register: on(0),
                        register_files: on(1),
                        sqpoll: on(2),
                        iopoll: on(3),
                        // Without a ring these two take the place of what only a ring has.
                        threads: if on(0) { 1 } else { 5 },
                        depth_bytes: if on(1) { 0 } else { MIB },
                        ..DeviceConfig::default()
                    };
                    let context = format!("pages {pages}, mode {mode}, {cfg:?}");
                    let outcome = read_all(&cfg, &files, &pool, &content, &context);
                    let allowed = allowed(mode, kind, &cfg, direct);
                    match outcome {
                        Ok(()) => assert!(!allowed.contains(&"mmap") && !allowed.contains(&"sqpoll"), "{context}"),
                        Err(what) => assert!(allowed.contains(&what), "{context}: refused for {what}, not {allowed:?}"),
                    }
                    assert_eq!(pool.free(), 3, "{context}");
                    *outcomes.entry(outcome.err().unwrap_or("right")).or_default() += 1;
                }
            }
            assert_eq!(files.warnings(), Vec::<String>::new());
        }
    }
    outcomes
}

#[test]
fn every_combination_reads_the_same_bytes_or_is_refused_by_name() {
    let beside_the_build = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let outcomes = all_combinations(beside_the_build.path());
    eprintln!("{}: {outcomes:?}", beside_the_build.path().display());
    assert!(outcomes["right"] > 500 && outcomes["mmap"] > 0, "{outcomes:?}");
    match tempfile::tempdir_in("/dev/shm") {
        Ok(in_memory) => {
            let outcomes = all_combinations(in_memory.path());
            eprintln!("/dev/shm: {outcomes:?}");
            assert!(outcomes["right"] > 500 && outcomes["direct"] > 0, "{outcomes:?}");
        }
        Err(error) => eprintln!("skipped: no /dev/shm: {error}"),
    }
}

/// Pages of the file in the page cache.
fn cached_pages(file: &std::fs::File) -> usize {
    let bytes = file.metadata().unwrap().len() as usize;
    // SAFETY: a read-only mapping at an address of the kernel's choice; nothing reads through it.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let mut there = vec![0u8; bytes.div_ceil(4096)];
    // SAFETY: the range is the mapping, and `there` has a byte for each of its pages.
    let rc = unsafe { libc::mincore(base, bytes, there.as_mut_ptr()) };
    assert_eq!(rc, 0);
    // SAFETY: the mapping was made above and nobody uses it.
    unsafe { libc::munmap(base, bytes) };
    there.iter().filter(|byte| **byte & 1 == 1).count()
}

/// Whether the page cache has all of a file right after it was read by other means.
fn keeps_what_is_read(path: &Path) -> bool {
    let bytes = std::fs::read(path).unwrap();
    cached_pages(&std::fs::File::open(path).unwrap()) == bytes.len().div_ceil(4096)
}

#[test]
fn what_stays_in_the_page_cache_is_what_the_mode_says() {
    let model = Model::new(&[FILE_BYTES]);
    let file = std::fs::File::open(&model.paths[0]).unwrap();
    let pool = SlabPool::new(SLAB_BYTES, 3).unwrap();
    let pages = FILE_BYTES.div_ceil(4096) as usize;
    let mut touched = vec![false; pages];
    for span in wanted().iter().flatten() {
        touched[(span.offset / 4096) as usize..(span.offset + span.len).div_ceil(4096) as usize].fill(true);
    }
    let read = touched.iter().filter(|touched| **touched).count();
    let forget = || {
        // SAFETY: advice on an open descriptor.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        cached_pages(&file)
    };
    if forget() > 0 {
        eprintln!("skipped: this file system keeps what it is told to forget");
        return;
    }
    for (mode, kind) in IoMode::ALL.into_iter().flat_map(|mode| DeviceKind::ALL.map(|kind| (mode, kind))) {
        let Ok((mode, kind)) = settle(mode, kind) else { continue };
        let Ok(files) = FileSet::open(&model.paths, mode) else { continue };
        let files = Arc::new(files);
        let cfg = DeviceConfig { kind, ..DeviceConfig::default() };
        // What a probe read at the opening brought in is not what is asked about.
        forget();
        if let Err(what) = read_all(&cfg, &files, &pool, &content(), "for the page cache") {
            eprintln!("{mode}, {kind}: refused for {what}");
            continue;
        }
        let left = cached_pages(&file);
        eprintln!("{mode}, {kind}: {left} of {pages} pages");
        match files.access(FileId(0)) {
            Access::Direct { .. } => assert_eq!(left, 0, "{mode}, {kind}"),
            Access::Buffered { .. } | Access::SilentlyBuffered { .. } | Access::Mapped
                if left < read && !keeps_what_is_read(&model.paths[0]) =>
            {
                eprintln!("skipped {mode}, {kind}: memory is being reclaimed");
            }
            // What was read stays; whether its neighbours came along is the kernel's business.
            Access::Buffered { .. } | Access::SilentlyBuffered { .. } | Access::Mapped => {
                assert!(left >= read, "{mode}, {kind}: {left} of the {read} pages that were read");
            }
            // Requests that overlap may each keep the other's page for a moment; nothing near the whole file.
            Access::DontCache | Access::Dropped => assert!(left <= pages / 8, "{mode}, {kind}: {left} of {pages}"),
        }
    }
}

#[test]
fn mapped_and_anything_else_by_name_exclude_each_other() {
    use DeviceKind as K;
    use IoMode as M;
    assert_eq!(settle(M::Auto, K::Mmap), Ok((M::Mmap, K::Mmap)));
    assert_eq!(settle(M::Mmap, K::Auto), Ok((M::Mmap, K::Mmap)));
    assert_eq!(settle(M::Drop, K::Uring), Ok((M::Drop, K::Uring)));
    for (mode, kind) in [(M::Mmap, K::Uring), (M::Mmap, K::Threads), (M::Direct, K::Mmap), (M::Buffered, K::Mmap)] {
        assert_eq!(refused(&settle(mode, kind).unwrap_err()), "mmap");
    }
    // Files opened for the kernel to choose cannot be mapped behind the back of their report.
    let model = Model::new(&[4096]);
    let pool = SlabPool::new(4096, 1).unwrap();
    let cfg = DeviceConfig { kind: K::Mmap, ..DeviceConfig::default() };
    assert_eq!(refused(&open_device(&cfg, model.open(M::Auto), &pool).err().unwrap()), "mmap");
}

/// What the kernel says about the rings of this process, one entry each.
fn rings() -> Vec<String> {
    let infos = std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    infos.filter_map(|info| std::fs::read_to_string(info.path()).ok()).filter(|text| text.contains("SqMask")).collect()
}

fn threads_called(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks.filter(|t| std::fs::read_to_string(t.path().join("comm")).is_ok_and(|comm| comm.starts_with(name))).count()
}

#[test]
fn the_switches_of_the_ring_reach_the_kernel() {
    if std::env::var_os("MILLSTREAM_IO_CASE").is_none() {
        // Other tests open rings too: alone in a process of its own.
        let entry = "the_switches_of_the_ring_reach_the_kernel";
        eprintln!("{}", common::succeeded(common::child(entry, "switches", "", false)));
        return;
    }
    let model = Model::new(&[MIB, MIB, MIB]);
    let pool = SlabPool::new(MIB as usize, 2).unwrap();
    let files = model.open(IoMode::Auto);
    let base =
        DeviceConfig { kind: DeviceKind::Uring, register_files: false, register: false, ..DeviceConfig::default() };
    if let Err(error) = open_device(&base, Arc::clone(&files), &pool) {
        eprintln!("skipped: {error}");
        return;
    }
    let count = |text: &str, name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.trim().parse().ok())
    };
    for (register, register_files, sqpoll) in
        [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
    {
        let cfg = DeviceConfig { register, register_files, sqpoll, ..base };
        let device = open_device(&cfg, Arc::clone(&files), &pool).unwrap();
        let report = device.describe();
        assert_eq!((report.registered_files, report.sqpoll, report.iopoll), (register_files, sqpoll, false));
        assert_eq!(threads_called("iou-sqp"), usize::from(sqpoll));
        let found = rings();
        if found.is_empty() {
            eprintln!("skipped: the kernel tells nothing about rings");
            continue;
        }
        assert_eq!(found.len(), 1, "{found:?}");
        // A descriptor for each way to read each of three files; slabs in one piece.
        assert_eq!(count(&found[0], "UserFiles"), Some(if register_files { 6 } else { 0 }), "{}", found[0]);
        if report.registered_bytes > 0 || !register {
            assert_eq!(count(&found[0], "UserBufs"), Some(u64::from(register)), "{}", found[0]);
        }
        drop(device);
    }
}

#[test]
fn the_bound_by_the_drives_queue_is_one_below_what_sysfs_says() {
    let model = Model::new(&[MIB]);
    let files = model.open(IoMode::Auto);
    let pool = SlabPool::new(MIB as usize, 2).unwrap();
    let direct = matches!(files.access(FileId(0)), Access::Direct { .. });
    let (Some(queue), true) = (files.block_queue(FileId(0)), direct) else {
        eprintln!("skipped: no block device, or no direct reads: {:?}", files.describe());
        return;
    };
    let stated = std::fs::read_to_string(format!("/sys/block/{}/queue/nr_requests", queue.name)).unwrap();
    let stated: u64 = stated.trim().parse().unwrap();
    for kind in [DeviceKind::Auto, DeviceKind::Threads] {
        let cfg = DeviceConfig { kind, ..DeviceConfig::default() };
        let requests_max = |cfg: &DeviceConfig, files: &Arc<FileSet>| {
            open_device(cfg, Arc::clone(files), &pool).unwrap().describe().requests_max
        };
        assert_eq!(requests_max(&cfg, &files), Some(stated - 1));
        assert_eq!(requests_max(&DeviceConfig { cap_requests: false, ..cfg }, &files), None);
        // The page cache makes its own requests.
        assert_eq!(requests_max(&cfg, &model.open(IoMode::Buffered)), None);
    }
}
