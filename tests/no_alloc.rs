//! A decode step after the first allocates nothing: every buffer was sized when the engine was opened.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/engines.rs"]
mod engines;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use engines::{Arithmetic, Model, Reader, Setup, config, has_ring, open};
use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{Width, Widths};
use millstream::engine::kvfile::Storage;
use millstream::engine::sampler::Sampling;
use millstream::engine::shaping::{Bias, Penalties, Scored, Scores};
use millstream::engine::{DraftRule, DraftSource, Engine, EngineConfig, GuessFrom, GuessRule, Job, Shaping};
use millstream_io::IoMode;

/// Counts every allocation of the process, whatever thread makes it.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// A backtrace is printed for the first allocation while this is set.
static WATCHED: AtomicBool = AtomicBool::new(false);

fn count(size: usize) {
    ALLOCATIONS.fetch_add(1, Relaxed);
    if WATCHED.swap(false, Relaxed) {
        eprintln!("{size} bytes allocated at\n{}", std::backtrace::Backtrace::force_capture());
    }
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const TOKENS: usize = 24;

/// A thread allocates while it starts, which on a busy machine may be long after it was made. One that has started
/// waits for work.
fn wait_until_all_threads_sleep() {
    // The state is the field after the name, which is in parentheses.
    let runs = |stat: &String| stat.rsplit(") ").next().is_some_and(|rest| !rest.starts_with('S'));
    for _ in 0..100_000 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
        // This thread itself runs.
        if stats.filter(runs).count() <= 1 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    panic!("the engine's threads do not come to rest");
}

/// A file that contexts are kept in.
struct OnDisk(File);

impl Storage for OnDisk {
    fn name(&self) -> String {
        "a file".to_owned()
    }

    fn len_bytes(&mut self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(out, offset)
    }

    fn append(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_data()
    }
}

/// An engine whose contexts go into a file.
fn open_kept(arithmetic: &Arithmetic, setup: &Setup) -> Engine {
    let config = EngineConfig { kv_file: true, ..config(arithmetic, setup) };
    let mut engine = Engine::open(Checkpoint::open(&arithmetic.model.dir()).unwrap(), &config).unwrap();
    engine.keep_context(Box::new(OnDisk(tempfile::tempfile().unwrap())), true);
    engine
}

/// Allocations between the second token and the last, and the reads and accepted drafts of the whole generation.
fn allocations(mut engine: Engine, arithmetic: &Arithmetic, sampling: Sampling) -> (u64, u64, u64) {
    wait_until_all_threads_sleep();
    let prompt = arithmetic.model.repetitive();
    let job = Job { prompt, max_tokens: TOKENS, sampling, stop_ids: vec![] };
    let (mut tokens, mut before, mut after) = (0, 0, 0);
    let show = std::env::var_os("NO_ALLOC_BACKTRACE").is_some();
    // Of everything that shapes logits a little.
    let penalties = Penalties { repeat: 1.01, repeat_last: Some(8), presence: 0.01, frequency: 0.01 };
    let (bias, take) = (vec![Bias { id: 3, value: 0.5 }], &mut |_: &Scored| {});
    let mut shaping = Shaping { penalties, bias, scores: Some(Scores { top: 5, take }), ..Shaping::default() };
    let mut on_token = |_| {
        tokens += 1;
        match tokens {
            2 => {
                before = ALLOCATIONS.load(Relaxed);
                WATCHED.store(show, Relaxed);
            }
            TOKENS => {
                WATCHED.store(false, Relaxed);
                after = ALLOCATIONS.load(Relaxed);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let outcome = engine.generate_shaped(&job, &mut shaping, &AtomicBool::new(false), &mut on_token, &mut ());
    assert_eq!(outcome.unwrap().ids.len(), TOKENS);
    assert!(before > 0, "the counter counts");
    let accepted = engine.stats().draft.map_or(0, |draft| draft.accepted);
    (after - before, engine.store().device_stats().reads, accepted)
}

// One test in this file: what another one allocated meanwhile would be counted.
#[test]
fn a_token_after_the_first_allocates_nothing() {
    let drawn = Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.02, seed: 7 };
    let mut readers = vec![Reader::Threads];
    if has_ring() {
        readers.push(Reader::Ring);
    }
    for reader in readers {
        for io in [IoMode::Auto, IoMode::Buffered] {
            for arithmetic in
                [Model::Tiny, Model::TinyInt4Groups, Model::TalesInt4].into_iter().flat_map(Arithmetic::all)
            {
                let early = GuessRule { from: GuessFrom::Attention, layers: 2 };
                let (late, ngram) = (GuessRule { from: GuessFrom::Shared, layers: 1 }, DraftSource::Ngram);
                for (threads, sampling, guess, source) in [
                    (1, Sampling::greedy(), early, ngram),
                    (2, drawn, late, DraftSource::Off),
                    (2, drawn, late, DraftSource::Mtp),
                    (1, drawn, early, DraftSource::Auto),
                ] {
                    let stored = Setup {
                        slabs: 9,
                        reader,
                        io,
                        threads,
                        guess,
                        drafts: DraftRule { source, most: 4 },
                        ..Setup::default()
                    };
                    // Those of the tiny model are quantized on their way.
                    let widths = Widths { experts: Some(Width::Bits4), group: Some(16), ..Widths::default() };
                    let quantized = Setup { widths, ..stored };
                    for setup in [stored, quantized].iter().take(1 + usize::from(arithmetic.model == Model::Tiny)) {
                        let engine = open(&arithmetic, setup).unwrap();
                        let (allocations, reads, accepted) = allocations(engine, &arithmetic, sampling);
                        assert!(reads > TOKENS as u64, "the pool holds everything: {reads} reads");
                        let repeats =
                            [ngram, DraftSource::Mtp].contains(&source) && arithmetic.model == Model::TalesInt4;
                        assert!(!repeats || accepted > 0, "{arithmetic:?}");
                        assert_eq!(allocations, 0, "{arithmetic:?} {setup:?}, NO_ALLOC_BACKTRACE=1 shows where");
                    }
                }
            }
        }
    }
    for arithmetic in Arithmetic::all(Model::TinyInt4Groups) {
        let engine = open_kept(&arithmetic, &Setup::default());
        let (allocations, ..) = allocations(engine, &arithmetic, Sampling::greedy());
        assert_eq!(allocations, 0, "{arithmetic:?} with a file, NO_ALLOC_BACKTRACE=1 shows where");
    }
}
