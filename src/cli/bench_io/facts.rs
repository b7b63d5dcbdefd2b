//! What binds, before any number: file system, device, memory, kernel.

use std::fmt::Write as _;

use millstream_io::measure::{Candidate, Sweep, Target};
use millstream_io::{Access, BlockDevice, FileId, IoMode, PageKind, Pages};

use super::io_failure;
use super::source::Source;
use crate::cli::machine::{KernelFacts, Machine};
use crate::cli::{Failure, size};

/// What binds.
pub struct Facts {
    /// Processor.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// What is read.
    pub name: String,
    /// Whether it is a scratch file.
    pub scratch: bool,
    /// Files, and their bytes that are read.
    pub files: usize,
    /// See `files`.
    pub bytes: u64,
    /// Bytes of a slab.
    pub slab_bytes: u64,
    /// Places of a slab.
    pub places: usize,
    /// Type of the file system.
    pub fs: String,
    /// How the first file is read, by evidence.
    pub access: Access,
    /// Pieces on disk.
    pub extents: Option<u64>,
    /// The device of all files.
    pub disk: Option<BlockDevice>,
    /// Settings and limits.
    pub limits: KernelFacts,
    /// Pages of the slabs, and what is wrong with them.
    pub pages: PageKind,
    /// See `pages`.
    pub pages_note: Option<String>,
    /// Whether io_uring works, and why or why not.
    pub ring: Result<String, String>,
    /// Which sweep this is.
    pub sweep: Sweep,
}

impl Facts {
    /// Looks at everything.
    pub fn find(machine: &Machine, source: &Source, target: &mut Target, sweep: Sweep) -> Result<Facts, Failure> {
        let files = target.files(IoMode::Auto).map_err(|error| io_failure(&error))?;
        let arena = target.pool(Pages::Auto).map_err(|error| io_failure(&error))?.report();
        let ring = match target.probe(&Candidate { mode: IoMode::Auto, ..Candidate::RING }) {
            Ok(report) => {
                let notes = report.notes.iter().map(|note| format!("; {note}")).collect::<String>();
                let registered = size::show(report.registered_bytes);
                Ok(format!("setup, feature probe and a read succeeded; {registered} of slabs registered{notes}"))
            }
            Err(error) => Err(match error.hint() {
                Some(hint) => format!("{error}; {hint}"),
                None => error.to_string(),
            }),
        };
        Ok(Facts {
            cpu: machine.cpu.clone(),
            cores: machine.cores,
            memory_bytes: machine.memory.total,
            kernel: machine.kernel.clone(),
            name: source.name.clone(),
            scratch: source.scratch.is_some(),
            files: source.paths.len(),
            bytes: source.bytes,
            slab_bytes: target.slab_bytes(),
            places: target.places(),
            fs: machine.file_system(&source.place),
            access: files.access(FileId(0)).clone(),
            extents: target.witness().extents(),
            disk: target.witness().disk().cloned(),
            limits: machine.kernel_facts(),
            pages: arena.kind,
            pages_note: arena.note,
            ring,
            sweep,
        })
    }

    /// A line a subject.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:9} {value}");
        };
        let load = self.limits.load.map_or("unknown".into(), |[a, b, c]| format!("{a:.2} {b:.2} {c:.2}"));
        let memory = size::show(self.memory_bytes);
        line("machine", format!("{}, {} cores, {memory}; Linux {}; load {load}", self.cpu, self.cores, self.kernel));
        let files = if self.files == 1 { String::new() } else { format!(" in {} files", self.files) };
        line(
            "file",
            format!(
                "{}: {}{files} on {}, {} extents; {} places of {}",
                self.name,
                size::show(self.bytes),
                self.fs,
                or_unknown(self.extents.map(size::grouped)),
                size::grouped(self.places as u64),
                size::show(self.slab_bytes),
            ),
        );
        line("direct", self.access.to_string());
        line("device", self.device_text());
        let memlock = match (self.limits.may_lock_all, self.limits.memlock) {
            (true, limit) => format!("{}, which does not bind this process", limit_text(limit)),
            (false, limit) => limit_text(limit),
        };
        line(
            "memory",
            format!(
                "THP {}; nr_hugepages {} ({} free); memlock {memlock}; slabs on {} pages{}",
                or_unknown(self.limits.thp.clone()),
                self.limits.nr_hugepages,
                self.limits.free_hugepages,
                page_name(self.pages),
                self.pages_note.as_ref().map_or_else(String::new, |note| format!(": {note}")),
            ),
        );
        line(
            "io_uring",
            match &self.ring {
                Ok(reason) => format!("available: {reason}"),
                Err(reason) => format!("not available: {reason}"),
            },
        );
        let cgroup = if self.limits.io_limits.is_empty() {
            "no limit on reading".to_owned()
        } else {
            self.limits.io_limits.join("; ")
        };
        line("cgroup", cgroup);
        for warning in self.warnings() {
            line("warning", warning);
        }
        text + "\n"
    }

    fn device_text(&self) -> String {
        let Some(disk) = &self.disk else {
            return "no single block device: what the drive moves is unknown".to_owned();
        };
        let number = |value: Option<u64>| or_unknown(value.map(|value| value.to_string()));
        let flag = |value: Option<bool>| or_unknown(value.map(|value| if value { "yes" } else { "no" }.to_owned()));
        let under = if disk.under.is_empty() { String::new() } else { format!(" (over {})", disk.under.join(", ")) };
        format!(
            "{}{under}: max_sectors_kb {}, max_segments {}, nr_requests {}, read_ahead_kb {}, scheduler {}, \
             rotational {}, io_poll {}",
            disk.name,
            number(disk.max_sectors_kb),
            number(disk.max_segments),
            number(disk.nr_requests),
            number(disk.read_ahead_kb),
            or_unknown(disk.scheduler.clone()),
            flag(disk.rotational),
            flag(disk.io_poll),
        )
    }

    /// What makes the figures doubtful.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !matches!(self.access, Access::Direct { .. }) {
            warnings.push("no direct reads here: whatever memory may have served is marked cached".to_owned());
        }
        warnings.extend(self.limits.busy(self.cores));
        if !self.limits.io_limits.is_empty() {
            warnings.push("reading is throttled by the control group".to_owned());
        }
        if (self.places as u64) < 16 {
            warnings.push(format!("only {} places to read from", self.places));
        }
        warnings
    }
}

/// What kind of pages is called.
pub fn page_name(kind: PageKind) -> &'static str {
    match kind {
        PageKind::HugeTlb => "hugetlb",
        PageKind::Transparent => "thp",
        PageKind::Small => "4k",
    }
}

fn limit_text(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".into(), size::show)
}

fn or_unknown(value: Option<String>) -> String {
    value.unwrap_or_else(|| "unknown".into())
}
