//! The machine refuses something: what runs instead, and what it says.
//!
//! Filters and limits hold for a whole process or thread, so most cases run in a child, which is this program again.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]
#![allow(unsafe_code, reason = "signals are sent thread by thread")]

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{
    Kind, Model, check_bytes, child, demand, is_root, kinds, open, open_to_all, plan_of, span, succeeded, write_file,
};
use millstream_io::limits::AGAIN_MAX;
use millstream_io::{
    Access, Device, DeviceConfig, DeviceKind, Errno, FileId, FileSet, IoError, IoMode, PageKind, Priority, Read,
    Segment, Segments, SlabPool, Wait, open_device,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

const MIB: u64 = 1 << 20;

/// Reads a file of 1 MiB + 1 through `device`, twice.
fn reads_well(device: &mut dyn Device, files: &FileSet, pool: &SlabPool) {
    let spans = [span(0, 1, MIB)];
    let plan = plan_of(files, &spans);
    for tag in 0..2 {
        device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
        let done = device.reap(Wait::Block).unwrap().unwrap();
        done.result.unwrap();
        check_bytes(&plan, &spans, done.slab.bytes(), device.describe().name);
    }
}

fn pool_for_mib() -> SlabPool {
    SlabPool::new(2 * MIB as usize, 2).unwrap()
}

/// A file in a directory that every user can reach.
fn public_file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    open_to_all(dir.path());
    let path = write_file(dir.path(), 0, MIB + 1);
    (dir, path)
}

/// Forbids io_uring to this thread and those it starts.
fn forbid_io_uring(action: SeccompAction) {
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    let rules: BTreeMap<i64, Vec<_>> = calls.into_iter().map(|call| (call, vec![])).collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap();
    let program = BpfProgram::try_from(filter).unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// Answers `pread` of `len` bytes with `errno`, in this thread and those it starts.
fn refuse_reads_of(len: u64, errno: i32) {
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let such = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, len).unwrap();
    let rules = [(libc::SYS_pread64, vec![SeccompRule::new(vec![such]).unwrap()])].into();
    let action = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

/// The kernel itself says `EAGAIN`, every time, to the threads of one device; the file is fine.
#[test]
fn a_read_that_is_put_off_for_ever_is_repeated_so_often_and_no_more_and_others_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = write_file(dir.path(), 0, MIB);
    let served = std::thread::spawn(move || {
        refuse_reads_of(12_288, libc::EAGAIN);
        let files = Arc::new(FileSet::open(std::slice::from_ref(&path), IoMode::Buffered).unwrap());
        let pool = SlabPool::new(MIB as usize, 1).unwrap();
        let mut device = open_device(&config(DeviceKind::Threads), files.clone(), &pool).unwrap();
        let mut read = |len: u32| {
            let segment = Segment { file: FileId(0), offset: 4096, len, at: 0, want: len };
            let segments = Segments::from_slice(&[segment]).unwrap();
            device.submit(Read { tag: 0, priority: Priority::Demand, segments }, pool.take().unwrap()).unwrap();
            let done = device.reap(Wait::Block).unwrap().unwrap();
            let right = done.slab.bytes()[..len as usize] == std::fs::read(&path).unwrap()[4096..4096 + len as usize];
            (done.result.map(|()| right), device.stats().retries)
        };
        [read(12_288), read(8192)]
    });
    let [(put_off, retries), (other, retries_after)] = served.join().unwrap();
    let Err(IoError::Read { range, errno }) = put_off else { panic!("{put_off:?}") };
    assert_eq!((errno.0, range.offset, range.wanted, range.got), (libc::EAGAIN, 4096, 12_288, 0));
    assert_eq!(retries, u64::from(AGAIN_MAX));
    assert_eq!((other, retries_after), (Ok(true), retries));
}

fn config(kind: DeviceKind) -> DeviceConfig {
    DeviceConfig { kind, ..DeviceConfig::default() }
}

