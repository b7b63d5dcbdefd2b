//! What a command writes: its answer, and files beside it, which are whole or not there and never over what is read.

use std::fmt::Display;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{Done, Failure};
use crate::checkpoint::io_hint;

/// Writes to stdout; `Some` where nobody reads it any more.
pub fn print(text: &str) -> Result<Option<Done>, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Some(Done::PipeClosed)),
        Err(error) => Err(refused("cannot write the result to standard output".to_owned(), &error)),
    }
}

/// Refuses, before the work that fills it, a file that could not be written, and one of `inputs` by whatever name: files,
/// or directories with all that lies in them. Writes nothing. `what` goes into the file.
pub fn check<P: AsRef<Path>>(path: &Path, what: &str, inputs: &[P]) -> Result<(), Failure> {
    let refused =
        |cause: &dyn Display| Failure::usage(format!("cannot write the {what} to {}", path.display())).cause(cause);
    match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Err(refused(&"it is a directory")),
        Ok(there) => {
            if let Some(input) = inputs.iter().find_map(|input| same_file(&there, input.as_ref())) {
                let cause = format!("it is {}, which this command reads", input.display());
                return Err(refused(&cause).hint("give another name"));
            }
            if there.is_file() {
                OpenOptions::new().append(true).open(path).map_err(|e| refused(&e))?;
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Such as the file of a context, which the command makes before it writes.
            if let Some(input) = inputs.iter().map(AsRef::as_ref).find(|input| is_same(path, input)) {
                let cause = format!("{} is another file of this command", input.display());
                return Err(refused(&cause).hint("give another name"));
            }
            let trial = beside(path);
            File::create_new(&trial).map_err(|e| refused(&e))?;
            // Only a trial; where it cannot be removed the place cannot be used either.
            fs::remove_file(&trial).map_err(|e| refused(&e))?;
        }
        Err(error) => return Err(refused(&error)),
    }
    Ok(())
}

/// Writes all of it, or leaves what was there.
pub fn write(path: &Path, what: &str, bytes: impl AsRef<[u8]>) -> Result<(), Failure> {
    replace(path, bytes.as_ref()).map_err(|e| refused(format!("cannot write the {what} to {}", path.display()), &e))
}

/// A failure of writing.
fn refused(what: String, error: &io::Error) -> Failure {
    Failure::work(what).cause(error).hint(io_hint("write", error.kind()))
}

/// Puts `bytes` in the place of a file, or makes it: under its name stands the old or the new, whole. What is no
/// regular file, a pipe or a terminal, is written to. A link is followed.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, bytes, 0o666)
}

/// As [`replace`]; nobody but the user may read it.
pub fn replace_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_with(path, bytes, 0o600)
}

fn replace_with(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = match fs::metadata(path) {
        Ok(there) if !there.is_file() => return fs::write(path, bytes),
        Ok(_) => fs::canonicalize(path)?,
        Err(_) => path.to_owned(),
    };
    let made = beside(&path);
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&made)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&made, &path)
    };
    write().inspect_err(|_| {
        // Where it was renamed, it is gone already.
        let _ = fs::remove_file(&made);
    })
}

/// The name that a file has until it is whole.
pub(super) fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.part", std::process::id()))
}

/// Whether two names are of one file, which need not be there yet.
pub fn is_same(one: &Path, other: &Path) -> bool {
    match (fs::metadata(one), fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        (Err(_), Err(_)) => {
            let place = |path: &Path| {
                let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                Some((fs::canonicalize(parent).ok()?, path.file_name()?.to_owned()))
            };
            place(one).is_some_and(|one| place(other) == Some(one))
        }
        _ => false,
    }
}

/// Which file of `input` is `file`.
fn same_file(file: &Metadata, input: &Path) -> Option<PathBuf> {
    let same = |other: &Metadata| (other.dev(), other.ino()) == (file.dev(), file.ino());
    let there = fs::metadata(input).ok()?;
    if !there.is_dir() {
        return same(&there).then(|| input.to_owned());
    }
    let files = fs::read_dir(input).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.into_iter().find(|path| fs::metadata(path).is_ok_and(|other| same(&other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_never_written_over_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        let shard = model.join("a.safetensors");
        fs::write(&shard, b"weights").unwrap();
        let (link, hard) = (dir.path().join("link"), dir.path().join("hard"));
        std::os::unix::fs::symlink(&shard, &link).unwrap();
        fs::hard_link(&shard, &hard).unwrap();
        for name in [&shard, &link, &hard] {
            for input in [&model, &shard] {
                let failure = check(name, "picture", &[dir.path(), input]).unwrap_err();
                assert_eq!(failure.code, 2);
                assert!(failure.text().contains("which this command reads"), "{}", failure.text());
            }
        }
        assert!(check::<&Path>(&model, "picture", &[]).is_err(), "a directory");
        assert!(check::<&Path>(&dir.path().join("none/x"), "picture", &[]).is_err());
        check(&model.join("new"), "picture", &[&model]).unwrap();
        assert_eq!(fs::read_dir(&model).unwrap().count(), 1, "a check leaves nothing behind");
        assert_eq!(fs::read(&shard).unwrap(), b"weights");
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let (place, link) = (dir.path().join("x.svg"), dir.path().join("y.svg"));
        std::os::unix::fs::symlink(&place, &link).unwrap();
        fs::write(&place, b"a much longer file than the new one").unwrap();
        check::<&Path>(&link, "picture", &[]).unwrap();
        write(&link, "picture", "new").unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"new");
        assert!(link.is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        // Not a file: written to, not replaced.
        check::<&Path>(Path::new("/dev/null"), "picture", &[]).unwrap();
        write(Path::new("/dev/null"), "picture", "new").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
