//! A tokenizer for weights that mean nothing: the 256 bytes, and no merges.

use serde_json::{Map, Value, json};

/// A chat template that adds nothing to what is said.
pub(crate) const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}\n";

/// `tokenizer.json` in which every byte is the token of its own number.
pub(crate) fn byte_level() -> Value {
    let vocabulary: Map<String, Value> =
        names().iter().enumerate().map(|(byte, name)| (name.to_string(), json!(byte))).collect();
    let stage = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": stage(false),
        "post_processor": null,
        "decoder": stage(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": [],
        },
    })
}

/// The characters by which byte-level tokenizers write bytes: printable ones stand for themselves, the others follow
/// from U+0100 on in order.
fn names() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_the_names_of_published_tokenizers() {
        let names = names();
        assert_eq!(
            [b'a', b' ', b'\n', 0, 0xad, 0xff].map(|byte| names[usize::from(byte)]),
            ['a', 'Ġ', 'Ċ', 'Ā', 'Ń', 'ÿ']
        );
        let distinct: std::collections::BTreeSet<char> = names.into_iter().collect();
        assert_eq!(distinct.len(), 256);
    }
}
