//! Reference vectors made by transformers, as they lie in `tests/data/reference`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One prompt with everything transformers said about it.
#[derive(Deserialize)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub argmax: Vec<u32>,
    pub greedy: Vec<u32>,
    pub mtp_argmax: Vec<u32>,
    /// Layer, as text, to the choice of every position.
    #[serde(default)]
    pub router_topk: BTreeMap<String, Choices>,
}

/// Experts of every position, sorted by id, and their weights.
#[derive(Deserialize)]
pub struct Choices {
    pub experts: Vec<Vec<u16>>,
    pub weights: Vec<Vec<f32>>,
}

/// A model and its prompts.
pub struct Reference {
    pub model: PathBuf,
    pub prompts: BTreeMap<String, Prompt>,
    dir: PathBuf,
}

#[derive(Deserialize)]
struct File {
    prompts: BTreeMap<String, Prompt>,
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Reference {
    pub fn open(model: &str, name: &str) -> Reference {
        let dir = root().join("tests/data/reference").join(name);
        let text = std::fs::read(dir.join("reference.json")).unwrap();
        let file: File = serde_json::from_slice(&text).unwrap();
        Reference { model: root().join(model), prompts: file.prompts, dir }
    }

    pub fn glm_tales() -> Reference {
        Reference::open("models/glm-tales", "glm-tales-fp8")
    }

    pub fn tiny() -> Reference {
        Reference::open("tests/data/tiny-glm-moe-dsa", "tiny-glm-moe-dsa")
    }

    pub fn last_logits(&self, prompt: &str) -> Vec<f32> {
        npy_f32(&self.dir.join(format!("{prompt}.last_logits.npy")))
    }

    pub fn all_logits(&self, prompt: &str) -> Option<Vec<f32>> {
        let path = self.dir.join(format!("{prompt}.all_logits.npy"));
        path.exists().then(|| npy_f32(&path))
    }
}

/// The data of a C-ordered array of little-endian items of `size` bytes whose type is one of `types`.
fn npy(path: &Path, types: &[&str], size: usize) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(&bytes[..6], b"\x93NUMPY", "{}", path.display());
    let header_len = u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    let header = std::str::from_utf8(&bytes[10..10 + header_len]).unwrap();
    assert!(types.iter().any(|t| header.contains(t)) && header.contains("'fortran_order': False"), "{header}");
    let data = bytes[10 + header_len..].to_vec();
    assert_eq!(data.len() % size, 0);
    data
}

pub fn npy_f32(path: &Path) -> Vec<f32> {
    npy(path, &["<f4"], 4).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn npy_u16(path: &Path) -> Vec<u32> {
    npy(path, &["<u2", "<i2"], 2)
        .chunks_exact(2)
        .map(|b| u32::from(u16::from_le_bytes(b.try_into().unwrap())))
        .collect()
}
