//! What tells the drive's figures from memory's: pages of the files that are in memory, and what the drive moved.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::block::{BlockDevice, DiskCounters};
use crate::error::{Errno, IoError};
use crate::measure::host;

/// Files and the drive under them, looked at while something else reads.
pub struct Witness {
    watched: Vec<File>,
    disk: Option<BlockDevice>,
    root: PathBuf,
}

impl Witness {
    /// Watches `paths`. `root` is where /sys and /proc are.
    ///
    /// # Errors
    /// Those of opening the files.
    pub fn open(paths: &[PathBuf], root: &Path) -> Result<Witness, IoError> {
        let watched = paths.iter().map(|path| {
            File::open(path)
                .map_err(|error| IoError::Open { path: Arc::from(path.as_path()), errno: Errno::of(&error) })
        });
        let watched = watched.collect::<Result<Vec<_>, _>>()?;
        Ok(Witness { watched, disk: one_disk(paths, root), root: root.to_owned() })
    }

    /// The device all files are on, if it is one.
    pub fn disk(&self) -> Option<&BlockDevice> {
        self.disk.as_ref()
    }

    /// Pieces on disk of all files; `None` where a file system does not tell.
    pub fn extents(&self) -> Option<u64> {
        self.watched.iter().map(|file| host::extents(file).map(u64::from)).sum()
    }

    /// What the drive has read so far; `None` where there is no single one, or it does not count.
    pub fn counters(&self) -> Option<DiskCounters> {
        self.disk.as_ref()?.counters(&self.root)
    }

    /// Has the page cache forget the files; the largest share of one that stayed all the same.
    pub fn forget(&self) -> Option<f64> {
        self.watched.iter().for_each(host::drop_pages);
        let shares = self.watched.iter().map(host::resident_share);
        shares.reduce(|a, b| Some(a?.max(b?)))?
    }
}

fn one_disk(paths: &[PathBuf], root: &Path) -> Option<BlockDevice> {
    let mut disks = paths.iter().map(|path| BlockDevice::holding(path, root));
    let first = disks.next()??;
    disks.all(|disk| disk.as_ref() == Some(&first)).then_some(first)
}
