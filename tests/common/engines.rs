//! Engines over the bundled models, and their answers as bits.
// An engine's error is large, and made once an answer at most.
#![allow(dead_code, clippy::unwrap_used, clippy::result_large_err)]

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{ConvertOptions, Width, Widths, convert};
use millstream::engine::sampler::Sampling;
use millstream::engine::{
    Activations, AttentionForm, Depth, DraftRule, DraftSource, Engine, EngineConfig, EngineError, GuessFrom, GuessRule,
    Job, KvBits, Memory, PolicyKind, Switch, Switches, Verify,
};
use millstream::kernels::Isa;
use millstream_io::{
    DeviceConfig, DeviceKind, IoError, IoMode, SimConfig, ThrottleConfig, open_device, sim_device, throttled,
};

/// More slabs than any bundled model has experts: nothing is ever evicted.
pub const ALL_SLABS: usize = 1000;

/// A bundled model, as it is or converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// Random weights, BF16; sparse attention from 17 positions on.
    Tiny,
    /// The same with int4 experts and int8 for the rest.
    TinyInt4,
    /// The same with int4 in groups of 16.
    TinyInt4Groups,
    /// The same with int2 experts.
    TinyInt2,
    /// Random weights of the other family, BF16.
    TinyOlmoe,
    /// The same with int4 experts and int8 for the rest.
    TinyOlmoeInt4,
    /// Trained weights, FP8.
    Tales,
    /// The same with int4 experts and int8 for the rest.
    TalesInt4,
}

impl Model {
    pub const ALL: [Model; 8] = [
        Model::Tiny,
        Model::TinyInt4,
        Model::TinyInt4Groups,
        Model::TinyInt2,
        Model::TinyOlmoe,
        Model::TinyOlmoeInt4,
        Model::Tales,
        Model::TalesInt4,
    ];

    /// The directory; a converted model is made on first use, once for the process.
    pub fn dir(self) -> PathBuf {
        let (source, options) = match self {
            Model::Tiny => return tiny(),
            Model::TinyOlmoe => return tiny_olmoe(),
            Model::Tales => return tales(),
            Model::TinyInt4 => (tiny(), int8_but(Width::Bits4, None)),
            Model::TinyInt4Groups => {
                (tiny(), ConvertOptions { dense: Width::Bits4, group: Some(16), ..ConvertOptions::default() })
            }
            Model::TinyInt2 => (tiny(), int8_but(Width::Bits2, None)),
            Model::TinyOlmoeInt4 => (tiny_olmoe(), int8_but(Width::Bits4, None)),
            Model::TalesInt4 => (tales(), int8_but(Width::Bits4, None)),
        };
        static MADE: OnceLock<tempfile::TempDir> = OnceLock::new();
        static LOCK: Mutex<()> = Mutex::new(());
        let _one_at_a_time = LOCK.lock();
        // Beside the build, so that it is on a disk and not in memory.
        let made = MADE.get_or_init(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let dir = made.path().join(format!("{self:?}"));
        if !dir.exists() {
            convert(&source, &dir, &options, &mut |_| {}).unwrap();
        }
        dir
    }

    pub fn vocab(self) -> u32 {
        match self {
            Model::Tales | Model::TalesInt4 => 4096,
            _ => 272,
        }
    }

    /// The widths of `config.json`'s stop tokens and text do not matter here: ids are drawn evenly, by a fixed rule.
    pub fn prompt(self, len: usize) -> Vec<u32> {
        (0..len as u32).map(|i| (i * i * 31 + i * 17 + 5) % self.vocab()).collect()
    }

    /// A prompt that repeats itself; the trained model goes on with its last four tokens for some rounds.
    pub fn repetitive(self) -> Vec<u32> {
        let begins = [4086, 4088, 2650, 680, 258, 537, 438, 308, 258, 437, 795, 418, 340, 840, 3067, 11, 269, 258, 795];
        match self {
            Model::Tales | Model::TalesInt4 => begins.into_iter().chain([11, 269, 258, 795].repeat(5)).collect(),
            _ => self.prompt(17).repeat(2),
        }
    }

    /// Whether matmuls have an integer path to take.
    pub fn is_integer(self) -> bool {
        !matches!(self, Model::Tiny | Model::TinyOlmoe | Model::Tales)
    }

    /// Forms that its attention has.
    fn forms(self) -> &'static [AttentionForm] {
        match self {
            Model::TinyOlmoe | Model::TinyOlmoeInt4 => &[AttentionForm::Auto],
            _ => &[AttentionForm::Absorbed, AttentionForm::Explicit],
        }
    }
}

