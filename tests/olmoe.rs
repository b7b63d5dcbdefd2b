//! OLMoE: what its config.json says, what its checkpoints must hold, in which types, and what memory it takes.
//! That it computes what transformers computes is `golden`'s; that nothing changes its bits, `streamed`'s.
// An engine's error is large, and made once at most.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::fs;
use std::path::Path;

use millstream::checkpoint::arch::{AttentionArch, Family, FullArch, MlpKind, RopePairs, Scoring};
use millstream::checkpoint::{Arch, Checkpoint, CheckpointError};
use millstream::engine::{Activations, AttentionForm, Dsa, Engine, EngineConfig, EngineError};
use safetensors::{Model, Tensor, tiny_olmoe};
use serde_json::{Map, Value, json};

fn config(edit: impl FnOnce(&mut Map<String, Value>)) -> Result<Arch, CheckpointError> {
    let mut value: Value = serde_json::from_slice(&fs::read(tiny_olmoe().join("config.json")).unwrap()).unwrap();
    edit(value.as_object_mut().unwrap());
    Arch::parse(value.to_string().as_bytes(), None)
}

fn open(dir: &Path, config: EngineConfig) -> Result<Engine, EngineError> {
    Engine::open(Checkpoint::open(dir).unwrap(), &config)
}

fn logits(dir: &Path) -> Vec<u32> {
    let config = EngineConfig { activations: Activations::F32, ..EngineConfig::new(1 << 30) };
    let logits = open(dir, config).unwrap().score(&[65, 8, 31, 41, 75, 101]).unwrap();
    logits.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn the_published_shape_is_read_as_it_is_meant() {
    // Facts of OLMoE-1B-7B, in the older spelling of its rotary base.
    let text = r#"{"model_type":"olmoe","hidden_size":2048,"intermediate_size":1024,"num_hidden_layers":16,
        "num_attention_heads":16,"num_key_value_heads":16,"num_experts":64,"num_experts_per_tok":8,"norm_topk_prob":false,
        "vocab_size":50304,"max_position_embeddings":4096,"rms_norm_eps":1e-05,"rope_theta":10000.0,"rope_scaling":null,
        "clip_qkv":null,"attention_bias":false,"hidden_act":"silu","tie_word_embeddings":false,"eos_token_id":50279}"#;
    let arch = Arch::parse(text.as_bytes(), None).unwrap();
    assert_eq!(arch.family, Family::Olmoe);
    assert_eq!((arch.hidden, arch.vocab, arch.layers.len(), arch.max_context), (2048, 50304, 16, 4096));
    assert!(arch.layers.iter().all(|layer| layer.mlp == MlpKind::Sparse) && arch.mtp.is_none());
    assert_eq!(arch.attention, AttentionArch::Full(FullArch { heads: 16, kv_heads: 16, dim: 128, clip: None }));
    assert_eq!((arch.attention.cached(), arch.rope_pairs, arch.rope_theta), (4096, RopePairs::Halves, 10000.0));
    let moe = &arch.moe;
    assert_eq!((moe.experts, moe.top_k, moe.width, moe.shared_width), (64, 8, 1024, 0));
    assert_eq!((moe.scoring, moe.router_bias, moe.normalize, moe.scaling), (Scoring::Softmax, false, false, 1.0));
    assert_eq!(arch.stop_ids, [50279]);

    // 6.9 billion weights: 64 experts of 3 x 1024 x 2048 in each layer, four square matrices, the router, the table twice.
    let experts = 16 * 64 * 3 * 1024 * 2048usize;
    let rest = 16 * (4 * 2048 * 2048 + 64 * 2048 + 4 * 2048) + 2 * 50304 * 2048 + 2048;
    let listed: usize = Checkpoint::required(&arch)
        .iter()
        .map(|tensor| match tensor.shape {
            millstream::checkpoint::Shape::Vector(len) => len,
            millstream::checkpoint::Shape::Matrix { rows, cols } => rows * cols,
        })
        .sum();
    assert_eq!((listed, experts + rest), (rest, 6_919_161_856));
}

#[test]
fn what_the_format_leaves_open_is_what_it_means_by_it() {
    let absent = |field: &str| {
        let arch = config(|c| {
            c.remove(field);
        });
        arch.unwrap_or_else(|error| panic!("without {field}: {error}"))
    };
    let AttentionArch::Full(attention) = absent("num_key_value_heads").attention else { panic!("the kind") };
    assert_eq!(attention.kv_heads, 4, "as many as query heads");
    assert_eq!(absent("clip_qkv"), config(|_| {}).unwrap());
    assert!(!absent("tie_word_embeddings").tied_head);
}

