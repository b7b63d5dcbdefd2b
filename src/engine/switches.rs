//! What of an engine may be turned between two generations, and what is turned while running where that is left to it.
//!
//! Nothing here changes a bit of an answer: it decides when experts are read.

use super::auto::Chooser;
use super::{Engine, EngineError};
use crate::forward::stages::StageGraph;
use crate::forward::{GuessRule, Streamed};
use crate::limits::LOOKAHEAD_LAYERS_MAX;

/// Something that is on, off, or decided by the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// As the engine finds best.
    #[default]
    Auto,
    /// On.
    On,
    /// Off.
    Off,
}

impl Switch {
    /// On or off where that was asked for.
    pub(super) fn asked(self) -> Option<bool> {
        match self {
            Switch::Auto => None,
            Switch::On => Some(true),
            Switch::Off => Some(false),
        }
    }
}

/// When experts are read. The default leaves it to measuring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Whether arithmetic goes on while experts are read. Off reads everything that a layer needs, then computes.
    pub pipeline: Switch,
    /// Whether experts that the next layer will probably ask for are read ahead.
    pub prefetch: Switch,
    /// How it is guessed which those are.
    pub guess: GuessRule,
}

impl Switches {
    /// How guesses are made, where any are read ahead.
    pub fn guesses(&self) -> Option<GuessRule> {
        (self.prefetch != Switch::Off).then_some(self.guess)
    }

    /// Refuses a rule that no engine follows.
    pub(super) fn check(&self) -> Result<(), EngineError> {
        let (name, value, most) = ("layers to guess ahead", self.guess.layers, LOOKAHEAD_LAYERS_MAX);
        match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(EngineError::Size { name, value, least: 1, most }),
        }
    }
}

/// The switches as they were asked for, and what was learned about each.
pub(super) struct Turning {
    asked: Switches,
    pipeline: Chooser,
    prefetch: Chooser,
}

impl Turning {
    /// As they were asked for; nothing is known.
    pub(super) fn new(asked: Switches) -> Turning {
        Turning { asked, pipeline: Chooser::new(true), prefetch: Chooser::new(true) }
    }

    /// Sets what was asked for, and as far as nothing was, what was found best so far.
    pub(super) fn begin(&mut self, experts: &mut Streamed) {
        self.pipeline.begin();
        self.prefetch.begin();
        self.hold(experts);
    }

    /// Sets what is decided by measuring for the next step, which turns at most one of the two.
    pub(super) fn turn(&mut self, experts: &mut Streamed) {
        let Turning { asked, pipeline, prefetch } = self;
        let [auto_pipeline, auto_prefetch] = [asked.pipeline, asked.prefetch].map(|asked| asked == Switch::Auto);
        if auto_pipeline {
            experts.pipeline = pipeline.next(!(auto_prefetch && prefetch.is_probing()));
        }
        if auto_prefetch {
            experts.prefetch = prefetch.next(!(auto_pipeline && pipeline.is_compared()));
        }
    }

    /// As found best so far, for a step that nothing is learned from.
    pub(super) fn hold(&self, experts: &mut Streamed) {
        experts.pipeline = self.asked.pipeline.asked().unwrap_or(self.pipeline.position());
        experts.prefetch = self.asked.prefetch.asked().unwrap_or(self.prefetch.position());
    }

    /// Takes the time of the step that [`Turning::turn`] was called before.
    pub(super) fn judge(&mut self, experts: &Streamed, seconds: f64) {
        if self.asked.pipeline == Switch::Auto {
            self.pipeline.observe(experts.pipeline, seconds);
        }
        if self.asked.prefetch == Switch::Auto {
            self.prefetch.observe(experts.prefetch, seconds);
        }
    }
}

/// Of one row guesses hold as many slots as it asks for in each layer ahead, and again as many that turned out wrong; one row
/// always finds its slots. Many rows ask for nearly all experts of a layer, so that nearly all guesses are right: they hold
/// half of the slots, and the drive has work while the next layer attends.
fn allow_guesses(experts: &mut Streamed, layers: usize, top_k: usize, rows: usize) {
    let few = (1 + layers) * top_k;
    let half = experts.store.slots() / 2;
    experts.store.allow_guesses(if rows > 1 { few.max(half) } else { few }, top_k);
}

impl Engine {
    /// The switches as they were asked for.
    pub fn switches(&self) -> Switches {
        self.turning.asked
    }

    /// Turns the switches for the generations to come. What is cached stays, and so does what was measured about a switch
    /// while it was left to measuring: it goes on from there when it is left to it again.
    ///
    /// # Errors
    /// [`EngineError::Size`] where guesses are asked for further ahead than any engine makes them; nothing is turned then.
    pub fn set_switches(&mut self, switches: Switches) -> Result<(), EngineError> {
        switches.check()?;
        self.turning.asked = switches;
        self.apply_switches();
        Ok(())
    }

    /// Makes the engine as its switches say.
    pub(super) fn apply_switches(&mut self) {
        let Engine { model, experts, turning, .. } = self;
        let (rule, top_k) = (turning.asked.guess, model.arch.moe.top_k);
        // What names the stages is made from the model, so that a graph that cannot run is our fault.
        if let Err(fault) = StageGraph::new(&model.arch, turning.asked.guesses()).check() {
            panic!("the stages of a step: {fault}");
        }
        model.guess_from = rule.from;
        experts.ahead = rule.layers;
        allow_guesses(experts, rule.layers, top_k, 1);
        turning.begin(experts);
    }

    /// Makes room for the guesses that steps of `rows` rows make.
    pub(super) fn allow_guesses_of(&mut self, rows: usize) {
        let (layers, top_k) = (self.turning.asked.guess.layers, self.model.arch.moe.top_k);
        allow_guesses(&mut self.experts, layers, top_k, rows);
    }
}
