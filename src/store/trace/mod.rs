//! Which experts the router chose, step by step and layer by layer: what a cache policy is judged by.
//!
//! A trace is made while a model runs and replayed without it. [`mod@format`] is its form in a file, [`synth`] makes traces of
//! models that are not there, [`simulate`] replays them, and [`report`] says what is in them.

pub mod format;
mod replay;
pub mod report;
pub mod simulate;
pub mod synth;

use crate::limits::{LOOKAHEAD_LAYERS_MAX, MAX_EXPERTS, MAX_LAYERS, MAX_ROWS, MAX_TOP_K};
pub use format::{Decoded, TraceError};

/// What a trace is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Of the model, as its checkpoint gives it; 0 for a model that does not exist.
    pub fingerprint: u64,
    /// Model layers that route, ascending, at least one.
    pub layers: Vec<u16>,
    /// Experts of each of them.
    pub experts: u16,
    /// Experts a row chooses.
    pub top_k: u16,
    /// Bytes of an expert.
    pub expert_bytes: u32,
}

impl Header {
    /// Whether the numbers are those of a model that can be.
    pub fn is_sound(&self) -> bool {
        let ascending = self.layers.windows(2).all(|pair| pair[0] < pair[1]);
        ascending
            && (1..=MAX_LAYERS).contains(&self.layers.len())
            && (1..=MAX_EXPERTS).contains(&usize::from(self.experts))
            && (1..=MAX_TOP_K.min(self.experts.into())).contains(&usize::from(self.top_k))
    }

    /// Experts of all layers.
    pub fn keys(&self) -> usize {
        self.layers.len() * usize::from(self.experts)
    }
}

/// Where the choices of a step lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    rows: u16,
    begins: bool,
    /// First of its `rows * top_k * layers` ids.
    ids_at: usize,
    /// First of its layers in `guesses`.
    guesses_at: usize,
}

/// The guess made for one layer of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Guess {
    at: usize,
    /// Experts guessed for each row; 0 where no guess was made.
    per_row: u16,
}

/// The choices of a run, in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    header: Header,
    steps: Vec<Step>,
    ids: Vec<u16>,
    guesses: Vec<[Guess; LOOKAHEAD_LAYERS_MAX]>,
    guessed: Vec<u16>,
}

/// One layer of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice<'a> {
    /// `[rows, top_k]`, each row ascending.
    pub ids: &'a [u16],
    /// `[rows, guessed]`: what was guessed one layer before, two layers before, and so on; empty where nothing was.
    pub guesses: [&'a [u16]; LOOKAHEAD_LAYERS_MAX],
}

impl Trace {
    /// An empty trace. Panics when the header is not sound.
    pub fn new(header: Header) -> Trace {
        assert!(header.is_sound(), "{header:?} describes no model");
        Trace { header, steps: vec![], ids: vec![], guesses: vec![], guessed: vec![] }
    }

    /// What it is of.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Steps of the model; a prompt's chunk is one.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Tokens in all steps.
    pub fn tokens(&self) -> u64 {
        self.steps.iter().map(|step| u64::from(step.rows)).sum()
    }

    /// Tokens of a step.
    pub fn rows(&self, step: usize) -> usize {
        self.steps[step].rows.into()
    }

    /// Whether a step is the first of a sequence.
    pub fn begins(&self, step: usize) -> bool {
        self.steps[step].begins
    }

