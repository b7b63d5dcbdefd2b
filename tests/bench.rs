//! `bench` as a whole command: what is timed, on which tokens, and what it refuses.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::process::Output;

use program::{done, json, program, ram_besides_program, refused, stdout};
use serde_json::Value;
use tempfile::TempDir;

/// Random weights: 272 token ids, 16 experts a layer.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-glm-moe-dsa");

fn bench(extra: &[&str]) -> Output {
    let home = TempDir::new().unwrap();
    program(home.path()).args(["bench", "-m", TINY, "-q"]).args(extra).output().unwrap()
}

/// A file with these token ids, in a directory of its own.
fn ids_file(ids: &str) -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("ids.json");
    std::fs::write(&path, ids).unwrap();
    let path = path.display().to_string();
    (dir, path)
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn every_test_is_timed_as_often_as_asked_and_its_mean_is_that_of_its_samples() {
    let report = json(&done(bench(&["-p", "16,32", "-n", "4", "--pg", "8,2", "-d", "0,20", "-r", "3", "--json"])));
    let tests = report["tests"].as_array().unwrap();
    let names: Vec<_> = tests.iter().map(|test| test["name"].as_str().unwrap()).collect();
    let shallow = ["pp16", "pp32", "tg4", "pp8+tg2"];
    let deep = shallow.map(|name| format!("{name}@d20"));
    assert_eq!(names, shallow.iter().copied().chain(deep.iter().map(String::as_str)).collect::<Vec<_>>());
    for test in tests {
        let samples = numbers(&test["samples_tok_s"]);
        assert_eq!(samples.len(), 3);
        let mean = samples.iter().sum::<f64>() / 3.0;
        let shown = test["mean"].as_f64().unwrap();
        // Each of them is rounded to four digits.
        assert!((shown - mean).abs() <= 1e-3 * mean, "{shown} of {samples:?}");
        assert!(test["sd"].as_f64().unwrap() >= 0.0 && test["cold"] == false);
    }
    assert_eq!(tests.iter().map(|t| t["n"].as_u64().unwrap()).collect::<Vec<_>>(), [16, 32, 4, 10, 16, 32, 4, 10]);
}

#[test]
fn the_same_tokens_take_the_same_experts_whatever_the_settings_and_others_take_others() {
    let (_a, ids) = ids_file("[17, 4, 256, 99, 200, 201, 202, 203, 204, 205]");
    let (_b, other) = ids_file("[17, 4, 256, 99, 200, 201, 202, 203, 204, 206]");
    let routing = |file: &str, extra: &[&str]| -> Vec<(String, String)> {
        let always = ["--replay", file, "--prompt-tokens", "6", "-r", "2", "--json"];
        let report = json(&done(bench(&[&always, extra].concat())));
        let text = |test: &Value, key: &str| test[key].as_str().unwrap().to_owned();
        report["tests"].as_array().unwrap().iter().map(|t| (text(t, "name"), text(t, "routing"))).collect()
    };
    let first = routing(&ids, &[]);
    assert_eq!(first.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["pp6", "tg4@d6"]);
    let ram = ram_besides_program(3, TINY.as_ref());
    for settings in [
        &["--cold"][..],
        &["--pipeline", "off", "--prefetch", "on"],
        &["-t", "1", "--kernels", "scalar"],
        &["--ram", &ram],
    ] {
        assert_eq!(routing(&ids, settings), first, "{settings:?}");
    }
    assert_ne!(routing(&other, &[])[1], first[1]);
}

#[test]
fn what_is_in_memory_tells_cold_from_warm() {
    let rate = |extra: &[&str]| {
        // Without guesses: one that is wrong reads an expert that no token has asked for yet.
        let flags = ["-p", "0", "-n", "12", "-r", "2", "--prefetch", "off", "--json"];
        let report = json(&done(bench(&[&flags, extra].concat())));
        let test = &report["tests"][0];
        (test["cold"].as_bool().unwrap(), test["hit_rate"].as_f64().unwrap(), test["bytes_per_token"].as_f64().unwrap())
    };
    // All experts fit: done once before, everything is there, and nothing is read.
    assert_eq!(rate(&[]), (false, 1.0, 0.0));
    let (cold, hits, bytes) = rate(&["--cold"]);
    assert!(cold && hits < 1.0 && bytes > 0.0, "{hits} {bytes}");
}

