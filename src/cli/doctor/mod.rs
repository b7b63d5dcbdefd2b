//! The `doctor` command: whether a model will run here, one line a check.

mod host;
mod model;
mod sums;
mod weights;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::checkpoint::Checkpoint;
use crate::engine::config::DEFAULT_CONTEXT;

use super::args::{DoctorArgs, EngineArgs, RunArgs, plain_run};
use super::config::{self, ModelChoice, RunConfig};
use super::machine::Machine;
use super::tuning::{self, Lookup};
use super::{Done, EXIT_USAGE, Failure, bundled};
pub use host::try_ring;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Status {
    Ok,
    Skip,
    Warn,
    Fail,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Skip => "skip",
            Status::Warn => "warn",
            Status::Fail => "fail",
        }
    }
}

/// One line of the report.
struct Check {
    id: &'static str,
    status: Status,
    detail: String,
    hint: Option<String>,
    /// Fields of the JSON object besides these.
    more: Vec<(&'static str, Json)>,
}

/// All checks so far. Without `json` each is printed as it comes, since some take long.
struct Report {
    json: bool,
    checks: Vec<Check>,
    /// `run` would refuse what was asked for, whatever the model.
    misused: bool,
    written: std::io::Result<()>,
}

impl Report {
    fn new(json: bool) -> Report {
        Report { json, checks: Vec::new(), misused: false, written: Ok(()) }
    }

    fn ok(&mut self, id: &'static str, detail: impl Into<String>) {
        self.add(Check { id, status: Status::Ok, detail: detail.into(), hint: None, more: vec![] });
    }

    fn skip(&mut self, id: &'static str, detail: impl Into<String>, hint: Option<String>) {
        self.add(Check { id, status: Status::Skip, detail: detail.into(), hint, more: vec![] });
    }

    fn warn(&mut self, id: &'static str, detail: impl Into<String>, hint: impl Into<String>) {
        self.add(Check { id, status: Status::Warn, detail: detail.into(), hint: Some(hint.into()), more: vec![] });
    }

    fn fail(&mut self, id: &'static str, detail: impl Into<String>, hint: Option<String>) {
        self.add(Check { id, status: Status::Fail, detail: detail.into(), hint, more: vec![] });
    }

    /// A failure as `run` would show it.
    fn failure(&mut self, id: &'static str, failure: Failure) {
        self.misused |= failure.code == EXIT_USAGE;
        let cause = failure.cause.map(|cause| format!(": {cause}")).unwrap_or_default();
        self.fail(id, failure.error + &cause, failure.hint);
    }

    fn add(&mut self, check: Check) {
        if !self.json {
            let mut text = format!("{:<5} {:<12} {}\n", check.status.name(), check.id, check.detail);
            if let Some(hint) = &check.hint {
                text += &format!("      {:<12} hint: {hint}\n", "");
            }
            self.write(&text);
        }
        self.checks.push(check);
    }

    fn worst(&self) -> Status {
        let bad = self.checks.iter().map(|check| check.status).filter(|status| *status > Status::Skip);
        bad.max().unwrap_or(Status::Ok)
    }

    /// Writes the verdict, or the JSON object.
    fn end(&mut self) {
        let result = match self.worst() {
            Status::Fail => "fail",
            Status::Warn => "warning",
            Status::Ok | Status::Skip => "ok",
        };
        let text = if self.json { self.to_json(result).to_string() } else { format!("result: {result}") };
        self.write(&(text + "\n"));
    }

    fn to_json(&self, result: &str) -> Json {
        let checks = self.checks.iter().map(|check| {
            let Check { id, status, detail, hint, more } = check;
            let mut object = json!({ "id": id, "status": status.name(), "detail": detail, "hint": hint });
            more.iter().for_each(|(name, value)| object[*name] = value.clone());
            object
        });
        json!({ "schema_version": 1, "result": result, "checks": checks.collect::<Vec<_>>() })
    }