#[test]
fn a_config_that_says_too_little_or_too_much_is_refused_by_field() {
    let gone = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts", "num_experts_per_tok"];
    for field in gone.into_iter().chain(["intermediate_size", "vocab_size", "rms_norm_eps", "norm_topk_prob"]) {
        let error = config(|c| {
            c.remove(field);
        })
        .unwrap_err()
        .to_string();
        assert!(error.contains("config.json") && error.contains(field) && error.contains("nothing"), "{error}");
    }
    let cases: [(&str, Value, &[&str]); 15] = [
        ("rope_parameters", Value::Null, &["rope_parameters.rope_theta", "nothing"]),
        ("rope_parameters", json!({"rope_type": "yarn", "rope_theta": 1e4}), &["rope_type", "yarn"]),
        ("hidden_size", json!("64"), &["hidden_size", "\"64\""]),
        ("num_experts", json!(0), &["num_experts", "1 to"]),
        ("num_experts_per_tok", json!(9), &["num_experts_per_tok", "1 to 8", "9"]),
        ("num_attention_heads", json!(5), &["num_attention_heads", "hidden_size (64)", "5"]),
        ("num_attention_heads", json!(64), &["num_attention_heads", "even width"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "a divisor of num_attention_heads (4)", "3"]),
        ("num_key_value_heads", json!(8), &["num_key_value_heads", "1 to 4", "8"]),
        ("head_dim", json!(32), &["head_dim", "16", "32"]),
        ("clip_qkv", json!(-8.0), &["clip_qkv", "positive", "-8"]),
        // As an f32 it would make every query and key 0.
        ("clip_qkv", json!(1e-50), &["clip_qkv", "a float32", "0"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "silu"]),
        ("attention_bias", json!(true), &["attention_bias", "false"]),
        ("quantization_config", json!({"quant_method": "awq"}), &["quant_method", "awq"]),
    ];
    for (field, value, parts) in cases {
        let error = config(|c| {
            c.insert(field.to_owned(), value);
        })
        .unwrap_err();
        assert!(!error.hint().is_empty());
        for part in parts {
            assert!(error.to_string().contains(part), "no {part} in: {error}");
        }
    }
}

#[test]
fn a_tensor_that_is_missing_or_of_another_shape_is_refused_by_file_and_name() {
    let refused = |edit: &dyn Fn(&Model), parts: &[&str]| {
        let model = Model::copy_of(tiny_olmoe());
        edit(&model);
        let error = Checkpoint::open(model.path()).map(|_| ()).unwrap_err();
        assert!(!error.hint().is_empty());
        for part in parts {
            assert!(error.to_string().contains(part), "no {part} in: {error}");
        }
    };
    for (name, shape) in [
        ("model.layers.0.self_attn.q_norm.weight", "a vector [64]"),
        ("model.layers.3.self_attn.k_norm.weight", "a vector [64]"),
        ("model.layers.2.self_attn.v_proj.weight", "a matrix [64, 64]"),
        ("model.layers.1.mlp.gate.weight", "a matrix [8, 64]"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "a matrix [64, 64]"),
        ("lm_head.weight", "a matrix [272, 64]"),
    ] {
        let remove = |model: &Model| {
            model.edit_shard(|shard| {
                shard.remove(name);
            });
        };
        refused(&remove, &[name, shape]);
    }
    let cases: [(&str, &str, &[u64], &[&str]); 5] = [
        ("model.layers.0.self_attn.q_norm.weight", "BF16", &[16], &["expected [64]", "found [16]"]),
        ("model.layers.1.self_attn.k_norm.weight", "BF16", &[1], &["expected [64]", "found [1]"]),
        ("model.layers.1.self_attn.k_proj.weight", "BF16", &[32, 64], &["[64, 64]", "[32, 64]"]),
        ("model.layers.2.mlp.gate.weight", "BF16", &[9, 64], &["[8, 64]", "[9, 64]"]),
        ("model.layers.2.self_attn.o_proj.weight", "I16", &[64, 64], &["dtype", "I16"]),
    ];
    for (name, dtype, shape, parts) in cases {
        let bytes = shape.iter().product::<u64>() as usize * 2;
        let replace = |model: &Model| {
            let tensor = Tensor::new(name, dtype, shape, vec![0; bytes]);
            model.edit_shard(|shard| *shard.get_mut(name) = tensor.clone());
        };
        refused(&replace, &[&[name, "model.safetensors"], parts].concat());
    }
    // A config of fewer key-value heads than the weights have.
    let fewer = |model: &Model| {
        model.edit_config(|c| {
            c.insert("num_key_value_heads".to_owned(), json!(2));
        });
    };
    refused(&fewer, &["model.layers.0.self_attn.k_proj.weight", "[32, 64]", "[64, 64]"]);
}

