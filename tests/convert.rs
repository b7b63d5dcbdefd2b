//! Conversion: the right bytes in the right place, whatever stops it on the way.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/quick.rs"]
mod quick;
#[path = "common/safetensors.rs"]
mod safetensors;
#[path = "common/stepped.rs"]
mod stepped;

use millstream::checkpoint::convert::{ConvertOptions, PlanLine, Progress, Width, convert};
use millstream::checkpoint::{Checkpoint, CheckpointError, MatrixSource};
use millstream::kernels::{Format, Kernels, WeightRef};
use millstream_io::{FileSet, FileSpan, IoMode, layout};
use quick::quick_dir;
use safetensors::{Model, Shard, Tensor, tiny_model, tiny_olmoe};
use std::collections::BTreeMap;
use std::fs;
use std::io::BufReader;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use stepped::advance;

fn trained_model() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/glm-tales"))
}

fn quietly(src: &Path, dst: &Path, options: &ConvertOptions) -> Result<(), CheckpointError> {
    convert(src, dst, options, &mut |_| {}).map(|_| ())
}

fn converted(src: &Path, options: &ConvertOptions) -> tempfile::TempDir {
    let dst = quick_dir();
    quietly(src, dst.path(), options).unwrap();
    dst
}

/// Every file of a directory by name, hidden ones too; but for the stamps of the source's files, which every copy of it
/// has others of.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.ends_with(".millstream-source.json"))
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect()
}

/// Compares without printing megabytes.
fn assert_same_files(found: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    let found = contents(found);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in expected {
        assert!(found[name] == *bytes, "{name} differs");
    }
}

// An independent reader and quantizer: one weight at a time, by the table of formats.

