//! Reads outside any device: of what is read once, and of one copy by itself.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use super::{FileId, FileSet};
use crate::access::{Access, drop_cached, refuses_direct};
use crate::error::{Errno, ErrnoKind, IoError, ReadRange};
use crate::limits::{AGAIN_MAX, ATTEMPTS_MAX, BACKOFF_NS_MAX, BACKOFF_NS_MIN, PAGE_BYTES, PLACED_BYTES_MIN};

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

    /// As [`FileSet::read_exact_at`], but in the mode of the set. Where the file is read directly and `buf` lies in a sector
    /// of memory as `offset` does in one of the file, whole sectors go around the page cache and straight into place; what is
    /// before and behind them, and a `buf` of few bytes, goes through it. In the modes that leave nothing there it is told to
    /// drop its pages.
    ///
    /// # Errors
    /// As [`FileSet::read_exact_at`]; [`IoError::DirectRefused`] where the set was opened with
    /// [`IoMode::Direct`](crate::IoMode::Direct) and a direct read is refused.
    pub fn read_placed(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.checked_len(file)?;
        let align = self.entry(file).align() as usize;
        let inside = (offset % align as u64) as usize;
        let before = (align - inside) % align;
        let whole = buf.len().saturating_sub(before) / align * align;
        let placed = buf.as_ptr() as usize % align == inside;
        if !(self.source(file).direct && placed && whole >= PLACED_BYTES_MIN - 2 * PAGE_BYTES) {
            self.read_entry(file, offset, buf)?;
            if matches!(self.access(file), Access::DontCache | Access::Dropped) {
                drop_cached(self.source(file).fd, offset, buf.len() as u64);
            }
            return Ok(());
        }
        let (head, rest) = buf.split_at_mut(before);
        let (whole, tail) = rest.split_at_mut(whole);
        let (from, to) = (offset + before as u64, offset + (before + whole.len()) as u64);
        self.read_entry(file, offset, head)?;
        self.read_directly(file, from, whole)?;
        self.read_entry(file, to, tail)
    }

    /// Reads whole sectors around the page cache; where the kernel refuses that, as the set goes on from there.
    fn read_directly(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        let entry = self.entry(file);
        let Some(direct) = &entry.direct else { return self.read_entry(file, offset, buf) };
        let (got, outcome) = fill(direct, offset, buf, entry.align() as usize);
        match outcome {
            Err(errno) if refuses_direct(errno) => self.refuse_direct(file, errno)?,
            Err(errno) => {
                let (path, wanted) = (Arc::clone(&entry.path), buf.len() as u64);
                return Err(IoError::Read { range: ReadRange { path, offset, wanted, got: got as u64 }, errno });
            }
            Ok(()) => {}
        }
        // What a direct read leaves over is not in whole sectors, or not there: then it is the end of the file.
        self.read_entry(file, offset + got as u64, &mut buf[got..])
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
        let (got, outcome) = fill(&entry.plain, offset, buf, 1);
        let range = || ReadRange { path: Arc::clone(&entry.path), offset, wanted, got: got as u64 };
        match outcome {
            Err(errno) => Err(IoError::Read { range: range(), errno }),
            Ok(()) if got < buf.len() => Err(IoError::EndOfFile { range: range() }),
            Ok(()) => Ok(()),
        }
    }

    /// What one call through the page cache returns: bytes, all there are, or a negative errno. For the simulator.
    pub(crate) fn read_once(&self, file: FileId, offset: u64, buf: &mut [u8]) -> i32 {
        match fill(&self.entry(file).plain, offset, buf, 1) {
            (got, Ok(())) => i32::try_from(got).unwrap_or(i32::MAX),
            (_, Err(errno)) => -errno.0,
        }
    }
}

/// Reads until `buf` is full, the file ends, or what came is no multiple of `unit`, so that it cannot be gone on from: the
/// bytes that came, and why no more came where that was a refusal. What passes by itself is waited out, within the bounds of
/// a device's reads.
fn fill(file: &File, offset: u64, buf: &mut [u8], unit: usize) -> (usize, Result<(), Errno>) {
    let (mut got, mut attempts, mut agains) = (0, 0, 0);
    while got < buf.len() && got.is_multiple_of(unit) {
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
