//! The nodes of memory of the machine, and what of them this process may use.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use millstream_io::BlockDevice;
use millstream_io::limits::NUMBERED_MAX;

use super::{Machine, field, kilobytes, read};

/// A node: memory that some cores are near to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: usize,
    /// Cores near to it that this process may use.
    pub cores: Vec<usize>,
    /// Bytes of memory.
    pub total: u64,
    /// Of those, bytes that can be had: what is free, and what the kernel drops before it refuses memory.
    pub available: u64,
    /// Whether this process may use its memory.
    pub usable: bool,
}

/// What `--numa` did with this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// Nodes that its memory lies on.
    pub over: Vec<usize>,
    /// Cores of each node that threads are spread over; empty where the system has them where it likes.
    pub spread: Vec<Vec<usize>>,
}

impl Machine {
    /// The nodes that are there; none where the system tells of none.
    pub fn nodes(&self) -> Vec<Node> {
        nodes(&self.root)
    }

    /// The node that the drive under `path` is near to, where it says so.
    pub fn drive_node(&self, path: &Path) -> Option<usize> {
        BlockDevice::holding(path, &self.root)?.node
    }

    /// The core that this process was on last.
    pub fn core(&self) -> Option<usize> {
        let stat = read(&self.root.join("proc/self/stat"));
        // Fields are counted behind the name, which is the second and may hold blanks: this is the 39th.
        stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
    }
}

/// What the nodes have that this process may use, where those are not all: a control group, numactl or `--numa isolate`
/// says so.
pub(super) fn room(root: &Path) -> Option<(u64, String)> {
    let nodes: Vec<Node> = nodes(root).into_iter().filter(|node| node.total > 0).collect();
    let usable: Vec<&Node> = nodes.iter().filter(|node| node.usable).collect();
    if usable.is_empty() || usable.len() == nodes.len() {
        return None;
    }
    let numbers: Vec<usize> = usable.iter().map(|node| node.number).collect();
    Some((usable.iter().map(|node| node.available).sum(), format!("memory of {}", node_names(&numbers))))
}

/// `node 1`, or `nodes 0 and 1`.
pub fn node_names(nodes: &[usize]) -> String {
    let numbers: Vec<String> = nodes.iter().map(usize::to_string).collect();
    match numbers.split_last() {
        Some((last, [])) => format!("node {last}"),
        Some((last, others)) => format!("nodes {} and {last}", others.join(", ")),
        None => "no node".to_owned(),
    }
}

fn nodes(root: &Path) -> Vec<Node> {
    let dir = root.join("sys/devices/system/node");
    let status = read(&root.join("proc/self/status"));
    let allowed = |name: &str| field(&status, name).and_then(list);
    let (cores_allowed, nodes_allowed, bound) =
        (allowed("Cpus_allowed_list"), allowed("Mems_allowed_list"), bound(root));
    let may = |allowed: &Option<Vec<usize>>, number: &usize| allowed.as_ref().is_none_or(|all| all.contains(number));
    let online = list(&read(&dir.join("online"))).unwrap_or_default();
    let node = |number: usize| {
        let dir = dir.join(format!("node{number}"));
        let mut cores = list(&read(&dir.join("cpulist"))).unwrap_or_default();
        cores.retain(|core| may(&cores_allowed, core));
        let (total, available) = memory(&read(&dir.join("meminfo")));
        let usable = total > 0 && may(&nodes_allowed, &number) && may(&bound, &number);
        Node { number, cores, total, available, usable }
    };
    online.into_iter().map(node).collect()
}

/// Bytes in all and bytes that can be had, by a node's `meminfo`, whose lines say `Node 0 MemFree: 12 kB`.
fn memory(meminfo: &str) -> (u64, u64) {
    let lines: Vec<&str> = meminfo.lines().filter_map(|line| line.splitn(3, ' ').nth(2)).collect();
    let lines = lines.join("\n");
    let bytes = |name: &str| kilobytes(&lines, name).unwrap_or(0);
    // As the kernel counts what is available of all nodes together, but for the little that it keeps back; of what it may
    // or may not be able to shrink, half.
    let dropped = bytes("Active(file)") + bytes("Inactive(file)") + bytes("SReclaimable") / 2;
    (bytes("MemTotal"), bytes("MemFree") + dropped)
}

/// Nodes that this process is bound to by its policy: the first mapping that has none of its own shows it, as
/// `55d0c0000000 bind:0-1 file=...`.
fn bound(root: &Path) -> Option<Vec<usize>> {
    let mut line = String::new();
    // There may be thousands of mappings, and the kernel walks the pages of each that is read.
    BufReader::new(File::open(root.join("proc/self/numa_maps")).ok()?).read_line(&mut line).ok()?;
    let (mode, nodes) = line.split_whitespace().nth(1)?.split_once(':')?;
    mode.starts_with("bind").then(|| list(nodes)).flatten()
}

