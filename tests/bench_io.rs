//! `bench-io` as a whole command, on small files: what it reports, what it leaves behind, what it refuses.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use program::{refused, stderr, stdout};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use serde_json::Value;
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
const SLAB: u64 = 512 << 10;

/// Quick, on 16 MiB in slabs of 512 KiB, one round of a moment each.
fn bench(extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["bench-io", "--quick", "--slab", "512K", "--secs", "0.02", "--rounds", "1"]).args(extra);
    command.stdin(Stdio::null());
    command
}

/// A directory on the disk that the build is on, not in memory.
fn disk_dir() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn file_in(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("file");
    let content: Vec<u8> = (0..SIZE / 8).flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    fs::write(&path, content).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    path
}

#[track_caller]
fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

#[test]
fn the_report_has_every_key_and_the_scratch_file_is_announced_and_gone() {
    let dir = disk_dir();
    let path = dir.path().to_str().unwrap();
    let output = bench(&["--dir", path, "--size", "16M", "--json"]).output().unwrap();
    let report = json(&output);
    for key in [
        "schema_version",
        "machine",
        "file",
        "limits",
        "io_uring",
        "results",
        "fio",
        "best",
        "ratio_to_fio",
        "recommended",
    ] {
        assert!(report.get(key).is_some(), "no {key}");
    }
    for (object, keys) in [
        (&report["file"], &["path", "bytes", "fs", "dio_mem_align", "dio_offset_align", "extents"][..]),
        (
            &report["limits"],
            &["max_sectors_kb", "max_segments", "nr_requests", "read_ahead_kb", "scheduler", "memlock", "thp"],
        ),
        (&report["io_uring"], &["available", "reason"]),
        (&report["recommended"], &["reason"]),
    ] {
        for key in keys {
            assert!(object.get(key).is_some(), "no {key} in {object}");
        }
    }
    assert_eq!(report["file"]["bytes"], SIZE);
    assert_eq!(report["file"]["places"], SIZE / SLAB);
    assert_eq!((&report["fio"], &report["ratio_to_fio"]), (&Value::Null, &Value::Null));
    let results = report["results"].as_array().unwrap();
    assert!(results.len() >= 2, "{}", stdout(&output));
    for result in results {
        for key in [
            "device",
            "mode",
            "depth",
            "chunk",
            "pages",
            "registered",
            "rounds",
            "gb_s",
            "gb_s_min",
            "gb_s_max",
            "cpu_s_per_gb",
            "p50_ms",
            "p99_ms",
            "amplification",
            "cached",
        ] {
            assert!(result.get(key).is_some(), "no {key} in {result}");
        }
        let number = |key: &str| result[key].as_f64().unwrap();
        assert_eq!(result["rounds"], 1);
        assert!(number("gb_s") > 0.0 && number("gb_s_min") <= number("gb_s") && number("gb_s") <= number("gb_s_max"));
        assert!(number("p50_ms") <= number("p99_ms"));
    }
    let said = stderr(&output);
    for word in ["scratch file of 16.8 MB", path, "no name", "io_uring", "max_sectors_kb", "nr_hugepages", "extents"] {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
    assert_eq!(entries(dir.path()), 0);
}

#[test]
fn limits_are_those_of_the_device_under_the_file() {
    let dir = disk_dir();
    let file = file_in(&dir);
    let number = fs::metadata(&file).unwrap().dev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    let queue = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/queue"));
    if !queue.is_dir() {
        return eprintln!("skipped: {} is not a whole device", queue.display());
    }
    let report = json(&bench(&["--file", file.to_str().unwrap(), "--json", "-q"]).output().unwrap());
    for name in ["max_sectors_kb", "max_segments", "nr_requests", "read_ahead_kb"] {
        let stated: u64 = fs::read_to_string(queue.join(name)).unwrap().trim().parse().unwrap();
        assert_eq!(report["limits"][name], stated, "{name}");
    }
    assert_eq!(report["file"]["path"], file.to_str().unwrap());
}

#[test]
fn a_users_file_is_only_read() {
    let dir = disk_dir();
    let file = file_in(&dir);
    let (before, content) = (fs::metadata(&file).unwrap(), fs::read(&file).unwrap());
    let output = bench(&["--file", file.to_str().unwrap(), "-q"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    let after = fs::metadata(&file).unwrap();
    assert_eq!((after.mtime_nsec(), after.ctime_nsec(), after.len()), (before.mtime_nsec(), before.ctime_nsec(), SIZE));
    assert!(fs::read(&file).unwrap() == content);
    assert_eq!(entries(dir.path()), 1);
    for word in ["recommended: --io ", "reason: ", "####", "CPU s/GB", "max_segments"] {
        assert!(stdout(&output).contains(word), "no {word:?} in {}", stdout(&output));
    }
}

/// A file that another process keeps in memory cannot be dropped from it.
#[test]
fn what_stays_in_memory_is_called_cached() {
    let dir = disk_dir();
    let path = file_in(&dir);
    let file = fs::File::open(&path).unwrap();
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let map = unsafe {
        use std::os::fd::AsRawFd;
        libc::mmap(std::ptr::null_mut(), SIZE as usize, libc::PROT_READ, flags, file.as_raw_fd(), 0)
    };
    assert_ne!(map, libc::MAP_FAILED);
    let report = json(&bench(&["--file", path.to_str().unwrap(), "--json", "-q"]).output().unwrap());
    let results = report["results"].as_array().unwrap();
    let cached = |mode: &str| -> Vec<bool> {
        results.iter().filter(|r| r["mode"] == mode).map(|r| r["cached"].as_bool().unwrap()).collect()
    };
    assert_eq!(cached("buffered"), [true], "{results:?}");
    if report["file"]["dio_mem_align"].is_null() || report["limits"]["device"].is_null() {
        return eprintln!("skipped: no direct reads here");
    }
    assert!(cached("direct").iter().all(|cached| !cached), "{results:?}");
    assert_eq!(report["best"]["mode"], "direct");
    assert_eq!(report["recommended"]["mode"], "direct");
}

#[test]
fn memory_is_never_sold_as_a_drive() {
    let Ok(memory) = TempDir::new_in("/dev/shm") else { return eprintln!("skipped: no /dev/shm") };
    let dir = memory.path().to_str().unwrap();
    let output = bench(&["--dir", dir, "--size", "8M", "--json"]).output().unwrap();
    let report = json(&output);
    let results = report["results"].as_array().unwrap();
    assert!(!results.is_empty() && results.iter().all(|result| result["cached"] == true), "{results:?}");
    assert!(results.iter().all(|result| result["mode"] != "direct"), "{results:?}");
    assert!(report["best"].is_null() && report["recommended"]["reason"].as_str().unwrap().contains("memory"));
    assert!(stderr(&output).contains("warning   no direct reads"), "{}", stderr(&output));
    assert_eq!(entries(memory.path()), 0);
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn send(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the child is not waited for yet, so its id is its own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

#[test]
fn an_interrupt_ends_it_with_what_there_is_and_no_file() {
    let dir = disk_dir();
    let path = dir.path().to_str().unwrap();
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGKILL] {
        // Longer than anybody waits.
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(["bench-io", "--dir", path, "--size", "16M", "--secs", "300", "--json"]).stdin(Stdio::null());
        let child = start(&mut command);
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(entries(dir.path()), 0, "not even while it runs");
        send(&child, signal);
        let output = child.wait_with_output().unwrap();
        if signal == libc::SIGKILL {
            assert_eq!(output.status.code(), None);
        } else {
            assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
        }
        assert_eq!(entries(dir.path()), 0);
    }
}

/// A program called fio in a directory of its own.
fn fake_fio(script: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("fio");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

#[test]
fn the_ratio_to_fio_is_best_over_its_fastest_run() {
    let dir = disk_dir();
    let file = file_in(&dir);
    // 3 GB in 2 s with 2 % of one CPU: 1.5 GB/s and 0.0133 s/GB.
    let fio = fake_fio(
        r#"echo '{"jobs":[{"job_runtime":2000,"usr_cpu":0.5,"sys_cpu":1.5,"read":{"io_bytes":3000000000,"runtime":2000,
           "clat_ns":{"percentile":{"50.000000":5000000,"99.000000":9000000}}}}]}'"#,
    );
    let arguments = ["--file", file.to_str().unwrap(), "--fio", "--json", "-q"];
    let report = json(&bench(&arguments).env("PATH", fio.path()).output().unwrap());
    assert_eq!((&report["fio"]["gb_s"], &report["fio"]["p99_ms"]), (&Value::from(1.5), &Value::from(9.0)));
    assert!((report["fio"]["cpu_s_per_gb"].as_f64().unwrap() - 0.04 / 3.0).abs() < 1e-5);
    assert!(report["fio"]["settings"].as_str().unwrap().contains("io_uring direct"));
    if let Some(best) = report["best"]["gb_s"].as_f64() {
        assert!((report["ratio_to_fio"].as_f64().unwrap() - best / 1.5).abs() < 1e-2);
    }
    let fio = fake_fio("if [ \"$1\" = --version ]; then exit 0; fi; echo 'fio: no such engine' >&2; exit 1");
    let report = json(&bench(&arguments).env("PATH", fio.path()).output().unwrap());
    assert!(report["fio"].is_null() && report["ratio_to_fio"].is_null());
    assert!(report["fio_note"].as_str().unwrap().contains("no such engine"), "{}", report["fio_note"]);
}

#[test]
fn a_missing_fio_is_said_before_anything_is_written() {
    let (empty, dir) = (TempDir::new().unwrap(), disk_dir());
    let output = bench(&["--fio", "--dir", dir.path().to_str().unwrap()]).env("PATH", empty.path()).output().unwrap();
    refused(&output, 1, &["fio", "install", "hint:"]);
    assert!(!stderr(&output).contains("scratch"));
}

#[test]
fn the_real_fio_reads_the_scratch_file() {
    if Command::new("fio").arg("--version").output().is_err() {
        return eprintln!("skipped: no fio here");
    }
    let dir = disk_dir();
    let arguments = ["--fio", "--json", "-q", "--size", "16M", "--dir", dir.path().to_str().unwrap()];
    let report = json(&bench(&arguments).output().unwrap());
    assert!(report["fio"]["gb_s"].as_f64().is_some_and(|speed| speed > 0.0) || report["fio_note"].is_string());
    assert_eq!(entries(dir.path()), 0);
}

#[test]
fn where_io_uring_is_denied_threads_are_measured_and_the_reason_is_given() {
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    let rules = calls.into_iter().map(|call| (call, vec![])).collect();
    let denied = SeccompAction::Errno(libc::EPERM as u32);
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, denied, arch).unwrap().try_into().unwrap();
    let dir = disk_dir();
    let file = file_in(&dir);
    let mut command = bench(&["--file", file.to_str().unwrap(), "--json", "-q"]);
    // SAFETY: the closure only makes the one system call that applies a filter made before the fork.
    unsafe {
        command.pre_exec(move || seccompiler::apply_filter(&filter).map_err(io::Error::other));
    }
    let report = json(&command.output().unwrap());
    assert_eq!(report["io_uring"]["available"], false);
    assert!(report["io_uring"]["reason"].as_str().unwrap().contains("EPERM"), "{}", report["io_uring"]);
    let results = report["results"].as_array().unwrap();
    assert!(!results.is_empty() && results.iter().all(|result| result["device"] != "uring"), "{results:?}");
    let unavailable = report["unavailable"].as_array().unwrap();
    assert!(unavailable.iter().any(|one| one["candidate"].as_str().unwrap().starts_with("uring")), "{unavailable:?}");
}

