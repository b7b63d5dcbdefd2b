//! Whether a processor and its system have the tiles, and the words for it if not.

use std::fmt;

/// Why tiles are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum Missing {
    /// The processor has no tile registers.
    Tiles,
    /// It has no products of bytes on them.
    Bytes,
    /// Its tile registers are not eight of 16 rows of 64 bytes.
    Palette,
    /// It lacks what else the kernels use.
    Vectors,
    /// The system does not save tile registers.
    Disabled,
    /// The system refused this process the tile registers, with this error number.
    Refused(i64),
    /// A product on tiles was not that of the scalar kernels.
    Wrong,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Tiles => f.write_str("this processor has no tile registers"),
            Missing::Bytes => f.write_str("this processor multiplies no bytes on tiles"),
            Missing::Palette => f.write_str("the tile registers have other sizes than are known"),
            Missing::Vectors => f.write_str("this processor lacks AVX-512 with VNNI and VBMI"),
            Missing::Disabled => f.write_str("the system does not keep tile registers"),
            Missing::Refused(errno) => write!(f, "the system refused the tile registers (error {errno})"),
            Missing::Wrong => f.write_str("a trial product on tiles was wrong"),
        }
    }
}

/// What `cpuid` and `xgetbv` say about tiles. A leaf that does not exist is zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    /// Leaf 7: extensions.
    pub leaf7_edx: u32,
    /// Leaf 29, palette 1: in the upper half the number of registers, in the lower the bytes of a row.
    pub palette_ebx: u32,
    /// The same leaf: in the lower half the rows of a register.
    pub palette_ecx: u32,
    /// Which registers the system saves; 0 when it says nothing about that.
    pub xcr0: u64,
}

impl Words {
    /// The first thing that is missing.
    pub fn missing(&self) -> Option<Missing> {
        let registers = (self.palette_ebx >> 16, self.palette_ebx & 0xffff, self.palette_ecx & 0xffff);
        if self.leaf7_edx >> 24 & 1 == 0 {
            Some(Missing::Tiles)
        } else if self.leaf7_edx >> 25 & 1 == 0 {
            Some(Missing::Bytes)
        } else if self.xcr0 >> 17 & 0b11 != 0b11 {
            Some(Missing::Disabled)
        } else if registers != (8, 64, 16) {
            Some(Missing::Palette)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sapphire Rapids under Linux.
    const WHOLE: Words =
        Words { leaf7_edx: 0xffc0_4410, palette_ebx: 8 << 16 | 64, palette_ecx: 16, xcr0: 0x0006_02e7 };

    #[test]
    fn each_thing_that_may_be_missing_is_seen() {
        assert_eq!(WHOLE.missing(), None);
        let without = |change: fn(&mut Words)| {
            let mut words = WHOLE;
            change(&mut words);
            words.missing()
        };
        assert_eq!(without(|w| w.leaf7_edx &= !(1 << 24)), Some(Missing::Tiles));
        assert_eq!(without(|w| w.leaf7_edx &= !(1 << 25)), Some(Missing::Bytes));
        // bf16 on tiles alone is of no use.
        assert_eq!(without(|w| w.leaf7_edx = 1 << 22 | 1 << 24), Some(Missing::Bytes));
        assert_eq!(without(|w| w.xcr0 &= !(1 << 17)), Some(Missing::Disabled));
        assert_eq!(without(|w| w.xcr0 &= !(1 << 18)), Some(Missing::Disabled));
        assert_eq!(without(|w| w.xcr0 = 0), Some(Missing::Disabled));
        assert_eq!(without(|w| w.palette_ecx = 8), Some(Missing::Palette));
        assert_eq!(without(|w| w.palette_ebx = 4 << 16 | 64), Some(Missing::Palette));
        assert_eq!(without(|w| (w.palette_ebx, w.palette_ecx) = (0, 0)), Some(Missing::Palette));
        // A processor that has none of it, and no leaf beyond the first.
        let bare = Words { leaf7_edx: 0, palette_ebx: 0, palette_ecx: 0, xcr0: 0 };
        assert_eq!(bare.missing(), Some(Missing::Tiles));
        assert_eq!(Missing::Refused(22).to_string(), "the system refused the tile registers (error 22)");
    }
}
