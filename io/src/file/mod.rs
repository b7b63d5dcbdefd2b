//! The files of a model, opened once and recognised again; each read directly or through the page cache.

mod describe;
mod open;
mod read;

use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::access::{Access, IoMode, advise_random};
use crate::block::BlockQueue;
use crate::drive::{Copies, Drive, DriveSet, Mirror};
use crate::error::{Errno, IoError};
use crate::limits::{DRIVES_MAX, SECTOR_BYTES};
use open::{Identity, OpenFile, open_file};

/// A file of a [`FileSet`], by its position in the list the set was opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// All files of a model, open for as long as the set lives; of each there may be copies on other drives.
///
/// Inside the crate a copy has an id too, above those of the files: whatever reads treats it as one more file.
pub struct FileSet {
    mode: IoMode,
    align: u32,
    /// The files, then their copies.
    files: Vec<OpenFile>,
    /// Files that are not copies.
    count: usize,
    drives: Vec<Drive>,
    copies: Copies,
    warnings: Mutex<Vec<String>>,
}

/// The descriptor a read uses now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub fd: RawFd,
    pub direct: bool,
}

impl FileSet {
    /// Opens every file and decides, by evidence, how it is read. `FileId(i)` is `paths[i]`.
    ///
    /// # Errors
    /// [`IoError::Open`] or [`IoError::NotAFile`] naming the path; [`IoError::DirectRefused`] where `mode` is
    /// [`IoMode::Direct`] and a file would not really be read directly; [`IoError::Refused`] where it is
    /// [`IoMode::DontCache`] and the kernel or a file system does not take part.
    pub fn open(paths: &[PathBuf], mode: IoMode) -> Result<FileSet, IoError> {
        FileSet::open_mirrored(paths, &[], mode)
    }

    /// As [`FileSet::open`], with copies that share in the reads. A copy must be as long as its file; that its bytes
    /// are the same is the caller's word.
    ///
    /// # Errors
    /// As [`FileSet::open`], for copies too; [`IoError::NotACopy`] for one of another length, [`IoError::Changed`] for one
    /// that is not the file that was seen.
    pub fn open_mirrored(paths: &[PathBuf], mirrors: &[Mirror], mode: IoMode) -> Result<FileSet, IoError> {
        let (count, drives) = (paths.len(), mirrors.len() + 1);
        if count.saturating_mul(drives) > u32::MAX as usize || drives > DRIVES_MAX {
            return Err(IoError::BadRequest { what: format!("{count} files on {drives} drives") });
        }
        let mut files = paths.iter().map(|path| open_file(path, 0, mode)).collect::<Result<Vec<_>, _>>()?;
        let mut copies = Copies::new(count, drives);
        for file in 0..count {
            for (drive, mirror) in (1..).zip(mirrors) {
                let Some(Some(path)) = mirror.copies.get(file) else { continue };
                let copy = open_file(path, drive, mode)?;
                let seen = mirror.seen.get(file).copied().flatten();
                if seen.is_some_and(|seen| seen != (copy.identity.device, copy.identity.inode)) {
                    return Err(IoError::Changed { path: copy.path, what: REPLACED.to_owned() });
                }
                if copy.identity.bytes != files[file].identity.bytes {
                    let (path, of) = (copy.path, Arc::clone(&files[file].path));
                    let what = format!("{} bytes, not {}", copy.identity.bytes, files[file].identity.bytes);
                    return Err(IoError::NotACopy { path, of, what });
                }
                copies.put(file, drive, files.len());
                files.push(copy);
            }
        }
        let first = paths.first().and_then(|path| path.parent()).unwrap_or(Path::new("")).to_owned();
        let dirs = std::iter::once(first).chain(mirrors.iter().map(|mirror| mirror.dir.clone()));
        let drives = dirs.map(Drive::new).collect();
        let align = files.iter().map(OpenFile::align).max().unwrap_or(SECTOR_BYTES);
        Ok(FileSet { mode, align, files, count, drives, copies, warnings: Mutex::new(Vec::new()) })
    }

    /// Files of the set, copies not counted.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the set has no file.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Drives that hold the files: that of the files themselves, number 0, and those of their copies.
    pub fn drives(&self) -> usize {
        self.drives.len()
    }

    /// The directory on a drive. Panics for a number that is not of this set.
    pub fn drive_dir(&self, drive: usize) -> &Path {
        &self.drives[drive].dir
    }

