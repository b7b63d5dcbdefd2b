//! Same bits, whatever reads the experts, in what order, into how many slabs, with how many threads, rows at a time and
//! vector lanes. Logits are compared as bits, at every position of a prompt, and so are the tokens that follow it.
#![allow(clippy::unwrap_used)]

#[path = "common/engines.rs"]
mod engines;

use engines::{ALL_SLABS, Answer, Arithmetic, Model, Reader, Setup, answer, assert_same, has, has_ring, open};
use millstream::engine::{
    Activations, Depth, DraftRule, DraftSource, Engine, EngineError, GuessFrom, GuessRule, PolicyKind, Switch, Switches,
};
use millstream::kernels::Kernels;
use millstream::store::{ExpertKey, Tier};
use millstream_io::{CHUNK_WHOLE, IoError, IoMode};
use proptest::prelude::*;

const RESIDENT: Setup = Setup::RESIDENT;

const TOKENS: usize = 12;

fn run(arithmetic: &Arithmetic, setup: &Setup, prompt: &[u32]) -> Answer {
    answer(&mut open(arithmetic, setup).unwrap(), prompt, TOKENS)
}

/// `setups` against [`RESIDENT`], for each arithmetic of each model. The prompt is past the tiny models' 16 positions of
/// dense attention.
fn compare(models: &[Model], setups: &[Setup]) {
    for arithmetic in models.iter().flat_map(|&model| Arithmetic::all(model)) {
        let prompt = arithmetic.model.prompt(37);
        let expected = run(&arithmetic, &RESIDENT, &prompt);
        for setup in setups {
            assert_same(&expected, &run(&arithmetic, setup, &prompt), &(arithmetic, setup));
        }
    }
}

#[test]
fn the_smallest_pool_is_everything_resident() {
    compare(&Model::ALL, &[Setup { slabs: 1, ..RESIDENT }, Setup { slabs: 1, rows: 5, ..RESIDENT }]);
}

#[test]
fn the_smallest_pool_reads_what_everything_resident_does_not() {
    // Guards the test above: a pool that held everything would make it empty.
    let arithmetic = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    let prompt = Model::Tiny.prompt(20);
    let reads = [1, ALL_SLABS].map(|slabs| {
        let mut engine = open(&arithmetic, &Setup { slabs, ..RESIDENT }).unwrap();
        answer(&mut engine, &prompt, TOKENS);
        answer(&mut engine, &prompt, TOKENS);
        (engine.store().pool().slabs(), engine.store().stats().misses)
    });
    assert_eq!(reads[0].0, 1);
    assert!(reads[0].1 > 0);
    assert_eq!(reads[1], (4 * 8, 0), "four sparse layers of eight experts, all there the second time");
}

#[test]
fn a_hundred_random_orders_are_the_order_of_the_threads_and_of_the_ring() {
    // Two experts a token add up to the same bits in either order; the trained model's four do not.
    for model in [Model::Tiny, Model::Tales] {
        let mut setups: Vec<Setup> = (0..100)
            .map(|seed| Setup {
                reader: Reader::Shuffled(seed),
                slabs: 1 + seed as usize % 32,
                rows: [128, 1, 16, 7][seed as usize % 4],
                ..RESIDENT
            })
            .collect();
        if has_ring() {
            setups.push(Setup { reader: Reader::Ring, slabs: 3, ..RESIDENT });
        }
        let arithmetic = Arithmetic::absorbed(model, Activations::F32);
        let prompt = model.prompt(21);
        let expected = run(&arithmetic, &RESIDENT, &prompt);
        for setup in &setups {
            assert_same(&expected, &run(&arithmetic, setup, &prompt), setup);
        }
    }
}

#[test]
fn the_ring_is_the_threads() {
    if has_ring() {
        let ring = Setup { reader: Reader::Ring, slabs: 4, ..RESIDENT };
        compare(&Model::ALL, &[ring, Setup { io: IoMode::Buffered, ..ring }]);
    }
}

#[test]
fn direct_is_buffered() {
    if has(IoMode::Direct) {
        let few = Setup { slabs: 5, ..RESIDENT };
        let models = [Model::Tiny, Model::TinyInt4Groups, Model::Tales, Model::TalesInt4];
        compare(&models, &[Setup { io: IoMode::Direct, ..few }, Setup { io: IoMode::Buffered, ..few }]);
    }
}

