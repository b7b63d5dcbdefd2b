//! Damaged, incomplete and contradictory model directories: refused at open, with a message that says what and where.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/safetensors.rs"]
mod safetensors;

use millstream::checkpoint::arch::IndexerKind;
use millstream::checkpoint::{Arch, Checkpoint, CheckpointError};
use millstream::kernels::Format;
use safetensors::{Model, Shard, Tensor, file_bytes, tiny_model};
use serde_json::{Map, Value, json};
use std::fs;
use std::os::unix::fs::FileExt;

fn refusal(model: &Model) -> CheckpointError {
    match Checkpoint::open(model.path()) {
        Ok(_) => panic!("a bad model opened"),
        Err(error) => {
            assert!(!error.hint().is_empty());
            error
        }
    }
}

/// The message of a refusal, which must hold each of `parts`.
fn assert_refused(model: &Model, parts: &[&str]) {
    let message = refusal(model).to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn config(edit: impl FnOnce(&mut Map<String, Value>)) -> Result<Arch, CheckpointError> {
    let bytes = fs::read(tiny_model().join("config.json")).unwrap();
    let mut value: Value = serde_json::from_slice(&bytes).unwrap();
    edit(value.as_object_mut().unwrap());
    Arch::parse(value.to_string().as_bytes(), None)
}

fn assert_config_refused(edit: impl FnOnce(&mut Map<String, Value>), parts: &[&str]) {
    let message = config(edit).unwrap_err().to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn set(map: &mut Map<String, Value>, key: &str, value: Value) {
    map.insert(key.to_owned(), value);
}

fn full_layers(arch: &Arch) -> Vec<usize> {
    (0..arch.layers.len()).filter(|&i| arch.layers[i].indexer == IndexerKind::Full).collect()
}

// Configuration.

#[test]
fn rotary_base_is_read_from_either_place_and_never_assumed() {
    let nested = config(|c| set(c, "rope_parameters", json!({"rope_theta": 5e5}))).unwrap();
    let top = config(|c| {
        c.remove("rope_parameters");
        set(c, "rope_theta", json!(500000));
    })
    .unwrap();
    assert_eq!(nested, top);
    assert_eq!(nested.rope_theta, 500_000.0);
    let both = config(|c| {
        set(c, "rope_parameters", json!({"rope_theta": 5e5}));
        set(c, "rope_theta", json!(7));
    });
    assert_eq!(both.unwrap().rope_theta, 500_000.0);
    assert_config_refused(
        |c| {
            c.remove("rope_parameters");
        },
        &["config.json", "rope_parameters.rope_theta", "nothing"],
    );
    for theta in [json!(0), json!(-1.0), json!("10000")] {
        let text = theta.to_string();
        assert_config_refused(
            |c| set(c, "rope_parameters", json!({"rope_theta": theta})),
            &["rope_parameters.rope_theta: expected a positive number", &text],
        );
    }
}

#[test]
fn scaled_rotary_is_refused_by_name() {
    let yarn = json!({"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0});
    assert_config_refused(
        |c| set(c, "rope_parameters", yarn),
        &["rope_parameters.rope_type", "\"default\"", "\"yarn\""],
    );
    assert_config_refused(
        |c| set(c, "rope_scaling", json!({"type": "linear", "factor": 2.0})),
        &["rope_scaling.type", "\"linear\""],
    );
}

#[test]
fn indexer_layers_come_from_the_list_then_the_pattern_then_the_frequency() {
    // The config's frequency of 3 with offset 2 would make layers 0, 1, 4 full.
    let listed = config(|c| {
        set(c, "indexer_types", json!(["full", "shared", "full", "shared", "shared"]));
        set(c, "index_topk_pattern", json!("FFFFF"));
    });
    assert_eq!(full_layers(&listed.unwrap()), [0, 2]);
    let pattern = config(|c| {
        c.remove("indexer_types");
        set(c, "index_topk_pattern", json!("FSSFS"));
    });
    assert_eq!(full_layers(&pattern.unwrap()), [0, 3]);
    let frequency = config(|c| {
        c.remove("indexer_types");
    });
    assert_eq!(full_layers(&frequency.unwrap()), [0, 1, 4]);
    let defaults = config(|c| {
        ["indexer_types", "index_topk_freq", "index_skip_topk_offset"].iter().for_each(|key| drop(c.remove(*key)));
    });
    assert_eq!(full_layers(&defaults.unwrap()), [0, 1, 2, 3, 4]);
}

#[test]
fn short_or_strange_layer_lists_are_refused_with_both_lengths() {
    assert_config_refused(
        |c| set(c, "indexer_types", json!(["full", "full", "shared"])),
        &["indexer_types", "expected 5 entries", "found 3 entries"],
    );
    assert_config_refused(
        |c| set(c, "mlp_layer_types", json!(["dense"])),
        &["mlp_layer_types", "expected 5 entries", "found 1 entries"],
    );
    assert_config_refused(
        |c| set(c, "indexer_types", json!(["full", "full", "none", "shared", "full"])),
        &["indexer_types[2]", "\"none\""],
    );
    assert_config_refused(
        |c| set(c, "indexer_types", json!(["shared", "full", "full", "full", "full"])),
        &["indexer_types", "layer 0"],
    );
    assert_config_refused(
        |c| {
            c.remove("indexer_types");
            set(c, "index_topk_pattern", json!("FS"));
        },
        &["index_topk_pattern", "expected 5 entries", "found 2 entries"],
    );
}

#[test]
fn a_model_without_routed_experts_is_refused_by_name_and_not_as_a_bad_read() {
    assert_config_refused(
        |c| set(c, "mlp_layer_types", json!(["dense", "dense", "dense", "dense", "dense"])),
        &["mlp_layer_types", "at least one layer with routed experts", "dense layers only"],
    );
    // Without a list the rule is a number; the MTP layer, which is always routed, does not count.
    for first_sparse in [5, 6] {
        assert_config_refused(
            |c| {
                c.remove("mlp_layer_types");
                set(c, "first_k_dense_replace", json!(first_sparse));
            },
            &["first_k_dense_replace", "at least one layer with routed experts"],
        );
    }
}

#[test]
fn expert_groups_are_read_and_checked() {
    let grouped = config(|c| {
        set(c, "n_group", json!(4));
        set(c, "topk_group", json!(2));
    })
    .unwrap();
    assert_eq!((grouped.moe.groups, grouped.moe.top_groups), (4, 2));
    let absent = config(|c| {
        c.remove("n_group");
        c.remove("topk_group");
    })
    .unwrap();
    assert_eq!((absent.moe.groups, absent.moe.top_groups), (1, 1));
    assert_config_refused(|c| set(c, "n_group", json!(3)), &["n_group", "(8)", "found 3"]);
    assert_config_refused(
        |c| {
            set(c, "n_group", json!(4));
            set(c, "topk_group", json!(5));
        },
        &["topk_group", "from 1 to 4", "found 5"],
    );
    assert_config_refused(|c| set(c, "n_group", json!(8)), &["n_group", "two experts"]);
    // Two of eight experts stay eligible; three cannot be chosen from them.
    assert_config_refused(
        |c| {
            set(c, "n_group", json!(4));
            set(c, "topk_group", json!(1));
            set(c, "num_experts_per_tok", json!(3));
        },
        &["num_experts_per_tok", "from 1 to 2", "found 3"],
    );
}

#[test]
fn values_that_shape_the_model_are_never_defaulted() {
    for key in [
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "intermediate_size",
        "norm_topk_prob",
        "routed_scaling_factor",
        "rms_norm_eps",
        "index_topk",
        "index_head_dim",
        "index_n_heads",
    ] {
        assert_config_refused(
            |c| {
                c.remove(key);
            },
            &["config.json", key, "found nothing"],
        );
        assert_config_refused(|c| set(c, key, json!(-1)), &["config.json", key, "found -1"]);
    }
    let max = json!(u64::MAX);
    assert_config_refused(|c| set(c, "hidden_size", max), &["hidden_size", "18446744073709551615"]);
}

#[test]
fn arithmetic_this_engine_lacks_is_refused_by_name() {
    let cases = [
        ("model_type", json!("qwen3_moe"), "\"olmoe\""),
        ("scoring_func", json!("softmax"), "\"softmax\""),
        ("topk_method", json!("greedy"), "\"greedy\""),
        ("hidden_act", json!("gelu"), "\"gelu\""),
        ("attention_bias", json!(true), "true"),
        ("num_key_value_heads", json!(2), "2"),
        ("qk_head_dim", json!(33), "33"),
        ("qk_rope_head_dim", json!(15), "15"),
        ("quantization_config", json!({"quant_method": "awq"}), "\"awq\""),
        ("quantization_config", json!({"quant_method": "fp8"}), "weight_block_size"),
        ("eos_token_id", json!([256, 272]), "272"),
        ("eos_token_id", json!("256"), "\"256\""),
    ];
    for (key, value, found) in cases {
        assert_config_refused(|c| set(c, key, value), &[key, found]);
    }
}

#[test]
fn stop_ids_are_a_number_or_a_list_in_both_files() {
    let text = |value: Value| json!({"eos_token_id": value}).to_string();
    let mut root: Value = serde_json::from_slice(&fs::read(tiny_model().join("config.json")).unwrap()).unwrap();
    root["eos_token_id"] = json!(7);
    let config = root.to_string();
    let arch = Arch::parse(config.as_bytes(), Some(text(json!([9, 7])).as_bytes())).unwrap();
    assert_eq!(arch.stop_ids, [7, 9]);
    let arch = Arch::parse(config.as_bytes(), Some(text(json!(3)).as_bytes())).unwrap();
    assert_eq!(arch.stop_ids, [3, 7]);
    let error = Arch::parse(config.as_bytes(), Some(b"[1")).unwrap_err().to_string();
    assert!(error.contains("generation_config.json"), "{error}");
}

#[test]
fn a_tied_head_needs_no_tensor_and_an_untied_one_does() {
    let tied = |tied: bool, keep: bool| {
        let model = Model::tiny();
        model.edit_config(|c| set(c, "tie_word_embeddings", json!(tied)));
        if !keep {
            model.edit_shard(|shard| drop(shard.remove("lm_head.weight")));
        }
        model
    };
    let checkpoint = Checkpoint::open(tied(true, false).path()).unwrap();
    assert!(checkpoint.arch.tied_head && checkpoint.notes().is_empty());
    assert_refused(&tied(false, false), &["lm_head.weight", "[272, 64]", "does not exist"]);
    let checkpoint = Checkpoint::open(tied(true, true).path()).unwrap();
    assert_eq!(checkpoint.notes().len(), 1);
    assert!(checkpoint.notes()[0].contains("lm_head.weight"), "{:?}", checkpoint.notes());
}

#[test]
fn an_mtp_layer_is_used_only_when_declared_and_present() {
    let undeclared = Model::tiny();
    undeclared.edit_config(|c| set(c, "num_nextn_predict_layers", json!(0)));
    let checkpoint = Checkpoint::open(undeclared.path()).unwrap();
    assert!(checkpoint.arch.mtp.is_none());
    assert_eq!(checkpoint.notes().len(), 1);
    assert!(checkpoint.notes()[0].contains("model.layers.5."), "{:?}", checkpoint.notes());

    let absent = Model::tiny();
    absent.edit_shard(|shard| shard.tensors.retain(|t| !t.name.starts_with("model.layers.5.")));
    let checkpoint = Checkpoint::open(absent.path()).unwrap();
    assert!(checkpoint.arch.mtp.is_none());
    assert_eq!(checkpoint.experts.layers.len(), 5);
    assert_eq!(checkpoint.notes().len(), 1);
    assert!(checkpoint.notes()[0].contains("no speculation"), "{:?}", checkpoint.notes());

    let half = Model::tiny();
    half.edit_shard(|shard| drop(shard.remove("model.layers.5.eh_proj.weight")));
    assert_refused(&half, &["model.layers.5.eh_proj.weight", "[64, 128]"]);
}

#[test]
fn missing_indexers_mean_dense_attention_and_a_missing_one_is_an_error() {
    let none = Model::tiny();
    none.edit_shard(|shard| shard.tensors.retain(|tensor| !tensor.name.contains(".indexer.")));
    let checkpoint = Checkpoint::open(none.path()).unwrap();
    assert!(checkpoint.arch.layers.iter().all(|layer| layer.indexer == IndexerKind::None));
    assert!(checkpoint.arch.indexer.is_none());
    assert_eq!(checkpoint.notes().len(), 1);
    assert!(checkpoint.notes()[0].contains("dense"), "{:?}", checkpoint.notes());

    let one = Model::tiny();
    let name = "model.layers.4.self_attn.indexer.wk.weight";
    one.edit_shard(|shard| drop(shard.remove(name)));
    assert_refused(&one, &[name]);
}

// Directories and indexes.

#[test]
fn shards_without_their_small_files_are_named_and_counted() {
    let model = Model::tiny();
    model.split(100);
    fs::remove_file(model.path().join("config.json")).unwrap();
    assert_refused(&model, &["config.json missing", "2 weight shards found"]);
    fs::remove_file(model.path().join("tokenizer.json")).unwrap();
    assert_refused(&model, &["config.json and tokenizer.json missing", "2 weight shards"]);
}

/// Without an index only the names of the others tell.
#[test]
fn a_shard_that_is_not_there_is_named_by_the_numbers_of_the_others() {
    for (name, hint) in [
        (&(|n: usize| format!("model-{n:05}-of-00004.safetensors")) as &dyn Fn(usize) -> String, "fetch the missing"),
        (&|n| format!("out-{n:05}.safetensors"), "run the conversion"),
    ] {
        let model = Model::tiny();
        let whole = Shard::read(&model.shard_path());
        fs::remove_file(model.shard_path()).unwrap();
        let quarter = whole.tensors.len().div_ceil(4);
        for (number, tensors) in (1..).zip(whole.tensors.chunks(quarter)) {
            let shard = Shard { tensors: tensors.to_vec(), ..Shard::default() };
            shard.write(&model.path().join(name(number)));
        }
        Checkpoint::open(model.path()).unwrap();
        fs::remove_file(model.path().join(name(3))).unwrap();
        let error = refusal(&model);
        assert!(error.to_string().ends_with(&format!("; {} is not there", name(3))), "{error}");
        assert!(error.hint().starts_with(hint), "{}", error.hint());
    }
}

#[test]
fn padding_has_no_name_that_a_message_shows() {
    let model = Model::tiny();
    model.edit_shard(|shard| shard.tensors.push(Tensor::new("__pad__model.7", "U8", &[64], vec![0; 64])));
    let bytes = fs::metadata(model.shard_path()).unwrap().len();
    fs::File::options().write(true).open(model.shard_path()).unwrap().set_len(bytes - 1).unwrap();
    assert_refused(&model, &["file is cut short", "the end of its padding"]);
    assert!(!refusal(&model).to_string().contains("__pad__"));
}

#[test]
fn no_shards_at_all() {
    let model = Model::tiny();
    fs::remove_file(model.shard_path()).unwrap();
    assert_refused(&model, &["no *.safetensors"]);
}

#[test]
fn a_shard_named_by_the_index_and_not_on_disk_is_an_incomplete_download() {
    let model = Model::tiny();
    model.split(100);
    assert!(Checkpoint::open(model.path()).unwrap().notes().is_empty());
    fs::remove_file(model.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_refused(&model, &["model-00002-of-00002.safetensors", "incomplete download?"]);
}

#[test]
fn an_index_that_disagrees_with_the_shards_has_a_message_for_each_way() {
    // The shard's header lacks what the index says it holds.
    let model = Model::tiny();
    model.split(100);
    model.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"]["model.norm.weight"] = json!("model-00001-of-00002.safetensors");
    });
    assert_refused(&model, &["model.norm.weight", "model-00001-of-00002", "lacks it", "model-00002-of-00002"]);

    // The index names a tensor no shard has.
    let model = Model::tiny();
    model.split(100);
    model.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"]["model.nothing"] = json!("model-00001-of-00002.safetensors");
    });
    assert_refused(&model, &["model.nothing", "nor does any other shard"]);

    // The index omits a tensor that exists: headers decide, a line says so, and nothing is left out.
    let model = Model::tiny();
    model.split(100);
    model.edit_json("model.safetensors.index.json", |index| {
        index["weight_map"].as_object_mut().unwrap().remove("model.norm.weight");
    });
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.tensors.get("model.norm.weight").is_some());
    assert!(checkpoint.notes()[0].contains("omits 1 tensors"), "{:?}", checkpoint.notes());

    // A tensor that never existed, in index or shard.
    let model = Model::tiny();
    model.edit_shard(|shard| drop(shard.remove("model.norm.weight")));
    model.split(100);
    assert_refused(&model, &["model.norm.weight", "does not exist", "none of the 2 shards"]);
}

