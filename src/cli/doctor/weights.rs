//! The look at the numbers of a model's weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::json;

use crate::checkpoint::finite::{self, Looked, NotFinite};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::engine::EngineConfig;
use crate::limits::NOT_FINITE_NAMED_MAX;

use super::{Check, Report, Status};
use crate::cli::hanging::Silence;
use crate::cli::{Done, Failure, interrupt, render, size};

const ID: &str = "weights";

/// Looks at norms and biases, and with `deep` at every number of a weight that can be anything but finite.
pub fn examine(
    deep: bool,
    checkpoint: &Checkpoint,
    engine: &EngineConfig,
    report: &mut Report,
) -> Result<Done, Failure> {
    let cancel = if deep { interrupt::watch()? } else { Default::default() };
    let (began, mut last) = (Instant::now(), Looked::default());
    let numbers = if deep { finite::all(checkpoint) } else { finite::vectors(checkpoint) };
    let found = numbers.and_then(|numbers| look(checkpoint, &numbers, engine, &cancel, &mut last));
    let seconds = began.elapsed().as_secs_f64();
    match found {
        Ok(found) if found.is_empty() && deep => {
            let rate = last.bytes as f64 / 1e9 / seconds.max(1e-9);
            let of = "of floats and scales";
            report.ok(ID, format!("{} {of} read at {rate:.2} GB/s, all finite", size::show(last.bytes)));
        }
        Ok(found) if found.is_empty() => {
            let hint = "--deep looks at all weights".to_owned();
            report.skip(ID, "norms and biases are finite, the others are not looked at", Some(hint));
        }
        Ok(found) => name(found, report),
        Err(CheckpointError::Interrupted { .. }) => {
            let detail = format!("interrupted after {} of {}", size::show(last.bytes), size::show(last.of));
            report.warn(ID, detail, "run it again to its end");
            return Ok(Done::Interrupted);
        }
        Err(error) => report.failure(ID, Failure::of(&error).hint(error.hint())),
    }
    Ok(Done::Whole)
}

/// Looks, and shows how far it is.
fn look(
    checkpoint: &Checkpoint,
    numbers: &[finite::Numbers],
    engine: &EngineConfig,
    cancel: &AtomicBool,
    last: &mut Looked,
) -> Result<Vec<NotFinite>, CheckpointError> {
    let mut bar = render::Progress::new(false);
    let (began, mut silence, mut answered) = (Instant::now(), Silence::default(), Instant::now());
    let found = finite::check(checkpoint, numbers, (engine.io, engine.device), &mut |looked| {
        if looked.bytes != last.bytes {
            answered = Instant::now();
        }
        *last = looked;
        if let Some(line) = silence.lasts(answered.elapsed()) {
            bar.note(&line);
        }
        bar.show(|| line(looked, began.elapsed().as_secs_f64()));
        match cancel.load(Ordering::Relaxed) {
            true => Err(CheckpointError::Interrupted { dir: checkpoint.dir.clone() }),
            false => Ok(()),
        }
    });
    bar.end();
    found
}

fn line(looked: Looked, seconds: f64) -> String {
    let Looked { bytes, of, bad } = looked;
    let rate = bytes as f64 / seconds.max(1e-9);
    let left = if bytes == 0 { "?".to_owned() } else { format!("{:.0} s", of.saturating_sub(bytes) as f64 / rate) };
    let (done, all) = (size::show(bytes), size::show(of));
    format!("looking at weights: {done} of {all}, {:.2} GB/s, {left} left, {bad} tensors not finite", rate / 1e9)
}

fn name(found: Vec<NotFinite>, report: &mut Report) {
    let all = found.len();
    for bad in found.into_iter().take(NOT_FINITE_NAMED_MAX) {
        let hint = "fetch or convert this shard again; where the publisher's own is so, no program can use it";
        let more = vec![
            ("shard", json!(bad.shard.display().to_string())),
            ("tensor", json!(bad.tensor)),
            ("row", json!(bad.row)),
            ("index", json!(bad.index)),
            ("value", json!(bad.value.to_string())),
        ];
        report.add(Check { id: ID, status: Status::Fail, detail: bad.to_string(), hint: Some(hint.to_owned()), more });
    }
    if all > NOT_FINITE_NAMED_MAX {
        let hint = "fetch or convert the whole model again".to_owned();
        report.fail(ID, format!("{} more tensors are not finite", all - NOT_FINITE_NAMED_MAX), Some(hint));
    }
}
