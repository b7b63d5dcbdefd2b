//! A conversion in a process of its own that waits at each thing it reports, so that it can be killed just there.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use millstream::checkpoint::convert::{ConvertOptions, convert};

const FROM: &str = "CONVERT_FROM";
const INTO: &str = "CONVERT_INTO";
const STEPS: &str = "CONVERT_STEPS";

/// What the child does: a test of the name that is given to [`child`] calls it, and does nothing without one.
pub fn converts(options: &ConvertOptions) {
    let (Some(src), Some(dst)) = (std::env::var_os(FROM), std::env::var_os(INTO)) else { return };
    let step = std::env::var_os(STEPS).is_some();
    let mut lines = std::io::stdin().lines();
    let result = convert(Path::new(&src), Path::new(&dst), options, &mut |progress| {
        if step {
            println!("event {progress}");
            lines.next().unwrap().unwrap();
        }
    });
    if let Err(error) = result {
        println!("refused {error}");
        std::process::exit(9);
    }
}

/// Starts the test `name` of this program as a child, below `shell`.
pub fn child(name: &str, shell: &str, src: &Path, dst: &Path, steps: bool) -> Child {
    let mut command = Command::new("bash");
    command.arg("-c").arg(format!("{shell} exec \"$0\" \"$@\"")).arg(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env(FROM, src).env(INTO, dst);
    if steps {
        command.env(STEPS, "1");
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// Lets the child pass `events` events and returns with it stopped at the next, or `false` at its end.
pub fn advance(input: &mut ChildStdin, output: &mut BufReader<ChildStdout>, events: usize) -> bool {
    let mut passed = 0;
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        if line.contains("event ") {
            if passed == events {
                return true;
            }
            passed += 1;
            writeln!(input).unwrap();
        }
        line.clear();
    }
    false
}
