//! An answer as it comes: what the model thinks, where it does, and what it says.

use std::io::{self, Write};
use std::ops::ControlFlow;

use crate::cli::printer::Printer;
use crate::model::conversation::ThinkMarks;
use crate::model::detokenizer::Detokenizer;
use crate::model::tokenizer::Tokenizer;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Text that is less important than an answer, on what may have styles or not.
pub fn dimmed(text: &str, styles: bool) -> String {
    if styles { format!("{DIM}{text}{PLAIN}") } else { text.to_owned() }
}

/// What is seen of thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thoughts {
    /// Less bright than what is said.
    Dimmed,
    /// As what is said, with a line between them.
    Plain,
    /// Nothing.
    Hidden,
}

/// Writes an answer token by token.
pub struct Answer<'a, W: Write> {
    printer: Printer<'a, W>,
    tokenizer: &'a Tokenizer,
    marks: Option<ThinkMarks>,
    thoughts: Thoughts,
    /// The next token is one of a thought.
    thinks: bool,
    detokenizer: Detokenizer,
    thought: String,
    /// Something of a thought was written, and the line between it and what is said was not.
    open: bool,
}

impl<'a, W: Write> Answer<'a, W> {
    /// Of what follows `prompt`, said by `printer`.
    pub fn new(printer: Printer<'a, W>, tokenizer: &'a Tokenizer, prompt: &[u32], thoughts: Thoughts) -> Answer<'a, W> {
        let marks = ThinkMarks::of(tokenizer.control());
        let thinks = marks.is_some_and(|marks| marks.left_open(prompt));
        let (detokenizer, thought) = (Detokenizer::new(), String::new());
        Answer { printer, tokenizer, marks, thoughts, thinks, detokenizer, thought, open: false }
    }

    /// Takes the next token. `Break` when the answer has ended or nobody can read it.
    pub fn token(&mut self, id: u32) -> ControlFlow<()> {
        match self.marks {
            Some(marks) if self.thinks && id == marks.close => {
                self.thinks = false;
                self.detokenizer.finish();
                return self.end_thought("\n\n");
            }
            // A model that begins to think by itself; one that has spoken writes the mark as it writes anything else.
            Some(marks) if !self.thinks && id == marks.open && self.printer.text().is_empty() => {
                self.thinks = true;
                return ControlFlow::Continue(());
            }
            _ if self.thinks && self.tokenizer.is_special(id) => return ControlFlow::Continue(()),
            _ if self.thinks => {}
            _ => return self.printer.token(id),
        }
        let text = self.detokenizer.push(self.tokenizer.token_bytes(id));
        self.thought.push_str(text);
        match (self.thoughts, self.open) {
            (Thoughts::Hidden, _) => ControlFlow::Continue(()),
            (Thoughts::Dimmed, false) => {
                self.open = true;
                let begun = self.printer.aside(DIM);
                if begun.is_continue() { self.printer.aside(text) } else { begun }
            }
            (Thoughts::Plain, false) | (_, true) => {
                self.open = true;
                self.printer.aside(text)
            }
        }
    }

    fn end_thought(&mut self, between: &str) -> ControlFlow<()> {
        if !std::mem::take(&mut self.open) {
            return ControlFlow::Continue(());
        }
        let style = if self.thoughts == Thoughts::Dimmed { PLAIN } else { "" };
        self.printer.aside(&format!("{style}{between}"))
    }

    /// Ends the answer, and the line.
    pub fn finish(&mut self) {
        // That it cannot be written is asked for later.
        let _ = self.end_thought("\n");
        self.printer.finish();
    }

    /// Whether nothing of what came so far is seen.
    pub fn is_silent(&self) -> bool {
        self.printer.text().is_empty() && (self.thoughts == Thoughts::Hidden || self.thought.is_empty())
    }

    /// What was thought.
    pub fn thought(&self) -> &str {
        &self.thought
    }

    /// Whether it ends in the middle of a thought.
    pub fn is_thought(&self) -> bool {
        self.thinks
    }

    /// What was said, without what was thought.
    pub fn text(&self) -> &str {
        self.printer.text()
    }

    /// The stop string that ended it.
    pub fn stopped_by(&self) -> Option<&str> {
        self.printer.stopped_by()
    }

    /// Why it could not be written; a closed pipe is one reason.
    pub fn failed(&mut self) -> Option<io::Error> {
        self.printer.failed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::printer::Show;
    use crate::engine::stop::StopMatcher;
    use std::path::Path;

    /// `<|user|>`, `<think>` and `</think>`.
    const STOP: [u32; 1] = [4091];
    const OPEN: u32 = 4094;
    const CLOSE: u32 = 4095;

    /// What is written of tokens after a prompt, thought and said, and whether it ends in a thought.
    fn written(prompt: &[u32], parts: &[&[u32]], thoughts: Thoughts) -> (String, String, String, bool) {
        let tokenizer = Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap();
        let mut out = Vec::new();
        let stops = StopMatcher::new(vec![]).unwrap();
        let printer = Printer::new(Show::Text, &mut out, Some(&tokenizer), &STOP, stops, 10);
        let mut answer = Answer::new(printer, &tokenizer, prompt, thoughts);
        for &id in parts.concat().iter() {
            assert!(answer.token(id).is_continue());
        }
        answer.finish();
        let (reasoning, content) = (answer.thought().to_owned(), answer.text().to_owned());
        let is_thought = answer.is_thought();
        drop(answer);
        (String::from_utf8(out).unwrap(), reasoning, content, is_thought)
    }

    fn plain(text: &str) -> Vec<u32> {
        let tokenizer = Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap();
        tokenizer.encode_plain(text).unwrap()
    }

    #[test]
    fn thoughts_are_told_from_words_and_marks_are_never_shown() {
        let (hm, fox) = (plain("hm 🦊"), plain("A fox."));
        for (thoughts, expected) in [
            (Thoughts::Dimmed, "\x1b[2mhm 🦊\x1b[0m\n\nA fox.\n"),
            (Thoughts::Plain, "hm 🦊\n\nA fox.\n"),
            (Thoughts::Hidden, "A fox.\n"),
        ] {
            let thought = ("hm 🦊".to_owned(), "A fox.".to_owned(), false);
            // The template left the thought open, or the model began it.
            for (prompt, first) in [(&[5, OPEN][..], &[][..]), (&[OPEN, CLOSE], &[OPEN])] {
                let (out, reasoning, content, open) = written(prompt, &[first, &hm, &[CLOSE], &fox], thoughts);
                assert_eq!(out, expected);
                assert_eq!((reasoning, content, open), thought);
            }
        }
    }

    #[test]
    fn an_answer_that_ends_in_a_thought_ends_its_style_and_its_line() {
        let hm = plain("hm");
        let (out, reasoning, content, open) = written(&[OPEN], &[&hm], Thoughts::Dimmed);
        assert_eq!((out.as_str(), reasoning.as_str(), content.as_str(), open), ("\x1b[2mhm\x1b[0m\n", "hm", "", true));
        assert_eq!(written(&[OPEN], &[&hm], Thoughts::Hidden).0, "");
        // No thought at all.
        assert_eq!(written(&[OPEN], &[&[CLOSE], &hm], Thoughts::Dimmed).0, "hm\n");
        assert_eq!(written(&[OPEN, CLOSE], &[&hm], Thoughts::Dimmed).0, "hm\n");
    }
}
