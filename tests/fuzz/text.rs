//! Tokenizers and chat templates.

use crate::checkpoint::rounds;
use millstream::model::template::{ChatTemplate, Message, RenderOptions, Role};
use millstream::model::tokenizer::Tokenizer;
use std::fs;
use std::path::Path;

const TEXT: &str = "Once </think> upon <|user|> a\n\n time 42 é 你好 🦊 \u{0}\u{f0000}";

#[test]
fn tokenizers() {
    let json =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-glm-moe-dsa/tokenizer.json")).unwrap();
    let mut accepted = 0;
    rounds(20_000, |mutator| {
        let mut json = json.clone();
        mutator.mutate(&mut json);
        let Ok(tokenizer) = Tokenizer::parse(&json) else { return };
        accepted += 1;
        // A damaged vocabulary may lack tokens; whatever ids come out have bytes.
        if let Ok(ids) = tokenizer.encode_plain(TEXT) {
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()));
        }
        let _ = tokenizer.encode_raw(TEXT);
        for id in 0..tokenizer.vocab_size() as u32 {
            std::hint::black_box(tokenizer.token_bytes(id));
        }
    });
    assert!(accepted > 100, "only {accepted} mutants were tokenizers");
}

#[test]
fn templates() {
    let source = fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales/chat_template.jinja")).unwrap();
    let control =
        Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap().control().clone();
    let options = RenderOptions { enable_thinking: Some(true), add_generation_prompt: true };
    let mut accepted = 0;
    rounds(4_000, |mutator| {
        let mut source = source.clone();
        mutator.mutate(&mut source);
        let Ok(template) = ChatTemplate::compile(String::from_utf8_lossy(&source).into_owned()) else { return };
        let messages = [Message::new(Role::System, TEXT), Message::new(Role::User, TEXT)];
        let Ok(rendered) = template.render(&messages, &options, &control) else { return };
        accepted += 1;
        // What people wrote never becomes a control token, whatever the template does with it.
        let control_pieces = rendered.pieces.iter().filter(|piece| piece.control);
        let written = source.windows(8).filter(|w| w == b"</think>" || w == b"<|user|>").count();
        assert!(control_pieces.filter(|p| p.text == "</think>" || p.text == "<|user|>").count() <= 2 * written);
    });
    assert!(accepted > 100, "only {accepted} mutants were templates");
}
