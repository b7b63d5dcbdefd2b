//! Pieces of the pictures that commands draw: self-contained SVG, on white, for a file of its own.

use std::fmt::Write as _;

/// Colours that tell curves apart.
pub const COLOURS: [&str; 6] = ["#1b6ca8", "#c8553d", "#3b8a57", "#7d5ba6", "#b08d2e", "#555555"];

/// Begins a picture; `font_size` is of text that says nothing else.
pub fn begin(width: f64, height: f64, font_size: u32) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" font-size=\"{font_size}\" \
         fill=\"#222\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    )
}

/// A line.
pub fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
        from.0, from.1, to.0, to.1
    );
}

/// A filled rectangle.
pub fn bar(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

/// A curve through points.
pub fn curve(svg: &mut String, points: &[(f64, f64)], colour: &str) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    let _ = writeln!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
}

/// A point of a curve, filled with `fill`.
pub fn point(svg: &mut String, (x, y): (f64, f64), fill: &str, colour: &str) {
    let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{fill}\" stroke=\"{colour}\"/>");
}

/// Text at a place; `anchor` is `start`, `middle` or `end`.
pub fn text(svg: &mut String, x: f64, y: f64, anchor: &str, points: f64, text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{points}\">{}</text>",
        escaped(text)
    );
}

/// Text as it may stand in SVG and HTML, between tags and inside quotes.
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // Neither format has a way to write these.
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10 times a power of ten, so that four steps have short names.
pub fn nice_above(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let factor = [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0].into_iter().find(|factor| factor * power >= value);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_above_the_largest_value() {
        for (value, end) in [(0.0, 1.0), (1.0, 1.0), (1.5, 1.6), (2.9, 3.2), (3.3, 4.0), (8.5, 10.0), (11.5, 12.0)] {
            assert!((nice_above(value) - end).abs() < 1e-9, "{value}");
        }
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escaped("a<b & c>d"), "a&lt;b &amp; c&gt;d");
        assert_eq!(escaped("\"x\" 'y'\u{1b}[0m\n"), "&quot;x&quot; &#39;y&#39;\u{fffd}[0m\n");
    }
}
