//! The heap where memory is limited: who runs out of it says so, and threads share it.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::{self, Write};

/// The system's allocator for a program, `#[global_allocator]`: where it has no more memory the program ends with an error
/// and what limits it, as it ends for whatever else it lacks. By itself it would abort, with a backtrace.
pub struct Heap;

// SAFETY: every call is passed on to the system's allocator as it came, and what it returns is returned, but for null.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`.
        had(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        had(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`.
        had(unsafe { System.realloc(pointer, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[inline]
fn had(pointer: *mut u8, bytes: usize) -> *mut u8 {
    if pointer.is_null() {
        end(bytes);
    }
    pointer
}

/// Ends the program as an error does, with exit code 1. Nothing here allocates, and no lock is taken that this thread may
/// hold.
#[cold]
fn end(bytes: usize) -> ! {
    let mut text = Text { bytes: [0; TEXT_BYTES_MAX], len: 0 };
    // A text that is too long is cut.
    let _ = write_error(&mut text, bytes, limits().into_iter().flatten());
    // SAFETY: the pointer and the length are those of an initialised part of `text`.
    unsafe { libc::write(libc::STDERR_FILENO, text.bytes.as_ptr().cast(), text.len) };
    // SAFETY: the call takes no pointer. What would be done at exit may want memory.
    unsafe { libc::_exit(1) }
}

/// `limits` are what bounds this process, each as its bytes and what sets it.
fn write_error(
    text: &mut impl Write,
    bytes: usize,
    limits: impl Iterator<Item = (u64, &'static str)>,
) -> Result<(), fmt::Error> {
    write!(
        text,
        "error: memory ran out: {bytes} bytes more cannot be had\n  hint: free memory, or give this process more"
    )?;
    for (limit, set_by) in limits {
        write!(text, "; `{set_by}` allows it {} KiB", limit >> 10)?;
    }
    text.write_char('\n')
}

/// What bounds the memory of this process.
fn limits() -> [Option<(u64, &'static str)>; 2] {
    let limit = |resource, set_by| {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the pointer is to a whole `rlimit`, which the call fills.
        let rc = unsafe { libc::getrlimit(resource, &raw mut limit) };
        (rc == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some((limit.rlim_cur, set_by))
    };
    [limit(libc::RLIMIT_AS, "ulimit -v"), limit(libc::RLIMIT_DATA, "ulimit -d")]
}

const TEXT_BYTES_MAX: usize = 512;

/// A text that lies on the stack.
struct Text {
    bytes: [u8; TEXT_BYTES_MAX],
    len: usize,
}

impl Write for Text {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let fits = part.len().min(room.len());
        room[..fits].copy_from_slice(&part.as_bytes()[..fits]);
        self.len += fits;
        if fits == part.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// From now on threads of this process allocate from one heap, where the C library would give each its own.
pub fn share_heap() {
    // SAFETY: it sets a number that the allocator reads before it makes another heap.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ran_out_is_said_with_what_limits_it_and_cut_where_it_is_too_long() {
        let mut text = Text { bytes: [0; TEXT_BYTES_MAX], len: 0 };
        let limits = [(16_000 << 10, "ulimit -v"), (1 << 20, "ulimit -d")];
        write_error(&mut text, 294_912, limits.into_iter()).unwrap();
        assert_eq!(
            std::str::from_utf8(&text.bytes[..text.len]).unwrap(),
            "error: memory ran out: 294912 bytes more cannot be had\n  hint: free memory, or give this process more; \
             `ulimit -v` allows it 16000 KiB; `ulimit -d` allows it 1024 KiB\n"
        );
        assert!(text.write_str(&"x".repeat(TEXT_BYTES_MAX)).is_err());
        assert_eq!((text.len, text.bytes[TEXT_BYTES_MAX - 1]), (TEXT_BYTES_MAX, b'x'));
    }
}
