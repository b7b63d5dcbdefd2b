//! The look at the numbers of a model's weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::json;

use crate::checkpoint::finite::{self, BadNumber, Findings, Looked, Unread};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::engine::EngineConfig;
use crate::limits::{BAD_NUMBERS_NAMED_MAX, WEIGHT_BELOW};

use super::{Check, Report, Status};
use crate::cli::hanging::Silence;
use crate::cli::{Done, Failure, interrupt, render, size};

const ID: &str = "weights";

/// Looks at norms and biases, and with `deep` at every number that a weight is made of and that can be anything but good.
/// What was found is named however the look ends.
pub fn examine(
    deep: bool,
    checkpoint: &Checkpoint,
    engine: &EngineConfig,
    report: &mut Report,
) -> Result<Done, Failure> {
    let cancel = if deep { interrupt::watch()? } else { Default::default() };
    let (began, mut last) = (Instant::now(), Looked::default());
    let numbers = if deep { finite::all(checkpoint) } else { finite::vectors(checkpoint) };
    let (found, end) = match numbers {
        Ok(numbers) => look(checkpoint, &numbers, engine, &cancel, &mut last),
        Err(error) => (Findings::default(), Err(error)),
    };
    let seconds = began.elapsed().as_secs_f64();
    let is_well = found.bad.is_empty() && found.unread.is_empty();
    name(found.bad, report);
    name_unread(found.unread, report);
    match end {
        Ok(()) if !is_well => {}
        Ok(()) if deep => {
            let rate = last.bytes as f64 / 1e9 / seconds.max(1e-9);
            let good = format!("all finite and below {WEIGHT_BELOW}");
            report.ok(ID, format!("{} of floats and scales read at {rate:.2} GB/s, {good}", size::show(last.bytes)));
        }
        Ok(()) => {
            let hint = "--deep reads them; a run that meets a damaged one ends".to_owned();
            report.skip(ID, "norms and biases are well; no matrix is read", Some(hint));
        }
        Err(CheckpointError::Interrupted { .. }) => {
            let so_far = if is_well { "" } else { ", and what is above was found" };
            let (done, of) = (size::show(last.bytes), size::show(last.of));
            report.warn(ID, format!("interrupted after {done} of {of}{so_far}"), "run it again to its end");
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
) -> (Findings, Result<(), CheckpointError>) {
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
    format!("looking at weights: {done} of {all}, {:.2} GB/s, {left} left, {bad} tensors damaged", rate / 1e9)
}

fn name(bad: Vec<BadNumber>, report: &mut Report) {
    let shards: std::collections::BTreeSet<_> =
        bad.iter().skip(BAD_NUMBERS_NAMED_MAX).map(|bad| bad.shard.display().to_string()).collect();
    let left = bad.len().saturating_sub(BAD_NUMBERS_NAMED_MAX);
    for bad in bad.into_iter().take(BAD_NUMBERS_NAMED_MAX) {
        let hint = if bad.value.is_finite() {
            "fetch or convert this shard again; where the publisher's own is so, an answer may come to numbers that are not finite"
        } else {
            "fetch or convert this shard again; where the publisher's own is so, no program can use it"
        };
        let more = vec![
            ("shard", json!(bad.shard.display().to_string())),
            ("tensor", json!(bad.tensor)),
            ("row", json!(bad.row)),
            ("index", json!(bad.index)),
            ("value", json!(bad.value.to_string())),
            ("below", json!(bad.below)),
        ];
        report.add(Check { id: ID, status: Status::Fail, detail: bad.to_string(), hint: Some(hint.to_owned()), more });
    }
    if left > 0 {
        let detail =
            format!("{left} more tensors have such numbers, in {}", size::counted(shards.len() as u64, "shard"));
        let hint = Some("fetch or convert the whole model again".to_owned());
        let more = vec![("tensors", json!(left)), ("shards", json!(shards))];
        report.add(Check { id: ID, status: Status::Fail, detail, hint, more });
    }
}

fn name_unread(unread: Vec<Unread>, report: &mut Report) {
    let left = unread.len().saturating_sub(BAD_NUMBERS_NAMED_MAX);
    for unread in unread.into_iter().take(BAD_NUMBERS_NAMED_MAX) {
        let hint = unread.error.hint().unwrap_or_else(|| "check `dmesg` and copy the file again".to_owned());
        let more = vec![("tensors", json!(unread.tensors))];
        let detail = format!("not looked at: {unread}");
        report.add(Check { id: ID, status: Status::Fail, detail, hint: Some(hint), more });
    }
    if left > 0 {
        let hint = "check `dmesg`, and whether the drive is there".to_owned();
        report.fail(ID, format!("{left} more parts could not be read"), Some(hint));
    }
}
