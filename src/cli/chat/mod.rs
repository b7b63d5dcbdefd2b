//! The `chat` command: a conversation in which what was said before is not computed again.

mod answer;
mod command;
mod input;
mod kept;
mod turn;

use std::io;
use std::path::PathBuf;

use crate::engine::Engine;
use crate::model::conversation::Conversation;
use crate::model::template::ChatTemplate;

use super::advice::Known;
use super::args::{self, RunArgs};
use super::machine::Machine;
use super::usage::Usage;
use super::{Done, Failure, config, hanging, interrupt, job, kvfile, numa, output, prompt, render, run};
use answer::{Thoughts, dimmed};
use command::{Command, Think};
use input::{Entered, Input};
use kept::Kept;
use turn::Model;

/// Flags of `chat`.
#[derive(Debug, clap::Args)]
#[command(
    mut_arg("raw", |arg| arg.hide(true)),
    mut_arg("ids", |arg| arg.hide(true)),
    mut_arg("timeline", |arg| arg.hide(true)),
    mut_arg("grammar", |arg| arg.hide(true)),
    mut_arg("json_schema", |arg| arg.hide(true)),
    mut_arg("json_schema_text", |arg| arg.hide(true)),
    mut_arg("prompt", |arg| arg.help("Say this first")),
    mut_arg("file", |arg| arg.help("Say first what is in a file. One newline at its end is dropped")),
    mut_arg("system", |arg| arg.help("Instructions to the model, before the conversation")),
    mut_arg("max_tokens", |arg| arg.help("Most tokens of an answer; -1 goes on to a stop or the end of the context [default: -1]")),
    mut_arg("ctx_size", |arg| arg.help("Tokens of context, which all turns share [default: 4096, or what the model allows]")),
    mut_arg("kv", |arg| arg.help(
        "Leave context and conversation (in FILE.json) there after each turn, and go on with what is there: nothing is computed \
         again")),
    mut_arg("json", |arg| arg.help("Print one JSON object a turn, with answer and statistics, instead of text")),
    mut_arg("stats_json", |arg| arg.help("Write the statistics of the last turn to a file as JSON")),
    after_help = "\
Examples:
  millstream chat --kv fox.kv
  millstream chat -m /models/glm-5.2-int4 --ram 16G --system \"Be brief.\" --think on

/help lists what can be typed besides messages. Where standard input is no terminal, each of its lines is a turn, and the \
first that fails ends it. All other flags are those of `run`.
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted by SIGTERM (what was generated is shown and kept)."
)]
pub struct ChatArgs {
    /// Let the model think before it answers: on or off [default: off]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| args::ON_OFF.parse(text))]
    think: Option<bool>,
    #[command(flatten)]
    run: RunArgs,
}

impl ChatArgs {
    /// Those of a turn, which `run` would have too.
    fn run_args(&self) -> Result<RunArgs, Failure> {
        let refused = |flag: &str, hint: &str| Err(Failure::usage(format!("chat takes no {flag}")).hint(hint));
        let run = &self.run;
        match () {
            () if run.raw => {
                refused("--raw", "what is said goes through the model's chat template; `millstream run --raw` has none")
            }
            () if run.ids => refused("--ids", "what is said is text; `millstream run --ids` takes token ids"),
            () if run.timeline.is_some() => refused("--timeline", "`millstream run --timeline` draws one generation"),
            () if run.grammar.is_given() => {
                refused("grammar", "`millstream run` holds an answer to a grammar or a JSON schema")
            }
            () if run.file.as_ref().is_some_and(|file| file.as_os_str() == "-") => {
                refused("-f -", "standard input is the conversation: each of its lines is a turn")
            }
            () => Ok(RunArgs { max_tokens: run.max_tokens.or(Some(-1)), ..run.clone() }),
        }
    }
}

/// Holds a conversation.
pub fn chat(args: &ChatArgs, machine: &Machine) -> Result<Done, Failure> {
    let run_args = args.run_args()?;
    let machine = &numa::place(&run_args, machine)?;
    let first = match run_args.prompt.is_some() || run_args.file.is_some() {
        true => Some(prompt::read_prompt(&run_args)?),
        false => None,
    };
    let Some((model, usage, conversation)) = open(&run_args, machine)? else { return Ok(Done::Interrupted) };
    let (conversation, kept) = conversation;
    let thinking = Thinking { on: args.think.unwrap_or(false), shown: None };
    let mut chat = Chat { args: &run_args, machine, model, conversation, kept, thinking };
    let done = chat.converse(first);
    // Also of a chat that failed: what was chosen was chosen.
    let engine = chat.model.engine;
    usage.update(&engine.store().usage()).iter().for_each(|line| render::note(run_args.quiet, line));
    hanging::leave(engine, run_args.quiet);
    done
}

