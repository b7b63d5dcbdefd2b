//! A model on disk: what it is, where its tensors lie, and whether everything an answer could need is there.
//!
//! [`Checkpoint::open`] reads the small files and the shards' headers, never a weight, and refuses whatever would fail
//! later: a missing scale, a norm of the wrong length, a shard cut short. After it nothing is checked again.

mod ahead;
pub mod arch;
pub mod census;
mod config;
mod consumed;
pub mod container;
pub mod convert;
pub mod error;
pub mod experts;
pub mod finite;
pub(crate) mod header;
mod hint;
mod identity;
mod index;
pub mod mirror;
mod names;
pub mod required;
pub mod synth;
pub mod tensors;
mod unused;
pub mod verify;
pub mod write;

pub use arch::Arch;
pub use container::MatrixSource;
pub use error::CheckpointError;
pub use experts::{ExpertIndex, ExpertSource};
pub(crate) use required::expert_name;
pub use required::{Part, Required, Shape};
pub use tensors::{Dtype, TensorInfo, TensorMap};

use crate::kernels::Format;
use arch::IndexerKind;
pub(crate) use config::{stop_sources, vendor_name};
use error::{Result, is_there};
pub(crate) use hint::io_hint;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Left in a directory while writing into it is not finished.
pub(crate) const UNFINISHED_NAME: &str = ".millstream-convert.json";
/// Small files without which the shards are of no use.
const SMALL_FILES: [&str; 2] = ["config.json", "tokenizer.json"];

/// A model directory, opened and checked.
#[derive(Debug)]
pub struct Checkpoint {
    /// The model directory.
    pub dir: PathBuf,
    /// What the model is. Parts that the shards turned out to lack, the MTP layer or the indexer, are off.
    pub arch: Arch,
    /// Every tensor.
    pub tensors: TensorMap,
    /// The routed experts.
    pub experts: ExpertIndex,
    notes: Vec<String>,
    lacks_mtp: bool,
    fingerprint: u64,
    formats: BTreeSet<Format>,
    took: Duration,
}

