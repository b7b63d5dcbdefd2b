//! A context that is kept in a file: the bits of what goes on from it, and what the program makes of files that were killed,
//! damaged, or somebody else's.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use engines::{Arithmetic, Model, Setup, config, greedy};
use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::verify::Manifest;
use millstream::engine::kvfile::Storage;
use millstream::engine::sampler::Sampling;
use millstream::engine::{
    Activations, AttentionForm, DraftRule, DraftSource, Engine, EngineConfig, EngineError, Job, KvBits, Switch, Verify,
};
use millstream::forward::ForwardError;
use millstream::store::StoreError;
use program::{done, json, program, stderr, stdout};
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::{BpfProgram, SeccompAction, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch};
use tempfile::TempDir;

// Bits, with a file in memory.

#[derive(Clone, Default)]
struct InMemory(Arc<Mutex<Vec<u8>>>);

impl InMemory {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Storage for InMemory {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn len_bytes(&mut self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().len() as u64)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        out.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..out.len()]);
        Ok(())
    }

    fn append(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut held = self.0.lock().unwrap();
        assert_eq!(held.len() as u64, offset);
        held.extend(bytes);
        Ok(())
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.0.lock().unwrap().truncate(len as usize);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ids that follow and logits of the last of them but one, as bits; positions that were taken from the file.
fn answer(config: &EngineConfig, model: Model, kept: Option<&InMemory>, prompt: &[u32]) -> (Vec<u32>, Vec<u32>, usize) {
    let config = EngineConfig { kv_file: kept.is_some(), ..config.clone() };
    let mut engine = Engine::open(Checkpoint::open(&model.dir()).unwrap(), &config).unwrap();
    if let Some(kept) = kept {
        let header = engine.kv_header().unwrap();
        if kept.bytes().is_empty() {
            kept.0.lock().unwrap().extend(header.encode());
        }
        header.check(&kept.bytes()).unwrap();
        engine.keep_context(Box::new(kept.clone()), true);
    }
    let ids = greedy(&mut engine, prompt, ANSWER).unwrap();
    assert!(engine.warnings().is_empty(), "{:?}", engine.warnings());
    let stats = engine.stats();
    assert_eq!(stats.kv_file.map_or(0, |file| file.taken), stats.cached_tokens);
    (ids, engine.logits().iter().map(|logit| logit.to_bits()).collect(), stats.cached_tokens)
}

const PROMPT: usize = 40;
const ANSWER: usize = 12;

/// A first turn, a second that goes on, a third that goes another way, each by another engine; against engines that know no
/// file, and the file against one that a single engine leaves.
fn turns(arithmetic: &Arithmetic, setups: [Setup; 3], contexts: [usize; 3]) {
    let model = arithmetic.model;
    let with = |turn: usize| EngineConfig { context: Some(contexts[turn]), ..config(arithmetic, &setups[turn]) };
    let plain = config(arithmetic, &Setup::RESIDENT);
    let kept = InMemory::default();
    let first = model.prompt(PROMPT);
    let (ids, ..) = answer(&with(0), model, Some(&kept), &first);
    // What was said, but for the last token, went through the model; in the form of an answer.
    let on = [&first[..], &ids, &model.prompt(11)].concat();
    let said = if has_one_form(arithmetic) { ANSWER - 1 } else { 0 };
    let way = [&on[..PROMPT - 7], &model.prompt(20)[3..]].concat();
    for (turn, prompt, taken) in [(1, &on, PROMPT + said), (2, &way, PROMPT - 7)] {
        let what = (arithmetic, turn);
        let expected = answer(&plain, model, None, prompt);
        let found = answer(&with(turn), model, Some(&kept), prompt);
        assert_eq!(found.2, taken, "{what:?}");
        assert!(found.1 == expected.1, "{what:?}: logits differ");
        assert_eq!(found.0, expected.0, "{what:?}");
        let alone = InMemory::default();
        answer(&plain, model, Some(&alone), prompt);
        assert!(kept.bytes() == alone.bytes(), "{what:?}: files differ");
    }
}

/// Whether prompts and answers are computed in one form: all but auto for glm-tales, whose prompts are cheaper otherwise.
fn has_one_form(arithmetic: &Arithmetic) -> bool {
    !(arithmetic.form == AttentionForm::Auto && arithmetic.model == Model::TalesInt4)
}

fn setups() -> [Setup; 3] {
    let plain = Setup::RESIDENT;
    [
        Setup { threads: 2, rows: 7, ..plain },
        Setup { threads: 1, rows: 64, slabs: 20, ..plain },
        Setup { threads: 3, rows: 16, ..plain },
    ]
}

#[test]
fn what_goes_on_from_a_file_has_the_bits_of_what_was_never_interrupted() {
    for model in [Model::Tiny, Model::TinyInt4, Model::TinyOlmoeInt4] {
        for arithmetic in Arithmetic::all(model) {
            turns(&arithmetic, setups(), [256; 3]);
        }
    }
}

#[test]
fn an_answer_in_another_form_than_prompts_is_computed_anew() {
    for kv_bits in [KvBits::Bits32, KvBits::Bits16] {
        let arithmetic = Arithmetic { kv_bits, ..Arithmetic::absorbed(Model::TalesInt4, Activations::Int8) };
        turns(&Arithmetic { form: AttentionForm::Auto, ..arithmetic }, setups(), [256; 3]);
        turns(&arithmetic, setups(), [256; 3]);
    }
}

#[test]
fn a_context_of_another_length_goes_on_also_where_attention_becomes_sparse() {
    // Attention over more than 16 positions is sparse, and over more than 256.
    let tiny = Arithmetic::absorbed(Model::TinyInt4, Activations::Int8);
    turns(&tiny, setups(), [PROMPT + ANSWER, 512, 100]);
    let tales = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
    turns(&tales, setups(), [PROMPT + ANSWER, 1024, 100]);
}

#[test]
fn what_drafts_changes_no_bit_of_a_context_and_of_what_goes_on_from_it() {
    let tiny = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    let tales = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
    for (arithmetic, source) in [tiny, tales]
        .into_iter()
        .flat_map(|a| [DraftSource::Ngram, DraftSource::Mtp, DraftSource::Auto].map(|s| (a, s)))
    {
        let drafts = DraftRule { source, most: 3 };
        turns(&arithmetic, setups().map(|setup| Setup { drafts, ..setup }), [256; 3]);
    }
}

#[test]
fn the_mtp_layer_drafts_behind_positions_that_it_has_not_seen() {
    let dir = &Model::TalesInt4.dir();
    let prompt = Model::TalesInt4.repetitive();
    // Its loop is the first that the layer sees, and it goes on with it.
    let drafts = DraftRule { source: DraftSource::Mtp, most: 1 };
    let (mut engine, kept) = sampling(dir, drafts, Switch::Off, 0, &InMemory::default());
    let whole = greedy(&mut engine, &prompt, 40).unwrap();
    let (mut resumed, _) = sampling(dir, drafts, Switch::Off, 0, &kept);
    assert_eq!(greedy(&mut resumed, &prompt, 40).unwrap(), whole);
    let (before, after) = (engine.stats().draft.unwrap(), resumed.stats().draft.unwrap());
    assert_eq!(resumed.stats().cached_tokens, prompt.len() - 1);
    let [before, after] = [before, after].map(|draft| draft.acceptance.unwrap());
    assert!(after > 0.75 * before && before > 0.5, "right of the drafts: {before} with the prompt, {after} without");
}

/// An engine over `dir` with this sample of checks, which goes on from a copy of what `kept` has.
fn sampling(dir: &Path, drafts: DraftRule, prefetch: Switch, seed: u64, kept: &InMemory) -> (Engine, InMemory) {
    let setup = Setup { drafts, prefetch, ..Setup::RESIDENT };
    let arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
    let plain = config(&arithmetic, &setup);
    let config = EngineConfig { verify: Verify::Sample, verify_seed: seed, kv_file: true, ..plain };
    let mut engine = Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap();
    let copy = InMemory(Arc::new(Mutex::new(kept.bytes())));
    if copy.bytes().is_empty() {
        copy.0.lock().unwrap().extend(engine.kv_header().unwrap().encode());
    }
    engine.kv_header().unwrap().check(&copy.bytes()).unwrap();
    engine.keep_context(Box::new(copy.clone()), true);
    (engine, copy)
}

/// Experts that each routed layer of each step chose for an answer, and how many it chose for each of so many rows.
fn chosen(dir: &Path, drafts: DraftRule, prompt: &[u32], kept: &InMemory) -> Vec<(usize, Vec<u16>)> {
    let (mut engine, _) = sampling(dir, drafts, Switch::Off, 0, kept);
    let mut steps = vec![];
    let job = Job { prompt: prompt.to_vec(), max_tokens: 20, sampling: Sampling::greedy(), stop_ids: vec![] };
    let mut observer = |layer: usize, ids: &[u16], _: &[f32]| steps.push((layer, ids.to_vec()));
    engine.generate_observed(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(()), &mut observer).unwrap();
    steps
}

/// Layer and number of an expert.
type Key = (usize, u16);

/// Changes a byte of an expert, or changes it back.
fn flip(dir: &Path, (layer, expert): Key) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let runs = Manifest::read(&checkpoint).unwrap().runs;
    let run = runs.iter().find(|run| (run.layer, run.expert) == (Some(layer), Some(usize::from(expert)))).unwrap();
    let file = fs::File::options().read(true).write(true).open(&checkpoint.tensors.paths()[run.span.file.0 as usize]);
    let (file, mut byte) = (file.unwrap(), [0]);
    file.read_exact_at(&mut byte, run.span.offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], run.span.offset).unwrap();
}

