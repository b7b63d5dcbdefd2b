//! The profile as a page: one file that needs nothing from anywhere, for light and dark, for a wide window and a phone.

use std::fmt::Write as _;

use crate::cli::advice;
use crate::cli::render::{self, micros, seconds};
use crate::cli::size;
use crate::cli::svg::escaped;
use crate::engine::stats::{StageStats, Stats};

use super::pictures::{self, Part, Ranges};
use super::text::{self, UNKNOWN, tiers, time};
use super::{Ceiling, Report};

const STYLE: &str = include_str!("report.css");

/// The page.
pub fn page(report: &Report) -> String {
    let stats = &report.stats;
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>millstream profile</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    head(&mut html, report);
    tiles(&mut html, report);
    stages(&mut html, stats);
    overlap(&mut html, report);
    experts(&mut html, stats);
    tokens(&mut html, report);
    visits(&mut html, stats);
    memory(&mut html, stats);
    conditions(&mut html, stats);
    html + "</body>\n</html>\n"
}

/// Class of a stage's colour: arithmetic of one kind has one hue, and waiting stands out.
fn class_of(stage: &str) -> &'static str {
    match stage {
        "attention" => "fill-attention",
        "experts" => "fill-experts",
        "shared" | "dense" | "quantize" | "reduce" => "fill-kin",
        "route" | "request" | "hint" => "fill-book",
        "wait" => "fill-wait",
        "embed" | "head" | "sample" => "fill-ends",
        _ => "fill-other",
    }
}

fn section(html: &mut String, title: &str, said: &str, body: &str) {
    let title = escaped(title);
    let _ = write!(html, "<section>\n<h2>{title}</h2>\n{body}");
    if !said.is_empty() {
        let _ = writeln!(html, "<p class=\"soft\">{}</p>", escaped(said));
    }
    *html += "</section>\n";
}

fn part(name: impl Into<String>, value: f64, shown: String, class: &'static str) -> Part {
    Part { name: name.into(), value, shown, class }
}

fn head(html: &mut String, report: &Report) {
    let stats = &report.stats;
    let (model, machine) = (escaped(&text::model(stats)), escaped(&text::machine(stats)));
    let _ = write!(html, "<h1>{}</h1>\n<p class=\"soft\">{model}<br/>{machine}</p>\n", escaped(&stats.model.dir));
    let (verdict, class) = match &report.judgement {
        Some(judgement) => (advice::name(judgement.verdict), advice::name(judgement.verdict)),
        None => ("no verdict", "unknown"),
    };
    let _ = write!(html, "<div class=\"verdict {class}\">\n<p><strong>{verdict}</strong></p>\n");
    match &report.judgement {
        None => *html += "<p>Nothing was generated after the prompt.</p>\n",
        Some(judgement) => {
            let _ = writeln!(html, "<p>{}</p>", escaped(&judgement.why));
            let reason = escaped(&judgement.advice.reason);
            let _ = match &judgement.advice.knob {
                Some(knob) => writeln!(html, "<p>Try <code>{}</code>: {reason}.</p>", escaped(knob)),
                None => writeln!(html, "<p>{reason}.</p>"),
            };
        }
    }
    *html += "</div>\n";
}

fn tiles(html: &mut String, report: &Report) {
    let stats = &report.stats;
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| UNKNOWN.to_owned());
    let rate = |rate: Option<f64>| or_dash(rate.map(|rate| format!("{rate:.2} tok/s")));
    let percent = |share: Option<f64>| or_dash(share.map(|share| format!("{:.1} %", 100.0 * share)));
    *html += "<div class=\"tiles\">\n";
    for (name, value) in [
        ("answer", rate(stats.decode_tok_s)),
        ("prompt", rate(stats.prefill_tok_s)),
        ("a token, median", or_dash(report.tokens.as_ref().map(|tokens| micros(1e3 * tokens.p50)))),
        ("hit rate of experts", percent(stats.experts.hit_rate)),
        ("drive while busy", or_dash(stats.io.gb_s.map(|gb_s| format!("{gb_s:.2} GB/s")))),
        ("overlap efficiency", or_dash(stats.overlap.map(|overlap| format!("{:.2}", overlap.efficiency)))),
    ] {
        let _ =
            writeln!(html, "<div class=\"tile\"><span class=\"soft\">{name}</span><b>{}</b></div>", escaped(&value));
    }
    *html += "</div>\n";
}

