//! Copies of a model's shards in other directories.
//!
//! A copy counts by its length and its header, byte for byte: what a header says of a shard, its tensors and, in a
//! container, their checksums, is then true of both. No weight is compared. The file that was compared is the one that
//! will be read, or none.
//!
//! The model's own header is the measure, so a model whose shard is gone cannot be opened, mirrors or not; and what a
//! mirror has and cannot be read is refused by name, because it was asked for. Only what fails later is covered for.

use super::TensorMap;
use crate::limits::MAX_HEADER_BYTES;
use millstream_io::Mirror;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why a directory is no mirror of a model.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// It is the model's own, or given twice.
    #[error("the mirror {} is the same directory as {}", dir.display(), other.display())]
    Same {
        /// The directory.
        dir: PathBuf,
        /// The other name for it.
        other: PathBuf,
    },
    /// It has no file that a shard could be read from.
    #[error("the mirror {} has no copy of any of the {shards} shard{} of {}", dir.display(), if *shards == 1 { "" } else { "s" }, model.display())]
    Nothing {
        /// The directory.
        dir: PathBuf,
        /// The model's directory.
        model: PathBuf,
        /// Shards of the model.
        shards: usize,
    },
    /// A file with the name of a shard is another one.
    #[error("{} is no copy of {}: {what}: expected {expected}, found {found}", copy.display(), shard.display())]
    Differs {
        /// The file in the mirror.
        copy: PathBuf,
        /// The model's shard.
        shard: PathBuf,
        /// Which property.
        what: &'static str,
        /// That of the shard.
        expected: String,
        /// That of the copy.
        found: String,
    },
    /// A file or directory could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl MirrorError {
    /// One line on what to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            MirrorError::Same { .. } => "--mirror takes another directory, on another drive, that holds copies",
            MirrorError::Nothing { .. } => "copy shards there, under the names they have in the model's directory",
            MirrorError::Differs { .. } => {
                "copy the file again, or remove it: what a mirror lacks is read from the model"
            }
            MirrorError::Io { .. } => "check the path, its permissions and its drive, or leave --mirror out",
        }
    }

    /// Whether the choice of the directory is at fault, and not what is in it.
    pub fn is_choice(&self) -> bool {
        matches!(self, MirrorError::Same { .. } | MirrorError::Nothing { .. })
    }
}

/// The copies that each of `dirs` holds of the shards of `tensors`, checked. Reads headers and no weight.
///
/// # Errors
/// [`MirrorError`] for a directory that is the model's or comes twice, that has no copy, or one that differs.
pub fn find(dirs: &[PathBuf], tensors: &TensorMap) -> Result<Vec<Mirror>, MirrorError> {
    let mut known = vec![(tensors.dir().to_owned(), identity(&looked_at(tensors.dir())?))];
    let mut mirrors = Vec::with_capacity(dirs.len());
    for dir in dirs {
        let this = identity(&looked_at(dir)?);
        if let Some((other, _)) = known.iter().find(|(_, other)| *other == this) {
            return Err(MirrorError::Same { dir: dir.clone(), other: other.clone() });
        }
        known.push((dir.clone(), this));
        let found = tensors.paths().iter().map(|shard| copy_of(shard, dir)).collect::<Result<Vec<_>, _>>()?;
        if found.iter().all(Option::is_none) {
            let (model, shards) = (tensors.dir().to_owned(), found.len());
            return Err(MirrorError::Nothing { dir: dir.clone(), model, shards });
        }
        let (copies, seen) = found.into_iter().map(Option::unzip).unzip();
        mirrors.push(Mirror { dir: dir.clone(), copies, seen });
    }
    Ok(mirrors)
}

/// Which file a path leads to: device and inode.
type Identity = (u64, u64);

/// The copy of `shard` in `dir` and the file it is. A link to the shard itself is none: it brings no second drive.
fn copy_of(shard: &Path, dir: &Path) -> Result<Option<(PathBuf, Identity)>, MirrorError> {
    let Some(name) = shard.file_name() else { return Ok(None) };
    let copy = dir.join(name);
    let there = match std::fs::metadata(&copy) {
        Ok(there) => there,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(MirrorError::Io { path: copy, source }),
    };
    let own = looked_at(shard)?;
    if identity(&own) == identity(&there) {
        return Ok(None);
    }
    let differs = |what, expected: String, found: String| {
        Err(MirrorError::Differs { copy: copy.clone(), shard: shard.to_owned(), what, expected, found })
    };
    if !there.is_file() {
        return differs("kind of file", "a regular file".to_owned(), "something else".to_owned());
    }
    if own.len() != there.len() {
        return differs("length", format!("{} bytes", own.len()), format!("{} bytes", there.len()));
    }
    let ((expected, _), (found, seen)) = (header(shard, own.len())?, header(&copy, there.len())?);
    if expected.len() != found.len() {
        return differs("header length", format!("{} bytes", expected.len()), format!("{} bytes", found.len()));
    }
    match expected.iter().zip(&found).position(|(a, b)| a != b) {
        Some(at) => differs("header", "the same bytes".to_owned(), format!("another byte {at}")),
        None => Ok(Some((copy, seen))),
    }
}

/// The header of a shard of `bytes` bytes with its length before it, as far as there is one, and the file it came from.
fn header(path: &Path, bytes: u64) -> Result<(Vec<u8>, Identity), MirrorError> {
    let failed = |source| MirrorError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let seen = identity(&file.metadata().map_err(failed)?);
    let mut prefix = [0u8; 8];
    let known = bytes.min(prefix.len() as u64) as usize;
    file.read_exact_at(&mut prefix[..known], 0).map_err(failed)?;
    let stated = u64::from_le_bytes(prefix).min(MAX_HEADER_BYTES);
    let mut header = vec![0u8; stated.saturating_add(8).min(bytes) as usize];
    file.read_exact_at(&mut header, 0).map_err(failed)?;
    Ok((header, seen))
}

fn looked_at(path: &Path) -> Result<Metadata, MirrorError> {
    std::fs::metadata(path).map_err(|source| MirrorError::Io { path: path.to_owned(), source })
}

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}
