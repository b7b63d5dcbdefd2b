//! Containers that other programs wrote: read as they are, and every number compared with ones made elsewhere.
//!
//! `tests/data/containers` is written by `scripts/containers.py`, which shares no code with the engine.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use engines::{ALL_SLABS, Answer, Arithmetic, Setup, answer, assert_same, config};
use millstream::checkpoint::convert::{ConvertOptions, Width, convert};
use millstream::checkpoint::{Checkpoint, MatrixSource, Part, TensorMap, census::Census};
use millstream::engine::{Activations, Engine, EngineConfig, Switch};
use millstream::kernels::{Input, Kernels, Team, WeightRef, matmul};
use millstream_io::{FileSet, FileSpan, IoMode, layout};
use safetensors::{Model, Shard, Tensor};
use serde_json::{Value, json};

fn containers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/containers")
}

fn mixed() -> PathBuf {
    containers().join("tiny-mixed")
}

/// Data and scales of a matrix.
fn bytes_of(map: &TensorMap, source: &MatrixSource) -> (Vec<u8>, Vec<u8>) {
    let read = |span: FileSpan| {
        let file = fs::read(map.path(span.file)).unwrap();
        file[span.offset as usize..][..span.len as usize].to_vec()
    };
    (read(source.data), source.scales.map(read).unwrap_or_default())
}

/// The matrix over bytes that [`bytes_of`] gave.
fn weights_of<'a>(map: &TensorMap, source: &MatrixSource, data: &'a [u8], scales: &'a [u8]) -> WeightRef<'a> {
    let weights = WeightRef::new(source.spec, data, scales);
    let Some(factor) = source.factor else { return weights };
    let file = fs::read(map.path(factor.file)).unwrap();
    weights.with_factor(f32::from_le_bytes(file[factor.offset as usize..][..4].try_into().unwrap()))
}

