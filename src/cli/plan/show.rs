//! A plan as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use crate::cli::{render, size};
use crate::engine::StageGraph;
use crate::engine::budget::TooSmall;
use crate::engine::predict::{Bottleneck, Prediction};

use super::Plan;
use super::expected::{Expected, Facts, Outlook};

/// The plan for people.
pub fn text(plan: &Plan, graph: Option<&StageGraph>) -> String {
    let (facts, here) = (&plan.facts, &plan.here);
    let basis = match plan.selections {
        0 if plan.drawn => "for want of a history chosen as models with drawn weights choose".to_owned(),
        0 => "for want of a history chosen as the model that comes with the program chooses".to_owned(),
        count => format!("chosen by a history of {} selections", size::grouped(count)),
    };
    let mut text = format!("{}, for a context of {}\n", plan.budget, plan.context);
    let _ = writeln!(
        text,
        "experts: {} of {} used by a token, {basis}; {} slabs",
        size::grouped(facts.work.used()),
        size::grouped(facts.work.experts),
        size::grouped(here.slots),
    );
    text += &measured(facts);
    if let Some(busy) = &plan.busy {
        let _ = writeln!(text, "warning: {busy}");
    }
    let answer = &facts.answer;
    let _ = write!(text, "answer:  {} tokens after {} of a prompt: ", answer.tokens, answer.prompt);
    text += &predicted(facts, &here.answer);
    text += "long:    behind the first use of each expert: ";
    text += &predicted(facts, &here.long);
    if let Some(worst) = here.worst.filter(|_| here.answer.hit_rate < 1.0) {
        let _ = writeln!(text, "at worst {:.2} tokens a second, where none is found in memory", worst.tok_s());
    }
    text += if plan.asked { "\nwhat if:\n" } else { "\none more of each:\n" };
    for (change, expected) in &plan.what_if {
        let _ = writeln!(text, "  {:<28} {}", change.to_string(), outcome(&plan.here, expected.as_ref()));
    }
    if let Some(graph) = graph {
        text += &format!("\n{}", graph.text());
    }
    text
}

/// What was measured, and what was not.
fn measured(facts: &Facts) -> String {
    let mut text = String::new();
    match &facts.disk {
        Ok((gb_s, source, doubt)) => {
            let doubt = doubt.as_ref().map(|doubt| format!("; {doubt}")).unwrap_or_default();
            let _ = writeln!(text, "drive:   {gb_s:.2} GB/s ({source}){doubt}");
        }
        Err(why) => {
            let _ = writeln!(text, "drive:   not measured: {why}; --disk says what it reads");
        }
    }
    if facts.guessed > 0.0 {
        let _ = writeln!(
            text,
            "ahead:   {:.0} % of what is read is taken to be known a layer ahead",
            100.0 * facts.guessed
        );
    }
    match &facts.costs {
        Ok(costs) => {
            let [once, before, shared, expert] =
                [costs.once_s, costs.before_s, costs.shared_s, costs.expert_s].map(time);
            let quantized = match costs.quantize_s {
                0.0 => String::new(),
                each => format!(", and {} to quantize one that was read", time(each)),
            };
            let _ = writeln!(
                text,
                "compute: {:.1} GB/s on {} threads (measured): {once} of head and dense layers, and in a routed layer {before} \
                 before its experts, {shared} the shared one, {expert} each other{quantized}",
                facts.work.bytes() as f64 / costs.token_s(&facts.work) / 1e9,
                facts.cores,
            );
        }
        Err(why) => text += &format!("compute: not measured: {why}\n"),
    }
    text
}

/// The rest of a line: what tokens of some kind find, read and take.
fn predicted(facts: &Facts, outlook: &Outlook) -> String {
    let worst = facts.work.used() as f64 * facts.expert_bytes;
    let reads = format!(
        "{:.1} % found in memory, {} of {} read",
        100.0 * outlook.hit_rate,
        size::show(outlook.bytes_per_token as u64),
        size::show(worst as u64),
    );
    match &outlook.prediction {
        Some(p) => format!(
            "{:.2} tokens a second, {reads}; {} each, of which the drive reads {} and arithmetic takes {}; {}\n",
            p.tok_s(),
            time(p.token_s),
            time(p.disk_s),
            time(p.compute_s),
            binds(p.bottleneck),
        ),
        None => format!("{reads}; no speed, as not all was measured that it rests on\n"),
    }
}

