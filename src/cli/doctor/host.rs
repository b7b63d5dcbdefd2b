//! Checks of the machine: how it reads the model's files, and whether the model fits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millstream_io::limits::{HUGE_PAGE_BYTES, PAGE_BYTES};
use millstream_io::{
    Access, BlockDevice, DeviceConfig, DeviceKind, FileId, FileSet, FileSpan, IoError, IoMode, PageKind, Priority,
    Read, SlabPool, Wait, layout, leave, open_device,
};

use serde_json::json;

use crate::checkpoint::{Checkpoint, ExpertSource};
use crate::engine::budget::{Bound, Budget, TooSmall};
use crate::engine::{Engine, EngineConfig, EngineError};
use crate::kernels::{Format, Isa, Kernels};
use crate::model::load::LoadError;

use super::{Check, Report, Status};
use crate::cli::config::RunConfig;
use crate::cli::info::nodes_text;
use crate::cli::job::engine_failure_of;
use crate::cli::machine::Machine;
use crate::cli::plan::speed;
use crate::cli::{Failure, render, size};

/// Buffers that try out pages and the ring: a few slabs of a large model.
const TRIAL_BYTES: usize = 32 << 20;
/// Of the memory that is left they take one part in so many: who takes more than a control group has is killed.
const TRIAL_PART_OF_MEMORY: u64 = 8;
/// And of what this process may map, where that is limited.
const TRIAL_PART_OF_SPACE: u64 = 16;
/// In so many pieces for the ring, which registers as many of them as may be locked.
const TRIAL_PIECES: usize = 16;
/// What the kernel counts of locked memory besides the slabs: the whole of the huge pages that they begin and end in.
const LOCKED_BESIDES_BYTES: u64 = 2 * HUGE_PAGE_BYTES as u64;
/// A drive that takes longer for one sector hangs.
const TRIAL_WAIT: Duration = Duration::from_secs(30);

/// A token that reads for longer than this is no conversation.
const SLOW_TOKEN_S: f64 = 30.0;

/// Bytes of buffers to try out, in whole pieces: less where this process may have or map little, since `run` has no such
/// buffers.
fn trial_bytes(machine: &Machine) -> usize {
    let memory = &machine.memory;
    let held = if memory.known { memory.shared / TRIAL_PART_OF_MEMORY } else { u64::MAX };
    let mapped = memory.space.map_or(u64::MAX, |space| space.left / TRIAL_PART_OF_SPACE);
    let piece = held.min(mapped).min(TRIAL_BYTES as u64) as usize / TRIAL_PIECES;
    (piece / PAGE_BYTES).max(1) * PAGE_BYTES * TRIAL_PIECES
}

/// Processor, and the pages that buffers get.
pub fn pages(machine: &Machine, report: &mut Report) {
    let amx = Kernels::why_missing(Isa::Amx).map_or_else(String::new, |why| format!(" (no amx: {why})"));
    report.ok("cpu", format!("{}, {} cores, {} kernels{amx}", machine.cpu, machine.cores, Kernels::best().isa));
    numa(machine, report);
    let mode = machine.transparent_huge_pages();
    let pages = match SlabPool::new(trial_bytes(machine), 1) {
        Ok(pool) => pool.report(),
        Err(error) => return report.fail("huge-pages", error.to_string(), error.hint()),
    };
    let kind = match pages.kind {
        PageKind::HugeTlb => "reserved 2 MiB pages",
        PageKind::Transparent => "transparent 2 MiB pages",
        PageKind::Small => "4 KiB pages",
    };
    let detail = format!("buffers are on {kind} (transparent huge pages: {mode})");
    match pages.note {
        Some(note) => report.warn("huge-pages", detail, note),
        None => report.ok("huge-pages", detail),
    }
}

/// The nodes of memory: on several of them pages lie where threads happened to run.
fn numa(machine: &Machine, report: &mut Report) {
    let nodes = machine.nodes();
    let several = match nodes.len() {
        0 | 1 => "",
        _ => "; pages lie where they are touched first, unless --numa interleave or isolate is given",
    };
    report.ok("numa", format!("nodes: {}{several}", nodes_text(&nodes, None)));
}

