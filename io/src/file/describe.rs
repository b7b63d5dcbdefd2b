//! What is to be told of a set of files: how each is read and why, and what limits the use of a mirror.

use std::path::Path;

use super::FileSet;
use crate::block::BlockQueue;

impl FileSet {
    /// Lines to print: the mode that ran, for which files, and why; then what is to be known of each mirror.
    pub fn describe(&self) -> Vec<String> {
        let mut groups: Vec<(usize, String, &Path, usize)> = Vec::new();
        for (entry, id) in self.files.iter().zip(self.entries()) {
            let mut text = self.access(id).to_string();
            if let Some(doubt) = &entry.doubt {
                text = format!("{text}; {doubt}");
            }
            match groups.iter_mut().find(|(drive, known, ..)| (*drive, known) == (entry.drive, &text)) {
                Some((.., count)) => *count += 1,
                None => groups.push((entry.drive, text, &entry.path, 1)),
            }
        }
        groups.sort_by_key(|(drive, ..)| *drive);
        let lines = groups.into_iter().map(|(drive, text, path, count)| {
            let name = path.file_name().map_or(path.as_os_str(), |name| name).display();
            let mirror =
                if drive > 0 { format!("mirror {}: ", self.drives[drive].dir.display()) } else { String::new() };
            match count {
                1 => format!("{mirror}{name}: {text}"),
                2 => format!("{mirror}{name} and 1 more file: {text}"),
                _ => format!("{mirror}{name} and {} more files: {text}", count - 1),
            }
        });
        lines.chain((1..self.drives.len()).flat_map(|drive| self.describe_mirror(drive))).collect()
    }

    /// What limits the use of a mirror.
    fn describe_mirror(&self, drive: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let dir = self.drives[drive].dir.display();
        let there = self.files.iter().filter(|entry| entry.drive == drive).count();
        if there < self.count {
            lines.push(format!("mirror {dir} has {there} of {} files; the others have no copy there", self.count));
        }
        let shared = (0..drive)
            .find(|other| self.block_devices(*other).iter().any(|device| self.block_devices(drive).contains(device)));
        if let Some(other) = shared {
            let other = self.drives[other].dir.display();
            lines.push(format!("mirror {dir} is on the same block device as {other}: no gain is to be expected"));
        }
        lines
    }

    /// The block devices under the files of a drive, by the name of the whole disk where there is one.
    fn block_devices(&self, drive: usize) -> Vec<String> {
        let mut devices: Vec<u64> =
            self.files.iter().filter(|entry| entry.drive == drive).map(|entry| entry.identity.device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.into_iter().map(|device| disk_name(device).unwrap_or_else(|| format!("device {device}"))).collect()
    }
}

/// Name of the disk under a file system with this device number.
fn disk_name(device: u64) -> Option<String> {
    BlockQueue::of_device(Path::new("/"), device).map(|queue| queue.name)
}