/// Runs what the parent asked for; nothing when run as an ordinary test.
#[test]
fn child_entry() {
    let Ok(case) = std::env::var("MILLSTREAM_IO_CASE") else {
        return;
    };
    let (name, argument) = case.split_once('=').unwrap_or((&case, ""));
    let pool = |slabs| SlabPool::new(20 * MIB as usize, slabs).unwrap();
    match name {
        "killed-ring" => {
            let (_dir, path) = public_file();
            let files = Arc::new(FileSet::open(&[path], IoMode::Auto).unwrap());
            forbid_io_uring(SeccompAction::KillProcess);
            drop(open_device(&config(DeviceKind::Uring), files, &pool_for_mib()));
        }
        "killed-threads" => {
            let (_dir, path) = public_file();
            forbid_io_uring(SeccompAction::KillProcess);
            let (files, pool) = (Arc::new(FileSet::open(&[path], IoMode::Auto).unwrap()), pool_for_mib());
            let mut device = open_device(&config(DeviceKind::Threads), Arc::clone(&files), &pool).unwrap();
            assert_eq!(device.describe().fallback, None);
            reads_well(&mut *device, &files, &pool);
        }
        "memlock-0" => {
            let (_dir, path) = public_file();
            let (files, pool) = (Arc::new(FileSet::open(&[path], IoMode::Auto).unwrap()), pool(1));
            match open_device(&config(DeviceKind::Uring), Arc::clone(&files), &pool) {
                Err(error @ IoError::RingRefused { .. }) => assert!(error.hint().is_some()),
                Err(error) => panic!("{error}"),
                // Kernels differ in what they count; without registration nothing has to be locked.
                Ok(device) => println!("the ring works without locked memory: {:?}", device.describe()),
            }
            let mut device = open_device(&config(DeviceKind::Auto), Arc::clone(&files), &pool).unwrap();
            println!("report {:?}", device.describe());
            reads_well(&mut *device, &files, &pool);
        }
        "memlock" => {
            let (_dir, path) = public_file();
            let files = Arc::new(FileSet::open(&[path], IoMode::Auto).unwrap());
            let pool = SlabPool::new(2 * MIB as usize, 5).unwrap();
            let mut device = open_device(&config(DeviceKind::Auto), Arc::clone(&files), &pool).unwrap();
            println!("report {:?}", device.describe());
            if device.describe().name == "io_uring" {
                let limit: u64 = argument.parse().unwrap();
                // Slabs are registered whole: 2 MiB each, 10 MiB together.
                let registered = device.describe().registered_bytes;
                assert!(registered <= limit * MIB && registered.is_multiple_of(2 * MIB));
                assert_eq!(registered > 0, limit >= 4, "half the limit must do, whoever else locks memory");
                // Worth a word only where more than half is not registered.
                let notes = &device.describe().notes;
                assert_eq!(notes.len(), usize::from(2 * registered < 10 * MIB), "{notes:?}");
                for note in notes {
                    assert!(note.contains(&format!("{} of 10 MiB", registered / MIB)), "{note}");
                    assert!(note.contains(&format!("locked: {limit} MiB")) && note.contains("ulimit -l"), "{note}");
                }
            }
            reads_well(&mut *device, &files, &pool);
        }
        "unreadable" => {
            let error = FileSet::open(&[PathBuf::from(argument)], IoMode::Auto).unwrap_err();
            let IoError::Open { path, errno } = &error else { panic!("{error:?}") };
            assert_eq!((path.to_str(), errno.name()), (Some(argument), "EACCES"));
        }
        "descriptors" => {
            let dir = tempfile::tempdir_in("/tmp").unwrap();
            let paths: Vec<_> = (0..64).map(|file| write_file(dir.path(), file, 10)).collect();
            let error = FileSet::open(&paths, IoMode::Auto).unwrap_err();
            let IoError::Open { path, errno } = &error else { panic!("{error:?}") };
            assert_eq!(errno.name(), "EMFILE");
            assert!(paths.iter().any(|known| **known == **path));
            assert!(error.hint().unwrap().contains("ulimit -n"));
        }
        "address-space" => {
            let Err(error) = SlabPool::new(20 * MIB as usize, 100) else { panic!("2 GiB fit into 1") };
            assert_eq!(error, IoError::Memory { bytes: 2_097_152_000, errno: Errno(libc::ENOMEM) });
            assert!(error.hint().is_some());
        }
        "signals" => reads_under_signals(),
        "truncated-map" => reads_while_the_file_shrinks_and_grows(),
        _ => panic!("unknown case {name}"),
    }
}

