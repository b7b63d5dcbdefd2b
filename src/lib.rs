//! placeholder

/// Arithmetic on quantized weights: one table of functions per instruction set, all giving the same bits.
pub mod kernels;
