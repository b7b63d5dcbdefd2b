//! Sizes as people write and read them.

pub use crate::size::show;

/// Reads `500M`, `20G`, `16GiB`, `4096`. Letters alone and with `iB` are powers of 1024, with `B` powers of 1000.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim());
    let refuse = || format!("'{text}' is not a size: write 500M, 20G or 16GiB");
    let value: f64 = number.parse().map_err(|_| refuse())?;
    let lower = unit.to_ascii_lowercase();
    let (letter, base) = match lower.strip_suffix("ib") {
        Some(letter) => (letter, 1024f64),
        None => match lower.strip_suffix('b') {
            Some(letter) => (letter, 1000f64),
            None => (lower.as_str(), 1024f64),
        },
    };
    let power = match letter {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(refuse()),
    };
    let bytes = value * base.powi(power);
    // 7.4MB is 7,400,000 bytes, whatever 7.4 is in binary.
    let bytes = bytes.round();
    if bytes < 2f64.powi(63) { Ok(bytes as u64) } else { Err(format!("'{text}' is larger than any memory")) }
}

/// `12.3G`, `640.0M`: a size as it is typed, never more than `bytes`.
pub fn typed(bytes: u64) -> String {
    in_tenths(bytes, |tenths, unit| tenths / unit)
}

/// A size as it is typed, never less than `bytes`.
pub fn typed_above(bytes: u64) -> String {
    in_tenths(bytes, u128::div_ceil)
}

/// `bytes` in tenths of a unit, which are divided by it as `rounded` has it.
fn in_tenths(bytes: u64, rounded: impl Fn(u128, u128) -> u128) -> String {
    let (size, unit) = match bytes {
        _ if bytes >= 1 << 30 => (1 << 30, "G"),
        _ if bytes >= 1 << 20 => (1 << 20, "M"),
        _ => return bytes.to_string(),
    };
    let tenths = rounded(u128::from(bytes) * 10, size);
    format!("{}.{}{unit}", tenths / 10, tenths % 10)
}

/// `1,234,567`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// `1 read`, `1,234 reads`.
pub fn counted(count: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(count), if count == 1 { "" } else { "s" })
}

/// Four significant digits: more would be noise.
pub fn short(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("500M"), Ok(500 << 20));
        assert_eq!(parse("20g"), Ok(20 << 30));
        assert_eq!(parse("16GiB"), Ok(16 << 30));
        assert_eq!(parse("16 GB"), Ok(16_000_000_000));
        assert_eq!(parse("1.5k"), Ok(1536));
        for tenths in 1..1000 {
            assert_eq!(parse(&format!("{}.{}MB", tenths / 10, tenths % 10)), Ok(tenths * 100_000));
        }
        assert_eq!(parse("0"), Ok(0));
        for bad in ["", "G", "-1G", "1X", "1 G B", "1..5G", "nan", "inf", "99999999T", "1e9"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_typed_as_they_are_read_and_never_larger_or_never_smaller() {
        for (bytes, text) in
            [(20 << 30, "20.0G"), ((20 << 30) - 1, "19.9G"), (640 << 20, "640.0M"), (1_048_575, "1048575")]
        {
            assert_eq!(typed(bytes), text);
        }
        assert_eq!((typed_above(20 << 30), typed_above((20 << 30) + 1)), ("20.0G".into(), "20.1G".into()));
        for bytes in [1, 4095, 1 << 20, (1 << 30) - 1, 1 << 30, 12_345_678_901, 1 << 62] {
            let read = parse(&typed(bytes)).unwrap();
            assert!(read <= bytes && read as f64 > 0.9 * bytes as f64, "{bytes} was typed as {}", typed(bytes));
            let above = parse(&typed_above(bytes)).unwrap();
            assert!(bytes <= above && above - read <= bytes / 10 + 1, "{bytes} was typed as {}", typed_above(bytes));
        }
    }

    #[test]
    fn sizes_are_shown() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(999), "999 B");
        assert_eq!(show(1000), "1.00 kB");
        assert_eq!(show(999_499), "999 kB");
        assert_eq!(show(999_500), "1.00 MB");
        assert_eq!(show(18_915_328), "18.9 MB");
        assert_eq!(show(383_700_000_000), "384 GB");
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(18_874_368), "18,874,368");
        assert_eq!(
            (counted(1, "read"), counted(0, "read"), counted(1000, "read")),
            ("1 read".into(), "0 reads".into(), "1,000 reads".into())
        );
    }
}
