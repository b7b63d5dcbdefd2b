//! Reads outside any device, through the page cache: of what is read once, and of one copy by itself.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use super::{FileId, FileSet};
use crate::error::{Errno, ErrnoKind, IoError, ReadRange};
use crate::limits::{AGAIN_MAX, ATTEMPTS_MAX, BACKOFF_NS_MAX, BACKOFF_NS_MIN};

impl FileSet {
    /// Reads `buf.len()` bytes at `offset`, at any alignment, through the page cache. For what is read once. Only the
    /// file itself is asked: nothing says of such bytes whether they are right, and a copy must not vouch for its file.
    ///
    /// # Errors
    /// [`IoError::EndOfFile`] where the file ends first, [`IoError::Read`] with the kernel's reason.
    pub fn read_exact_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.checked_len(file)?;
        self.read_entry(file, offset, buf)
    }

    /// As [`FileSet::read_exact_at`], from the copy on one drive and no other; `None` where that drive has none.
    pub fn read_copy(&self, file: FileId, drive: usize, offset: u64, buf: &mut [u8]) -> Option<Result<(), IoError>> {
        if self.checked_len(file).is_err() || drive >= self.drives() {
            return None;
        }
        Some(self.read_entry(self.copy_on(file, drive)?, offset, buf))
    }

    fn read_entry(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let wanted = buf.len() as u64;
        if offset.checked_add(wanted).is_none_or(|end| end > i64::MAX as u64) {
            let what = format!("{wanted} bytes at {offset} pass the largest offset");
            return Err(IoError::BadRequest { what });
        }
        let entry = self.entry(file);
        let (got, outcome) = fill(&entry.plain, offset, buf);
        let range = || ReadRange { path: Arc::clone(&entry.path), offset, wanted, got: got as u64 };
        match outcome {
            Err(errno) => Err(IoError::Read { range: range(), errno }),
            Ok(()) if got < buf.len() => Err(IoError::EndOfFile { range: range() }),
            Ok(()) => Ok(()),
        }
    }

    /// What one call through the page cache returns: bytes, all there are, or a negative errno. For the simulator.
    pub(crate) fn read_once(&self, file: FileId, offset: u64, buf: &mut [u8]) -> i32 {
        match fill(&self.entry(file).plain, offset, buf) {
            (got, Ok(())) => i32::try_from(got).unwrap_or(i32::MAX),
            (_, Err(errno)) => -errno.0,
        }
    }
}

/// Reads until `buf` is full or the file ends: the bytes that came, and why no more came where that was a refusal.
/// What passes by itself is waited out, within the bounds of a device's reads.
fn fill(file: &File, offset: u64, buf: &mut [u8]) -> (usize, Result<(), Errno>) {
    let (mut got, mut attempts, mut agains) = (0, 0, 0);
    while got < buf.len() {
        let errno = match file.read_at(&mut buf[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(count) => {
                (got, attempts, agains) = (got + count, 0, 0);
                continue;
            }
            Err(error) => Errno::of(&error),
        };
        attempts += 1;
        match errno.kind() {
            ErrnoKind::Interrupted if attempts < ATTEMPTS_MAX => {}
            ErrnoKind::Again if agains < AGAIN_MAX => {
                std::thread::sleep(Duration::from_nanos((BACKOFF_NS_MIN << agains).min(BACKOFF_NS_MAX)));
                agains += 1;
            }
            _ => return (got, Err(errno)),
        }
    }
    (got, Ok(()))
}
