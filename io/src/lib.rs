//! Files, offsets and slabs.

/// A file of a model: an index into the list of paths it was opened with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// A run of bytes in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileSpan {
    /// The file.
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

pub mod space;
pub use space::free_bytes;
