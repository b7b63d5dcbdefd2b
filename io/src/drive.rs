//! Drives that hold copies of the same files: which has which, what is known of each copy, and sets of drives.

use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::limits::DRIVES_MAX;

/// A copy, whole or partial, of the files of a set in another directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mirror {
    /// The directory, for messages.
    pub dir: PathBuf,
    /// The copy of each file of the set, in the same order; `None` where there is none.
    pub copies: Vec<Option<PathBuf>>,
    /// Device and inode of each copy that was looked at before: another file under its path is then refused. May be
    /// shorter than `copies`.
    pub seen: Vec<Option<(u64, u64)>>,
}

/// What one drive did for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveStats {
    /// Bytes that came from it.
    pub bytes: u64,
    /// Time during which at least one request was with it.
    pub busy_ns: u64,
    /// Requests that it failed, after the retries they deserve.
    pub errors: u64,
    /// Requests that it has not answered yet.
    pub owed: usize,
}

impl DriveStats {
    /// What was counted since `before`.
    pub fn since(&self, before: &DriveStats) -> DriveStats {
        DriveStats {
            bytes: self.bytes - before.bytes,
            busy_ns: self.busy_ns - before.busy_ns,
            errors: self.errors - before.errors,
            owed: self.owed,
        }
    }
}

/// A directory that holds the files, or copies of them.
pub(crate) struct Drive {
    pub dir: PathBuf,
    /// Done when a failure of this drive has been told.
    pub told_failed: Once,
    /// Done when wrong bytes of this drive have been told.
    pub told_wrong: Once,
}

impl Drive {
    pub fn new(dir: PathBuf) -> Drive {
        Drive { dir, told_failed: Once::new(), told_wrong: Once::new() }
    }
}

/// Which drive holds a copy of which file, and which copy to read. A copy is good, has failed, or has given wrong bytes,
/// and only ever gets worse.
///
/// Good copies are read first, then those that failed, as what failed once may pass. A mirror that was wrong somewhere is
/// never read again, as nobody knows where else it is wrong. The file itself may be wrong and still be all there is: it
/// comes last.
pub(crate) struct Copies {
    drives: usize,
    /// Of the first file on every drive, then of the second.
    table: Vec<Option<Copy>>,
}

struct Copy {
    /// Its position where the copies follow the files in one list.
    place: usize,
    failed: AtomicBool,
    wrong: AtomicBool,
}

impl Copies {
    /// Only the files themselves, on the first of so many drives.
    pub fn new(files: usize, drives: usize) -> Copies {
        let table = (0..files * drives).map(|_| None).collect();
        let mut copies = Copies { drives, table };
        (0..files).for_each(|file| copies.put(file, 0, file));
        copies
    }

    /// The copy of `file` on `drive` is the one at `place`.
    pub fn put(&mut self, file: usize, drive: usize, place: usize) {
        let (failed, wrong) = (AtomicBool::new(false), AtomicBool::new(false));
        self.table[file * self.drives + drive] = Some(Copy { place, failed, wrong });
    }

    /// Place of the copy of `file` on `drive`.
    pub fn on(&self, file: usize, drive: usize) -> Option<usize> {
        Some(self.of(file)[drive].as_ref()?.place)
    }

    /// A read of the copy of `file` on `drive` failed.
    pub fn failed(&self, file: usize, drive: usize) {
        if let Some(copy) = &self.of(file)[drive] {
            copy.failed.store(true, Ordering::Relaxed);
        }
    }

    /// The copy of `file` on `drive` gave wrong bytes: on a mirror every other copy counts as wrong too.
    pub fn wrong(&self, file: usize, drive: usize) {
        let whole = self.table.iter().skip(drive).step_by(self.drives).filter(|_| drive > 0);
        for copy in whole.chain([&self.of(file)[drive]]).flatten() {
            copy.wrong.store(true, Ordering::Relaxed);
        }
    }

    /// The drives to read `file` from, of those not `tried`: all that are good; else one that failed, the file itself
    /// before its mirrors; else the file itself, wrong as it is. None is left only where something was tried.
    pub fn sources(&self, file: usize, tried: DriveSet) -> DriveSet {
        let known = |copy: &Copy| (copy.failed.load(Ordering::Relaxed), copy.wrong.load(Ordering::Relaxed));
        let (mut good, mut failed) = (DriveSet::default(), DriveSet::default());
        for (drive, copy) in (0..).zip(self.of(file)).filter(|(drive, _)| !tried.contains(*drive)) {
            match copy.as_ref().map(known) {
                Some((false, false)) => good = good.with(drive),
                Some((true, false)) => failed = failed.with(drive),
                Some((_, true)) | None => {}
            }
        }
        match failed.first() {
            _ if good.len() > 0 => good,
            Some(drive) => DriveSet::default().with(drive),
            None => DriveSet::FIRST.without(tried),
        }
    }

