//! How long the chunks of a prompt are.
//!
//! A chunk of a long prompt reads nearly every expert once, so that twice the rows read half as much. But rows need buffers,
//! and what those take the cache of experts lacks, for the answer too.

use super::config::DEFAULT_PREFILL_ROWS;

/// What rows beyond the default take may be one part in so many of what the experts would get without them: a prompt of
/// four such chunks reads more than an answer of some hundred tokens does for a cache a quarter smaller.
const ROWS_ONE_IN: u64 = 4;

/// Rows of a chunk, `most` at most, where those of the default leave the experts `spare` bytes beside the slabs
/// without which nothing runs, and buffers take `bytes(rows)`.
pub(super) fn choose(most: usize, spare: u64, bytes: impl Fn(usize) -> u64) -> usize {
    if most <= DEFAULT_PREFILL_ROWS {
        return most;
    }
    // Buffers are as many times larger as there are rows, but for a part that all have.
    let more = bytes(2 * DEFAULT_PREFILL_ROWS).saturating_sub(bytes(DEFAULT_PREFILL_ROWS));
    let per_row = more.div_ceil(DEFAULT_PREFILL_ROWS as u64).max(1);
    most.min(DEFAULT_PREFILL_ROWS + (spare / ROWS_ONE_IN / per_row) as usize)
}

/// `tokens` in chunks of `most` at most, all as long as one another: a short one at the end would read as much as a long one.
pub(super) fn chunk_of(tokens: usize, most: usize) -> usize {
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_chunks_are_had_where_they_leave_the_experts_three_quarters() {
        // 100 bytes whatever the rows, and 10 a row.
        let chosen = |most, spare| choose(most, spare, |rows| 100 + 10 * rows as u64);
        assert_eq!(chosen(2048, 1_000_000), 2048);
        // A quarter of 40,000 are 1,000 rows more.
        assert_eq!(chosen(2048, 40_000), 1512);
        assert_eq!(chosen(1300, 40_000), 1300);
        assert_eq!((chosen(1000, 1_000_000), chosen(64, 0)), (1000, 64), "no more than there can be");
        assert_eq!(chosen(2048, 39), 512, "what runs with these runs");
    }

    #[test]
    fn chunks_of_a_prompt_are_as_long_as_one_another() {
        assert_eq!([1, 512, 513, 1024, 1030].map(|tokens| chunk_of(tokens, 512)), [1, 512, 257, 512, 344]);
        assert_eq!((chunk_of(2049, 2048), chunk_of(0, 512)), (1025, 1));
    }
}