#[test]
fn a_way_of_reading_that_fails_is_reported_and_the_others_are_measured() {
    // Whole slabs by `pread` meet a broken drive, and nothing else does: not the reads that look at a file first, not
    // `preadv2` of the mode dontcache, the copies from a mapping or the ring.
    let whole = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, SLAB).unwrap();
    let rules = [(libc::SYS_pread64, vec![SeccompRule::new(vec![whole]).unwrap()])].into();
    let broken = SeccompAction::Errno(libc::EIO as u32);
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let filter: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, broken, arch).unwrap().try_into().unwrap();
    let dir = disk_dir();
    let file = file_in(&dir);
    let run = |json: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(["bench-io", "--slab", "512K", "--secs", "0.02", "--rounds", "2", "-q", "--file"]).arg(&file);
        command.args(json.then_some("--json")).stdin(Stdio::null());
        let filter = filter.clone();
        // SAFETY: the closure only makes the one system call that applies a filter made before the fork.
        unsafe {
            command.pre_exec(move || seccompiler::apply_filter(&filter).map_err(io::Error::other));
        }
        command.output().unwrap()
    };
    let output = run(true);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let failed = report["failed"].as_array().unwrap();
    for candidate in ["threads buffered depth 1 chunk auto", "threads buffered depth 8 chunk auto"] {
        let found = failed.iter().find(|one| one["candidate"] == candidate);
        let reason =
            found.unwrap_or_else(|| panic!("{candidate} did not fail: {failed:?}"))["reason"].as_str().unwrap();
        for word in ["EIO", "524288", file.to_str().unwrap()] {
            assert!(reason.contains(word), "no {word} in {reason}");
        }
    }
    let results = report["results"].as_array().unwrap();
    assert!(results.iter().all(|result| result["device"] != "threads" || result["mode"] == "dontcache"), "{results:?}");
    assert!(results.iter().any(|result| result["device"] == "mmap" && result["rounds"] == 2), "{results:?}");
    let text = run(false);
    assert_eq!(text.status.code(), Some(1));
    assert!(stdout(&text).contains("failed: threads") && stdout(&text).contains("recommended: "), "{}", stdout(&text));
}

