//! Text to token ids and back to bytes, from `tokenizer.json`.
//!
//! Text is never trusted to be a control token. Every visible added token of the vocabulary (`<|user|>`, `</think>`,
//! `[gMASK]`, ...) is a control token; only a rendered chat template, or a caller who says so, can produce one.
//! Text that merely spells one is encoded like any other text.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use tokenizers::AddedToken;

use super::template::Rendered;
use crate::limits::{MAX_TOKENIZER_BYTES, MAX_VOCAB};

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not there.
    #[error("{} has no tokenizer.json", dir.display())]
    Missing {
        /// The model directory.
        dir: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The file is larger than any tokenizer.
    #[error("{} has {bytes} bytes, more than the {MAX_TOKENIZER_BYTES} a tokenizer may have", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: u64,
    },
    /// The file is not a tokenizer, or not one of the kind this program knows.
    #[error("{} is not a usable tokenizer", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        why: Why,
    },
    /// Text could not be encoded.
    #[error("the text cannot be encoded")]
    Encode(#[source] Why),
}

/// A cause told in words by a library.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Why(pub String);

impl TokenizerError {
    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            TokenizerError::Missing { .. } => {
                "copy tokenizer.json from the model's repository beside its shards, or give token ids with --ids"
            }
            TokenizerError::Read { source, .. } => match source.kind() {
                std::io::ErrorKind::PermissionDenied => "permission: this user may not read it",
                std::io::ErrorKind::InvalidInput => "put tokenizer.json of the model's repository in its place",
                _ => "check the drive's health (dmesg), or download tokenizer.json again",
            },
            TokenizerError::TooLarge { .. } | TokenizerError::Invalid { .. } => {
                "download tokenizer.json again; it must be a byte-level BPE tokenizer of the `tokenizers` library"
            }
            TokenizerError::Encode(_) => "the tokenizer has no token for some byte of the text",
        }
    }
}

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    control: ControlTokens,
    /// `bytes[ends[id - 1]..ends[id]]` are the bytes of token `id`.
    ends: Vec<u32>,
    bytes: Vec<u8>,
    special: Vec<bool>,
    /// Bytes of the longest token.
    longest: usize,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of the model directory `dir`.
    pub fn open(dir: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let length = match std::fs::metadata(&path) {
            // Opening a pipe would wait for a writer.
            Ok(meta) if !meta.is_file() => {
                let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no regular file");
                return Err(TokenizerError::Read { path, source });
            }
            Ok(meta) => meta.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(TokenizerError::Missing { dir: dir.to_owned() });
            }
            Err(source) => return Err(TokenizerError::Read { path, source }),
        };
        if length > MAX_TOKENIZER_BYTES {
            return Err(TokenizerError::TooLarge { path, bytes: length });
        }
        let json = match std::fs::read(&path) {
            Ok(json) => json,
            Err(source) => return Err(TokenizerError::Read { path, source }),
        };
        Tokenizer::parse(&json).map_err(|why| TokenizerError::Invalid { path, why })
    }

    /// Builds a tokenizer from the bytes of a `tokenizer.json`.
    pub fn parse(json: &[u8]) -> Result<Tokenizer, Why> {
        let mut inner = parse_untrusted(json)?;
        if inner.get_vocab_size(true) == 0 {
            return Err(Why("its vocabulary is empty".into()));
        }
        if !is_byte_level(&inner) {
            return Err(Why("it is not byte-level (no ByteLevel pre-tokenizer or decoder)".into()));
        }
        // A file may ask for truncation or padding; a prompt is neither cut nor filled.
        inner.with_truncation(None).map_err(|e| Why(e.to_string()))?;
        inner.with_padding(None);

        let mut added: Vec<(u32, AddedToken)> = inner.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        // Added tokens that are only white space (GPT-NeoX has runs of blanks) are ordinary text.
        let visible: Vec<(u32, AddedToken)> =
            added.into_iter().filter(|(_, token)| !token.content.trim().is_empty()).collect();
        let as_special = visible.iter().map(|(_, token)| AddedToken { special: true, ..token.clone() });
        inner.add_special_tokens(as_special).map_err(|e| Why(e.to_string()))?;
        inner.set_encode_special_tokens(true);

        let control = ControlTokens::new(visible.into_iter().map(|(id, token)| (token.content, id)).collect());
        let (ends, bytes, special) = token_table(&inner, &control)?;
        let starts = [0].iter().chain(&ends);
        let longest = starts.zip(&ends).map(|(start, end)| end - start).max().unwrap_or(0) as usize;
        Ok(Tokenizer { inner, control, ends, bytes, special, longest })
    }

    /// Ids of text as text: whatever it spells, no control token comes out, and nothing is added.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.append_plain(text, &mut ids)?;
        Ok(ids)
    }

    /// Ids of a prompt its author wrote by hand: control tokens it spells are control tokens; nothing is added.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.encode_rendered(&Rendered { pieces: self.control.split(text) })
    }

    /// Ids of a rendered chat: its control pieces are control tokens, everything else is text.
    pub fn encode_rendered(&self, rendered: &Rendered) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for piece in &rendered.pieces {
            match self.control.id(&piece.text) {
                Some(id) if piece.control => ids.push(id),
                _ => self.append_plain(&piece.text, &mut ids)?,
            }
        }
        Ok(ids)
    }

    /// Bytes that token `id` stands for; empty for ids without a token. Control tokens have the bytes of their name.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let Some(&end) = self.ends.get(id as usize) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether `id` is a control token, whose name is never shown as text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id that has a token.
    pub fn vocab_size(&self) -> usize {
        self.ends.len()
    }

    /// Tells vocabularies apart: in those with the same number a token is the same text.
    pub fn fingerprint(&self) -> u64 {
        let ends: Vec<u8> = self.ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        let special: Vec<u8> = self.special.iter().map(|special| u8::from(*special)).collect();
        let seeded = |seed, bytes: &[u8]| xxhash_rust::xxh3::xxh3_64_with_seed(bytes, seed);
        [&ends[..], &special, &self.bytes].into_iter().fold(0, seeded)
    }

    /// Least tokens that `bytes` bytes of text can have; 1 where text may shrink before it is cut into tokens.
    pub fn least_tokens(&self, bytes: usize) -> usize {
        match self.inner.get_normalizer() {
            Some(_) => bytes.min(1),
            None => bytes.div_ceil(self.longest.max(1)),
        }
    }

    /// The control tokens of the vocabulary.
    pub fn control(&self) -> &ControlTokens {
        &self.control
    }

    fn append_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        if !text.is_empty() {
            let encoded =
                self.inner.encode_fast(text, false).map_err(|e| TokenizerError::Encode(Why(e.to_string())))?;
            ids.extend_from_slice(encoded.get_ids());
        }
        Ok(())
    }
}