/// All tensors of a directory by name, without padding, with the file and offset of each.
fn tensors_of(dir: &Path) -> BTreeMap<String, (Tensor, PathBuf, u64)> {
    let mut tensors = BTreeMap::new();
    for name in contents(dir).keys().filter(|name| name.ends_with(".safetensors")) {
        let path = dir.join(name);
        let bytes = fs::read(&path).unwrap();
        let data_start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let shard = Shard::read(&path);
        let header = shard.header();
        for tensor in shard.tensors {
            let begin = header[&tensor.name]["data_offsets"][0].as_u64().unwrap();
            if !tensor.name.starts_with("__pad__") {
                tensors.insert(tensor.name.clone(), (tensor, path.clone(), data_start + begin));
            }
        }
    }
    tensors
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Value of an E4M3 code: sign, 4 exponent bits with bias 7, 3 fraction bits, no infinity.
fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = ((code >> 3) & 15, f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * 2f32.powi(-9),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    if code & 128 == 0 { magnitude } else { -magnitude }
}

/// The values of a source tensor, with those of its block scales.
fn source_values(tensors: &BTreeMap<String, (Tensor, PathBuf, u64)>, name: &str) -> Vec<f32> {
    let tensor = &tensors[name].0;
    match tensor.dtype.as_str() {
        "F32" => floats(&tensor.data),
        "BF16" => tensor
            .data
            .chunks_exact(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect(),
        "F8_E4M3" => {
            let scales = &tensors[&format!("{name}_scale_inv")].0;
            let (cols, blocks) = (tensor.shape[1] as usize, scales.shape[1] as usize);
            let scales = floats(&scales.data);
            let value = |(i, &code): (usize, &u8)| e4m3(code) * scales[i / cols / 128 * blocks + i % cols / 128];
            tensor.data.iter().enumerate().map(value).collect()
        }
        other => panic!("{other}"),
    }
}

/// The codes of one row, unpacked, and its scales.
fn expected_row(row: &[f32], bits: u32, group: usize) -> (Vec<i32>, Vec<f32>) {
    let limit = ((1 << (bits - 1)) - 1) as f32;
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for part in row.chunks(group) {
        let largest = part.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = match bits {
            // The largest weight is the level beyond the others.
            3 => part.iter().find(|value| value.abs() == largest).unwrap() / -4.0,
            _ => (largest / limit).max(1e-8),
        };
        scales.push(scale);
        codes.extend(part.iter().map(|value| (value / scale).round_ties_even().clamp(-limit - 1.0, limit) as i32));
    }
    (codes, scales)
}

fn unpack(bytes: &[u8], bits: u32, cols: usize) -> Vec<i32> {
    let per_byte = 8 / bits as usize;
    let code = |i: usize| match bits {
        8 => i32::from(bytes[i] as i8),
        // Of each 64 columns 16 bytes of two low bits, then 8 bytes of high bits.
        3 => {
            let (bytes, i) = (&bytes[i / 64 * 24..], i % 64);
            let (low, high) = (bytes[i / 4] >> (2 * (i % 4)) & 3, bytes[16 + i / 8] >> (i % 8) & 1);
            i32::from(high << 2 | low) - 4
        }
        _ => {
            let field = bytes[i / per_byte] >> (bits as usize * (i % per_byte)) & ((1 << bits) - 1);
            i32::from(field) - (1 << (bits - 1))
        }
    };
    (0..cols).map(code).collect()
}

/// Checks every tensor of the container against the source; `bits` says how a matrix is to be stored.
fn assert_values(src: &Path, dst: &Path, group: Option<usize>, bits: impl Fn(&str) -> u32) {
    let (source, result) = (tensors_of(src), tensors_of(dst));
    let mut expected_names = 0;
    for name in source.keys().filter(|name| !name.ends_with("_scale_inv")) {
        let tensor = &source[name].0;
        let values = source_values(&source, name);
        let stored = &result[name].0;
        if tensor.shape.len() == 1 || name.ends_with("mlp.gate.weight") {
            assert_eq!((stored.dtype.as_str(), &stored.shape), ("F32", &tensor.shape), "{name}");
            assert_eq!(floats(&stored.data), values, "{name}");
            expected_names += 1;
            continue;
        }
        let (rows, cols, bits) = (tensor.shape[0] as usize, tensor.shape[1] as usize, bits(name));
        let group = match bits {
            3 => 64,
            _ => group.filter(|&group| bits == 4 && cols > group).unwrap_or(cols),
        };
        let scales = floats(&result[&format!("{name}.qs")].0.data);
        assert_eq!((stored.dtype.as_str(), stored.shape.len()), ("U8", 1), "{name}");
        let (row_bytes, groups) = (stored.data.len() / rows, cols.div_ceil(group));
        let expected_bytes = if bits == 3 { 24 * groups } else { cols.div_ceil(8 / bits as usize) };
        assert_eq!(row_bytes, expected_bytes, "{name}");
        for row in 0..rows {
            let (codes, row_scales) = expected_row(&values[row * cols..][..cols], bits, group);
            assert_eq!(unpack(&stored.data[row * row_bytes..][..row_bytes], bits, cols), codes, "{name} row {row}");
            assert_eq!(scales[row * groups..][..groups], row_scales, "{name} row {row}");
        }
        expected_names += 2;
    }
    assert_eq!(result.len(), expected_names);
}

/// Weights of an expert, then its scales, lie together in one file from a sector on, without a byte to skip; the reader
/// plans one segment for them.
fn assert_one_read_an_expert(checkpoint: &Checkpoint) {
    let files = FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap();
    let mut experts = 0;
    for expert in checkpoint.experts.layers.iter().flatten().flatten() {
        let weights = expert.matrices().map(|matrix| matrix.data);
        let scales = expert.matrices().into_iter().filter_map(|matrix| matrix.scales);
        let spans: Vec<FileSpan> = weights.into_iter().chain(scales).collect();
        let mut end = weights[0].offset;
        assert_eq!(end % 4096, 0);
        for span in &spans {
            assert_eq!((span.file, span.offset), (weights[0].file, end));
            end += span.len;
        }
        let file_bytes = fs::metadata(checkpoint.tensors.path(weights[0].file)).unwrap().len();
        assert!(end.next_multiple_of(4096) <= file_bytes, "a direct read would pass the end of the file");
        let plan = layout(&spans, &files).unwrap();
        assert_eq!(plan.segments.len(), 1);
        assert_eq!(plan.segments[0].offset, weights[0].offset);
        assert_eq!(u64::from(plan.useful_bytes), expert.bytes());
        experts += 1;
    }
    assert!(experts > 0);
}

/// Widths of a conversion with 4-bit experts and `dense` bits for what is neither expert nor an exception.
fn bits_of(name: &str, mtp: &str, dense: u32) -> u32 {
    match name {
        _ if name.contains("embed_tokens") || name.contains("lm_head") || name.contains(".indexer.") => 8,
        _ if name.starts_with(mtp) => 8,
        _ if name.contains(".mlp.experts.") => 4,
        _ => dense,
    }
}

#[test]
fn the_default_container_of_a_trained_fp8_model_holds_its_weights() {
    let dst = converted(trained_model(), &ConvertOptions::default());
    assert_values(trained_model(), dst.path(), None, |name| bits_of(name, "model.layers.6.", 8));
    let checkpoint = Checkpoint::open(dst.path()).unwrap();
    assert!(checkpoint.notes().is_empty(), "{:?}", checkpoint.notes());
    assert_one_read_an_expert(&checkpoint);
    assert_eq!(checkpoint.experts.get(1, 0).unwrap().gate.spec.format, Format::Int4Row);
    assert_eq!(checkpoint.experts.get(6, 0).unwrap().gate.spec.format, Format::Int8Row);
}

#[test]
fn the_default_container_of_the_other_family_holds_its_weights() {
    let dst = converted(tiny_olmoe(), &ConvertOptions::default());
    assert_values(tiny_olmoe(), dst.path(), None, |name| bits_of(name, "no layer", 8));
    let checkpoint = Checkpoint::open(dst.path()).unwrap();
    assert!(checkpoint.notes().is_empty(), "{:?}", checkpoint.notes());
    assert_one_read_an_expert(&checkpoint);
}

#[test]
fn groups_and_other_widths_hold_the_weights() {
    let grouped = ConvertOptions { dense: Width::Bits4, group: Some(32), ..ConvertOptions::default() };
    let dst = converted(tiny_model(), &grouped);
    assert_values(tiny_model(), dst.path(), Some(32), |name| bits_of(name, "model.layers.5.", 4));
    let checkpoint = Checkpoint::open(dst.path()).unwrap();
    assert_one_read_an_expert(&checkpoint);
    assert_eq!(checkpoint.experts.get(1, 0).unwrap().down.spec.format, Format::Int4Group { group: 32 });

    let bits = |experts, rest| ConvertOptions {
        experts,
        dense: rest,
        io_bits: rest,
        mtp: rest,
        indexer: rest,
        ..ConvertOptions::default()
    };
    let dst = converted(tiny_model(), &bits(Width::Bits2, Width::Bits8));
    let routed = |name: &str| name.contains(".experts.") && !name.starts_with("model.layers.5.");
    assert_values(tiny_model(), dst.path(), None, |name| if routed(name) { 2 } else { 8 });
    assert_one_read_an_expert(&Checkpoint::open(dst.path()).unwrap());
}

#[test]
fn three_bits_hold_the_weights_in_groups_of_sixty_four() {
    let options = |group| ConvertOptions { experts: Width::Bits3, group, ..ConvertOptions::default() };
    let routed = |name: &str, mtp: &str| name.contains(".experts.") && !name.starts_with(mtp);
    for (model, mtp) in [(tiny_model(), "model.layers.5."), (trained_model(), "model.layers.6.")] {
        let dst = converted(model, &options(None));
        assert_values(model, dst.path(), None, |name| if routed(name, mtp) { 3 } else { 8 });
        let checkpoint = Checkpoint::open(dst.path()).unwrap();
        assert_one_read_an_expert(&checkpoint);
        assert_eq!(checkpoint.experts.get(1, 0).unwrap().down.spec.format, Format::Int3Group);
    }
    // Its groups may be named, and are no other container; others are none of three bits.
    assert_same_files(
        converted(tiny_model(), &options(Some(64))).path(),
        &contents(converted(tiny_model(), &options(None)).path()),
    );
    let error = quietly(tiny_model(), tempfile::tempdir().unwrap().path(), &options(Some(32))).unwrap_err();
    assert!(error.to_string().contains("(3-bit ones have 64)"), "{error}");
}

#[test]
fn sixteen_bits_keep_a_bf16_source_as_it_is() {
    let width = Width::Bits16;
    let options = ConvertOptions {
        experts: width,
        dense: width,
        io_bits: width,
        mtp: width,
        indexer: width,
        ..ConvertOptions::default()
    };
    let dst = converted(tiny_model(), &options);
    let (source, result) = (tensors_of(tiny_model()), tensors_of(dst.path()));
    for (name, (tensor, _, _)) in source {
        if tensor.shape.len() == 2 && !name.ends_with("mlp.gate.weight") {
            assert!(result[&name].0 == tensor, "{name}");
        }
    }
    assert_one_read_an_expert(&Checkpoint::open(dst.path()).unwrap());
}

#[test]
fn a_repack_changes_the_layout_and_no_weight() {
    let container = converted(tiny_model(), &ConvertOptions::default());
    let options = ConvertOptions { repack: true, ..ConvertOptions::default() };
    // A container as others write it: one shard, tensors by name, nothing aligned.
    let model = Model::tiny();
    let tensors = tensors_of(container.path()).into_values().map(|(tensor, _, _)| tensor).collect();
    Shard { tensors, ..Shard::default() }.write(&model.shard_path());
    for source in [model.path(), trained_model()] {
        let dst = converted(source, &options);
        let (before, after) = (tensors_of(source), tensors_of(dst.path()));
        assert_eq!(before.len(), after.len());
        for (name, (tensor, _, _)) in before {
            assert!(after[&name].0 == tensor, "{name}");
        }
        assert_one_read_an_expert(&Checkpoint::open(dst.path()).unwrap());
    }
    let widen = ConvertOptions { experts: Width::Bits8, ..ConvertOptions::default() };
    let error = quietly(model.path(), tempfile::tempdir().unwrap().path(), &widen).unwrap_err();
    assert!(error.to_string().contains("experts.0.gate_proj.weight"), "{error}");
    assert!(error.hint().contains("--repack"), "{}", error.hint());
}

#[test]
fn experts_of_which_one_matrix_has_no_scales_are_repacked_again_and_again() {
    let model = Model::tiny();
    model.edit_shard(|shard| {
        let of_experts = |name: &str| name.contains(".mlp.experts.");
        let mut scales = Vec::new();
        for tensor in shard.tensors.iter_mut().filter(|tensor| of_experts(&tensor.name)) {
            if tensor.name.ends_with("down_proj.weight") {
                continue;
            }
            // Each of E4M3's codes that is a finite number, by turns.
            let count = tensor.data.len() / 2;
            let data = (0..count + scales.len()).skip(scales.len()).map(|at| (at % 127) as u8).collect();
            let scale = 0.001f32 * (scales.len() + 1) as f32;
            *tensor = Tensor::new(&tensor.name, "F8_E4M3", &tensor.shape, data);
            let name = format!("{}_scale_inv", tensor.name);
            scales.push(Tensor::new(&name, "F32", &[1, 1], scale.to_le_bytes().into()));
        }
        assert!(!scales.is_empty());
        shard.tensors.extend(scales);
    });
    let repack = ConvertOptions { repack: true, ..ConvertOptions::default() };
    let first = converted(model.path(), &repack);
    let again = converted(first.path(), &repack);
    let before = tensors_of(model.path());
    for dst in [&first, &again] {
        let after = tensors_of(dst.path());
        assert!(before.keys().eq(after.keys()));
        before.iter().for_each(|(name, (tensor, _, _))| assert!(after[name].0 == *tensor, "{name}"));
    }
    // The checksums of the first are those of its bytes, so that what is made of it is what is made of the model.
    let [of_first, of_model] = [first.path(), model.path()].map(|src| converted(src, &ConvertOptions::default()));
    let [of_first, of_model] = [of_first.path(), of_model.path()].map(tensors_of);
    assert!(of_model.iter().all(|(name, (tensor, _, _))| of_first[name].0 == *tensor));
    // The last matrix is held against its checksum too.
    let (_, path, offset) = &tensors_of(first.path())["model.layers.2.mlp.experts.3.down_proj.weight"];
    let mut bytes = fs::read(path).unwrap();
    bytes[*offset as usize + 10] ^= 1;
    fs::write(path, bytes).unwrap();
    let error = quietly(first.path(), quick_dir().path(), &repack).unwrap_err();
    assert!(error.to_string().contains("expert 3 of layer 2"), "{error}");
}

#[test]
fn the_hashes_of_the_manifest_are_those_of_the_file() {
    let dst = converted(tiny_model(), &ConvertOptions::default());
    let checkpoint = Checkpoint::open(dst.path()).unwrap();
    let expert = checkpoint.experts.get(2, 7).unwrap();
    let metadata = checkpoint.tensors.metadata(expert.gate.data.file);
    let hashes: BTreeMap<String, String> = serde_json::from_str(&metadata["millstream.xxh3"]).unwrap();
    assert_eq!(hashes.len(), 8);
    let bytes = fs::read(checkpoint.tensors.path(expert.gate.data.file)).unwrap();
    let end = expert.down.scales.unwrap();
    let run = &bytes[expert.gate.data.offset as usize..(end.offset + end.len) as usize];
    let hash = xxhash_rust::xxh3::xxh3_64(run);
    assert_eq!(hashes["model.layers.2.mlp.experts.7"], format!("{hash:016x}"));
}

/// Values of a matrix as the engine would decode them.
fn decoded(checkpoint: &Checkpoint, matrix: &MatrixSource) -> Vec<f32> {
    let bytes = fs::read(checkpoint.tensors.path(matrix.data.file)).unwrap();
    let span = |offset: u64, len: u64| &bytes[offset as usize..][..len as usize];
    let data = span(matrix.data.offset, matrix.data.len);
    let scales = matrix.scales.map_or(&[][..], |scales| span(scales.offset, scales.len));
    let weights = WeightRef::new(matrix.spec, data, scales);
    let mut values = vec![0.0; matrix.spec.rows * matrix.spec.cols];
    for (row, out) in values.chunks_exact_mut(matrix.spec.cols).enumerate() {
        Kernels::best().decode_row(&weights, row, out);
    }
    values
}

#[test]
fn the_same_weights_agree_in_every_source_type() {
    let name = "model.layers.1.mlp.experts.0.down_proj.weight";
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..64 * 64).map(|_| random()).collect();
    let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 448.0;
    let nearest = |value: f32| {
        let distance = |code: &u8| (e4m3(*code) - value / scale).abs();
        (0..=255u8).filter(|&c| !e4m3(c).is_nan()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    };
    let f16 = |value: &f32| half::f16::from_f32(*value).to_le_bytes();
    let bf16 = |value: &f32| half::bf16::from_f32(*value).to_le_bytes();
    // Half a unit in the last place of 23, 10, 7 and 3 fraction bits; below the normal range, half a subnormal step.
    let cases: [(&str, Vec<u8>, f32, f32); 4] = [
        ("F32", values.iter().flat_map(|value| value.to_le_bytes()).collect(), 0.0, 0.0),
        ("F16", values.iter().flat_map(f16).collect(), 2f32.powi(-11), 2f32.powi(-25)),
        ("BF16", values.iter().flat_map(bf16).collect(), 2f32.powi(-8), 0.0),
        ("F8_E4M3", values.iter().map(|&value| nearest(value)).collect(), 2f32.powi(-4), 2f32.powi(-10) * scale),
    ];
    for (dtype, bytes, relative, absolute) in cases {
        let model = Model::tiny();
        model.edit_shard(|shard| {
            *shard.get_mut(name) = Tensor::new(name, dtype, &[64, 64], bytes);
            if dtype == "F8_E4M3" {
                let scales = Tensor::new(&format!("{name}_scale_inv"), "F32", &[1, 1], scale.to_le_bytes().to_vec());
                shard.tensors.push(scales);
            }
        });
        let checkpoint = Checkpoint::open(model.path()).unwrap();
        let found = decoded(&checkpoint, &checkpoint.experts.get(1, 0).unwrap().down);
        for (found, value) in found.iter().zip(&values) {
            let bound = (relative * value.abs()).max(absolute) * (1.0 + 1e-6);
            assert!((found - value).abs() <= bound, "{dtype}: {found} for {value}");
        }
    }
}

// What a conversion refuses.

fn fingerprint(dir: &Path) -> u64 {
    Checkpoint::open(dir).unwrap().fingerprint()
}

#[test]
fn other_parameters_or_another_source_are_refused_with_both_shown() {
    let dst = converted(tiny_model(), &ConvertOptions::default());
    let before = contents(dst.path());
    let grouped = ConvertOptions { group: Some(16), ..ConvertOptions::default() };
    let error = quietly(tiny_model(), dst.path(), &grouped).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }));
    let message = error.to_string();
    assert!(message.contains("group=row") && message.contains("group=16"), "{message}");

    let other = Model::tiny();
    other.edit_config(|config| drop(config.insert("rms_norm_eps".to_owned(), 1e-6.into())));
    let error = quietly(other.path(), dst.path(), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");

    // Another training of the same architecture: headers are equal, weights are not.
    let retrained = Model::tiny();
    retrained.edit_shard(|shard| {
        shard.tensors.iter_mut().for_each(|tensor| tensor.data.iter_mut().for_each(|byte| *byte ^= 1));
    });
    assert_eq!(fingerprint(retrained.path()), fingerprint(tiny_model()), "the case needs equal headers");
    let error = quietly(retrained.path(), dst.path(), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");
    assert_same_files(dst.path(), &before);
}

#[test]
fn a_directory_with_other_files_is_left_alone() {
    let model = Model::tiny();
    let before = contents(model.path());
    let error = quietly(tiny_model(), model.path(), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertOccupied { .. }), "{error}");
    let error = quietly(model.path(), model.path(), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertOptions { .. }), "{error}");
    assert_same_files(model.path(), &before);

    let config = tempfile::tempdir().unwrap();
    fs::write(config.path().join("config.json"), "{}").unwrap();
    let error = quietly(tiny_model(), config.path(), &ConvertOptions::default()).unwrap_err();
    assert!(error.to_string().contains("config.json"), "{error}");
    assert_eq!(contents(config.path()).len(), 1);
}

