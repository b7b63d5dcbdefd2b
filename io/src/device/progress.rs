//! What a raw read result means: the request is done, goes on, or failed. Pure, and shared by every device.

use crate::access::refuses_direct;
use crate::error::{Errno, ErrnoKind};
use crate::file::FileId;
use crate::limits::{AGAIN_MAX, ATTEMPTS_MAX, BACKOFF_NS_MAX, BACKOFF_NS_MIN, DAMAGE_RETRIES_MAX, SAME_END_MAX};

/// One contiguous request: file bytes `offset..offset + len` for `slab[at..at + len]`, of which `want` must arrive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chunk {
    pub file: FileId,
    pub offset: u64,
    pub at: u32,
    pub len: u32,
    pub want: u32,
    /// Bytes known to have arrived, from the start.
    pub got: u32,
    attempts: u32,
    agains: u32,
    damages: u32,
    same_end: u32,
}

/// A system call to make for a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Call {
    /// Bytes of the chunk left out because they have arrived.
    pub skip: u32,
    pub len: u32,
    pub direct: bool,
}

/// What follows from a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Done,
    /// Make [`Chunk::call`] again, not before the pause is over.
    Again {
        pause_ns: u64,
    },
    /// The file cannot be read directly; the chunk can go on once that is settled.
    Refused(Errno),
    Failed(Fault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Only direct reads are wanted, and the file cannot be read directly.
    Refused(Errno),
    Errno(Errno),
    EndOfFile,
    Stuck {
        attempts: u32,
    },
}

impl Chunk {
    pub fn new(file: FileId, offset: u64, at: u32, len: u32, want: u32) -> Chunk {
        debug_assert!(want > 0 && want <= len);
        Chunk { file, offset, at, len, want, ..Chunk::default() }
    }

    /// The next call. A direct read resumes at the aligned byte at or below the first missing one.
    pub fn call(&self, direct: bool, align: u32) -> Call {
        let skip = if direct { self.got & !(align - 1) } else { self.got };
        Call { skip, len: self.len - skip, direct }
    }

    /// Takes the result of `call`: bytes, or a negative errno.
    pub fn advance(&mut self, call: Call, result: i32) -> Step {
        self.attempts += 1;
        let step = match u32::try_from(result) {
            Ok(count) => self.arrived(call, count),
            Err(_) => self.refused(call, Errno(result.saturating_neg())),
        };
        match step {
            Step::Again { .. } if self.attempts >= ATTEMPTS_MAX => {
                Step::Failed(Fault::Stuck { attempts: self.attempts })
            }
            step => step,
        }
    }

    fn arrived(&mut self, call: Call, count: u32) -> Step {
        assert!(count <= call.len, "the kernel returned {count} bytes for a read of {}", call.len);
        let end = call.skip + count;
        // Two reads that end at the same byte, or bring nothing, are the end of the file.
        self.same_end = if count == 0 || end == self.got { self.same_end + 1 } else { 0 };
        self.got = self.got.max(end);
        if self.got >= self.want {
            Step::Done
        } else if self.same_end >= SAME_END_MAX {
            Step::Failed(Fault::EndOfFile)
        } else {
            Step::Again { pause_ns: 0 }
        }
    }