    /// The mode the set was opened with.
    pub fn mode(&self) -> IoMode {
        self.mode
    }

    /// How the file is read now. Panics for an id that is not of this set.
    pub fn access(&self, file: FileId) -> &Access {
        let entry = self.entry(file);
        entry.downgraded.get().unwrap_or(&entry.opened_as)
    }

    /// How every file and every copy is read now.
    pub fn accesses(&self) -> impl Iterator<Item = &Access> {
        self.entries().map(|file| self.access(file))
    }

    /// Path the file was opened by. Panics for an id that is not of this set.
    pub fn path(&self, file: FileId) -> &Path {
        &self.entry(file).path
    }

    /// Path of the copy of a file on a drive; `None` where that drive has none. Panics as [`FileSet::path`].
    pub fn copy_path(&self, file: FileId, drive: usize) -> Option<&Path> {
        Some(self.path(self.copy_on(file, drive)?))
    }

    /// Size of the file when it was opened. Panics for an id that is not of this set.
    pub fn len_bytes(&self, file: FileId) -> u64 {
        self.entry(file).identity.bytes
    }

    /// Alignment of offsets and lengths that suits every file and copy: 4096 unless a device needs more.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Lines about files whose mode had to change after they were opened, each once, in order.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A read of the copy of a file on a drive failed, and there is another copy: that is preferred from now on. The
    /// first failure of each drive is told. Panics for an id or a number that is not of this set.
    pub fn avoid(&self, file: FileId, drive: usize, error: &IoError) {
        self.copies.failed(file.0 as usize, drive);
        let result = match error {
            _ if drive > 0 => "this mirror is not read any more where it failed",
            IoError::DirectRefused { .. } => "a mirror is read in its place",
            _ => DAMAGED,
        };
        let line = || format!("{}: {error}; {result}", self.drive_dir(drive).display());
        self.drives[drive].told_failed.call_once(|| self.warn(line()));
    }

    /// The copy of a file on a drive gave other bytes than were written, and nobody can say what else there is wrong: a
    /// mirror is not read any more at all, the file itself only where no other copy can be. The first such bytes of each
    /// drive are told; `what` goes into the line. Panics for an id or a number that is not of this set.
    pub fn distrust(&self, file: FileId, drive: usize, what: &str) {
        let Some(copy) = self.copy_on(file, drive) else { return };
        self.copies.wrong(file.0 as usize, drive);
        let result = if drive > 0 { "this mirror is not read any more" } else { DAMAGED };
        let line = || format!("{}: {what}; {result}", self.path(copy).display());
        self.drives[drive].told_wrong.call_once(|| self.warn(line()));
    }

    /// Whether wrong bytes of a drive have been told. Panics for a number that is not of this set.
    pub fn was_wrong(&self, drive: usize) -> bool {
        self.drives[drive].told_wrong.is_completed()
    }

    /// Whether every path still leads to the file that was opened, unchanged.
    ///
    /// # Errors
    /// [`IoError::Changed`] naming the first file that is gone, replaced, resized or rewritten.
    pub fn check_unchanged(&self) -> Result<(), IoError> {
        for entry in &self.files {
            let changed = |what: String| IoError::Changed { path: Arc::clone(&entry.path), what };
            let now = std::fs::metadata(&entry.path).map_err(|error| changed(format!("{}", Errno::of(&error))))?;
            let (old, now) = (entry.identity, Identity::of(&now));
            if (old.device, old.inode) != (now.device, now.inode) {
                return Err(changed(REPLACED.to_owned()));
            }
            if old.bytes != now.bytes {
                return Err(changed(format!("{} bytes, were {}", now.bytes, old.bytes)));
            }
            if old.modified != now.modified {
                return Err(changed("its modification time moved".to_owned()));
            }
        }
        Ok(())
    }

    /// Size of a file given by an id that may be wrong.
    pub(crate) fn checked_len(&self, file: FileId) -> Result<u64, IoError> {
        let entry = self
            .files
            .get(file.0 as usize)
            .filter(|_| (file.0 as usize) < self.count)
            .ok_or_else(|| IoError::BadRequest { what: format!("file {} of {}", file.0, self.count) })?;
        Ok(entry.identity.bytes)
    }

    /// Size of the file now.
    pub(crate) fn len_now(&self, file: FileId) -> Result<u64, Errno> {
        self.entry(file).plain.metadata().map(|now| now.len()).map_err(|error| Errno::of(&error))
    }