#[test]
fn a_group_that_nothing_uses_or_nobody_recognizes_is_refused_before_the_first_byte() {
    let dst = tempfile::tempdir().unwrap();
    let unused = ConvertOptions { experts: Width::Bits8, dense: Width::Bits8, group: Some(64), ..Default::default() };
    let odd = ConvertOptions { group: Some(100), ..ConvertOptions::default() };
    // Groups of 48 make 2 of the 64 columns, as groups of 32 do, and readers try 32 first.
    let ambiguous = ConvertOptions { group: Some(48), ..ConvertOptions::default() };
    for (options, part) in [(unused, "experts=8"), (odd, "100"), (ambiguous, "int4-g48")] {
        let error = quietly(tiny_model(), dst.path(), &options).unwrap_err();
        assert!(matches!(error, CheckpointError::ConvertOptions { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(contents(dst.path()).is_empty());
}

#[test]
fn the_plan_is_reported_before_the_first_byte() {
    let dst = tempfile::tempdir().unwrap();
    let mut plans = Vec::new();
    let options = ConvertOptions { group: Some(32), ..ConvertOptions::default() };
    convert(tiny_model(), dst.path(), &options, &mut |progress| {
        if let Progress::Plan { lines, .. } = progress {
            assert!(contents(dst.path()).is_empty());
            plans.push(lines);
        }
    })
    .unwrap();
    assert_eq!(plans.len(), 1);
    // 4 layers, 8 experts, 3 matrices of 64 x 64: 2,048 bytes and 128 scales each.
    let line = PlanLine {
        kind: "routed experts",
        format: Format::Int4Group { group: 32 },
        tensors: 96,
        bytes: 96 * (2048 + 4 * 128),
    };
    assert!(plans[0].contains(&line), "{:?}", plans[0]);
    assert_eq!(line.to_string(), "routed experts: 96 tensors as int4-g32, 246 kB");
}

#[test]
fn too_little_space_is_refused_before_the_first_byte() {
    let dst = tempfile::tempdir().unwrap();
    let options = ConvertOptions { free_bytes: Some(1_000_000), ..ConvertOptions::default() };
    let error = quietly(tiny_model(), dst.path(), &options).unwrap_err();
    let text = error.to_string();
    let CheckpointError::NoSpace { needed, available, .. } = error else { panic!("{error}") };
    assert_eq!(available, 1_000_000);
    // The difference, not the whole, is what is short.
    let [whole, short] = [needed, needed - 1_000_000].map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6));
    assert!(needed > 9_950_000 && text.contains(&format!("1.00 MB free and {whole} are needed: {short}")), "{text}");
    assert!(contents(dst.path()).is_empty());
    let enough = ConvertOptions { free_bytes: Some(needed), ..ConvertOptions::default() };
    quietly(tiny_model(), dst.path(), &enough).unwrap();
    let full = ConvertOptions { free_bytes: Some(0), ..ConvertOptions::default() };
    quietly(tiny_model(), dst.path(), &full).expect("nothing is left to write");
}

#[test]
fn a_weight_that_is_not_a_number_names_its_place() {
    let name = "model.layers.2.mlp.experts.3.up_proj.weight";
    let model = Model::tiny();
    model.edit_shard(|shard| shard.get_mut(name).data[2 * (5 * 64 + 9)..][..2].copy_from_slice(&[0xc0, 0x7f]));
    let error = quietly(model.path(), tempfile::tempdir().unwrap().path(), &ConvertOptions::default()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains(name) && message.contains("row 5, column 9"), "{message}");
}

// What stops a conversion on the way.

#[test]
fn a_conversion_stopped_anywhere_continues_to_the_same_bytes() {
    let options = ConvertOptions::default();
    let whole = contents(converted(tiny_model(), &options).path());
    let mut events = 0;
    convert(tiny_model(), quick_dir().path(), &options, &mut |_| events += 1).unwrap();
    assert!(events > 30, "events between and inside shards");
    for stop in 1..=events {
        let dst = quick_dir();
        let mut seen = 0;
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            convert(tiny_model(), dst.path(), &options, &mut |_| {
                seen += 1;
                if seen == stop {
                    std::panic::resume_unwind(Box::new("stopped"));
                }
            })
        }));
        assert!(stopped.is_err());
        assert!(Checkpoint::open(dst.path()).is_err(), "an unfinished conversion opened as a model");
        let report = convert(tiny_model(), dst.path(), &options, &mut |_| {}).unwrap();
        assert_eq!(report.shards_kept + report.shards_written, 12);
        assert_same_files(dst.path(), &whole);
    }
}