const DRAFTS: DraftRule = DraftRule { source: DraftSource::Ngram, most: 4 };
const NO_DRAFTS: DraftRule = DraftRule { source: DraftSource::Off, most: 4 };

/// A prompt, an expert of it, and one that nobody asks for before a drafted step does, and that the answer needs as well.
fn first_asked_for_by_a_drafted_step(dir: &Path, kept: &InMemory) -> (Vec<u32>, Vec<Key>, Key) {
    let whole = Model::TalesInt4.repetitive();
    for len in (20..whole.len()).rev() {
        let prompt = &whole[..len];
        let (plain, drafted) = (chosen(dir, NO_DRAFTS, prompt, kept), chosen(dir, DRAFTS, prompt, kept));
        let layers = drafted.iter().skip(1).position(|(layer, _)| *layer == drafted[0].0).unwrap() + 1;
        let top = drafted[0].1.len() / (len - KEPT);
        let keys = |(layer, ids): &(usize, Vec<u16>)| ids.iter().map(|id| (*layer, *id)).collect::<Vec<_>>();
        let needed: Vec<_> = plain.iter().flat_map(keys).collect();
        let mut seen: Vec<_> = drafted[..layers].iter().flat_map(keys).collect();
        let of_prompt = seen.clone();
        for step in &drafted[layers..] {
            let new = |key: &Key| step.1.len() > top && !seen.contains(key) && needed.contains(key);
            if let Some(key) = keys(step).into_iter().find(new) {
                return (prompt.to_vec(), of_prompt, key);
            }
            seen.extend(keys(step));
        }
    }
    panic!("no drafted step asks for anything new");
}

