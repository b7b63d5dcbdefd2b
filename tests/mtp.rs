//! The experts of the MTP layer live with all others: one pool, one budget, one device, one set of counters, checks and
//! watches. Where they are wider they have slabs of their own size in it.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engines::{ALL_SLABS, Arithmetic, Model, Reader, Setup, answer, assert_same, config, has_ring};
use millstream::checkpoint::Checkpoint;
use millstream::engine::budget::Slabs;
use millstream::engine::{Activations, Engine, EngineConfig, EngineError, Memory, Notice, Switch, Verify};
use millstream::forward::ForwardError;
use millstream::store::StoreError;
use millstream_io::{SimConfig, SimFault, sim_device};

const PROMPT: usize = 40;
/// An error of a drive that nobody repeats.
const ENODEV: i32 = 19;

fn with_mtp(model: Model, setup: &Setup) -> (Checkpoint, EngineConfig) {
    let arithmetic = Arithmetic::absorbed(model, Activations::Int8);
    let config = EngineConfig { load_mtp: true, ..config(&arithmetic, setup) };
    (Checkpoint::open(&model.dir()).unwrap(), config)
}

fn open(model: Model, setup: &Setup) -> Engine {
    let (checkpoint, config) = with_mtp(model, setup);
    Engine::open(checkpoint, &config).unwrap()
}

/// Without checks: those of the resident weights would take their part of the script.
fn simulated(model: Model, setup: &Setup, sim: &SimConfig) -> Engine {
    let (checkpoint, config) = with_mtp(model, setup);
    let config = EngineConfig { verify: Verify::Off, ..config };
    Engine::open_with(checkpoint, &config, &|files, pool| Ok(sim_device(sim, files.clone(), pool)?)).unwrap()
}

fn drafts(engine: &mut Engine, model: Model) -> Vec<u32> {
    engine.draft_scores(&model.prompt(PROMPT)).unwrap().iter().map(|score| score.to_bits()).collect()
}

#[test]
fn drafts_and_answers_are_the_same_bits_whatever_the_pool_and_the_reader() {
    for model in [Model::Tiny, Model::TinyInt4, Model::TalesInt4] {
        let mut all = open(model, &Setup::RESIDENT);
        let (expected, prompt) = (drafts(&mut all, model), model.prompt(PROMPT));
        let said = answer(&mut all, &prompt, 6);
        let few = Setup { rows: 7, ..Setup::RESIDENT };
        let mut setups = vec![
            Setup { slabs: 1, ..few },
            Setup { slabs: 2, reader: Reader::Shuffled(3), ..few },
            Setup { slabs: 3, prefetch: Switch::On, pipeline: Switch::Off, ..few },
            Setup { slabs: 9, prefetch: Switch::On, history: Some(5), pins: Switch::On, ..few },
        ];
        if has_ring() {
            setups.push(Setup { slabs: 3, reader: Reader::Ring, ..few });
        }
        for setup in setups {
            let mut engine = open(model, &setup);
            for _ in 0..2 {
                assert!(drafts(&mut engine, model) == expected, "{model:?} {setup:?}");
                assert_same(&said, &answer(&mut engine, &prompt, 6), &(model, setup));
            }
            let store = engine.store();
            assert_eq!(store.pool().free() + store.resting(), store.pool().slabs(), "nothing is in flight");
        }
    }
}

#[test]
fn wider_experts_have_slabs_of_their_own_in_the_one_pool_that_the_budget_counts() {
    // Four bits a weight and eight in the MTP layer; with sixteen in both they are alike.
    for (model, sizes) in [(Model::TinyInt4, 2), (Model::Tiny, 1)] {
        let (checkpoint, config) = with_mtp(model, &Setup { slabs: 3, ..Setup::RESIDENT });
        let layers = &checkpoint.experts.layers;
        let largest = |of: &[Option<Vec<_>>]| {
            let experts = of.iter().flatten().flatten();
            experts.map(millstream::checkpoint::ExpertSource::bytes).max().unwrap()
        };
        let (decoder, mtp) = layers.split_at(checkpoint.arch.layers.len());
        let (usual, wide) = (largest(decoder), largest(mtp));
        let all: u64 = layers.iter().flatten().map(|layer| layer.len() as u64).sum();
        let experts_of_mtp: u64 = mtp.iter().flatten().map(|layer| layer.len() as u64).sum();
        let engine = Engine::open(checkpoint, &config).unwrap();
        let budget = engine.budget();
        assert_eq!((budget.slabs.len(), engine.store().pool().slabs()), (sizes, 3 * sizes));
        assert_eq!(budget.slots(), 3 * sizes as u64);
        assert!(budget.slabs.iter().any(|slabs| slabs.bytes >= usual && slabs.bytes < usual + 3 * 4096));
        assert!(budget.slabs.iter().any(|slabs| slabs.bytes >= wide && slabs.bytes < wide + 3 * 4096));
        assert_eq!(usual < wide, sizes == 2, "{usual} and {wide} bytes");
        assert_eq!(budget.to_string().matches("3 slabs of ").count(), sizes, "{budget}");
        assert!(engine.store().pool().report().bytes >= budget.experts());

        // More slabs than there are experts of a size are of no use.
        let (checkpoint, config) = with_mtp(model, &Setup { slabs: ALL_SLABS, ..Setup::RESIDENT });
        let whole = Engine::plan(&checkpoint, &config).unwrap();
        assert_eq!(whole.slots(), all);
        if sizes == 2 {
            assert!(whole.slabs.iter().any(|slabs| slabs.count == experts_of_mtp && slabs.bytes >= wide));
        }
        // Of half the bytes each size gets half of its slabs, as nearly as whole ones go.
        let ram = whole.total - whole.experts() / 2;
        let half = EngineConfig { memory: Memory::Total(Some(ram)), ..config };
        let half = Engine::plan(&checkpoint, &half).unwrap();
        assert!(half.total == ram && half.experts() <= whole.experts() / 2);
        for (Slabs { count, .. }, all) in half.slabs.iter().zip(&whole.slabs) {
            assert!(count.abs_diff(all.count / 2) <= 1, "{half:?} of {whole:?}");
        }
        // Without the layer there is one size, and nothing is taken for it.
        let without = Engine::plan(&checkpoint, &EngineConfig { load_mtp: false, ..config_of(model) }).unwrap();
        assert_eq!((without.slabs.len(), without.slots()), (1, all - experts_of_mtp));
    }
}

