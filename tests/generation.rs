//! What an engine says of its generations: counts, rates and times, from the first to the last of its life.

// An engine's error is large, and made a few times here.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use millstream::checkpoint::Checkpoint;
use millstream::engine::sampler::Sampling;
use millstream::engine::{
    AttentionForm, Engine, EngineConfig, EngineError, Finish, Forced, Job, KvBits, Memory, Outcome,
};

fn checkpoint() -> Checkpoint {
    Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap()
}

fn engine(change: impl FnOnce(&mut EngineConfig)) -> Engine {
    let mut config = EngineConfig::new(1 << 30);
    change(&mut config);
    Engine::open(checkpoint(), &config).unwrap()
}

fn job(max_tokens: usize) -> Job {
    let prompt = vec![4086, 4088, 2650, 680, 258, 537, 438, 1162, 258, 437];
    Job { prompt, max_tokens, sampling: Sampling::greedy(), stop_ids: vec![] }
}

fn generate(engine: &mut Engine, job: &Job) -> Outcome {
    engine.generate(job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn every_generation_counts_its_own_reads() {
    // Eight slabs: every generation reads, and the same experts each time but for what the first left behind.
    let mut engine = engine(|c| c.memory = Memory::Slabs(8));
    for _ in 0..4 {
        generate(&mut engine, &job(12));
        let stats = engine.stats();
        let experts = &stats.experts;
        assert_eq!(stats.io.reads, experts.missed + experts.hit_prefetched + experts.prefetch_wasted);
        assert_eq!(experts.requested, experts.missed + experts.hit_cached + experts.hit_prefetched);
        assert_eq!(
            experts.prefetch_issued,
            experts.prefetch_used + experts.prefetch_cancelled + experts.prefetch_wasted
        );
        assert!(stats.io.busy_s <= stats.wall_s, "busy {} s of {} s", stats.io.busy_s, stats.wall_s);
        let expert = stats.io.useful_bytes / stats.io.reads;
        // FP8: three matrices of 32,768 bytes; their scales, of 8 bytes each, lie apart and stay in memory.
        assert_eq!(expert, 3 * 32_768);
        assert!(stats.io.bytes >= stats.io.useful_bytes);
    }
}

#[test]
fn a_model_is_not_loaded_any_further_once_the_flag_is_up() {
    let open = |cancel| Engine::open_until(checkpoint(), &EngineConfig::new(1 << 30), &AtomicBool::new(cancel));
    assert!(open(true).map(|_| ()).unwrap_err().is_cancelled());
    let mut engine = open(false).unwrap();
    assert_eq!(generate(&mut engine, &job(3)).finish, Finish::Length);
}

#[test]
fn stages_add_up_to_the_wall_and_the_wall_to_prefill_and_decode() {
    let mut engine = engine(|_| ());
    generate(&mut engine, &job(8));
    let stats = engine.stats();
    assert!((stats.stages.busy_s() - stats.wall_s).abs() < 1e-9);
    assert!((stats.prefill_s + stats.decode_s - stats.wall_s).abs() < 1e-9);
    assert!(stats.ttft_s.unwrap() >= stats.prefill_s);
}

#[test]
fn decode_counts_the_steps_that_were_taken() {
    let mut engine = engine(|_| ());
    let ids = generate(&mut engine, &job(6)).ids;
    // Six tokens by length: the last never goes back into the model.
    assert_eq!((engine.stats().tokens, engine.stats().decode_steps), (6, 5));
    // The second token as a stop: one was given and went back, to find the stop.
    let stopped = Job { stop_ids: vec![ids[1]], ..job(6) };
    let outcome = generate(&mut engine, &stopped);
    assert_eq!((outcome.ids, outcome.finish), (ids[..1].to_vec(), Finish::Stop));
    let stats = engine.stats();
    assert_eq!((stats.tokens, stats.decode_steps), (1, 1));
    assert!(stats.decode_tok_s.is_some());
    // The first token as a stop: no token, and no time to one.
    let outcome = generate(&mut engine, &Job { stop_ids: vec![ids[0]], ..job(6) });
    assert!(outcome.ids.is_empty());
    let stats = engine.stats();
    assert_eq!((stats.ttft_s, stats.decode_tok_s), (None, None));
}

#[test]
fn an_interrupted_prompt_is_all_prefill_and_leaves_the_engine_whole() {
    let mut engine = engine(|_| ());
    let whole = generate(&mut engine, &job(6));
    let cancel = AtomicBool::new(true);
    let outcome = engine.generate(&job(6), &cancel, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((outcome.ids, outcome.finish), (vec![], Finish::Interrupted));
    let stats = engine.stats();
    assert_eq!((stats.decode_s, stats.ttft_s), (0.0, None));
    assert_eq!(stats.prefill_s, stats.wall_s);
    // Raised while the third token is shown: the step after it is not finished.
    cancel.store(false, Ordering::Relaxed);
    let mut shown = 0;
    let mut raise = |_| {
        shown += 1;
        cancel.store(shown == 3, Ordering::Relaxed);
        ControlFlow::Continue(())
    };
    let outcome = engine.generate(&job(6), &cancel, &mut raise).unwrap();
    assert_eq!((outcome.ids, outcome.finish), (whole.ids[..3].to_vec(), Finish::Interrupted));
    assert_eq!(generate(&mut engine, &job(6)), whole);
}

#[test]
fn a_seed_gives_the_same_tokens_cold_and_warm_whatever_is_in_memory_and_another_seed_gives_others() {
    let sampled =
        |seed| Job { sampling: Sampling { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed }, ..job(16) };
    let mut resident = engine(|_| {});
    let expected: Vec<Vec<u32>> = (0..4).map(|seed| generate(&mut resident, &sampled(seed)).ids).collect();
    for (seed, ids) in expected.iter().enumerate() {
        assert_eq!(ids.len(), 16);
        assert!(expected[..seed].iter().all(|other| other != ids), "seed {seed} is another's");
    }
    for slabs in [1, 7] {
        let mut warm = engine(|config| config.memory = Memory::Slabs(slabs));
        // In any order, one after the other, and the same once more.
        for seed in [3, 0, 2, 2, 1] {
            assert_eq!(generate(&mut warm, &sampled(seed)).ids, expected[seed as usize], "seed {seed}");
        }
        let mut cold = engine(|config| config.memory = Memory::Slabs(slabs));
        assert_eq!(generate(&mut cold, &sampled(2)).ids, expected[2]);
    }
}

#[test]
fn chunks_change_no_bit_under_the_default_form_of_attention() {
    let prompt: Vec<u32> = (0..140).map(|i| (i * 37 + 5) % 4000).collect();
    let score = |rows| engine(|c| c.prefill_rows = rows).score(&prompt).unwrap();
    let whole = score(128);
    for rows in [1, 63, 100] {
        let chunked = score(rows);
        let same = whole.iter().zip(&chunked).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "chunks of {rows}");
    }
    // Nor does the length of what follows.
    let shorter = engine(|_| ()).score(&prompt[..50]).unwrap();
    assert!(shorter.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn chunks_of_which_attention_takes_a_part_at_a_time_change_no_bit() {
    // More rows than attention takes together, the later ones beyond the 256 positions that are kept for each.
    let prompt: Vec<u32> = (0..1100).map(|i| (i * i * 31 + i * 17 + 5) % 4000).collect();
    let job = Job { prompt, ..job(4) };
    for (attention, kv_bits) in [
        (AttentionForm::Absorbed, KvBits::Bits32),
        (AttentionForm::Absorbed, KvBits::Bits16),
        (AttentionForm::Explicit, KvBits::Bits32),
    ] {
        let answer = |rows, threads, slabs| {
            let mut engine = engine(|c| {
                (c.attention, c.kv_bits) = (attention, kv_bits);
                (c.prefill_rows, c.threads, c.memory) = (rows, threads, Memory::Slabs(slabs));
            });
            let ids = generate(&mut engine, &job).ids;
            (ids, engine.logits().iter().map(|logit| logit.to_bits()).collect::<Vec<u32>>())
        };
        let expected = answer(100, 1, 200);
        for (rows, threads, slabs) in [(1100, 1, 200), (2048, 2, 20), (600, 3, 1)] {
            assert!(
                answer(rows, threads, slabs) == expected,
                "{attention:?}, {kv_bits:?}, {rows} rows, {threads} threads"
            );
        }
    }
}

#[test]
fn sizes_no_engine_can_have_are_refused_at_open() {
    let refused = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = EngineConfig::new(1 << 30);
        change(&mut config);
        Engine::open(checkpoint(), &config).map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(refused(&|c| c.threads = 0), "0 compute threads: there must be 1 to 1024");
    assert_eq!(refused(&|c| c.prefill_rows = 0), "0 rows of a prefill chunk: there must be 1 to 2048");
    assert_eq!(refused(&|c| c.prefill_rows = 2049), "2049 rows of a prefill chunk: there must be 1 to 2048");
    assert!(refused(&|c| c.memory = Memory::Slabs(0)).starts_with("0 slabs: there must be 1"));
}

#[test]
fn tokens_that_are_forced_leave_the_logits_that_scoring_them_gives() {
    let tokens: Vec<u32> = (0..40u32).map(|i| (i * i * 31 + i * 17 + 5) % 4096).collect();
    // One form of attention, so that a prompt and an answer are the same arithmetic.
    let open = || engine(|c| (c.attention, c.memory) = (AttentionForm::Absorbed, Memory::Slabs(20)));
    let vocab = 4096;
    let scores = open().score(&tokens).unwrap();
    let after = |position: usize| &scores[(position - 1) * vocab..position * vocab];
    let mut engine = open();
    let not = AtomicBool::new(false);
    let mut force = |keep, prompt: &[u32], answer: &[u32]| {
        let forced = Forced { keep, prompt, answer };
        engine.force(&forced, &not, &mut ()).map(|_| (engine.logits().to_vec(), engine.stats()))
    };
    let (logits, stats) = force(0, &tokens[..20], &tokens[20..30]).unwrap();
    assert_eq!(logits, after(30));
    assert_eq!((stats.prompt_tokens, stats.decode_steps), (20, 10));
    // What stays is what went through before: 25 positions, of which 5 came one by one.
    let (logits, stats) = force(25, &[], &tokens[25..40]).unwrap();
    assert_eq!(logits, after(40));
    assert_eq!((stats.prompt_tokens, stats.decode_steps), (0, 15));
    assert_eq!(force(10, &tokens[10..35], &[]).unwrap().0, after(35));
    assert!(matches!(force(36, &[1], &[]), Err(EngineError::NothingToKeep { keep: 36, positions: 35 })));
    assert!(matches!(force(0, &[4096], &[]), Err(EngineError::TokenOutOfRange { id: 4096, .. })));
    let long = vec![1; 5000];
    assert!(matches!(force(35, &long, &[]), Err(EngineError::PromptTooLong { tokens: 5035, .. })));
    assert_eq!(force(35, &tokens[35..36], &[]).unwrap().0, after(36), "a refusal forgets nothing");
}

#[test]
fn what_a_model_chose_can_be_forced_on_it() {
    let mut engine = engine(|_| ());
    let job = job(10);
    let chosen = generate(&mut engine, &job).ids;
    for count in 1..chosen.len() {
        let forced = Forced { keep: 0, prompt: &job.prompt, answer: &chosen[..count] };
        engine.force(&forced, &AtomicBool::new(false), &mut ()).unwrap();
        let logits = engine.logits();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        assert_eq!(best as u32, chosen[count]);
    }
}
