//! A small mutator of text formats: flips bytes, moves pieces about, and swaps tokens for troublesome ones.

/// Values at the edges of what parsers and size arithmetic expect.
const TROUBLE: [&str; 24] = [
    "0",
    "-1",
    "1",
    "127",
    "4294967296",
    "8589934592",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "-0.0",
    "1e-400",
    "0.5",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"\\ud800\"",
    "[[[[[[[[[[[[[[[[",
    "\u{feff}",
    "NaN",
    "Infinity",
];

/// A seeded source of choices.
pub struct Mutator(u64);

impl Mutator {
    pub fn new(seed: u64) -> Mutator {
        Mutator(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// A few mutations of `bytes`.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len());
            match self.below(7) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                1 if !bytes.is_empty() => bytes[at] = self.next() as u8,
                2 => drop(bytes.drain(at..(at + self.below(40)).min(bytes.len()))),
                3 => {
                    let piece = bytes[at..(at + self.below(80)).min(bytes.len())].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, piece);
                }
                4 => bytes.truncate(at),
                _ => self.swap_token(bytes),
            }
        }
    }

    /// Puts trouble in the place of a number or a string.
    fn swap_token(&mut self, bytes: &mut Vec<u8>) {
        let start = self.below(bytes.len());
        let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"\"-+._".contains(byte);
        let Some(begin) = bytes[start..].iter().position(is_token).map(|skip| start + skip) else { return };
        let end = bytes[begin..].iter().position(|byte| !is_token(byte)).map_or(bytes.len(), |len| begin + len);
        let trouble = TROUBLE[self.below(TROUBLE.len())];
        bytes.splice(begin..end, trouble.bytes());
    }
}