/// Contexts that are tried where the usual one does not fit; the last is the shortest that `run` makes.
const SHORTER: [usize; 3] = [1024, 256, SHORTEST];
const SHORTEST: usize = 64;

/// How memory would be divided with the settings of `run`, in the longest context that it has by itself, or in a shorter one,
/// at last for a prompt as short as a greeting, of so many tokens: only what does not fit at all fails.
pub fn memory(
    machine: &Machine,
    checkpoint: &Checkpoint,
    config: &RunConfig,
    (longest, greeting): (usize, usize),
    report: &mut Report,
) -> Option<Budget> {
    let mut short = config.clone();
    short.prompt_has(greeting);
    let shorter = SHORTER.into_iter().filter(|shorter| *shorter < longest).map(|context| (context, config));
    let mut refused = None;
    for (context, config) in std::iter::once((longest, config)).chain(shorter).chain([(SHORTEST.min(longest), &short)])
    {
        match Engine::plan(checkpoint, &config.engine(context)) {
            Ok(budget) => {
                divided(machine, checkpoint, &budget, context, refused, report);
                return Some(budget);
            }
            Err(EngineError::TooSmall(error)) => refused = Some((context, error)),
            // Norms and biases have a line of their own.
            Err(EngineError::Resident(LoadError::BadNumber(_))) => {
                report.skip("memory", "needs norms and biases that are numbers: see weights", None);
                return None;
            }
            Err(error @ EngineError::Resident(LoadError::Requantized { .. })) => {
                report.failure("widths", engine_failure_of(error, &config.model));
                report.skip("memory", "needs widths that the model can have", None);
                return None;
            }
            Err(error) => {
                report.fail("memory", Failure::of(&error).error, error.hint());
                return None;
            }
        }
    }
    let (_, error) = refused?;
    let less = error.narrower.map_or_else(String::new, |narrower| format!("; {narrower}"));
    let hint = match &error.bound {
        Bound::Space { space, short } => format!("{}, for a short `run`{less}", error.raised(space, *short)),
        _ => format!("free memory, or allow more: a short `run` works with --ram {}{less}", error.typed()),
    };
    report.fail("memory", error.to_string(), Some(hint));
    None
}

/// Says how memory is divided in a context, and that a longer one was refused, where it was.
fn divided(
    machine: &Machine,
    checkpoint: &Checkpoint,
    budget: &Budget,
    context: usize,
    refused: Option<(usize, TooSmall)>,
    report: &mut Report,
) {
    let text = budget.to_string();
    let text = text.strip_prefix("memory: ").unwrap_or(&text);
    let text = format!("{text}, for a context of {context} ({})", machine.memory.source);
    let token = (checkpoint.routed().count() * checkpoint.arch.moe.top_k) as u64;
    if let Some((longer, error)) = refused {
        let hint = format!(
            "shorten prompt and answer (`run -n`), or free memory: a context of {longer} needs {}",
            size::show(error.needed())
        );
        report.warn("memory", text, hint);
    } else if budget.slots() < token {
        let hint = format!("one token uses {token} experts, so few are found in memory: raise --ram or shorten -c");
        report.warn("memory", text, hint);
    } else {
        report.ok("memory", text);
    }
}

/// Whether the ring may pin the slabs.
pub fn locked(machine: &Machine, budget: Option<&Budget>, report: &mut Report) {
    let Some(limit) = machine.lockable() else { return report.ok("memlock", "no limit on locked memory") };
    let detail = format!("{} may be locked", size::show(limit));
    match budget.map(|budget| budget.experts() + budget.staging) {
        Some(slabs) if slabs + LOCKED_BESIDES_BYTES > limit && machine.uid != 0 => {
            let wanted = slabs + LOCKED_BESIDES_BYTES;
            let hint =
                format!("raise `ulimit -l` to {} KiB: reads into the rest cost more CPU", wanted.div_ceil(1 << 10));
            report.warn("memlock", format!("{detail}, for {} of slabs", size::show(slabs)), hint);
        }
        _ if machine.uid == 0 => report.ok("memlock", format!("{detail}; a privileged process may lock more")),
        _ => report.ok("memlock", detail),
    }
}

