//! Processor time of a thread, asked for from outside: the thread itself does nothing for it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::unix::thread::JoinHandleExt;
use std::thread::JoinHandle;

/// Nanoseconds that `thread` has run; `None` once it has ended.
pub(crate) fn cpu_ns(thread: &JoinHandle<()>) -> Option<u64> {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: a thread whose handle exists is not joined, so its `pthread_t` is valid, running or not.
    let rc = unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) };
    if rc != 0 {
        return None;
    }
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: `time` is writable memory for one timespec.
    let rc = unsafe { libc::clock_gettime(clock, time.as_mut_ptr()) };
    if rc != 0 {
        return None;
    }
    // SAFETY: the call returned 0, so it has filled `time`.
    let time = unsafe { time.assume_init() };
    Some(u64::try_from(time.tv_sec).ok()? * 1_000_000_000 + u64::try_from(time.tv_nsec).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_is_asked_for_its_own_time_and_for_none_when_it_has_ended() {
        let (tell, told) = mpsc::channel();
        let (go, going) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            // The kernel's count of this thread, in a file: nanoseconds on a processor, first.
            let mut ran_ns = 0;
            while ran_ns < 20_000_000 {
                let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
                match text.split(' ').next().and_then(|ns| ns.parse::<u64>().ok()) {
                    Some(ns) => ran_ns = ns,
                    None => break,
                }
            }
            tell.send(ran_ns).unwrap();
            let _ = going.recv();
        });
        let ran_ns = told.recv().unwrap();
        let asked_ns = cpu_ns(&thread).unwrap();
        assert!(asked_ns >= ran_ns && asked_ns < ran_ns + 10_000_000_000, "{asked_ns} and {ran_ns}");
        drop(go);
        while !thread.is_finished() {
            std::thread::yield_now();
        }
        // Its last instructions may still run; a clock that is there goes no further.
        assert!(cpu_ns(&thread).is_none_or(|ns| ns >= asked_ns));
        thread.join().unwrap();
    }
}