#[test]
fn an_index_of_another_checkpoint_is_ignored_with_a_line() {
    let model = Model::tiny();
    let index = json!({"weight_map": {"model.norm.weight": "model-00001-of-00141.safetensors"}});
    fs::write(model.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.notes()[0].contains("stale"), "{:?}", checkpoint.notes());
    fs::write(model.path().join("model.safetensors.index.json"), "{\"weight_map\": 3}").unwrap();
    assert_refused(&model, &["model.safetensors.index.json", "weight_map"]);
}

#[test]
fn links_of_a_download_cache_are_followed_and_dangling_ones_named() {
    let model = Model::tiny();
    let cache = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model.path()).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, cache.path().join(path.file_name().unwrap())).unwrap();
    }
    let direct = Checkpoint::open(model.path()).unwrap();
    let linked = Checkpoint::open(cache.path()).unwrap();
    assert_eq!(direct.fingerprint(), linked.fingerprint());
    fs::remove_file(model.shard_path()).unwrap();
    let error = Checkpoint::open(cache.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("No such file"), "{error}");
}

#[test]
fn a_tensor_in_two_shards_names_both() {
    let model = Model::tiny();
    let norm = Shard::read(&model.shard_path()).get("model.norm.weight").clone();
    let extra = Shard { tensors: vec![norm], ..Shard::default() };
    extra.write(&model.path().join("extra.safetensors"));
    assert_refused(&model, &["model.norm.weight", "two shards", "extra.safetensors", "model.safetensors"]);
}

