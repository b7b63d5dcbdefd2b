//! The pictures of the HTML report: SVG without a size of its own, whose positions are shares of the width, so that shapes
//! stretch with the page and text stays readable on any. Colours are classes of the report's style.

use std::fmt::Write as _;

use crate::cli::svg::escaped;

/// A part narrower than this share of the bar is not named on it.
const NAMED: f64 = 0.13;
/// Columns of a histogram, and most of a sequence.
const COLUMNS: usize = 40;

/// A part of a whole.
pub struct Part {
    /// What it is called.
    pub name: String,
    /// How much it is.
    pub value: f64,
    /// How that is shown.
    pub shown: String,
    /// Class of its colour.
    pub class: &'static str,
}

/// Parts of `whole` beside each other; what is missing of it stays empty.
pub fn stack(parts: &[Part], whole: f64, label: &str) -> String {
    let mut svg = begin(34.0, label);
    svg += "<rect class=\"track\" width=\"100%\" height=\"34\" rx=\"4\"/>\n";
    let mut x = 0.0;
    for Part { name, value, shown, class } in parts {
        let share = share(*value, whole).min(1.0 - x);
        if share <= 0.0 {
            continue;
        }
        let (left, wide, name) = (100.0 * x, 100.0 * share, escaped(name));
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{left:.3}%\" width=\"{wide:.3}%\" height=\"34\"><title>{name}: {}</title></rect>",
            escaped(shown)
        );
        if share >= NAMED {
            let middle = left + wide / 2.0;
            let _ = writeln!(
                svg,
                "<text x=\"{middle:.3}%\" y=\"22\" text-anchor=\"middle\" font-size=\"13\" fill=\"#ffffff\">{name}</text>"
            );
        }
        x += share;
    }
    svg + "</svg>\n"
}

/// Bars below each other, as long as their values are of `whole`.
pub fn bars(parts: &[Part], whole: f64) -> String {
    let mut html = String::new();
    for Part { name, value, shown, class } in parts {
        let (name, wide) = (escaped(name), 100.0 * share(*value, whole).min(1.0));
        let shown = escaped(shown);
        let _ = writeln!(
            html,
            "<div class=\"row\"><span>{name}</span>{}<rect class=\"track\" width=\"100%\" height=\"16\" rx=\"3\"/>\
             <rect class=\"{class}\" width=\"{wide:.3}%\" height=\"16\" rx=\"3\"/></svg>\
             <span class=\"figure\">{shown}</span></div>",
            begin(16.0, &name)
        );
    }
    html
}

/// How often values came: columns of equal width from nothing to the largest. `marks` are lines at values.
pub fn histogram(values: &[f64], marks: &[f64], class: &str, label: &str) -> String {
    let most = values.iter().copied().fold(0.0, f64::max);
    let mut counts = [0usize; COLUMNS];
    for value in values {
        counts[((share(*value, most) * COLUMNS as f64) as usize).min(COLUMNS - 1)] += 1;
    }
    let counts: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
    let mut svg = begin(90.0, label);
    columns(&mut svg, &counts, class);
    for mark in marks {
        let x = 100.0 * share(*mark, most);
        let _ = writeln!(svg, "<line class=\"mark\" x1=\"{x:.3}%\" x2=\"{x:.3}%\" y1=\"0\" y2=\"90\"/>");
    }
    svg + "</svg>\n"
}

/// Values in their order; of more than there are columns, the means of neighbours.
pub fn sequence(values: &[f64], class: &str, label: &str) -> String {
    let size = values.len().div_ceil(2 * COLUMNS).max(1);
    let means: Vec<f64> = values.chunks(size).map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64).collect();
    let mut svg = begin(90.0, label);
    columns(&mut svg, &means, class);
    svg + "</svg>\n"
}

fn columns(svg: &mut String, values: &[f64], class: &str) {
    let most = values.iter().copied().fold(0.0, f64::max);
    let wide = 100.0 / values.len().max(1) as f64;
    for (index, value) in values.iter().enumerate().filter(|(_, value)| **value > 0.0) {
        // What came once can be seen.
        let high = (88.0 * share(*value, most)).max(1.5);
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{:.3}%\" width=\"{:.3}%\" y=\"{:.1}\" height=\"{high:.1}\"/>",
            index as f64 * wide,
            0.9 * wide,
            89.0 - high
        );
    }
    *svg += "<rect class=\"track\" width=\"100%\" y=\"89\" height=\"1\"/>\n";
}

/// From the median to the 99th percentile of each name, on one logarithmic scale of microseconds.
pub struct Ranges {
    /// Exponents of ten at the ends.
    least: f64,
    most: f64,
}

