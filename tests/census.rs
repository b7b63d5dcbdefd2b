//! What `info`, `census` and `plan` say of a model, held against a count of its headers made here.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use program::{done, json, program, ram_besides_program, refused, stdout};
use safetensors::{Model, Shard, tiny_model};
use serde_json::Value;

fn ask(home: &Path, command: &str, model: &Path, extra: &[&str]) -> Value {
    let mut asked = program(home);
    asked.arg(command).arg(model).args(extra).arg("--json");
    json(&done(asked.output().unwrap()))
}

/// Every shard of a directory, read by the reader of the tests.
fn shards(dir: &Path) -> Vec<Shard> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).map(|path| Shard::read(&path)).collect()
}

/// The part that a name belongs to, by the names that the vendor's code gives its modules. Layer 5 is the MTP layer.
fn part(name: &str) -> &'static str {
    let has = |piece: &str| name.contains(piece);
    match name {
        _ if name.starts_with("model.layers.5.") => "MTP layer",
        _ if has(".mlp.experts.") => "routed experts",
        _ if has(".shared_experts.") => "shared experts",
        _ if has(".indexer.") => "indexer",
        _ if has("norm.") => "norms",
        _ if has(".mlp.gate.") => "router",
        _ if has(".self_attn.") => "attention",
        _ if has("embed_tokens") => "embeddings",
        _ if has("lm_head") => "head",
        _ => "dense",
    }
}

/// Bytes of each part.
fn counted(dir: &Path) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for tensor in shards(dir).into_iter().flat_map(|shard| shard.tensors) {
        if !tensor.name.starts_with("__pad__") {
            *bytes.entry(part(&tensor.name).to_owned()).or_default() += tensor.data.len() as u64;
        }
    }
    bytes
}

fn told(census: &Value) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for kind in census["kinds"].as_array().unwrap() {
        *bytes.entry(kind["part"].as_str().unwrap().to_owned()).or_default() += kind["bytes"].as_u64().unwrap();
    }
    bytes
}

/// The tiny model as a container.
fn container(home: &Path) -> std::path::PathBuf {
    let made = home.join("container");
    done(program(home).arg("convert").arg(tiny_model()).arg(&made).output().unwrap());
    made
}

#[test]
fn a_census_counts_every_byte_once_in_checkpoints_and_containers() {
    let home = tempfile::tempdir().unwrap();
    let (vendor, container) = (Model::tiny(), container(home.path()));
    for dir in [vendor.path(), &container] {
        let census = ask(home.path(), "census", dir, &[]);
        assert_eq!(told(&census), counted(dir), "{}", dir.display());
        let number = |name: &str| census[name].as_u64().unwrap();
        let used: u64 = told(&census).values().sum();
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        let files = files.filter(|file| file.file_name().to_string_lossy().ends_with(".safetensors"));
        let on_disk: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
        assert_eq!((number("bytes"), number("unused_bytes")), (on_disk, 0));
        assert_eq!(used + number("other_bytes"), on_disk, "headers and padding are the rest");
        let formats: u64 = census["formats"].as_object().unwrap().values().map(|f| f["bytes"].as_u64().unwrap()).sum();
        assert_eq!(formats, used);
    }
}