// Headers.

#[test]
fn a_shard_cut_short_is_refused_with_both_lengths() {
    let model = Model::tiny();
    let length = fs::metadata(model.shard_path()).unwrap().len();
    let file = fs::File::options().write(true).open(model.shard_path()).unwrap();
    file.set_len(length - 1024).unwrap();
    assert_refused(&model, &["model.safetensors", "cut short", "1493096 bytes", "1492072 bytes"]);
    file.set_len(length + 1).unwrap();
    assert_refused(&model, &["after the last tensor", "1493096 bytes", "1493097 bytes"]);
    file.set_len(5).unwrap();
    assert_refused(&model, &["file length", "at least 8", "5 bytes"]);
    file.set_len(1000).unwrap();
    assert_refused(&model, &["header length", "at most 992 bytes"]);
}

#[test]
fn a_header_length_beyond_reason_is_refused_before_it_is_allocated() {
    for length in [1u64 << 63, u64::MAX, 100_000_001] {
        let model = Model::tiny();
        let file = fs::File::options().write(true).open(model.shard_path()).unwrap();
        file.write_all_at(&length.to_le_bytes(), 0).unwrap();
        assert_refused(&model, &["header length", "100000000", &length.to_string()]);
    }
}

#[test]
fn a_shape_larger_than_its_bytes_is_refused_with_both_sizes() {
    let model = Model::tiny();
    model.edit_header(|h| h["model.norm.weight"]["shape"] = json!([65]));
    assert_refused(&model, &["model.norm.weight", "130 bytes for BF16 [65]", "128 bytes"]);

    // 2^33 * 2^33 * 2 wraps to 0 in 64 bits.
    let model = Model::tiny();
    model.edit_header(|h| h["model.norm.weight"]["shape"] = json!([1u64 << 33, 1u64 << 33]));
    assert_refused(&model, &["model.norm.weight", "128 bytes", "more than 2^64"]);
}