/// Positions that the file has before.
const KEPT: usize = 8;

#[test]
fn damage_that_a_drafted_step_finds_ends_the_answer_as_without_drafts_and_nothing_of_it_is_kept() {
    let model = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(Model::TalesInt4.dir()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.path().join(entry.file_name())).unwrap();
    }
    let dir = model.path();
    let (mut engine, kept) = sampling(dir, NO_DRAFTS, Switch::Off, 0, &InMemory::default());
    greedy(&mut engine, &Model::TalesInt4.repetitive()[..KEPT], 0).unwrap();
    let (prompt, of_prompt, late) = first_asked_for_by_a_drafted_step(dir, &kept);
    let run = |drafts, prefetch, seed| {
        let (mut engine, file) = sampling(dir, drafts, prefetch, seed, &kept);
        (greedy(&mut engine, &prompt, 20), file)
    };
    // A sample that has the late one and not the early one.
    flip(dir, late);
    let seed = (0..2000).find(|&seed| run(NO_DRAFTS, Switch::Off, seed).0.is_err()).unwrap();
    flip(dir, late);
    let passes = |&early: &Key| {
        flip(dir, early);
        let passes = run(NO_DRAFTS, Switch::Off, seed).0.is_ok();
        if !passes {
            flip(dir, early);
        }
        passes
    };
    let early = of_prompt.into_iter().find(passes).unwrap();
    flip(dir, late);
    // What was read ahead and is damaged fails nothing by itself.
    for (drafts, prefetch) in [NO_DRAFTS, DRAFTS].into_iter().flat_map(|d| [(d, Switch::Off), (d, Switch::On)]) {
        let what = (drafts, prefetch);
        let (result, file) = run(drafts, prefetch, seed);
        let error = result.unwrap_err();
        let EngineError::Forward(ForwardError::Store(StoreError::Spoilt(damaged))) = &error else {
            panic!("{what:?}: {error}")
        };
        assert_eq!((usize::from(damaged.key.layer), damaged.key.expert), early, "{what:?}");
        assert!(error.hint().unwrap().contains("doctor --deep"), "there are no mirrors");
        assert!(file.bytes() == kept.bytes(), "{what:?}: what was taken, and no more");
    }
}

