//! Stop strings over streamed text: what may be shown, what must wait, where the answer ends.
//!
//! Pure. The answer ends just before the stop string whose last byte comes first (of those that end together, before
//! the longest), so the result does not depend on how the text was cut into tokens.

use crate::limits::{MAX_STOP_BYTES, MAX_STOPS};

/// Why a list of stop strings is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string would stop before the first token.
    #[error("a stop string is empty")]
    Empty,
    /// A stop string longer than any use of one.
    #[error("a stop string has {bytes} bytes; at most {MAX_STOP_BYTES} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// More stop strings than any use of them.
    #[error("{count} stop strings are given; at most {MAX_STOPS} are allowed")]
    TooMany {
        /// How many there are.
        count: usize,
    },
}

/// Watches streamed text for stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    longest: usize,
    /// Text not yet released; `buffer[..shown]` was released by the last `push` and is removed by the next.
    buffer: String,
    shown: usize,
    matched: Option<usize>,
}

/// What follows from a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed<'a> {
    /// Show this (possibly nothing) and go on.
    Show(&'a str),
    /// Show this, the end of the answer: a stop string follows it.
    Stop(&'a str),
}

impl StopMatcher {
    /// A matcher for `stops`, possibly none.
    pub fn new(stops: Vec<String>) -> Result<StopMatcher, StopError> {
        if stops.len() > MAX_STOPS {
            return Err(StopError::TooMany { count: stops.len() });
        }
        for stop in &stops {
            match stop.len() {
                0 => return Err(StopError::Empty),
                bytes if bytes > MAX_STOP_BYTES => return Err(StopError::TooLong { bytes }),
                _ => {}
            }
        }
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        Ok(StopMatcher { stops, longest, buffer: String::with_capacity(4 * MAX_STOP_BYTES), shown: 0, matched: None })
    }

    /// Adds text and returns what may be shown now. After a `Stop`, everything more is ignored.
    pub fn push(&mut self, text: &str) -> Pushed<'_> {
        if self.matched.is_some() {
            return Pushed::Stop("");
        }
        self.buffer.drain(..self.shown);
        let before = self.buffer.len();
        self.buffer.push_str(text);
        for end in before + 1..=self.buffer.len() {
            let ended = |stop: &String| self.buffer.as_bytes()[..end].ends_with(stop.as_bytes());
            let longest = (0..self.stops.len()).filter(|i| ended(&self.stops[*i])).max_by_key(|i| self.stops[*i].len());
            if let Some(index) = longest {
                self.matched = Some(index);
                self.shown = end - self.stops[index].len();
                return Pushed::Stop(&self.buffer[..self.shown]);
            }
        }
        self.shown = self.buffer.len() - self.held_bytes();
        Pushed::Show(&self.buffer[..self.shown])
    }

    /// Ends the text without a stop string: what was held back is released.
    pub fn finish(&mut self) -> &str {
        let held =
            if self.matched.is_some() { self.buffer.len()..self.buffer.len() } else { self.shown..self.buffer.len() };
        self.shown = self.buffer.len();
        &self.buffer[held]
    }

    /// The stop string that ended the answer.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.stops[index].as_str())
    }

    /// Length of the longest end of the buffer that a stop string begins with.
    fn held_bytes(&self) -> usize {
        let buffer = self.buffer.as_bytes();
        let limit = buffer.len().min(self.longest.saturating_sub(1));
        let begins = |length: usize| {
            let end = &buffer[buffer.len() - length..];
            self.stops.iter().any(|stop| stop.len() > length && stop.as_bytes().starts_with(end))
        };
        (1..=limit).rev().find(|length| begins(*length)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect()).unwrap();
        let mut shown = Vec::new();
        for piece in pieces {
            match matcher.push(piece) {
                Pushed::Show(text) => shown.push(text.to_owned()),
                Pushed::Stop(text) => {
                    shown.push(text.to_owned());
                    break;
                }
            }
        }
        shown.push(matcher.finish().to_owned());
        (shown, matcher.matched().map(str::to_owned))
    }

    #[test]
    fn a_stop_over_a_token_boundary_is_cut_exactly_before_it() {
        let (shown, matched) = run(&["\n\nHuman:"], &["Well.", "\n", "\nHu", "man: and", " more"]);
        assert_eq!(shown, ["Well.", "", "", "", ""]);
        assert_eq!(matched.as_deref(), Some("\n\nHuman:"));
    }

    #[test]
    fn a_stop_that_begins_and_fails_is_released() {
        let (shown, matched) = run(&["END"], &["the E", "N", "chanted"]);
        assert_eq!(shown, ["the ", "", "ENchanted", ""]);
        assert_eq!(matched, None);
    }

    #[test]
    fn a_failed_beginning_may_contain_the_true_one() {
        let (shown, matched) = run(&["aab"], &["xa", "a", "a", "b!"]);
        assert_eq!(shown.concat(), "xa");
        assert_eq!(matched.as_deref(), Some("aab"));
    }

    #[test]
    fn held_text_comes_at_the_end() {
        let (shown, matched) = run(&["STOP"], &["x ST"]);
        assert_eq!(shown, ["x ", "ST"]);
        assert_eq!(matched, None);
    }

    #[test]
    fn a_stop_of_wide_characters_never_cuts_one() {
        let (shown, _) = run(&["好🦊"], &["你好", "好", "🦊。"]);
        assert_eq!(shown, ["你", "好", "", ""]);
    }

    #[test]
    fn impossible_stops_are_refused() {
        assert_eq!(StopMatcher::new(vec!["a".into(), String::new()]).unwrap_err(), StopError::Empty);
        let long = "x".repeat(1025);
        assert_eq!(StopMatcher::new(vec![long]).unwrap_err(), StopError::TooLong { bytes: 1025 });
        assert_eq!(StopMatcher::new(vec!["x".into(); 65]).unwrap_err(), StopError::TooMany { count: 65 });
    }

    /// The definition: the earliest end of any stop, and before it the longest that ends there.
    fn naive<'a>(text: &'a str, stops: &[String]) -> &'a str {
        for end in 0..=text.len() {
            let longest =
                stops.iter().filter(|s| text.as_bytes()[..end].ends_with(s.as_bytes())).map(String::len).max();
            if let Some(length) = longest {
                return &text[..end - length];
            }
        }
        text
    }

    proptest! {
        #[test]
        fn any_cutting_gives_the_same_answer(
            text in "[abc é]{0,40}",
            stops in proptest::collection::vec("[abc é]{1,4}", 0..4),
            cuts in proptest::collection::vec(0usize..40, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(text.len())).chain([0, text.len()]).collect();
            cuts.retain(|c| text.is_char_boundary(*c));
            cuts.sort_unstable();
            let mut matcher = StopMatcher::new(stops.clone()).unwrap();
            let mut shown = String::new();
            for pair in cuts.windows(2) {
                match matcher.push(&text[pair[0]..pair[1]]) {
                    Pushed::Show(piece) | Pushed::Stop(piece) => shown.push_str(piece),
                }
                // Nothing is shown that a later stop would have had to take back.
                prop_assert!(naive(&text, &stops).starts_with(shown.as_str()));
            }
            shown.push_str(matcher.finish());
            prop_assert_eq!(shown, naive(&text, &stops));
        }
    }
}