#[test]
fn offsets_that_wrap_or_run_backwards_are_refused() {
    let model = Model::tiny();
    model.edit_header(|h| {
        h["model.norm.weight"]["data_offsets"] = json!([u64::MAX - 128, u64::MAX]);
    });
    assert_refused(&model, &["model.norm.weight", "data_offsets"]);
    let model = Model::tiny();
    model.edit_header(|h| h["model.norm.weight"]["data_offsets"] = json!([1000, 872]));
    assert_refused(&model, &["model.norm.weight", "[1000, 872]"]);
}

#[test]
fn a_repeated_name_is_refused() {
    let entry = |begin: u64| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":[{begin},{}]}}"#, begin + 4);
    for header in
        [format!(r#"{{"a":{},"a":{}}}"#, entry(0), entry(4)), format!(r#"{{"a":{},"\u0061":{}}}"#, entry(0), entry(4))]
    {
        let model = Model::tiny();
        fs::write(model.path().join("z.safetensors"), file_bytes(&header, &[0; 8])).unwrap();
        assert_refused(&model, &["z.safetensors", "the key a twice"]);
    }
    let model = Model::tiny();
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"shape":[4]}}"#;
    fs::write(model.path().join("z.safetensors"), file_bytes(header, &[0; 4])).unwrap();
    assert_refused(&model, &["z.safetensors", "duplicate field `shape`"]);
}

