//! The sweep as a table, or one JSON object. Keys are stable; more may be added.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::measure::{Arm, Sample};
use super::{Knob, Report, range};
use crate::cli::size;
use crate::cli::size::short;

/// A table, what it is of, and from which value on more changes little.
pub fn text(report: &Report) -> String {
    let first = &report.measured.first;
    let mut text = format!(
        "{}: {}, {} layers of {} experts; {} tokens after {} of prompt, {}, an empty expert cache each time\n\n",
        first.model.dir,
        first.model.arch,
        first.model.layers,
        first.model.experts,
        first.tokens,
        first.prompt_tokens,
        size::counted(report.rounds as u64, "round")
    );
    let heading = [report.knob.name(), "tok/s [min..max]", "prompt tok/s", "in memory", "read", "GB/s", "waited", ""];
    let rows: Vec<[String; 8]> = std::iter::once(heading.map(str::to_owned))
        .chain(report.arms.iter().map(|arm| row(report.knob, arm)))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 7] = std::array::from_fn(width);
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:>width$}  ");
        }
        let _ = writeln!(text, "{}", format!("{line}{}", row[7]).trim_end());
    }
    for arm in &report.arms {
        if let Some(failure) = &arm.failed {
            let _ = write!(text, "\n{} {}: {}", report.knob.name(), report.knob.show(arm.value), failure.text());
        }
    }
    if let Some(said) = conclusion(report) {
        let _ = writeln!(text, "\n{said}");
    }
    text
}

fn row(knob: Knob, arm: &Arm) -> [String; 8] {
    let dash = || "-".to_owned();
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let rate = |[median, least, most]: [f64; 3]| format!("{median:.2} [{least:.2}..{most:.2}]");
    let note = match (&arm.failed, arm.samples.iter().any(|sample| sample.cached)) {
        (Some(_), _) => "failed",
        (None, true) => "memory served some reads",
        (None, false) => "",
    };
    [
        knob.show(arm.value),
        arm.spread(|sample| sample.decode_tok_s).map_or_else(dash, rate),
        arm.median(|sample| sample.prefill_tok_s).map_or_else(dash, |rate| format!("{rate:.2}")),
        arm.median(|sample| sample.hit_rate).map_or_else(dash, percent),
        arm.median(|sample| Some(sample.bytes as f64)).map_or_else(dash, |bytes| size::show(bytes as u64)),
        arm.median(|sample| sample.gb_s).map_or_else(dash, |gb_s| format!("{gb_s:.2}")),
        arm.median(|sample| Some(sample.waited)).map_or_else(dash, percent),
        note.to_owned(),
    ]
}

/// Median rates of the answer, by value.
pub fn rates(report: &Report) -> Vec<Option<f64>> {
    report.arms.iter().map(|arm| arm.median(|sample| sample.decode_tok_s)).collect()
}

/// Which value is enough, in words, or why that is not known; none where fewer than two can be compared.
pub fn conclusion(report: &Report) -> Option<String> {
    if report.measured.interrupted {
        let done: usize = report.arms.iter().map(|arm| arm.samples.len()).sum();
        let all = report.rounds * report.arms.len();
        return Some(format!("interrupted after {done} of {all} generations: nothing follows from these"));
    }
    let rates = rates(report);
    if rates.iter().flatten().count() < 2 {
        return None;
    }
    let (index, knob) = (range::enough(&rates)?, report.knob);
    let best = rates.iter().flatten().copied().fold(0.0, f64::max);
    let (value, rate) = (knob.show(report.arms[index].value), rates[index]?);
    let name = knob.name();
    let smaller = match index {
        0 => "it is the smallest value",
        _ => "no smaller value comes within 5 %",
    };
    let chance = match is_by_chance(report, index) {
        true => "; but ranges overlap, so that this may be chance: more rounds (-r) tell",
        false => "",
    };
    Some(format!("{name} {value} is enough: {rate:.2} tok/s of {best:.2} at best, and {smaller}{chance}"))
}

fn is_by_chance(report: &Report, index: usize) -> bool {
    let spreads: Vec<_> = report.arms.iter().map(|arm| arm.spread(|sample| sample.decode_tok_s)).collect();
    range::by_chance(&spreads, index)
}

/// The object, with a newline.
pub fn json(report: &Report) -> String {
    let first = &report.measured.first;
    let enough = if report.measured.interrupted { None } else { range::enough(&rates(report)) };
    // Of the first generation; the one that is varied stands with its values.
    let mut settings = first.settings.clone();
    settings.shift_remove(report.knob.name());
    let object = json!({
        "schema_version": 1,
        "sweep": report.knob.name(),
        "model": first.model,
        "machine": first.machine,
        "settings": settings,
        "repetitions": report.rounds,
        "interrupted": report.measured.interrupted,
        "prompt_tokens": first.prompt_tokens,
        "tokens": first.tokens,
        "ids": first.ids,
        "values": report.arms.iter().map(value).collect::<Vec<_>>(),
        "enough": enough.map(|index| report.arms[index].value),
        "ranges_overlap": enough.map(|index| is_by_chance(report, index)),
    });
    format!("{object:#}\n")
}

fn value(arm: &Arm) -> Value {
    let spread = |of: fn(&Sample) -> Option<f64>| {
        arm.spread(of)
            .map(|[median, least, most]| json!({ "median": short(median), "min": short(least), "max": short(most) }))
    };
    json!({
        "value": arm.value,
        "decode_tok_s": spread(|sample| sample.decode_tok_s),
        "prefill_tok_s": spread(|sample| sample.prefill_tok_s),
        "hit_rate": spread(|sample| sample.hit_rate),
        "bytes": spread(|sample| Some(sample.bytes as f64)),
        "gb_s": spread(|sample| sample.gb_s),
        "waited": spread(|sample| Some(sample.waited)),
        "cached": arm.samples.iter().any(|sample| sample.cached),
        "samples_tok_s": arm.samples.iter().map(|sample| sample.decode_tok_s.map(short)).collect::<Vec<_>>(),
        "error": arm.failed.as_ref().map(|failure| failure.error.clone()),
    })
}