fn decoded(map: &TensorMap, source: &MatrixSource, kernels: &Kernels) -> Vec<f32> {
    let (data, scales) = bytes_of(map, source);
    let weights = weights_of(map, source, &data, &scales);
    let mut values = vec![0.0; weights.rows() * weights.cols()];
    for (row, values) in values.chunks_mut(weights.cols()).enumerate() {
        kernels.decode_row(&weights, row, values);
    }
    values
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn every_format_means_what_numpy_says_and_so_do_its_products() {
    let map = TensorMap::open(&containers()).unwrap();
    let shard = Shard::read(&containers().join("matrices.safetensors"));
    let names = shard.tensors.iter().filter_map(|tensor| tensor.name.strip_suffix(".weight"));
    let names: Vec<&str> = names.collect();
    assert_eq!(names.len(), 14);
    for name in names {
        let part = |what: &str| shard.get(&format!("{name}.{what}"));
        let (wanted, x) = (floats(part("decoded")), floats(part("x")));
        let (rows, cols) = (part("decoded").shape[0] as usize, x.len());
        let source = map.matrix(&format!("{name}.weight"), rows, cols).unwrap();
        assert_eq!(source.spec.format.to_string(), name);
        let products: Vec<f64> = part("product").data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        let (data, scales) = bytes_of(&map, &source);
        let weights = weights_of(&map, &source, &data, &scales);
        for kernels in Kernels::all_available() {
            let values = decoded(&map, &source, kernels);
            assert!(values.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} {kernels:?}");
            let input = Input { rows: 1, cols, values: &x, quantized: None };
            let mut out = vec![0.0; rows];
            matmul(kernels, &Team::new(1), &weights, &input, &mut out);
            for (row, (out, product)) in out.iter().zip(&products).enumerate() {
                let terms = wanted[row * cols..][..cols].iter().zip(&x).map(|(w, x)| f64::from((w * x).abs()));
                let bound = cols as f64 * f64::from(f32::EPSILON) * terms.sum::<f64>();
                assert!((f64::from(*out) - product).abs() <= bound, "{name} row {row}: {out} and {product}");
            }
        }
    }
}

/// FNV-1a over the words of floats, as the script has it.
fn fnv1a(values: &[f32]) -> String {
    let step = |hash: u64, value: &f32| (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", values.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// The matrices of the mixed container by name, as the script describes them.
fn described() -> BTreeMap<String, Value> {
    serde_json::from_slice(&fs::read(mixed().join("decoded.json")).unwrap()).unwrap()
}

#[test]
fn a_container_with_every_format_opens_as_it_is_and_every_weight_is_numpys() {
    let checkpoint = Checkpoint::open(&mixed()).unwrap();
    // The index of the checkpoint it was made from; half shards and other tools' files are not even that.
    let [note] = checkpoint.notes() else { panic!("{:?}", checkpoint.notes()) };
    assert!(note.contains("names none of the 8 shards here: ignored as stale"), "{note}");
    let matrices = described();
    assert_eq!(matrices.len(), 6 * 5 + 3 + 5 * (3 + 8 * 3) + 4 * 3 + 3);
    for (name, described) in &matrices {
        let [rows, cols] = [0, 1].map(|at| described["shape"][at].as_u64().unwrap() as usize);
        let source = checkpoint.tensors.matrix(name, rows, cols).unwrap();
        let format = described["format"].as_str().unwrap();
        // A group that covers a row is a scale a row.
        let format =
            if format.starts_with("int4-g") && format[6..].parse::<usize>().unwrap() >= cols { "int4" } else { format };
        assert_eq!(source.spec.format.to_string(), format, "{name}");
        assert_eq!(fnv1a(&decoded(&checkpoint.tensors, &source, Kernels::best())), described["fnv1a"], "{name}");
    }
    // Wide and narrow experts in one MTP layer, and narrow parts of a wide one.
    let mtp: Vec<String> = checkpoint.experts.layers[5]
        .as_ref()
        .unwrap()
        .iter()
        .map(|e| e.matrices().map(|matrix| matrix.spec.format.to_string()).join(" "))
        .collect();
    let (wide, narrow) = ("int8 int8 int8", "int4 int4 int4");
    assert_eq!(mtp, [wide, narrow, wide, wide, narrow, wide, "int8 int8 int4", wide]);
    let census = Census::take(&checkpoint).unwrap();
    assert_eq!(census.unused_bytes, 0);
    let formats: Vec<String> = census.formats().iter().map(ToString::to_string).collect();
    for format in ["f32", "fp8-b128", "int8", "int4", "int4-g16", "int4-g32", "int3-g64", "int2"] {
        assert!(formats.contains(&format.to_owned()), "{format} of {formats:?}");
    }
    assert!(census.part(Part::Mtp).bytes > 0 && census.part(Part::Indexer).bytes > 0);
}

fn open(dir: &Path, activations: Activations, setup: &Setup) -> Engine {
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, activations);
    let config = EngineConfig { load_mtp: true, ..config(&arithmetic, setup) };
    Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap()
}

fn said(dir: &Path, activations: Activations, setup: &Setup) -> (Answer, Vec<u32>) {
    let mut engine = open(dir, activations, setup);
    let prompt = engines::Model::Tiny.prompt(40);
    let said = answer(&mut engine, &prompt, 12);
    let drafts = engine.draft_scores(&prompt).unwrap().iter().map(|score| score.to_bits()).collect();
    (said, drafts)
}

/// The same model with every matrix as F32 in one shard, which is a vendor's layout.
fn as_floats() -> Model {
    let checkpoint = Checkpoint::open(&mixed()).unwrap();
    let model = Model::tiny();
    let matrices = described();
    model.edit_shard(|shard| {
        for tensor in &mut shard.tensors {
            let values: Vec<f32> = match matrices.get(&tensor.name) {
                Some(_) => {
                    let [rows, cols] = [0, 1].map(|at| tensor.shape[at] as usize);
                    let source = checkpoint.tensors.matrix(&tensor.name, rows, cols).unwrap();
                    decoded(&checkpoint.tensors, &source, Kernels::best())
                }
                None if tensor.dtype == "F32" => floats(tensor),
                None => {
                    let halves = tensor.data.as_chunks().0.iter();
                    halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16)).collect()
                }
            };
            tensor.dtype = "F32".to_owned();
            tensor.data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        }
    });
    model
}

#[test]
fn it_answers_as_the_same_weights_in_f32_do_bit_for_bit() {
    let floats = as_floats();
    let (expected, drafts) = said(floats.path(), Activations::F32, &Setup::RESIDENT);
    let (found, found_drafts) = said(&mixed(), Activations::F32, &Setup::RESIDENT);
    assert_same(&expected, &found, &"mixed");
    assert!(drafts == found_drafts, "the MTP layer's");
}

/// The mixed container with so much between a shard's scales and its weights that no read takes both.
fn far_apart() -> Model {
    let model = Model::copy_of_files(&mixed());
    for entry in fs::read_dir(model.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let mut shard = Shard::read(&path);
            let at = shard.tensors.iter().position(|tensor| tensor.dtype == "U8").unwrap();
            let name = format!("__pad__{}", path.file_stem().unwrap().to_str().unwrap());
            shard.tensors.insert(at, Tensor::new(&name, "U8", &[200_000], vec![0; 200_000]));
            shard.write(&path);
        }
    }
    model
}

