//! The report: a table, or one JSON object. Keys are stable; more may be added.

use std::fmt::Write as _;

use millstream_io::measure::median;
use serde_json::{Map, Value, json};

use super::Report;
use super::arms::{Arm, Lead};
use super::choose::{self, Rerun};
use crate::cli::reading::Reading;
use crate::cli::size;
use crate::cli::size::short;

/// What became of an arm, by a stable word and for people.
fn outcome(report: &Report, index: usize) -> (&'static str, String) {
    let arm = &report.arms[index];
    let memory = || ("cached", "memory served some of it".to_owned());
    if report.kept == index {
        return ("kept", if index == 0 { "kept: the defaults" } else { "kept" }.to_owned());
    }
    if let Some(why) = &arm.unavailable {
        return ("unavailable", why.clone());
    }
    if index == 0 {
        return ("default", "the defaults".to_owned());
    }
    match (&arm.summary, arm.tried) {
        (_, true) if arm.samples.iter().any(|sample| sample.cached) => memory(),
        (_, true) => match (choose::rate(&arm.samples), choose::rate(&report.arms[0].samples)) {
            (Some(rate), Some(default)) => {
                let percent = 100.0 * (rate / default - 1.0);
                match &report.lead {
                    Some(lead) if lead.arm == index => ("not_held", "led, did not hold up in the rerun".to_owned()),
                    _ => ("not_faster", not_kept(percent)),
                }
            }
            _ => memory(),
        },
        (Some(summary), false) if summary.cached => memory(),
        (Some(summary), false) if !summary.candidate.is_offered() => ("comparison", "for comparison only".to_owned()),
        _ => ("not_tried", "not tried: others read faster or take less CPU".to_owned()),
    }
}

/// Why an arm that differs by so many percent from the defaults was no leader.
fn not_kept(percent: f64) -> String {
    let enough = 100.0 * (choose::GAIN_MIN - 1.0);
    match percent {
        _ if percent < 0.0 => format!("{:.1} % slower", -percent),
        _ if percent < enough => format!("{percent:.1} % faster, which is less than {enough:.0} %"),
        _ => format!("{percent:.1} % faster, and another was faster still"),
    }
}

fn name(arm: &Arm) -> String {
    match arm.reading == Reading::DEFAULT {
        true => format!("defaults ({})", arm.candidate),
        false => arm.candidate.to_string(),
    }
}

/// Median, least and most of the arm's rates.
fn rates(arm: &Arm) -> Option<[f64; 3]> {
    let rates: Vec<f64> = arm.samples.iter().map(|sample| sample.tok_s).collect();
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    Some([median(&rates)?, least, rates.iter().copied().fold(0.0, f64::max)])
}

/// A table with the choice and its reason.
pub fn text(report: &Report) -> String {
    let heading = ["candidate", "GB/s", "CPU s/GB", "tok/s [min..max]", "verdict"].map(str::to_owned);
    let rows = report.arms.iter().enumerate().map(|(index, arm)| {
        let dash = || "-".to_owned();
        [
            name(arm),
            arm.summary.as_ref().map_or_else(dash, |summary| format!("{:.2}", summary.gb_s)),
            arm.summary.as_ref().map_or_else(dash, |summary| format!("{:.4}", summary.cpu_s_per_gb)),
            rates(arm).map_or_else(dash, |[rate, least, most]| format!("{rate:.2} [{least:.2}..{most:.2}]")),
            outcome(report, index).1,
        ]
    });
    let rows: Vec<[String; 5]> = std::iter::once(heading).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let [name, gb_s, cpu, rate] = [0, 1, 2, 3].map(width);
    let mut text = String::new();
    for row in &rows {
        let [a, b, c, d, verdict] = row;
        let _ = writeln!(text, "{a:name$}  {b:>gb_s$}  {c:>cpu$}  {d:>rate$}  {verdict}");
    }
    let _ = writeln!(text, "\nconditions: {}", conditions(report));
    let _ = writeln!(text, "chosen: {}\n  reason: {}", report.arms[report.kept].reading, report.reason);
    let _ = writeln!(text, "saved: {}", report.profile.display());
    text
}

