//! The tokenizer of the bundled model against ids and texts made by transformers.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use millstream::engine::stop::{Pushed, StopMatcher};
use millstream::model::detokenizer::Detokenizer;
use millstream::model::tokenizer::Tokenizer;
use serde_json::Value;

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")
}

fn reference() -> Vec<(String, Value)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/glm-tales-ids.json");
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["prompts"].as_object().unwrap().clone().into_iter().collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new();
    ids.iter().map(|id| detokenizer.push(tokenizer.token_bytes(*id)).to_owned()).collect()
}

#[test]
fn text_has_the_ids_of_the_reference() {
    let tokenizer = Tokenizer::open(&bundled()).unwrap();
    let prompts = reference();
    assert_eq!(prompts.len(), 6);
    for (name, prompt) in &prompts {
        let text = prompt["text"].as_str().unwrap();
        let expected = ids(&prompt["ids"]);
        if name == "chat" {
            assert_eq!(tokenizer.encode_raw(text).unwrap(), expected, "{name}");
            assert!(tokenizer.encode_plain(text).unwrap().iter().all(|id| !tokenizer.is_special(*id)));
            continue;
        }
        let special = if expected[0] == 4086 { 2 } else { 0 };
        assert_eq!(tokenizer.encode_plain(text).unwrap(), expected[special..], "{name}");
        assert_eq!(decode(&tokenizer, &expected[special..]), text, "{name}");
        if special == 2 {
            assert_eq!(tokenizer.encode_raw(&format!("[gMASK]<sop>{text}")).unwrap(), expected, "{name}");
        }
    }
}

#[test]
fn greedy_ids_decode_to_the_text_of_the_reference() {
    let tokenizer = Tokenizer::open(&bundled()).unwrap();
    for (name, prompt) in reference() {
        assert_eq!(decode(&tokenizer, &ids(&prompt["greedy"])), prompt["greedy_text"].as_str().unwrap(), "{name}");
    }
}

/// A tokenizer put together as that of OLMoE is, by `scripts/neox_tokenizer.py`: NFC first, no blank in front, runs of blanks
/// as added tokens that are not special, nothing before or after a text.
#[test]
fn text_has_the_ids_of_the_reference_in_the_tokenizer_of_the_other_family() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/neox-tokenizer");
    let tokenizer = Tokenizer::open(&dir).unwrap();
    let record: Value = serde_json::from_slice(&std::fs::read(dir.join("ids.json")).unwrap()).unwrap();
    assert_eq!(tokenizer.vocab_size() as u64, record["vocab"].as_u64().unwrap());
    let special = ids(&record["special"]);
    assert!((0..tokenizer.vocab_size() as u32).all(|id| tokenizer.is_special(id) == special.contains(&id)));
    let texts = record["texts"].as_object().unwrap();
    assert_eq!(texts.len(), 11);
    for (name, expected) in texts {
        let (text, decoded) = (expected["text"].as_str().unwrap(), expected["decoded"].as_str().unwrap());
        let expected = ids(&expected["ids"]);
        assert_eq!(tokenizer.encode_raw(text).unwrap(), expected, "{name}");
        assert_eq!(decode(&tokenizer, &expected), decoded, "{name}");
        // What a user writes is text, whatever it looks like.
        let plain = tokenizer.encode_plain(text).unwrap();
        assert!(plain.iter().all(|id| !special.contains(id)), "{name}");
        assert_eq!(decode(&tokenizer, &plain), decoded, "{name}");
        assert_eq!(plain == expected, expected.iter().all(|id| !special.contains(id)), "{name}");
    }
}

