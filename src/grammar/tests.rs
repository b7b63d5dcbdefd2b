use std::path::Path;

use proptest::prelude::*;

use super::*;

/// Ends an answer of the bundled model.
const END: u32 = 4084;

fn tokenizer() -> Arc<Tokenizer> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales");
    Arc::new(Tokenizer::open(&dir).unwrap())
}

fn compiled(source: &Source) -> Result<Grammar, GrammarError> {
    Grammars::new(tokenizer(), &[END]).unwrap().compile(source)
}

fn gbnf(text: &str) -> Source {
    Source::Gbnf(text.to_owned())
}

fn lark(text: &str) -> Source {
    Source::Lark(text.to_owned())
}

/// Whether `text`, cut into tokens of single bytes as far as there are any, is wholly described.
fn describes(source: &Source, text: &str) -> bool {
    let (tokenizer, mut grammar) = (tokenizer(), compiled(source).unwrap());
    let byte = |byte: u8| (0..tokenizer.vocab_size() as u32).find(|&id| tokenizer.token_bytes(id) == [byte]).unwrap();
    text.bytes().all(|b| grammar.accept(byte(b)).is_ok()) && grammar.is_whole()
}

#[test]
fn gbnf_describes_what_it_says() {
    let arithmetic = "root ::= sum\nsum ::= term ([-+] term)*\nterm ::= number | \"(\" sum \")\"\nnumber ::= [0-9]{1,3} (\".\" [0-9]+)?";
    let list = "root ::= \"[\" ws (value (\",\" ws value)*)? \"]\"\nvalue ::= root | string ws\nstring ::= \"\\\"\" [^\"\\\\]* \"\\\"\"\nws ::= [ \\n]*";
    for (grammar, yes, no) in [
        ("root ::= \"yes\" | \"no\"", &["yes", "no"][..], &["y", "yesno", "maybe", ""][..]),
        ("root ::= [a-c]{2,4} .", &["abz", "abcaé", "aa\n"], &["az", "abcabz", "ab"]),
        ("root ::= (\"a\" | \"ab\") (\"c\" | \"bcd\")", &["ac", "abc", "abcd", "abbcd"], &["ab", "abcdd"]),
        (arithmetic, &["1", "12.5+(3-4)", "((7))"], &["", "1+", "1234", "(1", "1)"]),
        (list, &["[]", "[ \"a\", [\"é\" , []]]", "[\"\"]"], &["[", "[,]", "\"a\"", "[\"a\"\"b\"]"]),
        ("root ::= \"\\\"\\u00e9\\x41\"", &["\"éA"], &["\"A"]),
        ("root ::= x x?\nx ::= \"a\" y\ny ::= \"b\" x | \"c\"", &["ac", "abac", "acac"], &["ab", "acacac"]),
    ] {
        yes.iter().for_each(|text| assert!(describes(&gbnf(grammar), text), "{grammar:?} has {text:?}"));
        no.iter().for_each(|text| assert!(!describes(&gbnf(grammar), text), "{grammar:?} has no {text:?}"));
    }
}

