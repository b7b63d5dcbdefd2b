//! Which threads compute near which node of memory.

use std::sync::Arc;

use millstream_io::hold_to;

use crate::kernels::Team;

/// A team whose threads are spread evenly over nodes with these cores, each held to those of its node; without nodes the
/// system has them where it likes. The caller's thread is held to none: whatever it starts later would be too.
pub(super) fn team(threads: usize, nodes: &[Vec<usize>]) -> Team {
    let turns = turns(nodes);
    if turns.is_empty() {
        return Team::new(threads);
    }
    let nodes: Arc<[Vec<usize>]> = nodes.into();
    Team::beginning(threads, move |thread| {
        // A thread that cannot be held computes the same, as near to its memory as the system has it.
        let _ = hold_to(&nodes[turns[thread % turns.len()]]);
    })
}

/// The node of each thread, by number: one after another, and none again that has no core left before all are taken.
fn turns(nodes: &[Vec<usize>]) -> Vec<usize> {
    let most = nodes.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).flat_map(|turn| (0..nodes.len()).filter(move |&node| turn < nodes[node].len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_take_turns_until_a_node_has_no_core_left() {
        let even = [vec![0, 1], vec![2, 3]];
        assert_eq!(turns(&even), [0, 1, 0, 1]);
        let uneven = [vec![0, 1, 2, 3], vec![4], vec![], vec![5, 6]];
        assert_eq!(turns(&uneven), [0, 1, 3, 0, 3, 0, 0]);
        assert_eq!(turns(&[]), [0; 0]);
        assert_eq!(turns(&[vec![], vec![]]), [0; 0]);
    }
}
