//! The answer on its way to stdout: tokens in, whole characters out, ending before a stop string.

use std::io::{self, Write};
use std::ops::ControlFlow;

use crate::engine::stop::{Pushed, StopMatcher};
use crate::model::detokenizer::Detokenizer;
use crate::model::tokenizer::Tokenizer;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Text, as it comes.
    Text,
    /// Token ids, as they come.
    Ids,
    /// Nothing: the text is only collected.
    Nothing,
}

/// Writes an answer token by token.
pub struct Printer<'a, W: Write> {
    show: Show,
    out: W,
    tokenizer: Option<&'a Tokenizer>,
    /// Tokens that end a turn; they have no text.
    hidden: &'a [u32],
    detokenizer: Detokenizer,
    stops: StopMatcher,
    text: String,
    ids_written: usize,
    failed: Option<io::Error>,
}

impl<'a, W: Write> Printer<'a, W> {
    /// A printer to `out`. Without a tokenizer there is no text. Room for `tokens` tokens is set aside.
    pub fn new(
        show: Show,
        out: W,
        tokenizer: Option<&'a Tokenizer>,
        hidden: &'a [u32],
        stops: StopMatcher,
        tokens: usize,
    ) -> Printer<'a, W> {
        let text = String::with_capacity(8 * tokens.min(1 << 20));
        let detokenizer = Detokenizer::new();
        Printer { show, out, tokenizer, hidden, detokenizer, stops, text, ids_written: 0, failed: None }
    }

    /// Takes the next token. `Break` when the answer has ended or nobody can read it.
    pub fn token(&mut self, id: u32) -> ControlFlow<()> {
        if self.show == Show::Ids {
            let blank = if self.ids_written == 0 { "" } else { " " };
            self.ids_written += 1;
            let written = write!(self.out, "{blank}{id}").and_then(|()| self.out.flush());
            self.failed = self.failed.take().or(written.err());
        }
        let mut ended = false;
        if let Some(tokenizer) = self.tokenizer
            && !tokenizer.is_special(id)
            && !self.hidden.contains(&id)
        {
            let text = match self.stops.push(self.detokenizer.push(tokenizer.token_bytes(id))) {
                Pushed::Show(text) => text,
                Pushed::Stop(text) => {
                    ended = true;
                    text
                }
            };
            self.text.push_str(text);
            if self.show == Show::Text && !text.is_empty() && self.failed.is_none() {
                self.failed = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).err();
            }
        }
        if ended || self.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Writes what is no part of the answer.
    pub fn aside(&mut self, text: &str) -> ControlFlow<()> {
        if self.failed.is_none() {
            self.failed = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()).err();
        }
        if self.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Ends the answer: releases what waited for a stop string, drops half a character, ends the line.
    pub fn finish(&mut self) {
        self.detokenizer.finish();
        let rest = self.stops.finish();
        self.text.push_str(rest);
        if self.failed.is_some() {
            return;
        }
        let written = match self.show {
            Show::Text => {
                let newline = if self.text.is_empty() || self.text.ends_with('\n') { "" } else { "\n" };
                self.out.write_all(rest.as_bytes()).and_then(|()| self.out.write_all(newline.as_bytes()))
            }
            Show::Ids => self.out.write_all(b"\n"),
            Show::Nothing => Ok(()),
        };
        self.failed = written.and_then(|()| self.out.flush()).err();
    }

    /// The text shown so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The stop string that ended the answer.
    pub fn stopped_by(&self) -> Option<&str> {
        self.stops.matched()
    }

    /// Why the answer could not be written; a closed pipe is one reason.
    pub fn failed(&mut self) -> Option<io::Error> {
        self.failed.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap()
    }

    fn stops(list: &[&str]) -> StopMatcher {
        StopMatcher::new(list.iter().map(|s| s.to_string()).collect()).unwrap()
    }

    /// Records what each write-and-flush put out.
    #[derive(Default)]
    struct Chunks {
        flushed: Vec<String>,
        open: Vec<u8>,
    }

    impl Write for Chunks {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.open.extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            // Every flush ends on a whole character.
            self.flushed.push(String::from_utf8(std::mem::take(&mut self.open)).unwrap());
            Ok(())
        }
    }

    #[test]
    fn characters_come_whole_and_control_tokens_not_at_all() {
        let tokenizer = tokenizer();
        let mut ids = tokenizer.encode_plain("a 🦊").unwrap();
        ids.splice(1..1, [4095, 4085]);
        ids.push(4091);
        let mut chunks = Chunks::default();
        let mut printer = Printer::new(Show::Text, &mut chunks, Some(&tokenizer), &[4091], stops(&[]), 10);
        for id in &ids {
            assert!(printer.token(*id).is_continue());
        }
        printer.finish();
        assert_eq!(printer.text(), "a 🦊");
        assert_eq!(chunks.flushed.concat(), "a 🦊\n");
        assert!(chunks.flushed.len() > 2);
    }

    #[test]
    fn the_end_of_the_budget_inside_a_character_shows_no_half_of_it() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode_plain("ab🦊").unwrap();
        let mut out = Vec::new();
        let mut printer = Printer::new(Show::Text, &mut out, Some(&tokenizer), &[], stops(&[]), 10);
        for id in &ids[..ids.len() - 1] {
            let _ = printer.token(*id);
        }
        printer.finish();
        assert_eq!(printer.text(), "ab");
        assert_eq!(out, b"ab\n");
    }

    #[test]
    fn a_stop_string_ends_it() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode_plain("There was a fox. The end, she said.").unwrap();
        let mut out = Vec::new();
        let mut printer = Printer::new(Show::Text, &mut out, Some(&tokenizer), &[], stops(&["he end"]), 10);
        let taken = ids.iter().take_while(|id| printer.token(**id).is_continue()).count();
        printer.finish();
        assert!(taken < ids.len() - 3);
        assert_eq!(printer.stopped_by(), Some("he end"));
        assert_eq!(out, b"There was a fox. T\n");
    }

    #[test]
    fn ids_are_written_as_they_are() {
        let mut out = Vec::new();
        let mut printer = Printer::new(Show::Ids, &mut out, None, &[2], stops(&[]), 10);
        for id in [1, 2, 30] {
            assert!(printer.token(id).is_continue());
        }
        printer.finish();
        assert_eq!(out, b"1 2 30\n");
    }

    #[test]
    fn a_reader_that_went_away_ends_it() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let tokenizer = tokenizer();
        let mut printer = Printer::new(Show::Text, Closed, Some(&tokenizer), &[], stops(&[]), 10);
        assert!(printer.token(400).is_break());
        printer.finish();
        assert_eq!(printer.failed().unwrap().kind(), io::ErrorKind::BrokenPipe);
    }
}
