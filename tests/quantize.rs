//! Weights that are quantized while they are loaded are, byte for byte, those of a container that `convert` writes with the
//! same widths, and so are the answers.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engines::{Arithmetic, Setup, answer, assert_same, config, tales, tiny, tiny_olmoe};
use millstream::checkpoint::convert::{ConvertOptions, Width, Widths, convert};
use millstream::checkpoint::synth::{Precision, Preset, SynthOptions, synth};
use millstream::checkpoint::{Checkpoint, CheckpointError};
use millstream::engine::{Activations, AttentionForm, Engine, EngineConfig, EngineError};
use millstream::model::load::{LoadError, Loaded};
use millstream::model::resident::{Plan, Resident};
use millstream::model::weights::{AttentionWeights, Layer, Matrix, Mlp, MlpWeights};
use millstream_io::{FileSet, IoMode};
use program::{done, json, program, refused, stderr};
use safetensors::{Model, Shard, Tensor};

/// Every tensor of a directory, whatever its shards.
fn tensors_of(dir: &Path) -> BTreeMap<String, Tensor> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let shards = paths.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    let tensors = shards.flat_map(|path| Shard::read(&path).tensors);
    tensors.map(|tensor| (tensor.name.clone(), tensor)).collect()
}

/// A copy of a BF16 model in another type of the same width, or twice it, whose values are the same where the type has them.
fn retyped(source: &Path, dtype: &str, encode: impl Fn(f32) -> Vec<u8>) -> Model {
    let model = Model::copy_of_files(source);
    model.edit_shard(|shard| {
        for tensor in shard.tensors.iter_mut().filter(|tensor| tensor.dtype == "BF16") {
            let halves = tensor.data.as_chunks::<2>().0;
            let values = halves.iter().map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16));
            tensor.data = values.flat_map(&encode).collect();
            tensor.dtype = dtype.to_owned();
        }
    });
    model
}

fn f16s(model: &Path) -> Model {
    retyped(model, "F16", |value| half::f16::from_f32(value).to_le_bytes().to_vec())
}

fn f32s(model: &Path) -> Model {
    retyped(model, "F32", |value| value.to_le_bytes().to_vec())
}

/// Whose experts are FP8, embeddings and head BF16; with an MTP layer.
fn drawn(precision: Precision) -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let options =
        SynthOptions { layers: Some(3), experts: Some(8), mtp: true, precision, ..SynthOptions::new(Preset::ALL[2]) };
    synth(dir.path(), &options, &mut |_| {}).unwrap();
    dir
}

fn options_of(widths: &Widths) -> ConvertOptions {
    let Widths { dense, io, mtp, indexer, group, .. } = *widths;
    let width = |width: Option<Width>| width.unwrap_or(Width::Bits8);
    ConvertOptions {
        experts: Width::Bits8,
        dense: width(dense),
        io_bits: width(io),
        mtp: width(mtp),
        indexer: width(indexer),
        group,
        ..ConvertOptions::default()
    }
}

fn converted(source: &Path, widths: &Widths) -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    convert(source, dir.path(), &options_of(widths), &mut |_| {}).unwrap();
    dir
}

fn is_expert(name: &str) -> bool {
    name.contains(".mlp.experts.")
}

/// The container of `converted`, but with the experts as the source has them: what is loaded from `source` with the same
/// widths.
fn with_experts_of(source: &Path, converted: &Path) -> Model {
    let model = Model::copy_of_files(converted);
    let entries = fs::read_dir(model.path()).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .for_each(|p| fs::remove_file(p).unwrap());
    let of_source = tensors_of(source).into_values().filter(|tensor| is_expert(&tensor.name));
    let others = tensors_of(converted).into_values();
    let others = others.filter(|tensor| !is_expert(&tensor.name) && !tensor.name.starts_with("__"));
    let shard = Shard { tensors: of_source.chain(others).collect(), ..Shard::default() };
    shard.write(&model.shard_path());
    model
}

