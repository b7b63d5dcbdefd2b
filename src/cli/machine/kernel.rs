//! What the kernel allows those who read: pages, locked memory, limits on a control group's I/O, and how busy it is.

use std::path::Path;

use super::{Machine, Mount, field, read};

/// Settings and limits that bind readers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KernelFacts {
    /// When transparent huge pages are given: `always`, `madvise` or `never`.
    pub thp: Option<String>,
    /// Reserved 2 MiB pages.
    pub nr_hugepages: u64,
    /// Of those, free now.
    pub free_hugepages: u64,
    /// Bytes a process may lock; `None` is no limit.
    pub memlock: Option<u64>,
    /// Whether this process may lock beyond that.
    pub may_lock_all: bool,
    /// Load averages of 1, 5 and 15 minutes.
    pub load: Option<[f64; 3]>,
    /// Limits on the I/O of this process's control group and those above it: file and line.
    pub io_limits: Vec<String>,
}

impl KernelFacts {
    /// That others are at work, where they are so much that it shows in figures measured on `cores` cores.
    pub fn busy(&self, cores: usize) -> Option<String> {
        let [load, ..] = self.load.filter(|[load, ..]| *load > cores as f64)?;
        Some(format!("a load of {load:.1} on {cores} cores: figures are lower than they could be"))
    }
}

/// Bit of `CAP_IPC_LOCK` in a set of capabilities.
const CAP_IPC_LOCK: u32 = 14;

impl Machine {
    /// What the kernel allows those who read, as it is now.
    pub fn kernel_facts(&self) -> KernelFacts {
        let root = &self.root;
        let thp = read(&root.join("sys/kernel/mm/transparent_hugepage/enabled"));
        let chosen = thp.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(name, _)| name.to_owned());
        let pages = |name: &str| {
            read(&root.join("sys/kernel/mm/hugepages/hugepages-2048kB").join(name)).trim().parse().unwrap_or(0)
        };
        let limits = read(&root.join("proc/self/limits"));
        let locked = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
        // The hard limit: what a process can raise its own to.
        let memlock = locked.and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
        let capabilities = read(&root.join("proc/self/status"));
        let effective = field(&capabilities, "CapEff").and_then(|bits| u64::from_str_radix(bits, 16).ok());
        let load = read(&root.join("proc/loadavg"));
        let mut averages = load.split(' ').map_while(|word| word.parse().ok());
        let mut next = || averages.next();
        KernelFacts {
            thp: chosen,
            nr_hugepages: pages("nr_hugepages"),
            free_hugepages: pages("free_hugepages"),
            memlock,
            may_lock_all: effective.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1),
            load: (|| Some([next()?, next()?, next()?]))(),
            io_limits: io_limits(root),
        }
    }
}

/// Files of a control group that limit reading, by kind of hierarchy.
const LIMITS: &[(&str, &[&str])] =
    &[("cgroup2", &["io.max"]), ("cgroup", &["blkio.throttle.read_bps_device", "blkio.throttle.read_iops_device"])];

fn io_limits(root: &Path) -> Vec<String> {
    let membership = read(&root.join("proc/self/cgroup"));
    let mountinfo = read(&root.join("proc/self/mountinfo"));
    let mut found = Vec::new();
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        let Some((_, files)) = LIMITS.iter().find(|(kind, _)| *kind == mount.kind) else { continue };
        let Some(path) = membership.lines().find_map(|line| group_path(line, &mount)) else { continue };
        let inside = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
        for group in inside.ancestors() {
            let point = mount.point.join(group);
            for file in *files {
                let text = read(&root.join(point.strip_prefix("/").unwrap_or(&point)).join(file));
                let lines = text.lines().map(str::trim).filter(|line| limits_reads(line));
                found.extend(lines.map(|line| format!("{}: {line}", point.join(file).display())));
            }
        }
    }
    found
}

/// The path of a line of `/proc/self/cgroup`, where the line is of the hierarchy that is mounted there.
fn group_path<'a>(line: &'a str, mount: &Mount) -> Option<&'a str> {
    let mut parts = line.splitn(3, ':');
    let (hierarchy, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let same = match mount.kind.as_str() {
        "cgroup2" => hierarchy == "0" && controllers.is_empty(),
        _ => controllers.split(',').any(|name| name == "blkio") && mount.options.split(',').any(|name| name == "blkio"),
    };
    same.then_some(path)
}

/// Whether a line of a limit's file limits reads: `8:0 rbps=max wbps=1 ...` does not.
fn limits_reads(line: &str) -> bool {
    let mut words = line.split_whitespace().skip(1).peekable();
    if words.peek().is_some_and(|word| !word.contains('=')) {
        return true;
    }
    words.any(|word| (word.starts_with("rbps=") || word.starts_with("riops=")) && !word.ends_with("=max"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn facts(files: &[(&str, &str)]) -> KernelFacts {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Machine::read(root.path(), 2, "/tmp".into(), BTreeMap::new()).kernel_facts()
    }

    #[test]
    fn settings_of_another_machine_are_read() {
        let facts = facts(&[
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "12\n"),
            (
                "proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max locked memory         65536                8388608              bytes     \n",
            ),
            ("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n"),
            ("proc/loadavg", "0.50 1.25 9.00 3/99 1234\n"),
        ]);
        assert_eq!(facts.thp.as_deref(), Some("madvise"));
        assert_eq!((facts.nr_hugepages, facts.free_hugepages), (512, 12));
        assert_eq!((facts.memlock, facts.may_lock_all), (Some(8_388_608), true));
        assert_eq!(facts.load, Some([0.5, 1.25, 9.0]));
        assert_eq!(facts.io_limits, Vec::<String>::new());
    }

    #[test]
    fn limits_of_groups_above_count_and_those_that_limit_nothing_do_not() {
        let found = facts(&[
            ("proc/self/mountinfo", "30 22 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n"),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/io.max", "8:0 rbps=max wbps=1048576 riops=max wiops=max\n"),
            ("sys/fs/cgroup/a/io.max", "254:0 rbps=104857600 wbps=max riops=max wiops=max\n"),
        ]);
        assert_eq!(found.io_limits, ["/sys/fs/cgroup/a/io.max: 254:0 rbps=104857600 wbps=max riops=max wiops=max"]);
        let old = facts(&[
            ("proc/self/mountinfo", "31 22 0:27 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n"),
            ("proc/self/cgroup", "5:cpu:/x\n4:blkio:/c\n"),
            ("sys/fs/cgroup/blkio/c/blkio.throttle.read_bps_device", "8:0 1000000\n"),
        ]);
        assert_eq!(old.io_limits, ["/sys/fs/cgroup/blkio/c/blkio.throttle.read_bps_device: 8:0 1000000"]);
    }

    #[test]
    fn what_is_hidden_is_unknown() {
        let hidden =
            facts(&[("proc/self/limits", "Max locked memory         unlimited            unlimited  bytes\n")]);
        assert_eq!(hidden, KernelFacts::default());
    }
}
