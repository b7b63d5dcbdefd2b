//! The program as people run it: whole commands, their output, their exit codes.

#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use program::{done, json, program, refused, stderr, stdout};
use serde_json::Value;
use tempfile::TempDir;

const FOX: &str = "Tell me a story about a fox.";

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")
}

/// One cache for all tests that do not care where it is.
fn cache() -> &'static Path {
    static CACHE: OnceLock<TempDir> = OnceLock::new();
    CACHE.get_or_init(|| tempfile::tempdir().unwrap()).path()
}

fn millstream(arguments: &[&str]) -> Command {
    let mut command = program(cache());
    command.args(arguments);
    command
}

fn run(arguments: &[&str]) -> Output {
    millstream(&[&["run"], arguments].concat()).output().unwrap()
}

#[track_caller]
fn answer(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output).to_owned()
}

fn reference(prompt: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/glm-tales-ids.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["prompts"][prompt].take()
}

fn list(ids: &Value) -> String {
    ids.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(" ")
}

/// The FP8 checkpoint with exact arithmetic, which gives the reference's tokens.
fn exact<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    static DIR: OnceLock<String> = OnceLock::new();
    let dir = DIR.get_or_init(|| bundled().to_str().unwrap().to_owned());
    [&["-m", dir, "--activations", "f32", "--temp", "0", "-n", "48", "--ignore-eos"], arguments].concat()
}

#[test]
fn a_chat_is_the_text_of_the_reference() {
    let expected = reference("chat")["greedy_text"].as_str().unwrap().to_owned();
    assert_eq!(answer(&exact(&["-p", FOX])), expected + "\n");
}

#[test]
fn a_raw_prompt_gets_nothing_added() {
    for prompt in ["unicode", "single"] {
        let reference = reference(prompt);
        let text = answer(&exact(&["--raw", "-p", reference["text"].as_str().unwrap()]));
        assert_eq!(text, reference["greedy_text"].as_str().unwrap().to_owned() + "\n", "{prompt}");
    }
}

#[test]
fn ids_go_in_and_come_out() {
    let reference = reference("short");
    let prompt = list(&reference["ids"]);
    assert_eq!(answer(&exact(&["--ids", "-q", "-p", &prompt])), list(&reference["greedy"]) + "\n");
    let json: Value =
        serde_json::from_str(&answer(&exact(&["--ids", "--json", "-p", &prompt.replace(' ', ", ")]))).unwrap();
    assert_eq!(json["ids"], reference["greedy"]);
    assert_eq!(json["text"], reference["greedy_text"]);
    assert_eq!(json["prompt_tokens"], 10);
}

