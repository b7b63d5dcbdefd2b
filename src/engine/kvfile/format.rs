//! A context as the bytes of a file: what is kept of each of its positions, and whose they are. Pure.
//!
//! ```text
//! header    "MSKVSEQ\x01"   u64 model   u64 arithmetic   u32 bits of a number   u32 layers
//!           for each layer: u32 numbers of a row, u32 numbers of an index key
//!           u64 XXH3 of everything before
//! block     u32 token   u32 form   for each layer: the row, the index key   u64 XXH3 of everything before,
//!           seeded with that of the block before; of the first, with that of the header
//! ```
//! All numbers are little-endian. A block is a position, and all blocks of a file are of one length: where a position is,
//! follows from its number, and what is cut off loses nothing before it. As each checksum depends on the one before, a block
//! that an earlier sequence left behind at its place counts for nothing after another block.
//!
//! A layer more, such as one that drafts, is a layer more in the header.

use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::forward::{Form, KvBits};
use crate::limits::{KV_FILE_LAYERS_MAX, MAX_LAYERS};

/// The last byte counts changes of the format.
const MAGIC: [u8; 8] = *b"MSKVSEQ\x01";
const FIXED_BYTES: usize = MAGIC.len() + 2 * size_of::<u64>() + 2 * size_of::<u32>();
const LAYER_BYTES: usize = 2 * size_of::<u32>();
const CHECKSUM_BYTES: usize = size_of::<u64>();
/// Token and form.
const BLOCK_HEAD_BYTES: usize = 2 * size_of::<u32>();
/// What a block has beside the numbers.
pub const BESIDE_BYTES: usize = BLOCK_HEAD_BYTES + CHECKSUM_BYTES;

/// Bytes of the longest header.
pub const HEADER_BYTES_MOST: usize = FIXED_BYTES + LAYER_BYTES * KV_FILE_LAYERS_MAX + CHECKSUM_BYTES;

const _: () = assert!(KV_FILE_LAYERS_MAX >= MAX_LAYERS);

/// Everything that the bits of a position depend on, but tokens before it and the form that attention had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Tells configurations and weights apart.
    pub model: u64,
    /// Tells apart what else decides bits: settings and releases of the program.
    pub arithmetic: u64,
    /// Precision of what is kept.
    pub bits: KvBits,
    /// Numbers of a row and of an index key, for each layer.
    pub widths: Vec<(u32, u32)>,
}

/// Why a file holds no context that may be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Mismatch {
    /// It begins like something else.
    #[error("is no file of a context")]
    Foreign,
    /// It is empty, or holds a part of the right header and nothing more.
    #[error("is not begun")]
    Unbegun,
    /// It is of another version of the format.
    #[error("has format {0}, and this program knows format {known}", known = MAGIC[7])]
    Version(u8),
    /// The header is cut short, or its checksum is wrong.
    #[error("is damaged where it says what it is of")]
    Damaged,
    /// It is of another model.
    #[error("is of another model")]
    OtherModel,
    /// It is of this model, and its numbers came about otherwise.
    #[error("was computed with other settings (--kv-bits, --activations, --dsa or precisions) or by another release")]
    OtherArithmetic,
}

impl Header {
    /// The bytes of it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(self.model.to_le_bytes());
        out.extend(self.arithmetic.to_le_bytes());
        out.extend((8 * self.bits.bytes() as u32).to_le_bytes());
        out.extend((self.widths.len() as u32).to_le_bytes());
        for (row, key) in &self.widths {
            out.extend(row.to_le_bytes());
            out.extend(key.to_le_bytes());
        }
        out.extend(xxh3_64(&out).to_le_bytes());
        out
    }

    /// Compares this header with the beginning of a file, of which `found` are up to [`HEADER_BYTES_MOST`] bytes.
    pub fn check(&self, found: &[u8]) -> Result<(), Mismatch> {
        let own = self.encode();
        if found.starts_with(&own) {
            return Ok(());
        }
        if own.starts_with(found) {
            return Err(Mismatch::Unbegun);
        }
        let Some(magic) = found.first_chunk::<8>().filter(|magic| magic[..7] == MAGIC[..7]) else {
            return Err(Mismatch::Foreign);
        };
        if *magic != MAGIC {
            return Err(Mismatch::Version(magic[7]));
        }
        let word = |at: usize| found.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let layers = word(FIXED_BYTES - size_of::<u32>()).ok_or(Mismatch::Damaged)? as usize;
        if layers > KV_FILE_LAYERS_MAX {
            return Err(Mismatch::Damaged);
        }
        let end = FIXED_BYTES + LAYER_BYTES * layers;
        let checksum = found.get(end..).and_then(|rest| rest.first_chunk()).ok_or(Mismatch::Damaged)?;
        if xxh3_64(&found[..end]) != u64::from_le_bytes(*checksum) {
            return Err(Mismatch::Damaged);
        }
        match found[MAGIC.len()..].starts_with(&self.model.to_le_bytes()) {
            false => Err(Mismatch::OtherModel),
            true => Err(Mismatch::OtherArithmetic),
        }
    }

    /// Length and seed of blocks.
    pub fn blocks(&self) -> Blocks {
        let own = self.encode();
        let numbers: usize = self.widths.iter().map(|(row, key)| *row as usize + *key as usize).sum();
        Blocks { first: own.len() as u64, bytes: numbers * self.bits.bytes() + BESIDE_BYTES, seed: sum_of(&own) }
    }
}

/// Where blocks are, and how the first is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Where the first begins.
    pub first: u64,
    /// Bytes of each.
    pub bytes: usize,
    /// Checksum before the first.
    pub seed: u64,
}

impl Blocks {
    /// Where the block of `position` begins.
    pub fn offset(&self, position: usize) -> u64 {
        self.first + position as u64 * self.bytes as u64
    }

