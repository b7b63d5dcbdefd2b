//! The `info` command: what the model and this machine are, on one screen.

use std::fmt::Write as _;
use std::sync::Arc;

use millstream_io::{BlockDevice, FileId, FileSet, free_bytes};
use serde_json::{Map, Value as Json, json};

use crate::checkpoint::arch::MlpKind;
use crate::checkpoint::census::Census;
use crate::checkpoint::{Checkpoint, CheckpointError, ExpertSource, vendor_name};
use crate::engine::budget::Budget;
use crate::engine::config::DEFAULT_CONTEXT;
use crate::engine::{Engine, EngineError};
use crate::kernels::{Format, Isa, Kernels};

use super::args::{ModelArgs, WidthArgs};
use super::config::RunConfig;
use super::doctor::try_ring;
use super::machine::{Machine, Node};
use super::{Done, Failure, job, output, render, size};

/// Flags of `info`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream info /models/glm-5.2-int4
  millstream info -m /models/glm-5.2-int4 --json

No weight is read. Whether the model will run here is what doctor says, how fast is what plan says.
Exit codes: 0 done, 1 the work failed, 2 usage.")]
pub struct InfoArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    widths: WidthArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Everything that is known without reading a weight.
struct Info<'a> {
    checkpoint: &'a Checkpoint,
    machine: &'a Machine,
    name: String,
    vendor: String,
    census: Census,
    /// How memory would be divided, or why it cannot be: as a rule the model does not fit.
    budget: Result<Budget, String>,
    disk: Disk,
    /// Bytes that a ring registered, or why there is none; unknown where no file can be opened to try it with.
    ring: Option<Result<u64, String>>,
}

/// What holds the shards.
struct Disk {
    file_system: String,
    device: Option<BlockDevice>,
    /// How the first shard is read, or why it cannot be opened.
    access: Result<String, String>,
    free_bytes: Option<u64>,
}

/// Looks, and prints.
pub fn info(args: &InfoArgs, machine: &Machine) -> Result<Done, Failure> {
    let Some((checkpoint, config)) = job::open_model(&args.model, args.widths, machine)? else {
        return Ok(Done::Interrupted);
    };
    let info = Info::find(&checkpoint, &config, machine)?;
    let text = if args.json { info.json().to_string() + "\n" } else { info.text() };
    Ok(output::print(&text)?.unwrap_or(Done::Whole))
}

