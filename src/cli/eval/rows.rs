//! Numbers of arrays as they lie in files, little-endian.

use half::{bf16, f16};

use crate::checkpoint::Dtype;

/// Whether [`floats`] reads this type.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16)
}

/// Puts the numbers of `bytes` in the place of those in `row`; none of a type that is no float.
pub fn floats(dtype: Dtype, bytes: &[u8], row: &mut Vec<f32>) {
    row.clear();
    match dtype {
        Dtype::F64 => row.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32)),
        Dtype::F32 => row.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
        Dtype::F16 => row.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Dtype::Bf16 => row.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        _ => {}
    }
}

/// The whole numbers of `bytes`; `None` of a type that has others. Those beyond an i64 are its largest: no id is.
pub fn integers(dtype: Dtype, bytes: &[u8]) -> Option<Vec<i64>> {
    Some(match dtype {
        Dtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        Dtype::I32 => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        Dtype::I16 => bytes.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b).into()).collect(),
        Dtype::U64 => {
            bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b).try_into().unwrap_or(i64::MAX)).collect()
        }
        Dtype::U32 => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect(),
        Dtype::U16 => bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect(),
        Dtype::U8 => bytes.iter().map(|b| (*b).into()).collect(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_read_at_its_own_width() {
        let mut row = vec![9.0];
        for (dtype, bytes) in [
            (Dtype::F64, &[0, 0, 0, 0, 0, 0, 0xf8, 0xbf][..]),
            (Dtype::F32, &[0, 0, 0xc0, 0xbf]),
            (Dtype::F16, &[0, 0xbe]),
            (Dtype::Bf16, &[0xc0, 0xbf]),
        ] {
            floats(dtype, bytes, &mut row);
            assert_eq!((row.as_slice(), is_float(dtype)), (&[-1.5f32][..], true), "{dtype}");
        }
        assert!(!is_float(Dtype::I32));
        assert_eq!(integers(Dtype::I16, &[0xff, 0xff, 2, 1]), Some(vec![-1, 258]));
        assert_eq!(integers(Dtype::U16, &[0xff, 0xff]), Some(vec![65_535]));
        assert_eq!(integers(Dtype::U64, &[0xff; 8]), Some(vec![i64::MAX]));
        assert_eq!(integers(Dtype::F32, &[0; 4]), None);
    }
}