    pub(crate) fn shared_path(&self, file: FileId) -> Arc<Path> {
        Arc::clone(&self.entry(file).path)
    }

    /// The descriptor reads of `file` use now.
    pub(crate) fn source(&self, file: FileId) -> Source {
        let entry = self.entry(file);
        match &entry.direct {
            Some(direct) if entry.downgraded.get().is_none() => Source { fd: direct.as_raw_fd(), direct: true },
            _ => Source { fd: entry.plain.as_raw_fd(), direct: false },
        }
    }

    /// The files and their copies.
    pub fn entries(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..self.files.len() as u32).map(FileId)
    }

    /// The first file or copy that is read directly.
    pub(crate) fn first_direct(&self) -> Option<FileId> {
        self.entries().find(|file| self.source(*file).direct)
    }

    /// The drive that a file or copy is on.
    pub(crate) fn drive_of(&self, file: FileId) -> usize {
        self.entry(file).drive
    }

    /// The copy of a file on a drive; the file itself on drive 0.
    pub(crate) fn copy_on(&self, file: FileId, drive: usize) -> Option<FileId> {
        self.copies.on(file.0 as usize, drive).map(|place| FileId(place as u32))
    }

    /// Whether there is a choice of drives to read a file from.
    pub(crate) fn has_copies(&self, file: FileId) -> bool {
        (1..self.drives()).any(|drive| self.copy_on(file, drive).is_some())
    }

    /// The drives to read a file from now, of those not `tried` before; see [`Copies::sources`].
    pub(crate) fn sources(&self, file: FileId, tried: DriveSet) -> DriveSet {
        self.copies.sources(file.0 as usize, tried)
    }

    /// Every descriptor reads may use: two a file, the one through the page cache and the direct one, -1 for none.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let both = |entry: &OpenFile| [entry.plain.as_raw_fd(), entry.direct.as_ref().map_or(-1, AsRawFd::as_raw_fd)];
        self.files.iter().flat_map(both).collect()
    }

    /// The queue of the block device that holds the file; `None` where it cannot be found. Panics for an id that is
    /// not of this set.
    pub fn block_queue(&self, file: FileId) -> Option<BlockQueue> {
        BlockQueue::of_device(Path::new("/"), self.entry(file).identity.device)
    }

    /// The kernel refused a direct read of `file`: from now on the file is read through the page cache, with one
    /// warning. The direct descriptor stays open for the reads that still use it.
    ///
    /// # Errors
    /// [`IoError::DirectRefused`] where the set was opened with [`IoMode::Direct`].
    pub(crate) fn refuse_direct(&self, file: FileId, errno: Errno) -> Result<(), IoError> {
        let entry = self.entry(file);
        if self.mode == IoMode::Direct {
            return Err(refused(Arc::clone(&entry.path), errno));
        }
        let why = why_refused(errno);
        let line = format!("{}: {why}; reading it through the page cache", entry.path.display());
        if entry.downgraded.set(Access::Buffered { why: Some(why) }).is_ok() {
            advise_random(&entry.plain);
            self.warn(line);
        }
        Ok(())
    }

    /// Lets tests hand the kernel offsets it will refuse.
    #[cfg(test)]
    pub(crate) fn force_align(&mut self, align: u32) {
        self.align = align;
    }

    /// Lets tests put a pipe in the place of a file, whose reads then wait for as long as the test likes.
    #[cfg(test)]
    pub(crate) fn force_plain(&mut self, file: FileId, plain: std::fs::File) {
        self.files[file.0 as usize].plain = plain;
    }

    fn entry(&self, file: FileId) -> &OpenFile {
        &self.files[file.0 as usize]
    }

    fn warn(&self, line: String) {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }
}

impl fmt::Debug for FileSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSet").field("mode", &self.mode).field("files", &self.count).finish_non_exhaustive()
    }
}

/// The error of a direct read that met `errno`, where only direct reads are wanted.
pub(crate) fn refused(path: Arc<Path>, errno: Errno) -> IoError {
    IoError::DirectRefused { path, why: why_refused(errno) }
}

fn why_refused(errno: Errno) -> String {
    format!("a direct read was refused: {errno}")
}

/// What is wrong with a path that leads to another file than before.
const REPLACED: &str = "another file has taken its place";
/// What a failure on the first drive means.
const DAMAGED: &str =
    "the model's own directory is damaged, and a mirror is read in its place where it fails: repair it";