/// A control group of version 1 or 2 in which reads of a drive are limited, removed when dropped.
struct Limited {
    dir: PathBuf,
    /// What the kernel shows.
    line: String,
}

impl Limited {
    /// More bytes a second than any drive has: nobody is slowed down.
    const BYTES_S: u64 = 1_000_000_000_000;

    fn make() -> Result<Limited, String> {
        let name = format!("millstream-test-{}", std::process::id());
        let drives = fs::read_dir("/sys/block").map_err(|e| format!("/sys/block: {e}"))?;
        let numbers: Vec<String> =
            drives.flatten().filter_map(|drive| fs::read_to_string(drive.path().join("dev")).ok()).collect();
        let mut why = "no control group can be made".to_owned();
        for (parent, file) in [
            ("/sys/fs/cgroup/blkio", "blkio.throttle.read_bps_device"),
            ("/sys/fs/cgroup", "io.max"),
            ("/sys/fs/cgroup/unified", "io.max"),
        ] {
            let dir = Path::new(parent).join(&name);
            if let Err(error) = fs::create_dir(&dir) {
                why = format!("{}: {error}", dir.display());
                continue;
            }
            for number in numbers.iter().map(|number| number.trim()) {
                let written = match file {
                    "io.max" => format!("{number} rbps={}", Limited::BYTES_S),
                    _ => format!("{number} {}", Limited::BYTES_S),
                };
                if fs::write(dir.join(file), written).is_ok() {
                    let shown = fs::read_to_string(dir.join(file)).unwrap();
                    let line = format!("{}: {}", dir.join(file).display(), shown.trim());
                    return Ok(Limited { dir, line });
                }
            }
            why = format!("{} takes no limit", dir.join(file).display());
            let _ = fs::remove_dir(&dir);
        }
        Err(why)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}

#[test]
fn a_drive_that_the_control_group_throttles_is_said_before_any_number() {
    let group = match Limited::make() {
        Ok(group) => group,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let dir = disk_dir();
    let file = file_in(&dir);
    let run = |extra: &[&str]| {
        let mut command = bench(&["--file", file.to_str().unwrap()]);
        command.args(extra);
        let members = fs::OpenOptions::new().write(true).open(group.dir.join("cgroup.procs")).unwrap();
        // SAFETY: the closure makes one system call on a descriptor opened before the fork.
        unsafe {
            command.pre_exec(move || (&members).write_all(b"0"));
        }
        command.output().unwrap()
    };
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let said = stdout(&output);
    let at = |text: &str| said.find(text).unwrap_or_else(|| panic!("no {text:?} in {said}"));
    assert!(at(&group.line) < at("GB/s") && at("throttled by the control group") < at("GB/s"), "{said}");
    let report = json(&run(&["--json", "-q"]));
    assert_eq!(report["limits"]["cgroup_io"], Value::from(vec![group.line.clone()]));
    assert!(report["warnings"].to_string().contains("throttled by the control group"), "{}", report["warnings"]);
}

#[test]
fn a_model_is_measured_by_its_shards() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales");
    let shards = fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "safetensors"));
    let sizes: Vec<u64> = shards.map(|entry| entry.metadata().unwrap().len()).collect();
    let report = json(&bench(&["-m", model.to_str().unwrap(), "--json", "-q"]).output().unwrap());
    assert_eq!(report["file"]["files"], sizes.len());
    assert_eq!(report["file"]["bytes"], sizes.iter().sum::<u64>());
    assert_eq!(report["file"]["places"], sizes.iter().map(|size| size / SLAB).sum::<u64>());
}

