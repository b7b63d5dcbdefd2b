//! Slabs read from files: offsets, alignment, one pre-faulted arena and a submission/completion device.
//!
//! The crate knows files, byte ranges and memory; what the bytes mean is the caller's business. A read goes
//! [`FileSpan`]s -> [`layout`] -> [`Read`] + [`Slab`] -> [`Device::submit`] -> [`Device::reap`]. The slab belongs to
//! the device from `submit` to its [`Completion`], whatever happens in between; short reads, `EINTR` and `EAGAIN`
//! stop inside the device, so above it a read is whole or an error naming file, offset and length.

mod access;
mod arena;
pub mod device;
pub mod error;
pub mod file;
pub mod limits;
pub mod plan;
pub mod pool;
pub mod sector;
pub mod space;

pub use access::{Access, IoMode};
pub use arena::{Arena, ArenaReport, PageKind};
pub use device::sim::{SimConfig, SimFault, sim_device};
pub use device::{
    Completion, DEPTH_AUTO, Device, DeviceConfig, DeviceKind, DeviceReport, DeviceStats, Priority, Read, RejectReason,
    Rejected, Wait, open_device,
};
pub use error::{Errno, IoError, ReadRange};
pub use file::{FileId, FileSet};
pub use limits::MAX_SEGMENTS;
pub use plan::{FileSpan, Place, Segment, Segments, SlabLayout, layout};
pub use pool::{Slab, SlabPool};
pub use space::free_bytes;
