//! What is read: a file, a model's shards, or a scratch file.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use millstream_io::free_bytes;
use millstream_io::limits::SLAB_BYTES_MAX;
use millstream_io::measure::scratch::Scratch;

use super::stopped;
use crate::cli::args::BenchIoArgs;
use crate::cli::config::check_model_dir;
use crate::cli::render::{self, Progress};
use crate::cli::{Failure, size};

/// Size of the scratch file, room permitting.
const SCRATCH_BYTES: u64 = 4 << 30;
/// It takes at most this part of the free space.
const SCRATCH_SHARE: u64 = 10;
/// One that is asked for may leave this little free: a full file system harms others.
const FREE_BYTES_MIN: u64 = 256 << 20;
/// Slab, where files are large enough.
const SLAB_BYTES: u64 = 19 << 20;
/// Places the files should have at least: fewer are read over and over.
const PLACES_MIN: u64 = 16;
/// Smallest slab.
const SLAB_BYTES_MIN: u64 = 4096;

/// What is read.
pub struct Source {
    /// The files.
    pub paths: Vec<PathBuf>,
    /// How much of each is read.
    pub bytes_max: u64,
    /// What to call it.
    pub name: String,
    /// A place on the file system that holds it.
    pub place: PathBuf,
    /// Size of the largest file.
    pub largest_bytes: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Keeps the scratch file.
    pub scratch: Option<Scratch>,
}

impl Source {
    /// As asked. Announces, makes and fills a scratch file where no file was named; `None` when interrupted meanwhile.
    pub fn choose(args: &BenchIoArgs, stop: &AtomicBool, progress: &mut Progress) -> Result<Option<Source>, Failure> {
        let bytes_max = args.size.unwrap_or(u64::MAX);
        check_sizes(args)?;
        match (&args.file, &args.model) {
            (Some(file), _) => Source::of(vec![file.clone()], file, bytes_max).map(Some),
            (None, Some(dir)) => Source::model(dir, bytes_max).map(Some),
            (None, None) => Source::scratch(args, stop, progress),
        }
    }

    /// The first `bytes_max` bytes of each shard of the model in `dir`.
    pub fn model(dir: &Path, bytes_max: u64) -> Result<Source, Failure> {
        Source::of(shards(dir)?, dir, bytes_max)
    }

    fn of(paths: Vec<PathBuf>, named: &Path, bytes_max: u64) -> Result<Source, Failure> {
        let mut sizes = Vec::new();
        for path in &paths {
            let facts = std::fs::metadata(path)
                .map_err(|e| Failure::usage(format!("cannot read {}", path.display())).cause(e))?;
            if !facts.is_file() {
                return Err(Failure::usage(format!("{} is not a file", path.display()))
                    .hint("--file takes a file, -m the directory of a model"));
            }
            sizes.push(facts.len().min(bytes_max));
        }
        let name = named.display().to_string();
        let largest_bytes = sizes.iter().copied().max().unwrap_or(0);
        let bytes = sizes.iter().sum();
        Ok(Source { paths, bytes_max, name, place: named.to_owned(), largest_bytes, bytes, scratch: None })
    }

    fn scratch(args: &BenchIoArgs, stop: &AtomicBool, progress: &mut Progress) -> Result<Option<Source>, Failure> {
        let dir = args.dir.clone().unwrap_or_else(|| PathBuf::from("."));
        let cannot = |what: &str| Failure::usage(format!("cannot {what} {}", dir.display()));
        let free = free_bytes(&dir).map_err(|e| cannot("ask the free space of").cause(e))?;
        let bytes = scratch_bytes(args.size, args.slab.unwrap_or(SLAB_BYTES), free)?;
        let mut scratch = Scratch::new(&dir).map_err(|e| {
            cannot("make a scratch file in").cause(e).hint("name another directory with --dir, or a file with --file")
        })?;
        let shown = std::fs::canonicalize(&dir).unwrap_or_else(|_| dir.clone());
        let announced = format!(
            "writing a scratch file of {} in {} ({} free); it has no name and is gone when this program ends",
            size::show(bytes),
            shown.display(),
            size::show(free),
        );
        render::note(args.quiet, &announced);
        let mut go_on = |written: u64| {
            progress.show(|| format!("scratch file: {} of {}", size::show(written), size::show(bytes)));
            !stopped(stop)
        };
        let filled = scratch.fill(bytes, &mut go_on).map_err(|e| {
            Failure::work(format!("cannot write the scratch file in {}", shown.display()))
                .cause(e)
                .hint("name another directory with --dir, a smaller --size, or a file with --file")
        })?;
        progress.end();
        if !filled {
            return Ok(None);
        }
        let (paths, name) = (vec![scratch.path()], format!("scratch file in {}", shown.display()));
        let scratch = Some(scratch);
        Ok(Some(Source { paths, bytes_max: u64::MAX, name, place: shown, largest_bytes: bytes, bytes, scratch }))
    }

