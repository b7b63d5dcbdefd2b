//! Results as a Markdown table like llama-bench's, comma-separated values, or JSON.

use std::fmt::Write as _;

use millstream_io::measure::median;
use serde_json::{Value, json};

use super::measure::{Taken, Went};
use super::work::{Part, Rate};
use super::{Model, Report};
use crate::cli::args::Choices;
use crate::cli::size::{self, short};
use crate::engine::stats::Stats;

/// What is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// A Markdown table.
    #[default]
    Md,
    /// Comma-separated values, with a heading.
    Csv,
    /// One JSON object.
    Json,
    /// One JSON object a rate and line.
    Jsonl,
    /// Statements that make a table and fill it.
    Sql,
}

/// `-o`.
pub const OUTPUT: Choices<Output> = Choices(&[
    ("md", Output::Md),
    ("csv", Output::Csv),
    ("json", Output::Json),
    ("jsonl", Output::Jsonl),
    ("sql", Output::Sql),
]);

/// The report.
pub fn text(report: &Report, output: Output) -> String {
    match output {
        Output::Md => markdown(report),
        Output::Csv => csv(report),
        Output::Sql => sql(report),
        Output::Json => format!("{:#}\n", object(report)),
        Output::Jsonl => rates(report).map(|(taken, rate)| format!("{}\n", test(report, taken, &rate))).collect(),
    }
}

fn rates<'a>(report: &'a Report) -> impl Iterator<Item = (&'a Taken, Rate)> {
    report.taken.iter().flat_map(|taken| taken.test.rates().into_iter().map(move |rate| (taken, rate)))
}

/// Mean and standard deviation of a sample, as llama-bench has them; no deviation of one.
fn spread(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let square = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (mean, if values.len() > 1 { (square / (count - 1.0)).sqrt() } else { 0.0 })
}

fn markdown(report: &Report) -> String {
    let mut text = String::from(
        "| model | size | params | backend | threads | test | t/s | in memory | read a token |\n|---|---:|---:|---|---:|---:|---:|---:|---:|\n",
    );
    let Model { bytes, parameters, .. } = report.model;
    let gib = bytes as f64 / f64::from(1u32 << 30);
    let parameters = self::parameters(parameters);
    for (taken, rate) in rates(report) {
        let (mean, sd) = spread(&taken.rates(&rate));
        let hits = hit_rate(taken, &rate).map_or("-".to_owned(), |rate| format!("{:.1} %", 100.0 * rate));
        let read = size::show(bytes_per_token(taken, &rate) as u64);
        let (model, backend, name) = (name(report), backend(taken), rate.named(" @ "));
        let threads = report.config.threads;
        let _ = writeln!(
            text,
            "| {model} | {gib:.2} GiB | {parameters} | {backend} | {threads} | {name} | {mean:.2} ± {sd:.2} | {hits} | {read} |"
        );
    }
    let _ = writeln!(text, "\n{}", conditions(report));
    text
}

/// What a reader has to know of the figures, in a line.
fn conditions(report: &Report) -> String {
    let how = report.how;
    let state = match (how.cold, how.warmup) {
        (true, _) => "cold: no expert in memory at the start of each",
        (false, true) => "warm: each done once before",
        (false, false) => "warm from the second time on",
    };
    let mut line = format!(
        "millstream {}, {} times each, {state}; tokens: {}",
        env!("CARGO_PKG_VERSION"),
        how.repetitions,
        report.tokens.source
    );
    if report.taken.iter().flat_map(|taken| &taken.samples).any(|sample| sample.cached) {
        line += "; the page cache served some reads, so that rates are not the drive's";
    }
    if matches!(report.went, Went::Interrupted) {
        line += "; interrupted: the last have fewer samples, or none";
    }
    line
}

