//! `trace` as whole commands: what is recorded is what the router chose, and what is said about it is so.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{ConvertOptions, convert};
use millstream::engine::{Engine, EngineConfig, GuessRule, Memory, PolicyKind, Switch, Switches};
use millstream::store::trace::simulate::{Conditions, Pace, Requests};
use millstream::store::trace::{Recorder, Trace, TraceError};
use millstream_io::{SimConfig, sim_device};
use program::{done, json, program, refused, stderr, stdout};
use tempfile::TempDir;

fn tales() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")
}

fn trace(arguments: &[&str]) -> Output {
    static HOME: OnceLock<TempDir> = OnceLock::new();
    let home = HOME.get_or_init(|| tempfile::tempdir().unwrap()).path();
    program(home).arg("trace").args(arguments).output().unwrap()
}

fn path(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_owned()
}

fn read(path: &str) -> Trace {
    let decoded = Trace::decode(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(decoded.note, None);
    decoded.trace
}

/// What the router chooses for `ids`, by layer: `[ids, top_k]`.
fn chosen(ids: &[u32]) -> Vec<Vec<u16>> {
    let config = EngineConfig { memory: Memory::Slabs(200), context: Some(64), ..EngineConfig::new(0) };
    let mut engine = Engine::open(Checkpoint::open(&tales()).unwrap(), &config).unwrap();
    let mut layers = vec![];
    engine.score_observed(ids, &mut |_: usize, ids: &[u16], _: &[f32]| layers.push(ids.to_vec())).unwrap();
    layers
}

#[test]
fn a_recorded_generation_is_what_the_router_chose() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(&dir, "fox.trace");
    let model = tales();
    let flags =
        ["-m", model.to_str().unwrap(), "--ids", "--ignore-eos", "--temp", "0", "-n", "6", "-p", "17 4 256 99 1023"];
    let output = done(trace(&[&["record", &out][..], &flags].concat()));
    let answer: Vec<u32> = stdout(&output).split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert_eq!(answer.len(), 6);
    let trace = read(&out);
    assert_eq!(trace.header().fingerprint, Checkpoint::open(&model).unwrap().fingerprint());
    assert_eq!((&trace.header().layers[..], trace.header().experts), (&[1, 2, 3, 4, 5][..], 32));
    // The prompt in one step, then one for each token that went back into the model: all but the last.
    assert_eq!((0..trace.steps()).map(|step| trace.rows(step)).collect::<Vec<_>>(), [5, 1, 1, 1, 1, 1]);
    assert_eq!((0..6).map(|step| trace.begins(step)).collect::<Vec<_>>(), [true, false, false, false, false, false]);
    let tokens = [&[17, 4, 256, 99, 1023], &answer[..5]].concat();
    for (layer, expected) in chosen(&tokens).iter().enumerate() {
        let recorded: Vec<u16> = (0..6).flat_map(|step| trace.choice(step, layer).ids.to_vec()).collect();
        assert_eq!(&recorded, expected, "layer {layer}");
    }
}

#[test]
fn a_recorded_text_is_a_step_a_token_and_a_sequence_a_context() {
    let dir = tempfile::tempdir().unwrap();
    let out = path(&dir, "text.trace");
    let model = tales();
    let flags = ["-m", model.to_str().unwrap(), "--text", "--ids", "-c", "4", "-p", "17 4 256 99 1023 5"];
    done(trace(&[&["record", &out][..], &flags].concat()));
    let trace = read(&out);
    assert_eq!((trace.steps(), trace.tokens()), (6, 6));
    assert_eq!((0..6).filter(|&step| trace.begins(step)).collect::<Vec<_>>(), [0, 4]);
    let expected = [chosen(&[17, 4, 256, 99]), chosen(&[1023, 5])];
    for layer in 0..5 {
        let recorded: Vec<u16> = (0..6).flat_map(|step| trace.choice(step, layer).ids.to_vec()).collect();
        assert_eq!(recorded, [&expected[0][layer][..], &expected[1][layer]].concat());
    }
}