#[test]
fn weights_and_scales_that_lie_apart_are_two_reads_and_the_same_bits() {
    let model = far_apart();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let files = FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap();
    let reads = |layer: usize, expert: usize| {
        let expert = checkpoint.experts.get(layer, expert).unwrap();
        let spans = expert.matrices().into_iter().flat_map(|matrix| [Some(matrix.data), matrix.scales]);
        layout(&spans.flatten().collect::<Vec<_>>(), &files).unwrap().segments.len()
    };
    let counts: Vec<usize> =
        (1..6).flat_map(|layer| (0..8).map(move |expert| (layer, expert))).map(|(l, e)| reads(l, e)).collect();
    // Where a shard ends inside an expert there are up to two reads in each of two shards.
    assert!(counts.iter().all(|count| (2..=4).contains(count)), "{counts:?}");
    assert!(counts.iter().filter(|count| **count == 2).count() > 30, "{counts:?}");
    assert!(counts.iter().any(|count| *count > 2), "{counts:?}");
    for activations in [Activations::Int8, Activations::F32] {
        let (expected, drafts) = said(&mixed(), activations, &Setup::RESIDENT);
        for (slabs, prefetch, pipeline, io) in [
            (ALL_SLABS, Switch::Auto, Switch::Auto, IoMode::Auto),
            (1, Switch::Off, Switch::Off, IoMode::Auto),
            (3, Switch::On, Switch::On, IoMode::Auto),
            (9, Switch::On, Switch::Off, IoMode::Buffered),
        ] {
            let setup = Setup { slabs, prefetch, pipeline, io, rows: 7, ..Setup::RESIDENT };
            for dir in [model.path(), &mixed()] {
                let (found, found_drafts) = said(dir, activations, &setup);
                assert_same(&expected, &found, &(dir, setup));
                assert!(drafts == found_drafts, "{setup:?}");
            }
        }
    }
}

#[test]
fn scales_of_rows_are_kept_where_they_take_little_and_are_counted() {
    let model = far_apart();
    let prompt = engines::Model::Tiny.prompt(40);
    let open = |keep_scales: Switch, slabs: usize, activations: Activations| {
        let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, activations);
        let setup = Setup { slabs, ..Setup::RESIDENT };
        let config = EngineConfig { load_mtp: true, keep_scales, ..config(&arithmetic, &setup) };
        Engine::open(Checkpoint::open(model.path()).unwrap(), &config).unwrap()
    };
    for activations in [Activations::Int8, Activations::F32] {
        let (expected, drafts) = said(&mixed(), activations, &Setup::RESIDENT);
        let mut useful = Vec::new();
        for (keep, slabs, kept) in [
            (Switch::Off, ALL_SLABS, false),
            (Switch::On, ALL_SLABS, true),
            (Switch::Auto, ALL_SLABS, true),
            (Switch::On, 1, true),
            (Switch::Auto, 1, false),
        ] {
            let mut engine = open(keep, slabs, activations);
            let says = |text: &str| engine.notes().iter().filter(|note| note.contains(text)).count();
            assert_eq!(says("are kept in memory: 0.02 MB"), usize::from(kept), "{:?}", engine.notes());
            assert_eq!(says("it takes two reads or more"), usize::from(!kept));
            assert_same(&expected, &answer(&mut engine, &prompt, 12), &(keep, slabs));
            let found: Vec<u32> = engine.draft_scores(&prompt).unwrap().iter().map(|score| score.to_bits()).collect();
            assert!(drafts == found, "{keep:?} {slabs}");
            useful.push((engine.budget().resident, engine.store().stats().useful_bytes));
        }
        // Three vectors of 64 floats for each of 8 experts of four layers; the fifth, in groups, is read with its scales.
        assert_eq!(useful[1].0 - useful[0].0, 32 * 3 * 64 * 4);
        assert!(useful[1].1 < useful[0].1 && useful[1] == useful[2], "{useful:?}");
    }
}

