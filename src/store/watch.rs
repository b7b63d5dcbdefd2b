//! Waiting for a drive under the eyes of somebody who may be told, and may give up.

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millstream_io::{FileId, FileSet, Wait};

use super::{Content, ExpertKey, ExpertStore, StoreError};
use crate::limits::{HUNG_AFTER, WAIT_STEP};

/// A read that a drive does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    /// Of the experts that are waited for the first in the order of the files.
    pub key: ExpertKey,
    /// The file it is read from: the copy on the first drive that owes an answer, where several drives share the reads.
    pub file: PathBuf,
    /// Where in the file it begins.
    pub offset: u64,
    /// Bytes to be read from there.
    pub bytes: u64,
    /// Reads that are waited for, this one included.
    pub reads: usize,
    /// For how long no read has finished, at least.
    pub waited: Duration,
}

/// What whoever watches a store is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A read is waited for, and nothing is wrong. Comes several times a second, so that the watcher can give up soon.
    Waiting,
    /// Nothing has been answered for long. Comes after [`HUNG_AFTER`], then each time the wait has doubled.
    Hung(Hung),
    /// After [`Notice::Hung`]: a read has finished, well or not.
    Answered {
        /// How long that took, at least.
        waited: Duration,
    },
}

/// Is told of waits that last, and breaks one it will wait for no longer. A read that is given up stays the device's,
/// its slab with it.
pub type Watch = Box<dyn FnMut(Notice) -> ControlFlow<()> + Send>;

impl fmt::Display for Hung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hung { key, file, offset, bytes, reads, waited } = self;
        write!(
            f,
            "the drive has not answered for {} s: expert {} of layer {}, {bytes} bytes at {offset} of {}",
            waited.as_secs(),
            key.expert,
            key.layer,
            file.display()
        )?;
        match reads.saturating_sub(1) {
            0 => Ok(()),
            others => write!(f, ", and {others} more"),
        }
    }
}

impl ExpertStore {
    /// From now on tells `watch` of waits that last; `files` are those the device reads. Unwatched, the store waits in
    /// silence for as long as the device takes.
    pub fn set_watch(&mut self, watch: Watch, files: Arc<FileSet>) {
        self.watch = Some((watch, files));
    }

    /// Whether the last request was given up: reads of it may still be under way, and the device waits for them when
    /// it is dropped.
    pub fn gave_up(&self) -> bool {
        self.given_up
    }

    /// Takes in one completion, however long it takes. Whoever watches is told when that is long, and may give up.
    pub(super) fn wait(&mut self) -> Result<(), StoreError> {
        if self.watch.is_none() {
            return self.reap(Wait::Block).map(|_| ());
        }
        let mut vigil = Vigil::new();
        loop {
            let done = self.reap(Wait::AtMost(WAIT_STEP));
            if !matches!(done, Ok(false)) {
                if vigil.reported() {
                    // There is nothing left to break.
                    let _ = self.tell(Notice::Answered { waited: vigil.waited });
                }
                return done.map(|_| ());
            }
            let told = if vigil.lasts(vigil.waited + WAIT_STEP) { self.hung(vigil.waited) } else { Notice::Waiting };
            if self.tell(told).is_break() {
                self.given_up = true;
                return Err(StoreError::GivenUp);
            }
        }
    }

    /// Waits for the reads of a request that nobody wants any more, unless that was given up.
    pub(super) fn settle(&mut self) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        while self.awaited > 0 && outcome.is_ok() {
            match self.wait() {
                Err(StoreError::GivenUp) => outcome = Err(StoreError::GivenUp),
                Err(StoreError::Device(e)) => {
                    self.awaited = 0;
                    outcome = Err(StoreError::Device(e));
                }
                // What failed is of no interest any more.
                Ok(())
                | Err(
                    StoreError::Read { .. } | StoreError::Damaged(_) | StoreError::Unfit(_) | StoreError::Spoilt(_),
                ) => self.let_go_of_ready(),
            }
        }
        // A read that a dying device gave back would be missing again.
        self.missing.clear();
        outcome
    }

    fn tell(&mut self, what: Notice) -> ControlFlow<()> {
        match &mut self.watch {
            Some((watch, _)) => watch(what),
            None => ControlFlow::Continue(()),
        }
    }

    /// The copy of `file` on the first drive that has not answered everything.
    fn owing_copy<'a>(&self, files: &'a FileSet, file: FileId) -> &'a Path {
        let drives = self.device.drives();
        let owing = (0..files.drives()).filter(|drive| drives.get(*drive).is_some_and(|drive| drive.owed > 0));
        owing.filter_map(|drive| files.copy_path(file, drive)).next().unwrap_or(files.path(file))
    }

    /// Describes what is waited for.
    fn hung(&self, waited: Duration) -> Notice {
        // Guesses are waited for only when nothing else is.
        let keys = self.slots.iter().filter_map(|slot| match slot {
            Content::InFlight { key, wanted, .. } if *wanted || self.awaited == 0 => Some(*key),
            _ => None,
        });
        let first = keys.min_by_key(|&key| self.table.file_order(key));
        let segment = first.and_then(|key| Some((key, *self.table.segments(key).first()?)));
        match (segment, &self.watch) {
            (Some((key, segment)), Some((_, files))) => Notice::Hung(Hung {
                key,
                file: self.owing_copy(files, segment.file).to_owned(),
                offset: segment.offset,
                bytes: segment.len.into(),
                reads: self.awaited.max(1),
                waited,
            }),
            _ => Notice::Waiting,
        }
    }
}

/// One wait, and when there is something to say about it: after [`HUNG_AFTER`], then each time it has doubled. The store
/// counts the time that the device let pass without an answer, and asks no clock.
#[derive(Debug)]
pub struct Vigil {
    waited: Duration,
    /// When there is something to say again.
    due: Duration,
}

impl Vigil {
    /// A wait that begins.
    pub fn new() -> Vigil {
        Vigil { waited: Duration::ZERO, due: HUNG_AFTER }
    }

    /// It lasts for `waited` by now; whether there is something to say.
    pub fn lasts(&mut self, waited: Duration) -> bool {
        self.waited = waited;
        let due = self.waited >= self.due;
        if due {
            self.due = 2 * self.waited;
        }
        due
    }

    /// Whether something was said.
    pub fn reported(&self) -> bool {
        self.due > HUNG_AFTER
    }

    /// How long it had lasted when it was last looked at.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Default for Vigil {
    fn default() -> Vigil {
        Vigil::new()
    }
}
