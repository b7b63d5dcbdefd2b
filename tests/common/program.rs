//! The program as a process, and what it says.
#![allow(dead_code)]

use std::path::Path;
use std::process::{Command, Output, Stdio};

use millstream::limits::{PROGRAM_REST_BYTES, THREAD_BYTES, TOKENIZER_TIMES};
use serde_json::Value;

/// The program with none of the caller's settings; what it keeps for a user goes below `home`.
pub fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    forget_settings(&mut command);
    for name in ["HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "TMPDIR"] {
        command.env(name, home);
    }
    command.stdin(Stdio::null());
    command
}

/// Takes the caller's settings away.
pub fn forget_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MILLSTREAM_")) {
        command.env_remove(name);
    }
}

/// A value of `--ram` that leaves so many megabytes to everything but the program itself with as many threads as it takes by
/// default, of the model in `dir`, which has few tensors.
pub fn ram_besides_program(megabytes: u64, dir: &Path) -> String {
    let len = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    let program = len(env!("CARGO_BIN_EXE_millstream").as_ref()) + PROGRAM_REST_BYTES + threads * THREAD_BYTES;
    let tokenizer = TOKENIZER_TIMES * len(&dir.join("tokenizer.json"));
    (program + tokenizer + megabytes * 1_000_000).to_string()
}

pub fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// The output of a command that succeeds.
#[track_caller]
pub fn done(output: Output) -> Output {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    output
}

/// The one JSON object that a command prints.
#[track_caller]
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Fails with this code, says all of `words`, and answers nothing.
#[track_caller]
pub fn refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    assert_eq!(stdout(output), "");
    for word in words {
        assert!(stderr(output).contains(word), "no {word:?} in: {}", stderr(output));
    }
}
