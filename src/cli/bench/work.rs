//! What a benchmark does: which tests, and how lists of numbers are typed. Pure.

use crate::engine::stats::{Fetched, Stats};
use crate::limits::{BENCH_TESTS_MAX, MAX_CONTEXT};

/// One thing that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Test {
    /// Positions that are in the context before the clock starts.
    pub depth: usize,
    /// Tokens read as a prompt is.
    pub prompt: usize,
    /// Tokens that follow one by one.
    pub answer: usize,
    /// Whether prompt and answer have a rate each, or one together.
    pub apart: bool,
}

impl Test {
    /// Positions it needs.
    pub fn context(&self) -> usize {
        self.depth + self.prompt + self.answer
    }

    /// The rates it gives.
    pub fn rates(&self) -> Vec<Rate> {
        let Test { depth, prompt, answer, apart } = *self;
        match (prompt, answer) {
            (_, 0) => vec![Rate { name: format!("pp{prompt}"), depth, tokens: prompt, of: Part::Prompt }],
            (0, _) => vec![Rate { name: format!("tg{answer}"), depth, tokens: answer, of: Part::Answer }],
            _ if apart => {
                let prompt_only = Test { answer: 0, ..*self };
                let answer_only = Test { prompt: 0, depth: depth + prompt, ..*self };
                [prompt_only.rates(), answer_only.rates()].concat()
            }
            _ => {
                let name = format!("pp{prompt}+tg{answer}");
                vec![Rate { name, depth, tokens: prompt + answer, of: Part::Both }]
            }
        }
    }
}

/// A rate that a test gives, as it is called in this field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rate {
    /// `pp512`, `tg128` or `pp512+tg128`; the depth is told apart.
    pub name: String,
    /// Positions before it.
    pub depth: usize,
    /// Tokens it is a rate of.
    pub tokens: usize,
    /// Whose time counts.
    pub of: Part,
}

/// Part of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reading the prompt.
    Prompt,
    /// One token after the other.
    Answer,
    /// All of it.
    Both,
}

impl Part {
    /// What it fetched.
    pub fn fetched(self, stats: &Stats) -> Fetched {
        match self {
            Part::Prompt => stats.prefill,
            Part::Answer => stats.decode(),
            Part::Both => stats.whole(),
        }
    }
}

impl Rate {
    /// The name with the depth, where there is one: `pp512@d1024`; `at` goes between.
    pub fn named(&self, at: &str) -> String {
        match self.depth {
            0 => self.name.clone(),
            depth => format!("{}{at}d{depth}", self.name),
        }
    }
}

/// Every test of prompts, answers and pairs of them at every depth; a length of 0 is none.
pub fn tests(prompts: &[usize], answers: &[usize], pairs: &[(usize, usize)], depths: &[usize]) -> Vec<Test> {
    let mut tests = Vec::new();
    for &depth in depths {
        let test = |prompt, answer| Test { depth, prompt, answer, apart: false };
        tests.extend(prompts.iter().map(|&prompt| test(prompt, 0)));
        tests.extend(answers.iter().map(|&answer| test(0, answer)));
        tests.extend(pairs.iter().map(|&(prompt, answer)| test(prompt, answer)));
    }
    tests.retain(|test| test.prompt + test.answer > 0);
    tests
}

/// Numbers as they are typed: one, or a range `first-last`, `first-last+step` or `first-last*factor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub Vec<usize>);

