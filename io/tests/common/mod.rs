//! Files whose every byte is known from its position, and every device there is.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use millstream_io::{
    Device, DeviceConfig, DeviceKind, FileId, FileSet, FileSpan, IoError, IoMode, Priority, Read, SimConfig,
    SlabLayout, SlabPool, ThrottleConfig, layout, open_device, sim_device, throttled,
};

/// The byte at `offset` of file number `file`.
pub fn byte_at(file: u32, offset: u64) -> u8 {
    let mixed = (offset ^ u64::from(file) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

/// Writes file number `file` with `bytes` bytes into `dir`.
pub fn write_file(dir: &Path, file: u32, bytes: u64) -> PathBuf {
    let path = dir.join(format!("part-{file}.bin"));
    let content: Vec<u8> = (0..bytes).map(|offset| byte_at(file, offset)).collect();
    let mut out = std::fs::File::create(&path).unwrap();
    out.write_all(&content).unwrap();
    out.sync_all().unwrap();
    path
}

/// Files of the given sizes in a fresh directory, next to the build output: a real file system as a rule.
pub struct Model {
    pub dir: tempfile::TempDir,
    pub paths: Vec<PathBuf>,
}

impl Model {
    pub fn new(sizes: &[u64]) -> Model {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let paths = sizes.iter().zip(0..).map(|(bytes, file)| write_file(dir.path(), file, *bytes)).collect();
        Model { dir, paths }
    }

    pub fn open(&self, mode: IoMode) -> Arc<FileSet> {
        Arc::new(FileSet::open(&self.paths, mode).unwrap())
    }
}

pub fn span(file: u32, offset: u64, len: u64) -> FileSpan {
    FileSpan { file: FileId(file), offset, len }
}

/// Panics unless every span's bytes in `slab` are those of its file.
pub fn check_bytes(plan: &SlabLayout, spans: &[FileSpan], slab: &[u8], context: &str) {
    for (place, span) in plan.places.iter().zip(spans) {
        let bytes = &slab[place.at as usize..][..place.len as usize];
        let wrong = bytes.iter().zip(span.offset..).position(|(byte, offset)| *byte != byte_at(span.file.0, offset));
        assert_eq!(wrong, None, "{context}: first wrong byte of {span:?} at {place:?}");
    }
}

pub fn demand(tag: u64, plan: &SlabLayout) -> Read {
    Read { tag, priority: Priority::Demand, segments: plan.segments }
}

pub fn lookahead(tag: u64, plan: &SlabLayout) -> Read {
    Read { tag, priority: Priority::Lookahead, segments: plan.segments }
}

/// A plan for one span, which must be possible.
pub fn plan_of(files: &FileSet, spans: &[FileSpan]) -> SlabLayout {
    layout(spans, files).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ring,
    Threads,
    Map,
    Sim,
    /// The reader threads, slowed down.
    Throttled,
}

impl Kind {
    /// The mode that lets the device choose most.
    pub fn mode(self) -> IoMode {
        if self == Kind::Map { IoMode::Mmap } else { IoMode::Auto }
    }

    /// Every mode that goes with the device and with the files of this machine's build directory.
    pub fn modes(self) -> Vec<IoMode> {
        let model = Model::new(&[4096]);
        let dontcache = FileSet::open(&model.paths, IoMode::DontCache).is_ok().then_some(IoMode::DontCache);
        match self {
            Kind::Map => vec![IoMode::Mmap],
            Kind::Sim => vec![IoMode::Auto, IoMode::Buffered],
            Kind::Ring | Kind::Threads | Kind::Throttled => {
                [IoMode::Auto, IoMode::Buffered, IoMode::Drop].into_iter().chain(dontcache).collect()
            }
        }
    }
}

/// The devices this machine can run; says which it cannot.
pub fn kinds() -> Vec<Kind> {
    let model = Model::new(&[4096]);
    let pool = SlabPool::new(4096, 1).unwrap();
    let cfg = DeviceConfig { kind: DeviceKind::Uring, ..DeviceConfig::default() };
    match open_device(&cfg, model.open(IoMode::Auto), &pool) {
        Ok(_) => vec![Kind::Ring, Kind::Threads, Kind::Map, Kind::Sim, Kind::Throttled],
        Err(error @ IoError::RingRefused { .. }) => {
            eprintln!("skipped for the ring: {error}");
            vec![Kind::Threads, Kind::Map, Kind::Sim, Kind::Throttled]
        }
        Err(error) => panic!("the ring fails in a way it must not: {error}"),
    }
}

/// Opens a device of one kind; `cfg.kind` is replaced.
pub fn open(kind: Kind, cfg: &DeviceConfig, files: &Arc<FileSet>, pool: &SlabPool) -> Box<dyn Device> {
    let files = Arc::clone(files);
    match kind {
        Kind::Ring => open_device(&DeviceConfig { kind: DeviceKind::Uring, ..*cfg }, files, pool).unwrap(),
        Kind::Threads => open_device(&DeviceConfig { kind: DeviceKind::Threads, ..*cfg }, files, pool).unwrap(),
        Kind::Map => open_device(&DeviceConfig { kind: DeviceKind::Mmap, ..*cfg }, files, pool).unwrap(),
        Kind::Sim => {
            let calm = SimConfig::calm(1);
            let sim = SimConfig {
                reorder: true,
                delay: std::time::Duration::from_micros(1)..std::time::Duration::from_millis(9),
                queue: cfg.queue,
                chunk_bytes: cfg.chunk_bytes.unwrap_or(calm.chunk_bytes),
                ..calm
            };
            sim_device(&sim, files, pool).unwrap()
        }
        Kind::Throttled => {
            let inner = open_device(&DeviceConfig { kind: DeviceKind::Threads, ..*cfg }, files, pool).unwrap();
            let drive = ThrottleConfig {
                latency: std::time::Duration::from_micros(50),
                bytes_per_s: 4_000_000_000,
                parallelism: 2,
                queue: cfg.queue,
            };
            throttled(inner, &drive).unwrap()
        }
    }
}

/// Runs the test `entry` of this very program again as a child with `MILLSTREAM_IO_CASE` set to `case`, after the
/// shell commands in `before`, and as user 65534 where this one is root and `demote` is set.
pub fn child(entry: &str, case: &str, before: &str, demote: bool) -> Output {
    let scratch = tempfile::tempdir().unwrap();
    // Others must be able to reach the program and its files: neither the build directory nor a fresh one lets them.
    open_to_all(scratch.path());
    let program = scratch.path().join("test-program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    open_to_all(&program);
    let script =
        format!("{before}{}exec \"$0\" --exact {entry} --nocapture", if before.is_empty() { "" } else { "; " });
    let mut command = Command::new("/bin/bash");
    command.arg("-c").arg(script).arg(&program).env("MILLSTREAM_IO_CASE", case).env("TMPDIR", "/tmp");
    command.env("RUST_TEST_THREADS", "1");
    if demote && is_root() {
        std::os::unix::process::CommandExt::uid(&mut command, 65534);
        std::os::unix::process::CommandExt::gid(&mut command, 65534);
    }
    command.output().unwrap()
}

/// Panics with the child's output unless it succeeded, and returns what it printed.
pub fn succeeded(output: Output) -> String {
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{text}", output.status);
    assert!(text.contains("1 passed"), "the child ran no test:\n{text}");
    text
}

pub fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
    })
}

pub fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}
