//! `tune` as a whole command on the bundled model, in moments instead of minutes: what it says, what it keeps, and what
//! `run` makes of it.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use program::{forget_settings, ram_besides_program, refused, stderr};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The bundled model as a container on the disk that the build is on, converted once.
fn container() -> &'static Path {
    static DIR: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    &DIR.get_or_init(|| {
        let dir = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let model = dir.path().join("model");
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales");
        let mut convert = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = convert.args(["convert", "-q"]).arg(bundled).arg(&model).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        (dir, model)
    })
    .1
}

/// The program, with its state below `state` and none of the caller's settings.
fn millstream(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    forget_settings(&mut command);
    command.args(arguments).env("XDG_STATE_HOME", state).stdin(Stdio::null());
    command
}

fn tune(state: &Path, extra: &[&str]) -> Command {
    let model = container().to_str().unwrap();
    millstream(state, &[&["tune", "--secs", "0.01", "-m", model], extra].concat())
}

fn run(state: &Path, extra: &[&str]) -> Command {
    let model = container().to_str().unwrap();
    let ram = ram_besides_program(10, container());
    let fixed = ["run", "-m", model, "-p", "Tell me a story about a fox.", "-n", "12", "--temp", "0", "--ram", &ram];
    millstream(state, &[&fixed, extra].concat())
}

#[track_caller]
fn parsed(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn profiles(state: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(state.join("millstream/tuning")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// A state directory with a profile of the container, as `tune` made it, with `settings` in it.
fn with_settings(settings: &[(&str, &str)]) -> (TempDir, PathBuf) {
    static MADE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, made) = MADE.get_or_init(|| {
        let state = TempDir::new().unwrap();
        parsed(&tune(state.path(), &["--json", "-q"]).output().unwrap());
        let path = profiles(state.path()).pop().unwrap();
        (state, path)
    });
    let state = TempDir::new().unwrap();
    let path = state.path().join("millstream/tuning").join(made.file_name().unwrap());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut profile: Value = serde_json::from_slice(&fs::read(made).unwrap()).unwrap();
    for name in ["io", "device", "depth", "chunk"] {
        profile["settings"][name] = json!("auto");
    }
    for (name, value) in settings {
        profile["settings"][*name] = json!(value);
    }
    fs::write(&path, profile.to_string()).unwrap();
    (state, path)
}

/// Value and origin of each setting that `-v` shows.
fn setting<'a>(output: &'a Output, name: &str) -> &'a str {
    let begins = format!("setting: {name} ");
    let line = stderr(output).lines().find_map(|line| line.strip_prefix(&begins));
    line.unwrap_or_else(|| panic!("no {name} in {}", stderr(output))).trim()
}