#[test]
fn prompts_come_from_files_and_pipes() {
    let expected = answer(&["-q", "--temp", "0", "-n", "8", "-p", FOX]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, format!("{FOX}\n")).unwrap();
    assert_eq!(answer(&["-q", "--temp", "0", "-n", "8", "-f", file.to_str().unwrap()]), expected);
    for arguments in [&["run", "-q", "--temp", "0", "-n", "8"][..], &["run", "-q", "--temp", "0", "-n", "8", "-f", "-"]]
    {
        let mut child =
            millstream(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(format!("{FOX}\r\n").as_bytes()).unwrap();
        assert_eq!(stdout(&child.wait_with_output().unwrap()), expected);
    }
}

#[test]
fn the_first_use_converts_once_even_when_two_begin() {
    let cache = tempfile::tempdir().unwrap();
    let begin = || {
        millstream(&["run", "--temp", "0", "-n", "4", "-p", FOX])
            .env("XDG_CACHE_HOME", cache.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let both = [begin(), begin()].map(|child| child.wait_with_output().unwrap());
    for output in &both {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
        assert_eq!(stdout(output), stdout(&both[0]));
    }
    assert!(both.iter().any(|output| stderr(output).contains("first use: converting")));
    let third = begin().wait_with_output().unwrap();
    assert!(!stderr(&third).contains("first use"), "{}", stderr(&third));
    let left: Vec<_> =
        std::fs::read_dir(cache.path().join("millstream")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_damaged_copy_is_made_anew() {
    let cache = tempfile::tempdir().unwrap();
    let go = || {
        millstream(&["run", "--temp", "0", "-n", "4", "-p", FOX]).env("XDG_CACHE_HOME", cache.path()).output().unwrap()
    };
    let first = go();
    let container = std::fs::read_dir(cache.path().join("millstream")).unwrap().next().unwrap().unwrap().path();
    let shard = std::fs::read_dir(&container).unwrap().map(|e| e.unwrap().path());
    let shard = shard.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).max().unwrap();
    std::fs::File::options().write(true).open(&shard).unwrap().set_len(1000).unwrap();
    let second = go();
    assert!(stderr(&second).contains("made anew"), "{}", stderr(&second));
    assert_eq!(stdout(&second), stdout(&first));
}

/// The only entry of the cache.
fn cached(cache: &Path) -> PathBuf {
    let mut entries = std::fs::read_dir(cache.join("millstream")).unwrap();
    let path = entries.next().unwrap().unwrap().path();
    assert!(entries.next().is_none());
    path
}

fn first_use(cache: &Path) -> Output {
    millstream(&["run", "--temp", "0", "-n", "4", "-p", FOX]).env("XDG_CACHE_HOME", cache).output().unwrap()
}

#[test]
fn whatever_stands_in_the_way_of_the_cached_copy_goes_aside() {
    let cache = tempfile::tempdir().unwrap();
    let first = first_use(cache.path());
    let container = cached(cache.path());
    let without_config = || std::fs::remove_file(container.join("config.json")).unwrap();
    let a_file = || {
        std::fs::remove_dir_all(&container).unwrap();
        std::fs::write(&container, "x").unwrap();
    };
    let a_dangling_link = || {
        std::fs::remove_dir_all(&container).unwrap();
        std::os::unix::fs::symlink("/no/such/place", &container).unwrap();
    };
    for spoil in [&without_config as &dyn Fn(), &a_file, &a_dangling_link] {
        spoil();
        let output = first_use(cache.path());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains("made anew"), "{}", stderr(&output));
        assert_eq!(stdout(&output), stdout(&first));
        assert_eq!(cached(cache.path()), container);
    }
}

#[test]
fn damaged_weights_of_the_cached_copy_name_the_directory_to_delete() {
    let cache = tempfile::tempdir().unwrap();
    let first = first_use(cache.path());
    let container = cached(cache.path());
    // Scales that are not numbers: the headers stay as they are, so that the container opens.
    for entry in std::fs::read_dir(&container).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let mut bytes = std::fs::read(&path).unwrap();
            let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            bytes[data..].fill(0xFF);
            std::fs::write(&path, bytes).unwrap();
        }
    }
    refused(&first_use(cache.path()), 1, &["delete the directory", container.to_str().unwrap()]);
    // The same for its small files.
    std::fs::write(container.join("tokenizer.json"), "{}").unwrap();
    refused(&first_use(cache.path()), 1, &["tokenizer.json", "delete the directory", container.to_str().unwrap()]);
    std::fs::remove_dir_all(&container).unwrap();
    assert_eq!(stdout(&first_use(cache.path())), stdout(&first));
}

#[test]
fn an_interrupted_conversion_says_so_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (source, whole, other) = (bundled(), dir.path().join("whole"), dir.path().join("other"));
    let arguments = |to: &Path| ["convert", source.to_str().unwrap(), to.to_str().unwrap()].map(str::to_owned);
    let convert = |to: &Path| millstream(&arguments(to).each_ref().map(String::as_str));
    assert!(convert(&whole).output().unwrap().status.success());
    let child = convert(&other).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The first shard is there, so the signal is watched for; the last may be too.
    while !other.join("out-00000.safetensors").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    if output.status.code() == Some(130) {
        let said = stderr(&output);
        assert!(said.ends_with("interrupted; the same command continues\n") && !said.contains("error"), "{said}");
        refused(&run(&["-p", "x", "-m", other.to_str().unwrap()]), 1, &["not written to its end"]);
    } else {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    assert!(convert(&other).output().unwrap().status.success());
    for entry in std::fs::read_dir(&whole).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(std::fs::read(whole.join(&name)).unwrap(), std::fs::read(other.join(&name)).unwrap(), "{name:?}");
    }
}

#[test]
fn too_little_memory_is_a_sum_and_a_number_that_works() {
    let output = run(&["-p", FOX, "-n", "8", "--ram", "1M"]);
    refused(
        &output,
        1,
        &["MB program", "MB resident", "MB KV", "(1 slab of 0.05 MB)", "the smallest --ram that works is "],
    );
    assert!(!stderr(&output).contains("free memory"), "{}", stderr(&output));
    let least = stderr(&output).split("that works is ").nth(1).unwrap().split(';').next().unwrap().to_owned();
    answer(&["-p", FOX, "-n", "8", "--ram", &least]);
    // A tenth of a megabyte less does not.
    let tenths: u64 = least.trim_end_matches("MB").replace('.', "").parse().unwrap();
    let less = format!("{}.{}MB", (tenths - 1) / 10, (tenths - 1) % 10);
    refused(&run(&["-p", FOX, "-n", "8", "--ram", &less]), 1, &[&format!("works is {least};")]);
}