extern "C" fn ignore(_: libc::c_int) {}

/// Calls `work` while every thread of this process gets a signal that nothing restarts, again and again; it is told how
/// many were sent so far. Returns how many were sent in all.
fn under_signals(work: impl FnOnce(&AtomicU64)) -> u64 {
    // SAFETY: an all-zero `sigaction` is a valid value of that plain C struct: no flags, so that calls are interrupted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler does nothing, and `action` outlives the call.
    let rc = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
    assert_eq!(rc, 0);
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
                    let thread: libc::pid_t = task.file_name().to_str().unwrap().parse().unwrap();
                    // SAFETY: the call takes numbers; a thread that is gone is an error and nothing else.
                    let rc = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGUSR1) };
                    sent.fetch_add(u64::from(rc == 0), Ordering::Relaxed);
                }
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        });
        work(&sent);
        stop.store(true, Ordering::Relaxed);
    });
    sent.into_inner()
}

fn reads_under_signals() {
    let model = Model::new(&[8 * MIB]);
    let spans = [span(0, 1, 8 * MIB - 5)];
    for kind in kinds().into_iter().filter(|kind| *kind != Kind::Sim) {
        for mode in kind.modes() {
            let files = model.open(mode);
            let pool = SlabPool::new(8 * MIB as usize, 3).unwrap();
            let plan = plan_of(&files, &spans);
            let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
            let sent = under_signals(|sent| {
                // Its threads are idle, which for the ring's is a wait in the kernel for a completion.
                while sent.load(Ordering::Relaxed) < 100 {
                    std::thread::yield_now();
                }
                for tag in 0..12 {
                    device.submit(demand(tag, &plan), pool.take().unwrap()).unwrap();
                    let wait = Wait::AtMost(std::time::Duration::from_secs(60));
                    let done = device.reap(wait).unwrap().unwrap();
                    done.result.unwrap();
                    check_bytes(&plan, &spans, done.slab.bytes(), "under signals");
                }
            });
            println!("{kind:?}, {mode}: {sent} signals, {} calls repeated", device.stats().retries);
            assert!(sent >= 100);
        }
    }
}

