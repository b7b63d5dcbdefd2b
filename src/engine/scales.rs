//! Whether scales of experts that lie apart from their weights are kept in memory.

use super::budget::{Budget, shown};
use super::{EngineConfig, EngineError, Switch};
use crate::store::{ExpertTable, TableError};

/// Left open, scales are kept where they take one part in so many of what the experts get, or less. A read more costs an
/// expert about a hundredth of its time on a drive that reads many at once; so much less room costs hits about as much.
const KEPT_ONE_IN: u64 = 16;

/// The table that `build` makes with or without scales kept, and the division of memory by `divide` that goes with it.
pub(super) fn choose(
    config: &EngineConfig,
    build: impl Fn(bool) -> Result<ExpertTable, TableError>,
    divide: impl Fn(&ExpertTable) -> Result<Budget, EngineError>,
) -> Result<(ExpertTable, Budget), EngineError> {
    let read = build(false)?;
    if config.keep_scales == Switch::Off || !read.is_scattered() {
        let budget = divide(&read)?;
        return Ok((read, budget));
    }
    let kept = build(true)?;
    let bytes = kept.kept_scales().bytes as u64;
    if config.keep_scales == Switch::On {
        let budget = divide(&kept)?;
        return Ok((kept, budget));
    }
    let budget = divide(&read)?;
    if bytes == 0 || bytes * KEPT_ONE_IN > budget.experts() {
        return Ok((read, budget));
    }
    // What rounds to slabs may not go up: then the scales are read as well.
    match divide(&kept) {
        Ok(with_scales) => Ok((kept, with_scales)),
        Err(_) => Ok((read, budget)),
    }
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
