//! What the machine is: the one reader of environment, /proc and cgroups.
//!
//! Everything is read below a root directory, so that a test can describe another machine. Whatever cannot be read is
//! unknown, never an error: a container may hide any of it.

mod kernel;
mod nodes;
mod space;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::engine::budget::default_total;
use crate::engine::space::Space;
pub use kernel::KernelFacts;
pub use nodes::{Node, Placed, node_names};

/// Limits at or above this are the kernel's way of saying there is none.
const UNLIMITED: u64 = 1 << 60;

/// The machine as this process finds it.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: String,
    /// Cores this process may use: affinity and CPU quota count.
    pub cores: usize,
    /// Memory.
    pub memory: Memory,
    /// Release of the operating system's kernel.
    pub kernel: String,
    /// Who runs this process.
    pub uid: u32,
    /// Directory for temporary files.
    pub temp: PathBuf,
    /// Where this process was placed on it.
    pub placed: Placed,
    environment: BTreeMap<String, OsString>,
    root: PathBuf,
}

/// Memory of the machine and what of it this process can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it; 0 when unknown.
    pub total: u64,
    /// What can still be had without anybody being killed; 0 when unknown.
    pub available: u64,
    /// As much of that as others may take too: what the machine and its control groups have, whatever this process may map.
    pub shared: u64,
    /// What this process may map, where that is limited.
    pub space: Option<Space>,
    /// Whether `available` could be told.
    pub known: bool,
    /// Where `available` comes from, for people.
    pub source: String,
    /// Whether a limit leaves less than the machine has.
    pub limited: bool,
}

/// Where address space is limited, threads share a heap: by default each maps 64 MiB for its own, which nothing uses.
pub fn spare_address_space(machine: &Machine) {
    if machine.memory.space.is_some() {
        millstream_io::share_heap();
    }
}

impl Memory {
    /// As another command may find it a moment later. What a control group uses is counted in parts: each core has up to 64
    /// pages that it has not told of yet, of what is used and of what is cache (`MEMCG_CHARGE_BATCH` of Linux).
    pub fn at_least(&self, cores: usize) -> Memory {
        let untold = if self.limited { 2 * 64 * 4096 * cores as u64 } else { 0 };
        let shared = self.shared.saturating_sub(untold);
        Memory { shared, available: self.available.min(shared), ..self.clone() }
    }

    /// What a run uses at most where nothing is said.
    pub fn usable(&self) -> u64 {
        default_total(self.shared).min(self.space.map_or(u64::MAX, |space| space.left))
    }
}

impl Machine {
    /// This machine and this process.
    pub fn here() -> Machine {
        let environment = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Machine::read(Path::new("/"), cores, std::env::temp_dir(), environment.collect())
    }

    /// The machine described by the files below `root`.
    pub fn read(root: &Path, cores: usize, temp: PathBuf, environment: BTreeMap<String, OsString>) -> Machine {
        let cpuinfo = read(&root.join("proc/cpuinfo"));
        let cpu = field(&cpuinfo, "model name").or_else(|| field(&cpuinfo, "Model")).unwrap_or("unknown").to_owned();
        let kernel = read(&root.join("proc/sys/kernel/osrelease")).trim().to_owned();
        let uid = std::fs::metadata(root.join("proc/self")).map_or(0, |meta| meta.uid());
        let memory = read_memory(root);
        Machine { cpu, cores, memory, kernel, uid, temp, placed: Placed::default(), environment, root: root.to_owned() }
    }

    /// An environment variable; empty counts as absent.
    pub fn variable(&self, name: &str) -> Option<&OsString> {
        self.environment.get(name).filter(|value| !value.is_empty())
    }

    /// Where the program keeps what a user would not miss: below `$XDG_STATE_HOME`, or `~/.local/state` where that is not set.
    pub fn state_dir(&self) -> Option<PathBuf> {
        let absolute = |name: &str| self.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
        Some(state.join("millstream"))
    }

    /// Whether text on `stream` may be dimmed: it is a terminal that can, and nobody asked for none of it (`NO_COLOR`).
    pub fn styles(&self, stream: &impl IsTerminal) -> bool {
        let dumb = self.variable("TERM").is_none_or(|name| name == "dumb");
        stream.is_terminal() && !dumb && self.variable("NO_COLOR").is_none()
    }

