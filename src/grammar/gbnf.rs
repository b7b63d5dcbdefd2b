//! Grammars in GBNF, the notation of llama.cpp, put into the one that the parser takes.
//!
//! Every rule that is regular, one that leads to no rule that leads back to itself, becomes a terminal, and so does every
//! regular part of another rule: what a terminal matches is told byte by byte without a parser, and exactly. Between terminals
//! of a rule that is not regular the longest match counts, as in every grammar of terminals: `"a"* "a"` inside such a rule
//! matches nothing, where llama.cpp would find a way.

mod read;

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::limits::GBNF_NESTING_MAX;
use read::read;

/// What is wrong with a grammar, and in which line of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct GbnfError {
    /// From 1 on.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// Whether `text` is written in GBNF: its first rule is.
pub fn is_gbnf(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with('#'));
    // A name may stand in a line of its own.
    let beginning = [lines.next().unwrap_or_default(), lines.next().unwrap_or_default()].join(" ");
    beginning.trim_start_matches(read::is_of_name).trim_start().starts_with("::=")
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    /// This text.
    Text(String),
    /// One of these characters, or one of all others.
    Class { ranges: Vec<(char, char)>, negated: bool },
    /// Any character.
    Any,
    /// What the rule of this number matches.
    Rule(usize),
    /// A token by its name, or by its number in brackets, as it is written.
    Token(String),
    /// All of these, in order.
    Sequence(Vec<Part>),
    /// One of these.
    Choice(Vec<Part>),
    /// So many times, or more where there is no most.
    Repeat { part: Box<Part>, least: u32, most: Option<u32> },
}

/// A grammar: the root is the first rule.
#[derive(Clone, Debug, PartialEq)]
struct Rules(Vec<Part>);

/// The same grammar in Lark.
pub fn to_lark(text: &str) -> Result<String, GbnfError> {
    let rules = read(text)?;
    Ok(Writer::new(&rules).write())
}

/// Whether each rule is regular: no way leads from it back to itself, nor to one of which that is not so, nor to a token.
fn regular(rules: &Rules) -> Vec<bool> {
    let mut regular = vec![true; rules.0.len()];
    // What is reached is regular if all that it reaches is: what stays regular when nothing changes any more includes
    // cycles, which are found first.
    for (number, part) in rules.0.iter().enumerate() {
        regular[number] = !has_token(part) && !reaches(rules, number);
    }
    loop {
        let before = regular.clone();
        for (number, part) in rules.0.iter().enumerate() {
            regular[number] &= is_regular(part, &before);
        }
        if regular == before {
            return regular;
        }
    }
}

/// Whether a way leads from rule `number` back to it.
fn reaches(rules: &Rules, number: usize) -> bool {
    let (mut seen, mut left) = (vec![false; rules.0.len()], vec![number]);
    while let Some(at) = left.pop() {
        let mut found = vec![];
        references(&rules.0[at], &mut found);
        for other in found {
            if other == number {
                return true;
            }
            if !std::mem::replace(&mut seen[other], true) {
                left.push(other);
            }
        }
    }
    false
}

fn references(part: &Part, found: &mut Vec<usize>) {
    match part {
        Part::Rule(number) => found.push(*number),
        Part::Sequence(parts) | Part::Choice(parts) => parts.iter().for_each(|part| references(part, found)),
        Part::Repeat { part, .. } => references(part, found),
        Part::Text(_) | Part::Class { .. } | Part::Any | Part::Token(_) => {}
    }
}

fn has_token(part: &Part) -> bool {
    match part {
        Part::Token(_) => true,
        Part::Sequence(parts) | Part::Choice(parts) => parts.iter().any(has_token),
        Part::Repeat { part, .. } => has_token(part),
        Part::Text(_) | Part::Class { .. } | Part::Any | Part::Rule(_) => false,
    }
}

fn is_regular(part: &Part, regular: &[bool]) -> bool {
    let mut found = vec![];
    references(part, &mut found);
    !has_token(part) && found.iter().all(|&number| regular[number])
}

/// Writes a grammar: rules are `r` and their number, terminals `T` and theirs; parts of rules that became terminals have
/// numbers behind those.
struct Writer<'a> {
    rules: &'a Rules,
    regular: Vec<bool>,
    /// What became a terminal, with its number.
    parts: BTreeMap<String, usize>,
}