fn load(dir: &Path, widths: &Widths, threads: usize, cancel: bool) -> Result<Resident, LoadError> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Buffered).unwrap());
    Plan::new(&checkpoint, files, true, widths)?.load(threads, &AtomicBool::new(cancel), &Loaded::default())
}

/// All matrices by their names.
fn matrices(resident: &Resident, tied: bool) -> Vec<(String, &Matrix)> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), &resident.embed)];
    if !tied {
        all.push(("lm_head.weight".to_owned(), &resident.head));
    }
    for layer in resident.layers.iter().chain(resident.mtp.iter().map(|mtp| &mtp.layer)) {
        let prefix = format!("model.layers.{}", layer.index);
        all.extend(of_layer(layer).into_iter().map(|(tail, matrix)| (format!("{prefix}.{tail}.weight"), matrix)));
    }
    if let Some(mtp) = &resident.mtp {
        all.push((format!("model.layers.{}.eh_proj.weight", mtp.layer.index), &mtp.eh_proj));
    }
    all
}

fn of_layer(layer: &Layer) -> Vec<(String, &Matrix)> {
    let attention: Vec<(&str, &Matrix)> = match &layer.attention {
        AttentionWeights::Full(a) => vec![("q_proj", &a.q), ("k_proj", &a.k), ("v_proj", &a.v), ("o_proj", &a.o)],
        AttentionWeights::Latent(a) => {
            let own = [("q_a_proj", &a.q_a), ("q_b_proj", &a.q_b), ("kv_a_proj_with_mqa", &a.kv_a)];
            let indexer = a.indexer.iter().flat_map(|i| {
                [("indexer.wq_b", &i.wq_b), ("indexer.wk", &i.wk), ("indexer.weights_proj", &i.weights_proj)]
            });
            own.into_iter().chain([("kv_b_proj", &a.kv_b), ("o_proj", &a.o)]).chain(indexer).collect()
        }
    };
    let mut all: Vec<(String, &Matrix)> =
        attention.into_iter().map(|(name, matrix)| (format!("self_attn.{name}"), matrix)).collect();
    match &layer.mlp {
        MlpWeights::Dense(mlp) => all.extend(of_mlp("mlp", mlp)),
        MlpWeights::Sparse { router, shared, .. } => {
            all.push(("mlp.gate".to_owned(), router));
            all.extend(shared.iter().flat_map(|mlp| of_mlp("mlp.shared_experts", mlp)));
        }
    }
    all
}

