//! Files written from their beginning to their end, around the page cache where that is possible.
//!
//! A file of gigabytes that goes through the page cache fills memory with dirty pages faster than a drive takes them,
//! pushes out what others need there, and then waits for all of it at once. Here whole slabs go to the drive directly,
//! by a thread of their own while the caller makes the next ones. Where the file system does not write directly, the
//! same slabs go through the page cache, which is made to write them out every [`WRITEBACK_BYTES`] and to forget them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::access::{drop_cached, really_direct, refuses_direct};
use crate::error::{Errno, IoError};
use crate::limits::{WRITE_SLAB_BYTES, WRITE_SLABS, WRITEBACK_BYTES};
use crate::pool::{Slab, SlabPool};

/// Buffers of a [`FileWriter`], for one after the other.
///
/// # Errors
/// [`IoError::Memory`] where there is no room for them.
pub fn write_pool() -> Result<SlabPool, IoError> {
    SlabPool::new(WRITE_SLAB_BYTES, WRITE_SLABS)
}

/// A file that is being written.
pub struct FileWriter {
    pool: SlabPool,
    /// Through the page cache: the head, a ragged end.
    plain: File,
    /// The slab that is being filled, and how far.
    slab: Option<Slab>,
    filled: usize,
    /// Bytes of whole slabs handed out.
    handed: u64,
    /// Slabs handed out and not told of.
    out: usize,
    worker: Worker,
}

/// Who writes whole slabs.
enum Worker {
    /// A thread; told slabs and their places, it tells what became of them.
    Thread { work: SyncSender<(Slab, u64)>, done: Receiver<io::Result<()>>, thread: JoinHandle<()> },
    /// The caller, where no thread can be had.
    Caller(Sink),
    /// Nobody: it failed, or is done.
    Gone,
}

impl FileWriter {
    /// Makes the file, or empties it. `pool` is of [`write_pool`], and no other writer's at the same time.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(path: &Path, pool: &SlabPool) -> io::Result<FileWriter> {
        let plain = File::create(path)?;
        let sink = |direct| Ok::<Sink, io::Error>(Sink { direct, plain: plain.try_clone()?, unsynced: 0 });
        let worker = start(sink(open_directly(path)?)?, sink(None)?);
        Ok(FileWriter { pool: pool.clone(), plain, slab: None, filled: 0, handed: 0, out: 0, worker })
    }

    /// Adds bytes at the end. An error may be of bytes that were added earlier.
    ///
    /// # Errors
    /// What the system says; the writer is of no use then.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut slab = match self.slab.take() {
                Some(slab) => slab,
                None => self.free_slab()?,
            };
            let room = &mut slab.bytes_mut()[self.filled..];
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            self.filled += count;
            if count == room.len() {
                self.filled = 0;
                self.hand_out(slab)?;
            } else {
                self.slab = Some(slab);
            }
        }
        Ok(())
    }

    /// Bytes added so far.
    pub fn position(&self) -> u64 {
        self.handed + self.filled as u64
    }

    /// Writes what is left, puts `head` over the first bytes and makes all of it durable.
    ///
    /// # Errors
    /// What the system says; after an error of [`FileWriter::write`] always one.
    pub fn finish(mut self, head: &[u8]) -> io::Result<()> {
        if matches!(self.worker, Worker::Gone) {
            return Err(after_an_error());
        }
        while self.out > 0 {
            self.take_result()?;
        }
        if let Worker::Thread { work, thread, .. } = std::mem::replace(&mut self.worker, Worker::Gone) {
            drop(work);
            thread.join().map_err(|_| io::Error::other("the thread that writes has panicked"))?;
        }
        // The drive takes whole sectors only: the end, and a head that ends inside one, go through the page cache.
        if let Some(slab) = self.slab.take() {
            self.plain.write_all_at(&slab.bytes()[..self.filled], self.handed)?;
        }
        self.plain.write_all_at(head, 0)?;
        self.plain.sync_all()?;
        // Who reads the file now, to see what the drive has, shall not be given what is left of it in memory.
        drop_cached(self.plain.as_raw_fd(), 0, self.handed + self.filled as u64);
        Ok(())
    }

    fn free_slab(&mut self) -> io::Result<Slab> {
        loop {
            if let Some(slab) = self.pool.take() {
                return Ok(slab);
            }
            if self.out == 0 {
                return Err(io::Error::other("somebody else has the slabs of this writer"));
            }
            self.take_result()?;
        }
    }

    fn hand_out(&mut self, slab: Slab) -> io::Result<()> {
        let at = self.handed;
        self.handed += slab.bytes().len() as u64;
        match &mut self.worker {
            Worker::Thread { work, .. } => {
                // It ends after an error only, which is the next result.
                let sent = work.send((slab, at)).is_ok();
                self.out += 1;
                if sent { Ok(()) } else { self.take_result() }
            }
            Worker::Caller(sink) => {
                let result = sink.write(&slab, at);
                if result.is_err() {
                    self.worker = Worker::Gone;
                }
                result
            }
            Worker::Gone => Err(after_an_error()),
        }
    }

    fn take_result(&mut self) -> io::Result<()> {
        let Worker::Thread { done, .. } = &self.worker else { return Err(after_an_error()) };
        let result = done.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that writes has panicked")));
        self.out -= 1;
        if result.is_err()
            && let Worker::Thread { thread, .. } = std::mem::replace(&mut self.worker, Worker::Gone)
        {
            // It ends after an error; the slabs that it had are free then. That it panicked is the error.
            let _ = thread.join();
        }
        result
    }
}