/// Opens every shard and says how it is read: a line for each file system and way.
pub fn files(
    machine: &Machine,
    checkpoint: &Checkpoint,
    engine: &EngineConfig,
    report: &mut Report,
) -> Option<Arc<FileSet>> {
    let files = match FileSet::open(checkpoint.tensors.paths(), engine.io) {
        Ok(files) => files,
        Err(error) => {
            report.fail("files", error.to_string(), error.hint());
            return None;
        }
    };
    let mut groups: BTreeMap<(String, bool, String), Vec<String>> = BTreeMap::new();
    for file in (0..files.len() as u32).map(FileId) {
        let (path, access) = (files.path(file), files.access(file));
        let as_wished = matches!(access, Access::Direct { .. } | Access::Buffered { why: None });
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        groups.entry((machine.file_system(path), as_wished, access.to_string())).or_default().push(name);
    }
    for ((file_system, as_wished, access), names) in groups {
        let which = match names.as_slice() {
            [one] => one.clone(),
            names => format!("{} files from {} on", names.len(), names[0]),
        };
        let detail = format!("{which}, {file_system}: {access}");
        match as_wished {
            true => report.ok("files", detail),
            false => report.warn(
                "files",
                detail,
                "the page cache costs CPU and memory: move the model to ext4 or xfs on a local drive",
            ),
        }
    }
    Some(Arc::new(files))
}

/// How fast the drive reads experts, and where they lie on it.
pub fn drive(machine: &Machine, checkpoint: &Checkpoint, engine: &EngineConfig, report: &mut Report) {
    let token = checkpoint.token_expert_bytes();
    match speed::drive(checkpoint, engine) {
        Ok(measured) => {
            let seconds = token as f64 / (measured.gb_s * 1e9);
            // What the page cache served says nothing of the drive.
            let class = measured.doubt.is_none().then(|| class(measured.gb_s));
            let detail = format!(
                "{:.2} GB/s reading {} experts at once{}: {} for a token that finds none in memory",
                measured.gb_s,
                checkpoint.arch.moe.top_k,
                class.map_or_else(String::new, |class| format!(", as {class} does")),
                render::seconds(seconds)
            );
            let (status, detail, hint) = match (measured.doubt, seconds > SLOW_TOKEN_S) {
                (Some(doubt), _) => (Status::Skip, format!("{detail}; {doubt}"), None),
                (None, true) => (Status::Warn, detail, Some("put the model on an NVMe drive, or give it more memory")),
                (None, false) => (Status::Ok, detail, None),
            };
            let more = vec![("gb_s", json!(size::short(measured.gb_s))), ("class", json!(class))];
            report.add(Check { id: "disk", status, detail, hint: hint.map(str::to_owned), more });
        }
        Err(why) => report.skip("disk", format!("not measured: {why}"), None),
    }
    placement(machine, checkpoint, report);
}

/// The kind of drive that reads so fast at best, in GB/s.
fn class(gb_s: f64) -> &'static str {
    match gb_s {
        ..0.3 => "a hard disk or a network",
        ..0.6 => "a SATA drive",
        ..3.6 => "an NVMe drive of PCIe 3",
        ..7.5 => "an NVMe drive of PCIe 4",
        _ => "an NVMe drive of PCIe 5, or several drives",
    }
}

