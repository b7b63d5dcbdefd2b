//! The file that a context is kept in: opened, locked, told from others.
//!
//! It saves time and decides nothing. Whatever is wrong with it costs one line and what was computed before.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::checkpoint::io_hint;
use crate::engine::Engine;
use crate::engine::kvfile::{HEADER_BYTES_MOST, Header, Mismatch, Storage};
use crate::limits::KV_FILES_ASIDE_MAX;

use super::usage::UsageChoice;
use super::{Failure, output};

/// A conversation is for its user alone.
const MODE: u32 = 0o600;

/// Refuses a name that makes a shard of the model's directory of it, and one that the usage history has, which would be
/// written over it.
pub fn check(path: &Path, usage: &UsageChoice) -> Result<(), Failure> {
    let refused = |cause: &str| {
        let text = format!("--kv: a context cannot be kept in {}", path.display());
        Err(Failure::usage(text).cause(cause).hint("give another name"))
    };
    match usage {
        _ if path.extension().is_some_and(|extension| extension == "safetensors") => {
            refused("files of that name are read as weights")
        }
        UsageChoice::File(usage) if output::is_same(path, usage) => refused("--usage is the same file"),
        UsageChoice::File(_) | UsageChoice::Auto | UsageChoice::Off => Ok(()),
    }
}

/// Keeps the contexts of `engine` in the file at `path`, as far as that can be. What is wrong with it.
pub fn keep(engine: &mut Engine, path: &Path) -> Option<String> {
    let header = engine.kv_header()?;
    match KvPlace::open(path, header) {
        Ok((place, line)) => {
            let writable = place.writable;
            engine.keep_context(Box::new(place), writable);
            line
        }
        Err(why) => Some(format!("no context is kept: {}", why.text(path))),
    }
}

/// Why a file cannot be used.
#[derive(Debug)]
enum Unusable {
    /// The system refuses it.
    System(&'static str, io::Error),
    /// It is no regular file.
    NoFile,
    /// It is something else, which is not ours to move.
    Foreign,
    /// Another process uses it.
    Busy,
    /// It cannot be written, and is of another model, or other settings.
    Mismatch(Mismatch),
    /// So many files were put aside that no more are.
    Crowded,
}

impl Unusable {
    fn text(&self, path: &Path) -> String {
        let path = path.display();
        match self {
            Unusable::System(action, error) => {
                format!("cannot {action} {path}: {error} ({})", io_hint(action, error.kind()))
            }
            Unusable::NoFile => format!("{path} is no regular file"),
            Unusable::Foreign => format!("{path} is no file of a context, and is left as it is"),
            Unusable::Busy => format!("another process uses {path}"),
            Unusable::Mismatch(mismatch) => format!("{path} {mismatch}, and cannot be written"),
            Unusable::Crowded => {
                format!("{path} is of other contexts, and {KV_FILES_ASIDE_MAX} files lie aside already: remove some")
            }
        }
    }
}

/// The file, locked.
struct KvPlace {
    path: PathBuf,
    file: File,
    writable: bool,
}

impl KvPlace {
    /// Opens the file at `path`, or makes it, with `header`. One of another context is put aside, which is told.
    fn open(path: &Path, header: &Header) -> Result<(KvPlace, Option<String>), Unusable> {
        let path = match fs::metadata(path) {
            Ok(there) if !there.is_file() => return Err(Unusable::NoFile),
            Ok(_) => fs::canonicalize(path).map_err(|error| Unusable::System("open", error))?,
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            Err(error) => return Err(Unusable::System("look at", error)),
        };
        let mut place = KvPlace::open_any(path)?;
        place.lock()?;
        let mut found = Vec::new();
        let beginning = (&place.file).take(HEADER_BYTES_MOST as u64).read_to_end(&mut found);
        beginning.map_err(|error| Unusable::System("read", error))?;
        let mismatch = match header.check(&found) {
            Ok(()) => return Ok(place.told_if_unwritable()),
            Err(Mismatch::Foreign) => return Err(Unusable::Foreign),
            Err(mismatch) if !place.writable => return Err(Unusable::Mismatch(mismatch)),
            Err(Mismatch::Unbegun) => None,
            Err(mismatch) => Some(mismatch),
        };
        let line = match mismatch {
            None => None,
            Some(mismatch) => {
                let aside = place.put_aside()?;
                let line = format!("{} {mismatch}: it is now {}", place.path.display(), aside.display());
                place = KvPlace::create(place.path.clone())?;
                place.lock()?;
                Some(line)
            }
        };
        place.begin(header).map_err(|error| Unusable::System("write", error))?;
        Ok((place, line))
    }

