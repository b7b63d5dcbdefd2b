//! What is typed, or piped in: lines, and messages of several.

use std::fs;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Read, StdinLock};
use std::path::{Path, PathBuf};

use rustyline::config::{Behavior, Config};
use rustyline::error::ReadlineError;
use rustyline::history::{FileHistory, History};
use rustyline::{ColorMode, Editor};

use crate::cli::machine::Machine;
use crate::cli::{Failure, interrupt, render};
use crate::limits::{CHAT_HISTORY_MAX, MAX_PROMPT_BYTES, MAX_SMALL_FILE_BYTES};

/// What begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// A message, or a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entered {
    /// One line that begins with a slash.
    Command(String),
    /// Anything else.
    Text(String),
}

/// Where messages come from.
pub enum Input {
    /// A person with a keyboard.
    Terminal(Box<Terminal>),
    /// A file or a pipe: every line is a turn.
    Piped(StdinLock<'static>),
}

impl Input {
    /// Standard input.
    pub fn open(machine: &Machine, quiet: bool) -> Result<Input, Failure> {
        let stdin = io::stdin();
        match stdin.is_terminal() {
            true => Ok(Input::Terminal(Box::new(Terminal::open(machine, quiet)?))),
            false => Ok(Input::Piped(stdin.lock())),
        }
    }

    /// Whether there is a person who sees what goes wrong.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// What is entered next that is not blank; none at the end.
    pub fn next(&mut self) -> Result<Option<Entered>, Failure> {
        let mut lines = Lines::default();
        loop {
            let entered = match self.line(lines.is_open())? {
                Line::Of(line) => lines.push(&line),
                Line::Cleared => {
                    lines = Lines::default();
                    None
                }
                Line::End => return Ok(lines.finish()),
            };
            if let Some(entered) = entered {
                if let Input::Terminal(terminal) = self {
                    terminal.remember(&entered);
                }
                return Ok(Some(entered));
            }
        }
    }

    /// While a line is waited for, a signal ends the program.
    fn line(&mut self, goes_on: bool) -> Result<Line, Failure> {
        interrupt::unwatch();
        match self {
            Input::Terminal(terminal) => terminal.line(if goes_on { "... " } else { "> " }),
            Input::Piped(stdin) => piped_line(stdin),
        }
    }
}

/// What came of waiting for a line.
enum Line {
    Of(String),
    /// Ctrl-C: what was typed is forgotten.
    Cleared,
    End,
}

fn piped_line(stdin: &mut StdinLock) -> Result<Line, Failure> {
    let refused = |cause: String| Failure::usage("cannot read a message from standard input").cause(cause);
    let mut bytes = Vec::new();
    stdin.take(MAX_PROMPT_BYTES + 1).read_until(b'\n', &mut bytes).map_err(|e| refused(e.to_string()))?;
    if bytes.is_empty() {
        return Ok(Line::End);
    }
    if bytes.len() as u64 > MAX_PROMPT_BYTES {
        return Err(refused(format!("it is longer than {MAX_PROMPT_BYTES} bytes")));
    }
    let line = String::from_utf8(bytes).map_err(|e| refused(format!("it is not UTF-8: {e}")))?;
    let line = line.strip_suffix('\n').unwrap_or(&line);
    Ok(Line::Of(line.strip_suffix('\r').unwrap_or(line).to_owned()))
}

/// A line editor that knows earlier messages.
pub struct Terminal {
    editor: Editor<(), FileHistory>,
    /// Where they are kept, as long as that can be.
    history: Option<PathBuf>,
    quiet: bool,
}

impl Terminal {
    fn open(machine: &Machine, quiet: bool) -> Result<Terminal, Failure> {
        let refused = |e: ReadlineError| Failure::work("cannot read from the terminal").cause(e);
        let mut config = Config::builder().max_history_size(CHAT_HISTORY_MAX).map_err(refused)?;
        if !machine.styles(&io::stdout()) {
            config = config.color_mode(ColorMode::Disabled);
        }
        // The answer may go to a file: what is typed is shown all the same.
        if !io::stdout().is_terminal() {
            config = config.behavior(Behavior::PreferTerm);
        }
        let config = config.build();
        let history = FileHistory::with_config(&config);
        let editor = Editor::with_history(config, history).map_err(refused)?;
        let mut terminal = Terminal { editor, history: None, quiet };
        if let Some(dir) = machine.state_dir() {
            terminal.recall(dir.join("chat-history"));
        }
        Ok(terminal)
    }