#[test]
fn what_the_machine_does_not_have_is_noted() {
    let output = run(&["-p", FOX, "-n", "1", "--ram", "900T", "-t", "1000"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for word in ["990 TB of memory are allowed", "1000 threads share the "] {
        assert_eq!(stderr(&output).matches(word).count(), 1, "{word}: {}", stderr(&output));
    }
}

#[test]
fn without_a_home_the_temporary_directory_serves() {
    let temp = tempfile::tempdir().unwrap();
    let output = millstream(&["run", "--temp", "0", "-n", "4", "-p", FOX])
        .env_remove("XDG_CACHE_HOME")
        .env("HOME", "/proc/no-such-home")
        .env("TMPDIR", temp.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let made = std::fs::read_dir(temp.path()).unwrap().next().unwrap().unwrap().file_name();
    assert!(made.to_string_lossy().starts_with("millstream-"), "{made:?}");
}

#[test]
fn no_file_that_a_command_reads_is_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(bundled()).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, model.join(from.file_name().unwrap())).unwrap();
    }
    let shard = model.join("config.json");
    let before = std::fs::read(&shard).unwrap();
    let (model, config) = (model.to_str().unwrap(), shard.to_str().unwrap());
    for arguments in [
        &["run", "-m", model, "-p", FOX, "--stats-json", config][..],
        &["run", "-m", model, "-p", FOX, "--timeline", config],
        &["run", "-f", config, "--stats-json", config],
        &["profile", "-m", model, "-p", FOX, "--html", config],
        &["sweep", "threads", "-m", model, "-p", FOX, "--svg", config],
        &["trace", "record", config, "-m", model, "-p", FOX],
        &["bench-io", "-m", model, "--svg", config],
        &["bench-io", "--file", config, "--svg", config],
    ] {
        refused(&millstream(arguments).output().unwrap(), 2, &["which this command reads", "hint:"]);
    }
    assert_eq!(std::fs::read(&shard).unwrap(), before);
}

#[test]
fn a_plan_adds_up_and_its_graph_has_every_need_before_it() {
    let model = bundled();
    let plan = |extra: &[&str]| {
        let model = model.to_str().unwrap();
        millstream(&[&["plan", "-m", model, "--usage", "off", "--ram", "64M", "-c", "4096"], extra].concat())
            .output()
            .unwrap()
    };
    let report = json(&done(plan(&["--json", "--graph"])));
    let budget = |name: &str| report["budget"][name].as_u64().unwrap();
    assert_eq!((budget("total"), &report["budget"]["source"]), (64 << 20, &"asked for".into()));
    // Six layers of 4096 positions of 80 + 16 floats.
    assert_eq!(budget("kv"), 6 * 4096 * 96 * 4);
    let parts = ["program", "resident", "kv", "reconstruction", "activations", "working", "experts"];
    let left = budget("total") - parts.iter().map(|part| budget(part)).sum::<u64>();
    let slots = report["slots"].as_u64().unwrap();
    assert!(left < budget("experts") / slots, "room for another expert is left: {report}");
    // Five routed layers of 32 experts, four a token.
    assert_eq!((&report["experts"], &report["experts_per_token"]), (&160.into(), &20.into()));
    // Nothing is known of the router: the cache finds more than if it chose evenly.
    let found = report["expected_hit_rate"].as_f64().unwrap();
    assert!(found > slots as f64 / 160.0 && found < 1.0, "{report}");
    // Everything was timed. A token that finds no expert is no faster than what is expected, and where all are found
    // arithmetic is the sum of its parts.
    let number = |value: &Value| value.as_f64().unwrap();
    let [expected, worst] = ["predicted_tok_s", "worst_tok_s"].map(|name| number(&report[name]));
    assert!(worst > 0.0 && worst <= expected, "{report}");
    let compute = &report["compute"];
    let [once, before, shared, expert] =
        ["once_s", "before_s", "shared_s", "expert_s"].map(|part| number(&compute[part]));
    let all = once + 5.0 * (before + shared + 4.0 * expert);
    let everything = &report["what_if"][0]["long"];
    assert_eq!(everything["expected_hit_rate"], 1.0, "twice the memory holds every expert: {report}");
    assert!((number(&everything["compute_s"]) / all - 1.0).abs() < 0.01 && once > 0.0 && expert > 0.0, "{report}");
    // A layer that reads computes no less.
    assert!(number(&report["compute_s"]) > 0.99 * all, "{report}");
    // Of speed nothing need be said: all else is the same.
    let untimed = json(&done(plan(&["--json", "--untimed"])));
    assert_eq!((&untimed["predicted_tok_s"], &untimed["compute"]["gb_s"]), (&Value::Null, &Value::Null), "{untimed}");
    for name in ["budget", "slots", "expected_hit_rate", "bytes_per_token"] {
        assert_eq!(untimed[name], report[name], "{name}");
    }
    // A short prompt leaves more to the experts.
    let short = json(&done(plan(&["--json", "--prompt-tokens", "8"])));
    assert!(short["slots"].as_u64().unwrap() > slots, "{short}");
    let graph = report["graph"].as_array().unwrap();
    let needs = |at: usize| graph[at]["needs"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize);
    for (at, node) in graph.iter().enumerate() {
        assert!(needs(at).all(|need| need < at), "{node}");
        let requested = |need: usize| graph[need]["stage"] == "request" && graph[need]["layer"] == node["layer"];
        assert!(node["stage"] != "experts" || needs(at).any(requested), "{node}");
    }
    assert_eq!(graph.iter().filter(|node| node["stage"] == "experts").count(), 5);
    let dot = stdout(&done(plan(&["--dot"]))).to_owned();
    assert_eq!(dot.matches(" -> ").count(), (0..graph.len()).map(|at| needs(at).count()).sum::<usize>());
    assert!(stdout(&done(plan(&[]))).starts_with("memory: "));
    let small = millstream(&["plan", "-m", model.to_str().unwrap(), "--ram", "20M"]).output().unwrap();
    refused(&small, 1, &["21.0 MB may be used", "hint: the smallest --ram that works"]);
    let long = millstream(&["plan", "-m", model.to_str().unwrap(), "-c", "9999"]).output().unwrap();
    refused(&long, 2, &["9999", "4096"]);
}