#[test]
fn every_mode_and_device_is_everything_resident() {
    let few = Setup { slabs: 4, ..RESIDENT };
    let mut setups = vec![
        Setup { reader: Reader::Map, ..few },
        Setup { reader: Reader::Map, slabs: 1, depth: Depth::Slabs(1), chunk_bytes: Some(65536), ..few },
    ];
    let readers = if has_ring() { vec![Reader::Threads, Reader::Ring] } else { vec![Reader::Threads] };
    for io in IoMode::ALL.into_iter().filter(|io| *io != IoMode::Mmap && has(*io)) {
        for &reader in &readers {
            setups.push(Setup { io, reader, ..few });
            setups.push(Setup { io, reader, depth: Depth::Slabs(1), chunk_bytes: Some(65536), ..few });
            setups.push(Setup { io, reader, depth: Depth::Bytes(1 << 20), chunk_bytes: Some(CHUNK_WHOLE), ..few });
        }
    }
    for model in [Model::Tiny, Model::TinyInt4, Model::Tales] {
        let arithmetic = Arithmetic::absorbed(model, Activations::F32);
        let prompt = model.prompt(37);
        let expected = run(&arithmetic, &RESIDENT, &prompt);
        for setup in &setups {
            assert_same(&expected, &run(&arithmetic, setup, &prompt), setup);
        }
    }
}

#[test]
fn what_cannot_be_had_together_is_refused_before_a_file_is_read() {
    let arithmetic = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    for (io, reader) in [(IoMode::Mmap, Reader::Ring), (IoMode::Mmap, Reader::Threads), (IoMode::Drop, Reader::Map)] {
        let error = open(&arithmetic, &Setup { io, reader, ..RESIDENT }).err().unwrap();
        assert!(matches!(error, EngineError::Io(IoError::Refused { what: "mmap", .. })), "{error}");
    }
}

#[test]
fn overlap_and_lookahead_are_neither() {
    let mut setups = vec![];
    for (slabs, rows) in [(1, 16), (3, 1), (5, 128), (20, 1), (20, 3)] {
        for (pipeline, prefetch) in [
            (Switch::Off, Switch::Off),
            (Switch::Off, Switch::On),
            (Switch::On, Switch::Off),
            (Switch::On, Switch::On),
            (Switch::Auto, Switch::Auto),
        ] {
            let layers = 1 + slabs % 2;
            let from = if rows == 1 { GuessFrom::Attention } else { GuessFrom::Shared };
            setups.push(Setup {
                guess: GuessRule { from, layers },
                slabs,
                rows,
                pipeline,
                prefetch,
                reader: Reader::Slowed(slabs as u64 * 77),
                ..RESIDENT
            });
        }
    }
    for model in [Model::Tiny, Model::TalesInt4] {
        let arithmetic = Arithmetic::absorbed(model, Activations::F32);
        let prompt = model.prompt(37);
        let expected = run(&arithmetic, &RESIDENT, &prompt);
        for setup in &setups {
            assert_same(&expected, &run(&arithmetic, setup, &prompt), setup);
        }
    }
}

#[test]
fn lookahead_reads_ahead_and_finds_some_of_what_comes() {
    // Guards the test above: a guess that is never made, or never right, would make it empty.
    let arithmetic = Arithmetic::absorbed(Model::Tales, Activations::F32);
    let prompt = Model::Tales.prompt(20);
    let rules = [GuessFrom::Attention, GuessFrom::Shared].map(|from| [1, 2].map(|layers| GuessRule { from, layers }));
    let on = rules.into_iter().flatten().map(|guess| (Switch::On, guess, true));
    for (prefetch, guess, guesses) in on.chain([(Switch::Off, GuessRule::default(), false)]) {
        let mut engine = open(&arithmetic, &Setup { slabs: 24, prefetch, guess, ..RESIDENT }).unwrap();
        engines::greedy(&mut engine, &prompt, TOKENS).unwrap();
        let experts = engine.stats().experts;
        assert_eq!((experts.prefetch_issued > 0, experts.prefetch_used > 0), (guesses, guesses), "{experts:?}");
        assert_eq!(experts.hit_pinned, 0);
        assert_eq!(experts.requested, experts.hit_cached + experts.hit_prefetched + experts.missed);
        assert_eq!(experts.lookahead_recall.is_some(), guesses);
        assert_eq!(experts.lookahead_recall_two_ahead.is_some(), guesses && guess.layers == 2);
        assert!(experts.previous_token_recall.is_some(), "what a guess has to beat needs no guess");
        let free = engine.store().pool().free();
        assert_eq!(free + engine.store().resting(), engine.store().pool().slabs(), "nothing is in flight");
    }
}