#[test]
fn f32_and_bf16_of_the_same_values_give_the_same_bits() {
    let model = Model::copy_of(tiny_olmoe());
    model.edit_shard(|shard| {
        for tensor in &mut shard.tensors {
            assert_eq!(tensor.dtype, "BF16");
            // A BF16 value is the upper half of the F32 of the same value.
            tensor.data = tensor.data.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
            tensor.dtype = "F32".to_owned();
        }
    });
    assert_eq!(logits(model.path()), logits(tiny_olmoe()));
}

#[test]
fn the_budget_counts_the_keys_and_values_of_every_layer() {
    let kv = |dir: &Path, context: usize| {
        let config = EngineConfig { context: Some(context), ..EngineConfig::new(1 << 30) };
        let budget = Engine::plan(&Checkpoint::open(dir).unwrap(), &config).unwrap();
        assert_eq!(budget.reconstruction, 0, "there is no latent to rebuild from");
        budget.kv
    };
    // 4 layers, 64 keys and 64 values of 4 bytes for a position.
    assert_eq!(kv(tiny_olmoe(), 512), 4 * 512 * (64 + 64) * 4);
    // 3 layers, 2 of 4 heads of width 8.
    let grouped = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-olmoe-grouped");
    assert_eq!(kv(&grouped, 200), 3 * 200 * (16 + 16) * 4);
}

#[test]
fn what_only_latent_attention_has_is_refused_before_a_weight_is_read() {
    for attention in [AttentionForm::Absorbed, AttentionForm::Explicit] {
        let error = open(tiny_olmoe(), EngineConfig { attention, ..EngineConfig::new(1 << 30) }).err().unwrap();
        assert!(matches!(error, EngineError::OneForm), "{error}");
        assert!(error.hint().unwrap().contains("--attention"));
    }
    let error = open(tiny_olmoe(), EngineConfig { dsa: Dsa::On, ..EngineConfig::new(1 << 30) }).err().unwrap();
    assert!(matches!(error, EngineError::NoIndexer), "{error}");
}

#[test]
fn every_command_takes_the_family() {
    let home = tempfile::tempdir().unwrap();
    let container = home.path().join("container");
    let run = |words: &[&str], model: &Path| {
        let output = program::program(home.path()).args(words).arg("-m").arg(model).output().unwrap();
        program::done(output)
    };
    let convert = ["convert", "--experts", "4", "--dense", "8"];
    let output = program::program(home.path()).args(convert).arg(tiny_olmoe()).arg(&container).output().unwrap();
    program::done(output);
    for model in [tiny_olmoe(), &container] {
        let prompt = ["-p", "65,8,31", "--ids", "-n", "6", "--temp", "0", "--ignore-eos"];
        let answer = run(&[&["run", "-q"], &prompt[..]].concat(), model);
        assert_eq!(program::stdout(&answer).split_whitespace().count(), 6, "{}", program::stdout(&answer));
        let text = run(&["run", "-q", "--raw", "-p", "Once", "-n", "4", "--ignore-eos"], model);
        assert!(!program::stdout(&text).is_empty());
        assert!(program::stdout(&run(&["doctor"], model)).contains("olmoe, 4 layers, 2 of 8 experts"));
        assert!(program::stdout(&run(&["plan", "-c", "512"], model)).contains("1.0 MB KV"));
        run(&[&["profile"], &prompt[..]].concat(), model);
        let form = ["run", "--ids", "-p", "65", "--attention", "explicit", "-m"];
        let output = program::program(home.path()).args(form).arg(model).output().unwrap();
        program::refused(&output, 2, &["no other form", "leave --attention out"]);
        let trace = home.path().join("trace");
        run(&[&["trace", "record", trace.to_str().unwrap()], &prompt[..]].concat(), model);
    }
}