fn int8_but(experts: Width, group: Option<u16>) -> ConvertOptions {
    ConvertOptions { experts, dense: Width::Bits8, group, ..ConvertOptions::default() }
}

pub fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-glm-moe-dsa")
}

pub fn tiny_olmoe() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-olmoe")
}

pub fn tales() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")
}

/// What may change low bits.
#[derive(Clone, Copy, Debug)]
pub struct Arithmetic {
    pub model: Model,
    pub form: AttentionForm,
    pub activations: Activations,
    pub kv_bits: KvBits,
}

impl Arithmetic {
    /// The absorbed form over a cache of f32.
    pub const fn absorbed(model: Model, activations: Activations) -> Arithmetic {
        Arithmetic { model, form: AttentionForm::Absorbed, activations, kv_bits: KvBits::Bits32 }
    }

    /// Every combination that differs for `model`.
    pub fn all(model: Model) -> Vec<Arithmetic> {
        let activations: &[Activations] =
            if model.is_integer() { &[Activations::Int8, Activations::F32] } else { &[Activations::F32] };
        let of_form = |&form: &AttentionForm| {
            let whole = activations.iter().map(move |&kind| Arithmetic { form, ..Arithmetic::absorbed(model, kind) });
            // How a cache is held has nothing to do with what is multiplied elsewhere.
            let halves = Arithmetic { form, kv_bits: KvBits::Bits16, ..Arithmetic::absorbed(model, activations[0]) };
            whole.chain([halves])
        };
        model.forms().iter().flat_map(of_form).collect()
    }
}

/// Who reads the experts.
#[derive(Clone, Copy, Debug)]
pub enum Reader {
    Ring,
    Threads,
    /// From mappings of the files; `io` must leave the choice.
    Map,
    /// Simulated, in an order that the seed decides.
    Shuffled(u64),
    /// Threads, slowed down in real time to a drive that the seed decides.
    Slowed(u64),
}

/// What must not change a bit.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub slabs: usize,
    pub reader: Reader,
    pub io: IoMode,
    pub threads: usize,
    pub rows: usize,
    pub isa: Option<Isa>,
    pub depth: Depth,
    pub chunk_bytes: Option<u32>,
    pub pipeline: Switch,
    pub prefetch: Switch,
    pub guess: GuessRule,
    pub policy: PolicyKind,
    pub pins: Switch,
    /// A history of selections, drawn by this seed.
    pub history: Option<u64>,
    /// What is quantized while it is loaded, or read.
    pub widths: Widths,
    pub drafts: DraftRule,
}

impl Setup {
    /// Everything resident, one thread, the whole prompt at once.
    pub const RESIDENT: Setup = Setup {
        slabs: ALL_SLABS,
        reader: Reader::Threads,
        io: IoMode::Auto,
        threads: 1,
        rows: 128,
        isa: None,
        depth: Depth::Auto,
        chunk_bytes: None,
        pipeline: Switch::Auto,
        prefetch: Switch::Auto,
        guess: GuessRule { from: GuessFrom::Shared, layers: 1 },
        policy: PolicyKind::Lookahead,
        pins: Switch::Auto,
        history: None,
        widths: Widths { experts: None, dense: None, io: None, mtp: None, indexer: None, group: None },
        drafts: DraftRule { source: DraftSource::Off, most: DraftRule::MOST },
    };
}

impl Default for Setup {
    fn default() -> Setup {
        Setup::RESIDENT
    }
}

pub fn config(arithmetic: &Arithmetic, setup: &Setup) -> EngineConfig {
    let Setup { slabs, reader, io, threads, rows, isa, depth, chunk_bytes, pipeline, prefetch, .. } = *setup;
    let Setup { guess, policy, pins, history, widths, drafts, .. } = *setup;
    EngineConfig {
        io,
        device: match reader {
            Reader::Ring => DeviceKind::Uring,
            Reader::Map => DeviceKind::Mmap,
            Reader::Threads | Reader::Shuffled(_) | Reader::Slowed(_) => DeviceKind::Threads,
        },
        memory: Memory::Slabs(slabs),
        depth,
        chunk_bytes,
        switches: Switches { pipeline, prefetch, guess },
        policy,
        pins,
        widths,
        drafts,
        // Enough selections to be trusted, of some experts more than of others.
        history: history.map_or_else(Vec::new, |seed| (0..200).map(|key| (seed ^ key) * 7919 % 100_003).collect()),
        threads,
        prefill_rows: rows,
        isa,
        context: Some(256),
        activations: arithmetic.activations,
        kv_bits: arithmetic.kv_bits,
        attention: arithmetic.form,
        // Where there are checksums, the checks are part of the path.
        verify: Verify::All,
        ..EngineConfig::new(1 << 32)
    }
}

