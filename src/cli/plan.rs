//! The `plan` command: where everything would live, what a token would read, and the stages it would go through.

use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::checkpoint::Checkpoint;
use crate::engine::budget::Budget;
use crate::engine::config::DEFAULT_CONTEXT;
use crate::engine::{Engine, StageGraph, Switch};

use super::args::{self, Ram, RunArgs};
use super::config;
use super::machine::Machine;
use super::{Done, Failure, job, output, size};

/// Flags of `plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream plan -m /models/glm-5.2-int4 --ram 16G --disk 2.5
  millstream plan -m /models/glm-5.2-int4 --graph --dot | dot -Tsvg > step.svg

Nothing is loaded. What is expected of the cache is what any cache does when every expert is chosen as often as every \
other; real models choose some far more often, so they do better.
Exit codes: 0 done, 1 the work failed, 2 usage.")]
pub struct PlanArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Memory for weights, context and cached experts, as a size or auto [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = args::parse_ram)]
    ram: Option<Ram>,
    /// Tokens of context [default: 4096, or what the model has]
    #[arg(short, long, visible_alias = "context", value_name = "N", value_parser = args::parse_context)]
    ctx_size: Option<usize>,
    /// What the drive reads, in GB/s, as bench-io measures it: adds what that allows
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true, value_parser = args::parse_rate)]
    disk: Option<f64>,
    /// Read ahead what the next layer's router will probably choose: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| args::SWITCH.parse(text))]
    prefetch: Option<Switch>,
    /// Print the stages of a step and what each needs
    #[arg(long)]
    graph: bool,
    /// Print them for Graphviz
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the plan.
pub fn plan(args: &PlanArgs, machine: &Machine) -> Result<Done, Failure> {
    let run = RunArgs { model: args.model.clone(), ram: args.ram, prefetch: args.prefetch, ..args::plain_run() };
    let mut config = config::decide(&run, machine)?;
    config.check_memory(machine)?;
    let Some(checkpoint) = job::open_checkpoint(&run, &mut config, machine)? else { return Ok(Done::Interrupted) };
    let context = args.ctx_size.unwrap_or(checkpoint.arch.max_context.min(DEFAULT_CONTEXT));
    let graph = StageGraph::new(&checkpoint.arch, config.engine(context).guesses());
    let text = if args.dot {
        graph.dot()
    } else {
        let engine = config.engine(context);
        let budget = Engine::plan(&checkpoint, &engine).map_err(job::engine_failure)?;
        let source = if config.ram.is_some() { "asked for" } else { machine.memory.source.as_str() };
        let reads = Reading::expected(&checkpoint, &budget, args.disk);
        match args.json {
            true => as_json(&budget, source, &reads, args.graph.then_some(&graph)).to_string() + "\n",
            false => as_text(&budget, &reads, args.graph.then_some(&graph)),
        }
    };
    Ok(output::print(&text)?.unwrap_or(Done::Whole))
}

/// What a token is expected to read.
struct Reading {
    /// Experts that one token uses, and all there are.
    used: u64,
    experts: u64,
    hit_rate: f64,
    bytes_per_token: f64,
    /// What the drive allows, where its speed is known.
    tokens_per_s: Option<f64>,
}

impl Reading {
    fn expected(checkpoint: &Checkpoint, budget: &Budget, disk: Option<f64>) -> Reading {
        let layers = &checkpoint.experts.layers[..checkpoint.arch.layers.len()];
        let (mut used, mut experts, mut bytes) = (0, 0, 0.0);
        for layer in layers.iter().flatten() {
            let all: u64 = layer.iter().map(|expert| expert.bytes()).sum();
            used += checkpoint.arch.moe.top_k as u64;
            experts += layer.len() as u64;
            bytes += all as f64 / layer.len() as f64 * checkpoint.arch.moe.top_k as f64;
        }
        let hit_rate = (budget.slabs as f64 / experts as f64).min(1.0);
        let bytes_per_token = bytes * (1.0 - hit_rate);
        let tokens_per_s = disk.filter(|_| bytes_per_token > 0.0).map(|gb_s| gb_s * 1e9 / bytes_per_token);
        Reading { used, experts, hit_rate, bytes_per_token, tokens_per_s }
    }

    /// What limits a token: that the drive does shows once its speed is known; arithmetic is not measured here.
    fn bottleneck(&self) -> &'static str {
        if self.bytes_per_token == 0.0 { "arithmetic" } else { "disk" }
    }
}

fn as_text(budget: &Budget, reads: &Reading, graph: Option<&StageGraph>) -> String {
    let Reading { used, experts, hit_rate, bytes_per_token, tokens_per_s } = reads;
    let mut text = format!("{budget}\n");
    text += &format!(
        "experts: {used} of {} used by a token, {} slabs; chosen evenly, {:.1} % are found in memory and {} are read\n",
        size::grouped(*experts),
        size::grouped(budget.slabs),
        100.0 * hit_rate,
        size::show(*bytes_per_token as u64),
    );
    if let Some(rate) = tokens_per_s {
        text += &format!("the drive allows {rate:.2} tokens a second\n");
    }
    if *bytes_per_token == 0.0 {
        text += "everything is in memory after a while: arithmetic alone will bind\n";
    }
    if let Some(graph) = graph {
        text += &format!("\n{}", graph.text());
    }
    text
}

fn as_json(budget: &Budget, source: &str, reads: &Reading, graph: Option<&StageGraph>) -> Json {
    let mut object = json!({
        "schema_version": 1,
        "budget": {
            "total": budget.total,
            "source": source,
            "resident": budget.resident,
            "kv": budget.kv,
            "reconstruction": budget.reconstruction,
            "activations": budget.activations,
            "experts": budget.experts(),
        },
        "slots": budget.slabs,
        "experts": reads.experts,
        "experts_per_token": reads.used,
        "expected_hit_rate": reads.hit_rate,
        "bytes_per_token": reads.bytes_per_token.round(),
        "predicted_tok_s": reads.tokens_per_s,
        "bottleneck": reads.bottleneck(),
    });
    if let Some(graph) = graph {
        let nodes = graph
            .nodes
            .iter()
            .map(|node| json!({ "stage": node.stage.name(), "layer": node.layer, "needs": node.needs }));
        object["graph"] = nodes.collect();
    }
    object
}