// The program, with files.

/// A place for files, and the tiny model's answers.
struct Place {
    home: TempDir,
    file: PathBuf,
}

impl Place {
    fn new() -> Place {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("chat.kv");
        Place { home, file }
    }

    fn command(&self, model: &Path, prompt: &[u32], extra: &[&str]) -> Command {
        let mut command = program(self.home.path());
        command.args(["run", "-m"]).arg(model).args([
            "--usage",
            "off",
            "--ids",
            "--ignore-eos",
            "--temp",
            "0",
            "-n",
            "40",
        ]);
        command.arg("-p").arg(prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")).args(extra);
        command
    }

    /// A run of the tiny model with the file.
    fn kept(&self, prompt: &[u32]) -> Command {
        let mut command = self.command(&engines::tiny(), prompt, &["--attention", "absorbed"]);
        command.arg("--kv").arg(&self.file);
        command
    }

    fn plain(&self, prompt: &[u32]) -> String {
        let command = &mut self.command(&engines::tiny(), prompt, &["--attention", "absorbed"]);
        stdout(&done(command.output().unwrap())).to_owned()
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(&self.file).unwrap()
    }

    /// Names beside the file.
    fn beside(&self) -> Vec<String> {
        let names = fs::read_dir(self.home.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with("chat.kv."));
        names.sort();
        names
    }
}

/// Lines about the file.
fn notes(output: &Output) -> Vec<&str> {
    stderr(output).lines().filter(|line| line.starts_with("note: ") && line.contains("chat.kv")).collect()
}

fn prompt(len: usize) -> Vec<u32> {
    Model::Tiny.prompt(len)
}

#[test]
fn the_second_run_says_how_much_it_did_not_compute() {
    let place = Place::new();
    let first = done(place.kept(&prompt(50)).output().unwrap());
    assert_eq!(stdout(&first), place.plain(&prompt(50)));
    let second = json(&done(place.kept(&prompt(60)).args(["--json", "-c", "400"]).output().unwrap()));
    assert_eq!((&second["prompt_tokens"], &second["cached_tokens"]), (&60.into(), &50.into()));
    assert_eq!(second["kv_file"]["taken"], 50);
    assert_eq!(second["kv_file"]["added"], 10 + 39);
    let third = done(place.kept(&prompt(60)).output().unwrap());
    let line = stderr(&third).lines().find(|line| line.starts_with("kept ")).unwrap().to_owned();
    assert!(line.contains("59 of these tokens were in the file") && line.contains("; 0 added"), "{line}");
    assert!(notes(&third).is_empty() && place.beside().is_empty(), "{:?}", notes(&third));
    let none = json(&done(place.command(&engines::tiny(), &prompt(9), &["--json"]).output().unwrap()));
    assert_eq!((&none["cached_tokens"], none.get("kv_file")), (&0.into(), None));
}

#[test]
fn files_of_others_are_put_aside_or_left_alone_and_cost_one_line() {
    let place = Place::new();
    let asked = prompt(50);
    let expected = place.plain(&asked);
    done(place.kept(&asked).output().unwrap());
    let whole = place.bytes();
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let of = |mut command: Command| {
        fs::remove_file(&place.file).unwrap();
        done(command.arg("--kv").arg(&place.file).output().unwrap());
        place.bytes()
    };
    let other_model = of(place.command(&engines::tiny_olmoe(), &asked, &[]));
    let other_bits = of(place.command(&engines::tiny(), &asked, &["--kv-bits", "16"]));
    let dense = of(place.command(&engines::tiny(), &asked, &["--dsa", "off"]));
    for (bytes, words) in [
        (&other_model, "is of another model"),
        (&other_bits, "other settings"),
        (&dense, "other settings"),
        (&changed(7), "has format 0"),
        (&changed(9), "is damaged"),
        (&changed(30), "is damaged"),
    ] {
        fs::write(&place.file, bytes).unwrap();
        let output = done(place.kept(&asked).output().unwrap());
        let notes = notes(&output);
        assert!(notes.len() == 1 && notes[0].contains(words) && notes[0].contains("chat.kv.aside"), "{notes:?}");
        assert_eq!(stdout(&output), expected, "{words}");
        assert!(fs::read(place.home.path().join("chat.kv.aside")).unwrap() == *bytes, "{words}: kept as it was");
        assert_eq!(place.beside().len(), 1);
        assert!(place.bytes() == whole, "{words}: a new file has begun");
        fs::remove_file(place.home.path().join("chat.kv.aside")).unwrap();
    }
    // Not ours to move.
    for bytes in [&b"Dear diary"[..], &whole[1..]] {
        fs::write(&place.file, bytes).unwrap();
        let output = done(place.kept(&asked).output().unwrap());
        let notes = notes(&output);
        assert!(notes.len() == 1 && notes[0].contains("is no file of a context"), "{notes:?}");
        assert_eq!(stdout(&output), expected);
        assert!(place.bytes() == bytes && place.beside().is_empty());
    }
    // Begun and no more.
    for len in [0, 10, 30] {
        fs::write(&place.file, &whole[..len]).unwrap();
        let output = done(place.kept(&asked).output().unwrap());
        assert!(stdout(&output) == expected && notes(&output).is_empty() && place.bytes() == whole);
    }
}

#[test]
fn nothing_else_is_written_over_the_file_and_it_is_taken_for_no_shard() {
    let place = Place::new();
    let kv = place.file.to_str().unwrap();
    let refused = |extra: &[&str], words: &str| {
        let output = place.kept(&prompt(9)).args(extra).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{extra:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{extra:?}: {}", stderr(&output));
    };
    let flags = [["--stats-json", kv], ["--timeline", kv], ["--usage", kv]];
    // Before it is there, under another name of its directory too.
    flags.iter().for_each(|extra| refused(extra, "another name"));
    refused(&["--stats-json", &format!("{}/./chat.kv", place.home.path().display())], "another name");
    assert!(!place.file.exists());
    done(place.kept(&prompt(9)).output().unwrap());
    let before = place.bytes();
    flags.iter().for_each(|extra| refused(extra, "another name"));
    assert!(place.bytes() == before);
    let mut command = place.command(&engines::tiny(), &prompt(9), &["--kv", "chat.safetensors"]);
    let output = command.output().unwrap();
    assert!(output.status.code() == Some(2) && stderr(&output).contains("read as weights"), "{}", stderr(&output));
}

#[test]
fn a_shorter_prompt_leaves_the_file_as_it_is() {
    let place = Place::new();
    done(place.kept(&prompt(50)).output().unwrap());
    let before = place.bytes();
    for extra in [&["-n", "1"][..], &["-n", "20"], &[]] {
        let output = done(place.kept(&prompt(50)).args(extra).output().unwrap());
        assert!(notes(&output).is_empty() && place.bytes() == before, "{extra:?}");
    }
    done(place.kept(&prompt(30)).args(["-n", "1"]).output().unwrap());
    assert!(place.bytes() == before);
}

#[test]
fn names_put_aside_do_not_overwrite_each_other() {
    let place = Place::new();
    for bits in ["16", "32", "16", "32"] {
        done(place.kept(&prompt(5)).args(["--kv-bits", bits]).output().unwrap());
    }
    assert_eq!(place.beside(), ["chat.kv.aside", "chat.kv.aside-2", "chat.kv.aside-3"]);
}

#[test]
fn places_where_no_file_can_be_cost_one_line() {
    let place = Place::new();
    let expected = place.plain(&prompt(5));
    let run = |path: &Path| {
        let mut command = place.command(&engines::tiny(), &prompt(5), &["--attention", "absorbed"]);
        done(command.arg("--kv").arg(path).output().unwrap())
    };
    for (name, words) in [("", "no regular file"), ("none/chat.kv", "No such file or directory")] {
        let output = run(&place.home.path().join(name));
        let lines: Vec<&str> = stderr(&output).lines().filter(|line| line.contains("no context is kept")).collect();
        assert!(lines.len() == 1 && lines[0].contains(words), "{}", stderr(&output));
        assert_eq!(stdout(&output), expected);
    }
    let output = run(Path::new("/dev/null"));
    assert!(stderr(&output).contains("/dev/null is no regular file"), "{}", stderr(&output));
}

#[test]
fn a_damaged_or_torn_file_is_told_in_one_line_and_mended() {
    let place = Place::new();
    let (asked, expected) = (prompt(50), place.plain(&prompt(50)));
    done(place.kept(&asked).output().unwrap());
    let whole = place.bytes();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for (bytes, words) in
        [(&flipped[..], "is damaged behind"), (&whole[..whole.len() / 3], "in the middle of a position")]
    {
        fs::write(&place.file, bytes).unwrap();
        let output = done(place.kept(&asked).output().unwrap());
        let notes = notes(&output);
        assert!(notes.len() == 1 && notes[0].contains(words), "{notes:?}");
        assert_eq!(stdout(&output), expected);
        assert!(place.bytes() == whole && place.beside().is_empty());
    }
}

#[test]
fn a_second_process_runs_without_the_file_and_says_so() {
    let place = Place::new();
    let expected = place.plain(&prompt(50));
    done(place.kept(&prompt(40)).output().unwrap());
    let before = place.bytes();
    let held = fs::File::open(&place.file).unwrap();
    held.lock().unwrap();
    let output = done(place.kept(&prompt(50)).output().unwrap());
    let said = notes(&output);
    assert!(said.len() == 1 && said[0].contains("another process uses"), "{said:?}");
    assert!(stdout(&output) == expected && place.bytes() == before);
    held.unlock().unwrap();
    let output = done(place.kept(&prompt(50)).output().unwrap());
    assert!(stdout(&output) == expected && notes(&output).is_empty());
}

#[test]
fn a_link_is_followed() {
    let place = Place::new();
    let target = place.home.path().join("elsewhere");
    fs::write(&target, b"").unwrap();
    std::os::unix::fs::symlink(&target, &place.file).unwrap();
    done(place.kept(&prompt(5)).output().unwrap());
    assert!(place.file.is_symlink() && fs::metadata(&target).unwrap().len() > 1000);
}

/// Answers `errno` to calls whose argument compares so.
fn failing(command: &mut Command, call: libc::c_long, condition: SeccompCondition, errno: i32) {
    let rules = [(call, vec![SeccompRule::new(vec![condition]).unwrap()])].into();
    let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let action = SeccompAction::Errno(errno as u32);
    let filter: BpfProgram = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap().try_into().unwrap();
    // SAFETY: the closure only makes the system call that applies a filter made before the fork.
    unsafe {
        command.pre_exec(move || seccompiler::apply_filter(&filter).map_err(io::Error::other));
    }
}

#[test]
fn a_full_disk_costs_one_line_and_neither_the_answer_nor_what_was_there() {
    let place = Place::new();
    let expected = place.plain(&prompt(50));
    done(place.kept(&prompt(50)).output().unwrap());
    let whole = place.bytes();
    fs::remove_file(&place.file).unwrap();
    done(place.kept(&prompt(30)).args(["-n", "1"]).output().unwrap());
    let before = place.bytes();
    // Of the answer nothing fits.
    let beyond = SeccompCondition::new(3, Qword, SeccompCmpOp::Ge, before.len() as u64 + 10).unwrap();
    let mut command = place.kept(&prompt(50));
    failing(&mut command, libc::SYS_pwrite64, beyond, libc::ENOSPC);
    let output = done(command.output().unwrap());
    let said = notes(&output);
    assert!(said.len() == 1 && said[0].contains("cannot be written") && said[0].contains("os error 28"), "{said:?}");
    assert_eq!(stdout(&output), expected);
    let left = place.bytes();
    assert!(whole.starts_with(&left) && left.starts_with(&before));
    // With room again it goes on from there.
    let output = done(place.kept(&prompt(50)).output().unwrap());
    assert!(stdout(&output) == expected && notes(&output).is_empty() && place.bytes() == whole);
}

#[test]
fn a_file_that_cannot_be_written_is_used_all_the_same() {
    let place = Place::new();
    let expected = place.plain(&prompt(50));
    let read_only = |command: &mut Command| {
        let writes = SeccompCmpOp::MaskedEq(libc::O_ACCMODE as u64);
        let writes = SeccompCondition::new(2, Dword, writes, libc::O_RDWR as u64).unwrap();
        failing(command, libc::SYS_openat, writes, libc::EROFS);
    };
    let mut command = place.kept(&prompt(50));
    read_only(&mut command);
    let output = done(command.output().unwrap());
    let said = notes(&output);
    assert!(said.len() == 1 && said[0].contains("cannot create") && said[0].contains("read-only"), "{said:?}");
    assert_eq!(stdout(&output), expected);

    done(place.kept(&prompt(40)).output().unwrap());
    let before = place.bytes();
    let mut command = place.kept(&prompt(50));
    read_only(&mut command);
    let output = done(command.output().unwrap());
    let said = notes(&output);
    assert!(said.len() == 1 && said[0].contains("its context is used, and not added to"), "{said:?}");
    assert!(stderr(&output).contains("40 of these tokens were in the file"), "{}", stderr(&output));
    assert!(stdout(&output) == expected && place.bytes() == before);
}

#[test]
fn a_process_killed_at_any_time_leaves_a_file_that_the_next_goes_on_from() {
    let place = Place::new();
    // Two ways, so that a kill may come while the file is cut.
    let ways = [prompt(60), [&prompt(30)[..], &prompt(25)].concat()];
    let expected = ways.clone().map(|way| place.plain(&way));
    let began = Instant::now();
    done(place.kept(&ways[0]).output().unwrap());
    let took = began.elapsed();
    let (mut unfinished, mut reused) = (0, 0);
    for kill in 1..=30u32 {
        let way = kill as usize % 2;
        let mut child = place.kept(&ways[way]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(took * kill / 30 + Duration::from_micros(300));
        child.kill().unwrap();
        unfinished += usize::from(!child.wait().unwrap().success());
        // Every other time the other way comes next, over what the kill left.
        let next = (kill as usize / 2) % 2;
        let output =
            done(place.kept(&ways[next]).args(["--stats-json"]).arg(place.home.path().join("s")).output().unwrap());
        assert_eq!(stdout(&output), expected[next], "after kill {kill}");
        let stats: serde_json::Value = serde_json::from_slice(&fs::read(place.home.path().join("s")).unwrap()).unwrap();
        let taken = stats["cached_tokens"].as_u64().unwrap();
        assert!(taken >= 30, "what both have in common is never lost: {taken} after kill {kill}");
        reused += taken;
        assert!(place.beside().is_empty());
    }
    println!("{unfinished} of 30 were killed before their end, {reused} tokens taken");
}