impl Checkpoint {
    /// Opens the model in `dir` and checks everything an answer could need. Reads no weight.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        refuse_partial(dir)?;
        Checkpoint::open_with(dir, &SMALL_FILES)
    }

    /// As [`Checkpoint::open`], for whoever can do without tokenizer.json: token ids need none.
    pub fn open_without_tokenizer(dir: &Path) -> Result<Checkpoint> {
        refuse_partial(dir)?;
        let needed = if is_there(&dir.join("config.json"))? { &SMALL_FILES[..1] } else { &SMALL_FILES[..] };
        Checkpoint::open_with(dir, needed)
    }

    /// As [`Checkpoint::open`], with the list of small files that must be there.
    pub(crate) fn open_with(dir: &Path, small_files: &[&str]) -> Result<Checkpoint> {
        Checkpoint::open_remembering(dir, small_files, &tensors::Headers::new())
    }

    /// As [`Checkpoint::open_with`], with the headers of shards that may be gone.
    pub(crate) fn open_remembering(
        dir: &Path,
        small_files: &[&str],
        remembered: &tensors::Headers,
    ) -> Result<Checkpoint> {
        let started = Instant::now();
        let shards = tensors::shard_paths(dir)?.len();
        let mut missing = Vec::new();
        for name in small_files {
            if !is_there(&dir.join(name))? {
                missing.push((*name).to_owned());
            }
        }
        if !missing.is_empty() {
            return Err(CheckpointError::SmallFilesMissing { dir: dir.to_owned(), missing, shards });
        }
        let mut arch = Arch::read(dir)?;
        let (tensors, declares_mtp) = (TensorMap::open_remembering(dir, remembered)?, arch.mtp.is_some());
        let mut notes = tensors.notes().to_vec();
        disable_absent_parts(&mut arch, &tensors, &mut notes);
        let mut required = Checkpoint::required(&arch);
        let optional = required::mtp_optional(&arch);
        required.extend(optional.into_iter().filter(|tensor| tensors.get(&tensor.name).is_some()));
        let mut formats = BTreeSet::new();
        for tensor in &required {
            formats.extend(tensor.check(&tensors)?);
        }
        let experts = ExpertIndex::build(&arch, &tensors)?;
        let of_experts = experts.layers.iter().flatten().flatten().flat_map(ExpertSource::matrices);
        formats.extend(of_experts.map(|matrix| matrix.spec.format));
        notes.extend(unused::note(&arch, &tensors, &required)?);
        let fingerprint = fingerprint(dir, &tensors)?;
        let (took, lacks_mtp) = (started.elapsed(), declares_mtp && arch.mtp.is_none());
        Ok(Checkpoint { lacks_mtp, dir: dir.to_owned(), arch, tensors, experts, notes, fingerprint, formats, took })
    }

    /// Every tensor the model needs besides its routed experts, by the vendor's names.
    pub fn required(arch: &Arch) -> Vec<Required> {
        required::list(arch)
    }

    /// All tensors but the routed experts, those that a checkpoint may lack too.
    pub(crate) fn resident(arch: &Arch) -> impl Iterator<Item = Required> {
        required::list(arch).into_iter().chain(required::mtp_optional(arch))
    }

    /// Refuses a model of which a matrix is in a format that can only be converted.
    pub fn check_computable(&self) -> Result<()> {
        let only_source = |format: Format| format == Format::Nvfp4;
        if !self.formats().any(only_source) {
            return Ok(());
        }
        let experts = self.experts.layers.iter().enumerate().flat_map(|(layer, experts)| {
            let count = experts.as_ref().map_or(0, Vec::len);
            (0..count).flat_map(move |expert| required::expert(&self.arch, layer, expert))
        });
        for tensor in required::list(&self.arch).into_iter().chain(experts) {
            let source = tensor.source(&self.tensors)?;
            if only_source(source.spec.format) {
                return Err(CheckpointError::OnlySource {
                    file: self.tensors.path(source.data.file).to_owned(),
                    tensor: tensor.name,
                    format: source.spec.format,
                });
            }
        }
        Ok(())
    }

    /// Whether the MTP layer that config.json declares is missing, of which there is a note.
    pub fn lacks_mtp(&self) -> bool {
        self.lacks_mtp
    }

    /// Formats of the MTP layer's matrices, its experts' included; none without the layer.
    pub fn mtp_formats(&self) -> BTreeSet<Format> {
        let layer = self.arch.layers.len();
        let required = Checkpoint::required(&self.arch);
        let dense =
            required.iter().filter(|tensor| tensor.layer == Some(layer)).filter_map(|tensor| match tensor.shape {
                Shape::Matrix { rows, cols } => Some(self.tensors.matrix(&tensor.name, rows, cols).ok()?.spec.format),
                Shape::Vector(_) => None,
            });
        let experts = self.experts.layers.get(layer).into_iter().flatten().flatten();
        dense.chain(experts.flat_map(|expert| expert.matrices().map(|matrix| matrix.spec.format))).collect()
    }

    /// Of those, one of less than 8 bits, where there is one: drafts of such a layer are seldom right.
    pub fn narrow_mtp(&self) -> Option<Format> {
        let is_wide = |format: &Format| {
            matches!(format, Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block | Format::Int8Row)
        };
        self.mtp_formats().into_iter().find(|format| !is_wide(format))
    }

    /// Lines worth printing once: parts that are off, files and tensors that are ignored.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The experts of each routed layer of the decoder: what a token goes through. Those of an MTP layer are not among them.
    pub fn routed(&self) -> impl Iterator<Item = &[ExpertSource]> {
        self.experts.layers[..self.arch.layers.len()].iter().flatten().map(Vec::as_slice)
    }

    /// Bytes of the experts that one token uses, on average over the experts of each layer.
    pub fn token_expert_bytes(&self) -> u64 {
        let of_layer = |experts: &[ExpertSource]| {
            let bytes: u64 = experts.iter().map(ExpertSource::bytes).sum();
            bytes * self.arch.moe.top_k as u64 / experts.len().max(1) as u64
        };
        self.routed().map(of_layer).sum()
    }

    /// Formats of the experts and of the other matrices that are used, without repeats.
    pub fn formats(&self) -> impl Iterator<Item = Format> {
        self.formats.iter().copied()
    }

    /// How long opening took: the first part of loading a model.
    pub fn took(&self) -> Duration {
        self.took
    }

    /// Identifies the model by configuration and headers, for files kept elsewhere about it.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// [`Checkpoint::fingerprint`] as 16 hexadecimal digits.
    pub fn fingerprint_hex(&self) -> String {
        format!("{:016x}", self.fingerprint)
    }
}