/// Columns of a flat table: name and type, as SQL has them.
const COLUMNS: [(&str, &str); 14] = [
    ("model", "TEXT"),
    ("size_bytes", "INTEGER"),
    ("parameters", "INTEGER"),
    ("backend", "TEXT"),
    ("threads", "INTEGER"),
    ("test", "TEXT"),
    ("tokens", "INTEGER"),
    ("depth", "INTEGER"),
    ("cold", "INTEGER"),
    ("tok_s_mean", "REAL"),
    ("tok_s_sd", "REAL"),
    ("tok_s_median", "REAL"),
    ("hit_rate", "REAL"),
    ("bytes_per_token", "REAL"),
];

/// A row a rate; null is what was not measured.
fn flat<'a>(report: &'a Report) -> impl Iterator<Item = [Value; COLUMNS.len()]> + 'a {
    rates(report).map(|(taken, rate)| {
        let samples = taken.rates(&rate);
        let (mean, sd) = spread(&samples);
        [
            json!(name(report)),
            json!(report.model.bytes),
            json!(report.model.parameters),
            json!(backend(taken)),
            json!(report.config.threads),
            json!(rate.name),
            json!(rate.tokens),
            json!(rate.depth),
            json!(report.how.cold),
            json!(short(mean)),
            json!(short(sd)),
            json!(short(median(&samples).unwrap_or(mean))),
            json!(hit_rate(taken, &rate).map(short)),
            json!(bytes_per_token(taken, &rate).round()),
        ]
    })
}

fn csv(report: &Report) -> String {
    let mut text = COLUMNS.map(|(name, _)| name).join(",") + "\n";
    for row in flat(report) {
        text += &(row.map(|value| csv_field(&value)).join(",") + "\n");
    }
    text
}

