//! The precisions as a table, or one JSON object. Keys are stable; more may be added.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::arms::{Arm, WITHIN, is_best_of_its_size, smallest_within};
use super::{Report, args, size};
use crate::engine::quality::{Estimate, Quality};

const HEADING: [&str; 12] = [
    "experts",
    "dense",
    "io",
    "group",
    "weights",
    "an expert",
    "resident",
    "agreement",
    "perplexity",
    "of unquantized",
    "divergence",
    "p99",
];

/// A table, what it is of, and what follows.
pub fn text(report: &Report) -> String {
    let Report { base, arms, .. } = report;
    let mut text = format!(
        "{}: {}, {} windows of {} tokens of {}, {} activations\n",
        report.dir.display(),
        base.formats.join(" and "),
        report.windows,
        report.window,
        report.text.display(),
        args::ACTIVATIONS.name(report.activations),
    );
    text += "divergence: mean over all positions of the sum of p ln(p/q), in nats, p with the weights as they are\n\n";
    let rows: Vec<[String; 12]> = [HEADING.map(str::to_owned), base_row(report)]
        .into_iter()
        .chain(arms.iter().map(|arm| row(arm, report)))
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 12] = std::array::from_fn(width);
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:>width$}  ");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    for (arm, failure) in arms.iter().filter_map(|arm| Some((arm, arm.failed.as_ref()?))) {
        let _ = write!(text, "\n{}: {}", arm.precision, failure.text());
    }
    text.push('\n');
    if !report.interrupted {
        text += "* no smaller container diverges as little\n";
    }
    if let Some(said) = conclusion(report) {
        let _ = writeln!(text, "{said}");
    }
    text
}

fn base_row(report: &Report) -> [String; 12] {
    let base = &report.base;
    let dash = || "-".to_owned();
    let perplexity = base.perplexity.map_or_else(dash, |perplexity| format!("{perplexity:.3}"));
    let as_it_is = "as it is".to_owned();
    let resident = size::show(base.resident_bytes);
    let (bytes, expert) = (size::show(base.bytes), size::show(base.expert_bytes));
    let mut row: [String; 12] = std::array::from_fn(|_| dash());
    (row[0], row[4], row[5], row[6], row[8]) = (as_it_is, bytes, expert, resident, perplexity);
    row
}

fn row(arm: &Arm, report: &Report) -> [String; 12] {
    let p = arm.precision;
    let mut row: [String; 12] = std::array::from_fn(|_| "-".to_owned());
    (row[0], row[1], row[2]) = (p.experts.to_string(), p.dense.to_string(), p.io_bits.to_string());
    row[3] = p.group.map_or("row".to_owned(), |group| group.to_string());
    let Some(q) = &arm.quality else { return row };
    let percent = |e: Estimate| {
        let error = e.error.map_or_else(String::new, |error| format!(" ± {:.2}", 100.0 * q.ratio() * error));
        format!("{:+.2}{error} %", 100.0 * (q.ratio() - 1.0))
    };
    let nats = |e: Estimate| {
        let error = e.error.map_or_else(String::new, |error| format!(" ± {error:.5}"));
        format!("{:.5}{error}{}", e.mean, if best(arm, report) == Some(true) { " *" } else { "  " })
    };
    (row[4], row[5], row[6]) = (size::show(arm.bytes), size::show(arm.expert_bytes), size::show(arm.resident_bytes));
    (row[7], row[8]) = (format!("{:.2} %", 100.0 * q.agreement), format!("{:.3}", q.perplexity));
    (row[9], row[10], row[11]) = (percent(q.loss), nats(q.divergence), format!("{:.4}", q.divergence_p99));
    row
}

/// Whether no smaller container diverges as little; not known where some were not measured.
fn best(arm: &Arm, report: &Report) -> Option<bool> {
    (!report.interrupted).then(|| is_best_of_its_size(arm, &report.arms))
}

