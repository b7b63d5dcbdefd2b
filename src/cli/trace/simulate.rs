//! `trace simulate`: traces replayed over cache policies and sizes.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Map, Value as Json, json};

use crate::limits::LOOKAHEAD_LAYERS_MAX;
use crate::store::policy::PolicyKind;
use crate::store::trace::Trace;
use crate::store::trace::simulate::{Conditions, Outcome, Pace, Requests};

use super::{read_all, shape};
use crate::cli::{Done, Failure, args, output, size};

/// The name of the bound that no policy passes.
const BOUND: &str = "belady";

/// Flags of `trace simulate`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream trace simulate fox.trace dog.trace --budgets 10%,50%,16G
  millstream trace simulate glm.trace --policies lru,lfru --disk 3 --matmul 20 --json
  millstream trace simulate glm.trace --prefetch on --disk 3 --matmul 20 --rest 40

Traces are replayed one after another, from an empty cache. belady is the best that could be done if the future were \
known and nothing were read ahead. Of the predicted speeds, all overlapped and nothing overlapped are bounds that count \
experts only. Layer by layer, a layer asks once the one before is done, and the drive meanwhile reads what was guessed.")]
pub struct SimulateArgs {
    /// Traces of one model
    #[arg(value_name = "FILE", required = true)]
    traces: Vec<PathBuf>,
    /// Sizes of the cache, with commas between them: shares of the experts that the traces use, such as 25%, or bytes,
    /// such as 16G
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "10%,25%,50%,75%", value_parser = parse_budget)]
    budgets: Vec<Size>,
    /// Policies, with commas between them: lru, 2q, arc, s3-fifo, lfru, lookahead [default: all]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = |text: &str| text.parse::<PolicyKind>())]
    policies: Vec<PolicyKind>,
    /// GB/s of the drive: predicts tokens a second
    #[arg(long, value_name = "GB/S", value_parser = args::parse_rate)]
    disk: Option<f64>,
    /// GB/s of experts' weights that the processor multiplies, for the same [default: more than any drive]
    #[arg(long, value_name = "GB/S", value_parser = args::parse_rate, requires = "disk")]
    matmul: Option<f64>,
    /// Milliseconds of a token besides its experts, for the same [default: 0]
    #[arg(long, value_name = "MS", value_parser = parse_milliseconds, requires = "disk")]
    rest: Option<f64>,
    /// Read ahead what was guessed when the traces were recorded: on or off [default: off]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| args::ON_OFF.parse(text))]
    prefetch: Option<bool>,
    /// Layers ahead of which guesses are read, 1 or 2, with --prefetch on [default: 1]
    #[arg(long, value_name = "N", value_parser = parse_lookahead, requires = "prefetch")]
    lookahead: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl SimulateArgs {
    fn reads_ahead(&self) -> bool {
        self.prefetch == Some(true)
    }
}

/// A size of the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Size {
    /// Percent of the working set.
    Percent(f64),
    Bytes(u64),
}

impl Size {
    /// In experts, at least one.
    fn experts(self, requests: &Requests) -> usize {
        let experts = match self {
            Size::Percent(percent) => (requests.working_set() as f64 * percent / 100.0).round() as usize,
            Size::Bytes(bytes) => (bytes / requests.expert_bytes().max(1)) as usize,
        };
        experts.clamp(1, requests.keys())
    }

    fn name(self) -> String {
        match self {
            Size::Percent(percent) => format!("{percent} %"),
            Size::Bytes(bytes) => size::show(bytes),
        }
    }
}

fn parse_budget(text: &str) -> Result<Size, String> {
    let Some(percent) = text.strip_suffix('%') else { return size::parse(text).map(Size::Bytes) };
    match percent.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Size::Percent(percent)),
        _ => Err(format!("'{text}' is not a share: write 25%")),
    }
}

fn parse_milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ms) if ms.is_finite() && ms >= 0.0 => Ok(ms),
        _ => Err("it must be a number of milliseconds, such as 40".to_owned()),
    }
}

