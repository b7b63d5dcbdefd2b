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
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use engines::{Arithmetic, Reader, Setup, answer, assert_same, config, has_ring, tales, tiny, tiny_olmoe};
use millstream::checkpoint::convert::{ConvertOptions, Width, Widths, convert};
use millstream::checkpoint::required::Role;
use millstream::checkpoint::synth::{Precision, Preset, SynthOptions, synth};
use millstream::checkpoint::{Checkpoint, CheckpointError, ExpertSource};
use millstream::engine::{
    Activations, AttentionForm, Engine, EngineConfig, EngineError, GuessFrom, GuessRule, Notice, Switch, Verify,
};
use millstream::forward::ForwardError;
use millstream::kernels::{Format, Kernels, Requantizer, Team};
use millstream::model::load::{LoadError, Loaded};
use millstream::model::resident::{Plan, Resident};
use millstream::model::weights::{AttentionWeights, Layer, Matrix, Mlp, MlpWeights};
use millstream::store::{ExpertKey, ExpertStore, ExpertTable, ExpertWeights, StoreError};
use millstream_io::{
    Arena, DeviceConfig, DeviceKind, FileSet, IoMode, SimConfig, SimFault, SlabPool, open_device, sim_device,
};
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
    let Widths { experts, dense, io, mtp, indexer, group } = *widths;
    let width = |width: Option<Width>| width.unwrap_or(Width::Bits8);
    ConvertOptions {
        experts: width(experts),
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
            let arithmetic =
                Arithmetic { form: AttentionForm::Auto, ..Arithmetic::absorbed(engines::Model::Tiny, activations) };
            let open = |dir: &Path, widths: Widths, threads: usize| {
                let setup = Setup { threads, ..Setup::default() };
                let config = EngineConfig { widths, ..config(&arithmetic, &setup) };
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
    let plan = |dir: &Path, widths| {
        let config = EngineConfig { widths, context: Some(64), ..EngineConfig::new(1 << 32) };
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
    let refused = |widths| {
        let memory = millstream::engine::Memory::Total(Some(100_000));
        let config = EngineConfig { widths, memory, context: Some(64), ..EngineConfig::new(1 << 32) };
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

/// Everything in one width.
fn all_in(width: Width, group: Option<u16>) -> Widths {
    Widths { experts: Some(width), group, ..Widths::resident(width) }
}

/// Lends every expert of `dir`, held in `widths`, with room for two of each size and layers of the MTP kind at the end.
fn lend_all(dir: &Path, widths: &Widths, threads: usize, mut look: impl FnMut(ExpertKey, &ExpertWeights<'_>)) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap());
    let layers = checkpoint.arch.layers.len();
    let role = |layer| if layer < layers { Role::Expert } else { Role::Mtp };
    let held = |layer, source: &ExpertSource| source.held(role(layer), widths).unwrap();
    let table = ExpertTable::build(&checkpoint.experts, &files, |_| true, held, true).unwrap();
    let sizes = table.sizes().iter().map(|size| (size.slab_bytes, 2)).chain(table.staging());
    let pool = SlabPool::of_sizes(&sizes.collect::<Vec<_>>()).unwrap();
    let device = DeviceConfig { kind: DeviceKind::Threads, ..DeviceConfig::default() };
    let device = open_device(&device, files.clone(), &pool).unwrap();
    let kept = table.kept_scales().clone();
    let mut store = ExpertStore::new(table, device, pool);
    if kept.bytes > 0 {
        let mut scales = Arena::new(kept.bytes).unwrap();
        for (span, at) in &kept.pieces {
            let bytes = &mut scales.as_mut_slice()[*at..][..span.len as usize];
            files.read_exact_at(span.file, span.offset, bytes).unwrap();
        }
        store.set_scales(scales);
    }
    let (team, mut requantizer) = (Team::new(threads), Requantizer::new(vec![0.0; 1 << 22]));
    for (layer, experts) in checkpoint.experts.layers.iter().enumerate() {
        let all: Vec<u16> = (0..experts.as_ref().map_or(0, Vec::len) as u16).collect();
        store.request(layer, &all).unwrap();
        while let Some(lease) = store.next_ready().unwrap() {
            let quantized = store.quantize(&lease, |weights, held, data, scales| {
                let made = requantizer.run(Kernels::best(), &team, weights, held.format, data, scales);
                made.map_err(|unfit| (unfit.row, unfit.col, unfit.value))
            });
            quantized.unwrap();
            look(ExpertKey { layer: layer as u16, expert: lease.expert() }, &store.weights(&lease));
            store.release(lease).unwrap();
        }
        assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
    }
}

#[test]
fn an_experts_slab_is_byte_for_byte_what_convert_writes() {
    let narrow = [(Width::Bits8, None), (Width::Bits4, None), (Width::Bits4, Some(16)), (Width::Bits3, None)];
    with_sources(|what, source| {
        let fp8 = tensors_of(source).values().any(|tensor| tensor.dtype == "F8_E4M3");
        for (width, group) in narrow.into_iter().chain([(Width::Bits2, None), (Width::Bits16, None)]) {
            if fp8 && width == Width::Bits16 {
                continue;
            }
            let widths = all_in(width, group);
            let container = tensors_of(converted(source, &widths).path());
            for threads in [1, 3] {
                let mut compared = 0;
                lend_all(source, &widths, threads, |ExpertKey { layer, expert }, weights| {
                    let matrices = [("gate", weights.gate), ("up", weights.up), ("down", weights.down)];
                    for (part, found) in matrices {
                        let name = format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
                        assert!(
                            found.data() == container[&name].data,
                            "{what}, {widths}: {name} as {}",
                            found.format()
                        );
                        let scales = container.get(&format!("{name}.qs")).map_or(&[][..], |scales| &scales.data);
                        assert!(found.scales() == scales, "{what}, {widths}: scales of {name}");
                        compared += 1;
                    }
                });
                let experts = container.keys().filter(|name| is_expert(name) && name.ends_with(".weight")).count();
                assert_eq!(compared, experts, "{what}");
            }
        }
    });
}

#[test]
fn of_16_bits_fp8_stays_and_nothing_is_quantized() {
    let source = drawn(Precision::Fp8);
    let stored = tensors_of(source.path());
    lend_all(source.path(), &HALVES, 1, |_, weights| assert_eq!(weights.gate.format(), Format::Fp8Block));
    lend_all(source.path(), &all_in(Width::Bits16, None), 1, |ExpertKey { layer, expert }, weights| {
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight");
        assert!(weights.down.data() == stored[&name].data, "{name}");
    });
}

/// Ways to read few or many, in any order, ahead or not.
fn setups(widths: Widths) -> Vec<Setup> {
    let base = Setup { widths, ..Setup::RESIDENT };
    let mut setups = vec![base];
    for (seed, slabs) in (0..).zip([1, 2, 3, 7, 20]) {
        for (pipeline, prefetch) in [(Switch::On, Switch::On), (Switch::Off, Switch::Off), (Switch::On, Switch::Off)] {
            let guess = GuessRule { from: GuessFrom::Attention, layers: 2 };
            let few = Setup { slabs, pipeline, prefetch, guess, threads: 1 + slabs % 3, ..base };
            setups.push(Setup { reader: Reader::Shuffled(7919 * seed), ..few });
            setups.push(Setup { rows: 6, ..few });
            setups.push(Setup { reader: Reader::Map, ..few });
            if has_ring() {
                setups.push(Setup { reader: Reader::Ring, ..few });
            }
        }
    }
    setups
}

#[test]
fn answers_are_those_of_the_container_whatever_reads_the_experts() {
    with_sources(|what, source| {
        let widths = all_in(Width::Bits4, what.contains("trained").then_some(64));
        let container = converted(source, &widths);
        let prompt: Vec<u32> = (0..40).map(|i| (i * i * 31 + i * 17 + 5) % 256).collect();
        for activations in [Activations::Int8, Activations::F32] {
            let arithmetic =
                Arithmetic { form: AttentionForm::Auto, ..Arithmetic::absorbed(engines::Model::Tiny, activations) };
            let open = |dir: &Path, setup: &Setup| engines::open_at(dir, &arithmetic, setup).unwrap();
            let expected = answer(&mut open(container.path(), &Setup::RESIDENT), &prompt, 12);
            let setups = setups(widths);
            // Enough of each with one kind of activations, a few with the other.
            let step = if activations == Activations::Int8 { 1 } else { 7 };
            for setup in setups.iter().step_by(step) {
                let mut engine = open(source, setup);
                assert_same(&answer(&mut engine, &prompt, 12), &expected, &(what, activations, setup));
                let store = engine.store();
                assert_eq!(store.pool().free() + store.resting(), store.pool().slabs(), "{setup:?}");
            }
            let unlike = Setup { widths: Widths { experts: None, ..widths }, ..Setup::RESIDENT };
            let unlike = answer(&mut open(source, &unlike), &prompt, 12);
            assert!(unlike.logits != expected.logits, "{what}: the width of experts makes no difference");
        }
    });
}

/// A simulated drive under an engine whose experts become int4.
fn simulated(dir: &Path, slabs: usize, sim: &SimConfig) -> Engine {
    let activations = Activations::Int8;
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, activations);
    let setup = Setup { slabs, widths: all_in(Width::Bits4, None), prefetch: Switch::On, ..Setup::RESIDENT };
    let config = config(&arithmetic, &setup);
    let device = |files: &Arc<FileSet>, pool: &SlabPool| Ok(sim_device(sim, files.clone(), pool)?);
    Engine::open_with(Checkpoint::open(dir).unwrap(), &config, &device).unwrap()
}

#[test]
fn failing_reads_give_the_right_tokens_or_a_named_error_and_lose_no_slab() {
    let prompt = engines::Model::Tiny.prompt(20);
    let container = converted(&tiny(), &all_in(Width::Bits4, None));
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, Activations::Int8);
    let mut whole = engines::open_at(container.path(), &arithmetic, &Setup::RESIDENT).unwrap();
    let expected = engines::greedy(&mut whole, &prompt, 10).unwrap();
    let (mut right, mut failed) = (0, 0);
    for seed in 0..80u64 {
        let mild = SimConfig { eio_per_mille: 0, zero_per_mille: 0, ..SimConfig::stormy(seed) };
        let sim = match seed % 3 {
            0 => mild,
            1 => SimConfig { eio_per_mille: 40, ..SimConfig::stormy(seed) },
            _ => SimConfig { script: (seed..seed + 9).map(|call| (call, SimFault::Errno(5))).collect(), ..mild },
        };
        let sim = SimConfig { queue: 1 + (seed % 11) as usize, ..sim };
        let mut engine = simulated(&tiny(), 1 + (seed % 9) as usize, &sim);
        for _ in 0..6 {
            match engines::greedy(&mut engine, &prompt, 10) {
                Ok(ids) => {
                    assert_eq!(ids, expected, "seed {seed}");
                    right += 1;
                }
                Err(EngineError::Forward(ForwardError::Store(StoreError::Read { source, .. }))) => {
                    assert_ne!(seed % 3, 0, "seed {seed}: what passes by itself is no error: {source}");
                    failed += 1;
                }
                Err(other) => panic!("seed {seed}: {other}"),
            }
            let store = engine.store();
            assert_eq!(store.pool().free() + store.resting(), store.pool().slabs(), "seed {seed}");
        }
    }
    assert!(right > 100 && failed > 10, "{right} right, {failed} failed");
}

#[test]
fn a_generation_that_is_given_up_is_right_when_it_is_asked_for_again() {
    let prompt = engines::Model::Tiny.prompt(20);
    let expected = engines::greedy(&mut simulated(&tiny(), 4, &SimConfig::calm(0)), &prompt, 10).unwrap();
    let script = vec![(9, SimFault::Stall(std::time::Duration::from_secs(50)))];
    let mut engine = simulated(&tiny(), 4, &SimConfig { script, ..SimConfig::calm(0) });
    engine.set_watch(Box::new(|what| match what {
        Notice::Hung(_) => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    }));
    assert!(engines::greedy(&mut engine, &prompt, 10).unwrap().is_empty());
    assert!(engine.store().gave_up());
    assert_eq!(engines::greedy(&mut engine, &prompt, 10).unwrap(), expected);
    let store = engine.store();
    assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
}

#[test]
fn a_weight_of_an_expert_that_is_not_a_number_ends_the_generation_by_name() {
    let model = Model::tiny();
    model.edit_shard(|shard| {
        let of_layer = |tensor: &&mut Tensor| {
            tensor.name.starts_with("model.layers.2.mlp.experts.") && tensor.name.ends_with("up_proj.weight")
        };
        for tensor in shard.tensors.iter_mut().filter(of_layer) {
            let at = 2 * (5 * tensor.shape[1] as usize + 9);
            tensor.data[at..][..2].copy_from_slice(&[0xc0, 0x7f]);
        }
    });
    let mut engine = simulated(model.path(), 3, &SimConfig::calm(0));
    for _ in 0..2 {
        let error = engines::greedy(&mut engine, &engines::Model::Tiny.prompt(20), 10).unwrap_err();
        let EngineError::Forward(ForwardError::Store(StoreError::Unfit(unfit))) = &error else { panic!("{error:?}") };
        let CheckpointError::NotFinite { file, tensor, row, col, value } = &**unfit else { panic!("{unfit:?}") };
        assert_eq!((file, *row, *col), (&model.shard_path(), 5, 9));
        assert!(tensor.starts_with("model.layers.2.mlp.experts.") && tensor.ends_with(".up_proj.weight"), "{tensor}");
        assert!(value.is_nan() && error.hint().is_some() && error.blames_files());
        let store = engine.store();
        assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
    }
}

#[test]
fn what_is_read_is_checked_before_it_is_quantized_and_put_right_from_a_mirror() {
    let options = ConvertOptions { repack: true, ..ConvertOptions::default() };
    let [whole, damaged] = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    for dir in [&whole, &damaged] {
        convert(&tiny(), dir.path(), &options, &mut |_| {}).unwrap();
    }
    let prompt = engines::Model::Tiny.prompt(20);
    let widths = all_in(Width::Bits4, None);
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, Activations::Int8);
    let open = |dir: &Path, verify: Verify, mirrors: Vec<PathBuf>| {
        let setup = Setup { slabs: 3, widths, ..Setup::RESIDENT };
        let config = EngineConfig { verify, mirrors, ..config(&arithmetic, &setup) };
        Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap()
    };
    let mut engine = open(whole.path(), Verify::All, vec![]);
    let expected = engines::greedy(&mut engine, &prompt, 10).unwrap();
    assert!(engine.store().stats().checked > 0);
    let checkpoint = Checkpoint::open(damaged.path()).unwrap();
    for expert in checkpoint.experts.layers[3].iter().flatten() {
        let (file, at) = (checkpoint.tensors.path(expert.up.data.file), expert.up.data.offset + 6);
        let file = fs::File::options().read(true).write(true).open(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    let mut engine = open(damaged.path(), Verify::All, vec![]);
    let error = engines::greedy(&mut engine, &prompt, 10).unwrap_err();
    let EngineError::Forward(ForwardError::Store(StoreError::Damaged(found))) = &error else { panic!("{error}") };
    assert_eq!(found.key.layer, 3);
    // A sample takes all that is quantized, so that nothing wrong is ever made into an answer.
    for seed in 0..24 {
        let mut engine = open(damaged.path(), Verify::Sample, vec![whole.path().to_owned()]);
        for _ in 0..3 {
            assert_eq!(engines::greedy(&mut engine, &prompt, 10).unwrap(), expected, "{seed}");
            let store = engine.store();
            assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
        }
    }
}

#[test]
fn one_wrong_expert_of_many_is_found_before_it_is_quantized_though_only_a_sample_is_checked() {
    let [whole, damaged] = [(); 2].map(|()| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    for dir in [&whole, &damaged] {
        convert(&tales(), dir.path(), &ConvertOptions { repack: true, ..ConvertOptions::default() }, &mut |_| {})
            .unwrap();
    }
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, Activations::Int8);
    let open = |dir: &Path, mirrors: Vec<PathBuf>, seed: u64| {
        let setup = Setup { slabs: 20, widths: all_in(Width::Bits4, Some(64)), ..Setup::RESIDENT };
        let config = EngineConfig { verify: Verify::Sample, verify_seed: seed, mirrors, ..config(&arithmetic, &setup) };
        Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap()
    };
    let prompt: Vec<u32> = (0..60).map(|i| (i * i * 31 + i * 17 + 5) % 256).collect();
    let mut engine = open(whole.path(), vec![], 0);
    let expected = engines::greedy(&mut engine, &prompt, 10).unwrap();
    let checkpoint = Checkpoint::open(damaged.path()).unwrap();
    assert!(checkpoint.experts.layers.iter().flatten().map(Vec::len).sum::<usize>() > 64);
    // Of the last layer, one that is used.
    let usage = engine.store().usage();
    let last = usage.len() - 32;
    let used = (0..32).max_by_key(|&expert| usage[last + expert]).unwrap();
    let source = &checkpoint.experts.layers[5].as_ref().unwrap()[used];
    let path = checkpoint.tensors.path(source.up.data.file);
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, source.up.data.offset + 6).unwrap();
    file.write_all_at(&[byte[0] ^ 1], source.up.data.offset + 6).unwrap();
    for seed in 0..6 {
        let error = engines::greedy(&mut open(damaged.path(), vec![], seed), &prompt, 10).unwrap_err();
        let EngineError::Forward(ForwardError::Store(StoreError::Damaged(found))) = &error else { panic!("{error}") };
        assert_eq!((found.key.layer, usize::from(found.key.expert)), (5, used));
        // Nothing was made of it, so that the answer stands where a copy is right.
        let mut engine = open(damaged.path(), vec![whole.path().to_owned()], seed);
        assert_eq!(engines::greedy(&mut engine, &prompt, 10).unwrap(), expected, "{seed}");
    }
}

#[test]
fn commands_quantize_experts_and_count_what_that_takes() {
    let home = tempfile::tempdir().unwrap();
    let widths = Widths { io: Some(Width::Bits8), indexer: Some(Width::Bits8), ..all_in(Width::Bits4, Some(64)) };
    let flags = ["--expert-bits", "4", "--dense-bits", "4", "--io-bits", "8", "--indexer-bits", "8", "--group", "64"];
    let container = converted(&tales(), &widths);
    let (model, container) = (tales(), container.path());
    let run = |dir: &Path, flags: &[&str]| {
        let fixed = ["run", "--json", "--usage", "off", "-n", "24", "--temp", "0", "-p", "Once upon a time", "-m"];
        program(home.path()).args(fixed).arg(dir).args(flags).output().unwrap()
    };
    let found = json(&done(run(&model, &flags)));
    let expected = json(&done(run(container, &[])));
    assert_eq!(found["ids"], expected["ids"]);
    assert_eq!(found["settings"]["expert-bits"], "4");
    assert!(found["stages"]["quantize"]["n"].as_u64().unwrap() > 0 && expected["stages"]["quantize"].is_null());
    // Eight slabs of an expert in FP8: three matrices of 128 x 256 with a scale for each block of 128 x 128.
    let stored = Checkpoint::open(&model).unwrap().experts.get(1, 0).unwrap().bytes();
    let staging = found["memory"]["staging"].as_u64().unwrap();
    assert!((8 * stored..8 * (stored + 3 * 4096)).contains(&staging), "{staging} for eight of {stored}");
    let bytes = found["io"]["useful_bytes"].as_u64().unwrap();
    assert_eq!(bytes % stored, 0, "what is read is what is stored");
    let plan = |flags: &[&str]| {
        let fixed = ["plan", "--untimed", "--json", "--ram", "60M", "-c", "256", "--usage", "off", "-m"];
        json(&done(program(home.path()).args(fixed).arg(&model).args(flags).output().unwrap()))
    };
    let (narrow, as_stored) = (plan(&flags), plan(&flags[2..]));
    assert_eq!(narrow["budget"]["staging"].as_u64().unwrap(), staging);
    assert_eq!(as_stored["budget"]["staging"], 0);
    assert_eq!(narrow["uncached_bytes_per_token"], as_stored["uncached_bytes_per_token"]);
    refused(&run(container, &["--expert-bits", "3"]), 2, &["experts.0.gate_proj.weight is int4", "was to be int3"]);
    let kept = done(run(container, &["--expert-bits", "8"]));
    assert!(
        stderr(&kept).contains("experts are stored as narrow as asked, or narrower, and stay"),
        "{}",
        stderr(&kept)
    );
    refused(&run(&model, &["--expert-bits", "5"]), 2, &["--expert-bits", "a width is 2, 3, 4, 8 or 16, not 5"]);
}
