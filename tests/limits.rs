//! Models at every bound of the engine run, and one step beyond it the configuration is refused by name.
//!
//! Weights are zeros, which costs no disk: the shard is a header and a hole.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use millstream::checkpoint::arch::MlpKind;
use millstream::checkpoint::{Arch, Checkpoint, Shape};
use millstream::engine::sampler::Sampling;
use millstream::engine::{AttentionForm, Engine, EngineConfig, Job, Memory};
use serde_json::{Map, Value, json};

type Config = Map<String, Value>;

/// The smallest model with every kind of part: a dense layer, a routed one, an indexer that selects.
fn small() -> Config {
    let config = json!({
        "model_type": "glm_moe_dsa", "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 4, "index_n_heads": 1, "index_head_dim": 4, "index_topk": 1, "n_routed_experts": 2,
        "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "intermediate_size": 8,
        "first_k_dense_replace": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "max_position_embeddings": 64,
    });
    config.as_object().unwrap().clone()
}

fn with(changes: &[(&str, u64)]) -> Config {
    let mut config = small();
    for (field, value) in changes {
        config.insert((*field).to_owned(), Value::from(*value));
    }
    config
}

fn parse(config: &Config) -> Result<Arch, String> {
    Arch::parse(Value::from(config.clone()).to_string().as_bytes(), None).map_err(|e| e.to_string())
}

/// Names and shapes of all tensors, the routed experts included.
fn tensors(arch: &Arch) -> Vec<(String, Vec<usize>)> {
    let shape = |shape: &Shape| match *shape {
        Shape::Vector(len) => vec![len],
        Shape::Matrix { rows, cols } => vec![rows, cols],
    };
    let mut all: Vec<_> = Checkpoint::required(arch).iter().map(|t| (t.name.clone(), shape(&t.shape))).collect();
    for (layer, kind) in arch.layers.iter().enumerate() {
        for expert in 0..if kind.mlp == MlpKind::Sparse { arch.moe.experts } else { 0 } {
            let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
            all.push((name("gate"), vec![arch.moe.width, arch.hidden]));
            all.push((name("up"), vec![arch.moe.width, arch.hidden]));
            all.push((name("down"), vec![arch.hidden, arch.moe.width]));
        }
    }
    all
}

fn write(dir: &Path, config: &Config, arch: &Arch) {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors(arch) {
        let begin = end;
        end += 2 * shape.iter().product::<usize>() as u64;
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}));
    }
    let header = Value::from(header).to_string();
    let shard = dir.join("model.safetensors");
    fs::write(&shard, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(8 + header.len() as u64 + end).unwrap();
    fs::write(dir.join("config.json"), Value::from(config.clone()).to_string()).unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
}

/// Three positions of prompt and one of answer, in both forms of attention.
fn run(config: &Config) {
    let arch = parse(config).unwrap();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write(dir.path(), config, &arch);
    for attention in [AttentionForm::Absorbed, AttentionForm::Explicit] {
        let config = EngineConfig {
            memory: Memory::Slabs(2),
            context: Some(4),
            prefill_rows: 2,
            attention,
            ..EngineConfig::new(1 << 40)
        };
        let mut engine = Engine::open(Checkpoint::open(dir.path()).unwrap(), &config).unwrap();
        let last = arch.vocab as u32 - 1;
        let job = Job { prompt: vec![0, 1, last], max_tokens: 1, sampling: Sampling::greedy(), stop_ids: vec![] };
        let outcome = engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(outcome.ids, [0], "all logits are 0 and the lowest id wins");
    }
}

/// Runs the model at the bound, and sees the one beyond it refused with a message that names `field` and `bound`.
#[track_caller]
fn assert_bound(field: &str, bound: u64, at: &[(&str, u64)], beyond: &[(&str, u64)]) {
    let refused = parse(&with(beyond)).unwrap_err();
    assert!(refused.contains(field) && refused.contains(&bound.to_string()), "{refused}");
    run(&with(at));
}

#[test]
fn a_latent_as_wide_as_the_stack_row_runs_and_a_wider_one_is_no_panic() {
    assert_bound("kv_lora_rank", 2048, &[("kv_lora_rank", 2048)], &[("kv_lora_rank", 2049)]);
}

#[test]
fn a_rotation_as_wide_as_the_stack_row_runs_and_a_wider_one_is_no_panic() {
    let rope = |rope| [("qk_rope_head_dim", rope), ("index_head_dim", 1024)];
    assert_bound("qk_rope_head_dim", 512, &rope(512), &rope(514));
}

#[test]
fn as_many_groups_as_the_router_sums_run_and_one_more_is_no_panic() {
    let groups = |n| [("n_routed_experts", 2 * n), ("n_group", n), ("topk_group", 2)];
    assert_bound("n_group", 256, &groups(256), &groups(257));
}

#[test]
fn every_matrix_input_may_be_as_wide_as_an_integer_sum_allows_and_no_wider() {
    let most = 1 << 17;
    for field in ["q_lora_rank", "intermediate_size", "moe_intermediate_size"] {
        assert_bound(field, most, &[(field, most)], &[(field, most + 1)]);
    }
    // Products: heads times value, shared experts times their width.
    let heads = |heads, value| [("num_attention_heads", heads), ("v_head_dim", value)];
    assert_bound("num_attention_heads * v_head_dim", most, &heads(4096, 32), &heads(3, 43_691));
    let shared = |n, width| [("n_shared_experts", n), ("moe_intermediate_size", width)];
    assert_bound("n_shared_experts * moe_intermediate_size", most, &shared(2, 1 << 16), &shared(3, 43_691));
    // Two hidden vectors are one input of the MTP layer.
    assert_bound("hidden_size", most / 2, &[("hidden_size", most / 2)], &[("hidden_size", most / 2 + 1)]);
}

#[test]
fn head_shapes_run_at_their_bounds() {
    for (field, most) in [
        ("num_attention_heads", 1 << 12),
        ("qk_nope_head_dim", 1 << 17),
        ("index_n_heads", 1 << 12),
        ("index_head_dim", 1 << 17),
    ] {
        assert_bound(field, most, &[(field, most)], &[(field, most + 1)]);
    }
    assert_bound("v_head_dim", 1 << 17, &[("v_head_dim", 1 << 17)], &[("v_head_dim", (1 << 17) + 1)]);
}

#[test]
fn counts_run_at_their_bounds() {
    // The MTP layer is counted whether there is one or not.
    assert_bound("num_hidden_layers", 1023, &[("num_hidden_layers", 1023)], &[("num_hidden_layers", 1024)]);
    assert_bound("n_routed_experts", 1 << 14, &[("n_routed_experts", 1 << 14)], &[("n_routed_experts", (1 << 14) + 1)]);
    let chosen = |k| [("n_routed_experts", 128), ("num_experts_per_tok", k)];
    assert_bound("num_experts_per_tok", 64, &chosen(64), &chosen(65));
    assert_bound("vocab_size", 1 << 22, &[("vocab_size", 1 << 22)], &[("vocab_size", (1 << 22) + 1)]);
    assert_bound("index_topk", 1 << 21, &[("index_topk", 1 << 21)], &[("index_topk", (1 << 21) + 1)]);
}

#[test]
fn a_declared_context_beyond_the_engines_is_the_engines() {
    let declared = with(&[("max_position_embeddings", 1 << 40)]);
    assert_eq!(parse(&declared).unwrap().max_context, 1 << 21);
    run(&declared);
}
