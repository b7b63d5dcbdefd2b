//! From a directory and a configuration to generated tokens.

mod auto;
pub mod budget;
pub mod config;
pub mod constraint;
mod decode;
mod divided;
mod drafts;
pub mod error;
mod experts;
mod forced;
mod generate;
mod integrity;
pub mod kvfile;
pub mod overlap;
pub mod predict;
pub mod quality;
mod rows;
pub mod sampler;
mod scales;
pub mod session;
pub mod shaping;
pub mod space;
mod spread;
pub mod stats;
pub mod stop;
mod switches;
pub mod timeline;
mod traced;
pub mod trial;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_io::{Device, DeviceConfig, FileSet, SlabPool, open_device, settle};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::arch::Arch;
pub use crate::forward::stages::StageGraph;
use crate::forward::{ExpertScratch, Form, KvCache, Model, State, Streamed, latent_shape, rope_of};
pub use crate::forward::{Guess, GuessFrom, GuessRule, KvBits, Observer};
use crate::limits::TIMELINE_EVENTS_MAX;
use crate::meter::Meter;
pub use crate::model::load::Loaded;
use crate::model::load::fill;
use crate::model::resident::Plan;
pub use crate::ops::Activations;
use crate::ops::Compute;
use crate::ops::room::Room;
pub use crate::store::policy::PolicyKind;
use crate::store::{ExpertStore, ExpertTable, trace};
pub use crate::store::{Hung, Notice, Verify, Watch};
use budget::Budget;
pub use config::{AttentionForm, Depth, Dsa, EngineConfig, Memory};
pub use divided::Divided;
use drafts::Drafts;
pub use drafts::{DraftRule, DraftSource};
pub use error::EngineError;
pub use forced::Forced;
use generate::Times;
pub use generate::{Finish, Job, Outcome};
use kvfile::KvFile;
use sampler::Sampler;
use session::Held;
pub use session::Sequence;
use shaping::Shaper;
pub use shaping::Shaping;
use switches::Turning;
pub use switches::{Switch, Switches};

/// Rows of a chunk at which the explicit form must pay to be chosen by itself.
const AUTO_EXPLICIT_ROWS: usize = 128;

/// An opened model.
pub struct Engine {
    model: Model,
    experts: Streamed,
    kv: KvCache,
    /// The tokens of it.
    held: Held,
    /// What a file of contexts must be of, where there is to be one.
    kv_header: Option<kvfile::Header>,
    kv_file: Option<KvFile>,
    state: State,
    meter: Meter,
    sampler: Sampler,
    shaper: Shaper,
    prompt_form: Form,
    decode_form: Form,
    prefill_rows: usize,
    budget: Budget,
    notes: Vec<String>,
    files: Arc<FileSet>,
    /// What a routing trace of this model is of.
    traced: trace::Header,
    load: Duration,
    times: Times,
    turning: Turning,
    drafts: Drafts,
}

/// Opens the device that expert reads go through; a test may put another in its place.
pub type OpenDevice<'a> = &'a dyn Fn(&Arc<FileSet>, &SlabPool) -> Result<Box<dyn Device>, EngineError>;

impl Engine {
    /// Divides memory, loads resident weights and opens the expert store of a model that is opened and checked.
    pub fn open(checkpoint: Checkpoint, config: &EngineConfig) -> Result<Engine, EngineError> {
        Engine::open_until(checkpoint, config, &AtomicBool::new(false))
    }

    /// As [`Engine::open`], until `cancel` is raised: it is looked at between the parts of loading, and in the longest of
    /// them, that which reads weights, every few megabytes. Then the error [is one of that](EngineError::is_cancelled).
    pub fn open_until(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        cancel: &AtomicBool,
    ) -> Result<Engine, EngineError> {
        Engine::open_followed(checkpoint, config, cancel, &Loaded::default())
    }

    /// As [`Engine::open_until`], telling `loaded` how far it is.
    pub fn open_followed(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        cancel: &AtomicBool,
        loaded: &Loaded,
    ) -> Result<Engine, EngineError> {
        let (_, kind) = settle(config.io, config.device)?;
        let device: OpenDevice = &|files, pool| {
            let device = DeviceConfig {
                kind,
                depth_bytes: config.depth.bytes(pool.largest_slab_bytes()),
                chunk_bytes: config.chunk_bytes,
                ..DeviceConfig::default()
            };
            Ok(open_device(&device, files.clone(), pool)?)
        };
        Engine::load(checkpoint, config, device, cancel, loaded)
    }