#[test]
fn same_seed_same_answer() {
    let with = |seed| answer(&["-q", "--temp", "1", "--top-p", "1", "-n", "24", "--ignore-eos", "-s", seed, "-p", FOX]);
    assert_eq!(with("7"), with("7"));
    assert_ne!(with("7"), with("8"));
}

#[test]
fn a_stop_string_cuts_exactly_before_it() {
    let arguments = exact(&["--json", "--stop", "a daughter, and a d", "--stop", "never said", "-p", FOX]);
    let json: Value = serde_json::from_str(&answer(&arguments)).unwrap();
    assert_eq!(json["text"], "Once upon a time there was a king who had three sons, and ");
    assert_eq!((&json["finish_reason"], &json["stop_string"]), (&"stop".into(), &"a daughter, and a d".into()));
    // Token 1023 is " daughter", and nothing was computed after the stop string was there.
    let ids = json["ids"].as_array().unwrap();
    assert_eq!(ids.last().unwrap(), 1023);
    assert_eq!(ids.iter().filter(|id| **id == 1023).count(), 2);
}

#[test]
fn a_stop_string_that_names_a_control_token_stops_at_it() {
    let output = run(&["-q", "--temp", "0", "-n", "4", "--stop", "<|user|>", "-p", FOX]);
    assert_eq!(stdout(&output), "Once upon a time\n");
}

#[test]
fn statistics_add_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("stats.json");
    let output = run(&["-n", "32", "--temp", "0", "-t", "1", "-p", FOX, "--stats-json", file.to_str().unwrap()]);
    let json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((&json["schema_version"], &json["tokens"], &json["prompt_tokens"]), (&1.into(), &32.into(), &14.into()));
    assert_eq!(json["settings"]["threads"], 1);
    assert_eq!(json["settings"]["temp"], 0.0);
    assert_eq!(json["model"]["formats"], serde_json::json!(["f32", "int8", "int4"]));
    assert_eq!(stdout(&output), json["text"].as_str().unwrap().to_owned() + "\n");
    let wall = json["wall_s"].as_f64().unwrap();
    let stages = json["stages"].as_object().unwrap();
    let sum: f64 = stages.values().map(|stage| stage["busy_s"].as_f64().unwrap()).sum();
    assert!((sum - wall).abs() <= 1e-6 * wall, "{sum} of {wall}");
    let busy = |stage: &str| stages[stage]["busy_s"].as_f64().unwrap();
    for stage in ["attention", "route", "shared", "experts", "head"] {
        assert!(busy(stage) > 0.0, "{stage}");
    }
    assert_eq!(json["decode_steps"], 31);
    assert!(json["memory"]["rss_peak"].as_u64().unwrap() > json["memory"]["resident"].as_u64().unwrap());
    assert!(json["io"]["bytes"].as_u64().unwrap() >= json["io"]["useful_bytes"].as_u64().unwrap());
    let experts = |name: &str| json["experts"][name].as_u64().unwrap();
    assert_eq!(experts("requested"), experts("hit_cached") + experts("hit_prefetched") + experts("missed"));
    for word in ["32 tokens", "14 tokens", "tok/s", "attention", "total", "hit rate", "at its peak"] {
        assert!(stderr(&output).contains(word), "no {word:?} in: {}", stderr(&output));
    }
}

