//! The program where a machine is less than friendly: io_uring forbidden, no direct reads, nothing to write to, nobody
//! special, no network. The answer is always the one of a friendly machine.

#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;

use std::ffi::CString;
use std::fs::Permissions;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use program::{forget_settings, ram_besides_program};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use tempfile::TempDir;

const NOBODY: u32 = 65534;
/// Of linux/capability.h.
const CAP_SYS_ADMIN: libc::c_ulong = 21;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")
}

/// A short greedy generation with a pool far smaller than the model, so that experts are read throughout.
fn generation(model: &Path, extra: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["run", "-p", "Tell me a story about a fox.", "-n", "24", "--temp", "0"]);
    command.args(["--ram", &ram_besides_program(11, model), "-m"]);
    // No tuning profile of whoever runs this.
    command.arg(model).args(extra).env("XDG_STATE_HOME", "/dev/null/nowhere").stdin(Stdio::null());
    forget_settings(&mut command);
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Standard output of a run that must succeed; `words` must all be in its standard error.
#[track_caller]
fn answer(output: &Output, words: &[&str]) -> String {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "signal {:?}: {said}", output.status.signal());
    for word in words {
        assert!(said.contains(word), "no {word:?} in: {said}");
    }
    text(&output.stdout).to_owned()
}

/// What every run here must answer: found once, by reader threads without direct reads.
fn expected() -> &'static str {
    static ANSWER: OnceLock<String> = OnceLock::new();
    ANSWER.get_or_init(|| {
        let plain = generation(container(), &["--device", "threads", "--io", "buffered"]).output().unwrap();
        answer(&plain, &["reads"])
    })
}

/// The bundled model as a container, converted once.
fn container() -> &'static Path {
    static DIR: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    &DIR.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        let model = dir.path().join("model");
        let mut convert = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = convert.args(["convert", "-q"]).arg(bundled()).arg(&model).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        (dir, model)
    })
    .1
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// A filter that does `action` on every io_uring call.
fn forbid_io_uring(action: SeccompAction) -> BpfProgram {
    let calls = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    let rules = calls.into_iter().map(|call| (call, vec![])).collect();
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap().try_into().unwrap()
}

fn under_filter(mut command: Command, program: BpfProgram) -> Output {
    // SAFETY: the closure only makes the one system call that applies a filter made before the fork.
    unsafe {
        command.pre_exec(move || seccompiler::apply_filter(&program).map_err(io::Error::other));
    }
    command.output().unwrap()
}

#[test]
fn io_uring_denied_by_a_filter_falls_back_to_threads_with_one_line() {
    for errno in [libc::EPERM, libc::ENOSYS] {
        let filter = forbid_io_uring(SeccompAction::Errno(errno as u32));
        let output = under_filter(generation(container(), &[]), filter);
        assert_eq!(answer(&output, &["io_uring", "threads, "]), expected());
        let lines = text(&output.stderr).lines().filter(|line| line.contains("io_uring")).count();
        assert_eq!(lines, 1, "{}", text(&output.stderr));
    }
    let filter = forbid_io_uring(SeccompAction::Errno(libc::EPERM as u32));
    let output = under_filter(generation(container(), &["--device", "uring"]), filter);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("hint:"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn where_an_io_uring_call_kills_threads_make_none() {
    let output =
        under_filter(generation(container(), &["--device", "threads"]), forbid_io_uring(SeccompAction::KillProcess));
    assert_eq!(answer(&output, &["threads, "]), expected());
}

/// As on a machine where `kernel.io_uring_disabled` is `value`: the file says so, and a filter refuses as the kernel
/// then does. The setting itself is everybody's.
fn as_if_disabled(command: Command, value: &str) -> Option<Output> {
    let dir = TempDir::new().unwrap();
    let shown = dir.path().join("io_uring_disabled");
    std::fs::write(&shown, format!("{value}\n")).unwrap();
    let shown = CString::new(shown.as_os_str().as_bytes()).unwrap();
    let filter = forbid_io_uring(SeccompAction::Errno(libc::EPERM as u32));
    let change = move || {
        let (switch, none) = (c"/proc/sys/kernel/io_uring_disabled".as_ptr(), std::ptr::null());
        // SAFETY: no memory is involved.
        check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
        // SAFETY: the strings live until exec; the other pointers may be null for these flags.
        check(unsafe { libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) })?;
        // SAFETY: as above.
        check(unsafe { libc::mount(shown.as_ptr(), switch, none, libc::MS_BIND, none.cast()) })?;
        seccompiler::apply_filter(&filter).map_err(io::Error::other)
    };
    changed(command, change)
}

#[test]
fn where_a_sysctl_disables_io_uring_threads_read_and_the_sysctl_is_named() {
    if !Path::new("/proc/sys/kernel/io_uring_disabled").exists() {
        return eprintln!("skipped: this kernel has no kernel.io_uring_disabled");
    }
    for value in ["1", "2"] {
        let Some(output) = as_if_disabled(generation(container(), &[]), value) else { return };
        let words = ["threads, ", &format!("kernel.io_uring_disabled is {value}"), "sysctl kernel.io_uring_disabled=0"];
        assert_eq!(answer(&output, &words), expected());
        let output = as_if_disabled(generation(container(), &["--device", "uring"]), value).unwrap();
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""));
        let said = text(&output.stderr);
        assert!(said.contains(&format!("kernel.io_uring_disabled is {value}")) && said.contains("hint:"), "{said}");
    }
}