fn of_mlp<'a>(prefix: &str, mlp: &'a Mlp) -> [(String, &'a Matrix); 3] {
    [("gate", &mlp.gate), ("up", &mlp.up), ("down", &mlp.down)].map(|(name, m)| (format!("{prefix}.{name}_proj"), m))
}

const EIGHT: Widths = Widths::resident(Width::Bits8);
const GROUPS: Widths = Widths {
    dense: Some(Width::Bits4),
    mtp: Some(Width::Bits4),
    indexer: Some(Width::Bits2),
    group: Some(16),
    ..EIGHT
};
const NARROW: Widths = Widths { dense: Some(Width::Bits2), io: Some(Width::Bits4), ..EIGHT };
const HALVES: Widths = Widths::resident(Width::Bits16);

/// Sources of every type, a model of each family among them.
fn with_sources(test: impl Fn(&str, &Path)) {
    test("BF16", &tiny());
    test("F16", f16s(&tiny()).path());
    test("F32", f32s(&tiny()).path());
    test("FP8, trained", &tales());
    test("FP8 and BF16", drawn(Precision::Fp8).path());
    test("BF16, other family", &tiny_olmoe());
}

#[test]
fn what_is_loaded_is_byte_for_byte_what_convert_writes() {
    with_sources(|what, source| {
        let stored = tensors_of(source);
        let fp8 = stored.values().any(|tensor| tensor.dtype == "F8_E4M3");
        let tied = !stored.contains_key("lm_head.weight");
        for widths in [EIGHT, GROUPS, NARROW, HALVES].into_iter().filter(|widths| !fp8 || *widths != HALVES) {
            let container = tensors_of(converted(source, &widths).path());
            for threads in [1, 7] {
                let resident = load(source, &widths, threads, false).unwrap();
                let mut quantized = 0;
                for (name, matrix) in matrices(&resident, tied) {
                    let (view, is_router) = (resident.view(matrix), name.ends_with(".mlp.gate.weight"));
                    let expected = if is_router { &stored[&name] } else { &container[&name] };
                    assert!(view.data() == expected.data, "{what}, {widths}: {name} as {}", view.format());
                    let scales = container.get(&format!("{name}.qs")).map_or(&[][..], |scales| &scales.data);
                    assert!(view.scales() == scales, "{what}, {widths}: scales of {name} as {}", view.format());
                    quantized += usize::from(view.format().is_integer());
                }
                assert_eq!(quantized > 0, widths != HALVES);
            }
        }
    });
}

#[test]
fn answers_are_those_of_a_container_with_the_same_experts() {
    with_sources(|what, source| {
        let widths = if what.contains("trained") { NARROW } else { EIGHT };
        let made = converted(source, &widths);
        let container = with_experts_of(source, made.path());
        for activations in [Activations::Int8, Activations::F32] {
            let arithmetic = Arithmetic { model: engines::Model::Tiny, form: AttentionForm::Auto, activations };
            let open = |dir: &Path, resident: Widths, threads: usize| {
                let setup = Setup { threads, ..Setup::default() };
                let config = EngineConfig { resident, ..config(&arithmetic, &setup) };
                Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap()
            };
            let prompt: Vec<u32> = (0..40).map(|i| (i * i * 31 + i * 17 + 5) % 256).collect();
            let expected = answer(&mut open(container.path(), Widths::default(), 1), &prompt, 12);
            for threads in [1, 3] {
                let found = answer(&mut open(source, widths, threads), &prompt, 12);
                assert_same(&found, &expected, &(what, activations, threads));
            }
            let unlike = answer(&mut open(source, Widths::default(), 1), &prompt, 12);
            assert!(unlike.logits != expected.logits, "{what}: widths make no difference");
        }
    });
}

#[test]
fn what_is_narrow_already_stays_and_what_is_quantized_is_not_quantized_again() {
    let container = converted(&tiny(), &GROUPS);
    let stored = tensors_of(container.path());
    let resident = load(container.path(), &EIGHT, 1, false).unwrap();
    for (name, matrix) in matrices(&resident, false) {
        assert!(resident.view(matrix).data() == stored[&name].data, "{name}");
    }
    let Err(LoadError::Requantized { file, tensor, stored, asked }) = load(container.path(), &NARROW, 1, false) else {
        panic!("quantized again")
    };
    assert!(file.ends_with(".safetensors") && tensor == "model.embed_tokens.weight", "{file} {tensor}");
    assert_eq!((stored.to_string(), asked.to_string()), ("int8".to_owned(), "int4".to_owned()));
    // FP8 in 16 bits would be twice as large and no better.
    let source = drawn(Precision::Fp8);
    let (resident, stored) = (load(source.path(), &HALVES, 2, false).unwrap(), tensors_of(source.path()));
    for (name, matrix) in matrices(&resident, false) {
        assert!(resident.view(matrix).data() == stored[&name].data, "{name}");
    }
}

#[test]
fn a_weight_that_is_not_a_number_is_named_with_its_place_and_the_first_one_wins() {
    let first = "model.layers.0.self_attn.kv_b_proj.weight";
    let model = Model::tiny();
    let nan = [0xc0, 0x7f];
    let cols = |shard: &Shard, name: &str| shard.get(name).shape[1] as usize;
    model.edit_shard(|shard| {
        let at = 2 * (5 * cols(shard, first) + 9);
        shard.get_mut(first).data[at..][..2].copy_from_slice(&nan);
        shard.get_mut("lm_head.weight").data[..2].copy_from_slice(&nan);
        shard.get_mut("model.layers.3.self_attn.o_proj.weight").data[..2].copy_from_slice(&nan);
    });
    for threads in [1, 8] {
        let error = |widths| load(model.path(), widths, threads, false).err().unwrap();
        let LoadError::Checkpoint(CheckpointError::NotFinite { file, tensor, row, col, value }) =
            error(&Widths { io: None, ..EIGHT })
        else {
            panic!("another error")
        };
        assert_eq!((file, tensor.as_str(), row, col), (model.shard_path(), first, 5, 9));
        assert!(value.is_nan());
        assert!(error(&EIGHT).to_string().contains("lm_head.weight: row 0, column 0 is NaN"));
    }
    // As it is stored it is loaded, as ever.
    load(model.path(), &Widths::default(), 1, false).unwrap();
}

#[test]
fn a_file_that_ends_early_and_a_raised_flag_end_it() {
    let model = Model::tiny();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Buffered).unwrap());
    let plan = || Plan::new(&checkpoint, files.clone(), false, &EIGHT).unwrap();
    let cancelled = plan().load(4, &AtomicBool::new(true), &Loaded::default()).err();
    assert!(matches!(cancelled, Some(LoadError::Cancelled)), "{cancelled:?}");
    let last = checkpoint.tensors.iter().max_by_key(|(_, tensor)| tensor.offset).unwrap();
    let plan = plan();
    fs::File::options().write(true).open(model.shard_path()).unwrap().set_len(last.1.offset / 2).unwrap();
    let Some(LoadError::Read { tensor, source }) = plan.load(4, &AtomicBool::new(false), &Loaded::default()).err()
    else {
        panic!("it was read")
    };
    assert!(checkpoint.tensors.get(&tensor).is_some() && source.to_string().contains("model.safetensors"), "{source}");
}