    /// Whole blocks in a file of `len` bytes, and bytes after the last.
    pub fn held(&self, len: u64) -> (usize, u64) {
        let (bytes, len) = (self.bytes as u64, len.saturating_sub(self.first));
        ((len / bytes) as usize, len % bytes)
    }
}

/// What stands before the numbers of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The token of the position.
    pub token: u32,
    /// The form of attention that it was computed in: another has other low bits.
    pub form: Form,
}

/// The part of a block that holds what a cache keeps of a position.
pub fn numbers(block: &mut [u8]) -> &mut [u8] {
    let end = block.len() - CHECKSUM_BYTES;
    &mut block[BLOCK_HEAD_BYTES..end]
}

/// Completes a block whose numbers are written. Its checksum, before which the next one is sealed.
pub fn seal(block: &mut [u8], place: Place, before: u64) -> u64 {
    let form: u32 = match place.form {
        Form::Absorbed => 0,
        Form::Explicit => 1,
    };
    let (content, checksum) = block.split_at_mut(block.len() - CHECKSUM_BYTES);
    content[..4].copy_from_slice(&place.token.to_le_bytes());
    content[4..BLOCK_HEAD_BYTES].copy_from_slice(&form.to_le_bytes());
    let sum = xxh3_64_with_seed(content, before);
    checksum.copy_from_slice(&sum.to_le_bytes());
    sum
}

/// What a block is of, and its checksum; `None` where it is damaged, or does not follow the block whose checksum is `before`.
pub fn open(block: &[u8], before: u64) -> Option<(Place, u64)> {
    let (content, checksum) = block.split_last_chunk::<CHECKSUM_BYTES>()?;
    let sum = u64::from_le_bytes(*checksum);
    if xxh3_64_with_seed(content, before) != sum {
        return None;
    }
    let form = match u32::from_le_bytes(*content[4..].first_chunk()?) {
        0 => Form::Absorbed,
        1 => Form::Explicit,
        _ => return None,
    };
    Some((Place { token: u32::from_le_bytes(*content.first_chunk()?), form }, sum))
}

/// The checksum of a block that is [sealed](seal), or that ends anything else.
pub fn sum_of(bytes: &[u8]) -> u64 {
    bytes.last_chunk().map_or(0, |sum| u64::from_le_bytes(*sum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { model: 0x0102, arithmetic: 0x0304, bits: KvBits::Bits16, widths: vec![(3, 2), (3, 0)] }
    }

    #[test]
    fn a_header_is_laid_out_as_described() {
        let mut expected = b"MSKVSEQ\x01\x02\x01\0\0\0\0\0\0\x04\x03\0\0\0\0\0\0".to_vec();
        for word in [16u32, 2, 3, 2, 3, 0] {
            expected.extend(word.to_le_bytes());
        }
        let sum = xxh3_64(&expected);
        expected.extend(sum.to_le_bytes());
        assert_eq!(header().encode(), expected);
        // Eight numbers of two bytes, token, form and checksum.
        assert_eq!(header().blocks(), Blocks { first: 56, bytes: 16 + 8 + 8, seed: sum });
        assert_eq!((header().blocks().offset(3), header().blocks().held(56 + 3 * 32 + 5)), (56 + 96, (3, 5)));
        assert_eq!(header().blocks().held(20), (0, 0));
    }

    #[test]
    fn other_files_are_told_apart() {
        let own = header();
        let bytes = own.encode();
        let check = |bytes: &[u8]| own.check(bytes);
        assert_eq!((check(&bytes), check(&[&bytes[..], b"blocks"].concat())), (Ok(()), Ok(())));
        assert_eq!((check(b""), check(&bytes[..20])), (Err(Mismatch::Unbegun), Err(Mismatch::Unbegun)));
        assert_eq!(check(b"once upon a time"), Err(Mismatch::Foreign));
        assert_eq!(check(b"MSKVSEQ\x02"), Err(Mismatch::Version(2)));
        let of = |other: Header| check(&other.encode());
        assert_eq!(of(Header { model: 1, ..header() }), Err(Mismatch::OtherModel));
        assert_eq!(of(Header { arithmetic: 1, ..header() }), Err(Mismatch::OtherArithmetic));
        assert_eq!(of(Header { bits: KvBits::Bits32, ..header() }), Err(Mismatch::OtherArithmetic));
        assert_eq!(of(Header { widths: vec![(3, 2); 9], ..header() }), Err(Mismatch::OtherArithmetic));
        let other = Header { model: 1, ..header() }.encode();
        assert_eq!(check(&other[..other.len() - 1]), Err(Mismatch::Damaged), "cut short");
        let huge = [&other[..28], &u32::MAX.to_le_bytes()].concat();
        assert_eq!(check(&huge), Err(Mismatch::Damaged), "more layers than there can be");
    }

    proptest! {
        #[test]
        fn damage_anywhere_is_found(at in any::<prop::sample::Index>(), flip in 1u8.., token in any::<u32>(), before in any::<u64>()) {
            let mut bytes = header().encode();
            let i = at.index(bytes.len());
            bytes[i] ^= flip;
            prop_assert!(header().check(&bytes).is_err());

            let mut block = vec![7; 32];
            let place = Place { token, form: Form::Explicit };
            let sum = seal(&mut block, place, before);
            prop_assert_eq!(open(&block, before), Some((place, sum)));
            prop_assert_eq!(numbers(&mut block), [7; 16]);
            prop_assert_eq!(open(&block, before ^ u64::from(flip)), None, "after another block");
            let i = at.index(block.len());
            block[i] ^= flip;
            prop_assert_eq!(open(&block, before), None);
        }
    }
}
