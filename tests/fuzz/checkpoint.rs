//! Small files and headers of a model directory.

use crate::mutate::Mutator;
use millstream::checkpoint::arch::AttentionArch;
use millstream::checkpoint::convert::{ConvertOptions, convert};
use millstream::checkpoint::verify::Manifest;
use millstream::checkpoint::{Arch, Checkpoint, TensorMap};
use millstream::engine::{AttentionForm, Engine, EngineConfig, EngineError, Memory};
use millstream::limits;
use std::fs;
use std::path::Path;

fn tiny() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-glm-moe-dsa"))
}

fn number(variable: &str, absent: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(absent)
}

/// Runs `round` with so many seeds; a panic inside it names its seed.
pub fn rounds(count: u64, mut round: impl FnMut(&mut Mutator)) {
    struct Seed(u64);
    impl Drop for Seed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("FUZZ_SEED={} reproduces it", self.0);
            }
        }
    }
    let first = number("FUZZ_SEED", 1);
    for seed in first..first + count * number("FUZZ_ROUNDS", 1) {
        let seed = Seed(seed);
        round(&mut Mutator::new(seed.0));
    }
}

/// Whatever opened must lie within its files, with shapes that match its bytes.
fn assert_within_files(map: &TensorMap) {
    let lengths: Vec<u64> = map.paths().iter().map(|path| fs::metadata(path).unwrap().len()).collect();
    for (name, tensor) in map.iter() {
        let end = tensor.offset.checked_add(tensor.bytes).unwrap();
        assert!(end <= lengths[tensor.file.0 as usize], "{name} passes the end of its file");
        let size = tensor.shape.iter().try_fold(tensor.dtype.bytes(), |size, &dim| size.checked_mul(dim));
        assert_eq!(size, Some(tensor.bytes), "{name}");
    }
}

#[test]
fn configs() {
    for model in ["tiny-glm-moe-dsa", "tiny-olmoe-grouped"] {
        configs_like(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(model));
    }
}

fn configs_like(model: &Path) {
    let config = fs::read(model.join("config.json")).unwrap();
    let generation = fs::read(model.join("generation_config.json")).unwrap();
    let mut accepted = 0;
    rounds(20_000, |mutator| {
        let (mut config, mut generation) = (config.clone(), generation.clone());
        match mutator.below(8) {
            0 => mutator.mutate(&mut generation),
            _ => mutator.mutate(&mut config),
        }
        if let Ok(arch) = Arch::parse(&config, Some(&generation)) {
            accepted += 1;
            assert!(arch.layers.len() < limits::MAX_LAYERS && (1..=limits::MAX_HIDDEN).contains(&arch.hidden));
            assert!(arch.attention.rotary() <= limits::MAX_ROPE && arch.attention.rotary() % 2 == 0);
            match arch.attention {
                AttentionArch::Latent(a) => {
                    assert!(a.kv_rank <= limits::MAX_KV_RANK && a.heads * a.value <= limits::MAX_COLUMNS);
                }
                AttentionArch::Full(a) => {
                    assert!(a.heads % a.kv_heads == 0 && a.heads * a.dim <= limits::MAX_COLUMNS);
                    assert!(arch.indexer.is_none());
                }
            }
            assert!(arch.moe.groups <= limits::MAX_GROUPS && arch.moe.top_k <= limits::MAX_TOP_K);
            assert!(arch.max_context <= limits::MAX_CONTEXT);
            assert!(arch.stop_ids.iter().all(|&id| (id as usize) < arch.vocab));
            assert!(arch.moe.top_k <= arch.moe.experts && arch.moe.experts % arch.moe.groups == 0);
            assert!(arch.rope_theta.is_finite());
            // The list of tensors is sized by the config: it must stay computable for what was accepted.
            if arch.layers.len() < 100 {
                assert!(!Checkpoint::required(&arch).is_empty());
            }
        }
    });
    assert!(accepted > 0, "every mutation was refused: the mutator is too coarse to test anything");
}

#[test]
fn headers() {
    let header = br#"{"__metadata__":{"format":"pt","colibri.fmt":"{\"b\":\"int4-row\"}"},
        "a":{"dtype":"BF16","shape":[4,8],"data_offsets":[0,64]},"__pad__":{"dtype":"U8","shape":[8],"data_offsets":[64,72]},
        "b":{"dtype":"U8","shape":[64],"data_offsets":[72,136]},"b.qs":{"dtype":"F32","shape":[4],"data_offsets":[136,152]}}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let mut accepted = 0;
    rounds(4_000, |mutator| {
        let mut text = header.to_vec();
        mutator.mutate(&mut text);
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(&text);
        file.extend([0; 152]);
        match mutator.below(8) {
            0 => file[mutator.below(8)] ^= 1 << mutator.below(8),
            1 => file.truncate(mutator.below(file.len())),
            _ => {}
        }
        fs::write(&path, &file).unwrap();
        if let Ok(map) = TensorMap::open(dir.path()) {
            accepted += 1;
            assert_within_files(&map);
            // Resolution with any shape is an answer too.
            let _ = map.matrix("b", mutator.below(64), mutator.below(64));
            let _ = map.matrix("a", 4, 8);
            let _ = map.vector("b.qs", 4);
        }
    });
    assert!(accepted > 0);
}