#[test]
fn a_second_conversion_into_one_directory_is_refused_and_publishes_nothing_half_written() {
    let expected = contents(converted(tiny_model(), &ConvertOptions::default()).path());
    let dst = quick_dir();
    let (mut refused, mut shards) = (0, 0);
    convert(tiny_model(), dst.path(), &ConvertOptions::default(), &mut |progress| {
        if let Progress::Shard { of, .. } = progress {
            // The first is about to write a shard; what it has written so far is not to be touched.
            let before = contents(dst.path());
            let error = quietly(tiny_model(), dst.path(), &ConvertOptions::default()).unwrap_err();
            assert!(matches!(&error, CheckpointError::ConvertBusy { dir } if dir == dst.path()), "{error}");
            assert!(error.to_string().contains(&dst.path().display().to_string()), "{error}");
            assert!(contents(dst.path()) == before);
            (refused, shards) = (refused + 1, of);
        }
    })
    .unwrap();
    assert_eq!(refused, shards);
    assert_same_files(dst.path(), &expected);
    // The lock went with the first: a third finds everything done.
    quietly(tiny_model(), dst.path(), &ConvertOptions::default()).unwrap();
}

#[test]
fn another_conversion_does_not_continue_a_stopped_one() {
    let dst = quick_dir();
    let stopped = catch_unwind(AssertUnwindSafe(|| {
        convert(tiny_model(), dst.path(), &ConvertOptions::default(), &mut |progress| {
            if matches!(progress, Progress::Bytes(_)) {
                std::panic::resume_unwind(Box::new("stopped"));
            }
        })
    }));
    assert!(stopped.is_err());
    let other = ConvertOptions { dense: Width::Bits4, ..ConvertOptions::default() };
    let message = quietly(tiny_model(), dst.path(), &other).unwrap_err().to_string();
    assert!(message.contains("dense=4") && message.contains("dense=8"), "{message}");
    let error = convert(dst.path(), quick_dir().path(), &other, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::Unfinished { .. }), "{error}");
}

