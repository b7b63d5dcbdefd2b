//! The `profile` command: one generation with the full accounting. Where its time went, what the drive did and what of it
//! was felt, which tier experts came from, what bound it, and the one thing to change.

mod html;
mod pictures;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use crate::engine::stats::Stats;

use super::advice::{Judgement, Known};
use super::args::{self, RunArgs};
use super::job::{self, Prepared};
use super::machine::Machine;
use super::printer::Show;
use super::run::{self, Witness};
use super::size::short;
use super::tuning::{self, Lookup};
use super::{Done, Failure, numa, output};

/// Tokens generated when `-n` is not given: enough for percentiles, and for a cache to fill.
const TOKENS_DEFAULT: i64 = 64;

/// Flags of `profile`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream profile -p \"Tell me a story about a fox.\"
  millstream profile -m /models/glm-5.2-int4 --ram 16G -n 32 -f question.txt --html profile.html

Every flag of `run` is one of this command, and means the same; without -n there are at most 64 tokens. The answer is \
not shown, except with -v.
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted (what was measured is shown).")]
pub struct ProfileArgs {
    /// What the drive can do, in GB/s, as bench-io finds it [default: what tune measured, where it was run]
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true, value_parser = args::parse_rate)]
    disk: Option<f64>,
    /// Write the report as a page with pictures, one file that needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
}

/// Everything that is known in the end.
struct Report {
    stats: Stats,
    /// The seed, where chance chose tokens.
    seed: Option<u64>,
    tokens: Option<TokenTimes>,
    ceiling: Option<Ceiling>,
    judgement: Option<Judgement>,
}

/// From one token to the next, in milliseconds.
#[derive(Clone, Debug, PartialEq)]
struct TokenTimes {
    /// In the order of the tokens.
    ms: Vec<f64>,
    p50: f64,
    p99: f64,
    max: f64,
}

/// What reads alone reach on the drive.
struct Ceiling {
    gb_s: f64,
    /// Who says so.
    source: String,
}

/// Generates and reports.
pub fn profile(args: &ProfileArgs, machine: &Machine) -> Result<Done, Failure> {
    let run_args = RunArgs { max_tokens: args.run.max_tokens.or(Some(TOKENS_DEFAULT)), ..args.run.clone() };
    let machine = &numa::place(&run_args, machine)?;
    if let Some(path) = &args.html {
        output::check(path, "page", &job::inputs(&run_args, machine))?;
    }
    let Some(prepared) = job::prepare(&run_args, machine)? else { return Ok(Done::Interrupted) };
    let (ceiling, known) =
        (ceiling(args, machine, &prepared), Known::of(&run_args, machine, &prepared.config, &prepared.checkpoint));
    let show = match (args.run.verbose, args.run.json, args.run.ids) {
        (true, false, true) => Show::Ids,
        (true, false, false) => Show::Text,
        _ => Show::Nothing,
    };
    let mut chosen = Vec::with_capacity(prepared.job.max_tokens);
    let witness = Witness { show, recorded: None, tokens: Some(&mut chosen) };
    let mut measured = None;
    let done = run::perform(&run_args, machine, prepared, witness, &mut |stats, config| {
        let seed = (config.sampling.temperature > 0.0).then_some(config.sampling.seed);
        measured = Some((stats.clone(), seed));
        Ok(())
    });
    let Some((stats, seed)) = measured else { return done };
    let judgement = known.judge(&stats, ceiling.as_ref().map(|ceiling| ceiling.gb_s));
    let report = Report { stats, seed, tokens: TokenTimes::of(&chosen), ceiling, judgement };
    // First what a full disk cannot take away.
    let closed = output::print(&if args.run.json { compact(&report)? + "\n" } else { text::text(&report) })?;
    if let Some(path) = &args.html {
        output::write(path, "page", html::page(&report))?;
    }
    if let Some(path) = &args.run.stats_json {
        output::write(path, "statistics", pretty(&report)? + "\n")?;
    }
    Ok(closed.unwrap_or(done?))
}

/// What the drive can do: as the user says, or as tuning measured it.
fn ceiling(args: &ProfileArgs, machine: &Machine, prepared: &Prepared) -> Option<Ceiling> {
    if let Some(gb_s) = args.disk {
        return Some(Ceiling { gb_s, source: "--disk".to_owned() });
    }
    match tuning::find(machine, &prepared.checkpoint) {
        Lookup::Found(profile) => {
            Some(Ceiling { gb_s: profile.gb_s?, source: format!("measured by tune on {}", profile.date) })
        }
        Lookup::None | Lookup::Unusable(_) => None,
    }
}

impl TokenTimes {
    /// The times between the moments at which tokens were chosen; none of fewer than two tokens.
    fn of(chosen: &[Instant]) -> Option<TokenTimes> {
        TokenTimes::from_ms(chosen.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect())
    }

    fn from_ms(ms: Vec<f64>) -> Option<TokenTimes> {
        let mut sorted = ms.clone();
        sorted.sort_by(f64::total_cmp);
        // The least time that so many of a hundred do not exceed.
        let at = |percent: usize| sorted.get((percent * sorted.len()).div_ceil(100).max(1) - 1).copied();
        Some(TokenTimes { p50: at(50)?, p99: at(99)?, max: at(100)?, ms })
    }
}

/// The statistics of `run`, and what only a profile knows. Keys are stable; more may be added.
fn object(report: &Report) -> Result<Value, Failure> {
    let cannot = |e: serde_json::Error| Failure::work("cannot write the profile as JSON").cause(e);
    let mut object = serde_json::to_value(&report.stats).map_err(cannot)?;
    let gb_s = report.stats.io.gb_s;
    object["token_ms"] = match &report.tokens {
        None => Value::Null,
        Some(tokens) => json!({
            "n": tokens.ms.len(), "p50": short(tokens.p50), "p99": short(tokens.p99), "max": short(tokens.max),
        }),
    };
    object["ceiling"] = match &report.ceiling {
        None => Value::Null,
        Some(Ceiling { gb_s: most, source }) => {
            json!({ "gb_s": most, "source": source, "share": gb_s.map(|gb_s| short(gb_s / most)) })
        }
    };
    // A profile may know better than a run what the drive can do.
    if let Some(Judgement { advice, .. }) = &report.judgement {
        object["advice"] = advice.to_string().into();
        object["knob"] = advice.knob.clone().into();
    }
    Ok(object)
}

fn compact(report: &Report) -> Result<String, Failure> {
    Ok(object(report)?.to_string())
}

fn pretty(report: &Report) -> Result<String, Failure> {
    Ok(format!("{:#}", object(report)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_the_least_times_that_enough_tokens_do_not_exceed() {
        assert_eq!(TokenTimes::from_ms(vec![]), None);
        let one = TokenTimes::from_ms(vec![7.0]).unwrap();
        assert_eq!((one.p50, one.p99, one.max), (7.0, 7.0, 7.0));
        let hundred = TokenTimes::from_ms((1..=100).rev().map(f64::from).collect()).unwrap();
        assert_eq!((hundred.p50, hundred.p99, hundred.max), (50.0, 99.0, 100.0));
        assert_eq!(hundred.ms[0], 100.0, "times stay in the order of the tokens");
    }
}
