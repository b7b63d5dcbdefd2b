//! Answers that are held to a grammar, as people ask for them.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::path::{Path, PathBuf};
use std::process::Output;

use program::{done, json, program, refused, stderr};
use serde_json::Value;
use tempfile::TempDir;

const SCHEMA: &str = r#"{
  "type": "object",
  "properties": {
    "animal": {"enum": ["fox", "hen", "wolf"]},
    "name": {"type": "string", "maxLength": 10},
    "age": {"type": "integer", "minimum": 0, "maximum": 30},
    "friends": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
  },
  "required": ["animal", "name", "age", "friends"],
  "additionalProperties": false
}"#;

struct Home(TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn run(&self, flags: &[&str]) -> Output {
        let mut command = program(self.0.path());
        command.args(["run", "--usage", "off", "-p", "Tell me of an animal.", "-m"]);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales"));
        command.args(flags).output().unwrap()
    }
}

/// What the schema says, looked at by hand.
#[track_caller]
fn is_of_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap();
    let fields = value.as_object().unwrap();
    assert!(fields.keys().eq(["animal", "name", "age", "friends"]), "{value}");
    assert!(["fox", "hen", "wolf"].contains(&value["animal"].as_str().unwrap()), "{value}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 10, "{value}");
    assert!(value["age"].as_u64().unwrap() <= 30, "{value}");
    let friends = value["friends"].as_array().unwrap();
    assert!(friends.len() <= 2 && friends.iter().all(Value::is_boolean), "{value}");
}

#[test]
fn fifty_seeds_give_json_of_the_schema_and_drafts_change_no_token() {
    let home = Home::new();
    let schema = home.file("schema.json", SCHEMA);
    for seed in 0..50 {
        let seed = seed.to_string();
        let common = ["--json", "-s", &seed, "--temp", "1", "--top-p", "1", "--json-schema", schema.to_str().unwrap()];
        let stats = json(&done(home.run(&common)));
        is_of_schema(stats["text"].as_str().unwrap());
        assert_eq!((&stats["finish_reason"], &stats["grammar"]["complete"]), (&"stop".into(), &true.into()));
        assert_eq!(stats["draft"]["accepted"], stats["draft"]["drafted"], "what is forced is right");
        assert!(stats["draft"]["forced"].as_u64().unwrap() > 0);
        if seed.ends_with('7') {
            let plain = json(&done(home.run(&[&common[..], &["--draft", "off"]].concat())));
            assert_eq!(plain["ids"], stats["ids"]);
            assert!(plain["draft"].is_null());
            let both = json(&done(home.run(&[&common[..], &["--draft", "ngram"]].concat())));
            assert_eq!(both["ids"], stats["ids"]);
        }
    }
}

#[test]
fn grammars_of_both_notations_hold_the_answer() {
    let home = Home::new();
    for (name, text) in [
        ("gbnf", "root ::= \"The \" animal \" is \" [1-9] [0-9]?\nanimal ::= \"fox\" | \"hen\""),
        ("lark", "start: \"The \" (\"fox\" | \"hen\") \" is \" /[1-9][0-9]?/"),
    ] {
        let file = home.file(name, text);
        let stats = json(&done(home.run(&["--json", "-s", "3", "--grammar", file.to_str().unwrap()])));
        let said = stats["text"].as_str().unwrap();
        let rest = said.strip_prefix("The fox is ").or(said.strip_prefix("The hen is ")).unwrap();
        assert!(rest.parse::<u8>().is_ok_and(|number| (1..=99).contains(&number)), "{said}");
    }
}

#[test]
fn an_answer_that_ends_before_its_grammar_says_so() {
    let home = Home::new();
    let output = home.run(&["-n", "3", "-j", SCHEMA]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("the answer is not whole by its grammar: its length ended it"));
    let stats = json(&done(home.run(&["--json", "-n", "3", "-j", SCHEMA])));
    assert_eq!((&stats["grammar"]["complete"], &stats["finish_reason"]), (&false.into(), &"length".into()));
}

#[test]
fn a_grammar_that_only_drafts_changes_no_token() {
    let home = Home::new();
    let plain = json(&done(home.run(&["--json", "-s", "5", "-n", "20"])));
    let file = home.file("wrong.gbnf", "root ::= \"no such answer at all\"");
    let flags = ["--json", "-s", "5", "-n", "20", "--draft", "grammar", "--grammar", file.to_str().unwrap()];
    let guided = json(&done(home.run(&flags)));
    assert_eq!(guided["ids"], plain["ids"]);
    assert_eq!(guided["grammar"]["constrains"], false);
    let text = plain["text"].as_str().unwrap();
    let right = home.file("right.gbnf", &format!("root ::= {}", Value::from(text)));
    let flags = ["--json", "-s", "5", "-n", "20", "--draft", "grammar", "--grammar", right.to_str().unwrap()];
    let guided = json(&done(home.run(&flags)));
    assert_eq!(guided["ids"], plain["ids"]);
    assert!(guided["draft"]["accepted"].as_u64().unwrap() > 0, "{}", guided["draft"]);
}

#[test]
fn what_cannot_be_followed_is_refused() {
    let home = Home::new();
    let gbnf = home.file("bad.gbnf", "root ::= missing");
    let gbnf = gbnf.to_str().unwrap();
    for (flags, words) in [
        (&["-j", "{"][..], &["the JSON schema of -j is not JSON"][..]),
        (&["-j", r#"{"type":"object","unevaluatedProperties":false}"#], &["unevaluatedProperties"]),
        (&["--json-schema", "/no/such/file"], &["cannot read the grammar from /no/such/file"]),
        (&["--grammar", gbnf], &["line 1", "no rule called missing"]),
        (&["--grammar", gbnf, "-j", "{}"], &["cannot be used with"]),
        (&["--draft", "grammar"], &["--draft grammar: there is no grammar"]),
    ] {
        refused(&home.run(flags), 2, words);
    }
}