/// A file that loses its second half and gets it back, over and over: what was mapped may be gone at any moment.
fn reads_while_the_file_shrinks_and_grows() {
    let model = Model::new(&[4 * MIB]);
    let files = model.open(IoMode::Mmap);
    let pool = SlabPool::new(4 * MIB as usize, 2).unwrap();
    let (lower, all) = (plan_of(&files, &[span(0, 0, 2 * MIB)]), plan_of(&files, &[span(0, 0, 4 * MIB)]));
    let stop = AtomicBool::new(false);
    let (mut whole, mut cut) = (0, 0);
    std::thread::scope(|scope| {
        let shrinker = scope.spawn(|| {
            let file = std::fs::OpenOptions::new().write(true).open(&model.paths[0]).unwrap();
            while !stop.load(Ordering::Relaxed) {
                for bytes in [2 * MIB + 1000, 4 * MIB] {
                    file.set_len(bytes).unwrap();
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
            }
        });
        let cfg = DeviceConfig { kind: DeviceKind::Mmap, threads: 2, ..DeviceConfig::default() };
        let mut device = open_device(&cfg, Arc::clone(&files), &pool).unwrap();
        for tag in 0..2000u64 {
            let plan = if tag % 2 == 0 { &all } else { &lower };
            device.submit(demand(tag, plan), pool.take().unwrap()).unwrap();
            let done = device.reap(Wait::Block).unwrap().unwrap();
            match done.result {
                // Bytes that were cut off come back as zeros; those below the cut never change.
                Ok(()) => {
                    check_bytes(&lower, &[span(0, 0, 2 * MIB)], done.slab.bytes(), "while the file shrinks");
                    whole += 1;
                }
                Err(IoError::EndOfFile { range }) => {
                    assert!(tag % 2 == 0 && range.got >= 2 * MIB && range.got < 4 * MIB, "{range}");
                    cut += 1;
                }
                // A file back at its size looks like one that has lost a page; what does not change never fails.
                Err(IoError::Stuck { .. } | IoError::Read { .. }) if tag % 2 == 0 => cut += 1,
                Err(error) => panic!("read {tag}: {error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        shrinker.join().unwrap();
    });
    println!("{whole} whole, {cut} cut");
    assert!(whole >= 1000 && cut > 0, "{whole} whole, {cut} cut");
}

#[test]
fn a_signal_interrupts_calls_and_no_read() {
    println!("{}", succeeded(child("child_entry", "signals", "", false)));
}

/// In a child, which `SIGBUS` would kill.
#[test]
fn a_file_that_shrinks_under_its_map_is_an_error_and_no_signal() {
    println!("{}", succeeded(child("child_entry", "truncated-map", "", false)));
}

#[test]
fn io_uring_denied_by_a_filter_falls_back_with_the_cause() {
    let model = Model::new(&[MIB + 1]);
    for errno in [libc::EPERM, libc::ENOSYS] {
        let paths = model.paths.clone();
        // The filter dies with this thread, and every thread it starts inherits it.
        let thread = std::thread::spawn(move || {
            forbid_io_uring(SeccompAction::Errno(errno as u32));
            let pool = pool_for_mib();
            for mode in [IoMode::Auto, IoMode::Buffered] {
                let files = Arc::new(FileSet::open(&paths, mode).unwrap());
                let error = open_device(&config(DeviceKind::Uring), Arc::clone(&files), &pool).err().unwrap();
                let IoError::RingRefused { step, errno: got, remedy } = &error else { panic!("{error:?}") };
                assert_eq!((*step, got.0), ("io_uring_setup", errno));
                assert!(remedy.contains("seccomp") || remedy.contains("io_uring_disabled"), "{remedy}");

                let mut device = open_device(&config(DeviceKind::Auto), Arc::clone(&files), &pool).unwrap();
                let report = device.describe().clone();
                assert_eq!(report.name, "threads");
                let fallback = report.fallback.unwrap();
                assert!(!fallback.contains('\n'));
                if matches!(files.access(FileId(0)), Access::Direct { .. }) {
                    assert!(
                        fallback.contains("io_uring_setup") && fallback.contains(Errno(errno).name()),
                        "{fallback}"
                    );
                }
                reads_well(&mut *device, &files, &pool);
                drop(device);
                assert_eq!(pool.free(), 2);
            }
        });
        thread.join().unwrap();
    }
}

#[test]
fn a_filter_that_kills_spares_the_reader_threads() {
    use std::os::unix::process::ExitStatusExt;
    let killed = child("child_entry", "killed-ring", "", false);
    assert_eq!(killed.status.signal(), Some(libc::SIGSYS), "the filter works: {killed:?}");
    succeeded(child("child_entry", "killed-threads", "", false));
}

#[test]
fn without_lockable_memory_something_still_reads() {
    let text = succeeded(child("child_entry", "memlock-0", "ulimit -l 0", true));
    eprintln!("{text}");
}

#[test]
fn slabs_beyond_the_lock_limit_are_read_unregistered_with_a_note_where_they_are_most() {
    for (limit_kib, limit_mib) in [(1024, 1), (8192, 8)] {
        let before = format!("ulimit -l {limit_kib}");
        let text = succeeded(child("child_entry", &format!("memlock={limit_mib}"), &before, true));
        eprintln!("{text}");
    }
}

#[test]
fn an_arena_that_does_not_fit_is_refused_with_its_size() {
    succeeded(child("child_entry", "address-space", "ulimit -v 1048576", false));
    // More than any address space holds.
    assert!(matches!(SlabPool::new(1 << 30, 1 << 30), Err(IoError::Memory { .. })));
    assert!(matches!(SlabPool::new((1 << 30) + 1, 1), Err(IoError::BadRequest { .. })));
    assert!(matches!(SlabPool::new(0, 1), Err(IoError::BadRequest { .. })));
    assert!(matches!(SlabPool::new(1, 0), Err(IoError::BadRequest { .. })));
}

#[test]
fn direct_refused_at_open_is_buffered_or_an_error() {
    let path = PathBuf::from("/proc/version");
    let files = FileSet::open(std::slice::from_ref(&path), IoMode::Auto).unwrap();
    let Access::Buffered { why: Some(why) } = files.access(FileId(0)) else { panic!("{:?}", files.access(FileId(0))) };
    assert!(why.contains("EINVAL"), "{why}");
    let lines = files.describe();
    assert!(lines.len() == 1 && lines[0].contains("version") && lines[0].contains("EINVAL"), "{lines:?}");
    let error = FileSet::open(std::slice::from_ref(&path), IoMode::Direct).unwrap_err();
    assert!(matches!(&error, IoError::DirectRefused { path: named, .. } if **named == *path), "{error:?}");
    assert!(error.hint().is_some());
    let asked = FileSet::open(&[path], IoMode::Buffered).unwrap();
    assert_eq!(asked.access(FileId(0)), &Access::Buffered { why: None });
}

#[test]
fn direct_accepted_and_ignored_is_reported_and_not_called_direct() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no /dev/shm");
        return;
    };
    let path = write_file(dir.path(), 0, MIB + 1);
    let files = Arc::new(FileSet::open(std::slice::from_ref(&path), IoMode::Auto).unwrap());
    match files.access(FileId(0)) {
        // Before 6.6 the open itself was refused.
        Access::SilentlyBuffered { .. } | Access::Buffered { why: Some(_) } => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(FileSet::open(&[path], IoMode::Direct), Err(IoError::DirectRefused { .. })));
    for kind in [DeviceKind::Auto, DeviceKind::Threads] {
        let pool = pool_for_mib();
        let mut device = open_device(&config(kind), Arc::clone(&files), &pool).unwrap();
        assert_eq!(device.describe().name, "threads");
        assert_eq!(device.describe().fallback.is_some(), kind == DeviceKind::Auto);
        reads_well(&mut *device, &files, &pool);
    }
}

#[test]
fn a_read_that_breaks_off_in_the_middle_says_how_much_had_arrived() {
    let memory = PathBuf::from("/proc/self/mem");
    let probe = std::fs::File::open(&memory).and_then(|file| file.read_at(&mut [0; 16], 0));
    if !probe.is_err_and(|error| error.raw_os_error() == Some(libc::EIO)) {
        eprintln!("skipped: /proc/self/mem does not answer EIO here");
        return;
    }
    // Half a MiB of a file, mapped as a whole one: the kernel returns half of what is asked for, then EIO.
    let half = MIB as usize / 2;
    let file = tempfile::tempfile().unwrap();
    file.set_len(half as u64).unwrap();
    let (access, fd) = (libc::PROT_READ, std::os::fd::AsRawFd::as_raw_fd(&file));
    // SAFETY: the kernel chooses an address that nobody uses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), 2 * half, access, libc::MAP_SHARED, fd, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let offset = base as u64;
    for kind in kinds().into_iter().filter(|kind| matches!(kind, Kind::Ring | Kind::Threads)) {
        let files = Arc::new(FileSet::open(std::slice::from_ref(&memory), IoMode::Auto).unwrap());
        let pool = SlabPool::new(MIB as usize, 2).unwrap();
        let mut device = open(kind, &DeviceConfig::default(), &files, &pool);
        let broken = Segment { file: FileId(0), offset, len: MIB as u32, at: 0, want: MIB as u32 };
        let segments = Segments::from_slice(&[broken]).unwrap();
        device.submit(Read { tag: 0, priority: Priority::Demand, segments }, pool.take().unwrap()).unwrap();
        let error = device.reap(Wait::Block).unwrap().unwrap().result.unwrap_err();
        let IoError::Read { range, errno } = &error else { panic!("{error:?}") };
        assert_eq!(
            (range.offset, range.wanted, range.got, errno.name()),
            (offset, MIB, half as u64, "EIO"),
            "{kind:?}"
        );
        assert_eq!(pool.free(), 2);
    }
    // SAFETY: nothing refers to the range any more.
    assert_eq!(unsafe { libc::munmap(base, 2 * half) }, 0);
}

#[test]
fn a_shard_that_cannot_be_opened_is_named() {
    let model = Model::new(&[10, 10]);
    let missing = model.dir.path().join("part-9.bin");
    let paths = vec![model.paths[0].clone(), missing.clone(), model.paths[1].clone()];
    let error = FileSet::open(&paths, IoMode::Auto).unwrap_err();
    assert_eq!(error, IoError::Open { path: Arc::from(&*missing), errno: Errno(libc::ENOENT) });
    assert!(error.to_string().contains("part-9.bin") && error.hint().is_some());

    let error = FileSet::open(&[model.dir.path().to_owned()], IoMode::Auto).unwrap_err();
    assert!(matches!(error, IoError::NotAFile { .. }));

    let (_dir, path) = public_file();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    succeeded(child("child_entry", &format!("unreadable={}", path.display()), "", true));
    succeeded(child("child_entry", "descriptors", "ulimit -n 32", false));
    if !is_root() {
        eprintln!("note: run as root to test the change of user as well");
    }
}

#[test]
fn a_file_replaced_resized_or_rewritten_is_noticed() {
    let change = |what: &dyn Fn(&std::path::Path)| {
        let model = Model::new(&[100, 200]);
        let files = model.open(IoMode::Auto);
        files.check_unchanged().unwrap();
        what(&model.paths[1]);
        let error = files.check_unchanged().unwrap_err();
        assert!(matches!(&error, IoError::Changed { path, .. } if **path == *model.paths[1]), "{error:?}");
        // The descriptor still leads to the file that was opened, whatever the name does.
        assert_eq!(files.len_bytes(FileId(1)), 200);
        error.to_string()
    };
    let replaced = change(&|path| {
        let copy = path.with_extension("new");
        std::fs::copy(path, &copy).unwrap();
        std::fs::rename(copy, path).unwrap();
    });
    assert!(replaced.contains("another file"), "{replaced}");
    let resized = change(&|path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(150).unwrap());
    assert!(resized.contains("150 bytes, were 200"), "{resized}");
    let gone = change(&|path| std::fs::remove_file(path).unwrap());
    assert!(gone.contains("ENOENT"), "{gone}");
    let rewritten = change(&|path| {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    });
    assert!(rewritten.contains("modification time"), "{rewritten}");
}

#[test]
fn the_arena_says_which_pages_it_has() {
    let pool = SlabPool::new(19 * MIB as usize, 4).unwrap();
    let report = pool.report();
    assert_eq!(report.bytes, 76 * MIB, "four slabs of 19 MiB lie next to each other");
    assert!(report.huge_bytes <= report.bytes);
    match report.kind {
        PageKind::HugeTlb => assert_eq!(report.huge_bytes, report.bytes),
        PageKind::Transparent => assert!(report.huge_bytes * 2 >= report.bytes),
        PageKind::Small => assert!(report.note.is_some()),
    }
}
