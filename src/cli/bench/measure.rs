//! The tests, timed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::measure::median;

use super::work::{Part, Rate, Test};
use crate::cli::cold::Subject;
use crate::cli::config::{ModelChoice, RunConfig};
use crate::cli::job::engine_failure_of;
use crate::cli::render::Waiting;
use crate::cli::{Failure, hanging};
use crate::engine::stats::Stats;
use crate::engine::{Engine, EngineError, Finish, Forced, Observer};

/// How tests are taken.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Times that each is timed.
    pub repetitions: usize,
    /// Whether the model is opened anew before each time.
    pub cold: bool,
    /// Whether each is done once before it is timed, where it is not cold.
    pub warmup: bool,
}

/// A test and what was measured of it.
pub struct Taken {
    /// The test.
    pub test: Test,
    /// One a repetition.
    pub samples: Vec<Sample>,
}

/// One repetition.
pub struct Sample {
    /// Its numbers.
    pub stats: Stats,
    /// Whether memory may have served some of the reads.
    pub cached: bool,
    /// Digest of what routers chose for every token: where it is the same, so were the experts.
    pub routing: u64,
}

impl Sample {
    /// Tokens a second.
    pub fn rate(&self, rate: &Rate) -> f64 {
        let seconds = match rate.of {
            Part::Prompt => self.stats.prefill_s,
            Part::Answer => self.stats.decode_s,
            Part::Both => self.stats.wall_s,
        };
        rate.tokens as f64 / seconds
    }
}

impl Taken {
    /// Rates of all repetitions.
    pub fn rates(&self, rate: &Rate) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.rate(rate)).collect()
    }

    /// Median over the repetitions of what `of` finds in one; none where it finds nothing.
    pub fn median(&self, of: impl Fn(&Stats) -> Option<f64>) -> Option<f64> {
        median(&self.samples.iter().filter_map(|sample| of(&sample.stats)).collect::<Vec<_>>())
    }

    /// Digest of the routing, which is that of every repetition.
    pub fn routing(&self) -> Option<u64> {
        self.samples.first().map(|sample| sample.routing)
    }
}

/// How it went.
pub enum Went {
    /// To its end.
    Whole,
    /// The user stopped it.
    Interrupted,
    /// It failed.
    Failed(Failure),
}

/// What the tests need.
pub struct Measure<'a> {
    /// Settings.
    pub config: &'a RunConfig,
    /// Positions of the longest.
    pub context: usize,
    /// The tokens; as many as that.
    pub tokens: &'a [u32],
    /// How they are taken.
    pub how: How,
    /// Opens the model.
    pub subject: Subject<'a>,
    /// Says what is being done.
    pub waiting: &'a Waiting,
}

impl Measure<'_> {
    /// Takes the tests one after the other into `taken`, which holds what there is however it ends.
    pub fn take(&self, tests: &[Test], taken: &mut Vec<Taken>) -> Went {
        let mut engine = None;
        for &test in tests {
            taken.push(Taken { test, samples: Vec::with_capacity(self.how.repetitions) });
            let Some(last) = taken.last_mut() else { continue };
            match self.repeat(&mut engine, last) {
                Ok(Finish::Interrupted) => {
                    if let Some(engine) = engine {
                        hanging::leave(engine, self.subject.quiet);
                    }
                    return Went::Interrupted;
                }
                Ok(_) => {}
                Err(failure) => return Went::Failed(failure),
            }
        }
        Went::Whole
    }

    fn repeat(&self, engine: &mut Option<Engine>, taken: &mut Taken) -> Result<Finish, Failure> {
        let (test, How { repetitions, cold, warmup }) = (taken.test, self.how);
        let name = test.rates().iter().map(|rate| rate.named("@")).collect::<Vec<_>>().join(" and ");
        if !cold {
            self.waiting.say(format!("{name}, before the first of {repetitions}"));
            let depth = Test { depth: 0, prompt: test.depth, answer: 0, apart: false };
            for before in [(test.depth > 0).then_some(depth), warmup.then_some(test)].into_iter().flatten() {
                if self.once(engine, &before)?.is_none() {
                    return Ok(Finish::Interrupted);
                }
            }
        }
        for repetition in 1..=repetitions {
            self.waiting.say(format!("{name}, {repetition} of {repetitions}"));
            if cold {
                *engine = None;
            }
            let Some(sample) = self.once(engine, &test)? else { return Ok(Finish::Interrupted) };
            if taken.routing().is_some_and(|routing| routing != sample.routing) {
                return Err(other_routing(&name));
            }
            taken.samples.push(sample);
        }
        Ok(Finish::Length)
    }

    /// Does a test; none where the user stopped it.
    fn once(&self, engine: &mut Option<Engine>, test: &Test) -> Result<Option<Sample>, Failure> {
        let engine = match engine {
            Some(engine) => engine,
            None => match self
                .subject
                .open(&self.config.engine(self.context), |error| failure(error, &self.config.model))?
            {
                Some(opened) => engine.insert(opened),
                None => return Ok(None),
            },
        };
        let Test { depth, prompt, answer, .. } = *test;
        let (prompt, answer) = self.tokens[depth..depth + prompt + answer].split_at(prompt);
        let forced = Forced { keep: depth, prompt, answer };
        let mut routing = Routing::new(engine);
        let stop: &Arc<AtomicBool> = &self.subject.stop;
        let work = |engine: &mut Engine| engine.force(&forced, stop, &mut routing);
        let observed = self.subject.observe(engine, self.how.cold, work);
        let (finish, stats, cached) = observed.map_err(|error| failure(error, &self.config.model))?;
        Ok((finish != Finish::Interrupted).then_some(Sample { stats, cached, routing: routing.digest }))
    }
}

