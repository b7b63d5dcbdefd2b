//! How often each expert of a model was chosen, over all runs, as the bytes of a file.
//!
//! ```text
//! "MSUSAGE\x01"   u64 fingerprint of the model   u32 experts   u64 selections, for each   u64 XXH3 of everything before
//! ```
//! All numbers are little-endian.

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use crate::limits::{MAX_EXPERTS, MAX_HISTORY_BYTES, MAX_LAYERS};

/// The last byte counts changes of the format.
const MAGIC: [u8; 8] = *b"MSUSAGE\x01";
const HEAD_BYTES: usize = MAGIC.len() + 8 + 4;
const CHECKSUM_BYTES: usize = 8;
/// A count from a file is at most this: as many as a model may have experts add up to less than 64 bits hold.
const COUNT_MOST: u64 = u64::MAX / (2 * MAX_LAYERS * MAX_EXPERTS) as u64;

/// Bytes that are no history of the model at hand.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HistoryError {
    /// They begin like something else.
    #[error("it is not a usage history")]
    Foreign,
    /// They begin like a history of another program version.
    #[error("it is a usage history of format {0}; this program reads format {known}", known = MAGIC[7])]
    Version(u8),
    /// They are cut short, or the checksum is wrong.
    #[error("it is damaged")]
    Damaged,
    /// They are of another model.
    #[error("it belongs to another model")]
    OtherModel,
}

/// The file of `usage`, selections of each expert, of the model with this fingerprint.
pub fn encode(fingerprint: u64, usage: &[u64]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(fingerprint.to_le_bytes());
    out.extend((usage.len() as u32).to_le_bytes());
    usage.iter().for_each(|count| out.extend(count.to_le_bytes()));
    out.extend(xxh3_64(&out).to_le_bytes());
    out
}

/// The selections in a file of [`encode`], which must be of the model with this fingerprint. Anybody may have written it:
/// a count is at most what lets all of them be added up.
pub fn decode(bytes: &[u8], fingerprint: u64) -> Result<Vec<u64>, HistoryError> {
    let Some(magic) = bytes.first_chunk::<8>().filter(|magic| magic[..7] == MAGIC[..7]) else {
        return Err(HistoryError::Foreign);
    };
    if *magic != MAGIC {
        return Err(HistoryError::Version(magic[7]));
    }
    let (content, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(HistoryError::Damaged)?;
    if xxh3_64(content) != u64::from_le_bytes(*checksum) || content.len() < HEAD_BYTES {
        return Err(HistoryError::Damaged);
    }
    let (head, counts) = content.split_at(HEAD_BYTES);
    let (model, count) = head[MAGIC.len()..].split_at(size_of::<u64>());
    if model != fingerprint.to_le_bytes() {
        return Err(HistoryError::OtherModel);
    }
    if count != ((counts.len() / size_of::<u64>()) as u32).to_le_bytes() || !counts.len().is_multiple_of(8) {
        return Err(HistoryError::Damaged);
    }
    Ok(counts.as_chunks().0.iter().map(|count| u64::from_le_bytes(*count).min(COUNT_MOST)).collect())
}

const _: () = assert!(MAX_HISTORY_BYTES >= (HEAD_BYTES + CHECKSUM_BYTES + 8 * MAX_LAYERS * MAX_EXPERTS) as u64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(fingerprint in any::<u64>(), usage in prop::collection::vec(any::<u64>(), 0..50)) {
            let bytes = encode(fingerprint, &usage);
            let read = usage.iter().map(|&count| count.min(COUNT_MOST)).collect();
            prop_assert_eq!(decode(&bytes, fingerprint), Ok(read));
            prop_assert_eq!(decode(&bytes, fingerprint ^ 1), Err(HistoryError::OtherModel));
        }

        #[test]
        fn damage_anywhere_is_found(usage in prop::collection::vec(any::<u64>(), 0..9), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let whole = encode(7, &usage);
            let at = at.index(whole.len());
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            prop_assert!(decode(&bytes, 7).is_err());
            prop_assert!(decode(&whole[..at], 7).is_err());
        }
    }

    #[test]
    fn other_files_are_told_apart() {
        assert_eq!(decode(b"", 7), Err(HistoryError::Foreign));
        assert_eq!(decode(b"MSUSAGE\x02", 7), Err(HistoryError::Version(2)));
        assert_eq!(decode(b"MSUSAGE\x01", 7), Err(HistoryError::Damaged));
        // A file of nothing but the magic and its checksum.
        let short = [&MAGIC[..], &xxh3_64(&MAGIC).to_le_bytes()].concat();
        assert_eq!(decode(&short, 7), Err(HistoryError::Damaged));
    }
}
