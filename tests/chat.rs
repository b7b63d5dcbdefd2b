//! Conversations: what a turn computes, what it says, and what becomes of it when it is interrupted, saved, killed or refused.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use engines::{Arithmetic, Model, Setup, config, greedy, tales};
use millstream::checkpoint::Checkpoint;
use millstream::engine::{Activations, Engine, EngineConfig};
use millstream::model::tokenizer::Tokenizer;
use program::{done, json, program, stderr};
use serde_json::Value;
use tempfile::TempDir;

// The engine.

fn engine() -> Engine {
    let arithmetic = Arithmetic::absorbed(Model::TinyInt4, Activations::Int8);
    let config = EngineConfig { context: Some(256), ..config(&arithmetic, &Setup::RESIDENT) };
    Engine::open(Checkpoint::open(&Model::TinyInt4.dir()).unwrap(), &config).unwrap()
}

/// Ids that follow, the logits of the last of them as bits, and positions that were not computed.
fn follows(engine: &mut Engine, prompt: &[u32]) -> (Vec<u32>, Vec<u32>, usize) {
    let ids = greedy(engine, prompt, 9).unwrap();
    (ids, engine.logits().iter().map(|logit| logit.to_bits()).collect(), engine.stats().cached_tokens)
}

#[test]
fn a_context_that_lasts_is_taken_back_to_where_prompts_part_and_no_further() {
    let prompt = Model::TinyInt4.prompt(40);
    let mut lasting = engine();
    lasting.let_context_last();
    let (ids, ..) = follows(&mut lasting, &prompt);
    assert_eq!(lasting.held(), [&prompt[..], &ids[..8]].concat(), "the last token has no position");
    let on = [&prompt[..], &ids, &[7, 8, 9]].concat();
    let way = [&on[..43], &[1, 2, 3, 4]].concat();
    let short = &prompt[..20];
    for (asked, expected) in [(&on[..], 48), (&way, 43), (&way, 46), (short, 19), (&prompt, 20)] {
        let (ids, logits, kept) = follows(&mut lasting, asked);
        assert_eq!(kept, expected, "{} tokens", asked.len());
        let fresh = follows(&mut engine(), asked);
        assert_eq!((ids, kept - expected), (fresh.0, fresh.2));
        assert!(logits == fresh.1, "logits of {} tokens", asked.len());
    }
}

#[test]
fn sequences_that_take_turns_keep_their_own_contexts() {
    let mut engine = engine();
    engine.let_context_last();
    let mut other = engine.new_sequence();
    let mut texts = [Model::TinyInt4.prompt(30), Model::TinyInt4.prompt(25)[5..].to_vec()];
    let mut alone = texts.clone();
    for turn in 0..3 {
        for text in &mut texts {
            let (ids, _, kept) = follows(&mut engine, text);
            assert_eq!(
                kept,
                if turn == 0 { 0 } else { text.len() - 3 },
                "but for its last token, and two that are new"
            );
            text.extend(ids.into_iter().chain([turn, 5]));
            engine.exchange(&mut other);
        }
    }
    for text in &mut alone {
        for turn in 0..3 {
            let ids = follows(&mut self::engine(), text).0;
            text.extend(ids.into_iter().chain([turn, 5]));
        }
    }
    assert_eq!(texts, alone);
}

// The program.

/// `[gMASK]<sop>`, and what the template writes around a message.
const BEGIN: [u32; 2] = [4086, 4088];
const USER: u32 = 4091;
const ANSWER: [u32; 2] = [4092, 4095];

struct Place {
    home: TempDir,
    tokenizer: Tokenizer,
}

/// What a turn said of itself.
struct Turn {
    prompt: usize,
    cached: usize,
    ids: Vec<u32>,
    finish: String,
    text: String,
}