/// A failure of the engine. The context follows from the tests; there is no flag for it.
fn failure(error: EngineError, model: &ModelChoice) -> Failure {
    let shorter = match &error {
        EngineError::TooSmall(small) => {
            Some(format!("the smallest --ram that works is {}; shorter tests (-p, -n, -d) need less", small.typed()))
        }
        _ => None,
    };
    let failure = engine_failure_of(error, model);
    match shorter {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The same tokens were routed in another way.
fn other_routing(name: &str) -> Failure {
    Failure::work(format!("{name}: routers chose other experts than the time before, for the same tokens"))
        .cause("the same bits are promised every time")
        .hint("this is a bug, or memory or the drive is damaged: millstream doctor --deep reads the whole model")
}

/// A digest of routing that chunks do not change: the sum over layers and tokens of a hash of what was chosen.
struct Routing {
    top_k: usize,
    /// Tokens that each layer has seen.
    seen: Vec<u64>,
    digest: u64,
}

impl Routing {
    fn new(engine: &Engine) -> Routing {
        // The MTP layer comes after the others.
        Routing { top_k: engine.arch().moe.top_k, seen: vec![0; engine.arch().layers.len() + 1], digest: 0 }
    }
}

impl Observer for Routing {
    fn chose(&mut self, layer: usize, ids: &[u16], _gates: &[f32]) {
        for row in ids.chunks(self.top_k) {
            let place = (layer as u64) << 48 | self.seen[layer];
            self.seen[layer] += 1;
            let hash = row.iter().fold(mixed(place), |hash, &id| mixed(hash ^ u64::from(id)));
            self.digest = self.digest.wrapping_add(hash);
        }
    }
}

/// The finalizer of splitmix64: every bit of `x` changes half of the result's.
fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_routing_depends_on_tokens_and_layers_and_not_on_chunks() {
        let digest = |calls: &[(usize, &[u16])]| {
            let mut routing = Routing { top_k: 2, seen: vec![0; 3], digest: 0 };
            calls.iter().for_each(|(layer, ids)| routing.chose(*layer, ids, &[]));
            routing.digest
        };
        let whole = digest(&[(1, &[0, 1, 2, 3]), (2, &[4, 5, 6, 7])]);
        assert_eq!(digest(&[(1, &[0, 1]), (2, &[4, 5]), (1, &[2, 3]), (2, &[6, 7])]), whole);
        for other in [
            digest(&[(1, &[2, 3, 0, 1]), (2, &[4, 5, 6, 7])]),
            digest(&[(2, &[0, 1, 2, 3]), (1, &[4, 5, 6, 7])]),
            digest(&[(1, &[0, 1, 2, 3]), (2, &[4, 5, 6, 8])]),
        ] {
            assert_ne!(other, whole);
        }
        // splitmix64 begun at 0 gives this number first (Steele, Lea and Flood 2014; the published test vector).
        assert_eq!(mixed(0), 0xe220_a839_7b1d_cdaf);
    }
}