/// A file that lacks bytes in its middle is not finished, whatever was added behind them.
fn after_an_error() -> io::Error {
    io::Error::other("writing went on after an error")
}

/// Has a thread of its own write slabs; where none can be had, the caller writes them, through the page cache.
fn start(mut sink: Sink, spare: Sink) -> Worker {
    let (work, slabs) = sync_channel::<(Slab, u64)>(WRITE_SLABS);
    // As much room as slabs: the thread never waits to tell.
    let (results, done) = sync_channel(WRITE_SLABS);
    let run = move || {
        for (slab, at) in slabs {
            let result = sink.write(&slab, at);
            // Back to its pool before anybody waits for it.
            drop(slab);
            let failed = result.is_err();
            if results.send(result).is_err() || failed {
                return;
            }
        }
    };
    match std::thread::Builder::new().name("writer".into()).spawn(run) {
        Ok(thread) => Worker::Thread { work, done, thread },
        Err(_) => Worker::Caller(spare),
    }
}

/// Where slabs go.
struct Sink {
    /// Around the page cache.
    direct: Option<File>,
    plain: File,
    /// Bytes that the page cache took since it was made to write.
    unsynced: u64,
}

impl Sink {
    fn write(&mut self, slab: &Slab, at: u64) -> io::Result<()> {
        if let Some(direct) = &self.direct {
            match direct.write_all_at(slab.bytes(), at) {
                Err(error) if refuses_direct(Errno::of(&error)) => self.direct = None,
                other => return other,
            }
        }
        self.plain.write_all_at(slab.bytes(), at)?;
        self.unsynced += slab.bytes().len() as u64;
        if self.unsynced >= WRITEBACK_BYTES {
            self.plain.sync_data()?;
            let begin = at + slab.bytes().len() as u64 - self.unsynced;
            drop_cached(self.plain.as_raw_fd(), begin, self.unsynced);
            self.unsynced = 0;
        }
        Ok(())
    }
}

/// A descriptor that really writes around the page cache; none where there is no such thing.
fn open_directly(path: &Path) -> io::Result<Option<File>> {
    match OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => Ok(really_direct(&file, WRITE_SLAB_BYTES).then_some(file)),
        Err(error) if refuses_direct(Errno::of(&error)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 4096 * 7) as u8).collect()
    }

    /// Writes `bytes` in pieces of `piece` to a file in `dir`.
    fn written(dir: &Path, bytes: &[u8], piece: usize, head: &[u8]) -> Vec<u8> {
        let path = dir.join("file");
        let pool = write_pool().unwrap();
        let mut writer = FileWriter::create(&path, &pool).unwrap();
        for piece in bytes.chunks(piece) {
            writer.write(piece).unwrap();
        }
        assert_eq!(writer.position(), bytes.len() as u64);
        writer.finish(head).unwrap();
        assert_eq!(pool.free(), WRITE_SLABS);
        std::fs::read(path).unwrap()
    }

    #[test]
    fn what_was_added_is_in_the_file_whatever_its_length_and_the_file_system() {
        let memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let disk = tempfile::tempdir().unwrap();
        let slab = WRITE_SLAB_BYTES;
        for dir in [memory.path(), disk.path()] {
            for len in [0, 1, 4095, slab - 1, slab, slab + 1, (WRITE_SLABS + 2) * slab + 4096 + 77] {
                let mut expected = bytes(len);
                assert!(written(dir, &expected, 1_000_003, b"") == expected, "{len}");
                let head = vec![9; len.min(5000)];
                expected[..head.len()].copy_from_slice(&head);
                assert!(written(dir, &bytes(len), 3 * slab, &head) == expected, "{len}");
            }
        }
    }

    #[test]
    fn a_file_that_was_longer_is_cut() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), bytes(3 * WRITE_SLAB_BYTES)).unwrap();
        assert!(written(dir.path(), &bytes(5000), 5000, b"") == bytes(5000));
    }

    #[test]
    fn a_full_device_is_an_error_at_the_latest_when_the_file_ends() {
        let pool = write_pool().unwrap();
        let mut writer = FileWriter::create(Path::new("/dev/full"), &pool).unwrap();
        let result = writer.write(&bytes(8 * WRITE_SLAB_BYTES)).and_then(|()| writer.finish(b""));
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(pool.free(), WRITE_SLABS);
    }

    #[test]
    fn what_follows_an_error_is_an_error_and_never_waits() {
        let pool = write_pool().unwrap();
        for slabs in [1, 2, WRITE_SLABS, 4 * WRITE_SLABS] {
            let mut writer = FileWriter::create(Path::new("/dev/full"), &pool).unwrap();
            let failed = (0..100).any(|_| writer.write(&bytes(slabs * WRITE_SLAB_BYTES)).is_err());
            assert!(failed, "{slabs}");
            assert!(writer.write(&bytes(2 * WRITE_SLABS * WRITE_SLAB_BYTES)).is_err(), "{slabs}");
            assert!(writer.finish(b"head").is_err(), "{slabs}");
            assert_eq!(pool.free(), WRITE_SLABS);
        }
    }
}
