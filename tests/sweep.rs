//! `sweep` as a whole command on the bundled model: every value is measured, all with the same tokens, and what cannot be
//! measured does not take the rest with it.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;

use std::io::{BufRead, BufReader};
use std::process::{Output, Stdio};

use program::{program, ram_besides_program, stderr, stdout};
use serde_json::Value;
use tempfile::TempDir;

/// A generation of eight tokens.
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
    "8",
    "--usage",
    "off",
    "-q",
];

fn sweep(knob: &str, extra: &[&str]) -> Output {
    let home = TempDir::new().unwrap();
    program(home.path()).args([&["sweep", knob], &RUN[..], extra].concat()).output().unwrap()
}

#[track_caller]
fn json(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Ids that `run` generates.
fn run_ids() -> Value {
    let home = TempDir::new().unwrap();
    let output = program(home.path()).args([&["run"], &RUN[..], &["--json"]].concat()).output().unwrap();
    json(&output, 0)["ids"].clone()
}

#[test]
fn every_value_is_measured_as_often_as_asked_and_has_the_tokens_of_run() {
    let report = json(&sweep("threads", &["--values", "3,1,2,1", "-r", "2", "--json"]), 0);
    assert_eq!((&report["schema_version"], &report["sweep"]), (&1.into(), &"threads".into()));
    let values = report["values"].as_array().unwrap();
    assert_eq!(values.iter().map(|v| v["value"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    for value in values {
        let samples: Vec<f64> =
            value["samples_tok_s"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
        assert_eq!(samples.len(), 2);
        let rate = &value["decode_tok_s"];
        let [least, median, most] = ["min", "median", "max"].map(|name| rate[name].as_f64().unwrap());
        assert_eq!((least, most), (samples[0].min(samples[1]), samples[0].max(samples[1])));
        // The middle of two, of which four digits are kept.
        assert!((median - (least + most) / 2.0).abs() <= 1e-3 * most && least > 0.0, "{rate}");
        assert_eq!(value["error"], Value::Null);
    }
    assert_eq!(report["ids"], run_ids());
    assert_eq!((&report["tokens"], &report["prompt_tokens"]), (&8.into(), &5.into()));
    assert_eq!(report["interrupted"], false);
    assert!(report["settings"].get("threads").is_none() && report["settings"]["temp"] == 0.0);
}

#[test]
fn more_memory_reads_less() {
    let values = [12, 40].map(|megabytes| ram_besides_program(megabytes, RUN[1].as_ref())).join(",");
    let report = json(&sweep("ram", &["--values", &values, "-r", "1", "--prefetch", "off", "--json"]), 0);
    let bytes = |at: usize| report["values"][at]["bytes"]["median"].as_f64().unwrap();
    // Forty megabytes hold every expert, which is then read once at most. Guesses would be read in both.
    assert!(bytes(0) > bytes(1) && bytes(1) > 0.0, "{report}");
    assert_eq!(report["ids"], run_ids());
}

#[test]
fn the_range_of_memory_is_found_from_the_least_that_works_to_where_every_expert_is_in_memory() {
    let report = json(&sweep("ram", &["-r", "1", "--json"]), 0);
    let values: Vec<u64> = report["values"].as_array().unwrap().iter().map(|v| v["value"].as_u64().unwrap()).collect();
    assert!(values.len() > 2 && values.is_sorted(), "{values:?}");
    let home = TempDir::new().unwrap();
    let run = |ram: u64| {
        let ram = ram.to_string();
        program(home.path()).args([&["run"], &RUN[..], &["--ram", &ram]].concat()).output().unwrap().status.code()
    };
    assert_eq!((run(values[0]), run(values[0] - 1)), (Some(0), Some(1)), "the least is the least");
    // Five layers of 32 experts; what is read by the largest is read once.
    let most = &report["values"][values.len() - 1];
    assert!(
        most["hit_rate"]["median"].as_f64().unwrap() >= report["values"][0]["hit_rate"]["median"].as_f64().unwrap()
    );
}

#[test]
fn a_value_that_fails_is_told_and_the_others_are_measured() {
    let output = sweep("ram", &["--values", "1M,60M", "-r", "2", "--json"]);
    let report = json(&output, 1);
    assert!(report["values"][0]["error"].as_str().unwrap().contains("the model needs"), "{report}");
    assert_eq!(report["values"][0]["samples_tok_s"].as_array().unwrap().len(), 0);
    assert_eq!(report["values"][1]["samples_tok_s"].as_array().unwrap().len(), 2);
    let output = sweep("ram", &["--values", "1M,60M", "-r", "1"]);
    assert!(stdout(&output).contains("failed") && stdout(&output).contains("the model needs"), "{}", stdout(&output));
    let output = sweep("ram", &["--values", "1M,2M"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(1), ""));
    assert!(stderr(&output).contains("the model needs") && stderr(&output).contains("hint:"), "{}", stderr(&output));
}

#[test]
fn the_table_and_the_picture_show_every_value() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("sweep.svg");
    let output = sweep("threads", &["--values", "1,2", "-r", "1", "--svg", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for words in ["threads", "tok/s [min..max]", "\n      1  ", "\n      2  ", "is enough"] {
        assert!(stdout(&output).contains(words), "no {words:?} in {}", stdout(&output));
    }
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    // A point a value in each of three curves.
    assert_eq!(svg.matches("<circle ").count(), 6);
}

#[test]
fn an_interrupt_shows_what_was_measured() {
    let home = TempDir::new().unwrap();
    // More rounds than anybody waits for.
    let arguments = [&["sweep", "threads"], &RUN[..12], &["--values", "1,2", "-r", "1000", "--json"]].concat();
    let mut child =
        program(home.path()).args(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.starts_with("run ")), "it says which run it is at");
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the child is not waited for yet, so its id is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let drained = std::thread::spawn(move || said.for_each(drop));
    let output = child.wait_with_output().unwrap();
    drained.join().unwrap();
    let report = json(&output, 130);
    assert_eq!((&report["interrupted"], &report["enough"]), (&true.into(), &Value::Null), "nothing is concluded");
    assert!(!report["values"][0]["samples_tok_s"].as_array().unwrap().is_empty(), "{report}");
}

#[test]
fn what_makes_no_sweep_is_refused() {
    for (knob, flags, words) in [
        ("ram", &["--ram", "1G"][..], "such as --values 4G,8G"),
        ("threads", &["-t", "2"], "such as --values 4,8"),
        ("ram", &["--values", "4,8"], "no model fits so few bytes"),
        ("ram", &["--values", "auto"], "sizes"),
        ("ram", &["--values", "0"], "no model fits"),
        ("threads", &["--values", "0"], "from 1 to"),
        ("threads", &["--values", "1G"], "from 1 to"),
        ("threads", &["-r", "0"], "from 1 to"),
        ("threads", &["--stats-json", "x.json"], "--stats-json is of one run"),
        ("threads", &["--timeline", "x.json"], "--timeline is of one run"),
        ("threads", &["--svg", "/proc/none/x.svg"], "cannot write the picture"),
        ("depth", &[], "depth"),
        ("ram", &["-m", "/no/such/model"], "/no/such/model does not exist"),
    ] {
        let output = sweep(knob, flags);
        assert_eq!(output.status.code(), Some(2), "{knob} {flags:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words) && stdout(&output).is_empty(), "{knob} {flags:?}: {}", stderr(&output));
    }
}