/// As RFC 4180 has it: text in quotes, a quote in it doubled.
fn csv_field(value: &Value) -> String {
    match value {
        Value::String(text) => format!("\"{}\"", text.replace('"', "\"\"")),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Statements for the shell of a database, as llama-bench has them.
fn sql(report: &Report) -> String {
    const TABLE: &str = "millstream_bench";
    let columns = COLUMNS.map(|(name, kind)| format!("  {name} {kind}")).join(",\n");
    let mut text = format!("CREATE TABLE IF NOT EXISTS {TABLE} (\n{columns}\n);\n\n");
    let names = COLUMNS.map(|(name, _)| name).join(", ");
    for row in flat(report) {
        let values = row.map(|value| sql_value(&value)).join(", ");
        let _ = writeln!(text, "INSERT INTO {TABLE} ({names}) VALUES ({values});");
    }
    text
}

/// A literal: a quote in a text doubled, and what is true 1.
fn sql_value(value: &Value) -> String {
    match value {
        Value::String(text) => format!("'{}'", text.replace('\'', "''")),
        Value::Null => "NULL".to_owned(),
        Value::Bool(yes) => u8::from(*yes).to_string(),
        other => other.to_string(),
    }
}

fn object(report: &Report) -> Value {
    let (machine, model) = (report.machine, &report.model);
    let mut settings: serde_json::Map<String, Value> =
        report.config.settings.iter().map(|s| (s.name.to_owned(), s.value.clone())).collect();
    // Nothing is chosen here.
    let sampling = ["temp", "top-k", "top-p", "min-p", "seed", "max-tokens", "stop"];
    let shaping = [
        "repeat-penalty",
        "repeat-last-n",
        "presence-penalty",
        "frequency-penalty",
        "logit-bias",
        "logprobs",
        "grammar",
    ];
    for name in sampling.into_iter().chain(shaping) {
        settings.shift_remove(name);
    }
    json!({
        "schema_version": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "machine": {
            "cpu": machine.cpu,
            "kernels": report.taken.first().map(kernels),
            "ram": machine.memory.total,
            "kernel": machine.kernel,
            "fs": machine.file_system(&model.dir),
        },
        "model": {
            "dir": model.dir.display().to_string(),
            "arch": model.arch.family.name(),
            "layers": model.arch.layers.len(),
            "experts": model.arch.moe.experts,
            "formats": model.formats,
            "widths": model.widths,
            "bytes": model.bytes,
            "parameters": model.parameters,
        },
        "settings": settings,
        "tokens": report.tokens.source,
        "repetitions": report.how.repetitions,
        "interrupted": matches!(report.went, Went::Interrupted),
        "tests": rates(report).map(|(taken, rate)| test(report, taken, &rate)).collect::<Vec<_>>(),
    })
}

fn test(report: &Report, taken: &Taken, rate: &Rate) -> Value {
    let samples = taken.rates(rate);
    let (mean, sd) = spread(&samples);
    // It is that of decoding.
    let efficiency = match rate.of {
        Part::Prompt => None,
        Part::Answer | Part::Both => taken.median(|stats| stats.overlap.map(|overlap| overlap.efficiency)),
    };
    json!({
        "name": rate.named("@"),
        "n": rate.tokens,
        "depth": rate.depth,
        "samples_tok_s": samples.iter().copied().map(short).collect::<Vec<_>>(),
        "mean": short(mean),
        "median": median(&samples).map(short),
        "sd": short(sd),
        "cold": report.how.cold,
        "hit_rate": hit_rate(taken, rate).map(short),
        "bytes_per_token": bytes_per_token(taken, rate).round(),
        "gb_s": taken.median(|stats| rate.of.fetched(stats).gb_s()).map(short),
        "efficiency": efficiency.map(short),
        "stages": stages(taken),
        "page_cache": taken.samples.iter().any(|sample| sample.cached),
        "routing": taken.routing().map(|digest| format!("{digest:016x}")),
    })
}

/// Share of the time of each stage, prompt and answer together: medians, which need not add up to 1.
fn stages(taken: &Taken) -> serde_json::Map<String, Value> {
    let share = |stats: &Stats, name: &str| {
        let (_, stage) = stats.stages.0.iter().find(|(other, _)| *other == name)?;
        Some(stage.busy_s / stats.wall_s)
    };
    let names = taken.samples.first().map(|sample| &sample.stats.stages.0);
    let shares = names.into_iter().flatten().filter_map(|(name, _)| {
        Some(((*name).to_owned(), taken.median(|stats| share(stats, name)).map(short)?.into()))
    });
    shares.collect()
}

/// Share of experts found in memory, in the median.
fn hit_rate(taken: &Taken, rate: &Rate) -> Option<f64> {
    taken.median(|stats| rate.of.fetched(stats).hit_rate())
}

/// Bytes read for each token, in the median.
fn bytes_per_token(taken: &Taken, rate: &Rate) -> f64 {
    taken.median(|stats| Some(rate.of.fetched(stats).bytes as f64)).unwrap_or(0.0) / rate.tokens as f64
}

fn kernels(taken: &Taken) -> &str {
    taken.samples.first().map_or("", |sample| &sample.stats.machine.kernels)
}

fn backend(taken: &Taken) -> String {
    format!("CPU {}", kernels(taken))
}

/// The model's name, its family, and how wide its weights are.
fn name(report: &Report) -> String {
    let model = &report.model;
    format!("{} {} {}", report.config.model.name(), model.arch.family.name(), model.widths)
}

/// `743.90 B`, as llama-bench counts.
fn parameters(count: u64) -> String {
    match count {
        0..1_000_000_000 => format!("{:.2} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_csv_and_sql_are_quoted_by_their_rules() {
        let odd = json!("a \"b\", it's");
        assert_eq!(csv_field(&odd), "\"a \"\"b\"\", it's\"");
        assert_eq!(sql_value(&odd), "'a \"b\", it''s'");
        let [nothing, yes, number] = [json!(null), json!(true), json!(1.5)];
        assert_eq!([&nothing, &yes, &number].map(csv_field), ["", "true", "1.5"]);
        assert_eq!([&nothing, &yes, &number].map(sql_value), ["NULL", "1", "1.5"]);
    }

    #[test]
    fn the_spread_is_that_of_a_sample() {
        // By hand: mean 5, squares 9 + 1 + 1 + 1 + 0 + 0 + 4 + 16 = 32, over 7.
        let (mean, sd) = spread(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert!((mean - 5.0).abs() < 1e-12 && (sd - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(spread(&[3.0]), (3.0, 0.0));
    }
}
