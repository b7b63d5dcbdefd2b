//! A plan as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use crate::cli::{render, size};
use crate::engine::StageGraph;
use crate::engine::budget::TooSmall;
use crate::engine::predict::Prediction;

use super::{Expected, Plan};

/// The plan for people.
pub fn text(plan: &Plan, graph: Option<&StageGraph>) -> String {
    let (work, here) = (&plan.work, &plan.here);
    let used = work.used();
    let basis = match plan.history.iter().sum::<u64>() {
        0 => "for want of a history chosen as the model that comes with the program chooses".to_owned(),
        count => format!("by a history of {} selections", size::grouped(count)),
    };
    let mut text = format!("{}, for a context of {}\n", plan.budget, plan.context);
    let _ = writeln!(
        text,
        "experts: {used} of {} used by a token, {} slabs; {basis}, {:.1} % are found in memory and {} are read, of {} at worst",
        size::grouped(work.experts),
        size::grouped(here.slots),
        100.0 * here.hit_rate,
        size::show(here.bytes_per_token as u64),
        size::show((used as f64 * plan.expert_bytes) as u64),
    );
    match &plan.disk {
        Ok((gb_s, source, doubt)) => {
            let doubt = doubt.as_ref().map(|doubt| format!("; {doubt}")).unwrap_or_default();
            let _ = writeln!(text, "drive:   {gb_s:.2} GB/s ({source}){doubt}");
        }
        Err(why) => {
            let _ = writeln!(text, "drive:   not measured: {why}; --disk says what it reads");
        }
    }
    if plan.guessed > 0.0 {
        let _ =
            writeln!(text, "ahead:   {:.0} % of what is read is taken to be known a layer ahead", 100.0 * plan.guessed);
    }
    match &plan.costs {
        Ok(costs) => {
            let [once, before, shared, expert] =
                [costs.once_s, costs.before_s, costs.shared_s, costs.expert_s].map(time);
            let _ = writeln!(
                text,
                "compute: {:.1} GB/s on {} threads (measured): {once} of head and dense layers, and in a routed layer {before} \
                 before its experts, {shared} the shared one, {expert} each other",
                work.bytes() as f64 / costs.token_s(work) / 1e9,
                plan.cores,
            );
        }
        Err(why) => text += &format!("compute: not measured: {why}\n"),
    }
    match &here.prediction {
        Some(p) => {
            let _ = writeln!(
                text,
                "token:   {:.2} tokens a second: {} each, of which the drive reads {} and arithmetic takes {}; {} binds",
                p.tok_s(),
                time(p.token_s),
                time(p.disk_s),
                time(p.compute_s),
                p.bottleneck.name(),
            );
        }
        None => text += "token:   unknown, as what it takes is\n",
    }
    if let Some(worst) = here.worst.filter(|_| here.hit_rate < 1.0) {
        let _ = writeln!(text, "at worst {:.2} tokens a second, where none is found in memory", worst.tok_s());
    }
    text += if plan.asked { "\nwhat if:\n" } else { "\none more of each:\n" };
    for (change, expected) in &plan.what_if {
        let _ = writeln!(text, "  {:<44} {}", change.to_string(), outcome(&plan.here, expected.as_ref()));
    }
    if let Some(graph) = graph {
        text += &format!("\n{}", graph.text());
    }
    text
}

fn time(seconds: f64) -> String {
    render::micros(1e6 * seconds)
}

fn outcome(here: &Expected, expected: Result<&Expected, &TooSmall>) -> String {
    let expected = match expected {
        Ok(expected) => expected,
        Err(too_small) => return format!("it does not fit: the least is {}", too_small.typed()),
    };
    let found = format!("{:.1} % found in memory", 100.0 * expected.hit_rate);
    let Some(p) = &expected.prediction else {
        return format!("{found}, {} read", size::show(expected.bytes_per_token as u64));
    };
    let gain = match &here.prediction {
        Some(before) => format!(" ({:+.0} %)", 100.0 * (before.token_s / p.token_s - 1.0)),
        None => String::new(),
    };
    let assumed = expected.assumed.map_or_else(String::new, |assumed| format!("; {assumed}"));
    format!("{:.2} tok/s{gain}, {found}, {} binds{assumed}", p.tok_s(), p.bottleneck.name())
}