#[test]
fn the_report_has_every_key_and_the_profile_is_kept_under_what_it_is_about() {
    let state = TempDir::new().unwrap();
    let output = tune(state.path(), &["--json"]).output().unwrap();
    let report = parsed(&output);
    for key in [
        "schema_version",
        "machine",
        "model",
        "file",
        "conditions",
        "candidates",
        "rerun",
        "chosen",
        "defaults_are_best",
        "reason",
        "profile",
    ] {
        assert!(report.get(key).is_some(), "no {key}");
    }
    assert_eq!(report["schema_version"], 1);
    let candidates = report["candidates"].as_array().unwrap();
    assert!(candidates.len() >= 2 && candidates[0]["default"] == true);
    for candidate in candidates {
        for key in ["candidate", "settings", "gb_s", "cpu_s_per_gb", "tok_s", "tok_s_min", "tok_s_max", "verdict"] {
            assert!(candidate.get(key).is_some(), "no {key} in {candidate}");
        }
    }
    assert_eq!(candidates.iter().filter(|one| one["verdict"] == "kept").count(), 1);
    // Of 5 layers of 32 experts, an eighth.
    assert_eq!((&report["conditions"]["experts"], &report["conditions"]["slabs"]), (&json!(160), &json!(20)));
    let best = report["defaults_are_best"].as_bool().unwrap();
    assert_eq!(best, report["chosen"]["flags"] == "defaults");
    assert!(stderr(&output).contains("ways of reading") && stderr(&output).contains("max_sectors_kb"));

    let kept = profiles(state.path());
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_eq!(report["profile"], kept[0].to_str().unwrap());
    let profile: Value = serde_json::from_slice(&fs::read(&kept[0]).unwrap()).unwrap();
    assert_eq!(profile["schema_version"], 1);
    assert_eq!(profile["key"]["model"], report["model"]["fingerprint"]);
    for name in ["io", "device", "depth", "chunk"] {
        assert_eq!(profile["settings"][name], report["chosen"][name]);
    }

    let output = run(state.path(), &["-v"]).output().unwrap();
    let date = profile["date"].as_str().unwrap();
    assert!(stderr(&output).contains(&format!("tune of {date}")), "{}", stderr(&output));
    assert!(setting(&output, "tuning").starts_with(date));
    // Tuning again replaces what was kept.
    let output = tune(state.path(), &["-q", "-t", "1", "--ram", "100M"]).output().unwrap();
    let table = std::str::from_utf8(&output.stdout).unwrap();
    assert_eq!((output.status.code(), stderr(&output)), (Some(0), ""));
    for word in ["candidate", "GB/s", "CPU s/GB", "tok/s", "defaults (", "chosen: ", "reason: ", "saved: "] {
        assert!(table.contains(word), "no {word} in {table}");
    }
    assert_eq!(profiles(state.path()), kept);
}

#[test]
fn a_profile_changes_how_files_are_read_and_not_one_token() {
    let (state, _) = with_settings(&[("io", "buffered"), ("device", "threads"), ("depth", "2"), ("chunk", "64K")]);
    let output = run(state.path(), &["--json"]).output().unwrap();
    let tuned = parsed(&output);
    assert!(stderr(&output).contains("--io buffered --device threads --depth 2 --chunk 64K"), "{}", stderr(&output));
    let off = run(state.path(), &["--json", "--tuning", "off"]).output().unwrap();
    assert!(!stderr(&off).contains("tune"), "{}", stderr(&off));
    let off = parsed(&off);
    assert_eq!(tuned["ids"], off["ids"]);
    assert_eq!(tuned["ids"].as_array().unwrap().len(), 12);
    assert_eq!((&tuned["io"]["device"], &tuned["io"]["mode"]), (&json!("threads"), &json!("buffered")));
    assert_eq!((&tuned["settings"]["depth"], &tuned["settings"]["chunk"]), (&json!("2"), &json!("64K")));
    assert_eq!((&off["settings"]["depth"], &off["settings"]["tuning"]), (&json!("auto"), &json!("off")));
}

