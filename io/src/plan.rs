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
        Some(Segments { items, count: segments.len() as u8 })
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
        if span.offset.checked_add(span.len).is_none_or(|end| end > file_bytes) {
            let path = files.shared_path(span.file);
            return Err(IoError::OutOfFile { path, offset: span.offset, len: span.len, file_bytes });
        }
    }
    layout_aligned(spans, u64::from(files.align()))
}

/// [`layout`] once the spans are known to lie inside their files. `align` is a power of two.
fn layout_aligned(spans: &[FileSpan], align: u64) -> Result<SlabLayout, IoError> {
    let bad = |what: String| IoError::BadRequest { what };
    let ranges = joined_ranges(spans, align)?;
    let total: u64 = ranges.iter().map(|(_, range)| range.len).sum();
    if ranges.len() > MAX_SEGMENTS {
        return Err(bad(format!("{} separate file ranges, at most {MAX_SEGMENTS} fit one read", ranges.len())));
    }
    if total > SLAB_BYTES_MAX as u64 {
        return Err(bad(format!("{total} bytes in one read, at most {SLAB_BYTES_MAX}")));
    }

    let mut at = 0u64;
    let mut segments: Vec<Segment> = Vec::with_capacity(ranges.len());
    for (file, range) in &ranges {
        segments.push(Segment { file: *file, offset: range.offset, len: range.len as u32, at: at as u32, want: 0 });
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
        places.push(Place { at: home.at + inside, len: span.len as u32 });
    }
    let useful: u64 = spans.iter().map(|span| span.len).sum();
    let useful_bytes =
        u32::try_from(useful).map_err(|_| bad(format!("{useful} bytes in one read, at most {SLAB_BYTES_MAX}")))?;
    let segments = Segments::from_slice(&segments).ok_or_else(|| bad("too many ranges".to_owned()))?;
    Ok(SlabLayout { segments, places, slab_bytes: total as u32, useful_bytes })
}

