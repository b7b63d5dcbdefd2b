//! Alignment arithmetic: a byte span and the aligned range that covers it. Pure; overflow is `None`.

/// An aligned byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cover {
    /// First byte, a multiple of the alignment.
    pub offset: u64,
    /// Bytes, a multiple of the alignment.
    pub len: u64,
}

impl Cover {
    /// First byte after the range.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Largest multiple of `align` (a power of two) that is not above `value`.
pub const fn align_down(value: u64, align: u64) -> u64 {
    value & !(align - 1)
}

/// Smallest multiple of `align` (a power of two) that is not below `value`; `None` past `u64::MAX`.
pub const fn align_up(value: u64, align: u64) -> Option<u64> {
    match value.checked_add(align - 1) {
        Some(sum) => Some(align_down(sum, align)),
        None => None,
    }
}

/// Whether `value` is a multiple of `align` (a power of two).
pub const fn is_aligned(value: u64, align: u64) -> bool {
    value & (align - 1) == 0
}

/// Smallest aligned range that holds the `len` bytes at `offset`. `None` where it would pass the largest file offset.
pub fn cover(offset: u64, len: u64, align: u64) -> Option<Cover> {
    let end = align_up(offset.checked_add(len)?, align)?;
    if end > i64::MAX as u64 {
        return None;
    }
    let start = align_down(offset, align);
    Some(Cover { offset: start, len: end - start })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: walk aligned blocks and keep those that hold a byte of the span.
    fn naive_cover(offset: u64, len: u64, align: u64) -> Option<Cover> {
        let touched: Vec<u64> =
            (0..).map(|i| i * align).take_while(|s| *s < offset + len).filter(|s| s + align > offset).collect();
        let first = *touched.first()?;
        Some(Cover { offset: first, len: touched.len() as u64 * align })
    }

    proptest! {
        #[test]
        fn cover_is_the_set_of_touched_blocks(offset in 0u64..20_000, len in 1u64..20_000, shift in 0u32..13) {
            let align = 1u64 << shift;
            prop_assert_eq!(cover(offset, len, align), naive_cover(offset, len, align));
        }

        #[test]
        fn rounding_agrees_with_division(value in 0u64..u64::MAX / 2, shift in 0u32..21) {
            let align = 1u64 << shift;
            prop_assert_eq!(align_down(value, align), value / align * align);
            prop_assert_eq!(align_up(value, align), Some(value.div_ceil(align) * align));
            prop_assert_eq!(is_aligned(value, align), value % align == 0);
        }
    }

    #[test]
    fn ends_past_the_largest_offset_are_refused() {
        assert_eq!(cover(u64::MAX - 1, 4, 4096), None);
        assert_eq!(cover(i64::MAX as u64, 1, 4096), None);
        assert_eq!(align_up(u64::MAX, 4096), None);
    }
}