#[test]
fn indexes() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(tiny().join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let index = br#"{"metadata":{"total_size":1},"weight_map":{"model.norm.weight":"model.safetensors"}}"#;
    let mut accepted = 0;
    rounds(2_000, |mutator| {
        let mut text = index.to_vec();
        mutator.mutate(&mut text);
        fs::write(dir.path().join("model.safetensors.index.json"), &text).unwrap();
        accepted += u32::from(TensorMap::open(dir.path()).is_ok());
    });
    assert!(accepted > 0);
}

/// Runs a few tokens in both forms of attention: an answer or an error, whatever the weights are taken for.
fn run(dir: &Path) -> Result<(), EngineError> {
    for attention in [AttentionForm::Absorbed, AttentionForm::Explicit] {
        let checkpoint = Checkpoint::open(dir)?;
        let arch = &checkpoint.arch;
        // Beyond 16 positions the model's indexer selects.
        let context = arch.max_context.min(20);
        let prompt: Vec<u32> = (0..context).map(|i| (i % arch.vocab) as u32).collect();
        let config = EngineConfig {
            memory: Memory::Slabs(2),
            context: Some(context),
            prefill_rows: 8,
            attention,
            load_mtp: true,
            ..EngineConfig::new(1 << 30)
        };
        let mut engine = Engine::open(checkpoint, &config)?;
        engine.score(&prompt)?;
        if context > 1 {
            match engine.draft_scores(&prompt) {
                Ok(_) | Err(EngineError::NoMtp) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

#[test]
fn whole_models() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::write(dir.path().join(name), fs::read(tiny().join(name)).unwrap()).unwrap();
    }
    let config = fs::read(tiny().join("config.json")).unwrap();
    let shard = fs::read(tiny().join("model.safetensors")).unwrap();
    let header_bytes = u64::from_le_bytes(shard[..8].try_into().unwrap()) as usize;
    let (mut accepted, mut ran) = (0, 0);
    rounds(1_000, |mutator| {
        let mut config = config.clone();
        let mut header = shard[8..][..header_bytes].to_vec();
        match mutator.below(2) {
            0 => mutator.mutate(&mut config),
            _ => mutator.mutate(&mut header),
        }
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(&header);
        file.extend(&shard[8 + header_bytes..]);
        fs::write(dir.path().join("config.json"), &config).unwrap();
        fs::write(dir.path().join("model.safetensors"), &file).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            accepted += 1;
            assert_within_files(&checkpoint.tensors);
            for matrix in checkpoint.experts.layers.iter().flatten().flatten().flat_map(|e| [e.gate, e.up, e.down]) {
                assert_eq!(matrix.data.len, matrix.spec.data_bytes() as u64);
                assert!(matrix.data.offset + matrix.data.len <= file.len() as u64);
            }
            ran += u32::from(run(dir.path()).is_ok());
        }
    });
    assert!(accepted > 0 && ran > 0, "{accepted} mutants opened and {ran} of them ran");
}

#[test]
fn checksums() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    convert(tiny(), &model, &ConvertOptions::default(), &mut |_| {}).unwrap();
    fs::copy(tiny().join("tokenizer.json"), model.join("tokenizer.json")).unwrap();
    let path = model.join("out-00003.safetensors");
    let whole = fs::read(&path).unwrap();
    let header: serde_json::Value = {
        let bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        serde_json::from_slice(&whole[8..][..bytes]).unwrap()
    };
    let data = &whole[8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize..];
    let hashes = header["__metadata__"]["millstream.xxh3"].as_str().unwrap().as_bytes().to_vec();
    let (mut accepted, mut refused) = (0, 0);
    rounds(300, |mutator| {
        let mut hashes = hashes.clone();
        mutator.mutate(&mut hashes);
        let mut header = header.clone();
        header["__metadata__"]["millstream.xxh3"] = String::from_utf8_lossy(&hashes).into();
        let header = header.to_string().into_bytes();
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()).unwrap();
        let checkpoint = Checkpoint::open(&model).unwrap();
        match Manifest::read(&checkpoint) {
            Ok(manifest) => {
                accepted += 1;
                for run in manifest.runs {
                    let file_bytes = fs::metadata(checkpoint.tensors.path(run.span.file)).unwrap().len();
                    assert!(run.span.len > 0 && run.span.offset + run.span.len <= file_bytes, "{}", run.name);
                }
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("checksums"), "{error}");
            }
        }
    });
    assert!(accepted > 0 && refused > 0, "{accepted} accepted, {refused} refused");
}