/// The names of control tokens and where they occur in text.
#[derive(Clone, Debug, Default)]
pub struct ControlTokens {
    /// Longest name first, so that the first that fits is the one meant.
    names: Vec<(String, u32)>,
}

impl ControlTokens {
    /// Control tokens from (name, id) pairs. Empty names are ignored.
    pub fn new(mut names: Vec<(String, u32)>) -> ControlTokens {
        names.retain(|(name, _)| !name.is_empty());
        names.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
        ControlTokens { names }
    }

    /// Id of the control token called `name`.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.names.iter().find(|(n, _)| n == name).map(|(_, id)| *id)
    }

    /// Name of the control token `id`.
    pub fn name(&self, id: u32) -> Option<&str> {
        self.names.iter().find(|(_, other)| *other == id).map(|(name, _)| name.as_str())
    }

    /// Characters that a control token can begin with, sorted.
    pub fn first_chars(&self) -> Vec<char> {
        let set: HashSet<char> = self.names.iter().filter_map(|(n, _)| n.chars().next()).collect();
        let mut chars: Vec<char> = set.into_iter().collect();
        chars.sort_unstable();
        chars
    }

    /// Cuts `text` into control tokens and the text between them; the leftmost, then the longest name wins.
    pub fn split(&self, text: &str) -> Vec<super::template::Piece> {
        let first = self.first_chars();
        let mut pieces = Vec::new();
        let (mut text_from, mut at) = (0, 0);
        while let Some(offset) = text[at..].find(|c| first.binary_search(&c).is_ok()) {
            at += offset;
            let Some((name, _)) = self.names.iter().find(|(n, _)| text[at..].starts_with(n.as_str())) else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if text_from < at {
                pieces.push(super::template::Piece { text: text[text_from..at].to_owned(), control: false });
            }
            pieces.push(super::template::Piece { text: name.clone(), control: true });
            at += name.len();
            text_from = at;
        }
        if text_from < text.len() {
            pieces.push(super::template::Piece { text: text[text_from..].to_owned(), control: false });
        }
        pieces
    }
}

/// The library unwraps in places where a damaged file gets it to. Broken JSON, the usual damage, is found before; what
/// panics after that is caught and is an error like any other.
fn parse_untrusted(json: &[u8]) -> Result<tokenizers::Tokenizer, Why> {
    serde_json::from_slice::<Wellformed>(json).map_err(|e| Why(format!("it is not JSON: {e}")))?;
    match std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json)) {
        Ok(parsed) => parsed.map_err(|e| Why(e.to_string())),
        Err(_) => Err(Why("the tokenizer library fails on it".into())),
    }
}

