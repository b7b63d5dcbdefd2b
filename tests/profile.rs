//! `profile` as a whole command on the bundled model: its numbers add up, and are those of the run it reports on.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::process::Output;

use program::{done, json, program, ram_besides_program, stderr, stdout};
use serde_json::Value;
use tempfile::TempDir;

/// A generation of twelve tokens, with room for few experts.
const RUN: [&str; 13] = [
    "-m",
    concat!(env!("CARGO_MANIFEST_DIR"), "/models/glm-tales"),
    "--ids",
    "-p",
    "17 4 256 99 1023",
    "--ignore-eos",
    "--temp",
    "0",
    "-n",
    "12",
    "--usage",
    "off",
    "-q",
];

/// Of which the weights that are always there take some six.
fn ram() -> String {
    ram_besides_program(20, RUN[1].as_ref())
}

fn profile(extra: &[&str]) -> Output {
    let home = TempDir::new().unwrap();
    program(home.path()).args([&["profile"], &RUN[..], &["--ram", &ram()], extra].concat()).output().unwrap()
}

#[test]
fn the_stages_add_up_to_the_wall_and_the_experts_to_what_was_asked_for() {
    let report = json(&done(profile(&["--json"])));
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("no number in {report}"));
    let wall = number(&report["wall_s"]);
    let stages: f64 = report["stages"].as_object().unwrap().values().map(|stage| number(&stage["busy_s"])).sum();
    assert!((stages - wall).abs() <= 0.02 * wall, "{stages} of {wall}");
    assert!((number(&report["prefill_s"]) + number(&report["decode_s"]) - wall).abs() <= 0.02 * wall);
    let experts = &report["experts"];
    let hits = ["hit_pinned", "hit_cached", "hit_prefetched", "missed"];
    let served: u64 = hits.iter().filter_map(|tier| experts[tier].as_u64()).sum();
    assert_eq!(Some(served), experts["requested"].as_u64());
    // Five routed layers; the prompt asks for a union, each of eleven steps for four experts a layer.
    assert!(served >= 11 * 5 * 4, "{experts}");
    // Eleven steps lie between twelve tokens.
    assert_eq!(report["token_ms"]["n"], 11);
    let ms = |name: &str| number(&report["token_ms"][name]);
    assert!(0.0 < ms("p50") && ms("p50") <= ms("p99") && ms("p99") <= ms("max"));
}

#[test]
fn reads_are_timed_one_by_one_and_the_time_in_the_queue_apart() {
    for device in ["threads", "auto"] {
        let report = json(&done(profile(&["--json", "--device", device])));
        let io = &report["io"];
        let number = |name: &str| io[name].as_f64().unwrap_or_else(|| panic!("no {name} in {io}"));
        let (p50, p99) = (number("slab_p50_ms"), number("slab_p99_ms"));
        assert!(0.0 < p50 && p50 <= p99, "{io}");
        // No read takes longer than there was one in flight, and half of them take the median or longer; the percentiles
        // have two digits.
        assert!(p99 <= 1010.0 * number("busy_s"), "{io}");
        let added_up = number("queued_s") + number("service_s");
        assert!(added_up >= 0.99 * 0.5 * number("reads") * p50 / 1e3, "{io}");
        // While one is in flight it is in the queue or served. Each is rounded to a nanosecond.
        assert!(added_up + 3e-9 >= number("busy_s"), "{io}");
        // A ring's reads through the page cache are made by the kernel's workers.
        if device == "threads" || io["direct"] == true {
            assert!(number("cpu_s") > 0.0 && number("cpu_s") < 100.0, "{io}");
        }
    }
    let shown = done(profile(&["--device", "threads"]));
    let text = stdout(&shown);
    let line = text.lines().find(|line| line.contains("One expert takes")).unwrap();
    assert!(!line.contains(" - ") && line.contains("the threads that read took"), "{line}");
}