    fn of(&self, file: usize) -> &[Option<Copy>] {
        &self.table[file * self.drives..][..self.drives]
    }
}

/// Some of the drives, by number. Number 0 is where the files themselves are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DriveSet(u8);

const _: () = assert!(DRIVES_MAX <= u8::BITS as usize);

impl DriveSet {
    /// Only the first drive.
    pub const FIRST: DriveSet = DriveSet(1);

    pub fn contains(self, drive: usize) -> bool {
        self.0 >> drive & 1 == 1
    }

    #[must_use]
    pub fn with(self, drive: usize) -> DriveSet {
        DriveSet(self.0 | 1 << drive)
    }

    #[must_use]
    pub fn without(self, other: DriveSet) -> DriveSet {
        DriveSet(self.0 & !other.0)
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The lowest number.
    pub fn first(self) -> Option<usize> {
        self.iter().next()
    }

    /// Upwards.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..DRIVES_MAX).filter(move |drive| self.contains(*drive))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FILE: usize = 1;

    fn set(drives: &[usize]) -> DriveSet {
        drives.iter().fold(DriveSet::default(), |set, drive| set.with(*drive))
    }

    /// Three files on three drives; the third drive lacks the first file.
    fn copies() -> Copies {
        let mut copies = Copies::new(3, 3);
        let there = [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2)];
        for (id, (file, drive)) in (3..).zip(there) {
            copies.put(file, drive, id);
        }
        copies
    }

    #[test]
    fn good_copies_come_before_failed_ones_and_a_wrong_mirror_never() {
        let (all, none) = (set(&[0, 1, 2]), set(&[]));
        let copies = copies();
        assert_eq!((copies.on(FILE, 0), copies.on(FILE, 2), copies.on(0, 2)), (Some(FILE), Some(6), None));
        assert_eq!(copies.sources(FILE, none), all);
        assert_eq!(copies.sources(0, none), set(&[0, 1]));
        // A mirror that was wrong with another file is wrong with this one too, and no way to save a read.
        copies.wrong(0, 1);
        assert_eq!(copies.sources(FILE, none), set(&[0, 2]));
        assert_eq!(copies.sources(FILE, set(&[0])), set(&[2]));
        assert_eq!(copies.sources(0, set(&[0])), none);
        copies.failed(FILE, 0);
        assert_eq!(copies.sources(FILE, none), set(&[2]));
        assert_eq!(copies.sources(FILE, set(&[2])), set(&[0]), "what failed may pass");
        assert_eq!(copies.sources(2, none), set(&[0, 2]), "a failure is of one copy");
    }

    #[test]
    fn the_models_own_wrong_copy_comes_after_the_mirrors_that_failed() {
        let copies = copies();
        copies.wrong(FILE, 0);
        assert_eq!(copies.sources(FILE, set(&[])), set(&[1, 2]));
        assert_eq!(copies.sources(FILE, set(&[1])), set(&[2]));
        copies.failed(FILE, 1);
        copies.failed(FILE, 2);
        assert_eq!(copies.sources(FILE, set(&[])), set(&[1]));
        assert_eq!(copies.sources(FILE, set(&[1, 2])), set(&[0]));
        assert_eq!(copies.sources(0, set(&[])), set(&[0, 1]), "the model's other files are not wrong with it");
    }

    proptest! {
        /// Against the rule as one sentence: whoever is chosen is of the best class that is left.
        #[test]
        fn whoever_is_left_out_is_worse(
            there in proptest::collection::vec(any::<bool>(), 7),
            states in proptest::collection::vec(0u8..3, 8),
            tried in any::<u8>(),
        ) {
            let mut copies = Copies::new(1, 8);
            (1..8).filter(|drive| there[*drive - 1]).for_each(|drive| copies.put(0, drive, drive));
            for (drive, state) in states.iter().enumerate() {
                match state {
                    1 => copies.failed(0, drive),
                    2 => copies.wrong(0, drive),
                    _ => {}
                }
            }
            // 0 good, 1 failed, 2 the file itself and wrong, 3 never to be read.
            let class = |drive: usize| match (drive, states[drive]) {
                _ if tried >> drive & 1 == 1 || (drive > 0 && !there[drive - 1]) => 3,
                (0, 2) => 2,
                (_, 2) => 3,
                (_, state) => state,
            };
            let chosen = copies.sources(0, DriveSet(tried));
            let best = (0..8).map(class).min().unwrap_or(3);
            prop_assert!(chosen.iter().all(|drive| class(drive) == best && best < 3));
            let expected = match best {
                0 => (0..8).filter(|drive| class(*drive) == 0).count(),
                1 | 2 => 1,
                _ => 0,
            };
            prop_assert_eq!(chosen.len(), expected);
        }
    }
}