#[test]
fn prompt_and_answer_of_a_replay_have_hits_and_bytes_of_their_own() {
    // The answer repeats the prompt's tokens, whose experts are in memory by then, all but where routing differs.
    let (_dir, ids) = ids_file("[17, 17, 17, 17, 17, 17, 17, 17]");
    let flags = ["--replay", &ids, "--prompt-tokens", "4", "--cold", "-r", "1", "--prefetch", "off", "--json"];
    let report = json(&done(bench(&flags)));
    let [prompt, answer] = [0, 1].map(|at| &report["tests"][at]);
    let of = |test: &Value, name: &str| test[name].as_f64().unwrap();
    assert!(of(prompt, "hit_rate") < of(answer, "hit_rate"), "{report}");
    assert!(of(prompt, "bytes_per_token") > of(answer, "bytes_per_token"), "{report}");
    assert_eq!((&prompt["efficiency"], &report["machine"]["kernels"]), (&Value::Null, &kernels()), "{report}");
}

/// What `run` calls the kernels of this machine.
fn kernels() -> Value {
    let home = TempDir::new().unwrap();
    let run = ["run", "-q", "--raw", "-p", "x", "-n", "1", "--json", "-m", TINY];
    let output = done(program(home.path()).args(run).output().unwrap());
    json(&output)["machine"]["kernels"].clone()
}

#[test]
fn with_too_little_memory_shorter_tests_are_the_way_out_and_not_a_flag_that_is_not_there() {
    let output = bench(&["--ram", "1M"]);
    refused(&output, 1, &["the smallest --ram that works is", "shorter tests (-p, -n, -d)"]);
    assert!(!program::stderr(&output).contains("(-c)"), "{}", program::stderr(&output));
}

#[test]
fn tables_have_a_row_a_rate() {
    let text = done(bench(&["-p", "8", "-n", "2", "-r", "1"]));
    let rows: Vec<&str> = stdout(&text).lines().filter(|line| line.starts_with("| tiny-glm-moe-dsa")).collect();
    assert!(rows.len() == 2 && rows[0].contains("| pp8 |") && rows[1].contains("| tg2 |"), "{rows:?}");
    // The header of that model says BF16 of all matrices.
    assert!(rows.iter().all(|row| row.contains(" experts bf16 / dense bf16 |")), "{rows:?}");
    let columns = |line: &str| line.matches('|').count();
    assert!(stdout(&text).lines().take(4).all(|line| columns(line) == columns(rows[0])));
    let text = done(bench(&["-p", "8", "-n", "2", "-r", "1", "-o", "csv"]));
    let fields: Vec<usize> = stdout(&text).lines().map(|line| line.split(',').count()).collect();
    assert_eq!(fields, [14; 3]);
    let text = done(bench(&["-p", "8", "-n", "2", "-r", "1", "-o", "sql"]));
    let statements: Vec<&str> = stdout(&text).lines().filter(|line| line.contains("millstream_bench")).collect();
    assert!(statements[0].starts_with("CREATE TABLE IF NOT EXISTS") && statements.len() == 3, "{statements:?}");
    assert!(statements[2].starts_with("INSERT INTO") && statements[2].contains("'tg2', 2, 0, 0, "), "{statements:?}");
    let text = done(bench(&["-p", "8", "-n", "2", "-r", "1", "-o", "jsonl"]));
    let names: Vec<Value> =
        stdout(&text).lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["name"].clone()).collect();
    assert_eq!(names, ["pp8", "tg2"]);
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_is() {
    let (_dir, ids) = ids_file("[1, 2, 3]");
    let (_dir2, beyond) = ids_file("[1, 272]");
    let (_dir3, object) = ids_file("{\"ids\": [1]}");
    let (_dir4, none) = ids_file("[]");
    for (flags, words) in [
        (&["-p", "0", "-n", "0"][..], &["every length is 0"][..]),
        (&["-p", "x"], &["neither a number of tokens nor a range"]),
        (&["-p", "9-3"], &["does not go on from 9 to 3"]),
        (&["-p", "1-200", "-d", "0,1"], &["400 tests", "256"]),
        (&["--cold", "-d", "8"], &["--cold", "-d"]),
        (&["-p", "4000000000"], &["longest context"]),
        (&["-p", "100000"], &["100000", "context"]),
        (&["--replay", &ids], &["--prompt-tokens"]),
        (&["--replay", &ids, "--prompt-tokens", "4"], &["4", "3 ids"]),
        (&["--replay", &none, "--prompt-tokens", "0"], &["0 ids"]),
        (&["--replay", &beyond, "--prompt-tokens", "1"], &["272", "vocabulary"]),
        (&["--replay", &object, "--prompt-tokens", "1"], &["JSON list of token ids"]),
        (&["--replay", "/nowhere/ids.json", "--prompt-tokens", "1"], &["/nowhere/ids.json", "No such file"]),
        (&["--replay", &ids, "--prompt-tokens", "1", "-p", "8"], &["--replay"]),
        (&["-o", "xml"], &["md, csv, json, jsonl, sql"]),
    ] {
        refused(&bench(flags), 2, words);
    }
}