#[test]
fn memory_is_counted_as_it_is_held_and_says_what_was_saved() {
    let (source, open) = (tiny(), |dir: &Path| Checkpoint::open(dir).unwrap());
    let plan = |dir: &Path, resident| {
        let config = EngineConfig { resident, context: Some(64), ..EngineConfig::new(1 << 32) };
        Engine::plan(&open(dir), &config)
    };
    let (as_stored, eight) = (plan(&source, Widths::default()).unwrap(), plan(&source, EIGHT).unwrap());
    // Every matrix but the router: a byte a weight instead of two, and a scale a row; padding to cache lines aside.
    let (mut halves, mut bytes, mut routers) = (0, 0, 0);
    for (name, matrix) in matrices(&load(&source, &EIGHT, 1, false).unwrap(), false) {
        let (rows, cols) = (matrix.spec().rows as u64, matrix.spec().cols as u64);
        let is_mtp = name.starts_with("model.layers.5.");
        match name.ends_with(".mlp.gate.weight") {
            _ if is_mtp => {}
            true => routers += 2 * rows * cols,
            false => (halves, bytes) = (halves + 2 * rows * cols, bytes + rows * cols + 4 * rows),
        }
    }
    let near = |found: u64, expected: u64| (expected..expected + 64 * 300).contains(&found);
    assert!(near(as_stored.resident, halves + routers), "{as_stored:?}");
    assert!(near(eight.resident, bytes + routers), "{eight:?}");
    assert_eq!((as_stored.saved, eight.resident + eight.saved), (0, halves + routers));
    assert!(eight.to_string().contains(" stored) + "), "{eight}");
    let refused = |resident| {
        let memory = millstream::engine::Memory::Total(Some(100_000));
        let config = EngineConfig { resident, memory, context: Some(64), ..EngineConfig::new(1 << 32) };
        match Engine::plan(&open(&source), &config) {
            Err(error @ EngineError::TooSmall(_)) => error.hint().unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let hint = refused(Widths::default());
    assert!(hint.contains("--dense-bits 8 --io-bits 8 quantizes weights while they are loaded"), "{hint}");
    let hint = refused(Widths { io: Some(Width::Bits8), ..Widths::default() });
    assert!(hint.contains("; --dense-bits 8 quantizes"), "{hint}");
    assert!(!refused(EIGHT).contains("quantizes"));
}

#[test]
fn commands_take_the_flags_and_give_the_answers_of_the_container() {
    let home = tempfile::tempdir().unwrap();
    let widths = Widths { dense: Some(Width::Bits4), io: Some(Width::Bits8), group: Some(64), ..Widths::default() };
    let flags = ["--dense-bits", "4", "--io-bits", "8", "--group", "64"];
    let made = converted(&tales(), &Widths { indexer: Some(Width::Bits8), ..widths });
    // What has no width is as the source has it.
    let container = with_experts_of(&tales(), made.path());
    container.edit_shard(|shard| {
        let stored = tensors_of(&tales());
        shard.tensors.retain(|tensor| !tensor.name.contains(".indexer."));
        shard.tensors.extend(stored.into_values().filter(|tensor| tensor.name.contains(".indexer.")));
    });
    let run = |dir: &Path, flags: &[&str]| {
        let fixed = ["run", "--json", "--usage", "off", "-n", "24", "--temp", "0", "-p", "Once upon a time", "-m"];
        program(home.path()).args(fixed).arg(dir).args(flags).output().unwrap()
    };
    let (found, expected) = (json(&done(run(&tales(), &flags))), json(&done(run(container.path(), &[]))));
    assert_eq!(found["ids"], expected["ids"]);
    assert_ne!(found["ids"], json(&done(run(&tales(), &[])))["ids"], "widths make no difference");
    assert_eq!(found["settings"]["dense-bits"], "4");
    let resident = &found["memory"]["resident"];
    // The container holds the router in twice the bytes: 5 layers of [32, 256].
    assert!(
        resident.as_u64().unwrap().abs_diff(expected["memory"]["resident"].as_u64().unwrap()) < 5 * 32 * 256 * 2 + 4096
    );

    let model = tales();
    let model = model.to_str().unwrap();
    let plan = [&["plan", "--json", "--disk", "1", "-m", model][..], &flags].concat();
    let plan = json(&done(program(home.path()).args(plan).output().unwrap()));
    assert_eq!(&plan["budget"]["resident"], resident);
    assert!(plan["budget"]["saved_by_quantizing"].as_u64().unwrap() > 1_000_000, "{}", plan["budget"]);
    for command in ["info", "doctor"] {
        let output = program(home.path()).args([command, "-m", model]).args(flags).output().unwrap();
        let output = done(output);
        assert!(program::stdout(&output).contains(" stored) + "), "{command}: {}", program::stdout(&output));
    }
    let refused_with = |flags: &[&str], words: &[&str]| refused(&run(&tales(), flags), 2, words);
    refused_with(&["--dense-bits", "5"], &["--dense-bits", "a width is 2, 3, 4, 8 or 16, not 5"]);
    refused_with(&["--dense-bits", "8", "--group", "64"], &["--group", "4-bit", "or leave --group out"]);
    refused_with(&["--dense-bits", "4", "--group", "65"], &["--group", "16, 32, 48, 64, 96, 128, 192, 256"]);
    let again = run(container.path(), &["--io-bits", "4"]);
    refused(&again, 2, &["model.embed_tokens.weight is int8 and was to be int4", "convert the original weights"]);
    let kept = done(run(container.path(), &["--dense-bits", "8"]));
    assert!(stderr(&kept).contains("as narrow as asked, or narrower, and stay"), "{}", stderr(&kept));
}
