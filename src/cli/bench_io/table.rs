//! The report as text: a table, Markdown, comma-separated values, and the verdict under them.

use std::fmt::Write as _;

use millstream_io::DeviceKind;
use millstream_io::measure::{Candidate, ChunkSize, Summary};

use super::Report;
use super::facts::page_name;

const HEADINGS: [&str; 15] = [
    "device",
    "mode",
    "depth",
    "chunk",
    "pages",
    "registered",
    "GB/s",
    "min",
    "max",
    "CPU s/GB",
    "p50 ms",
    "p99 ms",
    "submit p99 us",
    "amplification",
    "cached",
];

fn cells(summary: &Summary) -> [String; 15] {
    let candidate = &summary.candidate;
    let mut device = candidate.device.to_string();
    for (on, name) in [(candidate.sqpoll, "+sqpoll"), (candidate.iopoll, "+iopoll")] {
        device += if on { name } else { "" };
    }
    [
        device,
        candidate.mode.to_string(),
        candidate.depth.to_string(),
        candidate.chunk.to_string(),
        page_name(summary.pages).to_owned(),
        if summary.registered { "yes" } else { "no" }.to_owned(),
        format!("{:.2}", summary.gb_s),
        format!("{:.2}", summary.gb_s_min),
        format!("{:.2}", summary.gb_s_max),
        format!("{:.4}", summary.cpu_s_per_gb),
        format!("{:.1}", summary.p50_ms),
        format!("{:.1}", summary.p99_ms),
        format!("{:.0}", summary.submit_p99_us),
        summary.amplification.map_or_else(|| "?".into(), |factor| format!("{factor:.2}")),
        if summary.cached { "CACHED" } else { "no" }.to_owned(),
    ]
}

fn fio_cells(report: &Report) -> Vec<[String; 15]> {
    let row = |summary: &super::fio::FioSummary| {
        let text = |value: &str| value.to_owned();
        [
            text("fio uring"),
            text("direct"),
            summary.run.depth.to_string(),
            text("whole"),
            text(if summary.run.huge { "hugetlb" } else { "4k (!)" }),
            text("yes"),
            format!("{:.2}", summary.gb_s),
            format!("{:.2}", summary.gb_s_min),
            format!("{:.2}", summary.gb_s_max),
            format!("{:.4}", summary.cpu_s_per_gb),
            format!("{:.1}", summary.p50_ms),
            format!("{:.1}", summary.p99_ms),
            text("-"),
            text("-"),
            text("-"),
        ]
    };
    report.fio.iter().map(row).collect()
}

fn rows(report: &Report) -> Vec<[String; 15]> {
    report.results.iter().map(cells).chain(fio_cells(report)).collect()
}

/// Columns under headings.
pub fn plain(report: &Report) -> String {
    let rows = rows(report);
    let widths: Vec<usize> = HEADINGS
        .iter()
        .enumerate()
        .map(|(index, heading)| rows.iter().map(|row| row[index].len()).max().unwrap_or(0).max(heading.len()))
        .collect();
    let mut text = String::new();
    let mut line = |cells: &[&str]| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .enumerate()
            // Words to the left, numbers to the right.
            .map(|(index, (cell, width))| if index < 2 { format!("{cell:width$}") } else { format!("{cell:>width$}") })
            .collect();
        let _ = writeln!(text, "{}", padded.join("  ").trim_end());
    };
    line(&HEADINGS);
    for row in &rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    text
}

/// A Markdown table, with the verdict.
pub fn md(report: &Report) -> String {
    let mut text = format!("| {} |\n|{}\n", HEADINGS.join(" | "), "---|".repeat(HEADINGS.len()));
    for row in rows(report) {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text + "\n" + &verdict(report)
}

/// What binds, as it stands above the Markdown table.
pub fn facts_md(text: &str) -> String {
    format!("```text\n{}\n```\n\n", text.trim_end())
}

/// One line a result, with a heading.
pub fn csv(report: &Report) -> String {
    let names: Vec<String> = HEADINGS.iter().map(|name| name.to_lowercase().replace([' ', '/'], "_")).collect();
    let mut text = names.join(",") + "\n";
    for row in rows(report) {
        let _ = writeln!(text, "{}", row.join(","));
    }
    text
}

/// The recommendation with its reason, the ratio to fio, and what is missing.
pub fn verdict(report: &Report) -> String {
    let mut text = String::new();
    for (word, candidates) in [("not measured", &report.unavailable), ("failed", &report.failed)] {
        let mut reasons: Vec<&str> = candidates.iter().map(|(_, why)| why.as_str()).collect();
        reasons.dedup();
        for why in reasons {
            let whose = candidates.iter().filter(|(_, other)| other == why).map(|(candidate, _)| candidate.as_str());
            let _ = writeln!(text, "{word}: {}: {why}", whose.collect::<Vec<_>>().join(", "));
        }
    }
    if let Some(note) = &report.fio_note {
        let _ = writeln!(text, "fio: {note}");
    }
    if report.results.iter().any(|summary| summary.cached) {
        text += "CACHED: memory served some of it, so the figure is not the drive's\n";
    }
    match &report.recommendation {
        None => {
            let _ = writeln!(text, "recommended: nothing: {}", report.why_nothing());
        }
        Some(found) => {
            let best = &report.results[found.best];
            let _ = writeln!(text, "best: {}, {:.2} GB/s", best.candidate, best.gb_s);
            if let (Some(ratio), Some(fio)) = (report.ratio_to_fio(), report.fio.first()) {
                let marked = if fio.run.huge {
                    ""
                } else {
                    "; fio had no reserved huge pages (vm.nr_hugepages), so this is not the drive's ceiling"
                };
                let _ = writeln!(text, "fio: {}, {:.2} GB/s; best / fio = {ratio:.2}{marked}", fio.run, fio.gb_s);
            }
            let taken = &report.results[found.take].candidate;
            let _ = writeln!(text, "recommended: {}\n  reason: {}", flags(taken), found.reason);
        }
    }
    if report.interrupted {
        text += "interrupted: candidates have different numbers of rounds, or none\n";
    }
    text
}

/// The flags of `run` that choose a candidate.
pub fn flags(candidate: &Candidate) -> String {
    let mut flags = format!("--io {} --device {} --depth {}", candidate.mode, candidate.device, candidate.depth);
    if candidate.chunk != ChunkSize::Auto {
        flags += &format!(" --chunk {}", candidate.chunk);
    }
    debug_assert_ne!(candidate.device, DeviceKind::Auto);
    flags
}
