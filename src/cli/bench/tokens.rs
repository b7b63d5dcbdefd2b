//! The tokens of a benchmark: the same in every repetition, with every setting and in every version, since which tokens
//! go through a model decides which experts are read.

use std::io::Read;
use std::path::Path;

use crate::checkpoint::Arch;
use crate::cli::{Failure, prompt};
use crate::limits::MAX_IDS_FILE_BYTES;

/// Fables in the public domain: words, so that a trained router chooses as it does in use.
const TEXT: &str = include_str!("fables.txt");

/// Where the tokens come from, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// The ids.
    pub ids: Vec<u32>,
    /// What they are.
    pub source: String,
}

/// As many tokens as are asked for: of the fables, from their beginning again where they end, or drawn where the model
/// has no tokenizer.
pub fn of_text(dir: &Path, arch: &Arch, count: usize) -> Result<Tokens, Failure> {
    let refused = |error| prompt::tokenizer_failure(&error);
    let (ids, source) = match prompt::open_tokenizer(dir, arch, true)? {
        Some(tokenizer) if tokenizer.vocab_size() <= arch.vocab => {
            (tokenizer.encode_raw(TEXT).map_err(refused)?, "text that comes with the program".to_owned())
        }
        _ => (drawn(arch.vocab), "drawn".to_owned()),
    };
    Ok(Tokens { ids: ids.iter().copied().cycle().take(count).collect(), source })
}

/// 4,096 ids, by a rule that never changes.
fn drawn(vocab: usize) -> Vec<u32> {
    let mut state = 1u64;
    let mut next = || {
        // Knuth's constants; the low bits of such a generator repeat soon.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    };
    (0..4096).map(|_| next()).collect()
}

/// The ids that `path` lists as a JSON array.
pub fn of_file(path: &Path, arch: &Arch) -> Result<Tokens, Failure> {
    let name = path.display();
    let cannot =
        |cause: &dyn std::fmt::Display| Failure::usage(format!("cannot read token ids from {name}")).cause(cause);
    let file = std::fs::File::open(path).map_err(|e| cannot(&e))?;
    let mut text = String::new();
    file.take(MAX_IDS_FILE_BYTES + 1).read_to_string(&mut text).map_err(|e| cannot(&e))?;
    if text.len() as u64 > MAX_IDS_FILE_BYTES {
        return Err(cannot(&format!("it is longer than {MAX_IDS_FILE_BYTES} bytes")));
    }
    let ids: Vec<u32> = serde_json::from_str(&text)
        .map_err(|e| cannot(&e).hint("it must be one JSON list of token ids, such as [17, 4, 256]"))?;
    Ok(Tokens { ids: prompt::check_ids(ids, arch)?, source: format!("{name}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_ids_are_the_same_everywhere_and_within_the_vocabulary() {
        let ids = drawn(1000);
        assert!(ids.len() == 4096 && ids.iter().all(|&id| id < 1000));
        // The first state is the sum of the two constants: 7806831264735756412, and 908834774 without its low bits.
        assert_eq!(ids[0], 774);
        let mut different = ids.clone();
        different.sort_unstable();
        different.dedup();
        assert!(different.len() > 900, "{} different ids", different.len());
    }
}
