//! Questions with several answers, a JSON object a line, and how each is put to a model: as lm-eval does it.

use serde::Deserialize;
use serde_json::Value;

use crate::model::tokenizer::{Tokenizer, TokenizerError};

/// A question. Other keys of its object are not looked at.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Question {
    /// Shown with its result.
    #[serde(default)]
    pub id: Value,
    /// What comes before every answer.
    #[serde(alias = "query")]
    pub context: String,
    /// The answers.
    #[serde(alias = "options")]
    pub choices: Vec<String>,
    /// Which is right, counted from 0, where that is known.
    #[serde(default, alias = "gold", alias = "label")]
    pub answer: Option<usize>,
    /// Its line, counted from 1.
    #[serde(skip)]
    pub line: usize,
}

/// Reads the questions of a file, at most `most`. The error names the line.
pub fn parse(text: &str, most: Option<usize>) -> Result<Vec<Question>, String> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.take(most.unwrap_or(usize::MAX)).map(|(at, line)| question(at + 1, line)).collect()
}

fn question(line: usize, text: &str) -> Result<Question, String> {
    let bad = |why: String| format!("line {line}: {why}");
    let question: Question = serde_json::from_str(text).map_err(|e| bad(without_line(&e.to_string())))?;
    let (choices, answer) = (question.choices.len(), question.answer);
    if question.context.trim().is_empty() {
        return Err(bad("the context is empty".to_owned()));
    }
    if choices < 2 {
        return Err(bad(format!("{choices} choices, and it takes two to choose")));
    }
    if let Some(empty) = question.choices.iter().position(String::is_empty) {
        return Err(bad(format!("choice {empty} is empty")));
    }
    match answer {
        Some(answer) if answer >= choices => {
            Err(bad(format!("answer {answer}, and the choices are 0 to {}", choices - 1)))
        }
        _ => Ok(Question { line, ..question }),
    }
}

/// An error of serde_json without the line that it counts: each line is a text of its own.
fn without_line(error: &str) -> String {
    error.replace(" at line 1 column ", " at column ")
}

/// A question in token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub context: Vec<u32>,
    /// What follows it in each answer; none of them is empty.
    pub choices: Vec<Vec<u32>>,
}

impl Encoded {
    /// Tokens of the longest answer with what comes before it.
    pub fn longest(&self) -> usize {
        self.context.len() + self.choices.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Encodes a question as lm-eval does: blanks at the end of the context belong to the answer, the two are encoded together,
/// and what is beyond as many tokens as the context has alone is the answer's.
pub fn encode(question: &Question, delimiter: &str, tokenizer: &Tokenizer) -> Result<Encoded, TokenizerError> {
    let context = question.context.trim_end();
    let blanks = &question.context[context.len()..];
    let ids = tokenizer.encode_raw(context)?;
    let choices = question.choices.iter().map(|choice| {
        let whole = tokenizer.encode_raw(&format!("{context}{blanks}{delimiter}{choice}"))?;
        Ok(whole.get(ids.len()..).unwrap_or_default().to_vec())
    });
    Ok(Encoded { choices: choices.collect::<Result<_, TokenizerError>>()?, context: ids })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn questions_are_read_by_the_names_that_people_use() {
        let text = concat!(
            r#"{"id": 7, "context": "a", "choices": ["b", "c"], "answer": 1, "subject": "x"}"#,
            "\n\n",
            r#"{"query": "a", "options": ["b", "c"], "gold": 0}"#,
            "\n",
            r#"{"context": "a", "choices": ["b", "c"]}"#,
        );
        let questions = parse(text, None).unwrap();
        assert_eq!(
            questions.iter().map(|q| (q.line, q.answer)).collect::<Vec<_>>(),
            [(1, Some(1)), (3, Some(0)), (4, None)]
        );
        assert_eq!((questions[0].id.clone(), questions[1].id.clone()), (7.into(), Value::Null));
        assert_eq!(parse(text, Some(2)).unwrap().len(), 2);
    }

    #[test]
    fn a_line_that_is_no_question_is_named() {
        let good = r#"{"context": "a", "choices": ["b", "c"]}"#;
        for (bad, word) in [
            ("{", "EOF while parsing an object at column 1"),
            (r#"{"choices": ["b", "c"]}"#, "missing field `context`"),
            (r#"{"context": " ", "choices": ["b", "c"]}"#, "the context is empty"),
            (r#"{"context": "a", "choices": ["b"]}"#, "1 choices"),
            (r#"{"context": "a", "choices": ["b", ""]}"#, "choice 1 is empty"),
            (r#"{"context": "a", "choices": ["b", "c"], "answer": 2}"#, "answer 2, and the choices are 0 to 1"),
            (r#"{"context": "a", "choices": ["b", "c"], "answer": -1}"#, "-1"),
            (r#"{"context": "a", "choices": "bc"}"#, "invalid type"),
        ] {
            let error = parse(&format!("{good}\n{bad}"), None).unwrap_err();
            assert!(error.starts_with("line 2: ") && error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_answer_begins_with_the_blank_before_it() {
        let tokenizer = Tokenizer::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap();
        let ask = |context: &str, delimiter: &str| {
            let choices = vec!["fox.".to_owned(), "old woman".to_owned()];
            let question = Question { id: Value::Null, context: context.into(), choices, answer: None, line: 1 };
            encode(&question, delimiter, &tokenizer).unwrap()
        };
        let encoded = ask("There was an", " ");
        assert_eq!(encoded.context, tokenizer.encode_raw("There was an").unwrap());
        assert_eq!(encoded.choices[0], tokenizer.encode_raw(" fox.").unwrap());
        assert_eq!(ask("There was an ", ""), encoded, "a blank at the end is the answer's");
        assert_eq!(encoded.longest(), encoded.context.len() + encoded.choices.iter().map(Vec::len).max().unwrap());
    }
}
