//! What whoever has a container written is told, and how he ends it.

use crate::kernels::Format;
use crate::size;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What is reported while a container is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// What whoever has this done should know: what of the source is left out, what is not as it was expected.
    Note(String),
    /// Once, before the first byte: what will be written.
    Plan {
        /// One line for each kind of weight and format.
        lines: Vec<PlanLine>,
        /// Shards in all.
        shards: usize,
        /// Bytes of all shards.
        bytes: u64,
        /// Of those, bytes that take space: all that are not in holes.
        stored: u64,
    },
    /// A shard is begun, or was found finished.
    Shard {
        /// Its file name.
        name: String,
        /// Its number, from 1.
        number: usize,
        /// Shards in all.
        of: usize,
        /// Whether an earlier run had finished it.
        kept: bool,
    },
    /// A megabyte or more, or the rest of a shard, has been stored, read back or compared.
    Bytes(Counts),
}

/// What will be written of one kind of weight in one format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanLine {
    /// `routed experts`, `MTP experts` or `dense weights`.
    pub kind: &'static str,
    /// How they are stored.
    pub format: Format,
    /// How many there are.
    pub tensors: usize,
    /// Their bytes, with those of their scales.
    pub bytes: u64,
}

impl fmt::Display for PlanLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanLine { kind, format, tensors, bytes } = self;
        write!(f, "{kind}: {tensors} tensors as {format}, {}", size::show(*bytes))
    }
}

/// How far the writing is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Stored of all shards so far, kept ones included.
    pub done: u64,
    /// Of all shards, to be stored.
    pub of: u64,
    /// Stored by this run.
    pub written: u64,
    /// Stored, read back, and made again to be compared, by this run: its work.
    pub worked: u64,
    /// What of its work is still to do.
    pub left: u64,
    /// Read by this run of what the weights are made from.
    pub taken: u64,
    /// Read back by this run and found as written.
    pub checked: u64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Note(line) => f.write_str(line),
            Progress::Plan { lines, shards, bytes, .. } => {
                lines.iter().try_for_each(|line| write!(f, "{line}; "))?;
                write!(f, "{} in {shards} shards", size::show(*bytes))
            }
            Progress::Shard { name, number, of, kept } => {
                write!(f, "shard {number} of {of}: {name}{}", if *kept { ", finished before" } else { "" })
            }
            Progress::Bytes(Counts { done, of, .. }) => write!(f, "{} of {}", size::show(*done), size::show(*of)),
        }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Shards written by this run.
    pub shards_written: usize,
    /// Shards an earlier run had finished.
    pub shards_kept: usize,
    /// Bytes written by this run.
    pub bytes_written: u64,
    /// Bytes of all shards.
    pub bytes_total: u64,
    /// Whether all that this run read back, what it wrote and what it proved, came around the page cache; `None` where
    /// there was nothing.
    pub read_back_directly: Option<bool>,
    /// Shards of the source that this run removed.
    pub source_shards_removed: usize,
    /// Their bytes.
    pub source_bytes_removed: u64,
    /// Names of those that stay because they hold more than was converted.
    pub source_shards_kept: Vec<String>,
    /// The plan's lines, proved against the headers on disk.
    pub lines: Vec<PlanLine>,
}

/// Ends the writing from outside: between two writes it looks whether the flag is up.
#[derive(Clone, Debug)]
pub struct Cancel(pub Arc<AtomicBool>);

impl PartialEq for Cancel {
    fn eq(&self, other: &Cancel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cancel {}