fn binds(bottleneck: Bottleneck) -> &'static str {
    match bottleneck {
        Bottleneck::Disk => "the disk binds",
        Bottleneck::Arithmetic => "arithmetic binds",
        Bottleneck::Both => "disk and arithmetic bind alike",
    }
}

fn time(seconds: f64) -> String {
    render::micros(1e6 * seconds)
}

fn outcome(here: &Expected, expected: Result<&Expected, &TooSmall>) -> String {
    let expected = match expected {
        Ok(expected) => expected,
        Err(too_small) => return format!("it does not fit: the least is {}", too_small.typed()),
    };
    let found = format!("{:.1} % found in memory", 100.0 * expected.answer.hit_rate);
    let Some(p) = &expected.answer.prediction else {
        return format!("{found}, {} read", size::show(expected.answer.bytes_per_token as u64));
    };
    let rate = |outlook: &Outlook, here: &Outlook| match (&outlook.prediction, &here.prediction) {
        (Some(p), Some(before)) => {
            format!("{:.2} tok/s ({:+.0} %)", p.tok_s(), 100.0 * (before.token_s / p.token_s - 1.0))
        }
        (Some(p), None) => format!("{:.2} tok/s", p.tok_s()),
        (None, _) => "unknown".to_owned(),
    };
    let assumed = expected.assumed.map_or_else(String::new, |assumed| format!("; {assumed}"));
    let (answer, long) = (rate(&expected.answer, &here.answer), rate(&expected.long, &here.long));
    format!("{answer}, {found}, {}; long {long}{assumed}", binds(p.bottleneck))
}

/// The plan for programs.
pub fn json(plan: &Plan, graph: Option<&StageGraph>) -> Json {
    let (budget, facts, here) = (&plan.budget, &plan.facts, &plan.here);
    let used = facts.work.used();
    let (gb_s, source, doubt, error) = match &facts.disk {
        Ok((gb_s, source, doubt)) => (Some(size::short(*gb_s)), *source, doubt.clone(), None),
        Err(why) => (None, "unknown", None, Some(why.clone())),
    };
    let costs = facts.costs.as_ref();
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
        "prompt_tokens": facts.answer.prompt,
        "tokens": facts.answer.tokens,
        "experts": facts.work.experts,
        "experts_per_token": used,
        "selections": plan.selections,
        "drawn": plan.drawn,
        "uncached_bytes_per_token": (used as f64 * facts.expert_bytes).round(),
        "disk": { "gb_s": gb_s, "source": source, "doubt": doubt, "error": error },
        "guessed": facts.guessed,
        "compute": {
            "gb_s": costs.ok().map(|costs| size::short(facts.work.bytes() as f64 / costs.token_s(&facts.work) / 1e9)),
            "once_s": costs.ok().map(|costs| size::short(costs.once_s)),
            "before_s": costs.ok().map(|costs| size::short(costs.before_s)),
            "shared_s": costs.ok().map(|costs| size::short(costs.shared_s)),
            "expert_s": costs.ok().map(|costs| size::short(costs.expert_s)),
            "quantize_s": costs.ok().map(|costs| size::short(costs.quantize_s)),
            "doubt": plan.busy,
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

/// The keys of the answer, and those of long ones below `long`.
fn expectation(expected: &Expected) -> Json {
    let mut object = outlook(&expected.answer);
    object["slots"] = expected.slots.into();
    object["assumed"] = expected.assumed.into();
    object["long"] = outlook(&expected.long);
    object
}

fn outlook(outlook: &Outlook) -> Json {
    let p = outlook.prediction;
    json!({
        "expected_hit_rate": outlook.hit_rate,
        "bytes_per_token": outlook.bytes_per_token.round(),
        "predicted_tok_s": p.map(|p| size::short(p.tok_s())),
        "disk_s": p.map(|p| size::short(p.disk_s)),
        "compute_s": p.map(|p| size::short(p.compute_s)),
        "bottleneck": p.map(|p: Prediction| p.bottleneck.name()),
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
        "long": null,
        "error": too_small.to_string(),
        "needed": too_small.needed(),
    })
}
