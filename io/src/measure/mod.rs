//! Measuring how slabs are best read here: which candidates ([`plan`]), one round of one candidate ([`Target::round`]),
//! what rounds say together ([`summary`]), and what stands between program and drive ([`host`], [`crate::block`]).
//!
//! A figure that memory served instead of the drive is worse than none. Before a round that goes through the page
//! cache the files' pages are dropped; how many stayed (`mincore`), and how many bytes the drive moved during the round
//! (`/proc/diskstats`), decide whether the round counts as cached.

pub mod host;
pub mod plan;
mod round;
pub mod scratch;
pub mod summary;
mod witness;

pub use plan::{Candidate, ChunkSize, Sweep, shuffled};
pub use round::{Outcome, Target};
pub use summary::{Recommendation, Round, Summary, is_cached, median, recommend, summarize};
pub use witness::Witness;