    /// Whether the terminal on standard error can draw a line over: `TERM=dumb` says that it cannot.
    pub fn redraws() -> bool {
        std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|name| name != "dumb")
    }

    /// Names of environment variables that begin with `prefix`.
    pub fn variables_from<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        self.environment.keys().map(String::as_str).filter(move |name| name.starts_with(prefix))
    }

    /// Type of the file system that holds `path`.
    pub fn file_system(&self, path: &Path) -> String {
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let mounts = read(&self.root.join("proc/self/mountinfo"));
        let holding = mounts.lines().filter_map(Mount::parse).filter(|mount| path.starts_with(&mount.point));
        // Of mounts over one another the last is the one that is seen.
        let innermost = holding.max_by_key(|mount| mount.point.components().count());
        innermost.map_or_else(|| "unknown".into(), |mount| mount.kind)
    }

    /// Bytes of the largest cache of the first processor; 0 when unknown.
    pub fn cache_bytes(&self) -> u64 {
        let caches = self.root.join("sys/devices/system/cpu/cpu0/cache");
        let sizes = (0..8).map(|index| read(&caches.join(format!("index{index}/size"))));
        sizes.filter_map(|text| super::size::parse(text.trim()).ok()).max().unwrap_or(0)
    }

    /// Bytes of memory this process may lock, after raising its limit as far as it may; `None` without a limit or when
    /// it is unknown.
    pub fn lockable(&self) -> Option<u64> {
        let limits = read(&self.root.join("proc/self/limits"));
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// When the kernel backs memory with transparent huge pages: `always`, `madvise`, `never`, or `unknown`.
    pub fn transparent_huge_pages(&self) -> String {
        let choices = read(&self.root.join("sys/kernel/mm/transparent_hugepage/enabled"));
        let chosen = choices.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        chosen.map_or_else(|| "unknown".into(), |(chosen, _)| chosen.to_owned())
    }

    /// Where this machine's /proc and /sys are.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Largest resident set this process has had, in bytes; 0 when unknown.
    pub fn peak_rss(&self) -> u64 {
        kilobytes(&read(&self.root.join("proc/self/status")), "VmHWM").unwrap_or(0)
    }

    /// Bytes of the program's file, all of which comes into memory as it is used.
    pub fn program_bytes(&self) -> u64 {
        program_bytes()
    }

    /// Where the programs' own files are: beside the executable and above it.
    pub fn executable_dirs(&self) -> Vec<PathBuf> {
        let executable = std::env::current_exe().and_then(std::fs::canonicalize).unwrap_or_default();
        executable.ancestors().skip(1).map(Path::to_owned).collect()
    }
}

fn read_memory(root: &Path) -> Memory {
    let meminfo = read(&root.join("proc/meminfo"));
    let total = kilobytes(&meminfo, "MemTotal").unwrap_or(0);
    let told = kilobytes(&meminfo, "MemAvailable").or_else(|| kilobytes(&meminfo, "MemFree"));
    let machine = Memory {
        total,
        available: told.unwrap_or(0),
        shared: told.unwrap_or(0),
        space: space::of_process(root),
        known: told.is_some(),
        source: "memory available on the machine".into(),
        limited: false,
    };
    let shared = match [cgroup_room(root), nodes::room(root)].into_iter().flatten().min() {
        Some((room, source)) if told.is_none_or(|free| room < free) => {
            Memory { available: room, shared: room, known: true, source, limited: true, ..machine }
        }
        _ => machine,
    };
    match shared.space {
        Some(space) if shared.known && space.left < shared.available => {
            Memory { available: space.left, source: space::name(&space), limited: true, ..shared }
        }
        _ => shared,
    }
}

/// The least room any limit on this process's control group, or on one above it, leaves.
fn cgroup_room(root: &Path) -> Option<(u64, String)> {
    let membership = read(&root.join("proc/self/cgroup"));
    let mountinfo = read(&root.join("proc/self/mountinfo"));
    let mounts: Vec<Mount> = mountinfo.lines().filter_map(Mount::parse).collect();
    let mut least: Option<(u64, String)> = None;
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(hierarchy), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let files = if hierarchy == "0" && controllers.is_empty() {
            &VERSION_2
        } else if controllers.split(',').any(|c| c == "memory") {
            &VERSION_1
        } else {
            continue;
        };
        for mount in mounts.iter().filter(|mount| files.is_at(mount)) {
            // A container may see its own group as the root of the mount, or be told a path from outside of it.
            let inside = Path::new(path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
            let mount_dir = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
            for group in inside.ancestors() {
                let dir = mount_dir.join(group);
                let Some((room, limit)) = files.room(&dir) else { continue };
                if least.as_ref().is_none_or(|(other, _)| room < *other) {
                    let file = mount.point.join(group).join(limit);
                    least = Some((room, format!("memory limit of the control group ({})", file.display())));
                }
            }
        }
    }
    least
}