/// What the model in `dir` is, by its configuration alone. That this is not there beside weights is told as such.
pub(crate) fn read_arch(dir: &Path) -> Result<Arch> {
    let shards = tensors::shard_paths(dir)?.len();
    if shards > 0 && !is_there(&dir.join(SMALL_FILES[0]))? {
        let missing = vec![SMALL_FILES[0].to_owned()];
        return Err(CheckpointError::SmallFilesMissing { dir: dir.to_owned(), missing, shards });
    }
    Arch::read(dir)
}

/// What is wrong with the headers of `dir`, a fault for each shard that has one.
pub(crate) fn bad_headers(dir: &Path) -> Result<Vec<CheckpointError>> {
    let shards = tensors::shard_paths(dir)?;
    Ok(shards.iter().filter_map(|path| header::read(path, millstream_io::FileId(0)).err()).collect())
}

/// Refuses what is no model yet, or no whole one any more, even if all that is there is whole.
pub(crate) fn refuse_partial(dir: &Path) -> Result<()> {
    refuse_unfinished(dir)?;
    consumed::refuse_consumed(dir)
}

/// What is being written is no model before it is done.
fn refuse_unfinished(dir: &Path) -> Result<()> {
    match is_there(&dir.join(UNFINISHED_NAME))? {
        true => Err(CheckpointError::Unfinished { dir: dir.to_owned() }),
        false => Ok(()),
    }
}

/// Turns off the parts that a config declares and published containers often lack. A part that is there by half stays
/// on, so that the check names what is missing.
fn disable_absent_parts(arch: &mut Arch, tensors: &TensorMap, notes: &mut Vec<String>) {
    let mtp_layer = arch.layers.len();
    let mtp_prefix = format!("model.layers.{mtp_layer}.");
    if arch.mtp.is_some() && !tensors.iter().any(|(name, _)| name.starts_with(&mtp_prefix)) {
        arch.mtp = None;
        notes.push(format!(
            "config.json declares an MTP layer but no shard holds {mtp_prefix}*: no speculation from it"
        ));
    }
    if arch.indexer.is_none() {
        return;
    }
    let has_indexer = |layer: usize| required::indexer_names(layer).iter().any(|name| tensors.get(name).is_some());
    let full: Vec<usize> =
        (0..arch.layers.len()).filter(|&layer| arch.layers[layer].indexer == IndexerKind::Full).collect();
    if !full.iter().any(|&layer| has_indexer(layer)) {
        arch.layers.iter_mut().chain(&mut arch.mtp).for_each(|layer| layer.indexer = IndexerKind::None);
        let top_k = arch.indexer.take().map_or(0, |indexer| indexer.top_k);
        notes.push(format!("no shard holds indexer weights: attention is dense, also beyond {top_k} positions"));
    } else if let Some(mtp) = arch.mtp.as_mut().filter(|_| !has_indexer(mtp_layer)) {
        mtp.indexer = IndexerKind::None;
        notes.push("the MTP layer has no indexer weights: its attention is dense".to_owned());
    }
}

fn fingerprint(dir: &Path, tensors: &TensorMap) -> Result<u64> {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(&config::read_small(&dir.join("config.json"))?);
    hasher.update(&tensors.header_hash().to_le_bytes());
    Ok(hasher.digest())
}