    /// Reads what was typed in earlier chats, and goes on there.
    fn recall(&mut self, path: PathBuf) {
        let mut read = || match fs::metadata(&path) {
            Ok(there) if !there.is_file() => Err("it is no regular file".to_owned()),
            Ok(there) if there.len() > MAX_SMALL_FILE_BYTES => Err(format!("it has {} bytes", there.len())),
            Ok(_) => self.editor.load_history(&path).map_err(|e| e.to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                path.parent().map_or(Ok(()), fs::create_dir_all).map_err(|e| e.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        match read() {
            Ok(()) => self.history = Some(path),
            Err(why) => {
                // Half of it is worse than none.
                let _ = self.editor.clear_history();
                self.lose(&path, &why);
            }
        }
    }

    fn lose(&mut self, path: &Path, why: &str) {
        let path = path.display();
        render::note(
            self.quiet,
            &format!("what is typed is not kept in {path}: {why} (remove it, if it is in the way)"),
        );
        self.history = None;
    }

    fn line(&mut self, prompt: &str) -> Result<Line, Failure> {
        match self.editor.readline(prompt) {
            Ok(line) => Ok(Line::Of(line)),
            Err(ReadlineError::Interrupted) => Ok(Line::Cleared),
            Err(ReadlineError::Eof) => Ok(Line::End),
            // The terminal is gone, and with it the person.
            Err(ReadlineError::Errno(_)) => Ok(Line::End),
            Err(error) => Err(Failure::work("cannot read from the terminal").cause(error)),
        }
    }

    fn remember(&mut self, entered: &Entered) {
        let (Entered::Command(text) | Entered::Text(text)) = entered;
        let added = self.editor.history_mut().add(text).unwrap_or(false);
        if let Some(path) = self.history.clone().filter(|_| added)
            && let Err(error) = self.editor.append_history(&path)
        {
            self.lose(&path, &error.to_string());
        }
    }
}

/// Lines that become a message. A backslash at its end continues a line on the next; what stands between three quotes at
/// the beginning of a line and three at the end of one is as it is.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    open: Open,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Open {
    #[default]
    Nothing,
    Backslash,
    Quotes,
}

impl Lines {
    fn is_open(&self) -> bool {
        self.open != Open::Nothing
    }

    /// Takes a line. What is whole with it, unless it is blank.
    fn push(&mut self, line: &str) -> Option<Entered> {
        let quoted = line.trim_start().strip_prefix(QUOTES);
        let line = match (self.open, quoted) {
            (Open::Nothing, Some(rest)) => {
                self.open = Open::Quotes;
                rest
            }
            _ => line,
        };
        if self.open == Open::Quotes {
            return match line.trim_end().strip_suffix(QUOTES) {
                Some(rest) => {
                    self.text += rest;
                    self.finish()
                }
                None => {
                    self.text += line;
                    self.text.push('\n');
                    None
                }
            };
        }
        if let Some(rest) = line.strip_suffix('\\') {
            self.text += rest;
            self.text.push('\n');
            self.open = Open::Backslash;
            return None;
        }
        if self.open == Open::Nothing && line.starts_with('/') {
            return Some(Entered::Command(line.trim_end().to_owned()));
        }
        self.text += line;
        self.finish()
    }

    /// What there is, unless it is blank.
    fn finish(&mut self) -> Option<Entered> {
        let Lines { text, .. } = std::mem::take(self);
        let text = text.trim_matches('\n');
        (!text.trim().is_empty()).then(|| Entered::Text(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(lines: &[&str]) -> Vec<Entered> {
        let mut all = Lines::default();
        let mut entered: Vec<Entered> = lines.iter().filter_map(|line| all.push(line)).collect();
        entered.extend(all.finish());
        entered
    }

    fn text(text: &str) -> Entered {
        Entered::Text(text.to_owned())
    }

    #[test]
    fn lines_are_messages_and_blank_ones_none() {
        assert_eq!(entered(&["a", "", "  ", " b "]), [text("a"), text(" b ")]);
    }

    #[test]
    fn a_backslash_goes_on_and_three_quotes_hold_what_they_hold() {
        assert_eq!(entered(&["a\\", "b\\", "c", "d"]), [text("a\nb\nc"), text("d")]);
        assert_eq!(entered(&["\"\"\"a \\", "", "/b", "c\"\"\"", "d"]), [text("a \\\n\n/b\nc"), text("d")]);
        assert_eq!(entered(&["\"\"\"one line\"\"\" "]), [text("one line")]);
        assert_eq!(entered(&["\"\"\"", "a", "\"\"\""]), [text("a")]);
        assert_eq!(entered(&["say \"\"\" twice"]), [text("say \"\"\" twice")]);
        // What was not ended when the input ends is said.
        assert_eq!(entered(&["\"\"\"a", "b"]), [text("a\nb")]);
        assert_eq!(entered(&["a\\"]), [text("a")]);
    }

    #[test]
    fn a_slash_at_the_beginning_is_a_command_and_behind_a_blank_it_is_none() {
        assert_eq!(entered(&["/stats "]), [Entered::Command("/stats".to_owned())]);
        assert_eq!(entered(&[" /etc/passwd", "a\\", "/b"]), [text(" /etc/passwd"), text("a\n/b")]);
    }
}
