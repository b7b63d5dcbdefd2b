//! What quantization costs: glm-tales in several precisions against transformers. Shared with `bench/quality.rs`.

use std::path::Path;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{ConvertOptions, Width, convert};
use millstream::engine::{Activations, Engine, EngineConfig};

use super::reference::Reference;
use super::scores::{argmaxes, differing};

/// A container to measure.
pub struct Precision {
    pub name: &'static str,
    pub options: ConvertOptions,
}

fn precision(name: &'static str, experts: Width, rest: Width, group: Option<u16>) -> Precision {
    let options = ConvertOptions {
        experts,
        dense: rest,
        io_bits: rest,
        mtp: rest,
        indexer: rest,
        group,
        ..ConvertOptions::default()
    };
    Precision { name, options }
}

/// Every precision of the table, widest first.
pub fn precisions() -> Vec<Precision> {
    use Width::{Bits2, Bits4, Bits8};
    vec![
        precision("int8 everywhere", Bits8, Bits8, None),
        precision("int4 g64 experts, int8 rest", Bits4, Bits8, Some(64)),
        Precision { name: "int4 experts, int8 rest (default)", options: ConvertOptions::default() },
        Precision {
            name: "int4 experts and dense, int8 rest",
            options: ConvertOptions { dense: Bits4, ..ConvertOptions::default() },
        },
        precision("int4 everywhere", Bits4, Bits4, None),
        precision("int2 experts, int8 rest", Bits2, Bits8, None),
        precision("int2 everywhere", Bits2, Bits2, None),
    ]
}

/// Converts glm-tales into `dir`.
pub fn make(precision: &Precision, dir: &Path) {
    convert(&Reference::glm_tales().model, dir, &precision.options, &mut |_| ()).unwrap();
}

pub fn open(dir: &Path, activations: Activations) -> Engine {
    let config = EngineConfig { activations, threads: 2, ..EngineConfig::new(1 << 30) };
    Engine::open(Checkpoint::open(dir).unwrap(), &config).unwrap()
}

/// Share of the positions of all reference prompts where the argmax is the one of transformers.
pub fn prompt_agreement(engine: &mut Engine) -> f64 {
    let vocab = engine.arch().vocab;
    let (mut positions, mut same) = (0, 0);
    for prompt in Reference::glm_tales().expected().values() {
        let got = argmaxes(&engine.score(&prompt.ids).unwrap(), vocab);
        positions += got.len();
        same += got.len() - differing(&got, &prompt.argmax).len();
    }
    same as f64 / positions as f64
}