    /// As [`Engine::open`], reading experts through the device that `device` makes.
    pub fn open_with(checkpoint: Checkpoint, config: &EngineConfig, device: OpenDevice) -> Result<Engine, EngineError> {
        Engine::load(checkpoint, config, device, &AtomicBool::new(false), &Loaded::default())
    }

    fn load(
        checkpoint: Checkpoint,
        config: &EngineConfig,
        device: OpenDevice,
        cancel: &AtomicBool,
        loaded: &Loaded,
    ) -> Result<Engine, EngineError> {
        let started = Instant::now();
        let divided = Divided::new(&checkpoint, config)?;
        let Divided { context, sparse, rows, kernels, prompt_form, decode_form, .. } = divided;
        let (drafts, step_rows) = (divided.drafts, rows.max(divided.drafts.rows()));
        let Divided { files, table, requantized, plan, budget, .. } = divided;
        let mut notes = [checkpoint.notes().to_vec(), files.describe(), vec![budget.to_string()]].concat();
        notes.extend(drafts.note(config.drafts, &checkpoint));
        notes.extend(scales::note(&table).into_iter().chain(narrow_note(&plan)).chain(stays_note(config, &table)));
        let kept = table.kept_scales().clone();
        loaded.announce(plan.bytes() + kept.bytes);
        let (checks, note) = integrity::prepare(config, &checkpoint, &files, &table, device, cancel)?;
        notes.extend(note);
        let sizes: Vec<(usize, usize)> = (table.sizes().iter().zip(&budget.slabs))
            .map(|(size, slabs)| (size.slab_bytes, slabs.count as usize))
            .chain(table.staging())
            .collect();
        go_on_unless(cancel)?;
        let pool = SlabPool::of_sizes(&sizes)?;
        let device = device(&files, &pool)?;
        let described = device.describe();
        notes.extend(pool.report().note.into_iter().chain(described.fallback.clone()).chain(described.notes.clone()));
        let mut store = ExpertStore::new(table, device, pool);
        store.set_checks(checks);
        store.set_policy(config.policy);
        let mut experts = Streamed::new(
            store,
            ExpertScratch::new(kernels, &checkpoint.arch, step_rows, requantized, &mut Room::default()),
        );
        if !config.history.is_empty() {
            experts.store.remember(config.history.clone(), checkpoint.arch.moe.top_k, config.pins.asked());
        }
        // After the slabs: reading the weights fills memory with pages of their files, and leaves none in pieces as large as
        // slabs want.
        let resident = plan.load(config.threads, cancel, loaded)?;
        if kept.bytes > 0 {
            let pieces = scales::pieces(&kept);
            experts.store.set_scales(fill(&files, &pieces, kept.bytes, config.threads, cancel, loaded)?);
        }
        let opened_in = checkpoint.took();
        let traced = traced::header(&checkpoint, &experts.store);
        let kv = KvCache::new(&checkpoint.arch, context, sparse, config.kv_bits);
        let kv_header = config.kv_file.then(|| kvfile::header_of(&checkpoint, config, sparse, &kv)).transpose()?;
        let arch = checkpoint.arch;
        let team = spread::team(config.threads, &config.nodes);
        let compute = Compute { kernels, team, activations: config.activations };
        let kept = if config.timeline { TIMELINE_EVENTS_MAX } else { 0 };
        if config.timeline {
            experts.store.record_reads(kept);
        }
        let guess_from = config.switches.guess.from;
        let explicit = [prompt_form, decode_form].contains(&Form::Explicit);
        let room = &mut Room::default();
        let mtp_kv = || KvCache::for_mtp(&arch, context, sparse, config.kv_bits);
        let drafts = Drafts::new(drafts, &arch, context, mtp_kv, room);
        let mut engine = Engine {
            experts,
            kv,
            held: Held::new(context, room),
            kv_header,
            kv_file: None,
            state: State::new(kernels, &arch, step_rows, drafts.rule.rows(), context, config.threads, explicit, room),
            meter: Meter::with_timeline(kept),
            sampler: Sampler::new(arch.vocab),
            shaper: Shaper::new(arch.vocab, context, room),
            prompt_form,
            decode_form,
            prefill_rows: rows,
            budget,
            notes,
            files,
            traced,
            load: opened_in + started.elapsed(),
            times: Times::default(),
            turning: Turning::new(config.switches),
            drafts,
            model: Model { rope: rope_of(&arch, context, room), compute, arch, resident, sparse, guess_from },
        };
        engine.apply_switches();
        Ok(engine)
    }