#[test]
fn a_sample_shows_bytes_as_they_lie_and_the_values_they_stand_for() {
    let home = tempfile::tempdir().unwrap();
    let dir = container(home.path());
    let name = "model.layers.1.mlp.experts.3.gate_proj.weight";
    let census = ask(home.path(), "census", &dir, &["--sample", name]);
    let sample = &census["samples"][0];
    let all = shards(&dir);
    let find = |name: &str| all.iter().flat_map(|shard| &shard.tensors).find(|tensor| tensor.name == name).unwrap();
    let (weights, scales) = (find(name), find(&format!("{name}.qs")));
    assert_eq!((&sample["format"], &sample["part"]), (&"int4".into(), &"routed experts".into()));
    assert_eq!(sample["scales_of"], Value::Null);
    // Its scales are in use with it.
    let beside = &ask(home.path(), "census", &dir, &["--sample", &format!("{name}.qs")])["samples"][0];
    assert_eq!((&beside["part"], &beside["scales_of"]), (&"routed experts".into(), &name.into()));
    assert_eq!(beside["values"][0], sample["scales"][0]);
    assert_eq!(sample["shape"], serde_json::json!([64, 64]));
    assert_eq!(sample["packed"], serde_json::json!(weights.data[..16]));
    let scale = f32::from_le_bytes(scales.data[..4].try_into().unwrap());
    // Even columns lie in the low nibbles, and eight stands for zero.
    let nibbles = weights.data[..8].iter().flat_map(|byte| [byte & 15, byte >> 4]);
    let values: Vec<f32> = nibbles.map(|nibble| (f32::from(nibble) - 8.0) * scale).collect();
    let shown: Vec<f32> = sample["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
    assert_eq!(shown, values);
    let shard = fs::read(sample["shard"].as_str().unwrap()).unwrap();
    assert_eq!(shard[sample["offset"].as_u64().unwrap() as usize..][..16], weights.data[..16]);

    let wrong =
        program(home.path()).arg("census").arg(&dir).args(["--sample", "experts.3.gate_proj"]).output().unwrap();
    refused(&wrong, 2, &["has a tensor experts.3.gate_proj", "there are 10 with this in their names"]);
}

#[test]
fn the_picture_holds_every_part_and_is_never_written_over_the_model() {
    let home = tempfile::tempdir().unwrap();
    let picture = home.path().join("census.svg");
    let model = Model::tiny();
    done(program(home.path()).arg("census").arg(model.path()).arg("--svg").arg(&picture).output().unwrap());
    let svg = fs::read_to_string(&picture).unwrap();
    for part in counted(model.path()).keys() {
        assert!(svg.contains(&format!(">{part}<")), "{part}");
    }
    let over =
        program(home.path()).arg("census").arg(model.path()).arg("--svg").arg(model.shard_path()).output().unwrap();
    refused(&over, 2, &["which this command reads"]);
}

#[test]
fn info_names_the_model_and_counts_its_parameters() {
    let home = tempfile::tempdir().unwrap();
    let info = ask(home.path(), "info", tiny_model(), &[]);
    let model = &info["model"];
    assert_eq!(
        (&model["name"], &model["vendor_name"]),
        (&"tiny-glm-moe-dsa".into(), &"GlmMoeDsaForCausalLM (glm_moe_dsa)".into())
    );
    let tensors: Vec<_> = shards(tiny_model()).into_iter().flat_map(|shard| shard.tensors).collect();
    let values = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        tensors.iter().filter(|tensor| wanted(&tensor.name)).map(|tensor| tensor.shape.iter().product::<u64>()).sum()
    };
    assert_eq!(model["parameters"].as_u64().unwrap(), values(&|_| true));
    // Two of eight experts take part, and no MTP layer does.
    let routed = values(&|name| part(name) == "routed experts");
    let used = values(&|name| part(name) != "MTP layer") - routed * 6 / 8;
    assert_eq!(model["parameters_per_token"].as_u64().unwrap(), used);
    for (name, value) in
        [("layers", 5), ("dense_layers", 1), ("experts", 8), ("top_k", 2), ("hidden", 64), ("tensors", tensors.len())]
    {
        assert_eq!(model[name], value, "{name}");
    }
    let text = program(home.path()).arg("info").arg(tiny_model()).output().unwrap();
    let text = stdout(&done(text)).to_owned();
    assert!(text.lines().count() <= 24, "one screen: {text}");
    assert!(text.contains("5: 1 dense, 4 of 8 experts, 2 a token and the shared one; and an MTP layer"), "{text}");
}

