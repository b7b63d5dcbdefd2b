//! Token ids from a file: a list of numbers, or an array of numpy.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::Failure;
use super::npy;
use super::rows::integers;
use crate::limits::MAX_IDS_FILE_BYTES;

/// Ids, in rows of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids {
    pub ids: Vec<u32>,
    /// Ids of a row, where the file has rows.
    pub row: Option<usize>,
}

/// Reads the ids of `path`, which must all be below `vocab`.
pub fn read(path: &Path, vocab: usize) -> Result<Ids, Failure> {
    let cannot =
        |cause: &dyn Display| Failure::usage(format!("cannot read token ids from {}", path.display())).cause(cause);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|e| cannot(&e))?;
    file.take(MAX_IDS_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(|e| cannot(&e))?;
    if bytes.len() as u64 > MAX_IDS_FILE_BYTES {
        return Err(cannot(&format!("it is longer than {MAX_IDS_FILE_BYTES} bytes")));
    }
    let (numbers, row) = if npy::is_npy(&bytes) { array(&bytes) } else { list(&bytes) }.map_err(|e| {
        cannot(&e).hint("it is a list of ids with commas or blanks between them, or an array of numpy.save of one or two dimensions")
    })?;
    if numbers.is_empty() {
        return Err(cannot(&"it holds none"));
    }
    check(&numbers, vocab)
        .map(|ids| Ids { ids, row })
        .map_err(|e| cannot(&e).hint("the ids belong to another model, or one has a digit too many"))
}

/// The numbers as ids below `vocab`.
pub fn check(numbers: &[i64], vocab: usize) -> Result<Vec<u32>, String> {
    let id = |(at, &number): (usize, &i64)| match u32::try_from(number) {
        Ok(id) if (id as usize) < vocab => Ok(id),
        _ => Err(format!("token id {number}, number {at} of the file, is beyond the vocabulary of {vocab}")),
    };
    numbers.iter().enumerate().map(id).collect()
}

fn array(bytes: &[u8]) -> Result<(Vec<i64>, Option<usize>), String> {
    let array = npy::parse(bytes, bytes.len() as u64)?;
    let row = match array.shape[..] {
        [_] => None,
        [_, row] => Some(row as usize),
        _ => return Err(format!("its shape is {:?}, and ids have one dimension or two", array.shape)),
    };
    let wrong = || format!("it holds {}, and ids are whole numbers", array.dtype);
    Ok((integers(array.dtype, &bytes[array.data..]).ok_or_else(wrong)?, row))
}

/// Numbers between commas, blanks and brackets, so that a list of JSON is one too.
fn list(bytes: &[u8]) -> Result<(Vec<i64>, Option<usize>), String> {
    let text = std::str::from_utf8(bytes).map_err(|e| format!("it is no text: {e}"))?;
    let mut numbers = Vec::new();
    for (line, text) in text.lines().enumerate() {
        let words = text.split(|c: char| matches!(c, ',' | '[' | ']') || c.is_whitespace());
        for word in words.filter(|word| !word.is_empty()) {
            let shown: String = word.chars().take(40).collect();
            numbers.push(word.parse().map_err(|_| format!("line {}: {shown:?} is no token id", line + 1))?);
        }
    }
    Ok((numbers, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Result<Ids, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids");
        std::fs::write(&path, bytes).unwrap();
        read(&path, 100).map_err(|failure| failure.text())
    }

    #[test]
    fn lists_of_all_kinds_are_read() {
        let expected = Ids { ids: vec![1, 2, 99], row: None };
        for text in ["1 2\n99\n", "1,2, 99", "[1, 2,\n 99]"] {
            assert_eq!(of(text.as_bytes()), Ok(expected.clone()));
        }
    }

    #[test]
    fn what_is_no_list_of_ids_is_refused_by_its_place() {
        for (bytes, words) in [
            (&b""[..], &["it holds none"][..]),
            (b" \n", &["it holds none"]),
            (b"1\n2 x3", &["line 2", "\"x3\"", "hint:"]),
            (b"1 100", &["token id 100, number 1", "vocabulary of 100", "hint:"]),
            (b"-1", &["token id -1"]),
            (b"\xff\xfe", &["it is no text"]),
            (b"\x93NUMPY\x01\x00", &["cut short"]),
        ] {
            let error = of(bytes).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert!(read(Path::new("/nowhere/ids"), 1).is_err());
    }
}
