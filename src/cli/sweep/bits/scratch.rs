//! The directory that containers are made in: this process's own, gone when it ends. What a killed process left behind is
//! removed by the next one; a lock tells whether its owner lives.

use std::collections::hash_map::RandomState;
use std::fs::{self, DirBuilder, File};
use std::hash::BuildHasher;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::{Failure, render};

const PREFIX: &str = "millstream-bits-";
/// Begins the name of a directory until it is locked.
const NEW_PREFIX: &str = "millstream-new-bits-";
/// A directory that is not locked and younger than this may be one that is about to be.
const YOUNG: Duration = Duration::from_secs(60);

/// A directory that is removed with all that is in it.
pub struct Scratch {
    dir: PathBuf,
    /// Locked as long as it is held.
    _locked: File,
}

impl Scratch {
    pub fn make(below: &Path, uid: u32) -> Result<Scratch, Failure> {
        clear_abandoned(below, uid);
        // In a container every process has the same id.
        let random = RandomState::new().hash_one(std::process::id());
        let [new, dir] = [NEW_PREFIX, PREFIX].map(|prefix| below.join(format!("{prefix}{random:016x}")));
        let cannot = |e: std::io::Error| {
            Failure::work(format!("cannot make a directory in {}", below.display()))
                .cause(e)
                .hint("name a directory that can be written with --dir")
        };
        DirBuilder::new().mode(0o700).create(&new).map_err(cannot)?;
        let locked = File::open(&new).and_then(|file| file.lock().map(|()| file));
        match locked.and_then(|locked| fs::rename(&new, &dir).map(|()| locked)) {
            Ok(locked) => Ok(Scratch { dir, _locked: locked }),
            Err(e) => {
                let _ = fs::remove_dir(&new);
                Err(cannot(e))
            }
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            render::note(false, &format!("cannot remove {}: {error}", self.dir.display()));
        }
    }
}

/// Removes this user's directories of processes that are gone.
fn clear_abandoned(below: &Path, uid: u32) {
    for entry in fs::read_dir(below).into_iter().flatten().flatten() {
        let Ok(meta) = entry.path().symlink_metadata() else { continue };
        let old = || meta.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|age| age > YOUNG);
        let begins = |prefix| entry.file_name().to_string_lossy().starts_with(prefix);
        if (begins(PREFIX) || begins(NEW_PREFIX) && old())
            && meta.is_dir()
            && meta.uid() == uid
            && File::open(entry.path()).is_ok_and(|dir| dir.try_lock().is_ok())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not() {
        let below = tempfile::tempdir().unwrap();
        let uid = fs::metadata(below.path()).unwrap().uid();
        let made = |name: &str, age: u64| {
            let dir = below.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("logits"), b"x").unwrap();
            let file = File::open(&dir).unwrap();
            file.set_modified(std::time::SystemTime::now() - Duration::from_secs(age)).unwrap();
            (dir, file)
        };
        let (dead, _) = made("millstream-bits-1", 0);
        let (unborn, _) = made("millstream-new-bits-1", 120);
        let (young, _) = made("millstream-new-bits-2", 10);
        let (other, _) = made("somebody", 120);
        let (living, lock) = made("millstream-bits-3", 120);
        lock.lock().unwrap();
        clear_abandoned(below.path(), uid + 1);
        assert!(dead.exists(), "another user's");
        let scratch = Scratch::make(below.path(), uid).unwrap();
        assert!(!dead.exists() && !unborn.exists() && young.exists() && other.exists() && living.exists());
        fs::write(scratch.path("logits"), b"x").unwrap();
        drop(scratch);
        assert_eq!(fs::read_dir(below.path()).unwrap().count(), 3);
    }

    #[test]
    fn two_of_one_process_are_in_nobodys_way() {
        let below = tempfile::tempdir().unwrap();
        let uid = fs::metadata(below.path()).unwrap().uid();
        let first = Scratch::make(below.path(), uid).unwrap();
        Scratch::make(below.path(), uid).unwrap();
        assert!(first.dir.exists());
    }
}