#[test]
fn switches_turned_between_generations_change_no_bit() {
    let arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::F32);
    let prompt = Model::TalesInt4.prompt(37);
    let expected = run(&arithmetic, &RESIDENT, &prompt);
    // One that was opened without reading ahead has room for guesses as soon as it is to make them.
    for (slabs, prefetch) in [(1, Switch::Off), (24, Switch::Off), (24, Switch::Auto)] {
        let setup = Setup { slabs, prefetch, reader: Reader::Slowed(77), ..RESIDENT };
        let mut engine = open(&arithmetic, &setup).unwrap();
        let all = [Switch::Off, Switch::On, Switch::Auto];
        let pairs = all.into_iter().flat_map(|pipeline| all.map(|prefetch| (pipeline, prefetch)));
        for (turn, (pipeline, prefetch)) in pairs.enumerate() {
            let from = [GuessFrom::Shared, GuessFrom::Attention][turn % 2];
            let switches = Switches { pipeline, prefetch, guess: GuessRule { from, layers: 1 + turn / 2 % 2 } };
            engine.set_switches(switches).unwrap();
            assert_eq!(engine.switches(), switches);
            assert_same(&expected, &answer(&mut engine, &prompt, TOKENS), &(setup, switches));
            engines::greedy(&mut engine, &prompt, TOKENS).unwrap();
            let issued = engine.stats().experts.prefetch_issued;
            match prefetch {
                Switch::Off => assert_eq!(issued, 0, "{switches:?}"),
                // One slab is left to requests.
                Switch::On => assert_eq!(issued > 0, slabs > 1, "{switches:?}"),
                Switch::Auto => {}
            }
        }
    }
}

#[test]
fn a_rule_that_no_engine_follows_turns_nothing() {
    let arithmetic = Arithmetic::absorbed(Model::Tiny, Activations::F32);
    let mut engine = open(&arithmetic, &RESIDENT).unwrap();
    let before = engine.switches();
    for layers in [0, 3] {
        let guess = GuessRule { layers, ..GuessRule::default() };
        let refused = engine.set_switches(Switches { pipeline: Switch::Off, guess, ..before }).unwrap_err();
        assert!(matches!(refused, EngineError::Size { value, least: 1, most: 2, .. } if value == layers), "{refused}");
        assert_eq!(engine.switches(), before);
    }
}

#[test]
fn no_policy_and_no_history_changes_a_bit() {
    let few = Setup { slabs: 13, ..RESIDENT };
    let setups: Vec<Setup> = PolicyKind::ALL
        .into_iter()
        .flat_map(|policy| {
            let set = Setup { policy, ..few };
            [set, Setup { history: Some(5), ..set }, Setup { history: Some(6), pins: Switch::On, ..set }]
        })
        .collect();
    compare(&[Model::Tiny, Model::TalesInt4], &setups);
}

#[test]
fn what_is_pinned_is_read_once() {
    let arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::F32);
    let pinning = Setup { slabs: 20, history: Some(9), pins: Switch::On, prefetch: Switch::Off, ..RESIDENT };
    let mut engine = open(&arithmetic, &pinning).unwrap();
    // Half of the slabs: the history is long.
    assert_eq!(engine.store().pinned(), 10);
    let hottest = |engine: &Engine| {
        let usage = engine.store().usage();
        let mut keys: Vec<usize> = (0..usage.len()).collect();
        keys.sort_unstable_by_key(|&key| std::cmp::Reverse(usage[key]));
        keys.truncate(10);
        // Layers 1 to 5 of 32 experts.
        keys.into_iter()
            .map(|key| ExpertKey { layer: 1 + key as u16 / 32, expert: key as u16 % 32 })
            .collect::<Vec<_>>()
    };
    let pins = hottest(&engine);
    assert!(pins.iter().all(|&key| engine.store().tier(key) == Tier::Disk), "nothing is read before it is asked for");
    answer(&mut engine, &Model::TalesInt4.prompt(100), 30);
    answer(&mut engine, &Model::TalesInt4.prompt(100)[50..], 30);
    let experts = engine.stats().experts;
    assert!(experts.hit_pinned > 0, "{experts:?}");
    assert_eq!(experts.requested, experts.hit_pinned + experts.hit_cached + experts.missed);
    let there = pins.iter().filter(|&&key| engine.store().tier(key) == Tier::Pinned).count();
    assert!(there > 5, "{there} of the pins were asked for and stayed");
    assert!(pins.iter().all(|&key| engine.store().tier(key) != Tier::Cached));
}

#[test]
fn one_thread_is_two_or_three() {
    let few = Setup { slabs: 6, ..RESIDENT };
    compare(&Model::ALL, &[2, 3].map(|threads| Setup { threads, ..few }));
}

#[test]
fn a_batch_of_rows_is_one_by_one() {
    compare(&Model::ALL, &[1, 3, 16].map(|rows| Setup { rows, ..RESIDENT }));
}

#[test]
fn chunks_of_a_long_prompt_are_the_whole() {
    // More than a block of scores, and than the largest chunk.
    for arithmetic in Arithmetic::all(Model::TalesInt4) {
        let prompt = Model::TalesInt4.prompt(140);
        let setups = [1, 3, 128].map(|rows| Setup { rows, threads: 2, ..RESIDENT });
        let answers = setups.map(|setup| run(&arithmetic, &setup, &prompt));
        assert_same(&answers[0], &answers[1], &arithmetic);
        assert_same(&answers[0], &answers[2], &arithmetic);
    }
}

