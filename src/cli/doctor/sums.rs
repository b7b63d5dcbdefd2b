//! The check of every checksum, and what is said where it is not made.

use std::sync::Arc;
use std::time::Instant;

use millstream_io::{Access, DeviceConfig, FileId, FileSet, leave, open_device};
use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::verify::{self, Checked, Damage, Fault, Manifest};
use crate::engine::EngineConfig;
use crate::limits::CHECK_WORKERS_MAX;

use super::{Check, Report, Status};
use crate::cli::hanging::{self, Silence};
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, interrupt, render, size};

const ID: &str = "checksums";
/// Buffers of the check: enough for the device's depth and the threads that hash.
const SLABS: usize = 16;

/// Checks every run of the container where `deep` asks for it.
pub fn examine(
    deep: bool,
    machine: &Machine,
    checkpoint: &Checkpoint,
    files: &Arc<FileSet>,
    engine: &EngineConfig,
    report: &mut Report,
) -> Result<Done, Failure> {
    let manifest = match Manifest::read(checkpoint) {
        Ok(manifest) => manifest,
        Err(error) => {
            report.failure(ID, Failure::of(&error).hint(error.hint()));
            return Ok(Done::Whole);
        }
    };
    if manifest.is_empty() {
        let hint = "compare the files with the publisher's checksums; `millstream convert` writes its own".to_owned();
        report.skip(ID, "the model has none", Some(hint));
        return Ok(Done::Whole);
    }
    if manifest.unhashed > 0 {
        let detail = format!("{} tensors have none", manifest.unhashed);
        report.warn(ID, detail, "convert the model again to have all of it covered");
    }
    if !deep {
        let detail = format!("{} runs of {} are not compared", manifest.runs.len(), size::show(manifest.bytes()));
        report.skip(ID, detail, Some("--deep reads all of it".to_owned()));
        return Ok(Done::Whole);
    }
    compare(machine, &manifest, files, engine, report)
}

fn compare(
    machine: &Machine,
    manifest: &Manifest,
    files: &Arc<FileSet>,
    engine: &EngineConfig,
    report: &mut Report,
) -> Result<Done, Failure> {
    let cancel = interrupt::watch()?;
    let began = Instant::now();
    let mut bar = render::Progress::new(false);
    let workers = machine.cores.min(CHECK_WORKERS_MAX);
    let config = DeviceConfig { kind: engine.device, ..DeviceConfig::default() };
    let mut silence = Silence::default();
    let mut show = |checked: Checked| {
        if let Some(line) = silence.lasts(checked.silent) {
            bar.note(&line);
        }
        bar.show(|| line(checked, began.elapsed().as_secs_f64()));
    };
    let mut left = 0;
    let outcome = verify::pool_for(&manifest.runs, files, SLABS).and_then(|pool| {
        let mut device = open_device(&config, Arc::clone(files), &pool)?;
        let outcome = verify::check(&manifest.runs, files, &pool, &mut *device, workers, &cancel, &mut show);
        left = leave(device);
        outcome
    });
    bar.end();
    hanging::tell_left(left, false);
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            report.fail(ID, error.to_string(), error.hint());
            return Ok(Done::Whole);
        }
    };
    let damaged = outcome.damage.len();
    outcome.damage.into_iter().for_each(|damage| report.add(shown(damage)));
    let rate = outcome.bytes as f64 / 1e9 / began.elapsed().as_secs_f64().max(1e-9);
    let direct = (0..files.len() as u32).all(|file| matches!(files.access(FileId(file)), Access::Direct { .. }));
    let how = if direct { "" } else { ", through the page cache: a copy in memory may hide damage on the drive" };
    let (runs, bytes) = (size::counted(outcome.runs as u64, "run"), size::show(outcome.bytes));
    let detail = format!("{runs} of {bytes} read at {rate:.2} GB/s{how}");
    if outcome.interrupted {
        let detail = format!("interrupted after {bytes} at {rate:.2} GB/s{how}: {runs} compared, {damaged} damaged");
        report.warn(ID, detail, "run it again to its end");
        return Ok(Done::Interrupted);
    }
    if damaged == 0 {
        report.ok(ID, format!("{detail}, all as written"));
    }
    Ok(Done::Whole)
}

fn line(checked: Checked, seconds: f64) -> String {
    let Checked { bytes, of, damaged, .. } = checked;
    let rate = bytes as f64 / seconds.max(1e-9);
    let left = if bytes == 0 { "?".to_owned() } else { format!("{:.0} s", of.saturating_sub(bytes) as f64 / rate) };
    let (done, all) = (size::show(bytes), size::show(of));
    format!("checking: {done} of {all}, {:.2} GB/s, {left} left, {damaged} damaged", rate / 1e9)
}

fn shown(damage: Damage) -> Check {
    let hint = match &damage.fault {
        Fault::Differs { .. } => "fetch this shard again, or remove it and run the command that made it again (convert, synth); and check the drive and the memory".to_owned(),
        Fault::Unreadable(error) => error.hint().unwrap_or_else(|| "check `dmesg` and copy the file again".to_owned()),
    };
    let detail = damage.to_string();
    let Damage { shard, run, fault } = damage;
    let mut more = vec![
        ("shard", json!(shard.display().to_string())),
        ("offset", json!(run.span.offset)),
        ("length", json!(run.span.len)),
        ("tensor", json!(run.name)),
        ("layer", json!(run.layer)),
        ("expert", json!(run.expert)),
    ];
    if let Fault::Differs { expected, found } = fault {
        more.push(("expected", json!(format!("{expected:016x}"))));
        more.push(("found", json!(format!("{found:016x}"))));
    }
    Check { id: ID, status: Status::Fail, detail, hint: Some(hint), more }
}
