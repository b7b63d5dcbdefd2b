//! From a vendor's checkpoint, or a container, to a container laid out for direct reads.

mod options;
mod plan;
mod weights;

pub use options::{ConvertOptions, Width};

use super::error::{Result, io_error, is_there};
pub use super::write::{Cancel, Progress, Report as ConvertReport};
use super::write::{Contents, SmallFile, Writing};
use super::{Checkpoint, config, refuse_unfinished};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use weights::Encoder;
use xxhash_rust::xxh3::Xxh3;

/// Files beside the shards that belong to the model and are copied with it.
const COPIED: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "LICENSE",
];

/// Converts the model in `src` into a container in `dst`, which is made if it is not there.
///
/// Continues a conversion of the same source and parameters; refuses a directory that holds anything else. On an error
/// the finished shards stay, and the same call goes on from them.
pub fn convert(
    src: &Path,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    refuse_unfinished(src)?;
    convert_opened(&Checkpoint::open_with(src, &["config.json"])?, dst, options, progress)
}

/// As [`convert`], from a checkpoint that is open already.
pub fn convert_opened(
    source: &Checkpoint,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    let contents = Contents {
        shards: plan::shards(source, options)?,
        small_files: small_files(&source.dir)?,
        identity: source_identity(source)?,
        parameters: options.parameters(),
    };
    let writing = Writing::prepare(dst, contents, options.free_bytes, progress)?;
    writing.run(&mut Encoder::new(&source.tensors), options.cancel.as_ref(), progress)
}

fn small_files(dir: &Path) -> Result<Vec<SmallFile>> {
    let mut files = Vec::new();
    for name in COPIED {
        let path = dir.join(name);
        if is_there(&path)? {
            files.push((name, config::read_small(&path)?));
        }
    }
    Ok(files)
}

/// Tells sources apart, also two trainings of one architecture, whose configurations and headers are the same: hashes
/// some weights of every shard with them.
fn source_identity(source: &Checkpoint) -> Result<String> {
    const SAMPLES: u64 = 16;
    let mut hasher = Xxh3::new();
    hasher.update(&source.fingerprint().to_le_bytes());
    let mut sample = [0; 4096];
    for path in source.tensors.paths() {
        let file = File::open(path).map_err(io_error("open", path))?;
        let end = file.metadata().map_err(io_error("read", path))?.len().saturating_sub(sample.len() as u64);
        for number in 1..=SAMPLES {
            let read = file.read_at(&mut sample, end / SAMPLES * number).map_err(io_error("read", path))?;
            hasher.update(&sample[..read]);
        }
    }
    Ok(format!("{:016x}", hasher.digest()))
}