#[test]
fn quiet_is_quiet() {
    let output = run(&["-q", "-n", "2", "-p", FOX]);
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
}

#[test]
fn verbose_shows_each_setting_and_its_origin() {
    let output = millstream(&["run", "-v", "-n", "2", "-p", FOX]).env("MILLSTREAM_THREADS", "1").output().unwrap();
    for (name, rest) in [("threads", "1  (MILLSTREAM_THREADS)"), ("max-tokens", "2  (flag)"), ("io", "auto  (default)")]
    {
        let line = stderr(&output).lines().find(|line| line.starts_with(&format!("setting: {name} ")));
        assert!(line.is_some_and(|line| line.ends_with(rest)), "{name}: {line:?}");
    }
}

#[test]
fn what_cannot_work_is_said_before_the_model_loads() {
    let not_text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(not_text.path(), b"ab\xFF").unwrap();
    let not_text = not_text.path().to_str().unwrap();
    for (arguments, words) in [
        (&["-p", ""][..], &["the prompt is empty", "hint:"][..]),
        (&[], &["the prompt is empty"]),
        (&["-f", "/no/such/file"], &["cannot read the prompt from /no/such/file", "No such file"]),
        (&["-f", not_text], &["it is not UTF-8"]),
        (&["-p", "x", "--temp", "-0.5"], &["temperature is -0.5", "between 0"]),
        (&["-p", "x", "--temp", "NaN"], &["temperature is NaN"]),
        (&["-p", "x", "--top-p", "1.01"], &["top-p is 1.01"]),
        (&["-p", "x", "--min-p", "-1"], &["min-p is -1"]),
        (&["-p", "x", "--top-k", "-1"], &["--top-k"]),
        (&["-p", "x", "--repeat-penalty", "0"], &["repeat-penalty is 0", "above 0 and at most 100"]),
        (&["-p", "x", "--repeat-last-n", "-2"], &["--repeat-last-n", "-1.."]),
        (&["-p", "x", "--presence-penalty", "2.5"], &["presence-penalty is 2.5", "between -2 and 2"]),
        (&["-p", "x", "--frequency-penalty", "NaN"], &["frequency-penalty is NaN"]),
        (&["-p", "x", "--logit-bias", "5=101"], &["logit-bias is 101", "between -100 and 100, or -inf"]),
        (&["-p", "x", "--logit-bias", "fox"], &["--logit-bias", "TOKEN=VALUE"]),
        (&["-p", "x", "--logit-bias", "4096=1"], &["--logit-bias 4096=1", "vocabulary ends before 4096"]),
        (&["-p", "x", "--json", "--logprobs", "21"], &["--logprobs", "from 0 to 20"]),
        (&["-p", "x", "--logprobs", "2"], &["--logprobs", "--json"]),
        (&["-p", "x", "-n", "0"], &["-n 0 asks for no token"]),
        (&["-p", "x", "--stop", ""], &["a stop string is empty"]),
        (&["-p", "x", "-m", "/no/such/model"], &["/no/such/model does not exist"]),
        (&["-p", "x", "--ram", "lots"], &["'lots' is not a size"]),
        (&["-p", "x", "--ram", "0"], &["--ram", "no model fits no memory"]),
        (&["-p", "x", "--stats-json", "-"], &["--stats-json takes a file", "--json"]),
        (&["-p", "x", "--stats-json", "/no/such/dir/x"], &["cannot write the statistics to /no/such/dir/x"]),
        (&["-p", "1 two", "--ids"], &["\"two\" in the prompt is not a token id"]),
        (&["-p", "5 4096", "--ids"], &["token id 4096", "vocabulary of 4096"]),
        (&["-p", "x", "-c", "4097"], &["4097 tokens is more than the model's 4096"]),
        (&["-p", FOX, "-c", "14"], &["has 14 tokens", "-c has 14", "allows up to -c 4096"]),
        (&["-p", "x", "--draft", "guess"], &["--draft", "mtp"]),
    ] {
        refused(&run(arguments), 2, words);
    }
    refused(&millstream(&["serve"]).output().unwrap(), 2, &["serve"]);
    let unknown = millstream(&["run", "-p", "x"]).env("MILLSTREAM_THREAD", "1").output().unwrap();
    refused(&unknown, 2, &["MILLSTREAM_THREAD is not a setting"]);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let long = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(long.path(), vec![b'a'; 1 << 20]).unwrap();
    refused(&run(&["-f", long.path().to_str().unwrap()]), 2, &["at least ", "by its length", "4096"]);
    let ids = vec!["17"; 5000].join(",");
    refused(&run(&["--ids", "-p", &ids]), 2, &["5000 tokens", "4096"]);
}

