//! `--numa` changes where memory lies and threads run, and no bit of an answer.

#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use program::forget_settings;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// The bundled checkpoint as it is, which needs no cache.
fn millstream(command: &str, extra: &[&str]) -> Command {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales");
    let mut millstream = Command::new(env!("CARGO_BIN_EXE_millstream"));
    millstream.arg(command).arg("-m").arg(model).args(extra);
    millstream.env("XDG_STATE_HOME", "/dev/null/nowhere").stdin(Stdio::null());
    forget_settings(&mut millstream);
    millstream
}

/// A greedy generation whose prompt comes from standard input.
fn generation(extra: &[&str]) -> Command {
    let mut command = millstream("run", &["--usage", "off", "-n", "12", "--temp", "0", "-v"]);
    command.args(extra).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn answered(mut child: Child) -> (String, String) {
    child.stdin.take().unwrap().write_all(b"Tell me a story about a fox.").unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{err}");
    (out, err)
}

/// What the kernel says of the policy of pages once it is one of those, or in the end; nothing where it tells of none.
fn policy(child: &Child, expected: &str) -> Option<String> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let maps = fs::read_to_string(format!("/proc/{}/numa_maps", child.id())).ok()?;
        let seen = maps.split_whitespace().nth(1).unwrap_or_default().to_owned();
        if seen.starts_with(expected) || Instant::now() > deadline {
            return Some(seen);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn nodes() -> usize {
    let dir = fs::read_dir("/sys/devices/system/node");
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok());
    dir.map_or(0, |dir| dir.flatten().filter(|entry| is_node(&entry.file_name().to_string_lossy())).count())
}

#[test]
fn pages_lie_as_asked_and_the_answer_is_the_same() {
    let expected = answered(generation(&[]).spawn().unwrap()).0;
    assert!(!expected.is_empty());
    for (name, shown) in [("interleave", "interleave:"), ("distribute", "interleave:"), ("isolate", "bind:")] {
        // It waits for its prompt meanwhile.
        let child = generation(&["--numa", name]).spawn().unwrap();
        let seen = policy(&child, shown);
        let (answer, said) = answered(child);
        assert_eq!(answer, expected, "--numa {name}");
        let refused = said.contains("set_mempolicy failed");
        assert!(refused || seen.is_none_or(|seen| seen.starts_with(shown)), "--numa {name}");
        // Of several nodes this process may be allowed one.
        assert!(said.contains("changes nothing: ") || nodes() > 1, "{said}");
    }
    for name in ["off", "numactl"] {
        let (answer, said) = answered(generation(&["--numa", name]).spawn().unwrap());
        assert_eq!((&answer, said.contains("changes nothing")), (&expected, false), "--numa {name}");
    }
}

/// The command where the kernel refuses to take a policy of memory.
fn refused(mut command: Command) -> io::Result<Child> {
    let action = SeccompAction::Errno(libc::EPERM as u32);
    let rules = BTreeMap::from([(libc::SYS_set_mempolicy, vec![])]);
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap().try_into().unwrap();
    std::thread::spawn(move || {
        // A filter is inherited, and stays with this thread.
        seccompiler::apply_filter(&filter).unwrap();
        command.spawn()
    })
    .join()
    .unwrap()
}

#[test]
fn a_policy_that_is_refused_is_an_error_where_there_are_several_nodes_and_a_line_where_there_is_one() {
    let child = refused(generation(&["--numa", "interleave"])).unwrap();
    if nodes() > 1 {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("set_mempolicy failed: ") && said.contains("EPERM") && said.contains("hint: "), "{said}");
        return;
    }
    let (answer, said) = answered(child);
    assert_eq!(answer, answered(generation(&[]).spawn().unwrap()).0);
    assert!(nodes() == 0 || said.contains("set_mempolicy failed: ") && said.contains("EPERM"), "{said}");
}

#[test]
fn whatever_computes_takes_the_flag() {
    let ok = |mut command: Command| -> Output {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let numa = ["--numa", "isolate"];
    ok(millstream("bench", &[&["-p", "8", "-n", "4", "-r", "1"], &numa[..]].concat()));
    ok(millstream("profile", &[&["-p", "a", "-n", "4"], &numa[..]].concat()));
    ok(millstream("plan", &[&["--untimed"], &numa[..]].concat()));
    let output = ok(millstream("info", &["--json"]));
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["machine"]["nodes"].as_array().unwrap().len(), nodes());
}
