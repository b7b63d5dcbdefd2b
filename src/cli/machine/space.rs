//! What this process may map.

use std::path::Path;

use super::{kilobytes, program_bytes, read};
use crate::engine::space::Space;

/// Limits on what a process maps: their name in `/proc/self/limits`, what counts in `/proc/self/status`, and the command that
/// sets them.
const LIMITS: [(&str, &str, &str); 2] =
    [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")];

/// The limit that leaves least, and what it leaves.
pub fn of_process(root: &Path) -> Option<Space> {
    let limits = read(&root.join("proc/self/limits"));
    let status = read(&root.join("proc/self/status"));
    let left = LIMITS.into_iter().filter_map(|(name, counted, set_by)| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
        let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
        let left = limit.saturating_sub(kilobytes(&status, counted).unwrap_or(0));
        // Data are what may be written, which files that are mapped here are not.
        Some(Space { set_by, limit, left, program: program_bytes(), of_files: counted == "VmSize" })
    });
    left.min_by_key(|space| space.left)
}

/// What people call the limit.
pub fn name(space: &Space) -> String {
    let what = if space.of_files { "address space" } else { "data" };
    format!("limit on the {what} ({})", space.set_by)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MOUNT_V2, memory};

    const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
                          Max data size             2000000000           unlimited            bytes     \n\
                          Max address space         3072000000           unlimited            bytes     \n";
    const STATUS: (&str, &str) =
        ("proc/self/status", "VmPeak:\t  400000 kB\nVmSize:\t  250000 kB\nVmData:\t   100000 kB\n");

    #[test]
    fn the_limit_that_leaves_least_counts_without_what_is_mapped_already() {
        let data = memory(&[("proc/self/limits", LIMITS), STATUS]);
        let space = data.space.unwrap();
        assert_eq!((space.left, space.limit, space.of_files), (2_000_000_000 - 102_400_000, 2_000_000_000, false));
        assert!(data.limited && data.source.contains("ulimit -d"), "{}", data.source);
        let only_space = LIMITS.replace("2000000000", "unlimited ");
        let limited = memory(&[("proc/self/limits", &only_space), STATUS]);
        assert_eq!(limited.available, 3_072_000_000 - 256_000_000);
        assert_eq!(limited.shared, 20_000_000 * 1024, "of the machine");
        assert!(limited.limited && limited.source.contains("ulimit -v"), "{}", limited.source);
        assert_eq!(limited.usable(), limited.available, "nobody else takes of it");
        let unlimited = only_space.replace("3072000000", "unlimited ");
        let unlimited = memory(&[("proc/self/limits", &unlimited), STATUS]);
        assert_eq!((unlimited.limited, unlimited.space), (false, None));
    }

    #[test]
    fn a_control_group_that_leaves_less_counts_as_well() {
        let group = [
            MOUNT_V2,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1000000000\n"),
            ("proc/self/limits", LIMITS),
        ];
        let memory = memory(&group);
        assert_eq!((memory.available, memory.shared), (1_000_000_000, 1_000_000_000));
        assert!(memory.space.is_some() && memory.usable() == 850_000_000, "{memory:?}");
    }
}
