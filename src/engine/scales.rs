//! Whether scales of experts that lie apart from their weights are kept in memory.

use millstream_io::FileSpan;

use super::budget::{Budget, shown};
use super::{EngineConfig, EngineError, Switch};
use crate::model::load::{Content, Piece};
use crate::store::{ExpertTable, KeptScales, TableError};

/// Left open, scales are kept where they take one part in so many of what the experts get, or less. A read more costs an
/// expert about a hundredth of its time on a drive that reads many at once; so much less room costs hits about as much.
const KEPT_ONE_IN: u64 = 16;

/// The table that `build` makes with or without scales kept, and the division of memory by `divide` that goes with it.
pub(super) fn choose(
    config: &EngineConfig,
    build: impl Fn(bool) -> Result<ExpertTable, TableError>,
    divide: impl Fn(&ExpertTable) -> Result<Budget, EngineError>,
) -> Result<(ExpertTable, Budget), EngineError> {
    let mut least_kept = None;
    if config.keep_scales != Switch::Off {
        let kept = build(true)?;
        let bytes = kept.kept_scales().bytes as u64;
        match divide(&kept) {
            Ok(budget) if bytes == 0 || config.keep_scales == Switch::On || pays(bytes, budget.experts()) => {
                return Ok((kept, budget));
            }
            Err(error) if bytes == 0 || config.keep_scales == Switch::On => return Err(error),
            // Where there is no room for them, there may be without.
            Ok(_) => {}
            // More parts an expert need a larger table: where neither fits it may be the one with scales that needs less.
            Err(EngineError::TooSmall(error)) if pays(bytes, error.least.experts()) => least_kept = Some(error),
            Err(_) => {}
        }
    }
    let read = build(false)?;
    match (divide(&read), least_kept) {
        (Ok(budget), _) => Ok((read, budget)),
        (Err(EngineError::TooSmall(read)), Some(kept)) if kept.needed() < read.needed() => {
            Err(EngineError::TooSmall(kept))
        }
        (Err(error), _) => Err(error),
    }
}

/// Whether keeping scales of so many bytes is worth the room, where experts get `experts` bytes beside them.
fn pays(bytes: u64, experts: u64) -> bool {
    bytes * KEPT_ONE_IN <= experts + bytes
}

/// Where scales that are kept are read from, and where they go.
pub(super) fn pieces(kept: &KeptScales) -> Vec<Piece> {
    let piece = |&(span, at): &(FileSpan, usize)| Piece {
        tensor: "scales of experts".to_owned(),
        at,
        content: Content::Stored(span),
    };
    kept.pieces.iter().map(piece).collect()
}

/// What is worth saying about where scales lie.
pub(super) fn note(table: &ExpertTable) -> Option<String> {
    match table.kept_scales().bytes as u64 {
        0 if table.is_scattered() => {
            Some("an expert's weights and scales lie apart: it takes two reads or more".to_owned())
        }
        0 => None,
        bytes => {
            Some(format!("scales of experts lie apart from their weights and are kept in memory: {}", shown(bytes)))
        }
    }
}