type Begun = (Conversation, Option<Kept>);

/// Everything that a conversation needs; none where somebody interrupted it.
fn open(args: &RunArgs, machine: &Machine) -> Result<Option<(Model, Usage, Begun)>, Failure> {
    let mut config = config::decide(args, machine)?;
    config.check_memory(machine)?;
    if let Some(path) = &args.stats_json {
        output::check(path, "statistics", &job::inputs(args, machine))?;
    }
    if let Some(path) = &args.kv {
        kvfile::check(path, &config.usage)?;
    }
    let Some(checkpoint) = job::open_checkpoint(args, &mut config, machine)? else { return Ok(None) };
    let dir = checkpoint.dir.clone();
    let files = job::Files::new(dir.clone(), config.model.clone());
    let blamed = |failure: Failure| files.blamed(failure);
    let Some(tokenizer) = prompt::open_tokenizer(&dir, &checkpoint.arch, false).map_err(blamed)? else {
        unreachable!("a tokenizer that is not optional is there")
    };
    let template = ChatTemplate::open(&dir)
        .map_err(|error| blamed(Failure::of(&error).hint(error.hint().replace("--raw", "`millstream run --raw`"))))?;
    let (stop_ids, stops) = job::split_stops(&config, Some(&tokenizer), job::ends_turn(args, &checkpoint.arch))?;
    config.shape.find_tokens(Some(&tokenizer), checkpoint.arch.vocab)?;
    let context = config.converse(checkpoint.arch.max_context)?;
    let (usage, warning) = Usage::open(&config.usage, &checkpoint, machine);
    warning.iter().for_each(|line| render::note(args.quiet, line));
    config.history = usage.before().to_vec();
    let known = Known::of(args, machine, &config, &checkpoint);
    let formats = checkpoint.formats().map(|format| format.to_string()).collect();
    let interrupted = interrupt::watch()?;
    let opened = run::open(args, &config, machine, checkpoint, context, &interrupted).map_err(|e| files.failure(e))?;
    let Some(mut engine) = opened else { return Ok(None) };
    engine.let_context_last();
    engine.set_watch(hanging::watch_reads(interrupted, args.quiet));
    let mut begun = (Conversation::begin(args.system.as_deref()), None);
    if let Some(path) = &args.kv {
        begun = take_up(args, &mut engine, path, &tokenizer, begun);
    }
    let model =
        Model { engine, config, files, formats, known, tokenizer, template, stop_ids, stops, last: None, told: vec![] };
    Ok(Some((model, usage, begun)))
}

/// Keeps context and conversation in and beside the file at `path`, and goes on with what is there.
fn take_up(
    args: &RunArgs,
    engine: &mut Engine,
    path: &std::path::Path,
    tokenizer: &crate::model::tokenizer::Tokenizer,
    begun: Begun,
) -> Begun {
    let note = |line: &str| render::note(args.quiet, line);
    kvfile::keep(engine, path).iter().for_each(|line| note(line));
    // Who uses the one file uses the other.
    if !engine.keeps_context() {
        return begun;
    }
    match Kept::open(path, tokenizer) {
        Err(why) => {
            note(&why);
            begun
        }
        Ok((kept, None)) => (begun.0, Some(kept)),
        Ok((kept, Some(mut conversation))) => {
            if let Some(system) = &args.system {
                conversation.instruct(system);
            }
            if conversation.is_begun() {
                note(&format!(
                    "the conversation of {} goes on: {}",
                    kept.path().display(),
                    turn::size_of(&conversation)
                ));
            }
            (conversation, Some(kept))
        }
    }
}

/// What was said about thoughts.
#[derive(Clone, Copy, Debug)]
struct Thinking {
    on: bool,
    shown: Option<bool>,
}

/// A conversation under way.
struct Chat<'a> {
    args: &'a RunArgs,
    machine: &'a Machine,
    model: Model,
    conversation: Conversation,
    /// Where it is kept from turn to turn, as long as that can be.
    kept: Option<Kept>,
    thinking: Thinking,
}