/// A setting of the whole machine, put back when this is dropped, and when this process ends in any way: a shell waits
/// for the end of its input.
struct Sysctl {
    keeper: Child,
}

impl Sysctl {
    const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";

    fn keep() -> Sysctl {
        let before = std::fs::read_to_string(Sysctl::SWITCH).unwrap();
        let script = format!("trap '' INT TERM HUP; read -r line; echo {} > {}", before.trim(), Sysctl::SWITCH);
        let keeper = Command::new("/bin/sh").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap();
        Sysctl { keeper }
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// The real setting is the whole machine's, so that this disturbs whatever runs beside it: only where it is asked for,
/// and then alone (`--exact`).
#[test]
fn the_real_sysctl_disables_io_uring_for_the_unprivileged_and_for_all() {
    if std::env::var_os("MILLSTREAM_TEST_SYSCTL").is_none() {
        return eprintln!("skipped: MILLSTREAM_TEST_SYSCTL=1 lets this change kernel.io_uring_disabled for a moment");
    }
    let (container, expected) = (container(), expected());
    let unprivileged = || {
        // SAFETY: the call takes numbers.
        check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0) })
    };
    let before = std::fs::read_to_string(Sysctl::SWITCH).unwrap();
    let keeper = Sysctl::keep();
    for (value, root_may) in [("1", true), ("2", false)] {
        std::fs::write(Sysctl::SWITCH, value).unwrap();
        let refused = ["threads, ", &format!("kernel.io_uring_disabled is {value}")];
        let output = generation(container, &[]).output().unwrap();
        assert_eq!(answer(&output, if root_may { &["io_uring"] } else { &refused }), expected);
        assert_eq!(text(&output.stderr).contains("io_uring_disabled"), !root_may, "{}", text(&output.stderr));
        let output = changed(generation(container, &[]), unprivileged).unwrap();
        assert_eq!(answer(&output, &refused), expected);
    }
    drop(keeper);
    assert_eq!(std::fs::read_to_string(Sysctl::SWITCH).unwrap(), before);
}

#[test]
fn the_doctor_says_why_there_is_no_io_uring_and_makes_no_call_where_threads_are_asked_for() {
    let doctor = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(["doctor", "--deep", "-m"]).arg(container()).stdin(Stdio::null());
        command.env("XDG_STATE_HOME", "/dev/null/nowhere");
        command
    };
    let output = under_filter(doctor(), forbid_io_uring(SeccompAction::Errno(libc::EPERM as u32)));
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    let verdict: Vec<&str> = said.lines().skip_while(|line| !line.contains("io_uring ")).take(2).collect();
    assert!(verdict[0].starts_with("warn") && verdict[0].contains("EPERM"), "{said}");
    // Where a sysctl forbids it as well, that is the remedy that comes first.
    let remedy = verdict[1].contains("seccomp") || verdict[1].contains("io_uring_disabled");
    assert!(verdict[1].contains("hint: ") && remedy, "{said}");
    assert!(said.contains("all as written") && said.ends_with("result: warning\n"), "{said}");

    let mut command = doctor();
    command.env("MILLSTREAM_DEVICE", "threads");
    let output = under_filter(command, forbid_io_uring(SeccompAction::KillProcess));
    assert_eq!(output.status.code(), Some(0), "{:?}", output.status);
    assert!(text(&output.stdout).contains("all as written"), "{}", text(&output.stdout));
}

