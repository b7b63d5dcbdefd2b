//! The queue of the block device under a file, as sysfs states it.

use std::path::Path;
use std::str::FromStr;

use crate::limits::PAGE_BYTES;

/// What bounds the requests of a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockQueue {
    /// Name of the whole device, such as `nvme0n1`.
    pub name: String,
    /// Requests the queue holds; a submission beyond them sleeps.
    pub nr_requests: u32,
    /// Largest request in KiB.
    pub max_sectors_kb: u32,
    /// Most separate pieces of memory a request may have.
    pub max_segments: u32,
}

impl BlockQueue {
    /// The queue of the device with this number, under `dev_block` (`/sys/dev/block`); a partition has its disk's.
    /// `None` where there is none, as for tmpfs, overlays and network file systems.
    pub(crate) fn of_device(dev_block: &Path, device: u64) -> Option<BlockQueue> {
        let entry = dev_block.join(format!("{}:{}", libc::major(device), libc::minor(device)));
        let entry = std::fs::canonicalize(entry).ok()?;
        let disk = if entry.join("queue").is_dir() { entry.as_path() } else { entry.parent()? };
        let queue = disk.join("queue");
        Some(BlockQueue {
            name: disk.file_name()?.to_str()?.to_owned(),
            nr_requests: number(&queue.join("nr_requests"))?,
            max_sectors_kb: number(&queue.join("max_sectors_kb"))?,
            max_segments: number(&queue.join("max_segments"))?,
        })
    }

    /// Bytes one request of the device moves at most, to memory on 2 MiB pages or on scattered ordinary ones.
    pub fn request_bytes(&self, huge_pages: bool) -> u64 {
        let by_size = u64::from(self.max_sectors_kb) << 10;
        let by_pieces = u64::from(self.max_segments) * PAGE_BYTES as u64;
        let most = if huge_pages { by_size } else { by_size.min(by_pieces) };
        most.max(PAGE_BYTES as u64)
    }
}

fn number<T: FromStr>(path: &Path) -> Option<T> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    #[test]
    fn a_partition_has_the_queue_of_its_disk_and_an_unknown_device_none() {
        let sys = tempfile::tempdir().unwrap();
        let (disk, dev_block) = (sys.path().join("devices/nvme9n1"), sys.path().join("dev/block"));
        create_dir_all(disk.join("queue")).unwrap();
        create_dir_all(disk.join("nvme9n1p2")).unwrap();
        create_dir_all(&dev_block).unwrap();
        for (name, value) in [("nr_requests", "1023\n"), ("max_sectors_kb", "512\n"), ("max_segments", "127\n")] {
            write(disk.join("queue").join(name), value).unwrap();
        }
        symlink(&disk, dev_block.join("259:0")).unwrap();
        symlink(disk.join("nvme9n1p2"), dev_block.join("259:2")).unwrap();
        let expected =
            BlockQueue { name: "nvme9n1".to_owned(), nr_requests: 1023, max_sectors_kb: 512, max_segments: 127 };
        for minor in [0, 2] {
            let device = libc::makedev(259, minor);
            assert_eq!(BlockQueue::of_device(&dev_block, device), Some(expected.clone()));
        }
        assert_eq!(BlockQueue::of_device(&dev_block, libc::makedev(0, 40)), None);
        // 127 pieces of 4 KiB are 508 KiB, less than the 512 the size allows.
        assert_eq!((expected.request_bytes(true), expected.request_bytes(false)), (512 << 10, 508 << 10));
        write(disk.join("queue/nr_requests"), "many").unwrap();
        assert_eq!(BlockQueue::of_device(&dev_block, libc::makedev(259, 0)), None);
    }
}