impl Chat<'_> {
    /// Takes turns until there are no more; `first` is said before anything else.
    fn converse(&mut self, first: Option<String>) -> Result<Done, Failure> {
        let mut input = Input::open(self.machine, self.args.quiet)?;
        if input.is_terminal() {
            self.remark("/help lists what can be typed besides messages; Ctrl-D leaves");
        }
        let mut next = first.map(Entered::Text);
        loop {
            let entered = match next.take() {
                Some(entered) => entered,
                None => match input.next()? {
                    Some(entered) => entered,
                    None => return Ok(Done::Whole),
                },
            };
            let result = match &entered {
                Entered::Text(text) => self.say(text),
                Entered::Command(line) => Command::parse(line).and_then(|command| self.obey(command)),
            };
            match result {
                Ok(None) => {}
                Ok(Some(done)) => return Ok(done),
                Err(failure) if input.is_terminal() => render::stderr(&failure.text()),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Does what is not said to the model; how the chat ends, where it does.
    fn obey(&mut self, command: Command) -> Result<Option<Done>, Failure> {
        match command {
            Command::Exit => return Ok(Some(Done::Whole)),
            Command::Help => render::stderr(command::HELP),
            Command::Stats => match &self.model.last {
                Some(stats) => render::stderr(&render::stats_text(stats, self.model.seed())),
                None => self.remark("nothing was answered yet"),
            },
            Command::Think(think) => {
                match think {
                    None => {}
                    Some(Think::On) => self.thinking.on = true,
                    Some(Think::Off) => self.thinking.on = false,
                    Some(Think::Show) => self.thinking.shown = Some(true),
                    Some(Think::Hide) => self.thinking.shown = Some(false),
                }
                let on = if self.thinking.on { "thinks before it answers" } else { "answers without thinking" };
                let shown = if self.thoughts() == Thoughts::Hidden { "are not shown" } else { "are shown" };
                self.remark(&format!("the model {on}; thoughts {shown}"));
            }
            Command::Reset => {
                self.take(Conversation::begin(self.conversation.system()));
                self.model.reseed(self.args);
                self.remark("a new conversation begins");
            }
            Command::Save(path) => {
                kept::save(&path, &self.inputs(), &self.conversation, &self.model.tokenizer)?;
                self.remark(&format!("saved: {}", turn::size_of(&self.conversation)));
            }
            Command::Load(path) => {
                let conversation = kept::load(&path, &self.model.tokenizer)?;
                self.remark(&format!("loaded: {}", turn::size_of(&conversation)));
                self.take(conversation);
            }
        }
        Ok(None)
    }

    /// Goes on with another conversation.
    fn take(&mut self, conversation: Conversation) {
        self.conversation = conversation;
        self.keep();
    }

    /// Brings the file of the conversation up to date.
    fn keep(&mut self) {
        let Some(kept) = &self.kept else { return };
        if let Err(error) = kept.save(&self.conversation, &self.model.tokenizer) {
            let path = kept.path().display();
            render::note(
                self.args.quiet,
                &format!("the conversation is not kept any more: cannot write {path}: {error}"),
            );
            self.kept = None;
        }
    }

    /// What no conversation is written over: what the command reads, and what it keeps.
    fn inputs(&self) -> Vec<PathBuf> {
        let kept = self.kept.iter().map(|kept| kept.path().to_owned());
        let history = self.machine.state_dir().map(|dir| dir.join("chat-history"));
        let stats = self.args.stats_json.iter().cloned();
        job::inputs(self.args, self.machine)
            .into_iter()
            .chain([self.model.files.dir.clone()])
            .chain(kept)
            .chain(history)
            .chain(stats)
            .collect()
    }

    /// What is seen of thoughts: on a terminal all of them, unless they are not wanted; elsewhere none, unless they are.
    fn thoughts(&self) -> Thoughts {
        let stdout = io::stdout();
        let is_terminal = io::IsTerminal::is_terminal(&stdout);
        match (self.thinking.shown.unwrap_or(is_terminal), self.machine.styles(&stdout)) {
            (false, _) => Thoughts::Hidden,
            (true, true) => Thoughts::Dimmed,
            (true, false) => Thoughts::Plain,
        }
    }

    /// Says something beside the conversation.
    fn remark(&self, text: &str) {
        if !self.args.quiet {
            render::stderr(&(dimmed(text, self.machine.styles(&io::stderr())) + "\n"));
        }
    }
}
