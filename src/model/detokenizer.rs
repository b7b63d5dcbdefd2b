//! Bytes of tokens to text, while they come: a character is held back until all of its bytes are there.

/// Turns the bytes of successive tokens into text. Steady use allocates nothing.
pub struct Detokenizer {
    held: Vec<u8>,
    text: String,
}

/// Longest text of one token that is taken without growing the buffers.
const TOKEN_BYTES_USUAL: usize = 512;

impl Default for Detokenizer {
    fn default() -> Self {
        Detokenizer { held: Vec::with_capacity(TOKEN_BYTES_USUAL), text: String::with_capacity(3 * TOKEN_BYTES_USUAL) }
    }
}

impl Detokenizer {
    /// A detokenizer that holds nothing.
    pub fn new() -> Detokenizer {
        Detokenizer::default()
    }

    /// Adds the bytes of one token and returns the text that became whole with it, possibly none.
    /// Bytes that can no longer become a character come out as U+FFFD, one for each invalid sequence, exactly where
    /// `String::from_utf8_lossy` of all bytes would put them.
    pub fn push(&mut self, bytes: &[u8]) -> &str {
        self.text.clear();
        self.held.extend_from_slice(bytes);
        let mut done = 0;
        while done < self.held.len() {
            let rest = &self.held[done..];
            let (whole, invalid) = match std::str::from_utf8(rest) {
                Ok(text) => (text, 0),
                Err(e) => {
                    let whole = std::str::from_utf8(&rest[..e.valid_up_to()]).unwrap_or_default();
                    match e.error_len() {
                        Some(invalid) => (whole, invalid),
                        None => {
                            self.text.push_str(whole);
                            done += whole.len();
                            break;
                        }
                    }
                }
            };
            self.text.push_str(whole);
            if invalid > 0 {
                self.text.push(char::REPLACEMENT_CHARACTER);
            }
            done += whole.len() + invalid;
        }
        self.held.drain(..done);
        &self.text
    }

    /// Ends the text: a character whose last bytes never came is dropped, for half a character is no character.
    /// Returns how many bytes that were (0 to 3).
    pub fn finish(&mut self) -> usize {
        let dropped = self.held.len();
        self.held.clear();
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(pieces: &[&[u8]]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new();
        pieces.iter().map(|piece| detokenizer.push(piece).to_owned()).collect()
    }

    #[test]
    fn a_fox_in_four_tokens_comes_out_once() {
        // U+1F98A is F0 9F A6 8A.
        assert_eq!(stream(&[b"\xF0", b"\x9F", b"\xA6", b"\x8A!"]), ["", "", "", "🦊!"]);
    }

    #[test]
    fn cjk_split_in_the_middle_waits() {
        // U+4F60 is E4 BD A0, U+597D is E5 A5 BD.
        assert_eq!(stream(&[b"a\xE4\xBD", b"\xA0\xE5", b"\xA5\xBD"]), ["a", "你", "好"]);
    }

    #[test]
    fn invalid_bytes_are_replaced_only_when_certain() {
        assert_eq!(stream(&[b"\xF0\x9F", b"x", b"\x80", b"\xC3"]), ["", "\u{FFFD}x", "\u{FFFD}", ""]);
    }

    #[test]
    fn the_end_drops_half_a_character() {
        let mut detokenizer = Detokenizer::new();
        assert_eq!(detokenizer.push(b"caf\xC3"), "caf");
        assert_eq!(detokenizer.finish(), 1);
        assert_eq!(detokenizer.push(b"\xC3\xA9"), "é");
        assert_eq!(detokenizer.finish(), 0);
    }

    #[test]
    fn steady_use_keeps_its_buffers() {
        let mut detokenizer = Detokenizer::new();
        let before = (detokenizer.held.capacity(), detokenizer.text.capacity());
        for _ in 0..10_000 {
            detokenizer.push("någon🦊".as_bytes());
            detokenizer.push(b"\xE4\xBD");
            detokenizer.push(b"\xA0");
        }
        assert_eq!((detokenizer.held.capacity(), detokenizer.text.capacity()), before);
    }

    proptest! {
        #[test]
        fn streamed_text_is_the_text_of_all_bytes(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xF0u8), Just(0x9F), Just(0x80), Just(0xE2)], 0..60),
            cuts in proptest::collection::vec(0usize..60, 0..10),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let mut detokenizer = Detokenizer::new();
            let mut streamed = String::new();
            for pair in cuts.windows(2) {
                streamed.push_str(detokenizer.push(&bytes[pair[0]..pair[1]]));
            }
            let held = detokenizer.finish();
            let all = String::from_utf8_lossy(&bytes[..bytes.len() - held]);
            prop_assert_eq!(streamed, all);
            prop_assert!(held < 4);
        }
    }
}
