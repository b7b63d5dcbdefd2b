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
use millstream::checkpoint::{Checkpoint, MatrixSource, Part, TensorMap, census::Census};
use millstream::engine::{Activations, AttentionForm, Engine, EngineConfig, Switch};
use millstream::kernels::{Input, Kernels, Team, WeightRef, matmul};
use millstream_io::{FileSet, FileSpan, IoMode, layout};
use safetensors::{Model, Shard, Tensor};
use serde_json::Value;

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

fn decoded(map: &TensorMap, source: &MatrixSource, kernels: &Kernels) -> Vec<f32> {
    let (data, scales) = bytes_of(map, source);
    let weights = WeightRef::new(source.spec, &data, &scales);
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
    assert_eq!(names.len(), 13);
    for name in names {
        let part = |what: &str| shard.get(&format!("{name}.{what}"));
        let (wanted, x) = (floats(part("decoded")), floats(part("x")));
        let (rows, cols) = (part("decoded").shape[0] as usize, x.len());
        let source = map.matrix(&format!("{name}.weight"), rows, cols).unwrap();
        assert_eq!(source.spec.format.to_string(), name);
        let products: Vec<f64> = part("product").data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        let (data, scales) = bytes_of(&map, &source);
        let weights = WeightRef::new(source.spec, &data, &scales);
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
    let arithmetic = Arithmetic { model: engines::Model::Tiny, form: AttentionForm::Absorbed, activations };
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
        let arithmetic = Arithmetic { model: engines::Model::Tiny, form: AttentionForm::Absorbed, activations };
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
