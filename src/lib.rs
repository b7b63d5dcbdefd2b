//! placeholder
#![allow(missing_docs)]
pub mod engine;
pub mod model;
