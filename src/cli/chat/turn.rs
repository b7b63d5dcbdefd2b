//! One turn: from what the user says to the end of the answer, and a line about it.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::atomic::AtomicBool;

use crate::cli::advice::Known;
use crate::cli::args::{RunArgs, Seed};
use crate::cli::config::{self, MaxTokens, RunConfig};
use crate::cli::job::Files;
use crate::cli::machine::Machine;
use crate::cli::printer::{Printer, Show};
use crate::cli::run::{self, LookingOn};
use crate::cli::shaping::Logprobs;
use crate::cli::{Done, Failure, interrupt, render, size};
use crate::engine::shaping::Scored;
use crate::engine::stats::{Stats, TokenLogprob};
use crate::engine::stop::StopMatcher;
use crate::engine::{Engine, EngineError, Finish, Job, Outcome, Shaping};
use crate::model::conversation::{Answer as Said, Conversation};
use crate::model::template::{ChatTemplate, TemplateError};
use crate::model::tokenizer::Tokenizer;

use super::Chat;
use super::answer::{Answer, Thoughts};

/// An opened model, and how it is spoken to.
pub struct Model {
    /// What generates.
    pub engine: Engine,
    /// What was decided.
    pub config: RunConfig,
    /// Its files.
    pub files: Files,
    /// Storage formats that occur.
    pub formats: Vec<String>,
    /// What advice follows from.
    pub known: Known,
    /// Its vocabulary.
    pub tokenizer: Tokenizer,
    /// How its conversations are written.
    pub template: ChatTemplate,
    /// Tokens that end an answer.
    pub stop_ids: Vec<u32>,
    /// Texts that end one.
    pub stops: StopMatcher,
    /// How the last answer came about.
    pub last: Option<Stats>,
    /// Warnings that were told.
    pub told: Vec<String>,
}

impl Model {
    /// The seed, where chance chooses tokens.
    pub fn seed(&self) -> Option<u64> {
        let sampling = &self.config.sampling;
        (sampling.temperature > 0.0).then_some(sampling.seed)
    }

    /// What begins anew may come out otherwise, unless a seed was given: what is chosen depends on seed and position.
    pub fn reseed(&mut self, args: &RunArgs) {
        if !matches!(args.seed, Some(Seed::Fixed(_))) {
            self.config.sampling.seed = config::random_seed();
        }
    }

    /// All tokens that come before the answer to `text`.
    fn prompt(&self, conversation: &Conversation, text: &str, thinks: bool) -> Result<Vec<u32>, Failure> {
        let prompt = conversation.prompt(text, &self.template, &self.tokenizer, thinks);
        let prompt = prompt
            .map_err(|error| Failure::of(&error).hint(error.hint().replace("--raw", "`millstream run --raw`")))?;
        if prompt.is_empty() {
            return Err(Failure::of(&TemplateError::Blank { dir: self.files.dir.clone() }));
        }
        Ok(prompt)
    }

    /// The most tokens that the answer to a prompt of so many tokens may have.
    fn room(&mut self, conversation: &Conversation, tokens: usize) -> Result<usize, Failure> {
        let (context, longest) = (self.engine.context(), self.engine.arch().max_context);
        if tokens >= context {
            let (tokens, context) = (size::grouped(tokens as u64), size::grouped(context as u64));
            let longer = format!("a longer context takes -c, up to {longest}");
            return Err(Failure::usage(format!(
                "the context is full: with this message the conversation has {tokens} tokens, and the context {context}"
            ))
            .hint(match conversation.is_begun() {
                true => format!(
                    "/reset begins anew; /save FILE keeps the conversation, and another chat can /load it; {longer}"
                ),
                false => format!("shorten the message; {longer}"),
            }));
        }
        let room = context - tokens;
        let (most, is_limit) = match self.config.max_tokens {
            MaxTokens::AtMost(n) => (n.min(room), n > room),
            MaxTokens::Context => (room, true),
        };
        self.config.context_limits = is_limit;
        Ok(most)
    }