#[test]
fn a_plan_says_what_more_of_each_resource_would_buy() {
    let home = tempfile::tempdir().unwrap();
    // Half of the experts fit.
    let ram = (ram_besides_program(0, tiny_model()).parse::<u64>().unwrap() + 1_700_000).to_string();
    let plan = |extra: &[&str]| {
        let mut asked = program(home.path());
        asked.args(["plan", "--usage", "off", "--ram", &ram, "-c", "64", "--json", "-m"]).arg(tiny_model()).args(extra);
        json(&done(asked.output().unwrap()))
    };
    // The slowest drive in the world binds: twice as fast is twice as fast.
    let slow =
        plan(&["--disk", "0.000001", "--what-if", "disk=0.000002", "--what-if", "ram=1G", "--what-if", "drives=2"]);
    let rate = |object: &Value| object["predicted_tok_s"].as_f64().unwrap();
    assert_eq!((&slow["bottleneck"], &slow["disk"]["source"]), (&"disk".into(), &"asked for".into()));
    let seconds = slow["bytes_per_token"].as_f64().unwrap() / 1e3;
    assert!((rate(&slow) * seconds - 1.0).abs() < 0.01, "{slow}");
    for doubled in [0, 2] {
        assert!((rate(&slow["what_if"][doubled]) / rate(&slow) - 2.0).abs() < 0.01, "{slow}");
    }
    let all = &slow["what_if"][1];
    assert_eq!(
        (&all["long"]["expected_hit_rate"], &all["long"]["bytes_per_token"], &all["slots"]),
        (&1.0.into(), &0.0.into(), &32.into())
    );
    assert_eq!((&all["long"]["bottleneck"], &all["bottleneck"]), (&"arithmetic".into(), &"disk".into()));
    // Less is enough too, as long as every expert's slab has its place; below that it does not fit, and nothing is promised.
    let least = plan(&["--disk", "2", "--what-if", "ram=1M"])["what_if"][0].clone();
    assert_eq!((&least["predicted_tok_s"], &least["slots"]), (&Value::Null, &Value::Null), "{least}");
    assert!(least["error"].as_str().unwrap().contains("of memory"), "{least}");
    let needed = least["needed"].as_u64().unwrap();
    let asked = [format!("ram={needed}"), format!("ram={}", needed - 1), "ram=1G".to_owned()];
    let flags: Vec<&str> = asked.iter().flat_map(|change| ["--what-if", change]).collect();
    let down = plan(&[&["--disk", "2"], &flags[..]].concat());
    assert_eq!(down["what_if"][0]["slots"], 1, "{down}");
    assert_eq!((&down["what_if"][1]["slots"], &down["what_if"][2]["slots"]), (&Value::Null, &32.into()), "{down}");
    let told: Vec<&str> = down["what_if"].as_array().unwrap().iter().map(|w| w["change"].as_str().unwrap()).collect();
    assert_eq!(told[..2], asked[..2]);
    let small =
        program(home.path()).args(["plan", "--ram", "1G", "--what-if", "ram=1M", "-m"]).arg(tiny_model()).output();
    assert!(stdout(&done(small.unwrap())).contains("ram=1M  "), "as it was typed");
    // Every expert fits 1G many times over: half of that changes nothing.
    let roomy = |ram: &str| {
        let mut asked = program(home.path());
        asked
            .args(["plan", "--usage", "off", "--ram", "1G", "--disk", "2", "--json", "--what-if", ram, "-m"])
            .arg(tiny_model());
        json(&done(asked.output().unwrap()))["what_if"][0]["long"]["expected_hit_rate"].clone()
    };
    assert_eq!(roomy("ram=512M"), 1.0);
    // Everything that is counted is within what may be used, and named as the manual has it.
    let budget = slow["budget"].as_object().unwrap();
    let parts = [
        "program",
        "resident",
        "kv",
        "working",
        "reconstruction",
        "activations",
        "staging",
        "page_cache_reserve",
        "experts",
    ];
    let sum: u64 = parts.iter().map(|part| budget[*part].as_u64().unwrap()).sum();
    assert!(sum <= budget["total"].as_u64().unwrap() && budget["working"].as_u64().unwrap() > 0, "{budget:?}");
    assert_eq!(budget.len(), parts.len() + 3, "and the total, its source and what quantizing saves: {budget:?}");
    // Four routed layers, two experts a token of three matrices of 64 x 64 in two bytes.
    assert_eq!(slow["uncached_bytes_per_token"], 4.0 * 2.0 * 3.0 * 64.0 * 64.0 * 2.0);
    // Nothing asked: memory, a second drive, a faster one and cores, each twice what is there.
    let more: Vec<String> = plan(&["--disk", "2", "-t", "2"])["what_if"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["change"].as_str().unwrap().split('=').next().unwrap().to_owned())
        .collect();
    assert_eq!(more, ["ram", "drives", "disk", "cores"]);
    // One core says nothing of a second.
    let alone = plan(&["--disk", "2", "-t", "1", "--what-if", "cores=4"]);
    assert!(alone["what_if"][0]["assumed"].is_string(), "{alone}");
    for bad in ["ram", "disk=0", "gpu=1"] {
        let wrong = program(home.path()).args(["plan", "--what-if", bad]).output().unwrap();
        refused(&wrong, 2, &["--what-if"]);
    }
}