/// A copy of the bundled model with links to its shards.
fn copy_without(names: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(bundled()).unwrap() {
        let entry = entry.unwrap();
        if !names.iter().any(|name| entry.file_name() == *name) {
            std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    dir
}

#[test]
fn missing_small_files_are_named() {
    let dir = copy_without(&["config.json", "tokenizer.json"]);
    let output = run(&["-p", "x", "-m", dir.path().to_str().unwrap()]);
    refused(&output, 1, &["config.json", "tokenizer.json", "2 weight shards", "hint:"]);
}

#[test]
fn token_ids_need_no_tokenizer_and_neither_do_commands_that_only_look() {
    let dir = copy_without(&["tokenizer.json"]);
    let model = dir.path().to_str().unwrap();
    let ids = |model| answer(&["-q", "--ids", "-p", "17 4 256", "-n", "3", "--temp", "0", "-m", model]);
    assert_eq!(ids(model), ids(bundled().to_str().unwrap()));
    for command in ["info", "census"] {
        done(millstream(&[command, model]).output().unwrap());
    }
    refused(&run(&["-p", "x", "-m", model]), 1, &["tokenizer.json", "--ids"]);
}

/// Ids of the checks of `doctor` that ended so.
fn checks(arguments: &[&str], status: &str) -> (Vec<String>, Option<i32>, Value) {
    let output = millstream(&[&["doctor", "--json"], arguments].concat()).output().unwrap();
    let report = json(&output);
    let these = report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == status);
    let ids = these.map(|check| check["id"].as_str().unwrap().to_owned()).collect();
    (ids, output.status.code(), report)
}

#[test]
fn doctor_names_a_missing_small_file_once_and_looks_at_what_needs_none() {
    let dir = copy_without(&["tokenizer.json"]);
    let (failed, code, report) = checks(&["-m", dir.path().to_str().unwrap()], "fail");
    assert_eq!((failed, code), (vec!["tokenizer".to_owned()], Some(1)), "{report}");
    let (well, ..) = checks(&["-m", dir.path().to_str().unwrap()], "ok");
    assert!(["tensors", "memory", "files"].iter().all(|id| well.iter().any(|well| well == id)), "{report}");
    let dir = copy_without(&["config.json"]);
    let (failed, _, report) = checks(&["-m", dir.path().to_str().unwrap()], "fail");
    assert_eq!(failed, ["config"], "{report}");
    assert!(report.to_string().contains("the same command puts them back"), "{report}");
}

/// Of the model that comes with the program a copy is used, in widths that no flag makes wider again or of 3 bits.
#[test]
fn widths_that_the_converted_copy_cannot_have_lead_to_the_original() {
    let original = format!("-m {}", bundled().display());
    for command in
        [&["run", "-p", "x", "-n", "1"][..], &["plan", "--untimed"], &["bench", "-p", "8", "-n", "0", "-r", "1"]]
    {
        let output = millstream(&[command, &["--dense-bits", "3"]].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(&original), "{}", stderr(&output));
    }
    let (failed, code, report) = checks(&["--dense-bits", "3"], "fail");
    assert_eq!((failed, code), (vec!["widths".to_owned()], Some(2)), "{report}");
    assert!(report.to_string().contains(&original), "{report}");
}

#[test]
fn a_tokenizer_that_is_none_is_named() {
    for text in ["{}", "", "{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}"] {
        let dir = copy_without(&["tokenizer.json"]);
        std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
        let output = run(&["-p", "x", "-m", dir.path().to_str().unwrap()]);
        refused(&output, 1, &["tokenizer.json is not a usable tokenizer", "cause:", "hint:"]);
    }
}

/// Whoever opens a pipe waits for somebody to write into it.
#[test]
fn a_small_file_that_is_a_pipe_or_a_directory_is_named_and_nobody_waits() {
    for name in ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"] {
        for pipe in [true, false] {
            let dir = copy_without(&[name]);
            let path = dir.path().join(name);
            if pipe {
                assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            } else {
                std::fs::create_dir(&path).unwrap();
            }
            let model = dir.path().to_str().unwrap();
            let output = run(&["-p", "x", "-n", "1", "-m", model]);
            refused(&output, 1, &[name, "regular file", "hint:"]);
            assert!(!stderr(&output).contains("dmesg"), "{}", stderr(&output));
            let (failed, code, report) = checks(&["-m", model], "fail");
            assert_eq!((failed.is_empty(), code), (false, Some(1)), "{report}");
        }
    }
}