#[test]
fn a_cache_of_everything_misses_first_uses_only() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(&dir, "made-up.trace");
    let synth =
        ["synth", &file, "--layers", "3", "--experts", "16", "--top-k", "2", "--tokens", "100", "--skew", "1.5"];
    done(trace(&synth));
    let made = read(&file);
    let (mut different, mut asked) = (BTreeSet::new(), 0);
    for step in 0..made.steps() {
        for layer in 0..3 {
            let ids: BTreeSet<u16> = made.choice(step, layer).ids.iter().copied().collect();
            asked += ids.len();
            different.extend(ids.into_iter().map(|id| (layer, id)));
        }
    }
    assert_eq!(asked, 600, "two different experts of three layers, a hundred times");
    let simulated = json(&done(trace(&["simulate", &file, "--budgets", "25%,100%", "--disk", "2", "--json"])));
    assert_eq!(simulated["working_set"], different.len());
    let expected = 1.0 - different.len() as f64 / 600.0;
    for policy in ["lru", "2q", "arc", "s3-fifo", "lfru", "lookahead", "belady"] {
        let rates = simulated["policies"][policy].as_array().unwrap();
        assert!((rates[1].as_f64().unwrap() - expected).abs() < 1e-6, "{policy}: {rates:?}");
        assert!(rates[0].as_f64().unwrap() <= simulated["policies"]["belady"][0].as_f64().unwrap(), "{policy}");
        // Experts of 18,915,328 bytes, missed so often in a hundred tokens, at 2 GB/s.
        let seconds = different.len() as f64 / 100.0 * 18_915_328.0 / 2e9;
        assert!((simulated["tok_s"][policy][1].as_f64().unwrap() * seconds - 1.0).abs() < 1e-5, "{policy}");
    }
    let again = trace(&["simulate", &file, &file, "--budgets", "100%", "--policies", "lru", "--json"]);
    let twice = json(&done(again))["policies"]["lru"][0].as_f64().unwrap();
    assert!((twice - (1.0 - different.len() as f64 / 1200.0)).abs() < 1e-6, "the second is replayed with a warm cache");
}

/// The store and the replay are two programs: they agree on every hit. That is, under policies for which the order within
/// a union, which is the file's in the one and the experts' in the other, does not matter.
#[test]
fn a_replay_hits_as_often_as_the_engine_did() {
    let prompt: Vec<u32> = (0..150).map(|i| (i * i * 31 + i * 17 + 5) % 4096).collect();
    for slabs in [21, 60] {
        for policy in [PolicyKind::Lfru, PolicyKind::Lookahead] {
            let config = EngineConfig {
                memory: Memory::Slabs(slabs),
                context: Some(256),
                prefill_rows: 1,
                policy,
                switches: Switches { prefetch: Switch::Off, ..Switches::default() },
                ..EngineConfig::new(0)
            };
            let mut engine = Engine::open(Checkpoint::open(&tales()).unwrap(), &config).unwrap();
            let mut recorder = Recorder::new(engine.traced().clone());
            recorder.begin(true);
            let cancel = std::sync::atomic::AtomicBool::new(false);
            engine.route(&prompt, &cancel, &mut recorder).unwrap();
            let replayed = Requests::of(&[&recorder.finish()]).replay(policy, slabs);
            let stats = engine.store().stats();
            assert_eq!((stats.requested, stats.hits), (replayed.requested, replayed.hits), "{policy}, {slabs} slabs");
            assert!(stats.misses > 200, "{policy}: {stats:?}");
        }
    }
}