    /// The slab asked for, or 19 MiB where the files have enough places for it.
    pub fn slab_bytes(&self, args: &BenchIoArgs) -> Result<u64, Failure> {
        let slab = args.slab.unwrap_or_else(|| default_slab(self.largest_bytes)).next_multiple_of(SLAB_BYTES_MIN);
        if slab > self.largest_bytes {
            let (file, slab) = (size::show(self.largest_bytes), size::show(slab));
            return Err(Failure::usage(format!("{}: {file} hold no slab of {slab}", self.name))
                .hint("ask for smaller slabs with --slab, or for another file"));
        }
        Ok(slab)
    }
}

/// Messages with the scratch file called what it is, not the path it is found by.
pub fn named(source: &Source, messages: Vec<(String, String)>) -> Vec<(String, String)> {
    let Some(scratch) = &source.scratch else { return messages };
    let path = scratch.path().display().to_string();
    messages.into_iter().map(|(what, why)| (what, why.replace(&path, "the scratch file"))).collect()
}

/// Refuses sizes that cannot work, before anything is written.
fn check_sizes(args: &BenchIoArgs) -> Result<(), Failure> {
    match (args.size, args.slab) {
        (Some(0), _) => Err(Failure::usage("--size 0 leaves nothing to read")),
        (_, Some(0)) => Err(Failure::usage("--slab 0 reads nothing")),
        (_, Some(slab)) if slab > SLAB_BYTES_MAX as u64 => {
            Err(Failure::usage(format!("a slab of {} is more than a request can have", size::show(slab)))
                .hint("a slab is at most 1 GiB"))
        }
        (Some(bytes), Some(slab)) if bytes < slab => {
            let (bytes, slab) = (size::show(bytes), size::show(slab));
            Err(Failure::usage(format!("--size {bytes} holds no --slab {slab}")))
        }
        _ => Ok(()),
    }
}

/// 19 MiB, or what leaves the file enough places.
fn default_slab(file_bytes: u64) -> u64 {
    SLAB_BYTES.min(file_bytes / PLACES_MIN / SLAB_BYTES_MIN * SLAB_BYTES_MIN).max(SLAB_BYTES_MIN)
}

/// The size asked for where there is room for it; else at most 4 GiB and a tenth of what is free.
fn scratch_bytes(asked: Option<u64>, slab_bytes: u64, free: u64) -> Result<u64, Failure> {
    let hint = "name another directory with --dir, or a file with --file";
    match asked {
        Some(bytes) if bytes > free.saturating_sub(FREE_BYTES_MIN) => {
            let (bytes, free) = (size::show(bytes), size::show(free));
            Err(Failure::usage(format!("there is no room for a scratch file of {bytes}: {free} are free")).hint(hint))
        }
        Some(bytes) => Ok(bytes),
        None => {
            let bytes = SCRATCH_BYTES.min(free / SCRATCH_SHARE) / SLAB_BYTES_MIN * SLAB_BYTES_MIN;
            if bytes < slab_bytes {
                let (free, slab) = (size::show(free), size::show(slab_bytes));
                return Err(Failure::usage(format!("a tenth of the {free} that are free holds no slab of {slab}"))
                    .hint(format!("ask for a smaller --slab or a certain --size; or {hint}")));
            }
            Ok(bytes)
        }
    }
}

fn shards(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    check_model_dir(dir, "-m")?;
    let entries =
        std::fs::read_dir(dir).map_err(|e| Failure::usage(format!("cannot read {}", dir.display())).cause(e))?;
    let mut shards: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    shards.sort();
    if shards.is_empty() {
        return Err(Failure::usage(format!("{} holds no *.safetensors", dir.display()))
            .hint("-m takes the directory of a model, --file any file"));
    }
    Ok(shards)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_file_fits_the_free_space() {
        assert_eq!(scratch_bytes(None, 19 << 20, 100 << 30).unwrap(), 4 << 30);
        assert_eq!(scratch_bytes(None, 19 << 20, 10 << 30).unwrap(), 1 << 30);
        assert_eq!(scratch_bytes(Some(5 << 30), 19 << 20, 6 << 30).unwrap(), 5 << 30);
        for (asked, free) in [(None, 100 << 20), (Some(6 << 30), 6 << 30), (Some(1), 0), (Some(u64::MAX), 1 << 40)] {
            let failure = scratch_bytes(asked, 19 << 20, free).unwrap_err();
            assert!(failure.code == 2 && failure.hint.is_some(), "{failure:?}");
        }
    }

    #[test]
    fn small_files_are_read_in_small_slabs() {
        assert_eq!(default_slab(4 << 30), 19 << 20);
        assert_eq!(default_slab(16 << 20), 1 << 20);
        assert_eq!(default_slab(100_000), 4096);
        assert_eq!(default_slab(10), 4096);
    }
}
