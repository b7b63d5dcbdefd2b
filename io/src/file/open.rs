//! One open file: the descriptors, the evidence how it is read, and what it is recognised by.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::access::{Access, Evidence, IoMode, advise_random, open_directly, probe_dontcache};
use crate::error::{Errno, IoError};
use crate::limits::SECTOR_BYTES;

pub(super) struct OpenFile {
    pub path: Arc<Path>,
    pub plain: File,
    pub direct: Option<File>,
    pub opened_as: Access,
    /// Set once, when a direct read turns out to be refused after all.
    pub downgraded: OnceLock<Access>,
    /// What the evidence leaves open.
    pub doubt: Option<String>,
    pub identity: Identity,
    pub drive: usize,
}

/// The properties by which a file is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub device: u64,
    pub inode: u64,
    pub bytes: u64,
    pub modified: (i64, i64),
}

impl OpenFile {
    /// Alignment that direct reads of it need.
    pub fn align(&self) -> u32 {
        match self.opened_as {
            Access::Direct { mem_align, offset_align } => SECTOR_BYTES.max(mem_align).max(offset_align),
            _ => SECTOR_BYTES,
        }
    }
}

impl Identity {
    pub fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// The one place where a file of a model is opened.
pub(super) fn open_file(path: &Path, drive: usize, mode: IoMode) -> Result<OpenFile, IoError> {
    let shared: Arc<Path> = Arc::from(path);
    let refused = |error: std::io::Error| IoError::Open { path: Arc::clone(&shared), errno: Errno::of(&error) };
    // A pipe would block the open and a device may act on it: look before opening.
    if !std::fs::metadata(path).map_err(refused)?.is_file() {
        return Err(IoError::NotAFile { path: Arc::clone(&shared) });
    }
    let plain = File::open(path).map_err(refused)?;
    let identity = Identity::of(&plain.metadata().map_err(refused)?);
    let as_asked = |access| Evidence { direct: None, access, doubt: None };
    let Evidence { direct, access: opened_as, doubt } = match mode {
        IoMode::Auto | IoMode::Direct => open_directly(&shared)?,
        IoMode::Buffered => as_asked(Access::Buffered { why: None }),
        IoMode::DontCache => {
            probe_dontcache(&shared, &plain)?;
            as_asked(Access::DontCache)
        }
        IoMode::Mmap => as_asked(Access::Mapped),
        IoMode::Drop => as_asked(Access::Dropped),
    };
    if let Some(direct) = &direct
        && Identity::of(&direct.metadata().map_err(refused)?) != identity
    {
        return Err(IoError::Changed { path: Arc::clone(&shared), what: super::REPLACED.to_owned() });
    }
    match (&opened_as, mode) {
        (Access::SilentlyBuffered { why } | Access::Buffered { why: Some(why) }, IoMode::Direct) => {
            return Err(IoError::DirectRefused { path: shared, why: why.clone() });
        }
        // Readahead of a mapping is steered by advice on the mapping.
        (Access::Direct { .. } | Access::Mapped, _) => {}
        _ => advise_random(&plain),
    }
    Ok(OpenFile { path: shared, plain, direct, opened_as, downgraded: OnceLock::new(), doubt, identity, drive })
}