impl Writer<'_> {
    fn new(rules: &Rules) -> Writer<'_> {
        Writer { rules, regular: regular(rules), parts: BTreeMap::new() }
    }

    fn write(mut self) -> String {
        let mut lark = format!("start: {}\n", self.reference(0));
        for (number, part) in self.rules.0.iter().enumerate() {
            let (name, body) = match self.regular[number] {
                true => (format!("T{number}"), self.terminal(part)),
                false => (format!("r{number}"), self.rule(part)),
            };
            let _ = writeln!(lark, "{name}: {body}");
        }
        for (body, number) in &self.parts {
            let _ = writeln!(lark, "T{number}: {body}");
        }
        lark
    }

    fn reference(&self, number: usize) -> String {
        let kind = if self.regular[number] { 'T' } else { 'r' };
        format!("{kind}{number}")
    }

    /// A part of a terminal.
    fn terminal(&self, part: &Part) -> String {
        match part {
            Part::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
            Part::Class { ranges, negated } => class(ranges, *negated),
            Part::Any => r"/(.|\n)/".to_owned(),
            Part::Rule(number) => self.reference(*number),
            // None is part of a terminal.
            Part::Token(name) => name.clone(),
            Part::Sequence(parts) => joined(parts.iter().map(|part| self.terminal(part)), " "),
            Part::Choice(parts) => format!("( {} )", joined(parts.iter().map(|part| self.terminal(part)), " | ")),
            Part::Repeat { part, least, most } => repeated(&self.terminal(part), *least, *most),
        }
    }

    /// A part of a rule that is not regular. What of it is regular becomes a terminal.
    fn rule(&mut self, part: &Part) -> String {
        if is_regular(part, &self.regular) {
            return self.as_terminal(part);
        }
        match part {
            Part::Rule(number) => self.reference(*number),
            Part::Token(name) => name.clone(),
            Part::Sequence(parts) => {
                // Neighbours become one terminal together.
                let (mut written, mut at) = (vec![], 0);
                while at < parts.len() {
                    let run = parts[at..].iter().take_while(|part| is_regular(part, &self.regular)).count();
                    written.push(match run {
                        0 => self.rule(&parts[at]),
                        1 => self.as_terminal(&parts[at]),
                        _ => self.as_terminal(&Part::Sequence(parts[at..at + run].to_vec())),
                    });
                    at += run.max(1);
                }
                joined(written.into_iter(), " ")
            }
            Part::Choice(parts) => {
                let written: Vec<String> = parts.iter().map(|part| self.rule(part)).collect();
                format!("( {} )", joined(written.into_iter(), " | "))
            }
            Part::Repeat { part, least, most } => {
                let part = self.rule(part);
                repeated(&part, *least, *most)
            }
            Part::Text(_) | Part::Class { .. } | Part::Any => self.as_terminal(part),
        }
    }

    /// The name of the terminal that `part` is.
    fn as_terminal(&mut self, part: &Part) -> String {
        if let Part::Rule(number) = part {
            return self.reference(*number);
        }
        let (body, next) = (self.terminal(part), self.rules.0.len() + self.parts.len());
        format!("T{}", self.parts.entry(body).or_insert(next))
    }
}

fn joined(parts: impl Iterator<Item = String>, between: &str) -> String {
    let parts: Vec<String> = parts.map(|part| if part.is_empty() { "\"\"".to_owned() } else { part }).collect();
    if parts.is_empty() { "\"\"".to_owned() } else { parts.join(between) }
}

fn repeated(part: &str, least: u32, most: Option<u32>) -> String {
    let times = match (least, most) {
        (_, Some(0)) => return "\"\"".to_owned(),
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    };
    format!("( {part} ){times}")
}

/// A class as a regular expression of numbers, in which nothing has to be escaped.
fn class(ranges: &[(char, char)], negated: bool) -> String {
    let mut regex = format!("/[{}", if negated { "^" } else { "" });
    for &(first, last) in ranges {
        let _ = write!(regex, "\\u{{{:X}}}-\\u{{{:X}}}", u32::from(first), u32::from(last));
    }
    regex + "]/"
}

#[cfg(test)]
mod tests;