    /// What layer number `layer` of those in the header chose in `step`.
    pub fn choice(&self, step: usize, layer: usize) -> Choice<'_> {
        let Step { rows, ids_at, guesses_at, .. } = self.steps[step];
        let count = usize::from(rows) * usize::from(self.header.top_k);
        let guessed = |guess: Guess| &self.guessed[guess.at..][..usize::from(rows) * usize::from(guess.per_row)];
        Choice {
            ids: &self.ids[ids_at + layer * count..][..count],
            guesses: self.guesses[guesses_at + layer].map(guessed),
        }
    }

    /// Adds a step, a choice for each layer. `begins` marks the first step of a sequence. Panics when a choice is not of
    /// the header's shape.
    pub fn push<'a>(&mut self, rows: usize, begins: bool, choices: impl IntoIterator<Item = Choice<'a>>) {
        assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows");
        let step = Step { rows: rows as u16, begins, ids_at: self.ids.len(), guesses_at: self.guesses.len() };
        let are_experts = |header: &Header, ids: &[u16]| ids.iter().all(|&id| id < header.experts);
        for Choice { ids, guesses } in choices {
            assert!(ids.len() == rows * usize::from(self.header.top_k) && are_experts(&self.header, ids));
            self.ids.extend_from_slice(ids);
            let kept = guesses.map(|guess| {
                let (at, per_row) = (self.guessed.len(), guess.len() / rows);
                assert!(guess.len() == rows * per_row && per_row <= usize::from(self.header.experts));
                assert!(are_experts(&self.header, guess));
                self.guessed.extend_from_slice(guess);
                Guess { at, per_row: per_row as u16 }
            });
            self.guesses.push(kept);
        }
        assert_eq!(self.guesses.len() - step.guesses_at, self.header.layers.len());
        self.steps.push(step);
    }

    /// Some of the steps.
    pub fn part(&self, steps: std::ops::Range<usize>) -> Trace {
        let mut part = Trace::new(self.header.clone());
        for step in steps {
            let choices = (0..self.header.layers.len()).map(|layer| self.choice(step, layer));
            part.push(self.rows(step), self.begins(step), choices);
        }
        part
    }
}

/// Makes a trace of what the router is seen to choose, layer by layer, and of what was guessed of it. A step that did not
/// come to its last layer is not part of it.
pub struct Recorder {
    trace: Trace,
    /// Rows of the step that is being seen; later chunks of a prompt may be cut into single rows.
    split_rows: bool,
    begins: bool,
    layers_seen: usize,
    ids: Vec<u16>,
    /// Of each layer: the last guesses of what it will choose.
    guesses: Vec<[Vec<u16>; LOOKAHEAD_LAYERS_MAX]>,
}

impl Recorder {
    /// Records a model described by `header`.
    pub fn new(header: Header) -> Recorder {
        let guesses = header.layers.iter().map(|_| Default::default()).collect();
        Recorder { trace: Trace::new(header), split_rows: false, begins: true, layers_seen: 0, ids: vec![], guesses }
    }

    /// What follows is a new sequence. With `split_rows` its rows become steps of their own, as if each had been
    /// decoded: the bits of a batch are those of one row at a time, so that the choices are, too.
    pub fn begin(&mut self, split_rows: bool) {
        (self.split_rows, self.begins) = (split_rows, true);
        self.layers_seen = 0;
        self.ids.clear();
        self.forget_guesses();
    }

    /// The router of model layer `layer` chose `ids` (`[rows, top_k]`).
    pub fn saw(&mut self, layer: usize, ids: &[u16]) {
        let Some(place) = self.place(layer) else { return };
        if place == 0 {
            self.ids.clear();
            self.layers_seen = 0;
        }
        if place != self.layers_seen {
            return;
        }
        self.ids.extend_from_slice(ids);
        self.layers_seen += 1;
        if self.layers_seen == self.guesses.len() {
            self.take_step();
        }
    }

    /// `ahead` layers before it, from 1 on, model layer `layer` is thought to choose `ids` (`[rows, guessed]`).
    pub fn foresaw(&mut self, layer: usize, ahead: usize, ids: &[u16]) {
        let Some(place) = self.place(layer) else { return };
        if let Some(guess) = self.guesses[place].get_mut(ahead - 1) {
            guess.clear();
            guess.extend_from_slice(ids);
        }
    }

    fn place(&self, layer: usize) -> Option<usize> {
        self.trace.header.layers.iter().position(|&known| usize::from(known) == layer)
    }

    fn forget_guesses(&mut self) {
        self.guesses.iter_mut().flatten().for_each(Vec::clear);
    }

    /// The trace so far.
    pub fn finish(self) -> Trace {
        self.trace
    }