impl<'a> Info<'a> {
    fn find(checkpoint: &'a Checkpoint, config: &RunConfig, machine: &'a Machine) -> Result<Info<'a>, Failure> {
        let failed = |error: CheckpointError| Failure::of(&error).hint(error.hint());
        let engine = config.engine(checkpoint.arch.max_context.min(DEFAULT_CONTEXT));
        let place = checkpoint.tensors.paths().first().unwrap_or(&checkpoint.dir);
        let files = FileSet::open(checkpoint.tensors.paths(), engine.io).map(Arc::new);
        let budget = match config.check_memory(machine) {
            Ok(()) => Engine::plan(checkpoint, &engine).map_err(|error| match error {
                EngineError::TooSmall(_) => format!("it does not fit: {error}"),
                _ => error.to_string(),
            }),
            Err(failure) => Err(failure.error),
        };
        let disk = Disk {
            file_system: machine.file_system(place),
            device: BlockDevice::holding(place, machine.root()),
            access: files.as_ref().map(|files| files.access(FileId(0)).to_string()).map_err(ToString::to_string),
            free_bytes: free_bytes(&checkpoint.dir).ok(),
        };
        let ring = files.as_ref().ok().map(|files| try_ring(machine, files).map_err(|error| error.to_string()));
        let census = Census::take(checkpoint).map_err(failed)?;
        let vendor = vendor_name(&checkpoint.dir).map_err(failed)?;
        Ok(Info { checkpoint, machine, name: config.model.name(), vendor, census, budget, disk, ring })
    }

    fn dense_layers(&self) -> usize {
        self.checkpoint.arch.layers.iter().filter(|layer| matches!(layer.mlp, MlpKind::Dense { .. })).count()
    }

    /// Bytes of the largest expert of the decoder layers, and of those that one token uses.
    fn expert_bytes(&self) -> (u64, u64) {
        let largest = self.checkpoint.routed().flatten().map(ExpertSource::bytes).max().unwrap_or(0);
        (largest, self.checkpoint.token_expert_bytes())
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, said: String| {
            let _ = writeln!(text, "{name:<9} {said}");
        };
        let (arch, census, machine) = (&self.checkpoint.arch, &self.census, self.machine);
        line("model", format!("{}: {}", self.name, self.vendor));
        line("where", self.checkpoint.dir.display().to_string());
        let (all, token) = (parameters(census.used().weights), parameters(census.weights_per_token));
        line("size", format!("{all} parameters, {token} of them take part in a token"));
        line("layers", self.layers_text());
        line("shapes", self.shapes_text());
        line("attention", arch.attention.describe());
        if let Some(indexer) = &arch.indexer {
            let said =
                format!("{} positions are kept, chosen by {} heads of {}", indexer.top_k, indexer.heads, indexer.dim);
            line("indexer", said);
        }
        let formats = census.formats().into_iter().map(|f| format!("{} as {f}", size::show(census.format(f).bytes)));
        line("formats", formats.collect::<Vec<_>>().join(", "));
        let (expert, token) = self.expert_bytes();
        line(
            "experts",
            format!("{} each, {} for a token that finds none in memory", size::show(expert), size::show(token)),
        );
        let tensors = self.checkpoint.tensors.len() as u64;
        let (shards, opened) = (self.checkpoint.tensors.paths().len(), self.checkpoint.took().as_secs_f64());
        let said = format!("{shards} files of {} in all, {} tensors", size::show(census.bytes), size::grouped(tensors));
        line("shards", format!("{said}, opened and checked in {}", render::seconds(opened)));
        for note in self.checkpoint.notes() {
            line("note", note.clone());
        }
        line("machine", format!("{}, {} cores, Linux {}", machine.cpu, machine.cores, machine.kernel));
        line("nodes", nodes_text(&machine.nodes(), self.disk.node()));
        line("kernels", self.kernels_text());
        let (ram, free) = (size::show(machine.memory.total), size::show(machine.memory.available));
        line("RAM", format!("{ram}, {free} to be had: {}", machine.memory.source));
        match &self.budget {
            Ok(budget) => {
                let context = arch.max_context.min(DEFAULT_CONTEXT);
                let said = budget.to_string();
                line("budget", format!("{}, for a context of {context}", said.trim_start_matches("memory: ")));
            }
            Err(why) => line("budget", why.clone()),
        }
        line("disk", self.disk.text());
        let (Ok(access) | Err(access)) = &self.disk.access;
        line("reads", access.clone());
        line(
            "io_uring",
            match &self.ring {
                Some(Ok(registered)) => format!("works; {} of buffers registered", size::show(*registered)),
                Some(Err(why)) => format!("not available: {why}"),
                None => "not tried".to_owned(),
            },
        );
        text
    }

    fn layers_text(&self) -> String {
        let arch = &self.checkpoint.arch;
        let (all, dense, moe) = (arch.layers.len(), self.dense_layers(), &arch.moe);
        let mut text = format!("{all}: ");
        if dense > 0 {
            let _ = write!(text, "{dense} dense, ");
        }
        let _ = write!(text, "{} of {} experts, {} a token", all - dense, moe.experts, moe.top_k);
        text += if moe.shared_width > 0 { " and the shared one" } else { "" };
        text + if arch.mtp.is_some() { "; and an MTP layer" } else { "" }
    }

    fn shapes_text(&self) -> String {
        let arch = &self.checkpoint.arch;
        let context = size::grouped(arch.max_context as u64);
        format!(
            "hidden {}, experts {} wide, vocabulary {}, up to {context} positions",
            arch.hidden, arch.moe.width, arch.vocab
        )
    }

    fn kernels_text(&self) -> String {
        let here: Vec<String> = Kernels::all_available().iter().map(|kernels| kernels.isa.to_string()).collect();
        let amx = Kernels::why_missing(Isa::Amx).map_or_else(String::new, |why| format!("; no amx: {why}"));
        format!("{} (this processor has {}{amx})", Kernels::best().isa, here.join(", "))
    }

    fn json(&self) -> Json {
        let (arch, census, machine) = (&self.checkpoint.arch, &self.census, self.machine);
        let (expert, token) = self.expert_bytes();
        let by_format = |format: Format| (format.to_string(), Json::from(census.format(format).bytes));
        json!({
            "schema_version": 1,
            "model": {
                "name": self.name,
                "vendor_name": self.vendor,
                "dir": self.checkpoint.dir.display().to_string(),
                "fingerprint": self.checkpoint.fingerprint_hex(),
                "parameters": census.used().weights,
                "parameters_per_token": census.weights_per_token,
                "layers": arch.layers.len(),
                "dense_layers": self.dense_layers(),
                "experts": arch.moe.experts,
                "top_k": arch.moe.top_k,
                "shared": arch.moe.shared_width > 0,
                "mtp": arch.mtp.is_some(),
                "hidden": arch.hidden,
                "expert_width": arch.moe.width,
                "vocabulary": arch.vocab,
                "max_context": arch.max_context,
                "attention": arch.attention.describe(),
                "formats": census.formats().into_iter().map(by_format).collect::<Map<_, _>>(),
                "expert_bytes": expert,
                "token_bytes": token,
                "shards": self.checkpoint.tensors.paths().len(),
                "tensors": self.checkpoint.tensors.len(),
                "bytes": census.bytes,
                "open_s": self.checkpoint.took().as_secs_f64(),
                "notes": self.checkpoint.notes(),
            },
            "machine": {
                "cpu": machine.cpu,
                "cores": machine.cores,
                "kernel": machine.kernel,
                "kernels": Kernels::best().isa.name(),
                "instruction_sets": Kernels::all_available().iter().map(|k| k.isa.name()).collect::<Vec<_>>(),
                "no_amx": Kernels::why_missing(Isa::Amx),
                "ram": machine.memory.total,
                "available": machine.memory.available,
                "available_source": machine.memory.source,
                "nodes": machine.nodes().into_iter().map(|node| {
                    json!({ "node": node.number, "cores": node.cores, "ram": node.total, "available": node.available, "usable": node.usable })
                }).collect::<Vec<_>>(),
            },
            "budget": self.budget.as_ref().map_or_else(
                |why| json!({ "error": why }),
                |budget| json!({ "context": arch.max_context.min(DEFAULT_CONTEXT), "total": budget.total, "resident": budget.resident, "saved_by_quantizing": budget.saved, "experts": budget.experts(), "slots": budget.slots() }),
            ),
            "disk": {
                "fs": self.disk.file_system,
                "device": self.disk.device.as_ref().map(|device| device.name.clone()),
                "node": self.disk.node(),
                "access": self.disk.access.as_ref().ok(),
                "error": self.disk.access.as_ref().err(),
                "free": self.disk.free_bytes,
            },
            "io_uring": {
                "available": self.ring.as_ref().map(Result::is_ok),
                "reason": self.ring.as_ref().and_then(|ring| ring.as_ref().err()),
            },
        })
    }
}

