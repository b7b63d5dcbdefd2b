//! The sweep as a picture: throughput over depth, and all results as bars.

use std::fmt::Write as _;

use millstream_io::measure::{ChunkSize, Summary};
use millstream_io::{IoMode, Pages};

use super::Report;
use super::facts::page_name;
use crate::cli::size;
use crate::cli::svg::{self, COLOURS, line, nice_above, text};

const WIDTH: f64 = 960.0;
/// The curves' plot: left, top, width, height.
const CURVES: (f64, f64, f64, f64) = (70.0, 96.0, 640.0, 230.0);
/// Where bars begin and how far they may reach.
const BARS: (f64, f64) = (330.0, 430.0);
/// Height of a bar with its gap.
const BAR_STEP: f64 = 20.0;
const FIO: &str = "#d2862d";
const CACHED: &str = "#bbbbbb";

/// The picture, self-contained, on white.
pub fn draw(report: &Report) -> String {
    let mut bars: Vec<&Summary> = report.results.iter().collect();
    bars.sort_by(|a, b| b.gb_s.total_cmp(&a.gb_s));
    let bars_top = CURVES.1 + CURVES.3 + 92.0;
    let height = bars_top + BAR_STEP * (bars.len() + report.fio.len().min(1)) as f64 + 50.0;
    let top =
        report.results.iter().map(|s| s.gb_s_max).chain(report.fio.iter().map(|f| f.gb_s_max)).fold(0.0, f64::max);
    let scale = nice_above(top);
    let mut svg = svg::begin(WIDTH, height, 12);
    title(&mut svg, report);
    curves(&mut svg, report, scale);
    bar_chart(&mut svg, report, &bars, bars_top, scale);
    svg + "</svg>\n"
}

fn title(svg: &mut String, report: &Report) {
    let facts = &report.facts;
    let slab = size::show(facts.slab_bytes);
    text(svg, 20.0, 28.0, "start", 17.0, &format!("Reading slabs of {slab}: median of rounds, in GB/s"));
    let disk = facts.disk.as_ref().map_or("no block device", |disk| &disk.name);
    let under = format!("{}, {} cores, Linux {}; {} on {disk}", facts.cpu, facts.cores, facts.kernel, facts.fs);
    text(svg, 20.0, 48.0, "start", 12.0, &under);
    let recommended = report.recommendation.as_ref().map(|found| &report.results[found.take]);
    let recommended = recommended
        .map(|taken| format!("recommended: {} ({:.2} GB/s)", super::table::flags(&taken.candidate), taken.gb_s));
    let interrupted = report.interrupted.then(|| "interrupted: some have fewer rounds, or none".to_owned());
    let line: Vec<String> = recommended.into_iter().chain(interrupted).collect();
    text(svg, 20.0, 68.0, "start", 12.0, &line.join("; "));
}

/// Candidates that differ in depth only, by name.
fn series(report: &Report) -> Vec<(String, Vec<&Summary>)> {
    let mut all: Vec<(String, Vec<&Summary>)> = Vec::new();
    for summary in &report.results {
        let candidate = &summary.candidate;
        let plain = candidate.chunk == ChunkSize::Auto
            && candidate.pages == Pages::Auto
            && !candidate.sqpoll
            && !candidate.iopoll
            && (candidate.register || candidate.threads() > 0);
        if !plain {
            continue;
        }
        let name = if candidate.mode == IoMode::Mmap {
            "mmap".to_owned()
        } else {
            format!("{} {}", candidate.device, candidate.mode)
        };
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, members)) => members.push(summary),
            None => all.push((name, vec![summary])),
        }
    }
    all.retain(|(_, members)| members.len() > 1);
    all.iter_mut().for_each(|(_, members)| members.sort_by_key(|summary| summary.candidate.depth));
    all
}