fn parse_lookahead(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(layers) if (1..=LOOKAHEAD_LAYERS_MAX).contains(&layers) => Ok(layers),
        _ => Err(format!("it must be a whole number from 1 to {LOOKAHEAD_LAYERS_MAX}")),
    }
}

/// One policy at every size.
struct Column {
    name: &'static str,
    outcomes: Vec<Outcome>,
}

/// Replays and shows.
pub fn simulate(args: &SimulateArgs) -> Result<Done, Failure> {
    if args.lookahead.is_some() && !args.reads_ahead() {
        return Err(Failure::usage("--lookahead is of guesses, and --prefetch off reads none"));
    }
    let traces = read_all(&args.traces)?;
    let requests = Requests::of(&traces.iter().collect::<Vec<_>>());
    let sizes: Vec<usize> = args.budgets.iter().map(|budget| budget.experts(&requests)).collect();
    let policies = if args.policies.is_empty() { &PolicyKind::ALL[..] } else { &args.policies };
    let conditions = Conditions {
        ahead: if args.reads_ahead() { args.lookahead.unwrap_or(1) } else { 0 },
        pace: pace(args, &requests),
    };
    if conditions.ahead > 0 && !requests.has_guesses() {
        return Err(Failure::usage("--prefetch on, and the traces hold no guess")
            .hint("record them again: `trace record` keeps what is guessed of every layer that has one before it"));
    }
    let replayed = policies.iter().map(|&kind| Column {
        name: kind.name(),
        outcomes: sizes.iter().map(|&size| requests.replay_under(kind, size, &conditions)).collect(),
    });
    let best = |&size: &usize| requests.optimum_at(size, conditions.pace);
    let bound = Column { name: BOUND, outcomes: sizes.iter().map(best).collect() };
    let columns: Vec<Column> = replayed.chain([bound]).collect();
    let text = match args.json {
        true => json_text(args, &requests, &sizes, &columns),
        false => text(args, &traces, &requests, &sizes, &columns),
    };
    Ok(output::print(&text)?.unwrap_or(Done::Whole))
}

/// How long things take on the machine that is asked about; no time at all where nothing is said of it.
fn pace(args: &SimulateArgs, requests: &Requests) -> Pace {
    let bytes = requests.expert_bytes() as f64;
    let seconds = |rate: Option<f64>| rate.map_or(0.0, |gb_s| bytes / 1e9 / gb_s);
    Pace {
        read_s: seconds(args.disk),
        multiply_s: seconds(args.matmul),
        rest_s: args.rest.unwrap_or(0.0) / 1e3 / requests.layers() as f64,
    }
}

/// Tokens a second when reading and multiplying overlap altogether, and when neither overlaps the other.
fn predict(args: &SimulateArgs, outcome: &Outcome) -> Option<[f64; 2]> {
    let read = outcome.bytes_per_token() / 1e9 / args.disk?;
    let multiply = args.matmul.map_or(0.0, |rate| outcome.used_bytes_per_token() / 1e9 / rate);
    let rate = |seconds: f64| (seconds > 0.0).then(|| 1.0 / seconds);
    Some([rate(read.max(multiply))?, rate(read + multiply)?])
}