/// A simulator that fails nothing and completes calls in an order, and cut into requests, that the seed decides.
pub fn shuffled(seed: u64) -> SimConfig {
    SimConfig {
        reorder: true,
        delay: Duration::ZERO..Duration::from_millis(5),
        queue: 1 + (seed % 9) as usize,
        calls: 1 + (seed / 9 % 7) as usize,
        chunk_bytes: 4096 << (seed % 5),
        ..SimConfig::calm(seed)
    }
}

/// A drive of up to 0.2 ms a read and 0.2 to 3.2 GB/s that serves one to four reads at a time.
pub fn slowed(seed: u64) -> ThrottleConfig {
    ThrottleConfig {
        latency: Duration::from_micros(seed % 200),
        bytes_per_s: 200_000_000 << (seed / 200 % 5),
        parallelism: 1 + (seed / 1000 % 4) as usize,
        ..ThrottleConfig::default()
    }
}

pub fn open(arithmetic: &Arithmetic, setup: &Setup) -> Result<Engine, EngineError> {
    open_at(&arithmetic.model.dir(), arithmetic, setup)
}

/// Another model than that of `arithmetic`.
pub fn open_at(dir: &Path, arithmetic: &Arithmetic, setup: &Setup) -> Result<Engine, EngineError> {
    let (checkpoint, config) = (Checkpoint::open(dir)?, config(arithmetic, setup));
    match setup.reader {
        Reader::Ring | Reader::Threads | Reader::Map => Engine::open(checkpoint, &config),
        Reader::Shuffled(seed) => {
            Engine::open_with(checkpoint, &config, &|files, pool| Ok(sim_device(&shuffled(seed), files.clone(), pool)?))
        }
        Reader::Slowed(seed) => Engine::open_with(checkpoint, &config, &|files, pool| {
            let threads = DeviceConfig { kind: DeviceKind::Threads, ..DeviceConfig::default() };
            Ok(throttled(open_device(&threads, files.clone(), pool)?, &slowed(seed))?)
        }),
    }
}

/// Whether io_uring works here; says so where it does not.
pub fn has_ring() -> bool {
    let arithmetic = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    match open(&arithmetic, &Setup { reader: Reader::Ring, ..Setup::default() }) {
        Ok(_) => true,
        Err(EngineError::Io(e @ IoError::RingRefused { .. })) => {
            println!("the ring is not compared: {e}");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

/// Whether the file system of the bundled models has the mode; says so where it does not.
pub fn has(io: IoMode) -> bool {
    let arithmetic = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    match open(&arithmetic, &Setup { io, ..Setup::default() }) {
        Ok(_) => true,
        Err(EngineError::Io(e @ (IoError::DirectRefused { .. } | IoError::Refused { .. }))) => {
            println!("{io} is not compared: {e}");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

/// An answer, logits as bits.
#[derive(Clone, PartialEq, Eq)]
pub struct Answer {
    pub logits: Vec<u32>,
    pub ids: Vec<u32>,
}

pub fn greedy(engine: &mut Engine, prompt: &[u32], tokens: usize) -> Result<Vec<u32>, EngineError> {
    let job = Job { prompt: prompt.to_vec(), max_tokens: tokens, sampling: Sampling::greedy(), stop_ids: vec![] };
    Ok(engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(()))?.ids)
}

/// The tokens after the prompt and the logits of every position of the prompt.
pub fn answer(engine: &mut Engine, prompt: &[u32], tokens: usize) -> Answer {
    let ids = greedy(engine, prompt, tokens).unwrap();
    let logits = engine.score(prompt).unwrap();
    assert!(logits.iter().all(|v| v.is_finite()));
    Answer { logits: logits.iter().map(|v| v.to_bits()).collect(), ids }
}

/// Compares without printing ten thousand numbers.
pub fn assert_same(a: &Answer, b: &Answer, what: &dyn std::fmt::Debug) {
    assert_eq!(a.logits.len(), b.logits.len(), "{what:?}");
    if let Some(at) = (0..a.logits.len()).find(|&i| a.logits[i] != b.logits[i]) {
        let different = (0..a.logits.len()).filter(|&i| a.logits[i] != b.logits[i]).count();
        let (x, y) = (f32::from_bits(a.logits[at]), f32::from_bits(b.logits[at]));
        panic!("{what:?}: {different} of {} logits differ, the first at {at}: {x:e} and {y:e}", a.logits.len());
    }
    assert_eq!(a.ids, b.ids, "{what:?}");
}