/// JSON that is read in full, strings decoded, and forgotten. (serde's `IgnoredAny` does not decode strings.)
struct Wellformed;

impl<'de> serde::Deserialize<'de> for Wellformed {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Wellformed, D::Error> {
        deserializer.deserialize_any(Wellformed)
    }
}

impl<'de> serde::de::Visitor<'de> for Wellformed {
    type Value = Wellformed;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_str<E>(self, _: &str) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_unit<E>(self) -> Result<Wellformed, E> {
        Ok(Wellformed)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut items: A) -> Result<Wellformed, A::Error> {
        while items.next_element::<Wellformed>()?.is_some() {}
        Ok(Wellformed)
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut entries: A) -> Result<Wellformed, A::Error> {
        while entries.next_entry::<Wellformed, Wellformed>()?.is_some() {}
        Ok(Wellformed)
    }
}

fn is_byte_level(inner: &tokenizers::Tokenizer) -> bool {
    use tokenizers::{DecoderWrapper, PreTokenizerWrapper};
    fn pre(p: &PreTokenizerWrapper) -> bool {
        match p {
            PreTokenizerWrapper::ByteLevel(_) => true,
            PreTokenizerWrapper::Sequence(s) => s.as_ref().iter().any(pre),
            _ => false,
        }
    }
    inner.get_pre_tokenizer().is_some_and(pre) || matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
}

/// The character that stands for each byte in byte-level vocabularies: printable Latin-1 stands for itself, the other
/// 68 bytes are numbered from U+0100 on.
fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let byte = byte as u8;
        if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
            byte as char
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or('\u{FFFD}')
        }
    })
}

type TokenTable = (Vec<u32>, Vec<u8>, Vec<bool>);

fn token_table(inner: &tokenizers::Tokenizer, control: &ControlTokens) -> Result<TokenTable, Why> {
    let mut byte_of = std::collections::HashMap::with_capacity(256);
    for (byte, c) in byte_chars().into_iter().enumerate() {
        byte_of.insert(c, byte as u8);
    }
    let mut names: Vec<(u32, String)> = inner.get_vocab(true).into_iter().map(|(name, id)| (id, name)).collect();
    names.sort();
    let added = inner.get_added_tokens_decoder();
    let last = names.last().map_or(0, |(id, _)| *id as usize);
    if last >= MAX_VOCAB {
        return Err(Why(format!("token id {last} is beyond any real vocabulary")));
    }
    let size = last + 1;
    let (mut ends, mut bytes, mut special) = (Vec::with_capacity(size), Vec::new(), vec![false; size]);
    for (id, name) in &names {
        // Ids without a token, and a second name for the same id, add no bytes.
        if ends.len() > *id as usize {
            continue;
        }
        ends.resize(*id as usize, bytes.len() as u32);
        let decoded: Option<Vec<u8>> = name.chars().map(|c| byte_of.get(&c).copied()).collect();
        match decoded {
            Some(decoded) if !added.contains_key(id) => bytes.extend_from_slice(&decoded),
            _ => bytes.extend_from_slice(name.as_bytes()),
        }
        ends.push(bytes.len() as u32);
        special[*id as usize] = control.id(name) == Some(*id);
    }
    Ok((ends, bytes, special))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_characters_are_the_published_ones() {
        let chars = byte_chars();
        assert_eq!(chars[b' ' as usize], 'Ġ');
        assert_eq!(chars[b'\n' as usize], 'Ċ');
        assert_eq!(chars[0], 'Ā');
        assert_eq!(chars[0xAD], 'Ń');
        assert_eq!(chars[b'a' as usize], 'a');
        let distinct: HashSet<char> = chars.into_iter().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn control_tokens_split_leftmost_then_longest() {
        let control = ControlTokens::new(vec![("<a>".into(), 1), ("<a>b".into(), 2), ("[x]".into(), 3)]);
        let pieces: Vec<(String, bool)> =
            control.split("<<a>b[x]é<a").into_iter().map(|p| (p.text, p.control)).collect();
        let expected = [("<", false), ("<a>b", true), ("[x]", true), ("é<a", false)];
        assert_eq!(pieces, expected.map(|(t, c)| (t.to_owned(), c)));
    }

    #[test]
    fn things_that_are_not_tokenizers_are_refused() {
        for bad in ["", "{}", "[]", "{\"model\": 3}", "{\"version\":\"1.0\",\"model\":{\"type\":\"BPE\"}}"] {
            assert!(Tokenizer::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
