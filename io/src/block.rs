//! The block device under a file, what its queue allows, and what it has read. Everything is read below a root
//! directory, so that a test can describe another machine; what cannot be read is unknown, never an error.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::limits::PAGE_BYTES;

/// A sector of the kernel's counters, whatever the drive's own is.
const COUNTED_SECTOR_BYTES: u64 = 512;

/// A block device and the limits of its queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockDevice {
    /// Name, as in `/dev`.
    pub name: String,
    /// Of a partition, the name of its drive; else the same.
    pub drive: String,
    /// Number by which the kernel counts it.
    pub major: u32,
    /// See `major`.
    pub minor: u32,
    /// Largest request.
    pub max_sectors_kb: Option<u64>,
    /// Most memory pieces of a request: with 4 KiB pages, the limit of its size.
    pub max_segments: Option<u64>,
    /// Requests the queue holds.
    pub nr_requests: Option<u64>,
    /// What the page cache reads ahead.
    pub read_ahead_kb: Option<u64>,
    /// The scheduler in use.
    pub scheduler: Option<String>,
    /// Whether it is a spinning disk, or says so.
    pub rotational: Option<bool>,
    /// Whether completions can be polled for.
    pub io_poll: Option<bool>,
    /// Node of memory that it is near to, and those under it are.
    pub node: Option<usize>,
    /// Devices under a mapped one.
    pub under: Vec<String>,
    counts: bool,
}

/// What a device has read since the machine started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Requests completed.
    pub requests: u64,
    /// Requests merged into others before they were served.
    pub merges: u64,
    /// Bytes.
    pub bytes: u64,
}

impl BlockDevice {
    /// The device that holds `path`; `None` where there is none, as for memory and network file systems.
    pub fn holding(path: &Path, root: &Path) -> Option<BlockDevice> {
        BlockDevice::under(std::fs::metadata(path).ok()?.dev(), root)
    }

    /// The device under a file system of this number. Of a file system that spans devices it is the one that the mount
    /// names: as good as the others for what its queue allows, but what it has read is only a part.
    fn under(holder: u64, root: &Path) -> Option<BlockDevice> {
        if let Some(device) = BlockDevice::numbered(libc::major(holder), libc::minor(holder), root) {
            return Some(device);
        }
        let mounts = std::fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
        let source = mount_source(&mounts, libc::major(holder), libc::minor(holder))?;
        let number = std::fs::metadata(root.join(source.strip_prefix('/')?)).ok()?.rdev();
        let device = BlockDevice::numbered(libc::major(number), libc::minor(number), root)?;
        let counts = device.counts && is_alone(&device.name, root);
        Some(BlockDevice { counts, ..device })
    }

    /// The device with these numbers.
    pub fn numbered(major: u32, minor: u32, root: &Path) -> Option<BlockDevice> {
        let dir = std::fs::canonicalize(root.join(format!("sys/dev/block/{major}:{minor}"))).ok()?;
        let name = |dir: &Path| Some(dir.file_name()?.to_string_lossy().into_owned());
        // A partition has the queue of its drive.
        let drive = [dir.as_path(), dir.parent()?].into_iter().find(|dir| dir.join("queue").is_dir());
        let queue = drive.map(|drive| drive.join("queue"));
        let text = |file: &str| -> Option<String> {
            Some(std::fs::read_to_string(queue.as_ref()?.join(file)).ok()?.trim().to_owned())
        };
        let number = |file: &str| text(file)?.parse::<u64>().ok();
        let mut under: Vec<String> = std::fs::read_dir(dir.join("slaves"))
            .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_default();
        under.sort();
        Some(BlockDevice {
            name: name(&dir)?,
            drive: name(drive.unwrap_or(&dir))?,
            major,
            minor,
            max_sectors_kb: number("max_sectors_kb"),
            max_segments: number("max_segments"),
            nr_requests: number("nr_requests"),
            read_ahead_kb: number("read_ahead_kb"),
            scheduler: text("scheduler").map(|line| chosen(&line)),
            rotational: number("rotational").map(|flag| flag != 0),
            io_poll: number("io_poll").map(|flag| flag != 0),
            node: node_of(drive.unwrap_or(&dir)),
            under,
            counts: number("iostats") != Some(0),
        })
    }

    /// What bounds its requests; `None` where any of it is unknown.
    pub fn queue(&self) -> Option<BlockQueue> {
        let number = |value: Option<u64>| value.and_then(|value| u32::try_from(value).ok());
        Some(BlockQueue {
            name: self.drive.clone(),
            nr_requests: number(self.nr_requests)?,
            max_sectors_kb: number(self.max_sectors_kb)?,
            max_segments: number(self.max_segments)?,
        })
    }

