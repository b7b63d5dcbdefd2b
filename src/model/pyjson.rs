//! JSON as Python's `json.dumps` prints it, which is what chat templates were written for: `", "` and `": "` between
//! items, and Python's way of writing floats.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::limits::MAX_JSON_DEPTH;

/// Keyword arguments of `tojson`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Write characters beyond ASCII as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Blanks an indentation step has; `None` writes one line.
    pub indent: Option<usize>,
    /// Write the keys of mappings in order.
    pub sort_keys: bool,
}

/// Prints `value`.
pub fn dump(value: &Value, style: Style) -> Result<String, Error> {
    let mut out = String::new();
    write(&mut out, value, style, 0)?;
    Ok(out)
}

fn write(out: &mut String, value: &Value, style: Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_JSON_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_block(out, ['[', ']'], items.len(), style, depth, |out, i| write(out, &items[i], style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_block(out, ['{', '}'], keys.len(), style, depth, |out, i| {
                match keys[i].as_str() {
                    Some(key) => write_string(out, key, style.ensure_ascii),
                    None => write_string(out, &keys[i].to_string(), style.ensure_ascii),
                }
                out.push_str(": ");
                write(out, &value.get_item(&keys[i])?, style, depth + 1)
            })?;
        }
        other => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: cannot print a {other}"))),
    }
    Ok(())
}

fn write_block(
    out: &mut String,
    brackets: [char; 2],
    count: usize,
    style: Style,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent.filter(|_| count > 0) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(brackets[0]);
    for i in 0..count {
        if i > 0 {
            out.push_str(if style.indent.is_some() { "," } else { ", " });
        }
        line(out, depth + 1);
        item(out, i)?;
    }
    line(out, depth);
    out.push(brackets[1]);
    Ok(())
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        out.push_str(&value.to_string());
    } else {
        out.push_str(&float(f64::try_from(value.clone())?));
    }
    Ok(())
}

/// The shortest digits that read back as `x`, with an exponent below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            // Private-use characters stand in for the beginnings of control tokens; they pass unescaped.
            c if ensure_ascii && !c.is_ascii() && (c as u32) < 0xF_0000 => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        // Expected strings are what CPython 3 prints for repr().
        let known = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-7, "1e-07"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1e22, "1e+22"),
            (123456789.125, "123456789.125"),
            (5e-324, "5e-324"),
        ];
        for (x, text) in known {
            assert_eq!(float(x), text);
        }
    }

    #[test]
    fn separators_and_escapes_are_pythons() {
        let value = Value::from_pairs([
            ("name", Value::from("a<b>\"&'é\n")),
            ("list", Value::from(vec![Value::from(1), Value::from(()), Value::from(true)])),
            ("empty", Value::from(Vec::<Value>::new())),
        ]);
        let style = Style::default();
        // python3 -c 'print(json.dumps({...}, ensure_ascii=False))', and with ensure_ascii and indent=1.
        assert_eq!(dump(&value, style).unwrap(), r#"{"name": "a<b>\"&'é\n", "list": [1, null, true], "empty": []}"#);
        let ascii = dump(&Value::from("é🦊"), Style { ensure_ascii: true, ..style }).unwrap();
        assert_eq!(ascii, r#""\u00e9\ud83e\udd8a""#);
        let lines = dump(&value.get_attr("list").unwrap(), Style { indent: Some(1), ..style }).unwrap();
        assert_eq!(lines, "[\n 1,\n null,\n true\n]");
    }
}