fn text(args: &SimulateArgs, traces: &[Trace], requests: &Requests, sizes: &[usize], columns: &[Column]) -> String {
    let tokens: u64 = traces.iter().map(Trace::tokens).sum();
    let steps: usize = traces.iter().map(Trace::steps).sum();
    let working_set = requests.working_set();
    let mut text = format!(
        "{}\n{} tokens in {} steps use {working_set} of {} experts, {}\n",
        shape(&traces[0]),
        size::grouped(tokens),
        size::grouped(steps as u64),
        requests.keys(),
        size::show(working_set as u64 * requests.expert_bytes()),
    );
    let mut table = |title: &str, cell: &dyn Fn(&Outcome) -> String| {
        let _ = write!(text, "\n{title:<26}");
        for column in columns {
            let _ = write!(text, "{:>11}", column.name);
        }
        text.push('\n');
        for (row, budget) in args.budgets.iter().enumerate() {
            let experts = if sizes[row] == 1 { "expert " } else { "experts" };
            let _ = write!(text, "{:>10}  {:>6} {experts}", budget.name(), sizes[row]);
            for column in columns {
                let _ = write!(text, "{:>11}", cell(&column.outcomes[row]));
            }
            text.push('\n');
        }
    };
    table("hit rate", &|outcome| format!("{:.1} %", 100.0 * outcome.hit_rate()));
    table("read a token", &|outcome| size::show(outcome.bytes_per_token() as u64));
    if args.reads_ahead() {
        table("of that, wrong guesses", &|outcome| size::show(outcome.wasted_bytes_per_token() as u64));
    }
    let speed = |which: usize| {
        move |outcome: &Outcome| {
            predict(args, outcome).map_or_else(|| "-".into(), |speeds| format!("{:.2}", speeds[which]))
        }
    };
    if args.disk.is_some() {
        // Where nothing else takes time, there is nothing to overlap reads with.
        let reads_alone = args.matmul.is_none() && args.rest.is_none() && !args.reads_ahead();
        table(if reads_alone { "tok/s, reads alone" } else { "tok/s, all overlapped" }, &speed(0));
        if args.matmul.is_some() {
            table("tok/s, nothing overlapped", &speed(1));
        }
        if !reads_alone {
            table("tok/s, layer by layer", &|outcome| {
                outcome.tokens_per_s().map_or_else(|| "-".into(), |speed| format!("{speed:.2}"))
            });
        }
    }
    text
}

fn json_text(args: &SimulateArgs, requests: &Requests, sizes: &[usize], columns: &[Column]) -> String {
    let of = |value: &dyn Fn(&Outcome) -> Json| {
        let lists = columns.iter().map(|column| (column.name.to_owned(), column.outcomes.iter().map(value).collect()));
        Json::Object(lists.collect::<Map<String, Json>>())
    };
    let rounded = |value: f64| Json::from((value * 1e6).round() / 1e6);
    let speed =
        |which: usize| of(&|outcome| predict(args, outcome).map_or(Json::Null, |speeds| rounded(speeds[which])));
    let bytes: Vec<u64> = sizes.iter().map(|&size| size as u64 * requests.expert_bytes()).collect();
    let mut json = json!({
        "schema_version": 1,
        "working_set": requests.working_set(),
        "expert_bytes": requests.expert_bytes(),
        "budgets": bytes,
        "budget_experts": sizes,
        "policies": of(&|outcome| rounded(outcome.hit_rate())),
        "bytes_per_token": of(&|outcome| rounded(outcome.bytes_per_token())),
    });
    if args.disk.is_some() {
        json["tok_s"] = speed(0);
        json["tok_s_serial"] = speed(1);
        json["tok_s_layered"] = of(&|outcome| outcome.tokens_per_s().map_or(Json::Null, rounded));
    }
    if args.reads_ahead() {
        let count = |count: fn(&Outcome) -> u64| of(&|outcome| count(outcome).into());
        json["prefetch"] = json!({
            "lookahead": args.lookahead.unwrap_or(1),
            "issued": count(|outcome| outcome.guessed),
            "used": count(|outcome| outcome.prefetched + outcome.late),
            "late": count(|outcome| outcome.late),
            "cancelled": count(|outcome| outcome.cancelled),
            "wasted": count(|outcome| outcome.wasted),
            "wasted_bytes_per_token": of(&|outcome| rounded(outcome.wasted_bytes_per_token())),
        });
    }
    json.to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_shares_or_sizes() {
        assert_eq!(parse_budget("25%"), Ok(Size::Percent(25.0)));
        assert_eq!(parse_budget("0.5%"), Ok(Size::Percent(0.5)));
        assert_eq!(parse_budget("16G"), Ok(Size::Bytes(16 << 30)));
        for bad in ["0%", "101%", "x%", "%", "-1%", "nan%", "x"] {
            assert!(parse_budget(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_are_above_zero() {
        assert_eq!(args::parse_rate("2.5"), Ok(2.5));
        for bad in ["0", "-1", "inf", "nan", "fast"] {
            assert!(args::parse_rate(bad).is_err(), "{bad}");
        }
    }
}
