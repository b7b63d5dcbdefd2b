//! Slabs read from files: offsets, alignment, one pre-faulted arena and a submission/completion device.
//!
//! The crate knows files, byte ranges and memory; what the bytes mean is the caller's business. A read goes
//! [`FileSpan`]s -> [`layout`] -> [`Read`] + [`Slab`] -> [`Device::submit`] -> [`Device::reap`]. The slab belongs to
//! the device from `submit` to its [`Completion`], whatever happens in between; short reads, `EINTR` and `EAGAIN`
//! stop inside the device, so above it a read is whole or an error naming file, offset and length.
//!
//! ```
//! use std::sync::Arc;
//! use millstream_io::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = tempfile::NamedTempFile::new()?;
//! # std::fs::write(file.path(), vec![7u8; 100_000])?;
//! let files = Arc::new(FileSet::open(&[file.path().to_owned()], IoMode::Auto)?);
//! let plan = layout(&[FileSpan { file: FileId(0), offset: 12_345, len: 50_000 }], &files)?;
//! let pool = SlabPool::new(plan.slab_bytes as usize, 4)?;
//! let mut device = open_device(&DeviceConfig::default(), Arc::clone(&files), &pool)?;
//!
//! let slab = pool.take().ok_or("all slabs are out")?;
//! let read = Read { tag: 1, priority: Priority::Demand, segments: plan.segments };
//! device.submit(read, slab).map_err(|rejected| format!("{:?}", rejected.why))?;
//! let done = device.reap(Wait::Block)?.ok_or("nothing in flight")?;
//! done.result?;
//! let place = plan.places[0];
//! assert_eq!(done.slab.bytes()[place.at as usize..][..place.len as usize], [7; 50_000]);
//! # Ok(())
//! # }
//! ```

mod access;
mod arena;
pub mod block;
pub mod device;
mod drive;
pub mod error;
pub mod file;
mod heap;
pub mod limits;
pub mod measure;
mod numa;
pub mod plan;
pub mod pool;
pub mod sector;
pub mod space;
pub mod write;

pub use access::{Access, IoMode};
pub use arena::{Arena, ArenaReport, PageKind, Pages, populate};
pub use block::{BlockDevice, BlockQueue, DiskCounters};
pub use device::sim::{SimConfig, SimFault, sim_device};
pub use device::throttle::{ThrottleConfig, throttled};
pub use device::{
    CHUNK_WHOLE, Completion, DEPTH_AUTO, Device, DeviceConfig, DeviceKind, DeviceReport, DeviceStats, Priority, Read,
    RejectReason, Rejected, Wait, leave, open_device, settle,
};
pub use drive::{DriveStats, Mirror};
pub use error::{Errno, IoError, ReadRange};
pub use file::{FileId, FileSet};
pub use heap::{Heap, share_heap};
pub use limits::MAX_SEGMENTS;
pub use numa::{PagePolicy, hold_to, place_pages};
pub use plan::{FileSpan, Place, Segment, Segments, SlabLayout, layout};
pub use pool::{Slab, SlabPool};
pub use space::free_bytes;
pub use write::{FileWriter, write_pool};