/// The plan for programs.
pub fn json(plan: &Plan, graph: Option<&StageGraph>) -> Json {
    let (budget, here) = (&plan.budget, &plan.here);
    let used = plan.work.used();
    let (gb_s, source, doubt, error) = match &plan.disk {
        Ok((gb_s, source, doubt)) => (Some(size::short(*gb_s)), *source, doubt.clone(), None),
        Err(why) => (None, "unknown", None, Some(why.clone())),
    };
    let costs = plan.costs.as_ref();
    let what_if = plan.what_if.iter().map(|(change, expected)| {
        let mut object = match expected {
            Ok(expected) => expectation(expected),
            Err(too_small) => refusal(too_small),
        };
        object["change"] = change.to_string().into();
        object["ram"] = change.ram.into();
        object["disk_gb_s"] = change.disk.into();
        object["drives"] = change.drives.into();
        object["cores"] = change.cores.into();
        object
    });
    let mut object = json!({
        "schema_version": 1,
        "context": plan.context,
        "budget": {
            "total": budget.total,
            "source": plan.source,
            "program": budget.program,
            "resident": budget.resident,
            "saved_by_quantizing": budget.saved,
            "kv": budget.kv,
            "working": budget.working,
            "reconstruction": budget.reconstruction,
            "activations": budget.activations,
            "staging": budget.staging,
            "page_cache_reserve": budget.page_cache,
            "experts": budget.experts(),
        },
        "experts": plan.work.experts,
        "experts_per_token": used,
        "selections": plan.history.iter().sum::<u64>(),
        "uncached_bytes_per_token": (used as f64 * plan.expert_bytes).round(),
        "disk": { "gb_s": gb_s, "source": source, "doubt": doubt, "error": error },
        "guessed": plan.guessed,
        "compute": {
            "gb_s": costs.ok().map(|costs| size::short(plan.work.bytes() as f64 / costs.token_s(&plan.work) / 1e9)),
            "once_s": costs.ok().map(|costs| size::short(costs.once_s)),
            "before_s": costs.ok().map(|costs| size::short(costs.before_s)),
            "shared_s": costs.ok().map(|costs| size::short(costs.shared_s)),
            "expert_s": costs.ok().map(|costs| size::short(costs.expert_s)),
            "error": costs.err(),
        },
        "worst_tok_s": here.worst.map(|p| size::short(p.tok_s())),
        "what_if": what_if.collect::<Vec<_>>(),
    });
    let expected = expectation(here);
    for (name, value) in expected.as_object().into_iter().flatten() {
        object[name.as_str()] = value.clone();
    }
    if let Some(graph) = graph {
        let nodes = graph
            .nodes
            .iter()
            .map(|node| json!({ "stage": node.stage.name(), "layer": node.layer, "needs": node.needs }));
        object["graph"] = nodes.collect();
    }
    object
}

fn expectation(expected: &Expected) -> Json {
    let p = expected.prediction;
    json!({
        "slots": expected.slots,
        "expected_hit_rate": expected.hit_rate,
        "bytes_per_token": expected.bytes_per_token.round(),
        "predicted_tok_s": p.map(|p| size::short(p.tok_s())),
        "disk_s": p.map(|p| size::short(p.disk_s)),
        "compute_s": p.map(|p| size::short(p.compute_s)),
        "bottleneck": p.map(|p: Prediction| p.bottleneck.name()),
        "assumed": expected.assumed,
    })
}

/// The keys of an [`expectation`] of a machine that is too small.
fn refusal(too_small: &TooSmall) -> Json {
    json!({
        "slots": null,
        "expected_hit_rate": null,
        "bytes_per_token": null,
        "predicted_tok_s": null,
        "disk_s": null,
        "compute_s": null,
        "bottleneck": null,
        "error": too_small.to_string(),
        "needed": too_small.needed(),
    })
}