/// As above, reading ahead on a drive that takes no time. What a layer is guessed to ask for is read the likeliest first in
/// the one and by number in the other, and the first read may take the slot of what is guessed next: where something has to
/// give way, counts differ by as much as that happens.
#[test]
#[allow(clippy::result_large_err, reason = "the error is what the engine takes, and is made once at most")]
fn a_replay_reads_ahead_what_the_engine_did() {
    let prompt: Vec<u32> = (0..150).map(|i| (i * i * 31 + i * 17 + 5) % 4096).collect();
    // Whose experts are one request each, so that a look at the device finds one guess more.
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("int4");
    convert(&tales(), &model, &ConvertOptions::default(), &mut |_| {}).unwrap();
    // Where nothing has to give way both are the same; else an expert that went for another one's guess may be asked for
    // in between, which a hundredth of the requests may see.
    for (ahead, slabs, apart_one_in) in
        [(1, 21, 100), (1, 60, 100), (1, 200, u64::MAX), (2, 21, 100), (2, 60, 100), (2, 200, u64::MAX)]
    {
        for policy in [PolicyKind::Lfru, PolicyKind::Lookahead] {
            let guess = GuessRule { layers: ahead, ..GuessRule::default() };
            let config = EngineConfig {
                memory: Memory::Slabs(slabs),
                context: Some(256),
                prefill_rows: 1,
                policy,
                switches: Switches { prefetch: Switch::On, guess, ..Switches::default() },
                ..EngineConfig::new(0)
            };
            let device = |files: &_, pool: &_| Ok(sim_device(&SimConfig::calm(1), Arc::clone(files), pool)?);
            let mut engine = Engine::open_with(Checkpoint::open(&model).unwrap(), &config, &device).unwrap();
            let mut recorder = Recorder::new(engine.traced().clone());
            recorder.begin(true);
            engine.route(&prompt, &AtomicBool::new(false), &mut recorder).unwrap();
            let conditions = Conditions { ahead, pace: Pace::default() };
            let replayed = Requests::of(&[&recorder.finish()]).replay_under(policy, slabs, &conditions);
            let (stats, reads) = (engine.store().stats(), engine.store().device_stats().reads);
            let case = format!("{policy}, {slabs} slabs, {ahead} ahead: {stats:?} {replayed:?}");
            assert_eq!(stats.requested, replayed.requested, "{case}");
            assert_eq!([stats.late, stats.cancelled, replayed.late, replayed.cancelled], [0; 4], "{case}");
            let counts = [
                (stats.hits + stats.prefetched, replayed.hits),
                (stats.prefetched, replayed.prefetched),
                (stats.guessed, replayed.guessed),
                (stats.wasted, replayed.wasted),
                (reads, replayed.requested - replayed.hits + replayed.guessed),
            ];
            let most_apart = stats.requested / apart_one_in;
            assert!(counts.iter().all(|(ours, theirs)| ours.abs_diff(*theirs) <= most_apart), "{counts:?}: {case}");
            assert!(stats.prefetched > 0 && stats.wasted > 0, "there are guesses of both kinds: {case}");
        }
    }
}

#[test]
fn the_same_seed_makes_up_the_same_trace() {
    let dir = tempfile::tempdir().unwrap();
    let make = |name: &str, seed: &str| {
        let file = path(&dir, name);
        done(trace(&["synth", &file, "--tokens", "20", "--repeat", "0.5", "--topic", "7", "--seed", seed]));
        std::fs::read(file).unwrap()
    };
    assert_eq!(make("a", "5"), make("b", "5"));
    assert_ne!(make("a", "5"), make("b", "6"));
}

#[test]
fn a_report_counts_what_is_in_the_trace() {
    let dir = tempfile::tempdir().unwrap();
    let (file, picture) = (path(&dir, "x.trace"), path(&dir, "heat.svg"));
    done(trace(&["synth", &file, "--layers", "2", "--experts", "300", "--top-k", "3", "--tokens", "50"]));
    let report = json(&done(trace(&["report", &file, "--json", "--svg", &picture])));
    let layer = report["layers"][1]["selections"].as_array().unwrap();
    assert_eq!((layer.len(), layer.iter().map(|n| n.as_u64().unwrap()).sum::<u64>()), (300, 150));
    let svg = std::fs::read_to_string(picture).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("h3.0v6.0").count() + svg.matches("h2.9v6.0").count(), 600, "a cell an expert");
    let text = done(trace(&["report", &file]));
    assert!(stdout(&text).contains("2 routed layers of 300 experts, 3 a token"), "{}", stdout(&text));
}