impl Disk {
    /// The node of memory that the drive is near to.
    fn node(&self) -> Option<usize> {
        self.device.as_ref()?.node
    }

    fn text(&self) -> String {
        let device = self.device.as_ref().map_or_else(
            || "no single block device".to_owned(),
            |device| {
                let under =
                    if device.under.is_empty() { String::new() } else { format!(" over {}", device.under.join(", ")) };
                format!("{}{under}", device.name)
            },
        );
        let free = self.free_bytes.map_or_else(|| "an unknown part".to_owned(), size::show);
        format!("{device}, {}, {free} free", self.file_system)
    }
}

/// Each node with what this process may use of it, and which of them the drive is near to.
pub fn nodes_text(nodes: &[Node], drive: Option<usize>) -> String {
    if nodes.is_empty() {
        return "this system tells of none".to_owned();
    }
    let one = |node: &Node| {
        let Node { number, cores, total, available, usable } = node;
        let memory = match usable {
            true => format!("{} of {} to be had", size::show(*available), size::show(*total)),
            false => format!("none of {}", size::show(*total)),
        };
        format!("{number} with {} cores, {memory}", cores.len())
    };
    let drive = match drive {
        Some(node) if nodes.len() > 1 => format!("; the drive is near {node}"),
        _ => String::new(),
    };
    nodes.iter().map(one).collect::<Vec<_>>().join("; ") + &drive
}

/// `744 billion`.
fn parameters(count: u64) -> String {
    match count {
        0..1_000_000 => size::grouped(count),
        1_000_000..1_000_000_000 => format!("{:.1} million", count as f64 / 1e6),
        _ => format!("{:.1} billion", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_shown_with_what_may_be_used_of_them() {
        let node = |number, cores: &[usize], usable| {
            let (total, available) = (256_000_000_000, 200_000_000_000);
            Node { number, cores: cores.to_vec(), total, available, usable }
        };
        let nodes = [node(0, &[0, 1, 2], true), node(1, &[], false)];
        let expected =
            "0 with 3 cores, 200 GB of 256 GB to be had; 1 with 0 cores, none of 256 GB; the drive is near 1";
        assert_eq!(nodes_text(&nodes, Some(1)), expected);
        assert_eq!(nodes_text(&nodes[..1], Some(0)), "0 with 3 cores, 200 GB of 256 GB to be had");
    }
}