    /// How memory would be divided, without loading anything. Fails as [`Engine::open`] would before it loads.
    pub fn plan(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<Budget, EngineError> {
        Ok(Engine::divide(checkpoint, config)?.budget)
    }

    /// As [`Engine::plan`], with what else is decided then.
    pub fn divide<'a>(checkpoint: &'a Checkpoint, config: &'a EngineConfig) -> Result<Divided<'a>, EngineError> {
        Divided::new(checkpoint, config)
    }

    /// From now on tells `watch` of reads that a generation waits for. It can end the generation, as [`Finish::Interrupted`];
    /// the reads stay in flight. The next generation waits for them, and so does dropping the engine: the kernel may
    /// write to their slabs until it answers.
    pub fn set_watch(&mut self, watch: Watch) {
        self.experts.store.set_watch(watch, self.files.clone());
    }

    /// Lines worth printing once: what is off, how files are read, how memory is divided.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Shapes and rules of the model.
    pub fn arch(&self) -> &Arch {
        &self.model.arch
    }

    /// Positions a sequence may have.
    pub fn context(&self) -> usize {
        self.kv.capacity()
    }

    /// Logits of what follows the last position that was decoded, or that ended a prompt: `[vocab]`.
    pub fn logits(&mut self) -> &[f32] {
        let (row, vocab) = (self.drafts.row, self.model.arch.vocab);
        self.state.logits().get(row * vocab..(row + 1) * vocab).unwrap_or_default()
    }

    /// The expert store, for its counters, its pool and its device.
    pub fn store(&self) -> &ExpertStore {
        &self.experts.store
    }

    /// What a routing trace of this model is of.
    pub fn traced(&self) -> &trace::Header {
        &self.traced
    }

    /// How memory was divided.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Warnings that came up while running, such as a file that turned out not to allow direct reads.
    pub fn warnings(&self) -> Vec<String> {
        let of_context = self.kv_file.iter().flat_map(|file| file.warnings().iter().cloned());
        self.files.warnings().into_iter().chain(of_context).collect()
    }

    /// Whether a warning is about bytes that failed their checksum: then the user must see it, however quiet he likes it.
    pub fn warns_of_damage(&self) -> bool {
        (0..self.files.drives()).any(|drive| self.files.was_wrong(drive))
    }
}

fn narrow_note(plan: &Plan) -> Option<String> {
    let (count, all) = (plan.narrow(), plan.matrices());
    (count > 0)
        .then(|| format!("{count} of {all} weights in memory are stored as narrow as asked, or narrower, and stay"))
}

fn stays_note(config: &EngineConfig, table: &ExpertTable) -> Option<String> {
    (config.widths.experts.is_some() && table.staging().is_none())
        .then(|| "experts are stored as narrow as asked, or narrower, and stay".to_owned())
}

/// Fails where the flag is up.
fn go_on_unless(cancel: &AtomicBool) -> Result<(), EngineError> {
    if cancel.load(Ordering::Relaxed) { Err(EngineError::Cancelled) } else { Ok(()) }
}

fn context_of(config: &EngineConfig, arch: &Arch) -> Result<usize, EngineError> {
    let most = arch.max_context;
    match config.context {
        None => Ok(most.min(config::DEFAULT_CONTEXT)),
        Some(asked) if (1..=most).contains(&asked) => Ok(asked),
        Some(asked) => Err(EngineError::Context { asked, most }),
    }
}

/// Whether there are to be index keys: sparse attention is on, and will select as the context is longer than what the indexer
/// keeps, or a longer one may go on with the file that this one is left in.
fn sparse_of(config: &EngineConfig, arch: &Arch, context: usize) -> Result<bool, EngineError> {
    match (config.dsa, arch.indexer) {
        (Dsa::Off, _) | (Dsa::Auto, None) => Ok(false),
        (Dsa::On, None) => Err(EngineError::NoIndexer),
        (Dsa::On | Dsa::Auto, Some(indexer)) => Ok(context > indexer.top_k || config.kv_file),
    }
}

/// Forms of prompt and decode, fixed for the life of the engine: neither the length of a prompt nor its chunks change a bit.
fn forms_of(attention: AttentionForm, arch: &Arch) -> Result<(Form, Form), EngineError> {
    let prompt_pays = latent_shape(arch).map(|shape| shape.explicit_pays_from() <= AUTO_EXPLICIT_ROWS);
    match (attention, prompt_pays) {
        (AttentionForm::Absorbed | AttentionForm::Explicit, None) => Err(EngineError::OneForm),
        (AttentionForm::Explicit, _) => Ok((Form::Explicit, Form::Explicit)),
        (AttentionForm::Auto, Some(true)) => Ok((Form::Explicit, Form::Absorbed)),
        (AttentionForm::Absorbed | AttentionForm::Auto, _) => Ok((Form::Absorbed, Form::Absorbed)),
    }
}