    /// Generates the answer and writes it as it comes.
    fn answer(&mut self, job: &Job, interrupted: &AtomicBool, thoughts: Thoughts, args: &RunArgs) -> Spoken {
        let Model { engine, tokenizer, stops, config, .. } = self;
        let (show, thoughts) = if args.json { (Show::Nothing, Thoughts::Hidden) } else { (Show::Text, thoughts) };
        let out = io::stdout().lock();
        let printer = Printer::new(show, out, Some(tokenizer), &job.stop_ids, stops.clone(), 0);
        let mut answer = Answer::new(printer, tokenizer, &job.prompt, thoughts);
        let mut logprobs = Logprobs::new(&config.shape, job.max_tokens);
        let mut take = |scored: &Scored| logprobs.take(scored);
        let mut shaping = config.shape.shaping(&mut take);
        let outcome = generate(engine, job, &mut shaping, interrupted, &mut answer, args.quiet);
        answer.finish();
        Spoken {
            outcome,
            reasoning: answer.thought().to_owned(),
            content: answer.text().to_owned(),
            is_thought: answer.is_thought(),
            stopped_by: answer.stopped_by().map(str::to_owned),
            failed: answer.failed(),
            logprobs: config.shape.logprobs.map(|_| logprobs.told(Some(tokenizer))),
        }
    }

    /// The numbers of the turn that came to `outcome`.
    fn numbers(&self, outcome: &Outcome, text: &str, stopped_by: &Option<String>, machine: &Machine) -> Stats {
        let mut stats = self.engine.stats();
        run::complete(&mut stats, outcome, &self.config, machine, &self.files.dir);
        stats.text = text.to_owned();
        stats.stop_string = stopped_by.clone();
        stats.model.formats = self.formats.clone();
        stats.advice = self.known.judge(&stats, None).map(|judgement| judgement.advice.to_string());
        stats
    }

    /// Tells of what went wrong without ending anything, once.
    fn tell_warnings(&mut self, quiet: bool) {
        for line in self.engine.warnings() {
            if !self.told.contains(&line) {
                render::note(quiet && !self.engine.warns_of_damage(), &line);
                self.told.push(line);
            }
        }
    }
}

/// What came of a turn.
struct Spoken {
    outcome: Result<Outcome, EngineError>,
    /// What was thought, and what was said.
    reasoning: String,
    content: String,
    /// It ends in the middle of a thought.
    is_thought: bool,
    /// The stop string that ended it.
    stopped_by: Option<String>,
    /// Why it could not be written.
    failed: Option<io::Error>,
    /// Of its tokens, where they are told.
    logprobs: Option<Vec<TokenLogprob>>,
}

impl Chat<'_> {
    /// Takes a turn; how the chat ends, where it does. A turn that fails leaves the conversation as it was.
    pub fn say(&mut self, text: &str) -> Result<Option<Done>, Failure> {
        let prompt = self.model.prompt(&self.conversation, text, self.thinking.on)?;
        let max_tokens = self.model.room(&self.conversation, prompt.len())?;
        let (sampling, stop_ids) = (self.model.config.sampling, self.model.stop_ids.clone());
        let job = Job { prompt, max_tokens, sampling, stop_ids };
        let interrupted = interrupt::watch()?;
        let thoughts = self.thoughts();
        let spoken = self.model.answer(&job, &interrupted, thoughts, self.args);
        self.model.tell_warnings(self.args.quiet);
        if let Some(error) = spoken.failed {
            return match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(Some(Done::PipeClosed)),
                _ => Err(Failure::work("cannot write the answer to standard output").cause(error)),
            };
        }
        let Spoken { reasoning, content, is_thought, stopped_by, logprobs, .. } = spoken;
        let outcome = spoken.outcome.map_err(|error| self.model.files.failure(error))?;
        let mut stats = self.model.numbers(&outcome, &content, &stopped_by, self.machine);
        stats.logprobs = logprobs;
        let is_begun = !outcome.ids.is_empty() || outcome.finish != Finish::Interrupted;
        if is_begun {
            let is_cut = stopped_by.is_some();
            let answer = Said { ids: &outcome.ids, reasoning: &reasoning, content: &content, is_thought, is_cut };
            let added = self.conversation.answered(text, job.prompt, &answer, &self.model.tokenizer);
            added.map_err(|error| Failure::of(&error).hint(error.hint()))?;
            self.keep();
            self.sum_up(&stats);
        } else {
            self.remark("interrupted before the answer began: the message is not part of the conversation");
        }
        run::report_json(self.args, &stats)?;
        self.model.last = Some(stats);
        let is_over = outcome.finish == Finish::Interrupted && interrupt::is_terminated();
        Ok(is_over.then_some(Done::Interrupted))
    }

    /// The line after an answer, and what to do where there can be no more.
    fn sum_up(&self, stats: &Stats) {
        let context = self.model.engine.context();
        self.remark(&summary(stats, self.conversation.ids().len(), context));
        if stats.context_full {
            let longest = self.model.engine.arch().max_context;
            let longer =
                if context < longest { format!("; a longer context takes -c, up to {longest}") } else { String::new() };
            render::note(
                self.args.quiet,
                &format!("the context is full: /reset begins anew, and /save FILE keeps the conversation{longer}"),
            );
        }
    }
}