#[test]
fn every_token_has_its_bytes() {
    let tokenizer = Tokenizer::open(&bundled()).unwrap();
    let library = tokenizers::Tokenizer::from_file(bundled().join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 4096);
    let mut single = [0; 256];
    for id in 0..4096 {
        let bytes = tokenizer.token_bytes(id);
        assert_eq!(String::from_utf8_lossy(bytes), library.decode(&[id], false).unwrap(), "token {id}");
        assert_eq!(tokenizer.is_special(id), id >= 4084, "token {id}");
        if let [byte] = bytes {
            single[*byte as usize] += 1;
        }
    }
    assert_eq!(single, [1; 256]);
    assert_eq!(tokenizer.token_bytes(4096), b"");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}

#[test]
fn a_fox_split_over_tokens_streams_whole() {
    let tokenizer = Tokenizer::open(&bundled()).unwrap();
    let text = "你好 🦊!";
    let ids = tokenizer.encode_plain(text).unwrap();
    assert!(ids.len() > text.chars().count(), "some character spans tokens: {ids:?}");
    let mut detokenizer = Detokenizer::new();
    let mut streamed = String::new();
    for (i, id) in ids.iter().enumerate() {
        streamed.push_str(detokenizer.push(tokenizer.token_bytes(*id)));
        let all: Vec<u8> = ids[..=i].iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
        let whole = text.char_indices().map(|(at, c)| at + c.len_utf8()).filter(|end| *end <= all.len()).max();
        assert_eq!(streamed, text[..whole.unwrap_or(0)]);
    }
    assert_eq!(streamed, text);
}

#[test]
fn a_stop_string_is_found_over_token_boundaries() {
    let tokenizer = Tokenizer::open(&bundled()).unwrap();
    let ids = ids(&reference().into_iter().find(|(name, _)| name == "medium").unwrap().1["greedy"]);
    let mut detokenizer = Detokenizer::new();
    let mut stops = StopMatcher::new(vec!["y off.\"\n\n\"I".into(), "the horse".into()]).unwrap();
    let mut shown = String::new();
    let mut used = 0;
    for id in &ids {
        used += 1;
        match stops.push(detokenizer.push(tokenizer.token_bytes(*id))) {
            Pushed::Show(text) => shown.push_str(text),
            Pushed::Stop(text) => {
                shown.push_str(text);
                break;
            }
        }
    }
    assert_eq!(shown, "and I am going to get a little wa");
    assert!(used < ids.len());
    assert_eq!(stops.matched(), Some("y off.\"\n\n\"I"));
}

#[test]
fn truncation_and_padding_in_the_file_do_not_touch_a_prompt() {
    let mut json: Value = serde_json::from_slice(&std::fs::read(bundled().join("tokenizer.json")).unwrap()).unwrap();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    });
    json["padding"] = serde_json::json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 4084,
        "pad_type_id": 0, "pad_token": "<|endoftext|>"
    });
    let tokenizer = Tokenizer::parse(&serde_json::to_vec(&json).unwrap()).unwrap();
    let plain = Tokenizer::open(&bundled()).unwrap();
    let text = "Once upon a time there was a little girl.";
    assert_eq!(tokenizer.encode_plain(text).unwrap(), plain.encode_plain(text).unwrap());
}

#[test]
fn visible_added_tokens_are_control_tokens_even_when_not_marked_special() {
    let mut json: Value = serde_json::from_slice(&std::fs::read(bundled().join("tokenizer.json")).unwrap()).unwrap();
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["special"] = Value::Bool(false);
    }
    let tokenizer = Tokenizer::parse(&serde_json::to_vec(&json).unwrap()).unwrap();
    assert!(tokenizer.encode_plain("a</think>b<|user|>").unwrap().iter().all(|id| *id < 4084));
    assert_eq!(tokenizer.encode_raw("</think><|user|>").unwrap(), [4095, 4091]);
    assert!(tokenizer.is_special(4095));
}

#[test]
fn a_missing_tokenizer_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::open(dir.path()).err().unwrap();
    assert!(error.to_string().ends_with("has no tokenizer.json"), "{error}");
    assert!(error.hint().contains("--ids"));
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let error = Tokenizer::open(dir.path()).err().unwrap();
    assert!(error.to_string().contains("not a usable tokenizer"), "{error}");
}
