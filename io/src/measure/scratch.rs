//! A file to measure on, without a name: however the process ends, the file is gone with it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::measure::host;
use crate::measure::plan::next_random;

/// Bytes written at a time.
const BLOCK_BYTES: usize = 4 << 20;
/// Most names tried.
const NAMES_MAX: u64 = 100;

/// The file. Dropping it removes it.
#[derive(Debug)]
pub struct Scratch {
    file: File,
    dir: PathBuf,
}

impl Scratch {
    /// An empty file in `dir`, which loses its name at once.
    ///
    /// # Errors
    /// Those of making and removing a file there.
    pub fn new(dir: &Path) -> io::Result<Scratch> {
        let mut tries = 0;
        loop {
            let path = dir.join(format!(".millstream-scratch-{}-{tries}", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    std::fs::remove_file(&path)?;
                    return Ok(Scratch { file, dir: dir.to_owned() });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < NAMES_MAX => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Fills it with `bytes` bytes that no file system can compress, syncs them, and has them forgotten by the page
    /// cache. `go_on` is told the bytes written; when it says no, the rest is left out and the answer is `false`.
    ///
    /// # Errors
    /// Those of writing.
    pub fn fill(&mut self, bytes: u64, go_on: &mut dyn FnMut(u64) -> bool) -> io::Result<bool> {
        let mut block = vec![0u8; BLOCK_BYTES];
        let mut state = 1;
        for piece in block.chunks_exact_mut(8) {
            piece.copy_from_slice(&next_random(&mut state).to_le_bytes());
        }
        let mut written = 0;
        while written < bytes {
            // Another first number for each page: blocks that a drive could take for the same are none.
            for page in block.chunks_exact_mut(crate::limits::PAGE_BYTES) {
                page[..8].copy_from_slice(&next_random(&mut state).to_le_bytes());
            }
            let part = (bytes - written).min(BLOCK_BYTES as u64);
            self.file.write_all(&block[..part as usize])?;
            written += part;
            if !go_on(written) {
                return Ok(false);
            }
            // Now and then, so that a machine is never left with gigabytes of dirty pages.
            if written.is_multiple_of(256 << 20) {
                self.file.sync_data()?;
            }
        }
        self.file.sync_all()?;
        host::drop_pages(&self.file);
        Ok(true)
    }

    /// Where other processes of this user find it, as long as this value lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// The directory it was made in.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_contents_and_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::new(dir.path()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut told = vec![];
        assert!(
            scratch
                .fill(5 << 20, &mut |written| {
                    told.push(written);
                    true
                })
                .unwrap()
        );
        assert_eq!(told, [4 << 20, 5 << 20]);
        let content = std::fs::read(scratch.path()).unwrap();
        assert_eq!(content.len(), 5 << 20);
        let pages: std::collections::BTreeSet<&[u8]> = content.chunks(4096).collect();
        assert_eq!(pages.len(), 5 << 8, "no two pages are alike");
        assert_eq!(scratch.dir(), dir.path());
    }

    #[test]
    fn an_interrupted_fill_stops() {
        let dir = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::new(dir.path()).unwrap();
        assert!(!scratch.fill(1 << 40, &mut |_| false).unwrap());
        assert_eq!(std::fs::metadata(scratch.path()).unwrap().len(), 4 << 20);
        assert!(Scratch::new(&dir.path().join("none")).is_err());
    }
}