fn stages(html: &mut String, stats: &Stats) {
    let parts: Vec<Part> = stats
        .stages
        .0
        .iter()
        .map(|(name, stage)| part(*name, stage.busy_s, time(stage.busy_s), class_of(name)))
        .collect();
    let mut body = pictures::stack(&parts, stats.wall_s, "shares of the stages");
    body += "<div class=\"wide\"><table>\n<tr><th>stage</th><th>time</th><th>share</th><th>median</th><th>p99</th>\
             <th>visits</th></tr>\n";
    for (name, StageStats { busy_s, p50_us, p99_us, n, .. }) in &stats.stages.0 {
        let share = if stats.wall_s > 0.0 { 100.0 * busy_s / stats.wall_s } else { 0.0 };
        let _ = writeln!(
            body,
            "<tr><td><span class=\"dot {}\"></span>{name}</td><td>{}</td><td>{share:.1} %</td><td>{}</td><td>{}</td>\
             <td>{}</td></tr>",
            class_of(name),
            time(*busy_s),
            micros(*p50_us),
            micros(*p99_us),
            size::grouped(*n)
        );
    }
    body += "</table></div>\n";
    let said = format!("{} from the first to the last moment, prompt and answer.", seconds(stats.wall_s));
    section(html, "Where the time went", &said, &body);
}

fn overlap(html: &mut String, report: &Report) {
    let (stats, io) = (&report.stats, &report.stats.io);
    let bar = |name: &str, value: f64, class| part(name, value, time(value), class);
    let (parts, whole) = match &stats.overlap {
        Some(overlap) => (
            vec![
                bar("wall", overlap.wall_s, "fill-other"),
                bar("arithmetic", overlap.compute_busy_s, "fill-experts"),
                bar("drive busy", overlap.disk_busy_s, "fill-memory"),
                bar("waited", overlap.wait_s, "fill-wait"),
            ],
            overlap.wall_s,
        ),
        None => (
            vec![
                bar("wall", stats.wall_s, "fill-other"),
                bar("drive busy", io.busy_s, "fill-memory"),
                bar("waited", io.wait_s, "fill-wait"),
            ],
            stats.wall_s,
        ),
    };
    let mut body = pictures::bars(&parts, whole);
    if let (Some(gb_s), Some(Ceiling { gb_s: most, source })) = (io.gb_s, &report.ceiling) {
        let against = [
            part("drive here", gb_s, format!("{gb_s:.2} GB/s"), "fill-memory"),
            part("it can do", *most, format!("{most:.2} GB/s"), "fill-other"),
        ];
        let _ = write!(
            body,
            "<p>The drive against what it can do ({}):</p>\n{}",
            escaped(source),
            pictures::bars(&against, gb_s.max(*most))
        );
    }
    let said = format!("{}. {}. {}.", text::disk_how(stats), text::disk_felt(stats), text::slab_times(stats));
    section(html, "Drive against arithmetic", &said, &body);
}

fn experts(html: &mut String, stats: &Stats) {
    let asked = stats.experts.requested;
    let classes = ["fill-book", "fill-experts", "fill-kin", "fill-wait"];
    let tiers = tiers(&stats.experts);
    let parts: Vec<Part> = tiers
        .iter()
        .zip(classes)
        .map(|((name, count), class)| {
            let percent = if asked > 0 { 100.0 * *count as f64 / asked as f64 } else { 0.0 };
            part(*name, *count as f64, format!("{} ({percent:.1} %)", size::grouped(*count)), class)
        })
        .collect();
    let mut body = pictures::stack(&parts, asked as f64, "tiers that served experts");
    body += "<ul class=\"legend\">\n";
    for Part { name, shown, class, .. } in &parts {
        let _ = writeln!(body, "<li><span class=\"dot {class}\"></span>{}: {}</li>", escaped(name), escaped(shown));
    }
    body += "</ul>\n";
    let said = [format!("{} experts were asked for.", size::grouped(asked)), text::ahead(&stats.experts)].join(" ");
    section(html, "Where experts came from", said.trim(), &body);
}