/// Names of the files of a control group's memory, by version.
struct GroupFiles {
    kind: &'static str,
    limits: &'static [&'static str],
    used: &'static str,
    /// Of memory.stat: file cache in use lately, not in use, and how much of both is mapped.
    cache: [&'static str; 3],
}

const VERSION_1: GroupFiles = GroupFiles {
    kind: "cgroup",
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file", "total_mapped_file"],
};
/// Above `memory.high` nobody is killed, but everybody who allocates is made to wait.
const VERSION_2: GroupFiles = GroupFiles {
    kind: "cgroup2",
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    cache: ["active_file", "inactive_file", "file_mapped"],
};

impl GroupFiles {
    fn is_at(&self, mount: &Mount) -> bool {
        mount.kind == self.kind && (self.kind == "cgroup2" || mount.options.split(',').any(|option| option == "memory"))
    }

    /// Bytes the group in `dir` may still use and the limit that says so; `None` when it has no limit. File cache that nobody
    /// has mapped counts as free, in use lately or not: the kernel drops it before it refuses memory, and two commands
    /// one after the other find as much left.
    fn room(&self, dir: &Path) -> Option<(u64, &'static str)> {
        let number = |name: &str| read(&dir.join(name)).trim().parse::<u64>().ok();
        let limits = self.limits.iter().filter_map(|&name| Some((number(name)?, name)));
        let (limit, name) = limits.filter(|(limit, _)| *limit < UNLIMITED).min()?;
        let stat = read(&dir.join("memory.stat"));
        let bytes = |name: &str| {
            let values = stat.lines().filter_map(|line| line.split_once(' ')).filter(|(other, _)| *other == name);
            values.filter_map(|(_, value)| value.trim().parse::<u64>().ok()).next().unwrap_or(0)
        };
        let [active, inactive, mapped] = self.cache.map(bytes);
        // Mapped pages may be of either kind.
        let free = (active + inactive).saturating_sub(mapped).max(inactive);
        let used = number(self.used).unwrap_or(0).saturating_sub(free);
        Some((limit.saturating_sub(used), name))
    }
}

/// A line of mountinfo.
struct Mount {
    root: PathBuf,
    point: PathBuf,
    kind: String,
    options: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Mount> {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ').skip(3);
        let (root, point) = (front.next()?, front.next()?);
        let mut back = back.split(' ');
        let (kind, options) = (back.next()?, back.nth(1).unwrap_or(""));
        Some(Mount { root: unescape(root), point: unescape(point), kind: kind.to_owned(), options: options.to_owned() })
    }
}

/// mountinfo writes blank, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => out.push(code as char),
            None => out.push('\\'),
        }
        rest = &rest[at + if code.is_some() { 4 } else { 1 }..];
    }
    out.push_str(rest);
    out.into()
}

fn program_bytes() -> u64 {
    std::env::current_exe().and_then(std::fs::metadata).map_or(0, |meta| meta.len())
}

