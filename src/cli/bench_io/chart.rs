//! The sweep as bars of text.

use std::fmt::Write as _;

use super::Report;

/// Columns of the longest bar.
const WIDTH: usize = 40;

/// A bar for each result, longest first; `|` is the slowest and the fastest round, fio's best is a bar of its own.
pub fn bars(report: &Report) -> String {
    let mut bars: Vec<Bar> = report
        .results
        .iter()
        .map(|summary| Bar {
            name: summary.candidate.to_string(),
            value: summary.gb_s,
            min: summary.gb_s_min,
            max: summary.gb_s_max,
            fill: if summary.cached { '.' } else { '#' },
        })
        .collect();
    bars.extend(report.fio.first().map(|fio| Bar {
        name: format!("fio, depth {}", fio.run.depth),
        value: fio.gb_s,
        min: fio.gb_s_min,
        max: fio.gb_s_max,
        fill: '=',
    }));
    bars.sort_by(|a, b| b.value.total_cmp(&a.value));
    draw(&bars)
}

struct Bar {
    name: String,
    value: f64,
    min: f64,
    max: f64,
    fill: char,
}

fn draw(bars: &[Bar]) -> String {
    let longest = bars.iter().map(|bar| bar.max).fold(0.0, f64::max);
    let width = bars.iter().map(|bar| bar.name.len()).max().unwrap_or(0);
    let column = |value: f64| if longest > 0.0 { (value / longest * WIDTH as f64).round() as usize } else { 0 };
    let mut text = String::new();
    for bar in bars {
        let mut line: Vec<char> = vec![' '; WIDTH + 1];
        line[..column(bar.value)].fill(bar.fill);
        line[column(bar.min)] = '|';
        line[column(bar.max)] = '|';
        let line: String = line.into_iter().collect();
        let _ = writeln!(text, "{:width$}  {}  {:.2}", bar.name, line, bar.value);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_values() {
        let bar = |name: &str, value, min, max, fill| Bar { name: name.into(), value, min, max, fill };
        let text = draw(&[bar("a", 2.0, 1.0, 4.0, '#'), bar("bcd", 1.0, 1.0, 1.0, '.')]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], format!("a    {}|{}{}|  2.00", "#".repeat(10), "#".repeat(9), " ".repeat(20)));
        assert_eq!(lines[1], format!("bcd  {}|{}  1.00", ".".repeat(10), " ".repeat(30)));
        assert_eq!(draw(&[]), "");
        assert!(draw(&[bar("z", 0.0, 0.0, 0.0, '#')]).contains("0.00"));
    }
}