#[test]
fn overlaps_and_holes_are_refused() {
    let header = |begin: u64| {
        json!({
            "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [begin, begin + 8]},
        })
        .to_string()
    };
    let model = Model::tiny();
    let path = model.path().join("z.safetensors");
    fs::write(&path, file_bytes(&header(4), &[0; 12])).unwrap();
    assert_refused(&model, &["z.safetensors", "tensor b", "overlaps", "the end of a"]);
    fs::write(&path, file_bytes(&header(16), &[0; 24])).unwrap();
    assert_refused(&model, &["z.safetensors", "tensor b", "hole"]);
    fs::write(&path, file_bytes(&header(8), &[0; 16])).unwrap();
    assert!(Checkpoint::open(model.path()).unwrap().notes()[0].contains("2 tensors are not used"));
}

#[test]
fn broken_header_text_is_refused_with_its_position() {
    for (header, part) in [
        ("{\"a\":", "EOF"),
        ("[]", "an object that maps names to tensors"),
        ("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,0]}}", "-1"),
        ("{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", "data_offsets"),
        ("{\"a\":{\"dtype\":\"Q9\",\"shape\":[0],\"data_offsets\":[0,0]}}", "Q9"),
        ("{\"__metadata__\":{\"a\":1}}", "a string"),
        ("{\"__metadata__\":{\"colibri.fmt\":\"[]\"}}", "colibri.fmt"),
    ] {
        let model = Model::tiny();
        fs::write(model.path().join("z.safetensors"), file_bytes(header, &[])).unwrap();
        assert_refused(&model, &["z.safetensors", part]);
    }
}