#[test]
fn doctor_reads_as_a_run_with_the_same_environment_does() {
    let made = tempfile::tempdir().unwrap();
    let model = made.path().join("model");
    let output = millstream(&["synth", "-q", "--preset", "small", model.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    for command in [&["run", "--raw", "-p", "x", "-n", "1", "-q"][..], &["doctor", "--deep"]] {
        let mut command = millstream(&[command, &["-m", model.to_str().unwrap()]].concat());
        let output = command.env("MILLSTREAM_DEVICE", "mmap").output().unwrap();
        assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    }
}

#[test]
fn without_a_chat_template_raw_prompts_still_work() {
    let dir = copy_without(&["chat_template.jinja", "tokenizer_config.json"]);
    let model = dir.path().to_str().unwrap();
    refused(&run(&["-p", "x", "-m", model]), 1, &["has no chat template", "--raw"]);
    assert_ne!(answer(&["-q", "-n", "2", "--raw", "-p", "Once", "-m", model]), "");
}

#[test]
fn a_template_that_is_none_is_blamed() {
    let dir = copy_without(&["chat_template.jinja"]);
    let (template, model) = (dir.path().join("chat_template.jinja"), dir.path().to_str().unwrap().to_owned());
    for text in ["", " \n", "{% if false %}x{% endif %}"] {
        std::fs::write(&template, text).unwrap();
        refused(&run(&["-p", "x", "-m", &model]), 1, &["the chat template", "no text", "--raw"]);
        let (failed, code, report) = checks(&["-m", &model], "fail");
        assert_eq!((failed, code), (vec!["template".to_owned()], Some(1)), "{report}");
    }
    std::fs::write(&template, b"a\xFF").unwrap();
    let output = run(&["-p", "x", "-m", &model]);
    refused(&output, 1, &["chat_template.jinja", "not UTF-8"]);
    assert!(!stderr(&output).contains("permission"), "{}", stderr(&output));
    std::fs::write(&template, "Once upon a time").unwrap();
    let output = run(&["-p", "a fox", "-n", "1", "-m", &model]);
    assert!(stderr(&output).contains("does not contain the prompt"), "{}", stderr(&output));
    std::fs::write(&template, "Tell: {{ messages[0].content|trim }}").unwrap();
    let output = run(&["-p", " a fox ", "-n", "1", "-m", &model]);
    assert!(!stderr(&output).contains("does not contain the prompt"), "{}", stderr(&output));
}

#[test]
fn a_tokenizer_beyond_the_vocabulary_names_both_files() {
    let dir = copy_without(&["tokenizer.json"]);
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(bundled().join("tokenizer.json")).unwrap()).unwrap();
    let mut token = tokenizer["added_tokens"][0].clone();
    (token["id"], token["content"]) = (4096.into(), "<|beyond|>".into());
    tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let model = dir.path().to_str().unwrap();
    refused(
        &run(&["-p", "x", "-m", model]),
        1,
        &["tokenizer.json has token ids up to 4096", "config.json a vocab_size of 4096"],
    );
    let (failed, code, report) = checks(&["-m", model], "fail");
    assert_eq!((failed, code), (vec!["tokenizer".to_owned()], Some(1)), "{report}");
    answer(&["--ids", "-p", "5", "-n", "1", "-m", model]);
}

#[test]
fn small_files_are_named_with_their_directory_and_a_hint_that_fits() {
    for (edit, words) in [
        (
            &|c: &mut Value| c["model_type"] = "llama".into(),
            "not supported: only those of type glm_moe_dsa and olmoe are",
        ),
        (
            &|c: &mut Value| c["rope_parameters"]["rope_type"] = "yarn".into(),
            "rotary position embedding is not supported",
        ),
        (&|c: &mut Value| c["quantization_config"]["quant_method"] = "awq".into(), "quantization is not supported"),
        (&|c: &mut Value| c["scoring_func"] = "softmax".into(), "variant of the architecture is not supported"),
        (&|c: &mut Value| c["hidden_size"] = Value::Null, "compare it with"),
    ] as [(&dyn Fn(&mut Value), &str); 5]
    {
        let dir = copy_without(&["config.json"]);
        let mut config: Value = serde_json::from_slice(&std::fs::read(bundled().join("config.json")).unwrap()).unwrap();
        edit(&mut config);
        let path = dir.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let output = run(&["-p", "x", "-m", dir.path().to_str().unwrap()]);
        refused(&output, 1, &[path.to_str().unwrap(), words]);
        assert!(!stderr(&output).contains("fetch"), "{}", stderr(&output));
    }
}

#[test]
fn a_destination_that_cannot_be_is_not_blamed_on_the_drive() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for destination in [file.clone(), file.join("below")] {
        let arguments = ["convert", bundled().to_str().unwrap(), destination.to_str().unwrap()].map(str::to_owned);
        let output = millstream(&arguments.each_ref().map(String::as_str)).output().unwrap();
        refused(&output, 1, &["a file is where a directory should be"]);
        assert!(!stderr(&output).contains("dmesg"), "{}", stderr(&output));
    }
    let empty = dir.path().to_str().unwrap();
    std::fs::remove_file(&file).unwrap();
    let output = millstream(&["convert", empty, dir.path().join("to").to_str().unwrap()]).output().unwrap();
    refused(&output, 1, &["0 weight shards", "give the directory that holds the *.safetensors files"]);
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let mut child = millstream(&["run", "-q", "-n", "-1", "--ignore-eos", "-p", FOX])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(141), ""));
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = millstream(&["run", "-q", "-n", "4", "-p", FOX]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write the answer"), "{}", stderr(&output));
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_with_the_name_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let limited = |arguments: &str, made: &str| {
        let line = format!("ulimit -f 4; exec {} {arguments} {made}", env!("CARGO_BIN_EXE_millstream"));
        let mut shell = Command::new("sh");
        program::forget_settings(&mut shell);
        shell.args(["-c", &line]).env("HOME", dir.path()).current_dir(dir.path()).output().unwrap()
    };
    refused(&limited("synth -q --preset small", "model"), 1, &["error: ", "model", "os error 27"]);
    let timeline = limited(&format!("run -q -m {} --raw -p a -n 2 --timeline", bundled().display()), "t.json");
    assert_eq!(timeline.status.code(), Some(1), "{}", stderr(&timeline));
    assert!(stderr(&timeline).contains("cannot write the timeline to t.json"), "{}", stderr(&timeline));
}

