//! GBNF as it is read.
//!
//! `name ::= alternatives` a rule, `"text"` with escapes, `[a-z]` and `[^a-z]`, `.`, `( )`, `|`, `* + ? {m} {m,} {m,n}`,
//! `<token>` and `<[id]>`, `# comment`. A rule ends with its line, unless that ends inside parentheses, or behind `|` or
//! `::=`, or the next begins with `|`.

use std::collections::HashMap;

use super::{GBNF_NESTING_MAX, GbnfError, Part, Rules};
use crate::limits::{GBNF_REPEATS_MAX, GBNF_RULES_MAX};

/// Reads the rules of `text`; the one called root is the first.
pub(super) fn read(text: &str) -> Result<Rules, GbnfError> {
    let mut reader = Reader { text, at: 0, numbers: HashMap::new(), rules: vec![], used: vec![] };
    reader.number("root")?;
    reader.skip(true);
    while reader.at < text.len() {
        reader.rule()?;
        reader.skip(true);
    }
    reader.finish()
}

/// Whether `c` is part of the name of a rule.
pub(super) fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    numbers: HashMap<&'a str, usize>,
    rules: Vec<Option<Part>>,
    /// Of each rule, its name and where it was first used.
    used: Vec<(&'a str, usize)>,
}

impl<'a> Reader<'a> {
    fn finish(self) -> Result<Rules, GbnfError> {
        for (rule, &(name, at)) in self.rules.iter().zip(&self.used) {
            if rule.is_none() {
                let what = match name {
                    "root" => "there is no rule called root, with which an answer begins".to_owned(),
                    _ => format!("there is no rule called {name}"),
                };
                return Err(self.error_at(at, what));
            }
        }
        Ok(Rules(self.rules.into_iter().flatten().collect()))
    }

    fn error<T>(&self, what: impl Into<String>) -> Result<T, GbnfError> {
        Err(self.error_at(self.at, what.into()))
    }