#[test]
fn a_message_shows_hostile_names_short_and_without_control_characters() {
    for name in ["x".repeat(2000), "a\u{1b}[2Jb".to_owned()] {
        let model = Model::tiny();
        let shard = Shard { tensors: vec![Tensor::new(&name, "U8", &[1], vec![0])], ..Shard::default() };
        shard.write(&model.path().join("z.safetensors"));
        let message = refusal(&model).to_string();
        assert!(message.contains("1024 bytes without control characters"), "{message}");
        assert!(message.len() < 600 && !message.contains('\u{1b}'), "{message:?}");
    }
}

#[test]
fn a_directory_named_like_a_shard_is_refused() {
    let model = Model::tiny();
    fs::create_dir(model.path().join("z.safetensors")).unwrap();
    assert_refused(&model, &["z.safetensors", "a regular file"]);
}

#[test]
fn a_large_honest_header_loads() {
    let model = Model::tiny();
    let mut shard = Shard::default();
    for number in 0..20_000 {
        let name = format!("{number:05}.{}", "n".repeat(200));
        shard.tensors.push(Tensor::new(&name, "U8", &[1], vec![0]));
    }
    shard.write(&model.path().join("z.safetensors"));
    assert!(fs::metadata(model.path().join("z.safetensors")).unwrap().len() > 5_000_000);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert_eq!(checkpoint.tensors.len(), 229 + 20_000);
}

