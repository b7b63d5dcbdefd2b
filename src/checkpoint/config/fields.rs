//! The fields of a small JSON file, each taken with what it may be; an error says where it is, what may be and what is.

use crate::checkpoint::error::{CheckpointError, Result};
use serde_json::{Map, Value};

/// One JSON object of a small file, with what an error needs to say where it is.
pub(super) struct Fields<'a> {
    pub file: &'static str,
    pub path: String,
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub fn bad(&self, field: &str, expected: &str, found: &str) -> CheckpointError {
        CheckpointError::Config {
            file: self.file.to_owned(),
            field: format!("{}{field}", self.path),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }
    }

    /// An explicit null means the same as an absent key.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    pub fn size(&self, field: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize> {
        let value = self.get(field);
        match value.and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok()) {
            Some(number) if range.contains(&number) => Ok(number),
            _ => {
                let expected = format!("an integer from {} to {}", range.start(), range.end());
                Err(self.bad(field, &expected, &shown(self.map.get(field))))
            }
        }
    }

    pub fn size_or(&self, field: &str, range: std::ops::RangeInclusive<usize>, absent: usize) -> Result<usize> {
        if self.get(field).is_none() { Ok(absent) } else { self.size(field, range) }
    }

    /// A size that is a product of others.
    pub fn within(&self, product: &str, value: usize, most: usize) -> Result<()> {
        if value <= most { Ok(()) } else { Err(self.bad(product, &format!("at most {most}"), &value.to_string())) }
    }

    pub fn positive(&self, field: &str) -> Result<f64> {
        match self.get(field).and_then(Value::as_f64) {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(self.bad(field, "a positive number", &shown(self.map.get(field)))),
        }
    }

    /// A positive number no smaller than `least`.
    pub fn at_least(&self, field: &str, least: f64) -> Result<f64> {
        match self.positive(field)? {
            number if number >= least => Ok(number),
            number => Err(self.bad(field, &format!("at least {least:?}"), &format!("{number:?}"))),
        }
    }

    pub fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            Some(Value::Bool(flag)) => Ok(*flag),
            _ => Err(self.bad(field, "true or false", &shown(self.map.get(field)))),
        }
    }

    pub fn flag_or(&self, field: &str, absent: bool) -> Result<bool> {
        if self.get(field).is_none() { Ok(absent) } else { self.flag(field) }
    }

    pub fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            other => Err(self.bad(field, "a list", &shown(other))),
        }
    }

    pub fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            other => Err(self.bad(field, "a string", &shown(other))),
        }
    }

    pub fn child(&self, field: &str) -> Result<Option<Fields<'a>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { file: self.file, path: format!("{}{field}.", self.path), map }))
            }
            other => Err(self.bad(field, "an object", &shown(other))),
        }
    }

    /// The value may be absent; if it is there it must be the one that is supported.
    pub fn only(&self, field: &str, supported: &Value) -> Result<()> {
        match self.get(field) {
            Some(value) if value != supported => Err(self.bad(field, &supported.to_string(), &shown(Some(value)))),
            _ => Ok(()),
        }
    }
}

/// A value as a message shows it: short, and never the whole of a hostile file.
pub(super) fn shown(value: Option<&Value>) -> String {
    const SHOWN: usize = 80;
    let Some(value) = value else {
        return "nothing".to_owned();
    };
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
