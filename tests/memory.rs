//! The memory that a run says it takes is the memory it takes: under a control group's limit, and under `--ram`.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use program::{forget_settings, ram_besides_program};
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// What the model's 9,216 experts and their tensors take in the index of the checkpoint and of the cache.
const INDEX_MB: u64 = 24;
/// 15 % of it are left alone.
const LIMIT_BYTES: u64 = 256 << 20;

/// A model whose experts, 3 layers of 3,072 that take 28,672 bytes each, are more than the limit.
fn model() -> &'static Path {
    static MADE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        // On a disk: files in memory would count as memory.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let flags = ["synth", "-q", "--preset", "small", "--layers", "4", "--experts", "3072"];
        assert!(millstream().args(flags).arg(dir.path()).status().unwrap().success());
        dir
    });
    made.path()
}

fn millstream() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    forget_settings(&mut command);
    command
}

/// A prompt that changes its topic: tokens of one half of the vocabulary, then of the other, whose experts are others.
fn two_topics() -> String {
    let topic = |first: u32| (0..500).map(move |i| first + i * 167 % 256);
    topic(0).chain(topic(256)).map(|id| id.to_string()).collect::<Vec<_>>().join(" ")
}

/// Arguments of a run over both topics, with statistics on standard output.
fn generation(flags: &[&str]) -> Vec<String> {
    let prompt = two_topics();
    let fixed = ["run", "-v", "--json", "-n", "40", "--temp", "0", "--ids", "-p", &prompt, "-m"];
    let all = fixed.into_iter().chain([model().to_str().unwrap()]).chain(flags.iter().copied());
    all.map(str::to_owned).collect()
}

