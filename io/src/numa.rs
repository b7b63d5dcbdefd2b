//! On which nodes of memory pages come to lie, and on which cores threads run: both pass to threads that are started later.
#![allow(unsafe_code)]

use crate::error::{Errno, IoError};
use crate::limits::NUMBERED_MAX;

/// Where pages come to lie that a thread is the first to touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagePolicy {
    /// In turn on each of some nodes; where one is full, on another.
    Interleave,
    /// On some nodes and nowhere else: cached pages of files give way, and where nothing does, the process ends.
    Bind,
}

/// From now on pages that this thread is the first to touch lie on these nodes, and so do those of threads that it starts.
///
/// # Errors
/// [`IoError::Refused`] with what the kernel said.
pub fn place_pages(policy: PagePolicy, nodes: &[usize]) -> Result<(), IoError> {
    let mask = Mask::of(nodes)?;
    let mode = match policy {
        PagePolicy::Interleave => libc::MPOL_INTERLEAVE,
        PagePolicy::Bind => libc::MPOL_BIND,
    };
    // The kernel takes one bit fewer than it is told.
    let bits = NUMBERED_MAX + 1;
    // SAFETY: the kernel reads `NUMBERED_MAX` bits of the mask, which has as many, and keeps no pointer to it.
    let code = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.0.as_ptr(), bits) };
    if code == 0 { Ok(()) } else { Err(refused("set_mempolicy")) }
}

/// From now on this thread runs on these cores only, and so do threads that it starts.
///
/// # Errors
/// As [`place_pages`].
pub fn hold_to(cores: &[usize]) -> Result<(), IoError> {
    let mask = Mask::of(cores)?;
    // SAFETY: the kernel reads as many bytes of the mask as it has, and keeps no pointer to it.
    let code = unsafe { libc::sched_setaffinity(0, size_of_val(&mask.0), mask.0.as_ptr().cast()) };
    if code == 0 { Ok(()) } else { Err(refused("sched_setaffinity")) }
}

fn refused(call: &str) -> IoError {
    IoError::Refused { what: "numa", why: format!("{call} failed: {}", Errno::last()) }
}

/// A bit for each number.
struct Mask([u64; NUMBERED_MAX / 64]);

impl Mask {
    fn of(numbers: &[usize]) -> Result<Mask, IoError> {
        let mut mask = Mask([0; NUMBERED_MAX / 64]);
        for number in numbers {
            let Some(word) = mask.0.get_mut(number / 64) else {
                let why = format!("there is a node or core {number}, and numbers go up to {}", NUMBERED_MAX - 1);
                return Err(IoError::Refused { what: "numa", why });
            };
            *word |= 1 << (number % 64);
        }
        Ok(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel tells of the thread that asks.
    fn allowed(name: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').trim().to_owned()
    }

    #[test]
    fn numbers_are_bits_and_those_beyond_the_mask_are_refused() {
        let Mask(bits) = Mask::of(&[0, 3, 64, 130]).unwrap();
        assert_eq!(bits[..4], [0b1001, 1, 4, 0]);
        assert!(Mask::of(&[NUMBERED_MAX - 1]).is_ok());
        assert!(matches!(Mask::of(&[1, NUMBERED_MAX]), Err(IoError::Refused { what: "numa", .. })));
    }

    #[test]
    fn a_thread_stays_on_the_core_it_is_held_to_and_so_do_those_it_starts() {
        let first = allowed("Cpus_allowed_list").split([',', '-']).next().unwrap().to_owned();
        let held = std::thread::spawn(move || {
            hold_to(&[first.parse().unwrap()]).unwrap();
            let child = std::thread::spawn(|| allowed("Cpus_allowed_list"));
            (allowed("Cpus_allowed_list") == first, child.join().unwrap() == first)
        });
        assert_eq!(held.join().unwrap(), (true, true));
    }

    #[test]
    fn a_core_and_a_node_that_are_not_there_are_refused_by_name() {
        let refused = std::thread::spawn(|| {
            let core = hold_to(&[NUMBERED_MAX - 1]).unwrap_err();
            let node = place_pages(PagePolicy::Bind, &[NUMBERED_MAX - 1]).unwrap_err();
            [core, node].map(|error| (error.to_string(), error.hint()))
        });
        for ((text, hint), call) in refused.join().unwrap().into_iter().zip(["sched_setaffinity", "set_mempolicy"]) {
            assert!(text.contains(call) && hint.is_some(), "{text}");
        }
    }
}
