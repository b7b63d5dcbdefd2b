//! The command line: what was typed ([`args`]), what was decided from it and why ([`config`]), what the machine is
//! ([`machine`], the only reader of environment and /proc), and how results look ([`render`]).

mod advice;
pub mod args;
mod bench;
mod bench_io;
mod bundled;
mod census;
mod chat;
mod cold;
pub mod config;
mod convert;
mod doctor;
mod eval;
mod grammar;
mod hanging;
mod info;
mod interrupt;
mod job;
mod kvfile;
pub mod machine;
mod notes;
mod numa;
mod output;
mod plan;
mod printer;
mod profile;
mod prompt;
pub mod reading;
pub mod render;
mod run;
mod shaping;
pub mod size;
mod svg;
mod sweep;
mod synth;
mod trace;
mod tune;
mod tuning;
mod usage;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

/// How a command ended, where it did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// All of it was done.
    Whole,
    /// The user stopped it; what was there was shown.
    Interrupted,
    /// Whoever read the answer went away.
    PipeClosed,
    /// It was asked whether all is well, and the answer, which was shown, is no.
    Unwell,
    /// It was asked for in a way that cannot work; why, was shown.
    Misused,
}

/// Why a command failed, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What could not be done.
    pub error: String,
    /// Why not.
    pub cause: Option<String>,
    /// What the user can do.
    pub hint: Option<String>,
    /// 1: the work failed; 2: it was asked for in a way that cannot work.
    pub code: u8,
}

impl Failure {
    /// The work failed: exit code 1.
    pub fn work(error: impl Into<String>) -> Failure {
        Failure { error: error.into(), cause: None, hint: None, code: 1 }
    }

    /// The request cannot work: exit code 2.
    pub fn usage(error: impl Into<String>) -> Failure {
        Failure { error: error.into(), cause: None, hint: None, code: EXIT_USAGE }
    }

    /// The work failed because of `error`; its sources become the cause.
    pub fn of(error: &dyn std::error::Error) -> Failure {
        let shown = error.to_string();
        let mut causes: Vec<String> = Vec::new();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !shown.contains(&text) && !causes.iter().any(|c| c.contains(&text)) {
                causes.push(text);
            }
            source = cause.source();
        }
        let cause = (!causes.is_empty()).then(|| causes.join(": "));
        Failure { cause, ..Failure::work(shown) }
    }

    /// Adds the hint.
    pub fn hint(self, hint: impl Into<String>) -> Failure {
        Failure { hint: Some(hint.into()), ..self }
    }

    /// Adds the cause.
    pub fn cause(self, cause: impl ToString) -> Failure {
        Failure { cause: Some(cause.to_string()), ..self }
    }

    /// `error: ...`, then indented lines for cause and hint.
    pub fn text(&self) -> String {
        let mut text = format!("error: {}\n", self.error);
        for (name, value) in [("cause", &self.cause), ("hint", &self.hint)] {
            if let Some(value) = value {
                // A cause of several lines (a template engine's excerpt) stays under its heading.
                text += &format!("  {name}: {}\n", value.trim_end().replace('\n', "\n    "));
            }
        }
        text
    }
}

/// Exit code of a request that cannot work.
const EXIT_USAGE: u8 = 2;
/// Exit code of a program that the user interrupted, as shells count it: 128 + SIGINT.
const EXIT_INTERRUPTED: u8 = 130;
/// Exit code of a program whose reader went away, as shells count it: 128 + SIGPIPE.
const EXIT_PIPE: u8 = 141;

/// Runs the program with `arguments`, the first of which is its own name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args = match args::Args::try_parse_from(arguments) {
        Ok(args) => args,
        Err(refused) => {
            // Help that cannot be written was not given. Of a usage error the exit code says that it is one, message or not.
            return match refused.print() {
                Err(_) if refused.exit_code() == 0 => ExitCode::FAILURE,
                _ => ExitCode::from(refused.exit_code() as u8),
            };
        }
    };
    interrupt::survive_file_limit();
    let machine = machine::Machine::here();
    machine::spare_address_space(&machine);
    let result = match &args.command {
        args::Command::Run(run_args) => run::run(run_args, &machine),
        args::Command::Chat(chat_args) => chat::chat(chat_args, &machine),
        args::Command::Convert(convert_args) => convert::convert(convert_args),
        args::Command::Doctor(doctor_args) => doctor::doctor(doctor_args, &machine),
        args::Command::Bench(bench_args) => bench::bench(bench_args, &machine),
        args::Command::BenchIo(bench_args) => bench_io::bench_io(bench_args, &machine),
        args::Command::Tune(tune_args) => tune::tune(tune_args, &machine),
        args::Command::Info(info_args) => info::info(info_args, &machine),
        args::Command::Census(census_args) => census::census(census_args, &machine),
        args::Command::Plan(plan_args) => plan::plan(plan_args, &machine),
        args::Command::Synth(synth_args) => synth::synth(synth_args),
        args::Command::Profile(profile_args) => profile::profile(profile_args, &machine),
        args::Command::Sweep(sweep_args) => sweep::sweep(sweep_args, &machine),
        args::Command::Eval(eval_args) => eval::eval(eval_args, &machine),
        args::Command::Trace(trace_args) => trace::trace(trace_args, &machine),
    };
    match result {
        Ok(Done::Whole) => ExitCode::SUCCESS,
        Ok(Done::Unwell) => ExitCode::FAILURE,
        Ok(Done::Misused) => ExitCode::from(EXIT_USAGE),
        Ok(Done::Interrupted) => ExitCode::from(EXIT_INTERRUPTED),
        Ok(Done::PipeClosed) => ExitCode::from(EXIT_PIPE),
        Err(failure) => {
            render::stderr(&failure.text());
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_shows_cause_and_hint_under_it() {
        let io = std::io::Error::other("drive on fire");
        let error = crate::model::tokenizer::TokenizerError::Read { path: "x/tokenizer.json".into(), source: io };
        let failure = Failure::of(&error).hint(error.hint());
        assert_eq!(
            failure.text(),
            "error: cannot read x/tokenizer.json\n  cause: drive on fire\n  hint: check the drive's health (dmesg), or download tokenizer.json again\n"
        );
    }
}