/// Not a test: the process that the tests below kill.
#[test]
#[ignore = "run by the tests that kill it"]
fn child_converts() {
    stepped::converts(&ConvertOptions::default());
}

fn child(shell: &str, dst: &Path, steps: bool) -> Child {
    stepped::child("child_converts", shell, tiny_model(), dst, steps)
}

#[test]
fn a_killed_process_is_continued_to_the_same_bytes() {
    let whole = contents(converted(tiny_model(), &ConvertOptions::default()).path());
    let dst = quick_dir();
    // Each run gets a little further than the one before it: kept shards are two events, others more.
    for events in [2, 5, 7, 8, 13, 18, 25] {
        let mut child = child("", dst.path(), true);
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut input = child.stdin.take().unwrap();
        assert!(advance(&mut input, &mut output, events), "it ended before event {events}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Checkpoint::open(dst.path()).is_err());
    }
    quietly(tiny_model(), dst.path(), &ConvertOptions::default()).unwrap();
    assert_same_files(dst.path(), &whole);
}

#[test]
fn a_write_that_fails_in_a_shard_is_an_error_and_a_rerun_continues() {
    let whole = contents(converted(tiny_model(), &ConvertOptions::default()).path());
    let dst = quick_dir();
    // A file may have 2,100 KiB: enough for the dense shards, not for experts.
    let output = child("trap '' XFSZ; ulimit -f 2100;", dst.path(), false).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(9));
    let message = String::from_utf8(output.stdout).unwrap();
    assert!(message.contains("refused cannot write") && message.contains("File too large"), "{message}");
    assert!(Checkpoint::open(dst.path()).is_err());
    assert!(contents(dst.path()).contains_key("out-00000.safetensors"), "finished shards are kept");
    quietly(tiny_model(), dst.path(), &ConvertOptions::default()).unwrap();
    assert_same_files(dst.path(), &whole);
}