/// `23.4 tok/s, hit rate 97.1 %, 312 of 4,096 tokens of context`, and how it ended where the model did not end it.
fn summary(stats: &Stats, tokens: usize, context: usize) -> String {
    let rate = stats.decode_tok_s.map(|rate| format!("{rate:.1} tok/s"));
    let hits = stats.experts.hit_rate.map(|rate| format!("hit rate {:.1} %", 100.0 * rate));
    let (tokens, context) = (size::grouped(tokens as u64), size::grouped(context as u64));
    let ended = (stats.finish_reason != "stop").then(|| render::ended(stats));
    let parts = rate.into_iter().chain(hits).chain([format!("{tokens} of {context} tokens of context")]).chain(ended);
    parts.collect::<Vec<_>>().join(", ")
}

/// How much was said in a conversation.
pub fn size_of(conversation: &Conversation) -> String {
    let messages = size::counted(conversation.said().len() as u64, "message");
    match conversation.ids().len() as u64 {
        0 => messages,
        tokens => format!("{messages}, {}", size::counted(tokens, "token")),
    }
}

/// Generates until the answer ends or `interrupted` is raised, and says what is being waited for.
fn generate<W: Write>(
    engine: &mut Engine,
    job: &Job,
    shaping: &mut Shaping,
    interrupted: &AtomicBool,
    answer: &mut Answer<'_, W>,
    quiet: bool,
) -> Result<Outcome, EngineError> {
    let waiting = RefCell::new(Some(render::Waiting::begin("reading the prompt", quiet)));
    let mut looking_on = LookingOn::new(engine, job.prompt.len(), None, &waiting);
    let mut chosen = 0u64;
    let mut on_token = |id| {
        chosen += 1;
        let flow = answer.token(id);
        match answer.is_silent() {
            true => {
                if let Some(waiting) = waiting.borrow().as_ref() {
                    waiting.say(format!("generating, {} so far", size::counted(chosen, "token")));
                }
            }
            false => *waiting.borrow_mut() = None,
        }
        flow
    };
    engine.generate_shaped(job, shaping, interrupted, &mut on_token, &mut looking_on)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::stats::ExpertStats;

    #[test]
    fn the_line_after_an_answer_has_what_is_known() {
        let mut stats = Stats { finish_reason: "stop", decode_tok_s: Some(23.44), ..Stats::default() };
        stats.experts = ExpertStats { hit_rate: Some(0.9712), ..ExpertStats::default() };
        let line = "23.4 tok/s, hit rate 97.1 %, 1,312 of 4,096 tokens of context";
        assert_eq!(summary(&stats, 1312, 4096), line);
        stats.finish_reason = "interrupted";
        assert_eq!(summary(&stats, 1312, 4096), format!("{line}, interrupted"));
        let nothing = Stats { finish_reason: "length", context_full: true, ..Stats::default() };
        assert_eq!(summary(&nothing, 9, 10), "9 of 10 tokens of context, ended at the end of the context");
    }
}