#[test]
fn an_interrupt_ends_the_answer_and_shows_it() {
    let mut child = millstream(&["run", "-n", "-1", "--ignore-eos", "-p", FOX])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut text = vec![0; 4];
    out.read_exact(&mut text).unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    out.read_to_end(&mut text).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(String::from_utf8(text).unwrap().ends_with('\n'));
    assert!(stderr(&output).contains("interrupted") && stderr(&output).contains("tok/s"), "{}", stderr(&output));
}

#[test]
fn convert_writes_what_run_reads() {
    let dir = tempfile::tempdir().unwrap();
    let container = dir.path().join("int8");
    let (source, container) = (bundled(), container.to_str().unwrap().to_owned());
    let flags = ["convert", source.to_str().unwrap(), &container, "--experts", "8", "--dense", "8"];
    let output = millstream(&flags).output().unwrap();
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), ""), "{}", stderr(&output));
    assert!(stderr(&output).contains("routed experts: 480 tensors as int8"), "{}", stderr(&output));
    let json: Value = serde_json::from_str(&answer(&["--json", "-n", "4", "-p", FOX, "-m", &container])).unwrap();
    assert_eq!(json["model"]["formats"], serde_json::json!(["f32", "int8"]));
    // The same directory with other parameters is refused, with both sets.
    let other = millstream(&["convert", source.to_str().unwrap(), &container, "--experts", "4"]).output().unwrap();
    refused(&other, 1, &["a finished container", "there `experts=8`, asked now `experts=4`"]);
    refused(
        &millstream(&["convert", "/no/such/dir", &container]).output().unwrap(),
        2,
        &["/no/such/dir does not exist"],
    );
}