fn config_of(model: Model) -> EngineConfig {
    with_mtp(model, &Setup { slabs: ALL_SLABS, ..Setup::RESIDENT }).1
}

#[test]
fn the_counters_and_the_checks_know_what_drafting_reads() {
    let model = Model::TinyInt4;
    let setup = Setup { slabs: 2, prefetch: Switch::Off, ..Setup::RESIDENT };
    let prompt = model.prompt(PROMPT);
    let mut engine = open(model, &setup);
    engine.score(&prompt).unwrap();
    let scored = (engine.store().stats(), engine.store().device_stats());
    drafts(&mut engine, model);
    let (stats, device) = (engine.store().stats(), engine.store().device_stats());
    // The draft layer asks for at least as many experts as one row chooses, and its two slabs never hold them all.
    let top_k = engine.arch().moe.top_k as u64;
    assert!(stats.requested >= scored.0.requested + top_k, "{stats:?} after {:?}", scored.0);
    assert!(device.reads > scored.1.reads && stats.useful_bytes > scored.0.useful_bytes);
    // Every read, as is asked for.
    assert_eq!(stats.checked, device.reads);
    assert_eq!(engine.stats().io.reads, device.reads);

    // The drive is gone for one read of the draft layer, the first after those of the score.
    let calm = SimConfig::calm(1);
    let mut calm_engine = simulated(model, &setup, &calm);
    calm_engine.score(&prompt).unwrap();
    let reads = calm_engine.store().device_stats().reads;
    let fails = SimConfig { script: vec![(reads, SimFault::Errno(ENODEV))], ..calm };
    let mut engine = simulated(model, &setup, &fails);
    match engine.draft_scores(&prompt).unwrap_err() {
        EngineError::Forward(ForwardError::Store(StoreError::Read { key, .. })) => {
            assert_eq!(usize::from(key.layer), engine.arch().layers.len())
        }
        other => panic!("not an error of one read: {other:?}"),
    }
    // And it goes on after that.
    assert!(drafts(&mut engine, model) == drafts(&mut open(model, &Setup::RESIDENT), model));
}

#[test]
fn a_drive_that_hangs_while_drafting_is_told_and_can_be_given_up() {
    let (model, setup) = (Model::TinyInt4, Setup { slabs: 2, prefetch: Switch::Off, ..Setup::RESIDENT });
    let prompt = model.prompt(PROMPT);
    let mut calm = simulated(model, &setup, &SimConfig::calm(1));
    calm.score(&prompt).unwrap();
    let first = calm.store().device_stats().reads;
    let script = vec![(first, SimFault::Stall(Duration::from_secs(50)))];
    for gives_up in [false, true] {
        let mut engine = simulated(model, &setup, &SimConfig { script: script.clone(), ..SimConfig::calm(1) });
        let told = Arc::new(Mutex::new(vec![]));
        let all = told.clone();
        engine.set_watch(Box::new(move |what| {
            let hangs = matches!(what, Notice::Hung(_));
            all.lock().unwrap().push(what);
            if hangs && gives_up { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }));
        let outcome = engine.draft_scores(&prompt);
        let layer = engine.arch().layers.len();
        let told = told.lock().unwrap();
        let hung = told.iter().find_map(|what| match what {
            Notice::Hung(read) => Some(read),
            _ => None,
        });
        assert_eq!(hung.map(|read| usize::from(read.key.layer)), Some(layer), "{told:?}");
        match outcome {
            Ok(_) => assert!(!gives_up),
            Err(EngineError::Forward(ForwardError::Store(StoreError::GivenUp))) => assert!(gives_up),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_model_that_was_opened_without_the_layer_has_no_drafts() {
    let model = Model::Tiny;
    let (checkpoint, config) = with_mtp(model, &Setup::RESIDENT);
    let mut engine = Engine::open(checkpoint, &EngineConfig { load_mtp: false, ..config }).unwrap();
    assert!(matches!(engine.draft_scores(&model.prompt(5)), Err(EngineError::NoMtp)));
}