    /// For reading and writing, or for reading where it cannot be written.
    fn open_any(path: PathBuf) -> Result<KvPlace, Unusable> {
        let action = if path.exists() { "open" } else { "create" };
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(MODE).open(&path);
        match opened {
            Ok(file) => Ok(KvPlace { path, file, writable: true }),
            Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
                match File::open(&path) {
                    Ok(file) => Ok(KvPlace { path, file, writable: false }),
                    // Why it cannot be made says more than that it is not there.
                    Err(_) => Err(Unusable::System(action, error)),
                }
            }
            Err(error) => Err(Unusable::System(action, error)),
        }
    }

    fn create(path: PathBuf) -> Result<KvPlace, Unusable> {
        match OpenOptions::new().read(true).write(true).create_new(true).mode(MODE).open(&path) {
            Ok(file) => Ok(KvPlace { path, file, writable: true }),
            // Another process was faster.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Unusable::Busy),
            Err(error) => Err(Unusable::System("create", error)),
        }
    }

    /// Takes the lock, which ends with the process at the latest. A file system without locks has none. The name must still
    /// be that of the file: who had the lock before may have put it aside.
    fn lock(&self) -> Result<(), Unusable> {
        if let Err(TryLockError::WouldBlock) = self.file.try_lock() {
            return Err(Unusable::Busy);
        }
        let looked = |error| Unusable::System("look at", error);
        let (own, named) = (self.file.metadata().map_err(looked)?, fs::metadata(&self.path).map_err(looked)?);
        match (own.dev(), own.ino()) == (named.dev(), named.ino()) {
            true => Ok(()),
            false => Err(Unusable::Busy),
        }
    }

    /// Gives the file another name beside its own.
    fn put_aside(&self) -> Result<PathBuf, Unusable> {
        let refused = |error| Unusable::System("rename", error);
        let name = self.path.file_name().unwrap_or_default();
        for number in 1..=KV_FILES_ASIDE_MAX {
            let mut aside = name.to_owned();
            aside.push(if number == 1 { ".aside".to_owned() } else { format!(".aside-{number}") });
            let aside = self.path.with_file_name(aside);
            if fs::symlink_metadata(&aside).is_err_and(|error| error.kind() == ErrorKind::NotFound) {
                fs::rename(&self.path, &aside).map_err(refused)?;
                return Ok(aside);
            }
        }
        Err(Unusable::Crowded)
    }

    /// Writes the header of a file that holds nothing yet, and makes it durable: what a power cut left of a header that was
    /// not could not be told from somebody else's file.
    fn begin(&self, header: &Header) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(&header.encode(), 0)?;
        self.file.sync_all()
    }

    fn told_if_unwritable(self) -> (KvPlace, Option<String>) {
        let line = (!self.writable)
            .then(|| format!("{} cannot be written: its context is used, and not added to", self.path.display()));
        (self, line)
    }
}

impl Storage for KvPlace {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn len_bytes(&mut self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn append(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        // A file that ends there already is left alone: its times say when it was changed.
        if self.file.metadata()?.len() > len { self.file.set_len(len) } else { Ok(()) }
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl Drop for KvPlace {
    /// Closing alone would not do: a process that this one is just starting has the descriptor too, until it runs.
    fn drop(&mut self) {
        // The lock ends with the process at the latest.
        let _ = self.file.unlock();
    }
}