#[test]
fn what_is_left_of_a_trace_is_used_and_what_is_none_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(&dir, "x.trace");
    done(trace(&["synth", &file, "--layers", "2", "--tokens", "10"]));
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    let output = done(trace(&["simulate", &file, "--policies", "lru"]));
    assert!(stderr(&output).contains("cut short") && stderr(&output).contains("the 9 steps before are used"));
    assert!(stdout(&output).contains("9 tokens in 9 steps"));

    std::fs::write(&file, &whole[..37]).unwrap();
    assert_eq!(Trace::decode(&whole[..37]), Err(TraceError::Header));
    // A header of two layers takes 38 bytes; its checksum is cut.
    refused(&trace(&["report", &file]), 1, &["cannot read the trace", "header is damaged", "hint"]);
    std::fs::write(&file, "{}").unwrap();
    refused(&trace(&["report", &file]), 1, &["not a routing trace"]);
    refused(&trace(&["report", &path(&dir, "nowhere")]), 2, &["cannot read the trace", "No such file"]);
    refused(&trace(&["report", dir.path().to_str().unwrap()]), 1, &["cannot read the trace", "directory"]);

    let other = path(&dir, "other.trace");
    std::fs::write(&file, &whole).unwrap();
    done(trace(&["synth", &other, "--layers", "3", "--tokens", "10"]));
    refused(&trace(&["simulate", &file, &other]), 2, &["different models", "2 routed layers", "3 routed layers"]);
}

#[test]
fn what_cannot_be_asked_for_is_a_usage_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = path(&dir, "x.trace");
    for bad in [
        &["simulate"][..],
        &["simulate", "x", "--budgets", "0%"],
        &["simulate", "x", "--policies", "best"],
        &["simulate", "x", "--disk", "0"],
        &["simulate", "x", "--matmul", "5"],
        &["synth", &file, "--layers", "0"],
        &["synth", &file, "--top-k", "65"],
        &["synth", &file, "--repeat", "2"],
        &["synth", &file, "--skew", "nan"],
        &["record"],
        &["record", "/no/such/dir/x.trace", "-p", "a"],
        &["record", &file, "--text", "--json", "-p", "a"],
        &["replay", "x"],
    ] {
        let output = trace(bad);
        assert_eq!(output.status.code(), Some(2), "{bad:?}: {}", stderr(&output));
    }
    assert!(!Path::new(&file).exists());
}

/// What of `asked`, layer by layer and token by token of one sequence, is in `guesses`, counted as sets.
fn share(asked: &[(usize, BTreeSet<u16>)], guesses: &[(usize, BTreeSet<u16>)]) -> f64 {
    let common: usize =
        asked.iter().zip(guesses).map(|((_, asked), (_, guess))| asked.intersection(guess).count()).sum();
    common as f64 / asked.iter().map(|(_, asked)| asked.len()).sum::<usize>() as f64
}

#[test]
fn guesses_are_recorded_and_judged_alike_by_the_engine_and_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let (out, stats) = (path(&dir, "fox.trace"), path(&dir, "stats.json"));
    let model = tales();
    // Nothing is read ahead: the guesses are made for the recorder.
    let flags =
        ["-m", model.to_str().unwrap(), "--ids", "--ignore-eos", "--temp", "0", "-n", "30", "--prefetch", "off"];
    let prompt = ["-p", "17", "--stats-json", &stats];
    done(trace(&[&["record", &out][..], &flags, &prompt].concat()));
    let trace_of = read(&out);
    let set = |ids: &[u16]| ids.iter().copied().collect::<BTreeSet<u16>>();
    let steps = trace_of.steps();
    let all = |of: &dyn Fn(usize, usize) -> Vec<u16>, from: usize, first: usize| -> Vec<(usize, BTreeSet<u16>)> {
        (from..steps)
            .flat_map(|step| (first..5).map(move |layer| (step, layer)))
            .map(|(s, l)| (s, set(&of(s, l))))
            .collect()
    };
    let chosen = |step: usize, layer: usize| trace_of.choice(step, layer).ids.to_vec();
    let made = &trace_of;
    let guessed = |ahead: usize| move |step: usize, layer: usize| made.choice(step, layer).guesses[ahead].to_vec();
    let one = share(&all(&chosen, 0, 0), &all(&guessed(0), 0, 0));
    // The first routed layer is the model's second: nobody is two layers before it.
    assert!((0..steps).all(|step| trace_of.choice(step, 0).guesses[1].is_empty()));
    let two = share(&all(&chosen, 0, 1), &all(&guessed(1), 0, 1));
    let before = share(&all(&chosen, 1, 0), &all(&|step, layer| chosen(step - 1, layer), 1, 0));
    let report = json(&done(trace(&["report", &out, "--json"])));
    let stats: serde_json::Value = serde_json::from_slice(&std::fs::read(stats).unwrap()).unwrap();
    for (name, expected) in
        [("lookahead_recall", one), ("lookahead_recall_two_ahead", two), ("previous_token_recall", before)]
    {
        assert!((report[name].as_f64().unwrap() - expected).abs() < 1e-6, "{name}: {report}");
        assert!((stats["experts"][name].as_f64().unwrap() - expected).abs() < 1e-6, "{name}: {}", stats["experts"]);
    }
    assert!(one > 0.5 && one > before, "{one} {before}");
    assert_eq!(stats["experts"]["prefetch_issued"], 0);
}