#[test]
fn what_cannot_be_followed_is_refused_by_name() {
    let schema = |text: &str| Source::JsonSchema(serde_json::from_str(text).unwrap());
    for (source, words) in [
        (
            schema(r#"{"type":"object","if":{"required":["a"]},"unevaluatedProperties":false}"#),
            &["if", "unevaluated"][..],
        ),
        (schema(r#"{"type":"strnig"}"#), &["strnig"]),
        (schema("3"), &["a JSON schema is an object"]),
        (schema(r#"{"$ref":"http://example.com/x"}"#), &["http://example.com/x"]),
        (schema("false"), &["a JSON schema is an object"]),
        (schema(r#"{"type":"integer","minimum":5,"maximum":3}"#), &[""]),
        (lark("start: missing"), &["missing"]),
        (lark("start: \"a"), &[""]),
        (lark(""), &[""]),
        (gbnf("root ::= missing"), &["line 1", "missing"]),
    ] {
        let error = compiled(&source).map(|_| ()).expect_err(&format!("{source:?}")).to_string();
        assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{source:?}: {error}");
    }
}

#[test]
fn control_tokens_come_where_the_grammar_names_them_and_nowhere_else() {
    let tokenizer = tokenizer();
    let special: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_special(id)).collect();
    let mut anything = compiled(&lark("start: /(.|\\n)*/")).unwrap();
    let mask = anything.allowed().unwrap().to_vec();
    let allows = |id: u32| crate::engine::constraint::allows(&mask, id as usize);
    let among: Vec<u32> = special.iter().copied().filter(|&id| allows(id)).collect();
    assert_eq!(among, [END], "an empty answer is one");
    let ordinary = (0..tokenizer.vocab_size() as u32).filter(|&id| allows(id)).count();
    assert!(ordinary > tokenizer.vocab_size() - special.len() - 200, "{ordinary}");
    let mut named = compiled(&lark("start: <|user|> \"x\"")).unwrap();
    assert_eq!(named.forced().unwrap()[0], tokenizer.control().id("<|user|>").unwrap());
}

/// Answers `source` with tokens that `choose` picks of those allowed, where nothing is forced, up to 400; the ids, and
/// whether the end was reached.
fn answered(source: &Source, mut choose: impl FnMut(&[u32]) -> u32) -> (Vec<u32>, bool) {
    let mut grammar = compiled(source).unwrap();
    let mut ids = vec![];
    while ids.len() < 400 {
        let forced = grammar.forced().unwrap().to_vec();
        let id = match forced.first() {
            Some(&id) => id,
            None => {
                let mask = grammar.allowed().unwrap();
                let allowed: Vec<u32> = (0..32 * mask.len() as u32)
                    .filter(|&id| crate::engine::constraint::allows(mask, id as usize))
                    .collect();
                choose(&allowed)
            }
        };
        if id == END {
            return (ids, true);
        }
        grammar.accept(id).unwrap();
        ids.push(id);
        if grammar.has_ended() {
            return (ids, true);
        }
    }
    (ids, false)
}

fn person() -> Source {
    Source::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "kind": { "enum": ["fox", "hen", "farmer's \"dog\" 🦊"] },
            "friends": { "type": "array", "items": { "type": "boolean" }, "maxItems": 3 }
        },
        "required": ["name", "age", "kind", "friends"],
        "additionalProperties": false
    }))
}

#[test]
fn what_is_forced_is_cut_as_the_tokenizer_cuts_it() {
    let tokenizer = tokenizer();
    // The text is known, but not whether it goes on: what could be part of a longer token is left open.
    let mut only = compiled(&lark("start: \"Once upon a time there was a fox\"")).unwrap();
    let forced = only.forced().unwrap().to_vec();
    let canonical = tokenizer.encode_plain("Once upon a time there was a fox").unwrap();
    assert!(forced.len() + 1 >= canonical.len() && canonical.starts_with(&forced), "{forced:?} of {canonical:?}");
    let mut object = compiled(&person()).unwrap();
    let forced = object.forced().unwrap().to_vec();
    let canonical = tokenizer.encode_plain("{\"name\": \"").unwrap();
    assert!(forced.len() > 2 && canonical.starts_with(&forced), "{forced:?} of {canonical:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn whatever_is_chosen_of_what_is_allowed_is_of_the_schema(mut seed in any::<u64>()) {
        let (ids, ended) = answered(&person(), |allowed| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            allowed[(seed >> 33) as usize % allowed.len()]
        });
        prop_assert!(ended);
        let tokenizer = tokenizer();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).to_vec()).collect();
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        let fields = value.as_object().unwrap();
        prop_assert!(fields.keys().eq(["name", "age", "kind", "friends"]), "{}", value);
        prop_assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        prop_assert!(value["age"].as_u64().unwrap() <= 150);
        prop_assert!(["fox", "hen", "farmer's \"dog\" 🦊"].contains(&value["kind"].as_str().unwrap()));
        let friends = value["friends"].as_array().unwrap();
        prop_assert!(friends.len() <= 3 && friends.iter().all(Value::is_boolean));
    }
}
