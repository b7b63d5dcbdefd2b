//! A model's vocabulary as the parser of grammars wants it: a trie of the bytes of tokens, and how text is cut into tokens.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::limits::{GRAMMAR_TOKEN_BYTES_MAX, GRAMMAR_VOCABULARY_BYTES_MAX};
use crate::model::tokenizer::Tokenizer;

/// The vocabulary of a tokenizer.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl Vocabulary {
    /// That of `tokenizer`, in which `stop_ids` end an answer.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Vocabulary, String> {
        let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32).map(|id| word(&tokenizer, id)).collect();
        let bytes: usize = words.iter().map(Vec::len).sum();
        if bytes > GRAMMAR_VOCABULARY_BYTES_MAX {
            return Err(format!("its tokens have {bytes} bytes, and a grammar takes {GRAMMAR_VOCABULARY_BYTES_MAX}"));
        }
        let ends: Vec<TokenId> = stop_ids.iter().copied().filter(|&id| (id as usize) < words.len()).collect();
        let info = TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or(INVALID_TOKEN));
        let trie = TokTrie::from(&info, &words);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
        Ok(Vocabulary { trie, tokenizer })
    }
}

/// What a token is in the trie; nothing is of one that no grammar leads to.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    if bytes.len() > GRAMMAR_TOKEN_BYTES_MAX {
        return Vec::new();
    }
    // A control token is no text, whatever its name is: only a grammar that names it leads to it.
    if tokenizer.is_special(id) {
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
    }
    // That byte begins no character, and here a control token.
    if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) { Vec::new() } else { bytes.to_vec() }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        // What cannot be cut is not forced.
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode_plain(text).unwrap_or_default())
    }
}