fn tokens(html: &mut String, report: &Report) {
    let Some(tokens) = &report.tokens else { return };
    let [p50, p99, max] = [tokens.p50, tokens.p99, tokens.max].map(|ms| micros(1e3 * ms));
    let body = format!(
        "<figure>{}<div class=\"scale\"><span>0</span><span>{max}</span></div>\
         <figcaption>how often a token took so long; the lines are the median, {p50}, and the 99th percentile, {p99}\
         </figcaption></figure>\n\
         <figure>{}<div class=\"scale\"><span>first token</span><span>last token</span></div>\
         <figcaption>the same times in the order of the tokens</figcaption></figure>\n",
        pictures::histogram(&tokens.ms, &[tokens.p50, tokens.p99], "fill-attention", "histogram of token times"),
        pictures::sequence(&tokens.ms, "fill-attention", "token times in order")
    );
    section(html, "How long a token takes", "", &body);
}

fn visits(html: &mut String, stats: &Stats) {
    let stages = &stats.stages.0;
    let Some(scale) = Ranges::of(stages.iter().map(|(_, stage)| (stage.p50_us, stage.p99_us))) else { return };
    let mut body = String::new();
    for (name, stage) in stages {
        let picture = scale.draw(stage.p50_us, stage.p99_us, class_of(name), name);
        let _ = writeln!(
            body,
            "<div class=\"row\"><span>{name}</span>{picture}<span class=\"figure\">{}</span></div>",
            micros(stage.p99_us)
        );
    }
    let ticks: Vec<String> = scale.ticks().map(|us| format!("<span>{}</span>", tick(us))).collect();
    let _ = writeln!(
        body,
        "<div class=\"row\"><span></span><div class=\"scale\">{}</div><span></span></div>",
        ticks.join("")
    );
    section(
        html,
        "How long one visit of a stage takes",
        "Dots are medians, lines reach to the 99th percentile.",
        &body,
    );
}

/// A power of ten of microseconds.
fn tick(us: f64) -> String {
    match us {
        _ if us < 1.0 => format!("{us} us"),
        _ if us < 1e3 => format!("{us:.0} us"),
        _ if us < 1e6 => format!("{:.0} ms", us / 1e3),
        _ => format!("{:.0} s", us / 1e6),
    }
}

fn memory(html: &mut String, stats: &Stats) {
    let memory = &stats.memory;
    let bytes = |name: &str, bytes: u64, class| part(name, bytes as f64, size::show(bytes), class);
    let body = pictures::bars(
        &[
            bytes("allowed", memory.budget, "fill-other"),
            bytes("weights", memory.resident, "fill-attention"),
            bytes("expert cache", memory.cache, "fill-experts"),
            bytes("context", memory.kv, "fill-book"),
            bytes("peak", memory.rss_peak, "fill-memory"),
        ],
        memory.budget.max(memory.rss_peak) as f64,
    );
    section(html, "Memory", "The peak is of the whole process, the program itself included.", &body);
}

fn conditions(html: &mut String, stats: &Stats) {
    let mut rows: Vec<(String, String)> = vec![
        ("prompt".into(), format!("{} tokens", size::grouped(stats.prompt_tokens as u64))),
        ("answer".into(), format!("{} tokens, {}", size::grouped(stats.tokens as u64), render::ended(stats))),
        ("loaded in".into(), seconds(stats.load_s)),
        ("program".into(), format!("millstream {}", env!("CARGO_PKG_VERSION"))),
    ];
    rows.extend(stats.settings.iter().map(|(name, value)| (name.clone(), render::setting_text(name, value))));
    let mut body = String::from("<table class=\"plain\">\n");
    for (name, value) in &rows {
        let _ = writeln!(body, "<tr><td>{}</td><td>{}</td></tr>", escaped(name), escaped(value));
    }
    body += "</table>\n";
    section(html, "Settings", "", &body);
}