fn curves(svg: &mut String, report: &Report, scale: f64) {
    let (left, top, width, height) = CURVES;
    let all = series(report);
    let depths: Vec<u32> = all.iter().flat_map(|(_, members)| members.iter().map(|s| s.candidate.depth)).collect();
    let deepest = f64::from(depths.iter().copied().max().unwrap_or(1)).log2().max(1.0);
    let x = |depth: u32| left + f64::from(depth).log2() / deepest * width;
    let y = |value: f64| top + height - value / scale * height;
    for step in 0..=4 {
        let value = scale * f64::from(step) / 4.0;
        line(svg, (left, y(value)), (left + width, y(value)), "#dddddd", 1.0);
        text(svg, left - 8.0, y(value) + 4.0, "end", 11.0, &format!("{value:.2}"));
    }
    let mut ticks = depths;
    ticks.sort_unstable();
    ticks.dedup();
    for depth in ticks {
        text(svg, x(depth), top + height + 18.0, "middle", 11.0, &depth.to_string());
    }
    text(svg, left + width / 2.0, top + height + 38.0, "middle", 12.0, "slabs in flight");
    if let Some(fio) = report.fio.first() {
        let at = y(fio.gb_s);
        let _ = writeln!(
            svg,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"{FIO}\" stroke-width=\"1.5\" \
             stroke-dasharray=\"6 4\"/>",
            left + width
        );
        legend(svg, all.len(), FIO, &format!("fio, depth {}", fio.run.depth));
    }
    for (index, (name, members)) in all.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points: Vec<(f64, f64)> = members.iter().map(|s| (x(s.candidate.depth), y(s.gb_s))).collect();
        svg::curve(svg, &points, colour);
        for (summary, at) in members.iter().zip(points) {
            line(svg, (at.0, y(summary.gb_s_min)), (at.0, y(summary.gb_s_max)), colour, 1.0);
            svg::point(svg, at, if summary.cached { "#ffffff" } else { colour }, colour);
        }
        let cached = if members.iter().all(|summary| summary.cached) { " (cached)" } else { "" };
        legend(svg, index, colour, &format!("{name}{cached}"));
    }
}

fn legend(svg: &mut String, row: usize, colour: &str, name: &str) {
    let (x, y) = (CURVES.0 + CURVES.2 + 20.0, CURVES.1 + 10.0 + 20.0 * row as f64);
    line(svg, (x, y), (x + 22.0, y), colour, 3.0);
    text(svg, x + 30.0, y + 4.0, "start", 12.0, name);
}

fn bar_chart(svg: &mut String, report: &Report, bars: &[&Summary], top: f64, scale: f64) {
    let (left, width) = BARS;
    let columns = left + width;
    text(svg, 20.0, top - 12.0, "start", 13.0, "All candidates; thin lines: slowest to fastest round");
    text(svg, columns + 50.0, top - 12.0, "end", 11.0, "GB/s");
    text(svg, columns + 116.0, top - 12.0, "end", 11.0, "s CPU/GB");
    text(svg, columns + 176.0, top - 12.0, "end", 11.0, "p99 ms");
    let x = |value: f64| left + value / scale * width;
    let mut rows: Vec<Row> = bars.iter().map(|summary| Row::of(summary)).collect();
    if let Some(fio) = report.fio.first() {
        let name =
            format!("fio uring direct depth {} ({})", fio.run.depth, if fio.run.huge { "hugetlb" } else { "4k" });
        let figures = [fio.gb_s, fio.gb_s_min, fio.gb_s_max, fio.cpu_s_per_gb, fio.p99_ms];
        rows.push(Row { name, figures, colour: FIO });
    }
    rows.sort_by(|a, b| b.figures[0].total_cmp(&a.figures[0]));
    for (index, Row { name, figures: [value, min, max, cpu, p99], colour }) in rows.iter().enumerate() {
        let y = top + BAR_STEP * index as f64;
        text(svg, left - 8.0, y + 11.0, "end", 11.0, name);
        let _ = writeln!(
            svg,
            "<rect x=\"{left}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"14\" fill=\"{colour}\"/>",
            x(*value) - left
        );
        line(svg, (x(*min), y + 7.0), (x(*max), y + 7.0), "#222222", 1.0);
        text(svg, columns + 50.0, y + 11.0, "end", 11.0, &format!("{value:.2}"));
        text(svg, columns + 116.0, y + 11.0, "end", 11.0, &format!("{cpu:.4}"));
        text(svg, columns + 176.0, y + 11.0, "end", 11.0, &format!("{p99:.0}"));
    }
    let foot = top + BAR_STEP * rows.len() as f64 + 22.0;
    let note = if bars.iter().any(|summary| summary.cached) {
        "grey: memory served some of it, so the figure is not the drive's"
    } else {
        "no figure here was served by memory"
    };
    text(svg, 20.0, foot, "start", 11.0, note);
}

struct Row {
    name: String,
    /// GB/s, slowest, fastest, CPU s/GB, p99 in ms.
    figures: [f64; 5],
    colour: &'static str,
}

impl Row {
    fn of(summary: &Summary) -> Row {
        let pages = if summary.candidate.pages == Pages::Auto { page_name(summary.pages) } else { "" };
        let name = format!("{} {pages}", summary.candidate);
        let figures = [summary.gb_s, summary.gb_s_min, summary.gb_s_max, summary.cpu_s_per_gb, summary.p99_ms];
        Row { name: name.trim_end().to_owned(), figures, colour: if summary.cached { CACHED } else { COLOURS[0] } }
    }
}
