//! Conversions that are killed, and whose drives fail: nothing is lost, and the next run ends with the same bytes.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/conversions.rs"]
mod conversions;
#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;
#[path = "common/stepped.rs"]
mod stepped;

use conversions::*;
use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{ConvertOptions, convert};
use millstream::checkpoint::verify::Manifest;
use program::{refused, stderr};
use safetensors::tiny_model;
use seccompiler::SeccompCmpArgLen::Qword;
use seccompiler::SeccompCmpOp::{Eq, Ge, Le};
use seccompiler::{BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stepped::advance;

/// A copy of what `source` holds.
fn copy(source: &BTreeMap<String, Vec<u8>>) -> tempfile::TempDir {
    let dir = quick_dir();
    source.iter().for_each(|(name, bytes)| fs::write(dir.path().join(name), bytes).unwrap());
    dir
}

// Killed for good.

/// Kills the program at many times of its conversion, with SIGKILL, and lets it end the next time.
fn killed_at_many_times(flags: &[&str], template: &Path, after: impl Fn(&Path, &Path)) {
    let expected = whole(template);
    let source = contents(template);
    let home = quick_dir();
    let began = Instant::now();
    assert!(convert_command(copy(&source).path(), &home.path().join("timed"), flags).status().unwrap().success());
    let took = began.elapsed();
    let mut unfinished = 0;
    for kill in 1..=24u32 {
        let (src, dst) = (copy(&source), home.path().join(kill.to_string()));
        let mut child = convert_command(src.path(), &dst, flags).spawn().unwrap();
        std::thread::sleep(took * kill / 24 + Duration::from_millis(1));
        child.kill().unwrap();
        let ended = child.wait().unwrap().success();
        unfinished += usize::from(!ended);
        if dst.exists() {
            assert!(ended || Checkpoint::open(&dst).is_err() || shards(&dst).len() == 12);
            after(src.path(), &dst);
        }
        let output = convert_command(src.path(), &dst, flags).stderr(Stdio::piped()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_same_files(&dst, &expected);
        fs::remove_dir_all(&dst).unwrap();
    }
    println!("{unfinished} of 24 were killed before their end");
}

#[test]
fn a_program_killed_at_any_time_goes_on_to_the_same_bytes() {
    let template = sharded(tiny_model());
    killed_at_many_times(&[], template.path(), |_, _| {});
}

#[test]
fn a_program_killed_while_it_consumes_its_source_goes_on_to_the_same_bytes() {
    let template = sharded(tiny_model());
    let before = tensors_of(template.path());
    killed_at_many_times(&["--delete-source"], template.path(), |src, dst| assert_nothing_lost(src, dst, &before));
}

/// Not a test: the process that the next one kills.
#[test]
#[ignore = "run by the test that kills it"]
fn child_consumes() {
    stepped::converts(&options());
}

#[test]
fn a_process_killed_at_any_event_of_consuming_its_source_has_lost_nothing() {
    let template = sharded(tiny_model());
    let (expected, before, source) = (whole(template.path()), tensors_of(template.path()), contents(template.path()));
    let mut events = 0;
    convert(template.path(), quick_dir().path(), &options(), &mut |_| events += 1).unwrap();
    let mut consumed = 0;
    for event in (1..events).step_by(3) {
        let (src, dst) = (copy(&source), quick_dir());
        let mut child = stepped::child("child_consumes", "", src.path(), dst.path(), true);
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        assert!(advance(&mut input, &mut output, event), "it ended before event {event} of {events}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Checkpoint::open(dst.path()).is_err(), "an unfinished conversion opened as a model");
        assert_nothing_lost(src.path(), dst.path(), &before);
        consumed += usize::from(shards(src.path()).len() < SHARDS);
        quietly(src.path(), dst.path(), &options()).unwrap();
        assert_same_files(dst.path(), &expected);
        assert!(shards(src.path()).is_empty());
    }
    assert!(consumed > 3, "{consumed} of {events} events were between two removals");
}

// Drives that fail. The program is told so by a filter of system calls, which sees numbers: places and lengths.

/// A filter that answers `errno` to a call whose arguments are as `conditions` say, and forbids io_uring, whose reads no
/// filter sees.
fn failing(call: libc::c_long, conditions: Vec<SeccompCondition>, errno: i32) -> [BpfProgram; 2] {
    let compiled = |rules, errno: i32| -> BpfProgram {
        let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        let action = SeccompAction::Errno(errno as u32);
        SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap().try_into().unwrap()
    };
    let rules = if conditions.is_empty() { vec![] } else { vec![SeccompRule::new(conditions).unwrap()] };
    let failing = compiled([(call, rules)].into(), errno);
    [compiled([(libc::SYS_io_uring_setup, vec![])].into(), libc::EPERM), failing]
}

/// An argument of `pread64` and `pwrite64`.
const COUNT: u8 = 2;
const OFFSET: u8 = 3;
/// The coarsest places that a direct read may begin at.
const SECTOR_MAX: u64 = 4096;

fn at(argument: u8, op: seccompiler::SeccompCmpOp, value: u64) -> SeccompCondition {
    SeccompCondition::new(argument, Qword, op, value).unwrap()
}

/// A place in the source from which a weight of an expert is read, and nothing as long of the result.
fn weight_of_one_read(src: &Path, dst: &Path) -> u64 {
    let runs = Manifest::read(&Checkpoint::open(dst).unwrap()).unwrap().runs;
    let source = Checkpoint::open(src).unwrap();
    let experts = source.experts.layers.iter().flatten().flatten().skip(12);
    let mut places = experts.flat_map(|expert| expert.matrices().map(|matrix| matrix.data.offset));
    // A direct read begins on a sector before it.
    places.find(|place| runs.iter().all(|run| run.span.offset.abs_diff(*place) >= SECTOR_MAX)).unwrap()
}

/// What fails, the call, its arguments, what it is answered, and words of what is said then.
type Case<'a> = (&'a str, libc::c_long, Vec<SeccompCondition>, i32, &'a [&'a str]);

#[test]
fn a_drive_that_fails_anywhere_is_named_with_a_hint_and_the_next_run_ends_with_the_same_bytes() {
    let template = sharded(tiny_model());
    let (before, source) = (tensors_of(template.path()), contents(template.path()));
    let made = quick_dir();
    quietly(template.path(), made.path(), &ConvertOptions::default()).unwrap();
    let expected = contents(made.path());
    let place = weight_of_one_read(template.path(), made.path());
    let (eio, full) = (libc::EIO, libc::ENOSPC);
    // The first expert of a shard lies at 2 MiB, beyond all of this source, and only shards of experts are that long.
    let (huge, long) = (2 << 20, 2 << 20);
    // 64 x 64 weights of 16 bits; what is sampled of the source is half as long.
    let reads_of_source =
        vec![at(OFFSET, Ge, place - (SECTOR_MAX - 1)), at(OFFSET, Le, place), at(COUNT, Ge, 2 * 64 * 64)];
    let cases: [Case; 6] = [
        ("a read of the source", libc::SYS_pread64, reads_of_source, eio, &["model-0000", "os error 5", "dmesg"]),
        (
            "a read back",
            libc::SYS_pread64,
            vec![at(OFFSET, Eq, huge)],
            eio,
            &["dst/out-00003.safetensors reads back otherwise", "os error 5", "dmesg"],
        ),
        ("a write", libc::SYS_pwrite64, vec![at(COUNT, Ge, long)], eio, &["cannot write", "out-00003", "os error 5"]),
        (
            "a full disk",
            libc::SYS_pwrite64,
            vec![at(COUNT, Ge, long)],
            full,
            &["out-00003", "os error 28", "free space"],
        ),
        ("no sync", libc::SYS_fsync, vec![], eio, &["cannot sync", "os error 5", "dmesg"]),
        #[cfg(target_arch = "x86_64")]
        ("no name", libc::SYS_rename, vec![], eio, &["cannot remove shards", "os error 5", "dmesg"]),
    ];
    for (what, call, conditions, errno, words) in cases {
        let (src, home) = (copy(&source), quick_dir());
        let dst = home.path().join("dst");
        let filters = failing(call, conditions, errno);
        let mut command = convert_command(src.path(), &dst, &["--delete-source"]);
        // SAFETY: the closure only makes the system calls that apply filters made before the fork.
        unsafe {
            command.pre_exec(move || {
                filters.iter().try_for_each(|filter| seccompiler::apply_filter(filter).map_err(io::Error::other))
            });
        }
        let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
        println!("{what}: {}", stderr(&output));
        refused(&output, 1, words);
        assert!(stderr(&output).contains("hint: "), "{what}: {}", stderr(&output));
        assert!(Checkpoint::open(&dst).is_err(), "{what}");
        // A conversion that wrote nothing leaves no directory.
        std::fs::create_dir_all(&dst).unwrap();
        assert_nothing_lost(src.path(), &dst, &before);
        for (name, bytes) in contents(&dst).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            assert!(expected[name] == *bytes, "{what}: {name} differs");
        }
        quietly(src.path(), &dst, &options()).unwrap();
        assert_same_files(&dst, &expected);
        assert!(shards(src.path()).is_empty());
    }
}