    fn error_at(&self, at: usize, what: String) -> GbnfError {
        GbnfError { line: 1 + self.text[..at].matches('\n').count(), what }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Passes `token` if it comes next.
    fn takes(&mut self, token: &str) -> bool {
        let comes = self.rest().starts_with(token);
        self.at += if comes { token.len() } else { 0 };
        comes
    }

    /// Passes blanks and comments, and ends of lines if `lines`.
    fn skip(&mut self, lines: bool) {
        loop {
            let is_blank = |c: char| c == ' ' || c == '\t' || c == '\r' || (lines && c == '\n');
            self.at += self.rest().len() - self.rest().trim_start_matches(is_blank).len();
            if !self.rest().starts_with('#') {
                return;
            }
            self.at += self.rest().find('\n').unwrap_or(self.rest().len());
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let name = &rest[..rest.find(|c| !is_of_name(c)).unwrap_or(rest.len())];
        self.at += name.len();
        (!name.is_empty()).then_some(name)
    }

    /// The number of the rule called `name`.
    fn number(&mut self, name: &'a str) -> Result<usize, GbnfError> {
        if let Some(&number) = self.numbers.get(name) {
            return Ok(number);
        }
        if self.rules.len() == GBNF_RULES_MAX {
            return self.error(format!("there are more than {GBNF_RULES_MAX} rules"));
        }
        self.numbers.insert(name, self.rules.len());
        self.rules.push(None);
        self.used.push((name, self.at));
        Ok(self.rules.len() - 1)
    }

    fn rule(&mut self) -> Result<(), GbnfError> {
        let Some(name) = self.name() else { return self.error("a rule begins with its name") };
        let number = self.number(name)?;
        self.skip(true);
        if !self.takes("::=") {
            return self.error(format!("behind the name of the rule {name} comes ::="));
        }
        if self.rules[number].is_some() {
            return self.error(format!("the rule {name} is there twice"));
        }
        self.skip(true);
        self.rules[number] = Some(self.choice(0)?);
        self.skip(false);
        match self.rest().chars().next() {
            None | Some('\n') => Ok(()),
            Some(c) => self.error(format!("{c:?} begins nothing that may stand in a rule")),
        }
    }

    /// Alternatives, `depth` parentheses deep.
    fn choice(&mut self, depth: usize) -> Result<Part, GbnfError> {
        if depth > GBNF_NESTING_MAX {
            return self.error(format!("there are more than {GBNF_NESTING_MAX} parentheses in each other"));
        }
        let mut parts = vec![self.sequence(depth)?];
        loop {
            let before = self.at;
            self.skip(true);
            if !self.takes("|") {
                self.at = before;
                break;
            }
            self.skip(true);
            parts.push(self.sequence(depth)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Part::Choice(parts) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Part, GbnfError> {
        let mut parts = vec![];
        loop {
            self.skip(depth > 0);
            let Some(part) = self.item(depth)? else { break };
            parts.push(self.repeats(part)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Part::Sequence(parts) })
    }

    /// What comes next, if it is part of a sequence.
    fn item(&mut self, depth: usize) -> Result<Option<Part>, GbnfError> {
        let Some(first) = self.rest().chars().next() else { return Ok(None) };
        let part = match first {
            '"' => self.quoted()?,
            '[' => self.class()?,
            '.' => {
                self.at += 1;
                Part::Any
            }
            '(' => {
                self.at += 1;
                let inner = self.choice(depth + 1)?;
                self.skip(true);
                if !self.takes(")") {
                    return self.error("a parenthesis is not closed");
                }
                inner
            }
            '<' => self.token()?,
            '!' => return self.error("`!<token>`, any token but one, is not supported"),
            c if is_of_name(c) => {
                let name = self.name().unwrap_or_default();
                Part::Rule(self.number(name)?)
            }
            _ => return Ok(None),
        };
        Ok(Some(part))
    }

    fn token(&mut self) -> Result<Part, GbnfError> {
        let rest = self.rest();
        let Some(end) = rest.find('>').filter(|&end| end > 1 && !rest[..end].contains(char::is_whitespace)) else {
            return self.error("a token is <name>, or <[id]>");
        };
        self.at += end + 1;
        Ok(Part::Token(rest[..=end].to_owned()))
    }

    fn quoted(&mut self) -> Result<Part, GbnfError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.rest().chars().next() {
                None | Some('\n') => return self.error("a text is not closed"),
                Some('"') => break,
                Some(_) => text.push(self.character()?),
            }
        }
        self.at += 1;
        Ok(Part::Text(text))
    }

    fn class(&mut self) -> Result<Part, GbnfError> {
        self.at += 1;
        let negated = self.takes("^");
        let mut ranges = vec![];
        loop {
            match self.rest().chars().next() {
                None | Some('\n') => return self.error("a class is not closed"),
                Some(']') => break,
                Some(_) => {}
            }
            let first = self.character()?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.character()?
            } else {
                first
            };
            if last < first {
                return self.error(format!("the class has {first:?} to {last:?}, which is backwards"));
            }
            ranges.push((first, last));
        }
        self.at += 1;
        match (ranges.is_empty(), negated) {
            (true, true) => Ok(Part::Any),
            (true, false) => self.error("a class without characters matches nothing"),
            (false, _) => Ok(Part::Class { ranges, negated }),
        }
    }

    /// A character of a text or a class, which may be escaped.
    fn character(&mut self) -> Result<char, GbnfError> {
        let mut chars = self.rest().chars();
        let Some(first) = chars.next() else { return self.error("the grammar ends in the middle of a rule") };
        self.at += first.len_utf8();
        if first != '\\' {
            return Ok(first);
        }
        let Some(escape) = chars.next() else { return self.error("the grammar ends with a \\") };
        self.at += escape.len_utf8();
        let digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' | '\'' => return Ok(escape),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => {
                return self
                    .error(format!("\\{other} is no escape; there are \\n \\r \\t \\\\ \\\" \\[ \\] \\xHH \\uHHHH"));
            }
        };
        let hex = self.rest().get(..digits).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(hex) = hex else { return self.error(format!("behind \\{escape} come {digits} hex digits")) };
        self.at += digits;
        match u32::from_str_radix(hex, 16).ok().and_then(char::from_u32) {
            Some(c) => Ok(c),
            None => self.error(format!("\\{escape}{hex} is no character")),
        }
    }

    /// `part` as often as is said behind it.
    fn repeats(&mut self, mut part: Part) -> Result<Part, GbnfError> {
        // Each lies in the next, as parentheses do.
        for _ in 0..=GBNF_NESTING_MAX {
            self.skip(false);
            let (least, most) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.braces()?,
                _ => return Ok(part),
            };
            self.at += 1;
            part = Part::Repeat { part: Box::new(part), least, most };
        }
        self.error(format!("there are more than {GBNF_NESTING_MAX} repetitions of each other"))
    }

    /// `{m}`, `{m,}` or `{m,n}`, up to its last character.
    fn braces(&mut self) -> Result<(u32, Option<u32>), GbnfError> {
        let rest = self.rest();
        let Some(end) = rest.find('}') else { return self.error("a brace is not closed") };
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&times| times <= GBNF_REPEATS_MAX);
        let times = match rest[1..end].split_once(',') {
            None => number(&rest[1..end]).map(|times| (times, Some(times))),
            Some((least, "")) => number(least).map(|least| (least, None)),
            Some((least, most)) => number(least).zip(number(most)).map(|(least, most)| (least, Some(most))),
        };
        match times.filter(|&(least, most)| most.is_none_or(|most| least <= most)) {
            Some(times) => {
                self.at += end;
                Ok(times)
            }
            None => self.error(format!("{} is not {{m}}, {{m,}} or {{m,n}} up to {GBNF_REPEATS_MAX}", &rest[..=end])),
        }
    }
}