/// The aligned ranges to read, in order of file and offset, joined where they touch, overlap or nearly do.
fn joined_ranges(spans: &[FileSpan], align: u64) -> Result<Vec<(FileId, Cover)>, IoError> {
    let bad = |what: String| IoError::BadRequest { what };
    if spans.is_empty() {
        return Err(bad("no bytes asked for".to_owned()));
    }
    let mut covers: Vec<(FileId, Cover, usize)> = Vec::with_capacity(spans.len());
    for (index, span) in spans.iter().enumerate() {
        if span.len == 0 {
            return Err(bad(format!("span {index} is empty")));
        }
        let whole = cover(span.offset, span.len, align)
            .ok_or_else(|| bad(format!("{} bytes at {} pass the largest offset", span.len, span.offset)))?;
        covers.push((span.file, whole, index));
    }
    covers.sort_by_key(|(file, whole, index)| (*file, whole.offset, *index));

    let mut ranges: Vec<(FileId, Cover)> = Vec::new();
    for (file, whole, _) in &covers {
        match ranges.last_mut() {
            Some((last_file, last)) if last_file == file && whole.offset <= last.end() + GAP_BYTES_MAX => {
                last.len = last.end().max(whole.end()) - last.offset;
            }
            _ => ranges.push((*file, *whole)),
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::IoMode;
    use proptest::prelude::*;

    const ALIGN: u64 = 4096;

    fn spans() -> impl Strategy<Value = Vec<FileSpan>> {
        let span = (0u32..3, 0u64..400_000, 1u64..60_000);
        let span = span.prop_map(|(file, offset, len)| FileSpan { file: FileId(file), offset, len });
        proptest::collection::vec(span, 1..7)
    }

    /// What ends up where, byte by byte of the slab, as reading the segments would have it.
    fn contents(plan: &SlabLayout) -> Vec<Option<(FileId, u64)>> {
        let mut slab = vec![None; plan.slab_bytes as usize];
        for segment in plan.segments.iter() {
            for i in 0..segment.len {
                let byte = &mut slab[(segment.at + i) as usize];
                assert_eq!(*byte, None, "two segments share a byte of the slab");
                *byte = Some((segment.file, segment.offset + u64::from(i)));
            }
        }
        slab
    }

    /// Blocks that must be read: those touched, and the gaps of one file that are short enough to read through.
    fn naive_blocks(spans: &[FileSpan]) -> Vec<(FileId, u64)> {
        let touched = |file: FileId, block: u64| {
            let (from, to) = (block * ALIGN, (block + 1) * ALIGN);
            spans.iter().any(|span| span.file == file && span.offset < to && span.offset + span.len > from)
        };
        let mut blocks = Vec::new();
        for file in (0..3).map(FileId) {
            let used: Vec<u64> = (0..120).filter(|block| touched(file, *block)).collect();
            for (i, block) in used.iter().enumerate() {
                blocks.push((file, *block));
                if let Some(next) = used.get(i + 1)
                    && (next - block - 1) * ALIGN <= GAP_BYTES_MAX
                {
                    blocks.extend((block + 1..*next).map(|between| (file, between)));
                }
            }
        }
        blocks
    }

    proptest! {
        #[test]
        fn every_span_is_where_its_place_says_and_nothing_needless_is_read(spans in spans()) {
            let plan = layout_aligned(&spans, ALIGN).unwrap();
            let slab = contents(&plan);
            prop_assert_eq!(slab.len() as u64, plan.segments.len_bytes());
            prop_assert_eq!(plan.places.len(), spans.len());
            for (place, span) in plan.places.iter().zip(&spans) {
                prop_assert_eq!(u64::from(place.len), span.len);
                for i in 0..span.len {
                    prop_assert_eq!(slab[place.at as usize + i as usize], Some((span.file, span.offset + i)));
                }
            }
            let mut read: Vec<(FileId, u64)> =
                slab.iter().step_by(ALIGN as usize).flatten().map(|(file, offset)| (*file, offset / ALIGN)).collect();
            read.sort_unstable();
            prop_assert_eq!(read, naive_blocks(&spans));
            prop_assert_eq!(u64::from(plan.useful_bytes), spans.iter().map(|span| span.len).sum::<u64>());
        }

        #[test]
        fn segments_are_aligned_and_want_exactly_up_to_the_last_useful_byte(spans in spans()) {
            let plan = layout_aligned(&spans, ALIGN).unwrap();
            for segment in plan.segments.iter() {
                prop_assert!(segment.offset % ALIGN == 0 && u64::from(segment.len) % ALIGN == 0);
                prop_assert!(u64::from(segment.at) % ALIGN == 0);
                let inside = spans.iter().filter(|span| {
                    span.file == segment.file
                        && span.offset >= segment.offset
                        && span.offset < segment.offset + u64::from(segment.len)
                });
                let last = inside.map(|span| span.offset + span.len).max().unwrap();
                prop_assert_eq!(segment.offset + u64::from(segment.want), last);
                prop_assert!(segment.want <= segment.len);
            }
        }
    }

    fn at(offset: u64, len: u64) -> FileSpan {
        FileSpan { file: FileId(0), offset, len }
    }

    #[test]
    fn an_expert_stored_in_one_piece_is_one_segment() {
        // Three matrices and their scales, packed one after the other from a sector border.
        let spans = [at(8192, 6_291_456), at(6_299_648, 8192), at(6_307_840, 6_291_456), at(12_599_296, 100)];
        let plan = layout_aligned(&spans, ALIGN).unwrap();
        assert_eq!(plan.segments.len(), 1);
        assert_eq!((plan.segments[0].offset, plan.segments[0].want), (8192, 12_591_204));
        assert_eq!(plan.slab_bytes, 12_595_200, "up to the next multiple of 4096");
        assert_eq!(plan.places[3], Place { at: 12_591_104, len: 100 });
    }

    #[test]
    fn gaps_are_read_through_up_to_64_kib() {
        let plan = |gap: u64| layout_aligned(&[at(0, 4096), at(4096 + gap, 4096)], ALIGN).unwrap();
        assert_eq!(plan(65536).segments.len(), 1);
        assert_eq!(plan(65536).slab_bytes, 73_728);
        assert_eq!(plan(65537).segments.len(), 1, "its first sector starts 65536 bytes on");
        assert_eq!(plan(65536 + 4096).segments.len(), 2);
        assert_eq!(plan(65536 + 4096).slab_bytes, 8192);
    }

    #[test]
    fn what_cannot_be_planned_is_refused() {
        let bad = |spans: &[FileSpan]| {
            assert!(matches!(layout_aligned(spans, ALIGN), Err(IoError::BadRequest { .. })), "{spans:?}");
        };
        bad(&[]);
        bad(&[at(0, 0)]);
        bad(&[at(u64::MAX, 1)]);
        bad(&[at(i64::MAX as u64 - 10, 10)]);
        bad(&[at(0, SLAB_BYTES_MAX as u64 + 1)]);
        bad(&(0..9).map(|i| at(i * 1_000_000, 10)).collect::<Vec<_>>());
        assert!(layout_aligned(&(0..8).map(|i| at(i * 1_000_000, 10)).collect::<Vec<_>>(), ALIGN).is_ok());
    }

    #[test]
    fn spans_outside_their_file_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(10_000).unwrap();
        let files = FileSet::open(&[file.path().to_owned()], IoMode::Auto).unwrap();
        assert_eq!(layout(&[at(0, 10_000)], &files).unwrap().segments[0].len, 12_288);
        for (offset, len) in [(0, 10_001), (10_000, 1), (u64::MAX, 2), (5, u64::MAX)] {
            let error = layout(&[at(offset, len)], &files).unwrap_err();
            let path = std::sync::Arc::from(file.path());
            assert_eq!(error, IoError::OutOfFile { path, offset, len, file_bytes: 10_000 });
        }
        let stranger = FileSpan { file: FileId(1), offset: 0, len: 1 };
        assert!(matches!(layout(&[stranger], &files), Err(IoError::BadRequest { .. })));
    }
}