#[test]
fn it_is_the_run_that_it_reports_on() {
    let home = TempDir::new().unwrap();
    let ram = ram();
    let arguments = [&["run"], &RUN[..], &["--ram", &ram, "--json"]].concat();
    let run = json(&done(program(home.path()).args(arguments).output().unwrap()));
    let report = json(&done(profile(&["--json"])));
    assert_eq!(report["ids"], run["ids"]);
    assert_eq!(report["ids"].as_array().unwrap().len(), 12);
    for (key, value) in run.as_object().unwrap() {
        assert!(value.is_null() || report.get(key).is_some(), "run has {key}, and profile has not");
    }
}

#[test]
fn the_answer_is_shown_when_asked_for_and_the_report_stands_on_stdout() {
    let quiet = done(profile(&[]));
    let answer = "stage";
    assert!(stdout(&quiet).starts_with("model "), "{}", stdout(&quiet));
    for words in [answer, "\nattention ", "\nexperts ", "\nall ", "\ndisk ", "\noverlap ", "\nmemory "] {
        assert!(stdout(&quiet).contains(words), "no {words:?} in {}", stdout(&quiet));
    }
    assert!(!stdout(&quiet).contains("NaN") && !stdout(&quiet).contains("inf "), "{}", stdout(&quiet));
    assert_eq!(stderr(&quiet), "");
    let ids = json(&done(profile(&["--json"])))["ids"].clone();
    let ids: Vec<String> = ids.as_array().unwrap().iter().map(Value::to_string).collect();
    let home = TempDir::new().unwrap();
    let shown = done(
        program(home.path())
            .args([&["profile"], &RUN[..RUN.len() - 1], &["--ram", &ram(), "-v"]].concat())
            .output()
            .unwrap(),
    );
    assert_eq!(stdout(&shown).lines().next(), Some(ids.join(" ").as_str()));
}

#[test]
fn the_statistics_go_to_a_file_too() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("stats.json");
    let output = done(profile(&["--stats-json", path.to_str().unwrap(), "--json"]));
    let written: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(written, json(&output));
    assert_eq!(written["schema_version"], 1);
}

#[test]
fn the_drive_is_held_against_what_it_can_do() {
    let report = json(&done(profile(&["--disk", "1000", "--json"])));
    assert_eq!(report["ceiling"]["gb_s"], 1000.0);
    let share = report["ceiling"]["share"].as_f64().unwrap();
    let expected = report["io"]["gb_s"].as_f64().unwrap() / 1000.0;
    // Four digits are kept.
    assert!((share - expected).abs() <= 1e-3 * expected, "{share} {expected}");
    let output = done(profile(&["--disk", "1000"]));
    assert!(stdout(&output).contains("of the 1000.00 GB/s it can do (--disk)"), "{}", stdout(&output));
    assert_eq!(json(&done(profile(&["--json"])))["ceiling"], Value::Null);
}

#[test]
fn what_cannot_be_is_refused_before_a_model_is_loaded() {
    for (flags, words) in [
        (&["--disk", "0"][..], "above 0"),
        (&["--disk", "fast"], "GB/s"),
        (&["--tempo", "1"], "--tempo"),
        (&["-n", "0"], "-n 0"),
        (&["--stats-json", "/proc/none/stats.json"], "cannot write the statistics"),
        (&["--html", "/proc/none/page.html"], "cannot write the page"),
        (&["-m", "/no/such/model"], "/no/such/model does not exist"),
    ] {
        let output = profile(flags);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words) && stdout(&output).is_empty(), "{flags:?}: {}", stderr(&output));
    }
    let output = profile(&["--ram", "1M"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("the model needs"), "{}", stderr(&output));
}

