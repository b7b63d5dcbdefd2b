//! The report as one JSON object. Keys are stable; more may be added.

use millstream_io::measure::{Summary, Sweep};
use millstream_io::{Access, DeviceKind};
use serde_json::{Map, Value, json};

use super::Report;
use super::facts::{Facts, page_name};
use super::fio::FioSummary;
use super::table::flags;
use crate::cli::size::short;

/// The object, with a newline.
pub fn text(report: &Report) -> String {
    let facts = &report.facts;
    let best = report.recommendation.as_ref().map(|found| result(&report.results[found.best]));
    let object = json!({
        "schema_version": 1,
        "sweep": match facts.sweep { Sweep::Full => "full", Sweep::Quick => "quick" },
        "interrupted": report.interrupted,
        "machine": {
            "cpu": facts.cpu,
            "cores": facts.cores,
            "ram": facts.memory_bytes,
            "kernel": facts.kernel,
            "load": facts.limits.load,
        },
        "file": file(facts),
        "limits": limits(facts),
        "io_uring": {
            "available": facts.ring.is_ok(),
            "reason": match &facts.ring { Ok(reason) | Err(reason) => reason },
        },
        "warnings": facts.warnings(),
        "results": report.results.iter().map(result).collect::<Vec<_>>(),
        "unavailable": report.unavailable.iter()
            .map(|(candidate, reason)| json!({ "candidate": candidate, "reason": reason })).collect::<Vec<_>>(),
        "failed": report.failed.iter()
            .map(|(candidate, reason)| json!({ "candidate": candidate, "reason": reason })).collect::<Vec<_>>(),
        "fio": fio(&report.fio),
        "fio_note": report.fio_note,
        "best": best,
        "ratio_to_fio": report.ratio_to_fio().map(short),
        "recommended": recommended(report),
    });
    let pretty = serde_json::to_string_pretty(&object).unwrap_or_default();
    pretty + "\n"
}

fn file(facts: &Facts) -> Value {
    let (mem, offset) = match facts.access {
        Access::Direct { mem_align, offset_align } => (Some(mem_align), Some(offset_align)),
        _ => (None, None),
    };
    json!({
        "path": facts.name,
        "bytes": facts.bytes,
        "files": facts.files,
        "scratch": facts.scratch,
        "slab_bytes": facts.slab_bytes,
        "places": facts.places,
        "fs": facts.fs,
        "access": facts.access.to_string(),
        "dio_mem_align": mem,
        "dio_offset_align": offset,
        "extents": facts.extents,
    })
}

fn limits(facts: &Facts) -> Value {
    let disk = facts.disk.clone().unwrap_or_default();
    json!({
        "device": facts.disk.as_ref().map(|disk| &disk.name),
        "max_sectors_kb": disk.max_sectors_kb,
        "max_segments": disk.max_segments,
        "nr_requests": disk.nr_requests,
        "read_ahead_kb": disk.read_ahead_kb,
        "scheduler": disk.scheduler,
        "rotational": disk.rotational,
        "io_poll": disk.io_poll,
        "memlock": facts.limits.memlock,
        "cap_ipc_lock": facts.limits.may_lock_all,
        "thp": facts.limits.thp,
        "nr_hugepages": facts.limits.nr_hugepages,
        "free_hugepages": facts.limits.free_hugepages,
        "cgroup_io": facts.limits.io_limits,
    })
}

fn result(summary: &Summary) -> Value {
    let candidate = &summary.candidate;
    json!({
        "device": candidate.device.to_string(),
        "mode": candidate.mode.to_string(),
        "depth": candidate.depth,
        "chunk": candidate.chunk.to_string(),
        "pages": page_name(summary.pages),
        "registered": summary.registered,
        "sqpoll": candidate.sqpoll,
        "iopoll": candidate.iopoll,
        "threads": candidate.threads(),
        "rounds": summary.rounds,
        "slabs": summary.slabs,
        "gb_s": short(summary.gb_s),
        "gb_s_min": short(summary.gb_s_min),
        "gb_s_max": short(summary.gb_s_max),
        "cpu_s_per_gb": short(summary.cpu_s_per_gb),
        "p50_ms": short(summary.p50_ms),
        "p99_ms": short(summary.p99_ms),
        "submit_p50_us": short(summary.submit_p50_us),
        "submit_p99_us": short(summary.submit_p99_us),
        "amplification": summary.amplification.map(short),
        "request_kib": summary.request_kib.map(short),
        "cached": summary.cached,
    })
}

fn fio(all: &[FioSummary]) -> Value {
    let one = |summary: &FioSummary| {
        json!({
            "gb_s": short(summary.gb_s),
            "gb_s_min": short(summary.gb_s_min),
            "gb_s_max": short(summary.gb_s_max),
            "cpu_s_per_gb": short(summary.cpu_s_per_gb),
            "p50_ms": short(summary.p50_ms),
            "p99_ms": short(summary.p99_ms),
            "rounds": summary.rounds,
            "depth": summary.run.depth,
            "huge_pages": summary.run.huge,
            "settings": summary.run.to_string(),
        })
    };
    let Some(best) = all.first() else { return Value::Null };
    let mut value = one(best);
    value["all"] = all.iter().map(one).collect();
    value
}

fn recommended(report: &Report) -> Value {
    let Some(found) = &report.recommendation else { return json!({ "reason": report.why_nothing() }) };
    let Summary { candidate, pages, registered, .. } = &report.results[found.take];
    let mut settings = Map::new();
    settings.insert("device".into(), candidate.device.to_string().into());
    settings.insert("mode".into(), candidate.mode.to_string().into());
    settings.insert("depth".into(), candidate.depth.into());
    settings.insert("chunk".into(), candidate.chunk.to_string().into());
    settings.insert("pages".into(), page_name(*pages).into());
    settings.insert("registered".into(), (*registered).into());
    if candidate.device != DeviceKind::Uring {
        settings.insert("threads".into(), candidate.threads().into());
    }
    settings.insert("flags".into(), flags(candidate).into());
    settings.insert("reason".into(), found.reason.clone().into());
    Value::Object(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits() {
        for (value, shown) in [(1.234_56, "1.235"), (0.001_234_49, "0.001234"), (0.0, "0.0"), (123_456.0, "123500.0")] {
            assert_eq!(json!(short(value)).to_string(), shown);
        }
    }
}