#[test]
fn without_the_indexers_shard_attention_is_dense_and_says_so_once() {
    let model = Model::copy_of_files(&mixed());
    fs::remove_file(model.path().join("out-idx-00000.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let dense: Vec<&String> = checkpoint.notes().iter().filter(|note| note.contains("indexer")).collect();
    assert_eq!(dense, ["no shard holds indexer weights: attention is dense, also beyond 16 positions"]);
    let engine = open(model.path(), Activations::F32, &Setup::RESIDENT);
    assert_eq!(engine.notes().iter().filter(|note| note.contains("indexer")).count(), 1);
    // 40 positions where the indexer kept 16: every one counts.
    let (dense, _) = said(model.path(), Activations::F32, &Setup::RESIDENT);
    let (sparse, _) = said(&mixed(), Activations::F32, &Setup::RESIDENT);
    let vocab = engines::Model::Tiny.vocab() as usize;
    assert!(dense.logits[..16 * vocab] == sparse.logits[..16 * vocab], "dense as far as all are kept anyway");
    assert!(dense.logits != sparse.logits);
    // One of its five tensors is no indexer, and no absence of one.
    let mut shard = Shard::read(&mixed().join("out-idx-00000.safetensors"));
    shard.tensors.retain(|tensor| tensor.name.contains("layers.1.") && tensor.name.contains("wk"));
    shard.write(&model.path().join("out-idx-00000.safetensors"));
    let error = Checkpoint::open(model.path()).unwrap_err().to_string();
    assert!(error.contains("model.layers.0.self_attn.indexer"), "{error}");
}

#[test]
fn without_the_mtp_shards_there_are_no_drafts_and_the_same_answer() {
    let model = Model::copy_of_files(&mixed());
    for entry in fs::read_dir(model.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("out-mtp-") {
            fs::remove_file(path).unwrap();
        }
    }
    // Its indexer lies with the others'.
    let idx = model.path().join("out-idx-00000.safetensors");
    let mut shard = Shard::read(&idx);
    shard.tensors.retain(|tensor| !tensor.name.contains("layers.5."));
    shard.write(&idx);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.arch.mtp.is_none());
    assert!(checkpoint.notes().iter().any(|note| note.contains("no speculation from it")));
    let prompt = engines::Model::Tiny.prompt(40);
    let found = answer(&mut open(model.path(), Activations::Int8, &Setup::RESIDENT), &prompt, 12);
    let expected = answer(&mut open(&mixed(), Activations::Int8, &Setup::RESIDENT), &prompt, 12);
    assert_same(&expected, &found, &"without the layer");
}

/// One matrix as NVFP4, drawn from `seed`, and what it means: every value is exact in BF16.
fn nvfp4(name: &str, rows: usize, cols: usize, seed: usize) -> ([Tensor; 3], Vec<f32>) {
    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let draw = |at: usize| (at + 1).wrapping_mul(seed * 2 + 2_654_435_761) >> 7;
    let codes: Vec<u8> = (0..rows * cols / 2).map(|at| draw(at) as u8).collect();
    // Exponents 5 to 8 of bias 7, every mantissa.
    let scales: Vec<u8> = (0..rows * cols / 16).map(|at| 0x28 + (draw(at) % 32) as u8).collect();
    let factor = 2f32.powi(-6);
    let value = |at: usize| {
        let (code, scale) = (codes[at / 2] >> (4 * (at % 2)) & 15, scales[at / 16]);
        let scale = f32::from(8 + (scale & 7)) * 2f32.powi(i32::from(scale >> 3) - 10);
        let magnitude = E2M1[usize::from(code & 7)] * scale * factor;
        if code & 8 == 0 { magnitude } else { -magnitude }
    };
    let values = (0..rows * cols).map(value).collect();
    let shape = |per: usize| [rows as u64, (cols / per) as u64];
    let tensors = [
        Tensor::new(name, "U8", &shape(2), codes.clone()),
        Tensor::new(&format!("{name}_scale"), "F8_E4M3", &shape(16), scales.clone()),
        Tensor::new(&format!("{name}_scale_2"), "F32", &[], factor.to_le_bytes().to_vec()),
    ];
    (tensors, values)
}

/// The tiny model with its experts as modelopt stores NVFP4, and what they mean.
fn as_nvfp4() -> (Model, BTreeMap<String, Vec<f32>>) {
    let model = Model::tiny();
    let mut meant = BTreeMap::new();
    model.edit_shard(|shard| {
        let is_expert = |tensor: &&Tensor| tensor.name.contains(".mlp.experts.");
        let experts: Vec<Tensor> = shard.tensors.iter().filter(is_expert).cloned().collect();
        shard.tensors.retain(|tensor| !is_expert(&tensor));
        for (seed, Tensor { name, shape, .. }) in experts.into_iter().enumerate() {
            let (tensors, values) = nvfp4(&name, shape[0] as usize, shape[1] as usize, seed);
            shard.tensors.extend(tensors);
            let module = name.strip_suffix("weight").unwrap();
            shard.tensors.push(Tensor::new(&format!("{module}input_scale"), "F32", &[], vec![0; 4]));
            meant.insert(name, values);
        }
    });
    model.edit_config(|config| {
        let quantization = json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]});
        config.insert("quantization_config".to_owned(), quantization);
    });
    (model, meant)
}