#[test]
fn a_file_system_without_direct_reads_is_said_and_used() {
    let Ok(memory) = TempDir::new_in("/dev/shm") else {
        eprintln!("skipped: /dev/shm cannot be written to");
        return;
    };
    let model = memory.path().join("model");
    std::fs::create_dir(&model).unwrap();
    copy_files(container(), &model);
    let output = generation(&model, &[]).output().unwrap();
    assert_eq!(answer(&output, &["buffered"]), expected());
    let output = generation(&model, &["--io", "direct"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("hint:"), "{}", text(&output.stderr));
}

/// Runs `change` in the child between fork and exec; `None` where this user may not do it.
fn changed(mut command: Command, change: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> Option<Output> {
    // SAFETY: the closures passed here only make system calls on values made before the fork.
    unsafe {
        command.pre_exec(change);
    }
    match command.output() {
        Ok(output) => Some(output),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            eprintln!("skipped: this user may not change the child's surroundings ({e})");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[test]
fn a_read_only_mount_is_enough() {
    let dir = CString::new(container().as_os_str().as_bytes()).unwrap();
    let mount = move || {
        let (dir, none) = (dir.as_ptr(), std::ptr::null());
        // SAFETY: no memory is involved.
        check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        // SAFETY: the strings live until exec; the other pointers may be null for these flags.
        check(unsafe { libc::mount(none, c"/".as_ptr(), none, private, none.cast()) })?;
        // SAFETY: as above.
        check(unsafe { libc::mount(dir, dir, none, libc::MS_BIND, none.cast()) })?;
        let read_only = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
        // SAFETY: as above.
        check(unsafe { libc::mount(none, dir, none, read_only, none.cast()) })
    };
    if let Some(output) = changed(generation(container(), &[]), mount) {
        assert_eq!(answer(&output, &[]), expected());
    }
}

#[test]
fn an_ordinary_user_without_a_home_or_a_network_converts_and_runs() {
    // SAFETY: the call takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: this is an ordinary user already");
        return;
    }
    let own = TempDir::new().unwrap();
    std::fs::set_permissions(own.path(), Permissions::from_mode(0o777)).unwrap();
    let program = own.path().join("millstream");
    std::fs::copy(env!("CARGO_BIN_EXE_millstream"), &program).unwrap();
    // The clone may lie where only its owner can look.
    let model = own.path().join("model");
    std::fs::create_dir(&model).unwrap();
    copy_files(&bundled(), &model);
    let mut command = Command::new(&program);
    command.args(["convert", "-q"]).arg(&model).arg(own.path().join("container")).current_dir(own.path());
    let drop_rights = || {
        // SAFETY: no memory is involved.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
        // SAFETY: no memory is involved.
        check(unsafe { libc::setgid(NOBODY) })?;
        // SAFETY: no memory is involved.
        check(unsafe { libc::setuid(NOBODY) })
    };
    let Some(output) = changed(command, drop_rights) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let like = generation(&own.path().join("container"), &[]);
    let mut command = Command::new(&program);
    command.args(like.get_args()).env("HOME", "/dev/null/nowhere").env_remove("XDG_CACHE_HOME").current_dir(own.path());
    command.env_remove("XDG_STATE_HOME");
    let output = changed(command, drop_rights).unwrap();
    assert_eq!(answer(&output, &[]), expected());

    // The same where not one more process or thread may be: loading and converting make do with the one there is.
    let alone = move || {
        let limit = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
        // SAFETY: the limit outlives the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) })?;
        drop_rights()
    };
    let mut command = Command::new(&program);
    command.args(["convert", "-q"]).arg(&model).arg(own.path().join("alone")).current_dir(own.path());
    let output = changed(command, alone).unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for name in ["out-00000.safetensors", "out-00008.safetensors"] {
        let [one, other] = ["container", "alone"].map(|dir| std::fs::read(own.path().join(dir).join(name)).unwrap());
        assert!(one == other, "{name} depends on the threads that wrote it");
    }
    let mut command = Command::new(&program);
    command.args(like.get_args()).args(["--device", "threads"]).current_dir(own.path());
    let output = changed(command, alone).unwrap();
    let said = text(&output.stderr);
    assert!(!said.contains("panicked"), "{said}");
    if output.status.code() != Some(0) {
        assert!(said.contains("thread") && said.contains("hint:"), "{said}");
    }

    // And quantizing while loading, wherever a run is possible at all.
    let like = generation(&model, &["-t", "1", "--ram", "256M", "--dense-bits", "8", "--io-bits", "8"]);
    let quantized = || {
        let mut command = Command::new(&program);
        command.args(like.get_args()).env("HOME", "/dev/null/nowhere").current_dir(own.path());
        command
    };
    let (with, without) = (changed(quantized(), drop_rights).unwrap(), changed(quantized(), alone).unwrap());
    match without.status.code() {
        Some(0) => assert_eq!(answer(&without, &[]), answer(&with, &[])),
        _ => assert!(text(&without.stderr).contains("thread"), "{}", text(&without.stderr)),
    }

    // A directory above the model that may not be entered is no model that does not exist.
    let locked = own.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, Permissions::from_mode(0o700)).unwrap();
    let mut command = Command::new(&program);
    command.args(["run", "-p", "x", "-m"]).arg(locked.join("model")).current_dir(own.path());
    let output = changed(command, drop_rights).unwrap();
    let said = text(&output.stderr);
    assert!(
        output.status.code() == Some(2) && said.contains("ermission denied") && said.contains("may not enter"),
        "{said}"
    );

    // A cache that holds the container and cannot be written is used as it is.
    std::fs::create_dir(own.path().join("models")).unwrap();
    std::os::unix::fs::symlink(&model, own.path().join("models/glm-tales")).unwrap();
    let cache = own.path().join("cache");
    let first_use = |drop: bool| {
        let mut command = Command::new(&program);
        command.args(["run", "-p", "x", "-n", "1"]).env("XDG_CACHE_HOME", &cache).current_dir(own.path());
        // Whoever runs this test may have the container in a cache of their own.
        command.env("HOME", own.path()).env("TMPDIR", own.path());
        match drop {
            true => changed(command, drop_rights).unwrap(),
            false => command.output().unwrap(),
        }
    };
    answer(&first_use(false), &["first use"]);
    let output = first_use(true);
    answer(&output, &["allowed"]);
    assert!(!text(&output.stderr).contains("first use"), "{}", text(&output.stderr));
}

/// A run of the program in which `limited`, a resource, has `kib`; none where so little is left that no program starts.
fn within(limited: libc::__rlimit_resource_t, kib: u64, io: &str, model: &Path, args: &[&str]) -> Option<Output> {
    let limit = libc::rlimit { rlim_cur: kib << 10, rlim_max: kib << 10 };
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(args).arg("-m").arg(model).env("XDG_STATE_HOME", "/dev/null/nowhere");
    forget_settings(&mut command);
    // With many cores little is left of the others.
    command.env("MILLSTREAM_THREADS", "2").env("MILLSTREAM_IO", io);
    // SAFETY: the limit outlives the call.
    let output = changed(command, move || check(unsafe { libc::setrlimit(limited, &raw const limit) })).unwrap();
    // The loader's own exit code, or the kernel's signal.
    let started = output.status.code().is_some_and(|code| code != 127) || output.status.signal() == Some(libc::SIGABRT);
    started.then_some(output)
}

#[test]
fn under_a_limit_on_what_may_be_mapped_what_doctor_passes_runs_and_nothing_aborts() {
    let own = TempDir::new().unwrap();
    let model = own.path().join("model");
    let mut synth = Command::new(env!("CARGO_BIN_EXE_millstream"));
    // More experts than memory is allowed for them, so that all of it is taken.
    let made = synth.args(["synth", "-q", "--preset", "small", "--experts", "1024"]).arg(&model).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    let run_args = ["run", "--raw", "-p", "x", "-n", "1"];
    let agree = |limited, kib, io: &str| {
        let doctor = within(limited, kib, io, &model, &["doctor"])?;
        let run = within(limited, kib, io, &model, &run_args)?;
        let said = format!("{}{}", text(&run.stderr), text(&doctor.stdout));
        let codes = [run.status.code(), doctor.status.code()];
        // Doctor asks for room for a greeting, which is a little longer than this prompt.
        assert!([[0, 0], [0, 1], [1, 1]].map(|codes| codes.map(Some)).contains(&codes), "{kib} KiB, {io}: {said}");
        Some((run, doctor))
    };
    for (limited, set_by) in [(libc::RLIMIT_AS, "ulimit -v"), (libc::RLIMIT_DATA, "ulimit -d")] {
        let mut least = None;
        for kib in (14..90).step_by(4).chain([100, 160, 300, 2000]).map(|megabytes| megabytes << 10) {
            // What does not fit is refused, and ends nothing that looks only.
            for command in ["info", "plan", "census"] {
                let Some(output) = within(limited, kib, "auto", &model, &[command]) else { continue };
                let said = text(&output.stderr);
                let refused = output.status.code() == Some(1) && said.contains("error: ") && said.contains("hint: ");
                assert!(output.status.success() || refused, "{command}, {kib} KiB: {said}");
            }
            let Some((run, doctor)) = agree(limited, kib, "auto") else { continue };
            assert!(kib < 100 << 10 || doctor.status.success(), "{kib} KiB: {}", text(&doctor.stdout));
            let said = text(&run.stderr).to_owned();
            assert!(run.status.success() || said.contains(set_by), "{kib} KiB: {said}");
            // A run that is refused for its memory names a limit under which it runs.
            if let Some((_, rest)) = said.split_once(&format!("`{set_by} ")) {
                least = rest.split('`').next().and_then(|kib| kib.parse::<u64>().ok());
            }
        }
        let least = least.unwrap_or_else(|| panic!("{set_by}: no limit was named"));
        assert!(agree(limited, least, "auto").is_some_and(|(run, _)| run.status.success()), "{least} KiB");
        agree(limited, 2_000 << 10, "mmap");
        agree(limited, 100 << 10, "mmap");
        agree(limited, 100 << 10, "buffered");
    }
}

/// How often `path` is opened while `work` is done, by whomever.
fn openings(path: &Path, work: impl FnOnce()) -> usize {
    use std::io::Read;
    use std::os::fd::FromRawFd;
    // SAFETY: the call takes no pointer.
    let descriptor = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
    assert!(descriptor >= 0, "{}", io::Error::last_os_error());
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // Closings too, so that two openings are never next to each other and reported as one.
    // SAFETY: the name is a string that outlives the call.
    let watch = unsafe { libc::inotify_add_watch(descriptor, name.as_ptr(), libc::IN_OPEN | libc::IN_CLOSE) };
    assert!(watch >= 0, "{}", io::Error::last_os_error());
    work();
    // SAFETY: the descriptor is open and nobody else owns it.
    let mut events = unsafe { std::fs::File::from_raw_fd(descriptor) };
    let mut bytes = vec![0; 1 << 16];
    let filled = events.read(&mut bytes).unwrap_or(0);
    // Events of a watched file have no name: watch, mask, cookie, length, four bytes each.
    let masks = bytes[..filled].chunks_exact(16).map(|event| u32::from_ne_bytes(event[4..8].try_into().unwrap()));
    masks.filter(|mask| mask & libc::IN_OPEN != 0).count()
}

#[test]
fn a_run_reads_the_checkpoint_once() {
    // A copy of its own: other tests open the shared one meanwhile.
    let own = TempDir::new().unwrap();
    copy_files(container(), own.path());
    let config = own.path().join("config.json");
    let once = openings(&config, || drop(millstream::checkpoint::Checkpoint::open(own.path()).unwrap()));
    assert!(once > 0);
    let run = openings(&config, || drop(answer(&generation(own.path(), &[]).output().unwrap(), &["reads"])));
    assert_eq!(run, once);
}
