//! Drives that hold copies of the same files: which has which, and sets of them.

use std::path::PathBuf;

use crate::limits::DRIVES_MAX;

/// A copy, whole or partial, of the files of a set in another directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// The directory, for messages.
    pub dir: PathBuf,
    /// The copy of each file of the set, in the same order; `None` where there is none.
    pub copies: Vec<Option<PathBuf>>,
}

/// What one drive did for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveStats {
    /// Bytes that came from it.
    pub bytes: u64,
    /// Time during which at least one request was with it.
    pub busy_ns: u64,
    /// Requests that it failed, after the retries they deserve.
    pub errors: u64,
}

/// Some of the drives, by number. Number 0 is where the files themselves are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriveSet(u8);

const _: () = assert!(DRIVES_MAX <= u8::BITS as usize);

impl DriveSet {
    /// Only the first drive.
    pub const FIRST: DriveSet = DriveSet(1);

    pub fn contains(self, drive: usize) -> bool {
        self.0 >> drive & 1 == 1
    }

    #[must_use]
    pub fn with(self, drive: usize) -> DriveSet {
        DriveSet(self.0 | 1 << drive)
    }

    #[must_use]
    pub fn without(self, other: DriveSet) -> DriveSet {
        DriveSet(self.0 & !other.0)
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The lowest number.
    pub fn first(self) -> Option<usize> {
        self.iter().next()
    }

    /// Upwards.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..DRIVES_MAX).filter(move |drive| self.contains(*drive))
    }
}