#[test]
fn what_was_asked_for_wins_and_a_profile_gives_way_to_it() {
    let (state, _) = with_settings(&[("device", "threads"), ("depth", "2")]);
    let output = run(state.path(), &["-v", "--depth", "3"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(setting(&output, "depth"), "3  (flag)");
    assert_eq!(setting(&output, "device"), "threads  (tuning profile)");
    // Reader threads do not map files: what was asked for is done, and the rest of the profile stays.
    for asked in ["flag", "MILLSTREAM_IO"] {
        let mut command = run(state.path(), if asked == "flag" { &["-v", "--io", "mmap"] } else { &["-v"] });
        if asked != "flag" {
            command.env(asked, "mmap");
        }
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(setting(&output, "io"), format!("mmap  ({asked})"));
        assert_eq!(setting(&output, "device"), "auto  (default)");
        assert_eq!(setting(&output, "depth"), "2  (tuning profile)");
        assert!(stderr(&output).contains("(mmap, "), "{}", stderr(&output));
    }
    let output = run(state.path(), &["--depth", "3", "--device", "auto"]).output().unwrap();
    assert!(stderr(&output).contains("in place of which stands what was asked for"), "{}", stderr(&output));
}

#[test]
fn a_profile_that_says_nothing_costs_one_line_and_changes_nothing() {
    let (state, path) = with_settings(&[("device", "threads"), ("depth", "2")]);
    let good = fs::read_to_string(&path).unwrap();
    let plain = run(state.path(), &["--tuning", "off"]).output().unwrap();
    for (bad, words) in [
        (good[..good.len() / 2].to_owned(), "it is damaged"),
        (String::new(), "it is damaged"),
        (good.replace("\"schema_version\":1", "\"schema_version\":7"), "its version is 7"),
        (good.replace("\"cores\":", "\"cores\":1"), "about another machine"),
        (good.replace("\"threads\"", "\"uring\""), "may be refused"),
    ] {
        fs::write(&path, &bad).unwrap();
        let output = run(state.path(), &["-v"]).output().unwrap();
        assert_eq!((output.status.code(), &output.stdout), (Some(0), &plain.stdout), "{}", stderr(&output));
        let lines: Vec<&str> = stderr(&output).lines().filter(|line| line.contains("tuning profile")).collect();
        assert!(lines.len() == 1 && lines[0].contains(words), "{lines:?}");
        assert_eq!(setting(&output, "device"), "auto  (default)");
        let doctor = millstream(state.path(), &["doctor", "-m", container().to_str().unwrap()]).output().unwrap();
        let said = std::str::from_utf8(&doctor.stdout).unwrap();
        assert!(said.contains("warn  tuning") && said.contains(words), "{said}");
    }
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let output = run(state.path(), &[]).output().unwrap();
    assert!(output.status.success() && stderr(&output).contains("cannot be read"), "{}", stderr(&output));
}

#[test]
fn doctor_names_the_profile() {
    let (state, _) = with_settings(&[("depth", "2")]);
    let doctor = |state: &Path| {
        let output = millstream(state, &["doctor", "-m", container().to_str().unwrap()]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let said = doctor(state.path());
    assert!(said.contains("ok    tuning       settings from the tune of") && said.contains("--depth 2"), "{said}");
    let said = doctor(Path::new("/dev/null/nowhere"));
    assert!(said.contains("skip  tuning") && said.contains("millstream tune"), "{said}");
}

#[test]
fn where_nothing_can_be_kept_it_is_said_before_anything_is_measured() {
    let dir = TempDir::new().unwrap();
    // A file where a directory is needed refuses even root.
    let blocked = dir.path().join("file");
    fs::write(&blocked, b"").unwrap();
    let output = tune(&blocked, &["--secs", "600"]).output().unwrap();
    refused(&output, 1, &["cannot keep a profile in", "file/millstream/tuning", "XDG_STATE_HOME"]);
    let mut command = tune(dir.path(), &["--secs", "600"]);
    let output = command.env_remove("XDG_STATE_HOME").env_remove("HOME").output().unwrap();
    refused(&output, 2, &["neither XDG_STATE_HOME nor HOME", "hint:"]);
}

#[test]
fn a_model_that_cannot_run_is_an_error_and_nothing_is_kept() {
    let (state, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    for entry in fs::read_dir(container()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let broken = |arguments: &[&str]| {
        let model = dir.path().to_str().unwrap();
        millstream(state.path(), &[&["tune", "--secs", "0.01", "-m", model], arguments].concat()).output().unwrap()
    };
    refused(&broken(&["--ram", "1M"]), 1, &["the model needs", "1.0 MB may be used", "hint:"]);
    let shard = dir.path().join("out-00000.safetensors");
    fs::File::options().write(true).open(&shard).unwrap().set_len(5000).unwrap();
    refused(&broken(&[]), 1, &["out-00000.safetensors", "hint:"]);
    refused(&tune(state.path(), &["-m", "/no/such/model"]).output().unwrap(), 2, &["/no/such/model does not exist"]);
    assert_eq!(profiles(state.path()), Vec::<PathBuf>::new());
}

#[test]
fn an_interrupt_keeps_nothing() {
    let state = TempDir::new().unwrap();
    // Longer than anybody waits.
    let mut command = tune(state.path(), &["--secs", "300"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("ways of reading")), "it says how long it will take");
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the child is not waited for yet, so its id is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    assert!(said.any(|line| line.contains("nothing was saved")));
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(profiles(state.path()), Vec::<PathBuf>::new());
}
