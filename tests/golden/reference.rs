//! Reference vectors made by transformers, as they lie in `tests/data/reference`.
//!
//! A model with an indexer has two sets. The originals were made by transformers as it is; the stable ones with the indexer's topk
//! keeping the lowest positions among equal scores, which is the engine's rule. A prompt is in the stable set when its
//! context, greedy continuation included, grows past what the indexer keeps. A model without one has its originals only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One prompt with everything transformers said about it.
#[derive(Clone, Deserialize)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub argmax: Vec<u32>,
    /// Smallest difference between the first and the second logit of any position.
    pub argmax_margin_min: f32,
    pub greedy: Vec<u32>,
    /// Drafts of a model that has an MTP layer.
    #[serde(default)]
    pub mtp_argmax: Vec<u32>,
    /// Layer, as text, to the choice of every position.
    #[serde(default)]
    pub router_topk: BTreeMap<String, Choices>,
    /// Positions where some indexer had to choose among equal scores; known in the stable set only.
    #[serde(default)]
    pub tied_positions: Vec<usize>,
    /// The same for positions of the greedy continuation.
    #[serde(default)]
    pub greedy_tied_positions: Vec<usize>,
    /// Where its logits lie.
    #[serde(skip)]
    files: PathBuf,
}

/// Experts of every position, sorted by id, and their weights to six decimal places.
#[derive(Clone, Deserialize)]
pub struct Choices {
    pub experts: Vec<Vec<u16>>,
    pub weights: Vec<Vec<f32>>,
}

impl Prompt {
    /// Logits of the last position.
    pub fn last_logits(&self) -> Vec<f32> {
        npy_f32(&self.files.with_extension("last_logits.npy"))
    }

    /// Logits of every position, where they were stored.
    pub fn all_logits(&self) -> Option<Vec<f32>> {
        let path = self.files.with_extension("all_logits.npy");
        path.exists().then(|| npy_f32(&path))
    }
}

pub type Prompts = BTreeMap<String, Prompt>;

/// A model and what transformers says of it.
pub struct Reference {
    /// Model directory.
    pub model: PathBuf,
    /// Every prompt, by transformers as it is.
    pub original: Prompts,
    /// The prompts that go sparse, with ties going to the lowest position.
    pub stable: Prompts,
    /// Per prompt of the expected set: the largest distance of a stored logit from transformers in float64.
    rounding: BTreeMap<String, f32>,
}

impl Reference {
    pub fn glm_tales() -> Reference {
        Reference {
            model: root().join("models/glm-tales"),
            original: prompts("glm-tales-fp8"),
            stable: prompts("glm-tales-fp8-stable"),
            rounding: rounding("glm-tales-fp8-stable"),
        }
    }

    pub fn tiny() -> Reference {
        Reference {
            model: root().join("tests/data/tiny-glm-moe-dsa"),
            original: prompts("tiny-glm-moe-dsa"),
            stable: prompts("tiny-glm-moe-dsa-stable"),
            rounding: rounding("tiny-glm-moe-dsa-stable"),
        }
    }

    /// Random OLMoE weights, shapes as published.
    pub fn tiny_olmoe() -> Reference {
        Reference::without_indexer("tiny-olmoe")
    }

    /// The same with shared key-value heads, clamped queries, keys and values, normalized gates, a tied head and F16 weights.
    pub fn tiny_olmoe_grouped() -> Reference {
        Reference::without_indexer("tiny-olmoe-grouped")
    }

    fn without_indexer(name: &str) -> Reference {
        Reference {
            model: root().join("tests/data").join(name),
            original: prompts(name),
            stable: Prompts::new(),
            rounding: rounding(name),
        }
    }

    /// What the engine must reproduce: the original of every prompt, and the stable one only where a tie was met.
    pub fn expected(&self) -> Prompts {
        let mut expected = self.original.clone();
        for (name, stable) in &self.stable {
            let original = &expected[name];
            assert_eq!(stable.ids, original.ids);
            let tied = |positions: &[usize]| !positions.is_empty();
            if tied(&stable.tied_positions) {
                expected.insert(name.clone(), stable.clone());
            } else if tied(&stable.greedy_tied_positions) {
                let mixed = Prompt { greedy: stable.greedy.clone(), ..original.clone() };
                expected.insert(name.clone(), mixed);
            }
        }
        expected
    }

    /// How far any expected logit is from the one float64 gives.
    pub fn rounding_max(&self) -> f32 {
        self.rounding.values().fold(0.0, |m, &e| m.max(e))
    }

    /// The smallest margin between a first and a second logit in everything the engine must reproduce.
    pub fn margin_min(&self) -> f32 {
        self.expected().values().map(|p| p.argmax_margin_min).fold(f32::INFINITY, f32::min)
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file below `tests/data/reference`.
pub fn file(name: &str) -> PathBuf {
    root().join("tests/data/reference").join(name)
}

/// Ids of a window of held-out text.
pub const WINDOW: usize = 1024;

/// Windows of held-out text for glm-tales.
pub fn windows() -> Vec<Vec<u32>> {
    npy_u16(&file("glm-tales-fp8/ppl_windows_1024.npy")).chunks_exact(WINDOW).map(<[u32]>::to_vec).collect()
}

fn prompts(set: &str) -> Prompts {
    #[derive(Deserialize)]
    struct File {
        prompts: Prompts,
    }
    let text = std::fs::read(file(set).join("reference.json")).unwrap();
    let mut prompts = serde_json::from_slice::<File>(&text).unwrap().prompts;
    for (name, prompt) in &mut prompts {
        prompt.files = file(set).join(name);
    }
    prompts
}

fn rounding(set: &str) -> BTreeMap<String, f32> {
    #[derive(Deserialize)]
    struct File {
        largest_error: BTreeMap<String, f32>,
    }
    let text = std::fs::read(file(set).join("rounding.json")).unwrap();
    serde_json::from_slice::<File>(&text).unwrap().largest_error
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

fn npy_f32(path: &Path) -> Vec<f32> {
    npy(path, &["<f4"], 4).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn npy_u16(path: &Path) -> Vec<u32> {
    npy(path, &["<u2", "<i2"], 2)
        .chunks_exact(2)
        .map(|b| u32::from(u16::from_le_bytes(b.try_into().unwrap())))
        .collect()
}
