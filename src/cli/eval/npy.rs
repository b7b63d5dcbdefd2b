//! Arrays of numpy's `.npy` files: the head that says what they hold. Every byte of it is untrusted.
//!
//! Layout: a magic, two bytes of version, the length of the head (2 bytes in version 1, 4 later), the head as a literal of
//! Python, the data.

use crate::checkpoint::Dtype;

/// First bytes of such a file.
const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// What an array is, and where its data begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    pub data: usize,
}

/// Whether a file that begins like this is one.
pub fn is_npy(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// Reads the head that a file of `file_bytes` bytes begins with; `bytes` are its first ones, which hold all of the head.
pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Array, String> {
    let cut = || "its head is cut short".to_owned();
    let version = bytes.get(MAGIC.len()).copied().ok_or_else(cut)?;
    let (length, from) = match (version, bytes) {
        (1, [_, _, _, _, _, _, _, _, a, b, ..]) => (usize::from(u16::from_le_bytes([*a, *b])), 10),
        (2 | 3, [_, _, _, _, _, _, _, _, a, b, c, d, ..]) => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, 12),
        (1..=3, _) => return Err(cut()),
        _ => return Err(format!("it is of version {version}, and 1 to 3 are known")),
    };
    let data = from + length;
    let head = bytes.get(from..data).ok_or_else(cut)?;
    let head = std::str::from_utf8(head).map_err(|_| "its head is no text".to_owned())?;
    let descr = value(head, "descr")?.trim_matches(['\'', '"']);
    let dtype = dtype(descr).ok_or_else(|| format!("it holds '{descr}', and little-endian numbers are read"))?;
    if value(head, "fortran_order")? != "False" {
        return Err("it is in Fortran's order: save it as numpy.ascontiguousarray has it".to_owned());
    }
    let shape: Vec<u64> = value(head, "shape")?
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(|part| part.parse().map_err(|_| format!("its shape has '{part}'")))
        .collect::<Result<_, String>>()?;
    let wanted = shape.iter().try_fold(dtype.bytes(), |size, &dim| size.checked_mul(dim));
    let there = file_bytes.saturating_sub(data as u64);
    match wanted == Some(there) {
        true => Ok(Array { dtype, shape, data }),
        false => {
            Err(format!("its data have {there} bytes, which are no {shape:?} of {dtype}: it is cut short or damaged"))
        }
    }
}

/// The value of a key in Python's literal of a dictionary of words, strings and tuples.
fn value<'a>(head: &'a str, key: &str) -> Result<&'a str, String> {
    let missing = || format!("its head has no {key}");
    let quoted = [format!("'{key}'"), format!("\"{key}\"")];
    let at = quoted.iter().find_map(|name| Some(head.find(name.as_str())? + name.len())).ok_or_else(missing)?;
    let rest = head[at..].trim_start().strip_prefix(':').ok_or_else(missing)?.trim_start();
    let value = match rest.strip_prefix('(') {
        Some(tuple) => tuple.split_once(')').map(|(inside, _)| inside),
        None => rest.split([',', '}']).next(),
    };
    value.map(str::trim).ok_or_else(missing)
}

fn dtype(descr: &str) -> Option<Dtype> {
    Some(match descr {
        "<f8" => Dtype::F64,
        "<f4" => Dtype::F32,
        "<f2" => Dtype::F16,
        "<i8" => Dtype::I64,
        "<i4" => Dtype::I32,
        "<i2" => Dtype::I16,
        "<u8" => Dtype::U64,
        "<u4" => Dtype::U32,
        "<u2" => Dtype::U16,
        "|u1" => Dtype::U8,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As numpy writes it: version, head filled up with blanks to a multiple of 64 bytes.
    fn file(head: &str, data: usize) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let padded = format!("{head:<117}\n");
        bytes.extend([1, 0]);
        bytes.extend((padded.len() as u16).to_le_bytes());
        bytes.extend(padded.bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Result<Array, String> {
        parse(bytes, bytes.len() as u64)
    }

    #[test]
    fn heads_are_read_as_numpy_writes_them() {
        let two = file("{'descr': '<u2', 'fortran_order': False, 'shape': (20, 3), }", 120);
        assert!(is_npy(&two));
        assert_eq!(parsed(&two), Ok(Array { dtype: Dtype::U16, shape: vec![20, 3], data: 128 }));
        let one = parsed(&file("{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }", 20)).unwrap();
        assert_eq!((one.dtype, one.shape), (Dtype::F32, vec![5]));
        assert!(parsed(&file("{'descr': '<i8', 'fortran_order': False, 'shape': (), }", 8)).unwrap().shape.is_empty());
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        for (head, data, word) in [
            ("{'descr': '>i4', 'fortran_order': False, 'shape': (2,), }", 8, "'>i4'"),
            ("{'descr': '<i4', 'fortran_order': True, 'shape': (2, 2), }", 16, "Fortran"),
            ("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", 7, "cut short"),
            ("{'descr': '<i4', 'fortran_order': False, 'shape': (x,), }", 8, "'x'"),
            ("{'descr': '<i4', 'fortran_order': False, }", 8, "no shape"),
            ("{'descr': '<i8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", 8, "no [4294967296"),
        ] {
            let error = parsed(&file(head, data)).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let whole = file("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", 8);
        for length in 0..whole.len() {
            assert!(parsed(&whole[..length]).is_err(), "cut to {length}");
        }
        let mut newer = whole;
        newer[6] = 9;
        assert!(parsed(&newer).unwrap_err().contains("version 9"));
    }
}