/// How many reads an expert takes, and which drives hold them.
fn placement(machine: &Machine, checkpoint: &Checkpoint, report: &mut Report) {
    let pieces = checkpoint.routed().flatten().map(ExpertSource::pieces).max().unwrap_or(1);
    let mut drives: Vec<String> = checkpoint
        .tensors
        .paths()
        .iter()
        .filter_map(|path| BlockDevice::holding(path, machine.root()).map(|device| device.name))
        .collect();
    drives.sort();
    drives.dedup();
    let drives = if drives.is_empty() { "no block device".to_owned() } else { drives.join(", ") };
    match pieces {
        1 => report.ok("placement", format!("every expert lies in one piece, on {drives}")),
        // As published containers have it: weights here, scales there.
        2 => report.ok("placement", format!("every expert lies in at most two pieces, on {drives}")),
        _ => {
            let detail = format!("an expert lies in up to {pieces} pieces, on {drives}");
            // Integer weights are not quantized again.
            let hint = match checkpoint.formats().any(Format::is_integer) {
                true => "each piece is a read of its own: `millstream convert --repack` lays them together",
                false => "each piece is a read of its own: `millstream convert` lays them together",
            };
            report.warn("placement", detail, hint);
        }
    }
}

/// The verdict on io_uring, by opening one and reading with it.
pub fn ring(machine: &Machine, files: &Arc<FileSet>, engine: &EngineConfig, report: &mut Report) {
    if engine.device == DeviceKind::Threads {
        return report.skip("io_uring", "reader threads are asked for", None);
    }
    if files.mode() == IoMode::Mmap {
        return match try_device(machine, files, DeviceKind::Mmap) {
            Ok(_) => report.skip("io_uring", "mapped files are asked for, which threads read", None),
            Err(error) => report.fail("io_uring", error.to_string(), error.hint()),
        };
    }
    match try_ring(machine, files) {
        Ok(registered) => {
            let (registered, all) = (size::show(registered), size::show(trial_bytes(machine) as u64));
            report.ok("io_uring", format!("works; {registered} of {all} of trial buffers registered"));
        }
        Err(error) if engine.device == DeviceKind::Uring => {
            report.fail("io_uring", error.to_string(), error.hint());
        }
        Err(error @ IoError::RingRefused { .. }) => {
            let hint = error.hint().unwrap_or_default();
            report.warn("io_uring", format!("{error}; reader threads take its place"), hint);
        }
        Err(error) => report.fail("io_uring", error.to_string(), error.hint()),
    }
}

/// Opens a ring and reads with it; the bytes the kernel registered.
pub fn try_ring(machine: &Machine, files: &Arc<FileSet>) -> Result<u64, IoError> {
    try_device(machine, files, DeviceKind::Uring)
}

/// Opens a device and reads with it; the bytes the kernel registered.
fn try_device(machine: &Machine, files: &Arc<FileSet>, kind: DeviceKind) -> Result<u64, IoError> {
    let pool = SlabPool::new(trial_bytes(machine) / TRIAL_PIECES, TRIAL_PIECES)?;
    let config = DeviceConfig { kind, ..DeviceConfig::default() };
    let mut device = open_device(&config, Arc::clone(files), &pool)?;
    let registered = device.describe().registered_bytes;
    let len = files.len_bytes(FileId(0)).min(u64::from(files.align()));
    let segments = layout(&[FileSpan { file: FileId(0), offset: 0, len }], files)?.segments;
    let read = Read { tag: 0, priority: Priority::Demand, segments };
    let Some(slab) = pool.take() else { unreachable!("nobody else has the slab") };
    if device.submit(read, slab).is_err() {
        return Err(IoError::DeviceDied { cause: "it takes no read".to_owned() });
    }
    let reaped = device.reap(Wait::AtMost(TRIAL_WAIT));
    // A drive that hangs is not waited for a second time.
    leave(device);
    match reaped? {
        Some(done) => done.result.map(|()| registered),
        None => Err(IoError::DeviceDied { cause: format!("a read took longer than {} s", TRIAL_WAIT.as_secs()) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_is_of_the_class_whose_bus_could_carry_what_it_reads() {
        // Limits of the buses: SATA 0.6 GB/s; four lanes of PCIe 3 3.94, of PCIe 4 7.88, less what packets cost.
        for (gb_s, bus) in [(0.15, "hard disk"), (0.55, "SATA"), (3.4, "PCIe 3"), (7.0, "PCIe 4"), (12.0, "PCIe 5")] {
            assert!(class(gb_s).contains(bus), "{gb_s}: {}", class(gb_s));
        }
    }
}