/// Which precision is enough, in words, or why that is not known.
pub fn conclusion(report: &Report) -> Option<String> {
    if report.interrupted {
        let (measured, all) = (report.measured(), report.arms.len());
        return Some(format!(
            "interrupted: {measured} of {all} precisions were measured, and nothing follows from these"
        ));
    }
    let arm = smallest_within(&report.arms)?;
    let ratio = arm.quality.as_ref()?.ratio();
    Some(format!(
        "the smallest container within {:.0} % of the perplexity is {} of convert {}: {:+.2} %",
        100.0 * WITHIN,
        size::show(arm.bytes),
        arm.precision.flags(),
        100.0 * (ratio - 1.0),
    ))
}

/// The object, with a newline.
pub fn json(report: &Report) -> String {
    let base = &report.base;
    let enough = if report.interrupted { None } else { smallest_within(&report.arms) };
    let object = json!({
        "schema_version": 1,
        "sweep": "bits",
        "model": report.dir.display().to_string(),
        "text": report.text.display().to_string(),
        "windows": report.windows,
        "window_tokens": report.window,
        "activations": args::ACTIVATIONS.name(report.activations),
        "interrupted": report.interrupted,
        "unquantized": {
            "formats": base.formats,
            "bytes": base.bytes,
            "expert_bytes": base.expert_bytes,
            "resident_bytes": base.resident_bytes,
            "perplexity": base.perplexity,
        },
        "values": report.arms.iter().map(|arm| value(arm, report)).collect::<Vec<_>>(),
        "within": WITHIN,
        "smallest_within": enough.map(|arm| arm.precision.flags()),
    });
    format!("{object:#}\n")
}

fn value(arm: &Arm, report: &Report) -> Value {
    let p = arm.precision;
    let of = |get: fn(&Quality) -> f64| arm.quality.as_ref().map(get);
    let error = |get: fn(&Quality) -> Estimate| arm.quality.as_ref().and_then(|quality| get(quality).error);
    json!({
        "experts": p.experts.to_string(),
        "dense": p.dense.to_string(),
        "io_bits": p.io_bits.to_string(),
        "group": p.group,
        "bytes": arm.bytes,
        "file_bytes": arm.file_bytes,
        "expert_bytes": arm.expert_bytes,
        "resident_bytes": arm.resident_bytes,
        "positions": arm.quality.as_ref().map(|quality| quality.positions),
        "tokens": arm.quality.as_ref().map(|quality| quality.tokens),
        "agreement": of(|q| q.agreement),
        "perplexity": of(|q| q.perplexity),
        "loss_nats": of(|q| q.loss.mean),
        "loss_error": error(|q| q.loss),
        "divergence_nats": of(|q| q.divergence.mean),
        "divergence_error": error(|q| q.divergence),
        "divergence_p99": of(|q| q.divergence_p99),
        "divergence_largest": of(|q| q.divergence_largest),
        "best_of_its_size": best(arm, report),
        "error": arm.failed.as_ref().map(|failure| failure.error.clone()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::sweep::bits::{Base, arms};
    use crate::engine::Activations;
    use crate::engine::quality::Window;

    #[test]
    fn a_sweep_that_was_stopped_shows_what_was_measured_and_concludes_nothing() {
        let mut window = Window::default();
        window.add(&[1.0, 2.0], &[1.0, 2.0], Some(1)).unwrap();
        let mut arms: Vec<Arm> = arms::precisions(&[], &[], &[], &[]).into_iter().map(Arm::new).collect();
        arms[0].quality = Quality::of(&[window]);
        let (dir, text_path, base) = ("model".into(), "text".into(), Base::default());
        let activations = Activations::F32;
        let mut report =
            Report { dir, text: text_path, windows: 1, window: 2, activations, base, arms, interrupted: false };
        assert!(text(&report).contains("the smallest container") && text(&report).contains(" *"));
        report.interrupted = true;
        let text = text(&report);
        assert!(!text.contains("the smallest container") && !text.contains('*'), "{text}");
        assert!(text.contains("100.00 %") && text.contains("1 of 23 precisions were measured"), "{text}");
        let json: Value = serde_json::from_str(&json(&report)).unwrap();
        let (first, nothing) = (&json["values"][0], Value::Null);
        assert_eq!((&json["smallest_within"], &first["best_of_its_size"]), (&nothing, &nothing));
        assert_eq!((first["agreement"].as_f64(), &json["interrupted"]), (Some(1.0), &true.into()));
    }
}