#[track_caller]
fn statistics(output: &Output) -> Value {
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_run_stays_in_the_memory_it_was_allowed_when_the_topic_changes() {
    // Pages of files that are mapped are memory of the process.
    for (besides, io) in [(40, "auto"), (60, "auto"), (60, "mmap")] {
        let ram: u64 = ram_besides_program(besides + INDEX_MB, model()).parse().unwrap();
        let flags = ["--io", io, "--ram", &ram.to_string()];
        let stats = statistics(&millstream().args(generation(&flags)).output().unwrap());
        let (peak, missed) = (stats["memory"]["rss_peak"].as_u64().unwrap(), &stats["experts"]["missed"]);
        assert!(peak <= ram, "{peak} bytes at the peak of {ram}");
        // More was read than the cache holds, so that it was full.
        let cache = stats["memory"]["cache"].as_u64().unwrap();
        assert!(missed.as_u64().unwrap() * 28_672 > cache, "{missed} experts of 28,672 bytes for a cache of {cache}");
        assert!(peak > cache, "{peak} bytes at the peak hold no cache of {cache}");
    }
}

#[test]
fn the_program_the_tokenizer_and_the_threads_are_in_the_sum() {
    // The bundled model has a tokenizer; a text goes through it. More threads, a long context, a table of all its experts.
    let tales = concat!(env!("CARGO_MANIFEST_DIR"), "/models/glm-tales");
    // Quantizing takes memory of its own while the weights are loaded.
    let quantizing = &["--dense-bits", "4", "--io-bits", "8"][..];
    let ways = [("1", "64", &[][..]), ("8", "2048", &["--io", "buffered"]), ("32", "64", &[]), ("8", "64", quantizing)];
    for (threads, context, flags) in ways {
        let fixed = ["run", "--json", "-q", "-n", "8", "--usage", "off", "-p", "Once upon a time", "-m", tales];
        let run = |ram: &str| {
            let arguments = [&fixed[..], &["-t", threads, "-c", context, "--ram", ram], flags].concat();
            millstream().args(arguments).output().unwrap()
        };
        let refused = run("1M");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        let least = said.split("that works is ").nth(1).unwrap().split(';').next().unwrap();
        assert!(said.contains("MB program + "), "{said}");
        for ram in [least, "60M"] {
            let stats = statistics(&run(ram));
            let (peak, budget) = (&stats["memory"]["rss_peak"], &stats["memory"]["budget"]);
            assert!(peak.as_u64() <= budget.as_u64(), "{peak} bytes at the peak of {budget}, {threads} threads");
            let parts = [
                "program",
                "resident",
                "kv",
                "reconstruction",
                "activations",
                "staging",
                "page_cache_reserve",
                "cache",
            ];
            let sum: u64 = parts.iter().map(|part| stats["memory"][part].as_u64().unwrap()).sum();
            assert!(sum <= budget.as_u64().unwrap(), "{}", stats["memory"]);
        }
    }
}

#[test]
fn the_least_memory_for_a_short_prompt_is_the_least_for_a_long_one() {
    let run = |tokens: usize, ram: &str| {
        let prompt = (0..tokens).map(|i| (i * 167 % 512).to_string()).collect::<Vec<_>>().join(" ");
        // Experts that are quantized have slabs of their own to be read into.
        let flags = ["-c", "2600", "--expert-bits", "4", "--usage", "off", "--ram", ram];
        let fixed = ["run", "-q", "--json", "-n", "1", "--temp", "0", "--ids", "-p", &prompt, "-m"];
        millstream().args(fixed).arg(model()).args(flags).output().unwrap()
    };
    let least = |tokens, ram: &str| {
        let refused = run(tokens, ram);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        said.split("that works is ").nth(1).unwrap().split(';').next().unwrap().trim().to_owned()
    };
    let named = least(2500, "2M");
    assert_eq!(least(512, "2M"), named);
    // A tenth of a megabyte less, as it is typed.
    let tenths: u64 = named.strip_suffix("MB").unwrap().replace('.', "").parse().unwrap();
    let less = ((tenths - 1) * 100_000).to_string();
    assert_eq!(least(2500, &less), named, "what is named does not depend on what was given");
    for tokens in [512, 2500] {
        statistics(&run(tokens, &named));
    }
    // Longer chunks leave the experts three quarters.
    let ram = ((tenths + 200) * 100_000).to_string();
    let [short, long] = [512, 2500].map(|tokens| statistics(&run(tokens, &ram))["memory"]["cache"].as_u64().unwrap());
    assert!(long < short && long >= short / 4 * 3, "{long} bytes of experts instead of {short}");
    let plan = |ram: &str, flags: &[&str]| {
        let fixed = ["plan", "--untimed", "--json", "-c", "2600", "--expert-bits", "4", "--prompt-tokens", "2500"];
        let usage = ["--usage", "off", "--ram", ram, "-m"];
        let output = millstream().args(fixed).args(usage).arg(model()).args(flags).output().unwrap();
        statistics(&output)
    };
    let what_if = format!("ram={ram}");
    let changed = plan("1G", &["--what-if", &what_if]);
    assert_eq!(changed["what_if"][0]["slots"], plan(&ram, &[])["slots"], "as a run of it would have");
}

#[test]
fn what_does_not_fit_is_refused_before_a_weight_is_read() {
    // Every checksum is wrong: whoever reads a weight and checks it says so.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let flags = ["synth", "-q", "--preset", "small", "--layers", "2", "--experts", "16"];
    assert!(millstream().args(flags).arg(dir.path()).status().unwrap().success());
    let entries = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    for shard in entries.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors")) {
        let mut bytes = fs::read(&shard).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[header..].iter_mut().for_each(|byte| *byte ^= 1);
        fs::write(&shard, bytes).unwrap();
    }
    let run = |ram: &str| {
        let path = dir.path().to_str().unwrap();
        let fixed = ["run", "-q", "-n", "1", "--ids", "-p", "1 2", "--verify", "all", "--ram", ram, "-m", path];
        let output = millstream().args(fixed).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run("1M");
    assert!(code == Some(1) && said.contains("of memory and 1.0 MB may be used"), "{said}");
    let (code, said) = run("200M");
    assert!(code == Some(1) && said.contains("checksum"), "{said}");
}

#[test]
fn a_run_takes_the_limit_of_its_control_group_and_lives() {
    let (mut tried, ways) = (0, ["auto", "buffered"]);
    for (version, io) in [1, 2].into_iter().flat_map(|version| ways.map(|io| (version, io))) {
        // A group for each run: the kernel takes the slabs of a ring back after the process that registered them ended.
        let group = match Group::new(version, io) {
            Ok(group) => group,
            Err(why) => {
                println!("no control group of version {version}: {why}");
                continue;
            }
        };
        tried += 1;
        let output = group.run(&generation(&["--io", io]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let stats = statistics(&output);
        assert!(said.contains(&format!("memory limit of the control group ({}", group.dir.display())), "{said}");
        let budget = stats["memory"]["budget"].as_u64().unwrap();
        assert!(budget <= LIMIT_BYTES / 100 * 85, "{budget} bytes of {LIMIT_BYTES}");
        assert!(budget > LIMIT_BYTES / 2, "{budget} bytes of {LIMIT_BYTES}");
        assert_eq!(said.contains(" page cache + "), io == "buffered", "{said}");
        let peak = stats["memory"]["rss_peak"].as_u64().unwrap();
        assert!(peak <= budget, "{peak} bytes at the peak of {budget}");
        // There are more experts than the budget has room for, so that all of it is used but for what of the program no
        // memory holds: that varies by megabytes with what else the machine does.
        let program = fs::metadata(millstream().get_program()).unwrap().len();
        assert!(io == "buffered" || peak + program > budget / 10 * 9, "{peak} bytes at the peak of {budget}");
        assert_eq!(group.kills(), 0);
        // What cannot fit is refused with both numbers before it is loaded.
        let output = group.run(&generation(&["-c", "1000000"]));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("of memory and") && said.contains("may be used"), "{said}");
    }
    if tried == 0 {
        println!("skipped: the limit of a control group is not tried");
    }
}

/// A control group below the one this process is in, with a limit on memory.
struct Group {
    dir: PathBuf,
    version: u32,
}

impl Group {
    fn new(version: u32, name: &str) -> io::Result<Group> {
        let above = Group::above(version).ok_or_else(|| io::Error::other("there is none here"))?;
        let dir = above.join(format!("millstream-{}-{name}", std::process::id()));
        fs::create_dir(&dir)?;
        let group = Group { dir, version };
        let limit = if version == 1 { "memory.limit_in_bytes" } else { "memory.max" };
        fs::write(group.dir.join(limit), LIMIT_BYTES.to_string())?;
        // Joining may be forbidden where making is not.
        let joined = group.command("true", &[]).output()?;
        if joined.status.success() { Ok(group) } else { Err(io::Error::other("no process may join it")) }
    }

    /// Where the memory controller of this version has the group of this process.
    fn above(version: u32) -> Option<PathBuf> {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let (membership, mounts) = (read("/proc/self/cgroup"), read("/proc/self/mountinfo"));
        let path = membership.lines().find_map(|line| match version {
            1 => line.split(':').nth(1)?.split(',').any(|c| c == "memory").then(|| line.splitn(3, ':').nth(2))?,
            _ => line.strip_prefix("0::"),
        })?;
        let point = mounts.lines().find_map(|line| {
            let (front, back) = line.split_once(" - ")?;
            let (kind, options) = (back.split(' ').next()?, back.split(' ').nth(2)?);
            let wanted = match version {
                1 => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
                _ => kind == "cgroup2",
            };
            wanted.then(|| front.split(' ').nth(4))?
        })?;
        let dir = Path::new(point).join(path.trim_start_matches('/'));
        let dir = if dir.exists() { dir } else { PathBuf::from(point) };
        let has_memory = version == 1
            || fs::read_to_string(dir.join("cgroup.subtree_control")).is_ok_and(|all| all.contains("memory"));
        has_memory.then_some(dir)
    }

    /// The program `name` inside of the group.
    fn command(&self, name: &str, arguments: &[String]) -> Command {
        let mut command = Command::new("sh");
        forget_settings(&mut command);
        command.arg("-c").arg("echo $$ > \"$0/cgroup.procs\" && exec \"$@\"").arg(&self.dir);
        command.arg(name).args(arguments);
        command
    }

    fn run(&self, arguments: &[String]) -> Output {
        self.command(env!("CARGO_BIN_EXE_millstream"), arguments).output().unwrap()
    }

    /// Processes that the kernel has killed for memory.
    fn kills(&self) -> u64 {
        let file = if self.version == 1 { "memory.oom_control" } else { "memory.events" };
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // It is empty: its processes were waited for.
        let _ = fs::remove_dir(&self.dir);
    }
}