impl Turn {
    fn of(stats: &Value) -> Turn {
        let number = |name: &str| stats[name].as_u64().unwrap() as usize;
        let text = |name: &str| stats[name].as_str().unwrap().to_owned();
        Turn {
            prompt: number("prompt_tokens"),
            cached: number("cached_tokens"),
            ids: stats["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(),
            finish: text("finish_reason"),
            text: text("text"),
        }
    }

    /// Positions that it leaves: the last token of an answer has one only where another was chosen behind it.
    fn positions(&self) -> usize {
        self.prompt + self.ids.len() - usize::from(self.finish == "length")
    }
}

impl Place {
    fn new() -> Place {
        Place { home: tempfile::tempdir().unwrap(), tokenizer: Tokenizer::open(&tales()).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn plain(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode_plain(text).unwrap()
    }

    /// A chat with seeded chance, whose prompts and answers have one form.
    fn chat(&self, extra: &[&str]) -> Command {
        let mut command = program(self.home.path());
        command.args(["chat", "-m"]).arg(tales()).args(["--usage", "off", "--attention", "absorbed", "--seed", "5"]);
        command.args(extra);
        command
    }

    fn says(&self, extra: &[&str], input: &str) -> Output {
        let mut child = piped(&mut self.chat(extra));
        // Who refuses the flags reads nothing.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// The turns of a chat that succeeds.
    fn turns(&self, extra: &[&str], input: &str) -> Vec<Turn> {
        let output = done(self.says(&[&["--json"], extra].concat(), input));
        let lines = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| Turn::of(&serde_json::from_slice(line).unwrap())).collect()
    }

    /// What `run` answers to a prompt of these tokens.
    fn run(&self, prompt: &[u32], extra: &[&str]) -> Turn {
        let mut command = program(self.home.path());
        command.args(["run", "-m"]).arg(tales()).args(["--usage", "off", "--attention", "absorbed", "--seed", "5"]);
        let prompt = prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        command.args(["--ids", "--json", "-p", &prompt]).args(extra);
        Turn::of(&json(&done(command.output().unwrap())))
    }
}

fn piped(command: &mut Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_turn_computes_what_is_new_and_says_what_one_prompt_of_it_all_would() {
    let place = Place::new();
    let said = ["Tell me of a fox.", "Say <|user|> and </think>, [gMASK].", "And then?"];
    for extra in [&["-n", "12"][..], &["-n", "12", "--temp", "0", "--draft", "ngram"], &["-n", "200"]] {
        let turns = place.turns(extra, &said.map(|line| format!("{line}\n")).concat());
        assert_eq!(turns.len(), said.len());
        let (mut all, mut positions) = (BEGIN.to_vec(), 0);
        for (line, turn) in said.iter().zip(&turns) {
            all.extend([&[USER][..], &place.plain(line), &ANSWER].concat());
            assert_eq!((turn.prompt, turn.cached), (all.len(), positions), "{line}");
            let alone = place.run(&all, extra);
            assert_eq!((&turn.ids, &turn.text, &turn.finish), (&alone.ids, &alone.text, &alone.finish), "{line}");
            all.extend(&turn.ids);
            positions = turn.positions();
        }
    }
}

#[test]
fn an_interrupted_turn_is_kept_and_gone_on_from() {
    let place = Place::new();
    let stats = place.path("stats.json");
    let flags = ["-n", "1500", "--ignore-eos", "--temp", "0", "--stats-json", stats.to_str().unwrap()];
    let mut child = piped(&mut place.chat(&flags));
    let mut stdin = child.stdin.take().unwrap();
    let read = |stats: &Path| Turn::of(&serde_json::from_slice(&fs::read(stats).unwrap()).unwrap());
    stdin.write_all(b"Tell me of a fox.\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    interrupt(&child, libc::SIGINT);
    wait_until("the end of the turn", || stats.exists());
    let first = read(&stats);
    assert_eq!(first.finish, "interrupted");
    assert!(!first.ids.is_empty() && first.ids.len() < 1500, "{} tokens", first.ids.len());
    stdin.write_all(b"And then?\n").unwrap();
    drop(stdin);
    let output = done(child.wait_with_output().unwrap());
    assert!(stderr(&output).contains(", interrupted\n"), "{}", stderr(&output));
    let second = read(&stats);
    let added = 1 + place.plain("And then?").len() + ANSWER.len();
    assert_eq!(second.prompt, first.prompt + first.ids.len() + added);
    // Whether the last token was computed before the interrupt was seen is a matter of time.
    let kept = first.prompt + first.ids.len();
    assert!(second.cached == kept || second.cached == kept - 1, "{} of {kept} positions", second.cached);
}

fn interrupt(child: &Child, signal: i32) {
    // SAFETY: the process is a child that was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

#[test]
fn a_program_that_is_asked_to_end_keeps_the_turn_and_ends() {
    let place = Place::new();
    let kv = place.path("a.kv");
    let mut child = piped(&mut place.chat(&["-n", "3000", "--ignore-eos", "--kv", kv.to_str().unwrap()]));
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Tell me of a fox.\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    interrupt(&child, libc::SIGTERM);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let kept: Value = serde_json::from_slice(&fs::read(place.path("a.kv.json")).unwrap()).unwrap();
    assert_eq!(kept["messages"].as_array().unwrap().len(), 2);
    drop(stdin);
}

#[test]
fn what_is_saved_goes_on_when_it_is_loaded_as_if_nothing_had_come_between() {
    let place = Place::new();
    let file = place.path("saved.json");
    let file = file.to_str().unwrap();
    let plain = place.turns(&["-n", "12"], "Tell me of a fox.\nWhy?\nAnd then?\n");
    let script =
        format!("Tell me of a fox.\nWhy?\n/save {file}\n/reset\nTell me of a king.\n/load {file}\nAnd then?\n");
    let turns = place.turns(&["-n", "12"], &script);
    assert_eq!(turns.len(), 4);
    let [king, fox] = ["Tell me of a king.", "Tell me of a fox."].map(|text| place.plain(text));
    let same = king.iter().zip(&fox).take_while(|(a, b)| a == b).count();
    assert_eq!(turns[2].prompt, BEGIN.len() + 1 + king.len() + ANSWER.len());
    assert_eq!(turns[2].cached, 2 + 1 + same, "what a new conversation has in common with the old one");
    assert_eq!((&turns[3].ids, turns[3].prompt), (&plain[2].ids, plain[2].prompt));
    // Another process knows the tokens too, and nothing of them is computed yet.
    let other = place.turns(&["-n", "12"], &format!("/load {file}\nAnd then?\n"));
    assert_eq!((&other[0].ids, other[0].prompt, other[0].cached), (&plain[2].ids, plain[2].prompt, 0));
    // What is something else is not written over, and is not loaded.
    let diary = place.path("diary.txt");
    fs::write(&diary, "Dear diary").unwrap();
    for command in ["/save", "/load"] {
        let output = place.says(&[], &format!("{command} {}\n", diary.display()));
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("not JSON"), "{}", stderr(&output));
    }
    assert_eq!(fs::read(&diary).unwrap(), b"Dear diary");
    let shard = tales().join("config.json");
    let output = place.says(&[], &format!("/save {}\n", shard.display()));
    assert!(stderr(&output).contains("which this command reads"), "{}", stderr(&output));
}

#[test]
fn a_killed_chat_goes_on_from_the_file_of_its_context() {
    let place = Place::new();
    let said = ["Tell me of a fox.", "Why?", "And then?"];
    let plain = place.turns(&["-n", "12"], &said.map(|line| format!("{line}\n")).concat());
    let kv = place.path("a.kv");
    let kept = place.path("a.kv.json");
    let kv = kv.to_str().unwrap();
    let mut child = piped(&mut place.chat(&["-n", "12", "--kv", kv]));
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Tell me of a fox.\nWhy?\n").unwrap();
    let messages = || {
        let text = fs::read(&kept).unwrap_or_default();
        serde_json::from_slice::<Value>(&text).map_or(0, |json| json["messages"].as_array().unwrap().len())
    };
    wait_until("the second turn", || messages() == 4);
    child.kill().unwrap();
    child.wait().unwrap();
    // Another is killed in the middle of an answer, which is lost; what was said before it is not.
    let mut child = piped(&mut place.chat(&["-n", "3000", "--ignore-eos", "--kv", kv]));
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"What of the king?\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let last = place.turns(&["-n", "12", "--kv", kv], "And then?\n");
    assert_eq!((&last[0].ids, last[0].prompt), (&plain[2].ids, plain[2].prompt));
    assert!(last[0].cached >= plain[1].positions(), "{} of {} positions", last[0].cached, plain[1].positions());
    let messages = messages();
    assert_eq!(messages, 6);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&kept).unwrap().permissions().mode() & 0o777, 0o600, "for nobody else");
    // A damaged conversation is left alone, and costs a line.
    fs::write(&kept, "{").unwrap();
    let output = done(place.says(&["-n", "3", "--kv", kv], "Why?\n"));
    assert_eq!(stderr(&output).matches("the conversation is not kept").count(), 1, "{}", stderr(&output));
    assert_eq!(fs::read(&kept).unwrap(), b"{");
}

#[test]
fn a_full_context_is_told_with_both_numbers_and_what_to_do() {
    let place = Place::new();
    let first = BEGIN.len() + 1 + place.plain("Tell me of a fox.").len() + ANSWER.len();
    let context = (first + 6).to_string();
    let output = place.says(&["-c", &context, "--ignore-eos"], "Tell me of a fox.\nWhy?\n");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let error = stderr(&output);
    assert!(
        error.contains(&format!("{} of {context} tokens of context, ended at the end of the context", first + 6)),
        "{error}"
    );
    let next = first + 6 + 1 + place.plain("Why?").len() + ANSWER.len();
    assert!(error.contains(&format!("the conversation has {next} tokens, and the context {context}")), "{error}");
    assert!(error.contains("/reset") && error.contains("-c, up to 4096"), "{error}");
    assert!(!output.stdout.is_empty(), "the first answer was given");
}

#[test]
fn what_chat_cannot_do_is_refused_before_the_model_is_loaded() {
    let place = Place::new();
    for (extra, words) in [
        (&["--raw"][..], "chat takes no --raw"),
        (&["--ids"], "chat takes no --ids"),
        (&["--timeline", "t.json"], "chat takes no --timeline"),
        (&["-f", "-"], "chat takes no -f -"),
        (&["--think", "aloud"], "known are on, off"),
        (&["-c", "5000"], "more than the model's 4096"),
        (&["--kv", "x.safetensors"], "read as weights"),
        (&["-m", "/no/such/model"], "does not exist"),
    ] {
        let output = place.says(extra, "Hello\n");
        assert_eq!(output.status.code(), Some(2), "{extra:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{extra:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty());
    }
    let output = place.says(&[], "Hello\n/frobnicate\nnever said\n");
    assert!(
        output.status.code() == Some(2) && stderr(&output).contains("no command /frobnicate"),
        "{}",
        stderr(&output)
    );
    let output = place.says(&[], "Hello \u{e9}\n".replace('\u{e9}', "x").as_str());
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn first_words_commands_and_thoughts_of_a_script() {
    let place = Place::new();
    let output = done(
        place.says(&["-n", "8", "-p", "Tell me of a fox.", "--temp", "0"], "/stats\n/think on\nWhy?\n/exit\nno\n"),
    );
    let error = stderr(&output);
    assert!(error.contains("stage ") && error.contains("experts "), "{error}");
    assert_eq!(error.matches("tokens of context").count(), 2, "two turns: {error}");
    assert!(error.contains("the model thinks before it answers; thoughts are not shown"), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.ends_with('\n') && !text.contains('\x1b') && !text.contains("> ") && !text.contains("</think>"),
        "{text}"
    );
}

// A person at a terminal.

struct Person {
    child: Child,
    terminal: File,
    seen: String,
}

impl Person {
    fn sits_down(mut command: Command) -> Person {
        let (mut master, mut slave) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are written, and a name, modes and a size are not asked for.
        let opened = unsafe { libc::openpty(&mut master, &mut slave, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0, "{}", io::Error::last_os_error());
        // SAFETY: the call above opened it, and nobody else has it.
        let terminal = unsafe { File::from_raw_fd(master) };
        // SAFETY: as above.
        let other = unsafe { File::from_raw_fd(slave) };
        let end = || Stdio::from(other.try_clone().unwrap());
        command.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
        let own_terminal = || {
            // SAFETY: it takes nothing.
            unsafe { libc::setsid() };
            // SAFETY: standard input is the terminal.
            match unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure makes two system calls and touches no memory of the process.
        unsafe { command.pre_exec(own_terminal) };
        Person { child: command.spawn().unwrap(), terminal, seen: String::new() }
    }

    fn types(&mut self, text: &str) {
        self.terminal.write_all(text.as_bytes()).unwrap();
    }

    /// Reads on until it sees `text`, and forgets all before its end.
    #[track_caller]
    fn sees(&mut self, text: &str) -> String {
        let mut bytes = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            let mut ready = libc::pollfd { fd: self.terminal.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one live descriptor.
            let events = unsafe { libc::poll(&mut ready, 1, PATIENCE_MS) };
            assert!(events == 1, "waited in vain for {text:?} in {:?}", self.seen);
            let count = self.terminal.read(&mut bytes).unwrap_or(0);
            assert!(count > 0, "no {text:?} in {:?}", self.seen);
            self.seen += &String::from_utf8_lossy(&bytes[..count]);
        }
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        // Where a test failed; otherwise it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that says nothing for so long has lost something.
const PATIENCE_MS: i32 = 120_000;

const PROMPT: &str = "\x1b[K> ";
/// What the line editor writes when it has read a line: keys are signals again.
const READ: &str = "\x1b[?2004l";

#[test]
fn a_person_interrupts_clears_a_line_and_leaves() {
    let place = Place::new();
    let mut person = Person::sits_down(place.chat(&["--temp", "0", "--ignore-eos", "-n", "3500"]));
    person.sees(PROMPT);
    person.types("half a line");
    person.sees("half a line");
    person.types("\x03");
    person.sees(READ);
    person.sees(PROMPT);
    person.types("Tell me of a fox.\r");
    person.sees(READ);
    // Of the answer.
    person.sees(" the ");
    person.types("\x03");
    let seen = person.sees("of context, interrupted");
    assert!(seen.contains("\x1b[2m"), "dimmed: {seen:?}");
    person.sees(PROMPT);
    person.types("/stats\r");
    person.sees("interrupted\r\n");
    person.sees(PROMPT);
    person.types("\x04");
    assert_eq!(person.child.wait().unwrap().code(), Some(0));
    let history = fs::read_to_string(place.path("millstream/chat-history")).unwrap();
    assert_eq!(history, "#V2\nTell me of a fox.\n/stats\n");
}

#[test]
fn a_history_that_cannot_be_used_costs_one_line_and_styles_can_be_refused() {
    let place = Place::new();
    fs::create_dir(place.path("millstream")).unwrap();
    let broken = place.path("millstream/chat-history");
    fs::write(&broken, b"#V2\nfox\n\xff\xfe\n").unwrap();
    for (state, name) in [(place.home.path(), "chat-history"), (Path::new("/dev/null"), "/dev/null")] {
        let mut command = place.chat(&["-n", "4", "--temp", "0"]);
        command.env("XDG_STATE_HOME", state).env("NO_COLOR", "1");
        let mut person = Person::sits_down(command);
        let before = person.sees(PROMPT);
        assert!(before.matches("what is typed is not kept").count() == 1 && before.contains(name), "{before:?}");
        person.types("Tell me of a fox.\r");
        let seen = person.sees("tokens of context");
        assert!(!seen.contains("\x1b[2m") && !seen.contains("not kept"), "{seen:?}");
        person.sees(PROMPT);
        person.types("/exit\r");
        assert_eq!(person.child.wait().unwrap().code(), Some(0));
    }
    assert_eq!(fs::read(&broken).unwrap(), b"#V2\nfox\n\xff\xfe\n", "left as it was");
}
