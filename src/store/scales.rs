//! Scales that lie apart from their weights, kept in memory: an expert is then one read, not two.
//!
//! Containers of other programs put a shard's scales in front of all its weights. Scales of rows are a five-hundredth of an
//! expert, so that all of them are affordable; scales of groups are a ninth, and are read with it.

use millstream_io::{FileSpan, Place};

use crate::checkpoint::{ExpertSource, MatrixSource};

/// Which scales are kept, and where in memory each is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptScales {
    /// Parts of files, and the place where each begins; in the order of places, without gaps.
    pub pieces: Vec<(FileSpan, usize)>,
    /// Bytes of all.
    pub bytes: usize,
}

impl KeptScales {
    /// Whether `source` has scales few enough to be kept: one a row, or fewer.
    pub(super) fn wants(source: &ExpertSource) -> bool {
        let few = |matrix: &&MatrixSource| matrix.spec.scale_bytes() <= matrix.spec.rows * size_of::<f32>();
        source.matrices().iter().all(few)
    }

    /// Places for `spans`, in their order; `None` where memory of that size has no places.
    pub(super) fn add(&mut self, spans: &[FileSpan]) -> Option<Vec<Place>> {
        let all: u64 = spans.iter().map(|span| span.len).sum();
        u32::try_from(self.bytes as u64 + all).ok()?;
        let mut places = vec![Place { at: 0, len: 0 }; spans.len()];
        let mut order: Vec<usize> = (0..spans.len()).collect();
        // As they lie in the file, so that neighbours are read at once.
        order.sort_unstable_by_key(|&i| (spans[i].file, spans[i].offset));
        for i in order {
            places[i] = Place { at: self.bytes as u32, len: spans[i].len as u32 };
            self.push(spans[i]);
        }
        Some(places)
    }

    fn push(&mut self, span: FileSpan) {
        match self.pieces.last_mut() {
            Some((last, _)) if last.file == span.file && last.offset + last.len == span.offset => last.len += span.len,
            _ => self.pieces.push((span, self.bytes)),
        }
        self.bytes += span.len as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::FileId;

    fn span(file: u32, offset: u64, len: u64) -> FileSpan {
        FileSpan { file: FileId(file), offset, len }
    }

    #[test]
    fn neighbours_in_a_file_are_one_piece_whatever_order_they_are_used_in() {
        let mut kept = KeptScales::default();
        // Gate and up are used first and lie after down.
        let places = kept.add(&[span(0, 120, 8), span(0, 128, 8), span(0, 100, 20)]).unwrap();
        assert_eq!(places.iter().map(|place| (place.at, place.len)).collect::<Vec<_>>(), [(20, 8), (28, 8), (0, 20)]);
        kept.add(&[span(0, 136, 4), span(1, 140, 4)]).unwrap();
        assert_eq!(kept.pieces, [(span(0, 100, 40), 0), (span(1, 140, 4), 40)]);
        assert_eq!(kept.bytes, 44);
        assert_eq!(kept.add(&[span(2, 0, u64::from(u32::MAX))]), None);
        assert_eq!(kept.bytes, 44, "what has no place leaves nothing");
    }
}