#[test]
fn a_plan_expects_of_the_cache_what_the_history_of_selections_promises() {
    let home = tempfile::tempdir().unwrap();
    let (model, history) = (Model::tiny(), home.path().join("history"));
    let run = |command: &str, extra: &[&str]| {
        let mut asked = program(home.path());
        asked.args([command, "--ram", "1G", "--json", "-m"]).arg(model.path()).arg("--usage").arg(&history).args(extra);
        json(&done(asked.output().unwrap()))
    };
    run("run", &["--ids", "-p", "1 2 3 4", "-n", "5", "--ignore-eos"]);
    let plan = run("plan", &["--disk", "2", "--prompt-tokens", "1", "-n", "8"]);
    // Eight positions, four routed layers, two experts each.
    assert_eq!(plan["selections"], 64);
    // With room for all of them, every expert that was chosen again was there: all but the first time of each.
    let bytes = fs::read(&history).unwrap();
    let counts = millstream::store::history::decode(
        &bytes,
        millstream::checkpoint::Checkpoint::open(model.path()).unwrap().fingerprint(),
    );
    let alone = counts.unwrap().into_iter().filter(|&count| count == 1).count();
    let long = (64 - alone) as f64 / 64.0;
    assert_eq!(plan["long"]["expected_hit_rate"].as_f64().unwrap(), long);
    // And an answer, which begins with nothing there, finds less.
    assert!(plan["expected_hit_rate"].as_f64().unwrap() < long, "{plan}");
}

#[test]
fn a_plan_counts_the_first_use_of_each_expert_into_the_answer_that_it_is_asked_about() {
    let home = tempfile::tempdir().unwrap();
    let plan = |extra: &[&str]| {
        let fixed = ["plan", "--untimed", "--json", "--usage", "off", "--ram", "1G", "-c", "256"];
        json(&done(program(home.path()).args(fixed).arg("-m").arg(tiny_model()).args(extra).output().unwrap()))
    };
    let number = |value: &Value| value.as_f64().unwrap();
    let answer = |plan: &Value| (plan["prompt_tokens"].as_u64().unwrap(), plan["tokens"].as_u64().unwrap());
    // One step after one token, two of eight experts in each layer. A tenth of them has 0.19 of the selections, so that a token
    // chooses each with a chance of 0.25 * 1.9; then 0.21 of 0.15, 0.28 and 0.2 of a quarter each, and so on.
    let one = plan(&["--prompt-tokens", "1", "-n", "2"]);
    let found = 0.19 * 0.475 + 0.21 * 0.35 + 0.28 * 0.28 + 0.2 * 0.2 + 0.087 * 0.145 + 0.021 * 0.105 + 0.012 * 0.06;
    assert_eq!(answer(&one), (1, 2));
    assert!((number(&one["expected_hit_rate"]) - found).abs() < 1e-9, "{one}");
    let read = number(&one["uncached_bytes_per_token"]) * (1.0 - found);
    assert!((number(&one["bytes_per_token"]) - read).abs() < 1.0 && one["long"]["expected_hit_rate"] == 1.0, "{one}");
    // A longer answer, or a longer prompt, finds more, and never what is found at last.
    let longer = ["20", "100", "-1"].map(|tokens| plan(&["--prompt-tokens", "1", "--max-tokens", tokens]));
    assert_eq!(longer.each_ref().map(answer), [(1, 20), (1, 100), (1, 255)]);
    let found = [&one, &longer[0], &longer[1], &longer[2]].map(|plan| number(&plan["expected_hit_rate"]));
    assert!(found.windows(2).all(|pair| pair[0] < pair[1]) && found[3] < 1.0, "{found:?}");
    assert!(number(&plan(&["--prompt-tokens", "64", "-n", "20"])["expected_hit_rate"]) > found[1]);
    // What is not said is what a run would do, in half of the context each or in what is left.
    assert_eq!(
        [&[][..], &["-n", "250"], &["--prompt-tokens", "200"]].map(|said| answer(&plan(said))),
        [(128, 128), (6, 250), (200, 56)]
    );
    let text = program(home.path())
        .args(["plan", "--usage", "off", "-n", "20", "--prompt-tokens", "3", "-m"])
        .arg(tiny_model())
        .output();
    let text = stdout(&done(text.unwrap())).to_owned();
    assert!(text.contains("\nanswer:  20 tokens after 3 of a prompt: ") && text.contains("\nlong: "), "{text}");
    refused(&program(home.path()).args(["plan", "-n", "0"]).output().unwrap(), 2, &["-n 0", "hint:"]);
}