    fn take_step(&mut self) {
        let (layers, top_k) = (self.trace.header.layers.len(), usize::from(self.trace.header.top_k));
        let ids = std::mem::take(&mut self.ids);
        let per_layer = ids.len() / layers;
        let rows = per_layer / top_k;
        let (steps, rows_each) = if self.split_rows { (rows, 1) } else { (1, rows) };
        for step in 0..steps {
            let first = step * rows_each;
            let of_step = |all: &'_ Vec<u16>| {
                let per_row = all.len() / rows;
                first * per_row..(first + rows_each) * per_row
            };
            let choices = ids.chunks_exact(per_layer).zip(&self.guesses).map(|(ids, guesses)| Choice {
                ids: &ids[first * top_k..][..rows_each * top_k],
                guesses: std::array::from_fn(|ahead| &guesses[ahead][of_step(&guesses[ahead])]),
            });
            self.trace.push(rows_each, self.begins, choices);
            self.begins = false;
        }
        self.ids = ids;
        self.ids.clear();
        self.forget_guesses();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header { fingerprint: 7, layers: vec![3, 4], experts: 8, top_k: 2, expert_bytes: 100 }
    }

    #[test]
    fn whole_steps_are_recorded_and_a_broken_one_is_not() {
        let mut recorder = Recorder::new(header());
        recorder.begin(false);
        recorder.saw(3, &[0, 1, 2, 3]);
        recorder.saw(4, &[4, 5, 6, 7]);
        recorder.saw(3, &[1, 2]);
        recorder.saw(3, &[5, 6]);
        recorder.saw(4, &[0, 7]);
        recorder.saw(5, &[0, 7]);
        recorder.saw(3, &[1, 2]);
        let trace = recorder.finish();
        assert_eq!((trace.steps(), trace.tokens()), (2, 3));
        assert_eq!(trace.choice(0, 1).ids, [4, 5, 6, 7]);
        assert_eq!((trace.choice(1, 0).ids, trace.choice(1, 1).ids), (&[5, 6][..], &[0, 7][..]));
        assert_eq!((trace.begins(0), trace.begins(1)), (true, false));
    }

    #[test]
    fn rows_of_a_text_become_steps() {
        let mut recorder = Recorder::new(header());
        recorder.begin(true);
        recorder.foresaw(3, 1, &[1, 2, 3, 4]);
        recorder.saw(3, &[0, 1, 2, 3]);
        recorder.foresaw(4, 1, &[4, 5, 5, 6]);
        recorder.foresaw(5, 2, &[0, 0, 0, 0]);
        recorder.saw(4, &[4, 5, 6, 7]);
        let trace = recorder.finish();
        assert_eq!((trace.steps(), trace.rows(1)), (2, 1));
        assert_eq!((trace.choice(1, 0).ids, trace.choice(1, 1).ids), (&[2, 3][..], &[6, 7][..]));
        assert_eq!((trace.choice(0, 0).guesses[0], trace.choice(1, 0).guesses[0]), (&[1, 2][..], &[3, 4][..]));
        assert_eq!(trace.choice(1, 1).guesses, [&[5, 6][..], &[]]);
        assert_eq!((trace.begins(0), trace.begins(1)), (true, false));
        let part = trace.part(1..2);
        assert_eq!((part.steps(), part.choice(0, 1), part.begins(0)), (1, trace.choice(1, 1), false));
    }

    #[test]
    fn a_guess_belongs_to_its_step_alone() {
        let mut recorder = Recorder::new(header());
        recorder.begin(false);
        // A step that was broken off, and one without guesses.
        recorder.foresaw(4, 2, &[1, 2]);
        recorder.saw(3, &[0, 1]);
        recorder.begin(false);
        for step in 0..2 {
            recorder.saw(3, &[0, 1]);
            if step == 0 {
                recorder.foresaw(4, 1, &[2, 3]);
                recorder.foresaw(4, 1, &[4, 5]);
            }
            recorder.saw(4, &[4, 5]);
        }
        let trace = recorder.finish();
        assert_eq!(trace.steps(), 2);
        assert_eq!(trace.choice(0, 1).guesses, [&[4, 5][..], &[]], "the last one counts");
        assert!(trace.choice(1, 1).guesses.iter().all(|guess| guess.is_empty()));
    }

    #[test]
    fn a_header_that_no_model_has_is_unsound() {
        assert!(header().is_sound());
        assert!(!Header { layers: vec![], ..header() }.is_sound());
        assert!(!Header { layers: vec![4, 4], ..header() }.is_sound());
        assert!(!Header { top_k: 9, ..header() }.is_sound());
        assert!(!Header { experts: 0, ..header() }.is_sound());
    }
}
