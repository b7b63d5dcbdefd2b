//! Whether there is a ring, what it may pin, and what the user can do where it is refused.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};

use io_uring::IoUring;

use crate::device::DeviceConfig;
use crate::error::{Errno, ErrnoKind, IoError};
use crate::file::{FileId, FileSet};
use crate::limits::{SLAB_BYTES_MAX, SQPOLL_IDLE_MS};
use crate::pool::SlabPool;

/// The part of the arena the kernel has pinned, as a table of pieces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registered {
    base: usize,
    /// Where each piece ends, counted from the base; whole slabs, so that none crosses a border.
    ends: Vec<usize>,
}

impl Registered {
    /// As many slabs of a pool, from the first on, as `bytes_max` holds.
    fn within(pool: &SlabPool, bytes_max: usize) -> Registered {
        let (mut ends, mut end) = (Vec::new(), 0);
        for (stride, slabs) in pool.strides() {
            let fitting = ((bytes_max - end) / stride).min(slabs);
            // A slab is at most as big as the largest piece, so at least one fits.
            let together = SLAB_BYTES_MAX / stride;
            for first in (0..fitting).step_by(together) {
                end += stride * together.min(fitting - first);
                ends.push(end);
            }
            if fitting < slabs {
                break;
            }
        }
        Registered { base: pool.base().as_ptr() as usize, ends }
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Table index of the piece that holds the whole range.
    pub fn index_of(&self, address: usize, len: usize) -> Option<u16> {
        let from = address.checked_sub(self.base)?;
        let piece = self.ends.partition_point(|end| *end <= from);
        self.ends.get(piece).filter(|end| from + len <= **end)?;
        u16::try_from(piece).ok()
    }
}

/// Makes the ring with the newest flags the kernel takes: completions then never interrupt another thread.
pub(crate) fn set_up(cfg: &DeviceConfig) -> Result<IoUring, IoError> {
    let mut newest = IoUring::builder();
    newest.setup_single_issuer();
    let mut middle = IoUring::builder();
    // A kernel thread that submits excludes the ways in which this one would run completions.
    if !cfg.sqpoll {
        newest.setup_defer_taskrun();
        middle.setup_coop_taskrun();
    }
    let mut errno = Errno(libc::EINVAL);
    for builder in [&mut newest, &mut middle, &mut IoUring::builder()] {
        if cfg.sqpoll {
            builder.setup_sqpoll(SQPOLL_IDLE_MS);
        }
        if cfg.iopoll {
            builder.setup_iopoll();
        }
        match builder.dontfork().build(cfg.ring_entries) {
            Ok(ring) => return Ok(ring),
            Err(error) => errno = Errno::of(&error),
        }
        if errno.0 != libc::EINVAL {
            break;
        }
    }
    Err(refused("io_uring_setup", errno))
}

/// Waits until the eventfd has a count or the pause is over, and takes the count.
pub(crate) fn wait_for_event(event: &File, pause_ns: Option<u64>) -> Result<(), Errno> {
    let mut poll = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // Rounded up, so that a pause is over when the wait is.
    let pause_ms = pause_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(1_000_000)).unwrap_or(i32::MAX));
    // SAFETY: `poll` is one valid entry that outlives the call.
    let rc = unsafe { libc::poll(&raw mut poll, 1, pause_ms) };
    if rc < 0 {
        return Err(Errno::last());
    }
    take_event(event);
    Ok(())
}

/// Resets the eventfd. Its count may be 0 after a spurious wake-up.
pub(crate) fn take_event(mut event: &File) {
    let mut count = [0u8; 8];
    let _ = event.read(&mut count);
}

/// Registers the files, in the order of [`FileSet::descriptors`]; one line where that is not possible.
pub(crate) fn register_files(ring: &IoUring, files: &FileSet) -> Result<(), String> {
    if files.is_empty() {
        return Err("there is no file to register".to_owned());
    }
    let registered = ring.submitter().register_files(&files.descriptors());
    registered.map_err(|error| format!("the files are not registered ({}): no loss to speak of", Errno::of(&error)))
}