#[test]
fn nvfp4_is_converted_with_both_its_scales_and_refused_where_it_would_run() {
    let (model, meant) = as_nvfp4();
    assert_eq!(meant.len(), 5 * 8 * 3);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    assert!(checkpoint.formats().any(|format| format.to_string() == "nvfp4"));
    let census = Census::take(&checkpoint).unwrap();
    assert_eq!(census.part(Part::Experts).bytes, 4 * 8 * 3 * (64 * 32 + 64 * 4 + 4));
    let arithmetic = Arithmetic::absorbed(engines::Model::Tiny, Activations::F32);
    let refused = Engine::plan(&checkpoint, &config(&arithmetic, &Setup::RESIDENT)).unwrap_err();
    let text = refused.to_string();
    for part in ["model.safetensors", "model.layers.1.mlp.experts.0.gate_proj.weight", "nvfp4"] {
        assert!(text.contains(part), "{text}");
    }

    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("bf16");
    let exact = ConvertOptions { experts: Width::Bits16, mtp: Width::Bits16, ..ConvertOptions::default() };
    convert(model.path(), &dir, &exact, &mut |_| {}).unwrap();
    let shards = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    let shards = shards.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    let mut found = 0;
    for tensor in shards.flat_map(|path| Shard::read(&path).tensors) {
        let Some(values) = meant.get(&tensor.name) else { continue };
        let stored: Vec<u8> = values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect();
        assert!(values.iter().all(|value| value.to_bits() & 0xffff == 0));
        assert_eq!((tensor.dtype.as_str(), tensor.data == stored), ("BF16", true), "{}", tensor.name);
        found += 1;
    }
    assert_eq!(found, meant.len());
    // What was made of it runs, though its config.json still says what it was.
    for (name, options) in [("bf16", exact), ("int4", ConvertOptions::default())] {
        let dir = out.path().join(name);
        convert(model.path(), &dir, &options, &mut |_| {}).unwrap();
        answer(&mut open(&dir, Activations::Int8, &Setup::RESIDENT), &engines::Model::Tiny.prompt(9), 3);
    }
    let repack = ConvertOptions { repack: true, ..ConvertOptions::default() };
    let refused = convert(model.path(), &out.path().join("same"), &repack, &mut |_| {}).unwrap_err().to_string();
    assert!(refused.contains("nvfp4"), "{refused}");
}

#[test]
fn nvfp4_by_halves_or_in_another_layout_is_refused_by_name() {
    const NAME: &str = "model.layers.2.mlp.experts.3.up_proj.weight";
    let refused = |edit: &dyn Fn(&mut Shard), parts: &[&str]| {
        let (model, _) = as_nvfp4();
        model.edit_shard(edit);
        let error = Checkpoint::open(model.path()).unwrap_err().to_string();
        for part in [&["model.safetensors", NAME][..], parts].concat() {
            assert!(error.contains(part), "{part} in {error}");
        }
    };
    let part = |suffix: &str| format!("{NAME}{suffix}");
    let replaced = |suffix: &str, dtype: &'static str, shape: &'static [u64], bytes: usize| {
        let name = part(suffix);
        move |shard: &mut Shard| *shard.get_mut(&name) = Tensor::new(&name, dtype, shape, vec![0; bytes])
    };
    refused(&|shard| drop(shard.remove(&part("_scale_2"))), &["_scale_2", "F32, one value"]);
    refused(&|shard| drop(shard.remove(&part("_scale"))), &["needs the scales", "F8_E4M3 [64, 4]"]);
    refused(&replaced("_scale", "U8", &[64, 4], 256), &["_scale: dtype", "expected F8_E4M3", "found U8"]);
    refused(&replaced("_scale", "F8_E4M3", &[64, 2], 128), &["_scale: shape", "[64, 4]", "[64, 2]"]);
    refused(&replaced("_scale_2", "F32", &[2], 8), &["_scale_2: shape", "one value", "[2]"]);
    refused(&replaced("", "U8", &[64, 64], 4096), &["shape", "expected [64, 32]", "found [64, 64]"]);
    refused(&|shard| shard.get_mut(NAME).name.push_str("_packed"), &["weight_packed", "compressed-tensors"]);
    let (model, _) = as_nvfp4();
    model.edit_config(|config| config["quantization_config"]["quant_algo"] = json!("FP8"));
    let error = Checkpoint::open(model.path()).unwrap_err().to_string();
    assert!(error.contains("quantization_config.quant_algo") && error.contains("\"NVFP4\""), "{error}");
}