/// Reads one item of a list.
pub fn parse_counts(text: &str) -> Result<Counts, String> {
    let refuse = || format!("'{text}' is neither a number of tokens nor a range such as 0-4096+1024 or 128-2048*2");
    let number = |text: &str| match text.parse::<usize>() {
        Ok(n) if n <= MAX_CONTEXT => Ok(n),
        Ok(n) => Err(format!("{n} tokens are more than the longest context, {MAX_CONTEXT}")),
        Err(_) => Err(refuse()),
    };
    let Some((first, rest)) = text.split_once('-') else { return Ok(Counts(vec![number(text)?])) };
    let (last, next): (&str, Box<dyn Fn(usize) -> usize>) = match (rest.split_once('+'), rest.split_once('*')) {
        (Some((last, step)), None) => {
            let step = number(step)?;
            (last, Box::new(move |n| n + step))
        }
        (None, Some((last, factor))) => {
            let factor = number(factor)?;
            (last, Box::new(move |n| n * factor))
        }
        (None, None) => (rest, Box::new(|n| n + 1)),
        (Some(_), Some(_)) => return Err(refuse()),
    };
    let (first, last) = (number(first)?, number(last)?);
    if next(first) <= first || last < first {
        return Err(format!("the range '{text}' does not go on from {first} to {last}"));
    }
    let values: Vec<usize> = std::iter::successors(Some(first), |&n| Some(next(n)))
        .take_while(|&n| n <= last)
        .take(BENCH_TESTS_MAX + 1)
        .collect();
    if values.len() > BENCH_TESTS_MAX {
        return Err(format!("the range '{text}' has more than {BENCH_TESTS_MAX} values"));
    }
    Ok(Counts(values))
}

/// Reads a pair of lengths: `512,128`.
pub fn parse_pair(text: &str) -> Result<(usize, usize), String> {
    let refuse = || format!("'{text}' is no pair of lengths, such as 512,128");
    let (prompt, answer) = text.split_once(',').ok_or_else(refuse)?;
    match (&parse_counts(prompt)?.0[..], &parse_counts(answer)?.0[..]) {
        (&[prompt], &[answer]) if prompt > 0 && answer > 0 => Ok((prompt, answer)),
        _ => Err(refuse()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str) -> Vec<usize> {
        parse_counts(text).unwrap().0
    }

    #[test]
    fn lengths_are_typed_as_numbers_and_ranges() {
        assert_eq!(counts("512"), [512]);
        assert_eq!(counts("0"), [0]);
        assert_eq!(counts("3-6"), [3, 4, 5, 6]);
        assert_eq!(counts("0-4096+1024"), [0, 1024, 2048, 3072, 4096]);
        assert_eq!(counts("128-1100*2"), [128, 256, 512, 1024]);
        for bad in ["", "x", "-1", "1-", "5-3", "1-9+0", "1-9*1", "0-9*2", "1-9+1*2", "1-1000", "99999999999"] {
            assert!(parse_counts(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_pair("512,128"), Ok((512, 128)));
        for bad in ["512", "512,", "0,1", "1,0", "1-2,3", "1,2,3"] {
            assert!(parse_pair(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_length_is_measured_at_every_depth_and_a_length_of_0_is_none() {
        let names = |tests: Vec<Test>| -> Vec<String> {
            tests.iter().flat_map(Test::rates).map(|rate| rate.named("@")).collect()
        };
        let all = tests(&[512, 1024], &[128], &[(64, 16)], &[0, 2048]);
        let first = ["pp512", "pp1024", "tg128", "pp64+tg16"];
        let deep = first.map(|name| format!("{name}@d2048"));
        assert_eq!(names(all), first.map(str::to_owned).into_iter().chain(deep).collect::<Vec<_>>());
        assert_eq!(names(tests(&[0], &[8], &[], &[0])), ["tg8"]);
    }

    #[test]
    fn a_replay_has_a_rate_of_the_prompt_and_one_of_what_follows_it() {
        let rates = Test { depth: 0, prompt: 100, answer: 30, apart: true }.rates();
        let named: Vec<_> = rates.iter().map(|rate| (rate.named(" @ "), rate.tokens, rate.of)).collect();
        assert_eq!(named, [("pp100".to_owned(), 100, Part::Prompt), ("tg30 @ d100".to_owned(), 30, Part::Answer)]);
    }
}