#[test]
fn opening_reads_no_weights() {
    // A terabyte of data that is a hole in the file: only a reader of headers gets past it.
    let bytes = 1u64 << 40;
    let header = json!({"big": {"dtype": "U8", "shape": [bytes], "data_offsets": [0, bytes]}});
    let model = Model::tiny();
    let path = model.path().join("z.safetensors");
    let start = file_bytes(&header.to_string(), &[]);
    fs::write(&path, &start).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    if file.set_len(start.len() as u64 + bytes).is_ok() {
        assert_eq!(Checkpoint::open(model.path()).unwrap().tensors.get("big").unwrap().bytes, bytes);
    }
}

// Tensors that contradict the configuration.

#[test]
fn wrong_lengths_and_types_are_refused_by_name() {
    let cases: [(&str, &str, &[u64], &[&str]); 5] = [
        ("model.norm.weight", "BF16", &[63], &["shape", "expected [64]", "found [63]"]),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", "I16", &[32], &["dtype", "I16"]),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "F32", &[9], &["[8]", "[9]"]),
        ("model.layers.2.mlp.experts.7.up_proj.weight", "BF16", &[64, 63], &["[64, 64]", "[64, 63]"]),
        ("model.layers.0.self_attn.q_b_proj.weight", "F64", &[128, 32], &["F64"]),
    ];
    for (name, dtype, shape, parts) in cases {
        let model = Model::tiny();
        model.edit_shard(|shard| {
            let tensor = shard.get_mut(name);
            let size = match dtype {
                "F64" => 8,
                "F32" => 4,
                _ => 2,
            };
            let bytes = shape.iter().product::<u64>() as usize * size;
            *tensor = Tensor::new(name, dtype, shape, vec![0; bytes]);
        });
        assert_refused(&model, &[&[name, "model.safetensors"], parts].concat());
    }
}

const EXPERT: &str = "model.layers.1.mlp.experts.0.down_proj.weight";

/// Replaces the 64 x 64 matrix of one expert by other bytes, with further tensors beside it.
fn with_expert(dtype: &str, shape: &[u64], bytes: usize, beside: &[Tensor]) -> Model {
    let model = Model::tiny();
    model.edit_shard(|shard| {
        *shard.get_mut(EXPERT) = Tensor::new(EXPERT, dtype, shape, vec![0; bytes]);
        shard.tensors.extend_from_slice(beside);
    });
    model
}

fn scales(suffix: &str, dtype: &str, shape: &[u64]) -> Tensor {
    let size = if dtype == "F32" { 4 } else { 2 };
    let bytes = shape.iter().product::<u64>() as usize * size;
    Tensor::new(&format!("{EXPERT}{suffix}"), dtype, shape, vec![0; bytes])
}

#[test]
fn codes_without_scales_are_never_used() {
    let fp8 = with_expert("F8_E4M3", &[64, 64], 4096, &[]);
    assert_refused(&fp8, &[EXPERT, "_scale_inv", "F8_E4M3", "F32 [1, 1]"]);
    let packed = with_expert("U8", &[2048], 2048, &[]);
    assert_refused(&packed, &[EXPERT, ".qs", "U8"]);
    let other = with_expert("F8_E4M3", &[64, 64], 4096, &[scales("_scale", "F32", &[1])]);
    assert_refused(&other, &[EXPERT, "_scale_inv"]);
    let ignored = with_expert("BF16", &[64, 64], 8192, &[scales("_scale_inv", "F32", &[1, 1])]);
    assert_refused(&ignored, &[EXPERT, "_scale_inv", "ignored"]);
    let wrong_type = with_expert("F8_E4M3", &[64, 64], 4096, &[scales("_scale_inv", "BF16", &[1, 1])]);
    assert_refused(&wrong_type, &["_scale_inv", "expected F32", "BF16"]);
    let wrong_shape = with_expert("F8_E4M3", &[64, 64], 4096, &[scales("_scale_inv", "F32", &[1, 2])]);
    assert_refused(&wrong_shape, &["_scale_inv", "[1, 1]", "[1, 2]"]);
}