/// What was cold and what was not.
fn conditions(report: &Report) -> String {
    let all = &report.conditions;
    let reads = match (report.arms[0].tried, all.cold, all.direct) {
        (false, ..) => "no generation was needed".to_owned(),
        (true, false, _) => "memory served some reads of experts with the defaults".to_owned(),
        (true, true, direct) => format!(
            "expert reads were cold ({}), {} a generation",
            if direct { "around the page cache" } else { "files dropped from the page cache before" },
            size::show(all.bytes)
        ),
    };
    format!(
        "{} tokens after {} of prompt, room for {} of {} experts; {reads}; weights that stay in memory were loaded before",
        all.tokens, all.prompt_tokens, all.slabs, all.experts
    )
}

/// The object, with a newline.
pub fn json(report: &Report) -> String {
    let (facts, key, all) = (&report.facts, &report.key, &report.conditions);
    let candidates = report.arms.iter().enumerate().map(|(index, arm)| candidate(report, index, arm));
    let rerun = report.lead.as_ref().map(|Lead { arm, pairs }| {
        let found = Rerun::of(pairs);
        json!({
            "candidate": report.arms[*arm].candidate.to_string(),
            "pairs_tok_s": pairs.iter().map(|pair| [short(pair.challenger), short(pair.default)]).collect::<Vec<_>>(),
            "gain": found.map(|found| short(found.gain)),
            "faster": found.map(|found| found.faster),
            "holds": found.is_some_and(|found| found.holds()),
        })
    });
    let object = json!({
        "schema_version": 1,
        "machine": { "cpu": key.cpu, "cores": key.cores, "kernel": key.kernel, "ram": facts.memory_bytes },
        "model": { "dir": facts.name, "fingerprint": key.model },
        "file": {
            "fs": key.fs, "device": key.device, "bytes": facts.bytes, "slab_bytes": facts.slab_bytes,
            "access": facts.access.to_string(),
        },
        "conditions": {
            "prompt_tokens": all.prompt_tokens, "tokens": all.tokens, "slabs": all.slabs, "experts": all.experts,
            "bytes": all.bytes, "direct": all.direct, "cold": all.cold,
        },
        "warnings": facts.warnings(),
        "candidates": candidates.collect::<Vec<_>>(),
        "rerun": rerun,
        "chosen": settings(&report.arms[report.kept].reading),
        "defaults_are_best": report.kept == 0,
        "reason": report.reason,
        "profile": report.profile.display().to_string(),
    });
    serde_json::to_string_pretty(&object).unwrap_or_default() + "\n"
}

fn candidate(report: &Report, index: usize, arm: &Arm) -> Value {
    let (verdict, detail) = outcome(report, index);
    let rates = rates(arm);
    let rate = |index: usize| rates.map(|rates| short(rates[index]));
    json!({
        "candidate": arm.candidate.to_string(),
        "default": index == 0,
        "settings": settings(&arm.reading),
        "gb_s": arm.summary.as_ref().map(|summary| short(summary.gb_s)),
        "cpu_s_per_gb": arm.summary.as_ref().map(|summary| short(summary.cpu_s_per_gb)),
        "cached": arm.summary.as_ref().is_some_and(|summary| summary.cached)
            || arm.samples.iter().any(|sample| sample.cached),
        "tok_s": rate(0),
        "tok_s_min": rate(1),
        "tok_s_max": rate(2),
        "samples_tok_s": arm.samples.iter().map(|sample| short(sample.tok_s)).collect::<Vec<_>>(),
        "verdict": verdict,
        "detail": detail,
    })
}

fn settings(reading: &Reading) -> Value {
    let mut settings: Map<String, Value> =
        reading.texts().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    settings.insert("flags".to_owned(), reading.to_string().into());
    Value::Object(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arm_that_is_not_kept_was_slower_or_gained_too_little_or_was_not_the_fastest() {
        assert_eq!(not_kept(-2.04), "2.0 % slower");
        assert_eq!(not_kept(2.9), "2.9 % faster, which is less than 3 %");
        assert_eq!(not_kept(13.2), "13.2 % faster, and another was faster still");
    }
}
