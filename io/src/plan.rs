//! Which aligned file ranges hold a set of byte spans, and where each span lands inside one slab. Pure.

use std::ops::Deref;

use crate::error::IoError;
use crate::file::{FileId, FileSet};
use crate::limits::{GAP_BYTES_MAX, MAX_SEGMENTS, SLAB_BYTES_MAX};
use crate::sector::{Cover, cover};

/// Bytes of one file, at any alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSpan {
    /// Which file.
    pub file: FileId,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// An aligned file range and its place in the slab: file bytes `offset..offset + len` land at `slab[at..at + len]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Which file.
    pub file: FileId,
    /// First byte in the file, aligned.
    pub offset: u64,
    /// Bytes asked of the kernel, aligned.
    pub len: u32,
    /// First byte in the slab, aligned.
    pub at: u32,
    /// Bytes that must arrive, at most `len`; the end of the file may cut the rest.
    pub want: u32,
}

/// Up to [`MAX_SEGMENTS`] segments, held inline so that a read can be copied without allocating.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    items: [Segment; MAX_SEGMENTS],
    count: u8,
}

impl Segments {
    /// Copies the segments; `None` where there are more than [`MAX_SEGMENTS`].
    pub fn from_slice(segments: &[Segment]) -> Option<Segments> {
        let mut items = [Segment::default(); MAX_SEGMENTS];
        items.get_mut(..segments.len())?.copy_from_slice(segments);
        Some(Segments {
            items,
            count: segments.len() as u8,
        })
    }

    /// Bytes asked of the kernel, all segments together.
    pub fn len_bytes(&self) -> u64 {
        self.iter().map(|segment| u64::from(segment.len)).sum()
    }
}

impl Deref for Segments {
    type Target = [Segment];

    fn deref(&self) -> &[Segment] {
        &self.items[..usize::from(self.count)]
    }
}

/// Where a span lies inside the slab: `slab[at..at + len]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// First byte.
    pub at: u32,
    /// Bytes.
    pub len: u32,
}

/// How a set of spans is read into one slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabLayout {
    /// What to read.
    pub segments: Segments,
    /// Place of each span, in the order the spans were given.
    pub places: Vec<Place>,
    /// Bytes the slab needs: all segments, a multiple of the alignment.
    pub slab_bytes: u32,
    /// Bytes of the spans themselves.
    pub useful_bytes: u32,
}

/// Plans one read for `spans`. Aligned ranges that touch or overlap are joined, and so are those of one file with at
/// most [`GAP_BYTES_MAX`] between them.
///
/// # Errors
/// [`IoError::OutOfFile`] for a span past the end of its file; [`IoError::BadRequest`] for no span, an empty span, an
/// unknown file, more than [`MAX_SEGMENTS`] ranges, or more than [`SLAB_BYTES_MAX`] bytes.
pub fn layout(spans: &[FileSpan], files: &FileSet) -> Result<SlabLayout, IoError> {
    for span in spans {
        let file_bytes = files.checked_len(span.file)?;
        if span
            .offset
            .checked_add(span.len)
            .is_none_or(|end| end > file_bytes)
        {
            let path = files.shared_path(span.file);
            return Err(IoError::OutOfFile {
                path,
                offset: span.offset,
                len: span.len,
                file_bytes,
            });
        }
    }
    layout_aligned(spans, u64::from(files.align()))
}

/// [`layout`] once the spans are known to lie inside their files. `align` is a power of two.
fn layout_aligned(spans: &[FileSpan], align: u64) -> Result<SlabLayout, IoError> {
    let bad = |what: String| IoError::BadRequest { what };
    if spans.is_empty() {
        return Err(bad("no bytes asked for".to_owned()));
    }
    let mut covers: Vec<(FileId, Cover, usize)> = Vec::with_capacity(spans.len());
    for (index, span) in spans.iter().enumerate() {
        if span.len == 0 {
            return Err(bad(format!("span {index} is empty")));
        }
        let whole = cover(span.offset, span.len, align).ok_or_else(|| {
            bad(format!(
                "{} bytes at {} pass the largest offset",
                span.len, span.offset
            ))
        })?;
        covers.push((span.file, whole, index));
    }
    covers.sort_by_key(|(file, whole, index)| (*file, whole.offset, *index));

    let mut ranges: Vec<(FileId, Cover)> = Vec::new();
    for (file, whole, _) in &covers {
        match ranges.last_mut() {
            Some((last_file, last))
                if last_file == file && whole.offset <= last.end() + GAP_BYTES_MAX =>
            {
                last.len = last.end().max(whole.end()) - last.offset;
            }
            _ => ranges.push((*file, *whole)),
        }
    }
    let total: u64 = ranges.iter().map(|(_, range)| range.len).sum();
    if ranges.len() > MAX_SEGMENTS {
        return Err(bad(format!(
            "{} separate file ranges, at most {MAX_SEGMENTS} fit one read",
            ranges.len()
        )));
    }
    if total > SLAB_BYTES_MAX as u64 {
        return Err(bad(format!(
            "{total} bytes in one read, at most {SLAB_BYTES_MAX}"
        )));
    }

    let mut at = 0u64;
    let mut segments: Vec<Segment> = Vec::with_capacity(ranges.len());
    for (file, range) in &ranges {
        segments.push(Segment {
            file: *file,
            offset: range.offset,
            len: range.len as u32,
            at: at as u32,
            want: 0,
        });
        at += range.len;
    }
    let mut places = Vec::with_capacity(spans.len());
    for (index, span) in spans.iter().enumerate() {
        let home = segments.iter_mut().find(|segment| {
            segment.file == span.file
                && segment.offset <= span.offset
                && span.offset + span.len <= segment.offset + u64::from(segment.len)
        });
        let home = home.ok_or_else(|| bad(format!("span {index} has no range")))?;
        let inside = (span.offset - home.offset) as u32;
        home.want = home.want.max(inside + span.len as u32);
        places.push(Place {
            at: home.at + inside,
            len: span.len as u32,
        });
    }
    let useful: u64 = spans.iter().map(|span| span.len).sum();
    let useful_bytes = u32::try_from(useful).map_err(|_| {
        bad(format!(
            "{useful} bytes in one read, at most {SLAB_BYTES_MAX}"
        ))
    })?;
    let segments =
        Segments::from_slice(&segments).ok_or_else(|| bad("too many ranges".to_owned()))?;
    Ok(SlabLayout {
        segments,
        places,
        slab_bytes: total as u32,
        useful_bytes,
    })
}