#[test]
fn tables_and_pictures_have_a_row_for_each_result() {
    let dir = disk_dir();
    let file = file_in(&dir);
    let file = file.to_str().unwrap();
    let csv = bench(&["--file", file, "--csv", "-q"]).output().unwrap();
    let lines: Vec<&str> = stdout(&csv).lines().collect();
    assert!(lines[0].starts_with("device,mode,depth,chunk,pages,registered,gb_s,min,max,cpu_s_gb,p50_ms"), "{lines:?}");
    assert!(lines.len() >= 2 && lines.iter().all(|line| line.split(',').count() == 15), "{lines:?}");

    let svg = dir.path().join("sweep.svg");
    let md = bench(&["--file", file, "--md", "-q", "--svg", svg.to_str().unwrap()]).output().unwrap();
    let text = stdout(&md);
    let (facts, table) = (text.find("```text").unwrap(), text.find("| device |").unwrap());
    assert!(facts < table, "what binds comes before any number: {text}");
    assert_eq!(text.lines().filter(|line| line.starts_with('|')).count(), lines.len() + 1, "{text}");
    let picture = fs::read_to_string(svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    let bars = picture.matches("height=\"14\"").count();
    assert_eq!(bars, lines.len() - 1, "{picture}");
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
}

#[test]
fn what_cannot_work_is_refused_before_anything_is_written() {
    let dir = disk_dir();
    let file = file_in(&dir);
    let (file, place) = (file.to_str().unwrap(), dir.path().to_str().unwrap());
    let missing = format!("{place}/none/x.svg");
    let never = format!("{place}/x.svg");
    for (arguments, words) in [
        (&["--file", "/nonexistent/file"][..], &["/nonexistent/file"][..]),
        (&["--file", place], &["is not a file", "hint:"]),
        (&["-m", "/nonexistent"], &["/nonexistent"]),
        (&["-m", place], &["safetensors", "hint:"]),
        (&["--file", file, "--slab", "17M"], &["no slab", "hint:"]),
        (&["--file", file, "--size", "0"], &["--size 0"]),
        (&["--dir", place, "--slab", "0"], &["--slab 0"]),
        (&["--dir", place, "--slab", "2G"], &["1 GiB"]),
        (&["--dir", place, "--size", "1M", "--slab", "2M"], &["holds no"]),
        (&["--dir", place, "--size", "9000T"], &["no room", "hint:"]),
        (&["--dir", "/nonexistent"], &["/nonexistent"]),
        (&["--file", file, "--svg", &missing], &["x.svg"]),
        (&["--file", "/nonexistent/file", "--svg", &never], &["/nonexistent/file"]),
        (&["--file", file, "--secs", "-1"], &["--secs"]),
        (&["--file", file, "--device", "uring"], &["--device"]),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = command.args(["bench-io", "--quick"]).args(arguments).stdin(Stdio::null()).output().unwrap();
        refused(&output, 2, words);
    }
    assert_eq!(entries(dir.path()), 1);
}