#[test]
fn guesses_can_be_replayed_and_only_where_there_are_some() {
    let dir = tempfile::tempdir().unwrap();
    let (out, blind) = (path(&dir, "fox.trace"), path(&dir, "blind.trace"));
    let model = tales();
    let flags =
        ["-m", model.to_str().unwrap(), "--ids", "--text", "-p", "17 4 256 99 1023 5 77 300 12 8 9 1111 2048 6"];
    done(trace(&[&["record", &out][..], &flags].concat()));
    let simulate = |more: &[&str]| {
        let arguments = ["simulate", &out, "--budgets", "25%,100%", "--policies", "lru,lookahead", "--json"];
        json(&done(trace(&[&arguments[..], more].concat())))
    };
    let (off, on) = (simulate(&[]), simulate(&["--prefetch", "on"]));
    assert!(off.get("prefetch").is_none());
    let number = |json: &serde_json::Value, name: &str| json[name]["lru"][1].as_f64().unwrap();
    let of = |json: &serde_json::Value, name: &str| json["prefetch"][name]["lru"][1].as_u64().unwrap();
    assert!(number(&on, "policies") > number(&off, "policies"));
    // Without a drive's speed every guess is read in time.
    assert_eq!((of(&on, "late"), of(&on, "cancelled")), (0, 0));
    assert_eq!(of(&on, "issued"), of(&on, "used") + of(&on, "wasted"));
    let two = simulate(&["--prefetch", "on", "--lookahead", "2"]);
    assert!(of(&two, "issued") > of(&on, "issued"));
    let paced = simulate(&["--prefetch", "on", "--disk", "1", "--matmul", "5", "--rest", "3"]);
    assert!(paced["tok_s_layered"]["lru"][0].as_f64().unwrap() > 0.0);
    let shown = done(trace(&["simulate", &out, "--prefetch", "on", "--disk", "1"]));
    let text = stdout(&shown);
    assert!(text.contains("of that, wrong guesses") && text.contains("tok/s, layer by layer"), "{text}");

    done(trace(&["synth", &blind, "--layers", "2", "--tokens", "10"]));
    refused(&trace(&["simulate", &blind, "--prefetch", "on"]), 2, &["hold no guess", "hint", "record them again"]);
    for bad in [&["--lookahead", "3"][..], &["--prefetch", "auto"], &["--rest", "-1"]] {
        assert_eq!(trace(&[&["simulate", &out][..], bad].concat()).status.code(), Some(2), "{bad:?}");
    }
}

#[test]
fn how_far_to_read_ahead_is_refused_where_nothing_is_read_ahead() {
    for (flags, words) in
        [(&["--lookahead", "2"][..], "--prefetch"), (&["--lookahead", "2", "--prefetch", "off"], "off")]
    {
        refused(&trace(&[&["simulate", "none.trace"][..], flags].concat()), 2, &["--lookahead", words]);
    }
}
