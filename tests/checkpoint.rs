//! Real checkpoints open, and what they say comes out of them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use millstream::checkpoint::arch::{Family, IndexerKind, MlpKind};
use millstream::checkpoint::{Arch, Checkpoint};
use millstream::kernels::Format;
use std::path::Path;

fn tiny() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-glm-moe-dsa"))
}

#[test]
fn the_tiny_model_opens_as_its_config_says() {
    let checkpoint = Checkpoint::open(tiny()).unwrap();
    let arch = &checkpoint.arch;
    assert_eq!(arch.family, Family::GlmMoeDsa);
    assert_eq!((arch.hidden, arch.vocab, arch.layers.len()), (64, 272, 5));
    assert_eq!(arch.layers[0].mlp, MlpKind::Dense { width: 64 });
    assert!(arch.layers[1..].iter().all(|layer| layer.mlp == MlpKind::Sparse));
    let full: Vec<bool> = arch.layers.iter().map(|layer| layer.indexer == IndexerKind::Full).collect();
    assert_eq!(full, [true, true, false, false, true]);
    assert!(arch.mtp.is_some());
    assert_eq!(arch.stop_ids, [256, 260, 262]);
    assert_eq!((arch.moe.experts, arch.moe.top_k, arch.moe.shared_width), (8, 2, 64));
    assert_eq!((arch.norm_eps, arch.rope_theta, arch.moe.scaling), (1e-5, 10000.0, 2.5));
    assert!(checkpoint.notes().is_empty(), "{:?}", checkpoint.notes());

    // Offsets as the header of the file has them: 25,280 bytes of header after its 8-byte length.
    assert!(checkpoint.experts.layers[0].is_none());
    let down = checkpoint.experts.get(1, 0).unwrap().down;
    assert_eq!(down.spec.format, Format::Bf16);
    assert_eq!((down.data.offset, down.data.len), (8 + 25_280 + 138_272, 64 * 64 * 2));
    assert_eq!(checkpoint.experts.layers.len(), 6);
    assert_eq!(checkpoint.experts.layers[5].as_ref().unwrap().len(), 8);
}

#[test]
fn the_shape_of_glm_5_2_has_21_indexers() {
    let config = r#"{"model_type":"glm_moe_dsa","hidden_size":6144,"num_hidden_layers":78,"first_k_dense_replace":3,
        "num_attention_heads":64,"num_key_value_heads":64,"n_routed_experts":256,"num_experts_per_tok":8,
        "n_shared_experts":1,"intermediate_size":12288,"moe_intermediate_size":2048,"q_lora_rank":2048,
        "kv_lora_rank":512,"qk_nope_head_dim":192,"qk_rope_head_dim":64,"v_head_dim":256,"index_head_dim":128,
        "index_n_heads":32,"index_topk":2048,"index_topk_freq":4,"index_skip_topk_offset":3,
        "num_nextn_predict_layers":1,"vocab_size":154880,"norm_topk_prob":true,"routed_scaling_factor":2.5,
        "rms_norm_eps":1e-05,"rope_parameters":{"rope_theta":8000000,"rope_type":"default"},
        "eos_token_id":[154820,154827,154829]}"#;
    let arch = Arch::parse(config.as_bytes(), None).unwrap();
    let full: Vec<usize> = (0..78).filter(|&layer| arch.layers[layer].indexer == IndexerKind::Full).collect();
    let expected: Vec<usize> = [0, 1].into_iter().chain((2..=74).step_by(4)).collect();
    assert_eq!(full, expected);
    assert_eq!(full.len(), 21);
    let dense = arch.layers.iter().filter(|layer| layer.mlp != MlpKind::Sparse).count();
    assert_eq!(dense, 3);
    assert_eq!((arch.moe.groups, arch.rope_theta), (1, 8e6));
}