    /// What it has read so far; `None` where it does not count.
    pub fn counters(&self, root: &Path) -> Option<DiskCounters> {
        if !self.counts {
            return None;
        }
        parse_diskstats(&std::fs::read_to_string(root.join("proc/diskstats")).ok()?, self.major, self.minor)
    }
}

impl DiskCounters {
    /// What was read since `earlier`.
    pub fn since(self, earlier: DiskCounters) -> DiskCounters {
        DiskCounters {
            requests: self.requests.saturating_sub(earlier.requests),
            merges: self.merges.saturating_sub(earlier.merges),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}

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
    /// The queue of the device under a file system of this number; a partition has its disk's. `root` is where /sys and
    /// /proc are. `None` where there is none, as for tmpfs, overlays and network file systems.
    pub(crate) fn of_device(root: &Path, device: u64) -> Option<BlockQueue> {
        BlockDevice::under(device, root)?.queue()
    }

    /// Bytes one request of the device moves at most, to memory on 2 MiB pages or on scattered ordinary ones.
    pub fn request_bytes(&self, huge_pages: bool) -> u64 {
        let by_size = u64::from(self.max_sectors_kb) << 10;
        let by_pieces = u64::from(self.max_segments) * PAGE_BYTES as u64;
        let most = if huge_pages { by_size } else { by_size.min(by_pieces) };
        most.max(PAGE_BYTES as u64)
    }
}

/// The line of a device in `/proc/diskstats`.
pub fn parse_diskstats(text: &str, major: u32, minor: u32) -> Option<DiskCounters> {
    text.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |index: usize| words.get(index)?.parse::<u64>().ok();
        if (number(0)?, number(1)?) != (u64::from(major), u64::from(minor)) {
            return None;
        }
        let bytes = number(5)?.checked_mul(COUNTED_SECTOR_BYTES)?;
        Some(DiskCounters { requests: number(3)?, merges: number(4)?, bytes })
    })
}

/// The node that the bus of a drive says it is near to. Of a drive over others, mapped ones or the paths to an NVMe
/// namespace, the one that all of them are near to.
fn node_of(drive: &Path) -> Option<usize> {
    let said = drive.ancestors().find_map(|above| std::fs::read_to_string(above.join("numa_node")).ok());
    if let Some(node) = said {
        // -1 is the kernel's way of saying that nobody knows.
        return node.trim().parse().ok();
    }
    let links = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mapped = links(&drive.join("slaves"));
    let paths = links(drive.parent()?).filter(|entry| {
        entry.file_name().to_string_lossy().starts_with("nvme") && entry.file_type().is_ok_and(|kind| kind.is_symlink())
    });
    let mut nodes = mapped.chain(paths).map(|entry| node_of(&std::fs::canonicalize(entry.path()).ok()?));
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

/// The scheduler in brackets, or the only one.
fn chosen(line: &str) -> String {
    let inside = line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(name, _)| name);
    inside.unwrap_or(line).to_owned()
}

/// Whether a device is all that a file system lies on, by what the kernel tells of those that span devices.
fn is_alone(name: &str, root: &Path) -> bool {
    let names = |dir: std::fs::DirEntry| -> Option<Vec<std::ffi::OsString>> {
        let devices = std::fs::read_dir(dir.path().join("devices")).ok()?;
        Some(devices.flatten().map(|device| device.file_name()).collect())
    };
    let systems = std::fs::read_dir(root.join("sys/fs/btrfs")).ok();
    systems.is_some_and(|all| all.flatten().filter_map(names).any(|devices| devices == [name]))
}