#[test]
fn decoding_is_prefill_of_the_same_tokens() {
    for arithmetic in Model::ALL.into_iter().flat_map(Arithmetic::all) {
        let mut engine = open(&arithmetic, &RESIDENT).unwrap();
        let mut tokens = arithmetic.model.prompt(21);
        let generated = answer(&mut engine, &tokens, 24).ids;
        tokens.extend(&generated);
        let logits = engine.score(&tokens).unwrap();
        let best = logits[20 * arithmetic.model.vocab() as usize..]
            .chunks_exact(arithmetic.model.vocab() as usize)
            .map(|row| row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best }) as u32);
        assert_eq!(best.take(24).collect::<Vec<_>>(), generated, "{arithmetic:?}");
    }
}

#[test]
fn every_instruction_set_is_the_scalar_definition() {
    let isas = Kernels::all_available().into_iter().map(|k| k.isa);
    let setups: Vec<Setup> = isas.map(|isa| Setup { isa: Some(isa), ..RESIDENT }).collect();
    println!("{:?}", setups.iter().map(|s| s.isa).collect::<Vec<_>>());
    compare(&Model::ALL, &setups);
}

#[test]
fn warm_is_cold() {
    for arithmetic in Model::ALL.into_iter().flat_map(Arithmetic::all) {
        let mut engine = open(&arithmetic, &Setup { slabs: 9, ..RESIDENT }).unwrap();
        let (first, other) = (arithmetic.model.prompt(30), arithmetic.model.prompt(45));
        let cold = answer(&mut engine, &first, TOKENS);
        answer(&mut engine, &other[7..], TOKENS);
        assert_same(&cold, &answer(&mut engine, &first, TOKENS), &arithmetic);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_combination_of_toggles_gives_the_same_bits(
        which in any::<prop::sample::Index>(),
        length in 1..50usize,
        slabs in prop_oneof![Just(1), 2..40usize],
        reader in prop_oneof![
            Just(Reader::Threads),
            any::<u64>().prop_map(Reader::Shuffled),
            any::<u64>().prop_map(Reader::Slowed),
        ],
        pipeline in prop::sample::select(vec![Switch::Auto, Switch::On, Switch::Off]),
        prefetch in prop::sample::select(vec![Switch::Auto, Switch::On, Switch::Off]),
        from in prop::sample::select(vec![GuessFrom::Attention, GuessFrom::Shared]),
        layers in 1..3usize,
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        pins in prop::sample::select(vec![Switch::Auto, Switch::On, Switch::Off]),
        history in prop_oneof![Just(None), (0..1u64 << 32).prop_map(Some)],
        io in prop::sample::select(vec![IoMode::Auto, IoMode::Buffered, IoMode::Drop]),
        depth in prop_oneof![Just(Depth::Auto), (1..5u32).prop_map(Depth::Slabs), (1..9u64).prop_map(|n| Depth::Bytes(n << 16))],
        chunk in prop::sample::select(vec![None, Some(65536), Some(1 << 20), Some(CHUNK_WHOLE)]),
        threads in 1..5usize,
        rows in prop::sample::select(vec![1, 2, 3, 8, 33, 128]),
        isa in any::<prop::sample::Index>(),
        warm in any::<bool>(),
        drafts in prop_oneof![Just(RESIDENT.drafts), (1..9usize, any::<bool>()).prop_map(|(most, ngram)| DraftRule { source: if ngram { DraftSource::Ngram } else { DraftSource::Mtp }, most })],
    ) {
        let all: Vec<Arithmetic> = Model::ALL.into_iter().flat_map(Arithmetic::all).collect();
        let arithmetic = which.get(&all);
        // The second half of it is the first, so that there are drafts.
        let prompt = arithmetic.model.prompt(length.div_ceil(2)).repeat(2);
        let isas = Kernels::all_available();
        let setup = Setup {
            slabs,
            reader,
            io,
            depth,
            chunk_bytes: chunk,
            threads,
            rows,
            isa: Some(isa.get(&isas).isa),
            pipeline,
            prefetch,
            guess: GuessRule { from, layers },
            policy,
            pins,
            history,
            widths: RESIDENT.widths,
            drafts,
        };
        let mut engine = open(arithmetic, &setup).unwrap();
        if warm {
            answer(&mut engine, &arithmetic.model.prompt(9), 3);
        }
        assert_same(&run(arithmetic, &RESIDENT, &prompt), &answer(&mut engine, &prompt, TOKENS), &(arithmetic, setup));
    }
}