impl Ranges {
    /// The scale that holds all of `ranges`, which are medians and 99th percentiles; none where there is no time at all.
    pub fn of(ranges: impl Iterator<Item = (f64, f64)> + Clone) -> Option<Ranges> {
        let times = ranges.flat_map(|(p50, p99)| [p50, p99]).filter(|us| *us > 0.0);
        let least = times.clone().fold(f64::INFINITY, f64::min).log10().floor();
        let most = times.fold(0.0, f64::max).log10().ceil();
        (least.is_finite() && most.is_finite()).then(|| Ranges { least, most: most.max(least + 1.0) })
    }

    /// The powers of ten on the scale, in microseconds.
    pub fn ticks(&self) -> impl Iterator<Item = f64> {
        (self.least as i32..=self.most as i32).map(|power| 10f64.powi(power))
    }

    /// One of them: a dot at the median, a line to the 99th percentile.
    pub fn draw(&self, p50: f64, p99: f64, class: &str, label: &str) -> String {
        let at = |us: f64| 100.0 * ((us.max(1e-9).log10() - self.least) / (self.most - self.least)).clamp(0.0, 1.0);
        let (from, to) = (at(p50), at(p99));
        begin(16.0, label)
            + &format!(
                "<rect class=\"track\" width=\"100%\" y=\"7.5\" height=\"1\"/>\
                 <line class=\"range\" x1=\"{from:.3}%\" x2=\"{to:.3}%\" y1=\"8\" y2=\"8\"/>\
                 <circle class=\"{class}\" cx=\"{from:.3}%\" cy=\"8\" r=\"5\"/></svg>"
            )
    }
}

fn begin(height: f64, label: &str) -> String {
    format!("<svg height=\"{height}\" role=\"img\" aria-label=\"{}\">", escaped(label))
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, value: f64) -> Part {
        Part { name: name.to_owned(), value, shown: format!("{value} s"), class: "fill-wait" }
    }

    #[test]
    fn parts_stand_side_by_side_and_end_with_the_whole() {
        let svg = stack(&[part("a", 2.0), part("none", 0.0), part("<b>", 0.5), part("too much", 9.0)], 4.0, "x");
        for words in [
            "x=\"0.000%\" width=\"50.000%\"",
            "x=\"50.000%\" width=\"12.500%\" height=\"34\"><title>&lt;b&gt;: 0.5 s",
            "x=\"62.500%\" width=\"37.500%\"",
        ] {
            assert!(svg.contains(words), "no {words} in {svg}");
        }
        // Half and three eighths are wide enough for a name, an eighth is not.
        assert_eq!(svg.matches("<text ").count(), 2, "{svg}");
    }

    #[test]
    fn a_histogram_counts_every_value_once() {
        // Ten at a quarter, forty at the end: a quarter of the highest column.
        let values: Vec<f64> = std::iter::repeat_n(1.0, 10).chain(std::iter::repeat_n(4.0, 40)).collect();
        let svg = histogram(&values, &[1.0], "fill-other", "x");
        assert!(svg.contains("x=\"25.000%\" width=\"2.250%\" y=\"67.0\" height=\"22.0\""), "{svg}");
        assert!(svg.contains("x=\"97.500%\" width=\"2.250%\" y=\"1.0\" height=\"88.0\""), "{svg}");
        assert!(svg.contains("class=\"mark\" x1=\"25.000%\""), "{svg}");
        assert_eq!(svg.matches("fill-other").count(), 2);
    }

    #[test]
    fn a_logarithmic_scale_has_whole_powers_at_its_ends() {
        let scale = Ranges::of([(2.0, 300.0), (0.0, 0.0)].into_iter()).unwrap();
        assert_eq!(scale.ticks().collect::<Vec<_>>(), [1.0, 10.0, 100.0, 1000.0]);
        assert!(scale.draw(10.0, 100.0, "c", "x").contains("x1=\"33.333%\" x2=\"66.667%\""));
        assert!(Ranges::of([(0.0, 0.0)].into_iter()).is_none());
        assert_eq!(Ranges::of([(10.0, 10.0)].into_iter()).unwrap().ticks().count(), 2);
    }

    #[test]
    fn nothing_at_all_can_be_drawn() {
        for svg in [stack(&[part("a", 0.0)], 0.0, ""), histogram(&[], &[], "", ""), sequence(&[], "", "")] {
            assert!(!svg.contains("NaN") && svg.ends_with("</svg>\n"), "{svg}");
        }
    }
}