/// A small file system of its own in memory; `None` where mounting is not allowed.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(size: &str) -> Option<Mount> {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(dir.path());
        let mounted = command.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        mounted.then_some(Mount(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_that_fills_leaves_whole_shards_and_a_rerun_continues() {
    let Some(disk) = Mount::new("16m") else { return eprintln!("skipped: cannot mount a file system here") };
    let whole = contents(converted(tiny_model(), &ConvertOptions::default()).path());
    let dst = disk.0.path().join("model");
    // Something else takes the space between the check and the writing.
    let filler = disk.0.path().join("filler");
    let unchecked = ConvertOptions { free_bytes: Some(u64::MAX), ..ConvertOptions::default() };
    fs::write(&filler, vec![1; 10 << 20]).unwrap();
    let error = quietly(tiny_model(), &dst, &unchecked).unwrap_err();
    assert!(error.to_string().contains("No space left on device"), "{error}");
    assert!(error.hint().contains("run the same command again"), "{}", error.hint());
    assert!(Checkpoint::open(&dst).is_err());
    let error = quietly(tiny_model(), &dst, &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoSpace { .. }), "{error}");
    fs::remove_file(&filler).unwrap();
    let report = convert(tiny_model(), &dst, &ConvertOptions::default(), &mut |_| {}).unwrap();
    assert!(report.shards_kept > 0);
    assert_same_files(&dst, &whole);
}