fn read(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n";
    const NO_LIMIT_V1: &str = "9223372036854771712\n";

    /// A machine of 24 GB with the files given.
    pub(super) fn memory(files: &[(&str, &str)]) -> Memory {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Machine::read(root.path(), 2, "/tmp".into(), BTreeMap::new()).memory
    }

    pub(super) const MOUNT_V2: (&str, &str) = (
        "proc/self/mountinfo",
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n30 22 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n",
    );
    const MOUNT_V1: (&str, &str) = (
        "proc/self/mountinfo",
        "31 22 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
         32 22 0:28 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    );

    #[test]
    fn without_limits_the_machine_decides() {
        let memory = memory(&[]);
        assert_eq!((memory.total, memory.available), (24_000_000 * 1024, 20_000_000 * 1024));
        assert!(memory.source.contains("machine") && !memory.limited);
    }

    #[test]
    fn a_version_2_limit_counts_without_cache_that_nobody_has_mapped() {
        let memory = memory(&[
            MOUNT_V2,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "536870912\n"),
            ("sys/fs/cgroup/a/b/memory.current", "400000000\n"),
            (
                "sys/fs/cgroup/a/b/memory.stat",
                "anon 90000000\nfile_mapped 2000000\ninactive_file 300000000\nactive_file 5000000\n",
            ),
        ]);
        assert_eq!(memory.available, 536_870_912 - 97_000_000);
        assert_eq!(memory.source, "memory limit of the control group (/sys/fs/cgroup/a/b/memory.max)");
        assert!(memory.limited);
    }

    /// 64 pages of 4 KiB a core, of what is used and of what is cache.
    #[test]
    fn what_cores_have_not_told_of_yet_may_be_missing_a_moment_later() {
        let group = memory(&[
            MOUNT_V2,
            ("proc/self/cgroup", "0::/a\n"),
            ("sys/fs/cgroup/a/memory.max", "1000000000\n"),
            ("sys/fs/cgroup/a/memory.current", "250000000\n"),
        ]);
        assert_eq!(group.at_least(8).available, 750_000_000 - 8 * 524_288);
        assert_eq!(memory(&[]).at_least(8), memory(&[]));
    }

    #[test]
    fn the_tightest_group_above_counts() {
        let memory = memory(&[
            MOUNT_V2,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "1000000000\n"),
            ("sys/fs/cgroup/a/memory.current", "250000000\n"),
        ]);
        assert_eq!(memory.available, 750_000_000);
    }

    #[test]
    fn a_version_2_group_is_not_filled_to_where_it_is_throttled() {
        let memory = memory(&[
            MOUNT_V2,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "900000000\n"),
            ("sys/fs/cgroup/a/b/memory.high", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.high", "500000000\n"),
            ("sys/fs/cgroup/a/memory.current", "100000000\n"),
        ]);
        assert_eq!(memory.available, 400_000_000);
        assert_eq!(memory.source, "memory limit of the control group (/sys/fs/cgroup/a/memory.high)");
    }

    #[test]
    fn a_group_that_is_over_its_limit_leaves_nothing() {
        let memory = memory(&[
            MOUNT_V1,
            ("proc/self/cgroup", "4:memory:/docker/abc/inner\n"),
            ("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "900000000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500004096\n"),
        ]);
        assert_eq!((memory.available, memory.known, memory.limited), (0, true, true));
        assert_eq!(memory.source, "memory limit of the control group (/sys/fs/cgroup/memory/memory.limit_in_bytes)");
    }

    #[test]
    fn version_1_in_a_container_that_is_told_its_outside_path() {
        let memory = memory(&[
            MOUNT_V1,
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "36870912\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "cache 1\ninactive_file 7\ntotal_inactive_file 6870912\ntotal_active_file 5\ntotal_mapped_file 9\n",
            ),
        ]);
        // All that is in use lately is mapped.
        assert_eq!(memory.available, 536_870_912 - 30_000_000);
        assert!(memory.source.contains("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    }

    #[test]
    fn the_sentinel_of_version_1_is_no_limit() {
        let memory = memory(&[
            MOUNT_V1,
            ("proc/self/cgroup", "4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", NO_LIMIT_V1),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "36870912\n"),
        ]);
        assert_eq!(memory.available, 20_000_000 * 1024);
    }

    #[test]
    fn a_limit_above_what_is_there_does_not_count() {
        let memory = memory(&[MOUNT_V2, ("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "99000000000\n")]);
        assert_eq!(memory.available, 20_000_000 * 1024);
    }

    #[test]
    fn nonsense_is_unknown() {
        let memory = memory(&[
            MOUNT_V2,
            ("proc/self/cgroup", "what\n0::/\n"),
            ("sys/fs/cgroup/memory.max", "many\n"),
            ("proc/meminfo", "MemTotal: lots\n"),
        ]);
        assert_eq!((memory.total, memory.available, memory.known), (0, 0, false));
    }

    #[test]
    fn mount_points_with_blanks_are_read() {
        assert_eq!(unescape(r"/mnt/a\040b\134c\"), PathBuf::from(r"/mnt/a b\c\"));
    }

    #[test]
    fn limits_and_page_settings_are_read() {
        let root = tempfile::tempdir().unwrap();
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max locked memory         65536                8388608              bytes     \n";
        for (name, text) in
            [("proc/self/limits", limits), ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")]
        {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine::read(root.path(), 2, "/tmp".into(), BTreeMap::new());
        assert_eq!((machine.lockable(), machine.transparent_huge_pages()), (Some(8_388_608), "madvise".into()));
        let unlimited = limits.replace("8388608", "unlimited");
        std::fs::write(root.path().join("proc/self/limits"), unlimited).unwrap();
        assert_eq!(machine.lockable(), None);
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::here();
        assert!(machine.cores >= 1);
        assert!(machine.memory.total > 0 && machine.memory.available > 0);
        assert!(machine.peak_rss() > 0);
        assert_ne!(machine.file_system(Path::new("/")), "unknown");
        assert_eq!(machine.file_system(Path::new("/proc/self")), "proc");
    }
}
