//! A generation from cold, to be compared with others: the model is opened anew, so that the cache of experts is empty, and
//! the page cache forgets its files.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use millstream_io::measure::{Witness, is_cached};

use crate::checkpoint::Checkpoint;
use crate::engine::stats::{Directness, Stats};
use crate::engine::{Engine, EngineConfig, EngineError, Finish, Job, Outcome};

use super::{Failure, bundled, hanging, render};

/// A model that is measured, and who may stop it.
pub struct Subject<'a> {
    /// Directory of the model.
    pub dir: &'a Path,
    /// Looks at its files.
    pub witness: &'a Witness,
    /// Raised when the user wants it to end.
    pub stop: Arc<AtomicBool>,
    /// Keeps warnings, and that a drive hangs, to itself.
    pub quiet: bool,
}

/// One generation.
pub struct Measured {
    /// Its tokens.
    pub outcome: Outcome,
    /// Its numbers, without what only the caller knows.
    pub stats: Stats,
    /// Whether memory may have served some of the reads.
    pub cached: bool,
    /// From the start of opening the model to the end.
    pub took: Duration,
}

impl Subject<'_> {
    /// Opens and generates; `None` where the user stopped it. `failure` says what an error of the engine means.
    pub fn generate(
        &self,
        config: &EngineConfig,
        job: &Job,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        failure: impl Fn(EngineError) -> Failure,
    ) -> Result<Option<Measured>, Failure> {
        let began = Instant::now();
        let Some(mut engine) = self.open(config, &failure)? else { return Ok(None) };
        let work = |engine: &mut Engine| engine.generate(job, &self.stop, on_token);
        let (outcome, stats, cached) = self.observe(&mut engine, true, work).map_err(&failure)?;
        if outcome.finish == Finish::Interrupted {
            hanging::leave(engine, self.quiet);
            return Ok(None);
        }
        Ok(Some(Measured { outcome, stats, cached, took: began.elapsed() }))
    }

    /// Opens the model, with an empty cache of experts; `None` where the user stopped it.
    pub fn open(
        &self,
        config: &EngineConfig,
        failure: impl Fn(EngineError) -> Failure,
    ) -> Result<Option<Engine>, Failure> {
        open(bundled::open(self.dir)?, config, &self.stop, self.quiet).map_err(failure)
    }

    /// Does `work`, after the page cache has forgotten the files where that is wanted. Tells what came of it, its
    /// numbers, and whether memory may have served some of the reads.
    pub fn observe<T>(
        &self,
        engine: &mut Engine,
        forget: bool,
        work: impl FnOnce(&mut Engine) -> Result<T, EngineError>,
    ) -> Result<(T, Stats, bool), EngineError> {
        let resident = if forget { self.witness.forget() } else { None };
        let before = self.witness.counters();
        let result = work(engine)?;
        let moved = before.and_then(|before| Some(self.witness.counters()?.since(before).bytes));
        for line in engine.warnings() {
            render::note(self.quiet && !engine.warns_of_damage(), &line);
        }
        let stats = engine.stats();
        let cached = is_cached(stats.io.direct != Directness::Direct, resident, moved, stats.io.bytes);
        Ok((result, stats, cached))
    }
}

/// Loads a model, with an empty cache of experts; `None` where the user stopped it.
pub fn open(
    checkpoint: Checkpoint,
    config: &EngineConfig,
    stop: &Arc<AtomicBool>,
    quiet: bool,
) -> Result<Option<Engine>, EngineError> {
    let mut engine = match Engine::open_until(checkpoint, config, stop) {
        Err(error) if error.is_cancelled() => return Ok(None),
        opened => opened?,
    };
    engine.set_watch(hanging::watch_reads(stop.clone(), quiet));
    Ok(Some(engine))
}