/// Position of a descriptor among the registered ones.
pub(crate) fn registered_file(file: FileId, direct: bool) -> i32 {
    (file.0 * 2 + u32::from(direct)).cast_signed()
}

/// Pins the arena, or as many whole slabs as the limit on locked memory allows, and one line where that is less than half.
pub(crate) fn register(ring: &IoUring, pool: &SlabPool) -> (Registered, Option<String>) {
    raise_memlock();
    let limit = memlock().filter(|limit| *limit != libc::RLIM_INFINITY);
    let all = Registered::within(pool, usize::MAX);
    let Err(errno) = register_pieces(ring, pool, &all) else {
        return (all, None);
    };
    let all = all.bytes();
    // Other rings and processes of the user count towards the limit too: try what it allows, then half of it.
    let allowed = limit.map_or(0, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let parts = [allowed, allowed / 2].map(|bytes| Registered::within(pool, bytes));
    let parts = parts.into_iter().filter(|part| (1..all).contains(&part.bytes()));
    let part = parts.into_iter().find(|part| register_pieces(ring, pool, part).is_ok()).unwrap_or_default();
    let allowed = limit.map_or("unlimited".to_owned(), |limit| format!("{} MiB", limit >> 20));
    let note = || {
        format!(
            "{} of {} MiB of slabs are registered with the kernel ({errno}; memory that may be locked: {allowed}); reading \
             works, and costs a little less CPU after raising `ulimit -l`",
            part.bytes().div_ceil(1 << 20),
            all.div_ceil(1 << 20)
        )
    };
    let note = (2 * part.bytes() < all).then(note);
    (part, note)
}

fn register_pieces(ring: &IoUring, pool: &SlabPool, pieces: &Registered) -> Result<(), Errno> {
    let begins = [0].into_iter().chain(pieces.ends.iter().copied());
    let table: Vec<libc::iovec> = begins
        .zip(&pieces.ends)
        .map(|(from, end)| libc::iovec {
            iov_base: pool.base().as_ptr().wrapping_add(from).cast(),
            iov_len: end - from,
        })
        .collect();
    // SAFETY: the pieces lie inside the arena, which outlives the ring: the closure of the ring's thread holds the
    // pool and drops it after the driver.
    let outcome = unsafe { ring.submitter().register_buffers(&table) };
    outcome.map_err(|error| Errno::of(&error))
}

/// The soft limit on locked memory; `None` where it cannot be read.
fn memlock() -> Option<libc::rlim_t> {
    limits_of_memlock().map(|limits| limits.rlim_cur)
}

fn limits_of_memlock() -> Option<libc::rlimit> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` is a valid place for the answer and outlives the call.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limits) };
    (rc == 0).then_some(limits)
}

/// Registered memory counts as locked: use all that this process may lock. A refusal leaves the limit as it is.
fn raise_memlock() {
    if let Some(limits) = limits_of_memlock() {
        let raised = libc::rlimit { rlim_cur: limits.rlim_max, ..limits };
        // SAFETY: `raised` is a valid limit and outlives the call.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const raised) };
    }
}

pub(crate) fn event_fd() -> Result<File, IoError> {
    // SAFETY: the call takes no memory.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(IoError::Start { what: "an eventfd", errno: Errno::last() });
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Whether an errno of a wait says "not now" rather than "not ever".
pub(crate) fn passing(errno: Errno) -> bool {
    matches!(errno.kind(), ErrnoKind::Interrupted | ErrnoKind::Again)
}

pub(crate) fn refused(step: &'static str, errno: Errno) -> IoError {
    IoError::RingRefused { step, errno, remedy: remedy(errno) }
}

/// What would make io_uring available, as far as the machine shows.
fn remedy(errno: Errno) -> String {
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let filtered = std::fs::read_to_string("/proc/thread-self/status")
        .is_ok_and(|status| status.lines().any(|line| line.starts_with("Seccomp:") && line.trim_end().ends_with('2')));
    match errno.kind() {
        ErrnoKind::Denied if switch.trim() == "1" || switch.trim() == "2" => {
            format!("kernel.io_uring_disabled is {}: allow it with `sysctl kernel.io_uring_disabled=0`", switch.trim())
        }
        ErrnoKind::Denied | ErrnoKind::NoSystemCall if filtered => {
            "a seccomp filter forbids io_uring, as container runtimes do: run with a profile that allows io_uring_setup, \
             io_uring_enter and io_uring_register"
                .to_owned()
        }
        ErrnoKind::Denied => "a security policy forbids io_uring (SELinux, AppArmor or a BPF filter)".to_owned(),
        ErrnoKind::NoSystemCall => "this kernel has no io_uring: 5.6 or newer has".to_owned(),
        ErrnoKind::NoMemory => {
            let limit = memlock().map_or(0, |limit| limit >> 10);
            format!("memory that may be locked is limited to {limit} KiB: raise `ulimit -l`")
        }
        _ => "reader threads need no io_uring: --device threads".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Slab;

    #[test]
    fn a_range_has_an_index_only_where_one_piece_holds_all_of_it() {
        let table = Registered { base: 1000, ends: vec![100, 200, 250] };
        assert_eq!(table.index_of(1000, 100), Some(0));
        assert_eq!(table.index_of(1199, 1), Some(1));
        assert_eq!(table.index_of(1200, 50), Some(2));
        for (address, len) in [(999, 1), (1099, 2), (1200, 51), (1250, 1)] {
            assert_eq!(table.index_of(address, len), None, "{len} at {address}");
        }
        assert_eq!(Registered::default().index_of(0, 1), None);
    }

    #[test]
    fn a_slab_never_crosses_a_piece_of_the_table() {
        for sizes in [&[(4096, 3)][..], &[(5000, 7), (9000, 3)], &[(19 << 20, 2), (37 << 20, 1), (1, 1)]] {
            let pool = SlabPool::of_sizes(sizes).unwrap();
            let table = Registered::within(&pool, usize::MAX);
            let slabs: Vec<_> = (0..sizes.len())
                .flat_map(|size| std::iter::from_fn(|| pool.take_of(size)).collect::<Vec<_>>())
                .collect();
            assert_eq!(table.bytes(), sizes.iter().map(|(bytes, slabs)| SlabPool::stride_bytes(*bytes) * slabs).sum());
            let is_in = |table: &Registered, slab: &Slab| {
                table.index_of(slab.bytes().as_ptr() as usize, slab.bytes().len()).is_some()
            };
            assert!(slabs.iter().all(|slab| is_in(&table, slab)), "{table:?}");
            // Of what may be locked no byte more is, and no slab that would fit is left out.
            for allowed in (0..table.bytes()).step_by(table.bytes() / 20) {
                let part = Registered::within(&pool, allowed);
                let inside = slabs.iter().take_while(|slab| is_in(&part, slab)).count();
                assert_eq!(slabs.iter().filter(|slab| is_in(&part, slab)).count(), inside);
                let next = slabs.get(inside).map_or(0, |slab| SlabPool::stride_bytes(slab.bytes().len()));
                assert!(part.bytes() <= allowed && part.bytes() + next > allowed, "{part:?} of {allowed}");
            }
        }
    }

    #[test]
    fn every_refusal_has_a_remedy() {
        for errno in [libc::EPERM, libc::ENOSYS, libc::ENOMEM, libc::EINVAL, libc::EMFILE] {
            assert!(!remedy(Errno(errno)).is_empty() && !remedy(Errno(errno)).contains('\n'));
        }
    }
}