    fn refused(&mut self, call: Call, errno: Errno) -> Step {
        if call.direct && refuses_direct(errno) {
            return Step::Refused(errno);
        }
        match errno.kind() {
            ErrnoKind::Interrupted => Step::Again { pause_ns: 0 },
            ErrnoKind::Again | ErrnoKind::NoMemory if self.agains < AGAIN_MAX => {
                let pause_ns = (BACKOFF_NS_MIN << self.agains).min(BACKOFF_NS_MAX);
                self.agains += 1;
                Step::Again { pause_ns }
            }
            ErrnoKind::Damaged if self.damages < DAMAGE_RETRIES_MAX => {
                self.damages += 1;
                Step::Again { pause_ns: 0 }
            }
            ErrnoKind::Again
            | ErrnoKind::NoMemory
            | ErrnoKind::Damaged
            | ErrnoKind::Unsupported
            | ErrnoKind::Denied
            | ErrnoKind::Missing
            | ErrnoKind::TooManyFiles
            | ErrnoKind::NoSystemCall
            | ErrnoKind::Gone
            | ErrnoKind::Full
            | ErrnoKind::ReadOnly
            | ErrnoKind::Other => Step::Failed(Fault::Errno(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGAIN: Step = Step::Again { pause_ns: 0 };

    fn chunk(len: u32, want: u32) -> Chunk {
        Chunk::new(FileId(0), 4096, 0, len, want)
    }

    #[test]
    fn a_short_direct_read_resumes_at_the_aligned_byte_and_a_buffered_one_exactly() {
        let mut direct = chunk(16384, 16384);
        let call = direct.call(true, 4096);
        assert_eq!(call, Call { skip: 0, len: 16384, direct: true });
        assert_eq!(direct.advance(call, 5000), AGAIN);
        assert_eq!(direct.call(true, 4096), Call { skip: 4096, len: 12288, direct: true });
        assert_eq!(direct.call(false, 4096), Call { skip: 5000, len: 11384, direct: false });
        assert_eq!(direct.advance(direct.call(true, 4096), 12288), Step::Done);
    }

    #[test]
    fn the_end_of_the_file_may_cut_padding_but_not_wanted_bytes() {
        let mut padded = chunk(8192, 5000);
        assert_eq!(padded.advance(padded.call(true, 4096), 5000), Step::Done);

        let mut cut = chunk(8192, 8192);
        assert_eq!(cut.advance(cut.call(true, 4096), 5000), AGAIN);
        assert_eq!(cut.advance(cut.call(true, 4096), 904), AGAIN);
        assert_eq!(cut.advance(cut.call(true, 4096), 904), Step::Failed(Fault::EndOfFile));
        assert_eq!(cut.got, 5000);

        let mut none = chunk(8192, 8192);
        assert_eq!(none.advance(none.call(false, 4096), 0), AGAIN);
        assert_eq!(none.advance(none.call(false, 4096), 0), Step::Failed(Fault::EndOfFile));
    }

    #[test]
    fn one_zero_is_forgiven_when_bytes_follow() {
        let mut c = chunk(8192, 8192);
        for result in [0, 4096, 0] {
            assert_eq!(c.advance(c.call(true, 4096), result), AGAIN);
        }
        assert_eq!(c.advance(c.call(true, 4096), 4096), Step::Done);
    }

    #[test]
    fn device_errors_get_one_retry_and_passing_ones_a_bounded_number() {
        let mut eio = chunk(4096, 4096);
        assert_eq!(eio.advance(eio.call(true, 4096), -libc::EIO), AGAIN);
        let failed = Step::Failed(Fault::Errno(Errno(libc::EIO)));
        assert_eq!(eio.advance(eio.call(true, 4096), -libc::EIO), failed);

        let mut again = chunk(4096, 4096);
        let mut pauses = Vec::new();
        let last = loop {
            match again.advance(again.call(true, 4096), -libc::EAGAIN) {
                Step::Again { pause_ns } => pauses.push(pause_ns),
                step => break step,
            }
        };
        assert_eq!(last, Step::Failed(Fault::Errno(Errno(libc::EAGAIN))));
        assert_eq!(pauses.len(), AGAIN_MAX as usize);
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]) && pauses[0] > 0);
        assert!(pauses.iter().sum::<u64>() < 2_000_000_000, "the whole wait stays below two seconds");

        let mut signals = chunk(4096, 4096);
        let mut calls = 0;
        let last = loop {
            calls += 1;
            match signals.advance(signals.call(true, 4096), -libc::EINTR) {
                Step::Again { pause_ns: 0 } => {}
                step => break step,
            }
        };
        assert_eq!((calls, last), (ATTEMPTS_MAX, Step::Failed(Fault::Stuck { attempts: ATTEMPTS_MAX })));
    }

    #[test]
    fn refusal_is_told_apart_from_failure_by_how_the_call_was_made() {
        for errno in [libc::EINVAL, libc::EOPNOTSUPP, libc::EPERM] {
            let mut c = chunk(4096, 4096);
            assert_eq!(c.advance(c.call(true, 4096), -errno), Step::Refused(Errno(errno)));
            assert_eq!(c.advance(c.call(false, 4096), -errno), Step::Failed(Fault::Errno(Errno(errno))));
        }
    }
}
