//! Arithmetic on weights.

pub mod format;
pub use format::*;