/// What stands between tags, and the tags in order; panics where one is not closed, or closed out of turn.
fn parsed(html: &str) -> Vec<&str> {
    let body = html.strip_prefix("<!DOCTYPE html>").unwrap();
    let (mut open, mut seen, mut rest) = (Vec::new(), Vec::new(), body);
    while let Some(at) = rest.find(['<', '>']) {
        assert!(rest[at..].starts_with('<'), "a > outside of a tag: {}", &rest[..at]);
        let end = at + rest[at..].find('>').unwrap();
        let tag = &rest[at + 1..end];
        assert!(!tag.contains('<'), "a < inside of a tag: {tag}");
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closed out of turn");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap();
        // Quotes come in pairs, so no text leaves its attribute.
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        seen.push(tag);
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert_eq!(open, Vec::<&str>::new(), "never closed");
    seen
}

#[test]
fn the_page_is_whole_and_needs_nothing_from_anywhere() {
    // A directory whose name would be a tag.
    let dir = TempDir::new().unwrap();
    let model = dir.path().join("<img src=x>&\"'");
    std::os::unix::fs::symlink(RUN[1], &model).unwrap();
    let path = dir.path().join("page.html");
    let output = profile(&["-m", model.to_str().unwrap(), "--html", path.to_str().unwrap(), "--disk", "5"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let html = std::fs::read_to_string(&path).unwrap();
    let tags = parsed(&html);
    for nothing in ["<script", "http", "<link", "<img", "@import", "url(", "NaN", "inf%"] {
        assert!(!html.contains(nothing), "{nothing} in the page");
    }
    assert!(html.contains("&lt;img src=x&gt;&amp;&quot;&#39;"), "the name is there as text");
    for part in ["Where the time went", "Drive against arithmetic", "Where experts came from", "How long a token takes"]
    {
        assert!(html.contains(part), "no {part:?}");
    }
    assert!(tags.iter().any(|tag| tag.starts_with("meta name=\"viewport\"")));
    assert!(tags.iter().filter(|tag| tag.starts_with("svg ")).count() > 10);
    assert!(html.contains("prefers-color-scheme: dark"));
    // As many rows as stages.
    let stages = json(&done(profile(&["--json"])))["stages"].as_object().unwrap().len();
    let table = &html[html.find("<table>").unwrap()..html.find("</table>").unwrap()];
    assert!(table.matches("<tr>").count().abs_diff(stages + 1) <= 1, "{table}");
}

#[test]
fn the_verdict_of_run_comes_with_a_knob_that_fits_the_machine() {
    let report = json(&done(profile(&["--json", "--pipeline", "off", "--io", "drop", "--prefetch", "off"])));
    let verdict = report["verdict"].as_str().unwrap();
    assert!(["disk-bound", "compute-bound", "attention-bound", "balanced"].contains(&verdict), "{verdict}");
    let advice = report["advice"].as_str().unwrap();
    if let Some(knob) = report["knob"].as_str() {
        assert!(advice.starts_with(knob), "{advice}");
    }
    if verdict == "disk-bound" {
        assert_eq!(report["knob"], "--pipeline auto");
    }
    let output = done(profile(&[]));
    assert!(
        stdout(&output).contains("\nverdict   ") && stdout(&output).contains("\nadvice    "),
        "{}",
        stdout(&output)
    );
    let one = json(&done(profile(&["-n", "1", "--json"])));
    assert!(one.get("verdict").is_none() && one["token_ms"].is_null(), "one token has no step: {one}");
}

#[test]
fn a_file_that_cannot_be_written_does_not_cost_the_report() {
    for flag in ["--html", "--stats-json", "--timeline"] {
        let output = profile(&[flag, "/dev/full"]);
        assert_eq!(output.status.code(), Some(1), "{flag}: {}", stderr(&output));
        assert!(stderr(&output).contains("to /dev/full"), "{flag}: {}", stderr(&output));
        assert!(stdout(&output).contains("at the 99th percentile"), "{flag}: {}", stdout(&output));
    }
    let home = TempDir::new().unwrap();
    let run = [&["run"], &RUN[..RUN.len() - 1]].concat();
    for flag in ["--stats-json", "--timeline"] {
        let output = program(home.path()).args(&run).args([flag, "/dev/full"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{flag}: {}", stderr(&output));
        assert!(stderr(&output).contains("tok/s") && stderr(&output).contains("to /dev/full"), "{}", stderr(&output));
    }
    let census = ["census", RUN[1], "--svg", "/dev/full"];
    let output = program(home.path()).args(census).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains("all that is used"), "{}", stdout(&output));
}