/// The numbers of a list as the kernel writes it: `0-1,4`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= NUMBERED_MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Two nodes of two cores, 12 GB and 8 GB.
    const NODES: [(&str, &str); 5] = [
        ("sys/devices/system/node/online", "0-1\n"),
        ("sys/devices/system/node/node0/cpulist", "0-1\n"),
        (
            "sys/devices/system/node/node0/meminfo",
            "Node 0 MemTotal:       12000000 kB\nNode 0 MemFree:         9000000 kB\nNode 0 Active:           700000 kB\n\
             Node 0 Inactive:         800000 kB\nNode 0 Active(file):     500000 kB\nNode 0 Inactive(file):   300000 kB\n\
             Node 0 SReclaimable:     200000 kB\n",
        ),
        ("sys/devices/system/node/node1/cpulist", "2-3\n"),
        ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:  8000000 kB\nNode 1 MemFree:   7000000 kB\n"),
    ];
    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 20000000 kB\nMemAvailable: 16500000 kB\n");

    fn machine(files: &[(&str, &str)]) -> Machine {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in NODES.iter().chain([&MEMINFO]).chain(files) {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let machine = Machine::read(root.path(), 4, "/tmp".into(), BTreeMap::new());
        // The files stay for what is read later.
        std::mem::forget(root);
        machine
    }

    #[test]
    fn lists_of_the_kernel_are_numbers() {
        assert_eq!(list("0-1,4\n").unwrap(), [0, 1, 4]);
        assert_eq!(list("7").unwrap(), [7]);
        assert_eq!(list("\n").unwrap(), [0; 0]);
        for nonsense in ["0-", "a", "0-99999999999", "3,x"] {
            assert_eq!(list(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn nodes_have_the_cores_and_the_memory_that_their_files_say() {
        let nodes = machine(&[]).nodes();
        let first =
            Node { number: 0, cores: vec![0, 1], total: 12_288_000_000, available: 10_137_600_000, usable: true };
        let second =
            Node { number: 1, cores: vec![2, 3], total: 8_192_000_000, available: 7_168_000_000, usable: true };
        assert_eq!(nodes, [first, second]);
    }

    #[test]
    fn cores_and_nodes_that_a_control_group_forbids_do_not_count() {
        let status = ("proc/self/status", "Cpus_allowed_list:\t1-2\nMems_allowed:\t1\nMems_allowed_list:\t1\n");
        let machine = machine(&[status]);
        let seen: Vec<_> = machine.nodes().into_iter().map(|node| (node.cores, node.usable)).collect();
        assert_eq!(seen, [(vec![1], false), (vec![2], true)]);
        let memory = &machine.memory;
        assert_eq!(
            (memory.available, memory.source.as_str(), memory.limited),
            (7_168_000_000, "memory of node 1", true)
        );
    }

    #[test]
    fn memory_is_that_of_the_nodes_a_policy_binds_to_and_no_other_policy_limits_it() {
        let available = |policy: &str| {
            let maps = format!("55d0c0000000 {policy} file=/bin/x mapped=2 N0=2\n7f00 default anon=1 N1=1\n");
            machine(&[("proc/self/numa_maps", &maps)]).memory.available
        };
        assert_eq!(available("bind:0"), 10_137_600_000);
        assert_eq!(available("bind=static:1"), 7_168_000_000);
        for all in ["bind:0-1", "default", "interleave:0", "prefer:1", "prefer (many):0", ""] {
            assert_eq!(available(all), 16_896_000_000, "{all}");
        }
    }

    #[test]
    fn where_the_system_tells_of_no_nodes_there_are_none_and_no_limit() {
        let bare = Machine::read(Path::new("/nonexistent"), 4, "/tmp".into(), BTreeMap::new());
        assert_eq!((bare.nodes(), bare.memory.limited, bare.core()), (vec![], false, None));
    }

    #[test]
    fn the_core_is_counted_behind_a_name_with_blanks() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = format!("17 (a) b (c) {}\n", fields.join(" "));
        assert_eq!(machine(&[("proc/self/stat", &stat)]).core(), Some(39));
    }

    #[test]
    fn nodes_are_named_as_people_do() {
        assert_eq!([&[1][..], &[0, 1], &[0, 2, 3]].map(node_names), ["node 1", "nodes 0 and 1", "nodes 0, 2 and 3"]);
    }
}