    fn write(&mut self, text: &str) {
        if self.written.is_ok() {
            let mut out = std::io::stdout().lock();
            self.written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

/// Checks everything `run` needs, in the order in which it needs it.
pub fn doctor(args: &DoctorArgs, machine: &Machine) -> Result<Done, Failure> {
    let mut report = Report::new(args.json);
    // What passes here is to run afterwards.
    let mut machine = machine.clone();
    machine.memory = machine.memory.at_least(machine.cores);
    let machine = &machine;
    let done = match settle(args, machine, &mut report) {
        Ok((dir, config)) => examine(args, machine, &dir, &config, &mut report)?,
        Err(done) => done,
    };
    report.end();
    match &report.written {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(Done::PipeClosed),
        Err(e) => return Err(Failure::work("cannot write the report to standard output").cause(e)),
        Ok(()) => {}
    }
    Ok(match (done, report.worst()) {
        (Done::Whole, Status::Fail) if report.misused => Done::Misused,
        (Done::Whole, Status::Fail) => Done::Unwell,
        _ => done,
    })
}

/// The model's directory and the settings that `run` would have with no other flag; where there are none, the report
/// says why, and the command is done.
fn settle(args: &DoctorArgs, machine: &Machine, report: &mut Report) -> Result<(PathBuf, RunConfig), Done> {
    let given = args.model.clone().or_else(|| machine.variable("MILLSTREAM_MODEL").map(PathBuf::from));
    let mut refuse = |id, failure| {
        report.failure(id, failure);
        Done::Whole
    };
    if let Some(dir) = given {
        config::check_model_dir(&dir, "-m").map_err(|failure| refuse("directory", failure))?;
    }
    let plain = plain_run();
    let engine = EngineArgs { widths: args.widths, ..plain.engine };
    let decided = config::decide(&RunArgs { model: args.model.clone(), engine, ..plain }, machine);
    let decided = decided.and_then(|config| config.check_memory(machine).map(|()| config));
    let config = decided.map_err(|failure| refuse("settings", failure))?;
    let dir = match &config.model {
        ModelChoice::Dir(dir) => dir.clone(),
        ModelChoice::Bundled(source) => match bundled::container(source, machine, false) {
            Ok(Some(checkpoint)) => checkpoint.dir,
            Ok(None) => return Err(Done::Interrupted),
            Err(failure) => return Err(refuse("directory", failure)),
        },
    };
    report.ok("directory", dir.display().to_string());
    Ok((dir, config))
}

fn examine(
    args: &DoctorArgs,
    machine: &Machine,
    dir: &Path,
    config: &RunConfig,
    report: &mut Report,
) -> Result<Done, Failure> {
    let Some((checkpoint, greeting)) = model::examine(dir, report) else {
        for id in ["tuning", "files", "io_uring", "disk", "placement", "memory", "checksums", "weights"] {
            report.skip(id, "needs a model without faults", None);
        }
        host::pages(machine, report);
        return Ok(Done::Whole);
    };
    let mut config = config.clone();
    config.count_tokenizer(dir);
    tuning(machine, &checkpoint, &mut config, report);
    let context = checkpoint.arch.max_context.min(DEFAULT_CONTEXT);
    let mut engine = config.engine(context);
    // As an engine takes them: some ways of reading are one with a device.
    if let Ok(settled) = millstream_io::settle(engine.io, engine.device) {
        (engine.io, engine.device) = settled;
    }
    host::pages(machine, report);
    let budget = host::memory(machine, &checkpoint, &config, (context, greeting), report);
    host::locked(machine, budget.as_ref(), report);
    let Some(files) = host::files(machine, &checkpoint, &engine, report) else {
        for id in ["io_uring", "disk", "placement", "checksums", "weights"] {
            report.skip(id, "needs files that can be opened", None);
        }
        return Ok(Done::Whole);
    };
    if budget.is_none() && machine.memory.space.is_some() {
        // Where next to nothing may be mapped a thread that is started may end the program.
        for id in ["io_uring", "disk", "placement", "checksums", "weights"] {
            report.skip(id, "needs memory that may be mapped", None);
        }
        return Ok(Done::Whole);
    }
    host::ring(machine, &files, &engine, report);
    host::drive(machine, &checkpoint, &engine, report);
    match sums::examine(args.deep, machine, &checkpoint, &files, &engine, report)? {
        Done::Whole => weights::examine(args.deep, &checkpoint, &engine, report),
        stopped => {
            report.skip("weights", "interrupted before", None);
            Ok(stopped)
        }
    }
}

/// What was found out about reading this model here; `run` takes its settings, and so does the rest of the report.
fn tuning(machine: &Machine, checkpoint: &Checkpoint, config: &mut RunConfig, report: &mut Report) {
    match tuning::find(machine, checkpoint) {
        Lookup::None => {
            let hint = "millstream tune measures which settings are best here".to_owned();
            report.skip("tuning", "no profile of this machine and model", Some(hint));
        }
        Lookup::Unusable(why) => report.warn("tuning", why, "the defaults are used"),
        found @ Lookup::Found(_) => report.ok("tuning", config.tune(found).unwrap_or_default()),
    }
}
