//! Runs Mixture-of-Experts models far bigger than memory by streaming their experts from NVMe.

pub mod checkpoint;
pub mod cli;
pub mod engine;
pub mod forward;
pub mod grammar;
pub mod kernels;
pub mod limits;
pub mod manual;
pub mod meter;
pub mod model;
pub mod ops;
pub mod size;
pub mod store;
