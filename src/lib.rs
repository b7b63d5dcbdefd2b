//! Runs Mixture-of-Experts models far bigger than memory by streaming their experts from NVMe.

pub mod checkpoint;
pub mod engine;
pub mod kernels;
pub mod model;