#[test]
fn what_belongs_to_a_weight_and_is_not_read_is_never_ignored() {
    let packed = |beside: Tensor| with_expert("U8", &[2048], 2048, &[scales(".qs", "F32", &[64]), beside]);
    for suffix in ["_scale", "_scale_2", "_zero_point", "_scale_inv", ".absmax", ".qs2"] {
        let name = format!("{EXPERT}{suffix}");
        assert_refused(
            &packed(scales(suffix, "F32", &[1])),
            &[&name, "model.safetensors", EXPERT, "F32 [1]", "ignored"],
        );
    }
    // Beside a float weight, a vector, and under the module's own name.
    let expert = EXPERT.strip_suffix("weight").unwrap();
    let norm = "model.layers.0.input_layernorm.weight";
    for (name, owner) in [
        (format!("{EXPERT}_scale"), EXPERT),
        (format!("{expert}scales"), EXPERT),
        (format!("{expert}qzeros"), EXPERT),
        (format!("{norm}.qs"), norm),
        ("model.layers.1.mlp.gate.e_score_correction_bias_scale".to_owned(), "e_score_correction_bias"),
    ] {
        let model = Model::tiny();
        model.edit_shard(|shard| shard.tensors.push(Tensor::new(&name, "F32", &[1], vec![0; 4])));
        assert_refused(&model, &[&name, owner, "ignored"]);
    }
    // A scale of activations changes no weight, nor does what belongs to no used one.
    let model = Model::tiny();
    model.edit_shard(|shard| {
        for name in [&format!("{expert}input_scale"), "model.layers.9.mlp.up_proj.weight_scale"] {
            shard.tensors.push(Tensor::new(name, "F32", &[1], vec![0; 4]));
        }
    });
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.notes()[0].starts_with("2 tensors are not used"), "{:?}", checkpoint.notes());
}

#[test]
fn every_source_type_is_resolved() {
    let format = |model: Model| Checkpoint::open(model.path()).unwrap().experts.get(1, 0).unwrap().down.spec.format;
    assert_eq!(format(with_expert("F32", &[64, 64], 16384, &[])), Format::F32);
    assert_eq!(format(with_expert("F16", &[64, 64], 8192, &[])), Format::F16);
    let fp8 = with_expert("F8_E4M3", &[64, 64], 4096, &[scales("_scale_inv", "F32", &[1, 1])]);
    assert_eq!(format(fp8), Format::Fp8Block);
    for (bytes, count, expected) in [
        (4096, 64, Format::Int8Row),
        (2048, 64, Format::Int4Row),
        (2048, 256, Format::Int4Group { group: 16 }),
        (2048, 128, Format::Int4Group { group: 32 }),
        (1536, 64, Format::Int3Group),
        (1024, 64, Format::Int2Row),
    ] {
        let model = with_expert("U8", &[bytes], bytes as usize, &[scales(".qs", "F32", &[count])]);
        assert_eq!(format(model), expected);
    }
}

#[test]
fn packed_weights_of_an_unknown_size_are_refused_with_what_was_possible() {
    let model = with_expert("U8", &[2049], 2049, &[scales(".qs", "F32", &[64])]);
    assert_refused(&model, &[EXPERT, "2049 bytes with 64 scales", "int4 2048 + 64 scales"]);
    let short = with_expert("U8", &[1536], 1536, &[scales(".qs", "F32", &[63])]);
    assert_refused(&short, &[EXPERT, "1536 bytes with 63 scales", "int3-g64 1536 + 64 scales"]);
}

#[test]
fn a_stamp_confirms_or_contradicts() {
    let stamped = |name: &str| {
        let model = with_expert("U8", &[2048], 2048, &[scales(".qs", "F32", &[64])]);
        model.edit_shard(|shard| {
            let stamps = json!({EXPERT: name}).to_string();
            set(&mut shard.metadata, "colibri.fmt", Value::from(stamps));
        });
        model
    };
    assert!(Checkpoint::open(stamped("int4-row").path()).is_ok());
    assert_refused(&stamped("int8-row"), &[EXPERT, "int8-row", "int4-row"]);
    assert_refused(&stamped("int4-rans256-g0"), &[EXPERT, "int4-rans256-g0"]);
    // Any of the three may be the one that is wrong.
    let hint = Checkpoint::open(stamped("int8-row").path()).unwrap_err().hint();
    assert!(hint.contains("colibri.fmt") && hint.contains("config.json"), "{hint}");
}
