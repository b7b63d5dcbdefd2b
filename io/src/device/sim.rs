//! The seeded simulator: real bytes, distorted results.

use std::time::Duration;

/// A result the simulator puts in place of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimFault {
    /// Only this many bytes, at most what was asked for.
    Short(u32),
    /// No byte, no error.
    Zero,
    /// A negative result.
    Errno(i32),
    /// The right result, this much later on the simulated clock.
    Stall(Duration),
}