/// Source of the mount with these numbers, where it is a device's path.
fn mount_source(mountinfo: &str, major: u32, minor: u32) -> Option<String> {
    let number = format!("{major}:{minor}");
    mountinfo.lines().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let source = back.split(' ').nth(1)?;
        (front.split(' ').nth(2)? == number && source.starts_with("/dev/")).then(|| source.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISKSTATS: &str = "   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n 254       0 vda 2042694 226621 1703825154 8778469 248417 126275 164336120 \
                             728212 1 450856 9600609 164580 817 114821712 85540 21073 8386\n 259       1 nvme0n1p1 11 2 48 1 0 0 0 0 0 0 0\n\
                             259 2 broken 1\n8 0 sda x 0 0 0\n";

    #[test]
    fn the_counters_of_one_device_are_read() {
        let vda = parse_diskstats(DISKSTATS, 254, 0).unwrap();
        assert_eq!(vda, DiskCounters { requests: 2_042_694, merges: 226_621, bytes: 1_703_825_154 * 512 });
        // Kernels before 4.18 have fewer columns; those read here are the first.
        let old = parse_diskstats(DISKSTATS, 259, 1).unwrap();
        assert_eq!(old, DiskCounters { requests: 11, merges: 2, bytes: 24_576 });
        for (major, minor) in [(259, 2), (8, 0), (1, 1)] {
            assert_eq!(parse_diskstats(DISKSTATS, major, minor), None);
        }
        assert_eq!(parse_diskstats("", 0, 0), None);
        let later = DiskCounters { requests: 10, merges: 3, bytes: 8192 };
        let earlier = DiskCounters { requests: 4, merges: 1, bytes: 4096 };
        assert_eq!(later.since(earlier), DiskCounters { requests: 6, merges: 2, bytes: 4096 });
        assert_eq!(earlier.since(later), DiskCounters::default(), "counters that went back are no progress");
    }

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn a_partition_has_the_queue_of_its_drive() {
        let root = tempfile::tempdir().unwrap();
        let drive = "sys/devices/pci/nvme0n1";
        for (name, text) in [
            ("max_sectors_kb", "128\n"),
            ("max_segments", "127\n"),
            ("nr_requests", "1023\n"),
            ("read_ahead_kb", "128\n"),
            ("scheduler", "mq-deadline kyber [none]\n"),
            ("rotational", "0\n"),
            ("io_poll", "1\n"),
            ("iostats", "1\n"),
        ] {
            write(root.path(), &format!("{drive}/queue/{name}"), text);
        }
        std::fs::create_dir_all(root.path().join(drive).join("nvme0n1p1")).unwrap();
        std::fs::create_dir_all(root.path().join("sys/dev/block")).unwrap();
        let link = root.path().join("sys/dev/block/259:1");
        std::os::unix::fs::symlink("../../devices/pci/nvme0n1/nvme0n1p1", link).unwrap();
        write(root.path(), "proc/diskstats", DISKSTATS);

        let device = BlockDevice::numbered(259, 1, root.path()).unwrap();
        assert_eq!(device.name, "nvme0n1p1");
        assert_eq!(
            (device.max_sectors_kb, device.max_segments, device.nr_requests),
            (Some(128), Some(127), Some(1023))
        );
        assert_eq!(
            (device.scheduler.as_deref(), device.rotational, device.io_poll),
            (Some("none"), Some(false), Some(true))
        );
        assert_eq!(device.counters(root.path()).unwrap().bytes, 24_576);
        // A drive that does not count must not look like one that moved nothing.
        write(root.path(), &format!("{drive}/queue/iostats"), "0\n");
        assert_eq!(BlockDevice::numbered(259, 1, root.path()).unwrap().counters(root.path()), None);
        assert_eq!(BlockDevice::numbered(1, 1, root.path()), None);
    }

    #[test]
    fn a_drive_is_near_the_node_that_its_bus_names_or_that_all_under_it_are_near() {
        let root = tempfile::tempdir().unwrap();
        let link = |target: &str, name: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(root.path().join("sys/devices").join(target), path).unwrap();
        };
        for (bus, node) in [("pci0/a", "1\n"), ("pci1/b", "1\n"), ("pci2/c", "0\n"), ("pci3/d", "-1\n")] {
            write(root.path(), &format!("sys/devices/{bus}/numa_node"), node);
        }
        for drive in ["pci0/a/ata1/sda", "pci1/b/sdb", "pci2/c/sdc", "pci3/d/sdd"] {
            write(root.path(), &format!("sys/devices/{drive}/queue/nr_requests"), "64\n");
        }
        std::fs::create_dir(root.path().join("sys/devices/pci0/a/ata1/sda/sda1")).unwrap();
        // Two drives of one node, two of two, and a namespace that two controllers of one node lead to.
        for (name, first, second) in [("dm-0", "pci0/a/ata1/sda", "pci1/b/sdb"), ("dm-1", "pci1/b/sdb", "pci2/c/sdc")] {
            link(first, &format!("sys/devices/virtual/{name}/slaves/first"));
            link(second, &format!("sys/devices/virtual/{name}/slaves/second"));
        }
        write(root.path(), "sys/devices/virtual/nvme-subsys0/nvme0n1/queue/nr_requests", "64\n");
        link("pci0/a", "sys/devices/virtual/nvme-subsys0/nvme0");
        link("pci1/b", "sys/devices/virtual/nvme-subsys0/nvme1");
        let expected = [
            ("pci0/a/ata1/sda", Some(1)),
            ("pci0/a/ata1/sda/sda1", Some(1)),
            ("pci2/c/sdc", Some(0)),
            ("pci3/d/sdd", None),
            ("virtual/dm-0", Some(1)),
            ("virtual/dm-1", None),
            ("virtual/nvme-subsys0/nvme0n1", Some(1)),
        ];
        for ((device, node), minor) in expected.into_iter().zip(0..) {
            link(device, &format!("sys/dev/block/8:{minor}"));
            assert_eq!(BlockDevice::numbered(8, minor, root.path()).unwrap().node, node, "{device}");
        }
    }

    #[test]
    fn a_queue_that_hides_its_limits_is_unknown() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "sys/dev/block/8:0/queue/max_sectors_kb", "lots");
        let device = BlockDevice::numbered(8, 0, root.path()).unwrap();
        assert_eq!((device.max_sectors_kb, device.scheduler, device.rotational), (None, None, None));
    }

    #[test]
    fn the_mount_names_the_device_of_a_file_system_with_a_number_of_its_own() {
        let mounts = "22 1 0:30 /root / rw,relatime - btrfs /dev/nvme0n1p2 rw\n23 1 0:31 / /net rw - nfs host:/x rw\n";
        assert_eq!(mount_source(mounts, 0, 30).as_deref(), Some("/dev/nvme0n1p2"));
        assert_eq!(mount_source(mounts, 0, 31), None);
        assert_eq!(chosen("none"), "none");
        assert_eq!(chosen("[mq-deadline] none"), "mq-deadline");
    }

    #[test]
    fn of_a_file_system_on_several_devices_the_one_that_is_named_counts_only_a_part() {
        let root = tempfile::tempdir().unwrap();
        // A device file of which the number is known: that of /dev/null, 1:3.
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::os::unix::fs::symlink("/dev/null", root.path().join("dev/sda1")).unwrap();
        let devices = "sys/fs/btrfs/6fa2/devices";
        for (name, text) in [
            ("proc/self/mountinfo", "22 1 0:30 /root / rw - btrfs /dev/sda1 rw\n"),
            ("proc/diskstats", "1 3 sda1 11 2 48 1 0 0 0 0 0 0 0\n"),
            ("sys/devices/sda1/queue/max_sectors_kb", "512\n"),
            ("sys/devices/sda1/queue/max_segments", "127\n"),
            ("sys/devices/sda1/queue/nr_requests", "64\n"),
            ("sys/dev/block/README", ""),
            ("sys/fs/btrfs/features/raid1c34", "0\n"),
            (&format!("{devices}/sda1"), ""),
        ] {
            write(root.path(), name, text);
        }
        std::os::unix::fs::symlink("../../devices/sda1", root.path().join("sys/dev/block/1:3")).unwrap();
        let holder = libc::makedev(0, 30);
        let alone = BlockDevice::under(holder, root.path()).unwrap();
        assert_eq!(alone.counters(root.path()).unwrap().bytes, 48 * 512);
        write(root.path(), &format!("{devices}/sdb"), "");
        let one_of_two = BlockDevice::under(holder, root.path()).unwrap();
        assert_eq!(one_of_two.counters(root.path()), None, "it moved half of what was read");
        // What its requests are bound by is known all the same.
        assert_eq!(one_of_two.name, "sda1");
        assert_eq!(BlockQueue::of_device(root.path(), holder), one_of_two.queue());
        assert_eq!(one_of_two.queue().map(|queue| queue.nr_requests), Some(64));
        // Nothing is known of what is not told.
        std::fs::remove_dir_all(root.path().join("sys/fs")).unwrap();
        assert_eq!(BlockDevice::under(holder, root.path()).unwrap().counters(root.path()), None);
    }

    #[test]
    fn requests_of_a_partition_are_bound_by_its_drive_and_those_of_an_unknown_device_by_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (disk, dev_block) = (root.path().join("sys/devices/nvme9n1"), root.path().join("sys/dev/block"));
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        std::fs::create_dir_all(disk.join("nvme9n1p2")).unwrap();
        std::fs::create_dir_all(&dev_block).unwrap();
        for (name, value) in [("nr_requests", "1023\n"), ("max_sectors_kb", "512\n"), ("max_segments", "127\n")] {
            std::fs::write(disk.join("queue").join(name), value).unwrap();
        }
        std::os::unix::fs::symlink(&disk, dev_block.join("259:0")).unwrap();
        std::os::unix::fs::symlink(disk.join("nvme9n1p2"), dev_block.join("259:2")).unwrap();
        let expected =
            BlockQueue { name: "nvme9n1".to_owned(), nr_requests: 1023, max_sectors_kb: 512, max_segments: 127 };
        for minor in [0, 2] {
            let device = libc::makedev(259, minor);
            assert_eq!(BlockQueue::of_device(root.path(), device), Some(expected.clone()));
        }
        assert_eq!(BlockQueue::of_device(root.path(), libc::makedev(0, 40)), None);
        // 127 pieces of 4 KiB are 508 KiB, less than the 512 the size allows.
        assert_eq!((expected.request_bytes(true), expected.request_bytes(false)), (512 << 10, 508 << 10));
        std::fs::write(disk.join("queue/nr_requests"), "many").unwrap();
        assert_eq!(BlockQueue::of_device(root.path(), libc::makedev(259, 0)), None);
    }
}
