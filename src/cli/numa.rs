//! `--numa`: on which nodes memory comes to lie, and near which of them threads run.
//!
//! Weights and experts are read once a token by all threads, a few rows at a time, in no fixed order. So no thread has memory
//! of its own that could lie near to it: either all of it is spread evenly, and with it the work of the memories, or all
//! threads and all memory are together on one node. Left alone, pages lie where the thread ran that filled them.

use millstream_io::{IoError, PagePolicy, hold_to, place_pages};

use super::args::{NUMA, RunArgs};
use super::machine::{Machine, Node, Placed, node_names};
use super::{Failure, job, render};

/// `--numa`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// As the system has it, or whoever started the program: numactl, a control group.
    #[default]
    Off,
    /// Pages in turn on every node, threads spread evenly.
    Interleave,
    /// All of both on one node.
    Isolate,
}

/// Places this process as `args` ask for; what the machine is to it from then on. To be done before any thread is
/// started: they take after their parent.
pub fn place(args: &RunArgs, machine: &Machine) -> Result<Machine, Failure> {
    let numa = args.engine.numa.unwrap_or_default();
    if numa == Numa::Off {
        return Ok(machine.clone());
    }
    let mut nodes = machine.nodes();
    nodes.retain(|node| node.usable || !node.cores.is_empty());
    let drive = job::model_dir(args, machine).and_then(|dir| machine.drive_node(&dir));
    let chosen = choose(numa, &nodes, drive, machine.core());
    let over: Vec<usize> = chosen.iter().map(|node| node.number).collect();
    let done = match numa {
        _ if chosen.is_empty() => Ok(()),
        Numa::Isolate => hold(&chosen).and_then(|()| place_pages(PagePolicy::Bind, &over)),
        _ => place_pages(PagePolicy::Interleave, &over),
    };
    judge(numa, nodes.len(), done)?.iter().for_each(|line| render::note(args.quiet, line));
    let spread = match numa {
        Numa::Interleave if chosen.len() > 1 => chosen.into_iter().map(|node| node.cores.clone()).collect(),
        _ => Vec::new(),
    };
    // What can be had is another's now: cores, and memory.
    let mut placed = Machine::here();
    placed.placed = Placed { over, spread };
    Ok(placed)
}

/// What there is to say where a process that may use so many nodes was to be placed. With several of them, what was asked
/// for and cannot be had is an error; with one, all is where it would be.
fn judge(numa: Numa, nodes: usize, done: Result<(), IoError>) -> Result<Option<String>, Failure> {
    let name = NUMA.name(numa);
    match (nodes, done) {
        (0, _) => Ok(Some(format!("--numa {name} changes nothing: this system tells of no nodes of memory"))),
        (1, Ok(())) => Ok(Some(format!("--numa {name} changes nothing: there is one node that may be used"))),
        (1, Err(refused)) => {
            Ok(Some(format!("--numa {name} changes nothing: there is one node that may be used, and {refused}")))
        }
        (_, Ok(())) => Ok(None),
        (_, Err(refused)) => {
            Err(Failure { hint: refused.hint(), ..Failure::usage(format!("--numa {name}: {refused}")) })
        }
    }
}

fn hold(nodes: &[&Node]) -> Result<(), IoError> {
    let cores: Vec<usize> = nodes.iter().flat_map(|node| node.cores.iter().copied()).collect();
    // Memory without a core near to it is as far from all of them.
    if cores.is_empty() { Ok(()) } else { hold_to(&cores) }
}

/// The nodes that memory is to lie on, of those that may be used: such as have cores near them, where any has. For
/// `isolate` the one of the drive, which writes there, else the one with the core that this process is on.
fn choose(numa: Numa, nodes: &[Node], drive: Option<usize>, core: Option<usize>) -> Vec<&Node> {
    let usable = || nodes.iter().filter(|node| node.usable);
    let mut chosen: Vec<&Node> = usable().filter(|node| !node.cores.is_empty()).collect();
    if chosen.is_empty() {
        chosen = usable().collect();
    }
    if numa == Numa::Isolate {
        let of_drive = chosen.iter().position(|node| Some(node.number) == drive);
        let here = || chosen.iter().position(|node| core.is_some_and(|core| node.cores.contains(&core)));
        let one = of_drive.or_else(here).unwrap_or(0);
        chosen = chosen.into_iter().skip(one).take(1).collect();
    }
    chosen
}

/// What `--numa` came to, for people: `flag; memory of nodes 0 and 1`.
pub fn origin(args: &RunArgs, machine: &Machine) -> String {
    match (args.engine.numa, machine.placed.over.as_slice()) {
        (None, _) => "default".to_owned(),
        (Some(_), []) => "flag".to_owned(),
        (Some(_), over) => format!("flag; memory of {}", node_names(over)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: usize, cores: &[usize], usable: bool) -> Node {
        Node { number, cores: cores.to_vec(), total: 1 << 30, available: 1 << 29, usable }
    }

    fn chosen(numa: Numa, nodes: &[Node], drive: Option<usize>, core: Option<usize>) -> Vec<usize> {
        choose(numa, nodes, drive, core).into_iter().map(|node| node.number).collect()
    }

    #[test]
    fn memory_is_spread_over_what_may_be_used_and_has_cores() {
        let nodes = [node(0, &[0, 1], true), node(1, &[2, 3], true), node(2, &[], true), node(3, &[4], false)];
        assert_eq!(chosen(Numa::Interleave, &nodes, Some(1), Some(0)), [0, 1]);
        // Cores of one node, memory of another: what a control group may leave.
        let apart = [node(0, &[0, 1], false), node(1, &[], true)];
        assert_eq!(chosen(Numa::Interleave, &apart, None, None), [1]);
        assert_eq!(chosen(Numa::Isolate, &apart, Some(0), Some(0)), [1]);
        assert_eq!(chosen(Numa::Interleave, &[], None, None), [0; 0]);
    }

    #[test]
    fn the_node_of_the_drive_comes_before_the_one_that_the_program_is_on() {
        let nodes = [node(0, &[0, 1], true), node(1, &[2, 3], true), node(2, &[4], false)];
        let isolated = |drive, core| chosen(Numa::Isolate, &nodes, drive, core);
        assert_eq!(isolated(Some(1), Some(0)), [1]);
        assert_eq!(isolated(None, Some(3)), [1]);
        assert_eq!(isolated(Some(2), Some(3)), [1], "the drive's node may not be used");
        assert_eq!(isolated(Some(7), None), [0]);
    }

    #[test]
    fn what_cannot_be_had_is_an_error_only_where_there_is_something_to_place() {
        let refused = || Err(IoError::Refused { what: "numa", why: "set_mempolicy failed: EPERM".to_owned() });
        let said = |nodes, done| judge(Numa::Interleave, nodes, done).map(|note| note.unwrap_or_default());
        assert_eq!(said(2, Ok(())).unwrap(), "");
        let failure = said(2, refused()).unwrap_err();
        assert_eq!((failure.code, failure.error.contains("--numa interleave: numa is not possible")), (2, true));
        assert!(failure.hint.unwrap().contains("SYS_NICE"));
        assert!(said(1, Ok(())).unwrap().contains("one node"));
        assert!(said(1, refused()).unwrap().contains("EPERM"));
        assert!(said(0, Ok(())).unwrap().contains("no nodes"));
    }
}
