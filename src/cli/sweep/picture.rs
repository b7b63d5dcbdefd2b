//! The sweep as a picture: the rate of the answer over the values, and below it where experts came from.

use crate::cli::size;
use crate::cli::svg::{self, COLOURS, line, nice_above, point, text};

use super::measure::{Arm, Sample};
use super::{Knob, Report, show};

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 560.0;
/// Characters of the model's name that leave room for the rest of its line.
const NAME_CHARS: usize = 48;
/// Plots: left, top, width, height.
type Plot = (f64, f64, f64, f64);
const RATE: Plot = (80.0, 102.0, 700.0, 210.0);
const SHARES: Plot = (80.0, 372.0, 700.0, 110.0);

/// The picture, self-contained, on white.
pub fn draw(report: &Report) -> String {
    let mut svg = svg::begin(WIDTH, HEIGHT, 12);
    let (first, name) = (&report.measured.first, report.knob.name());
    text(&mut svg, 20.0, 28.0, "start", 17.0, &format!("Tokens a second over {name}"));
    let under = format!(
        "{}; {} tokens after {} of prompt, median of {}, lines from least to most",
        short_name(&first.model.dir),
        first.tokens,
        first.prompt_tokens,
        size::counted(report.rounds as u64, "round")
    );
    text(&mut svg, 20.0, 48.0, "start", 12.0, &under);
    if let Some(said) = show::conclusion(report) {
        text(&mut svg, 20.0, 68.0, "start", 12.0, &said);
    }
    let most =
        report.arms.iter().flat_map(|arm| arm.spread(|s| s.decode_tok_s)).map(|[.., most]| most).fold(0.0, f64::max);
    axes(&mut svg, RATE, nice_above(most), "tok/s");
    series(&mut svg, report, RATE, nice_above(most), COLOURS[0], |sample| sample.decode_tok_s);
    axes(&mut svg, SHARES, 1.0, "share");
    series(&mut svg, report, SHARES, 1.0, COLOURS[2], |sample| sample.hit_rate);
    series(&mut svg, report, SHARES, 1.0, COLOURS[1], |sample| Some(sample.waited));
    for (row, (colour, said)) in
        [(COLOURS[2], "experts found in memory"), (COLOURS[1], "time waited for the drive")].into_iter().enumerate()
    {
        let x = SHARES.0 + 230.0 * row as f64;
        line(&mut svg, (x, HEIGHT - 22.0), (x + 22.0, HEIGHT - 22.0), colour, 3.0);
        text(&mut svg, x + 30.0, HEIGHT - 18.0, "start", 12.0, said);
    }
    for arm in &report.arms {
        let x = x_of(report, arm.value);
        text(&mut svg, x, RATE.1 + RATE.3 + 18.0, "middle", 11.0, &report.knob.show(arm.value));
        text(&mut svg, x, SHARES.1 + SHARES.3 + 18.0, "middle", 11.0, &report.knob.show(arm.value));
    }
    svg + "</svg>\n"
}

/// The end of a directory's path that has room in the picture.
fn short_name(dir: &str) -> String {
    let name = dir.trim_end_matches('/').rsplit('/').next().unwrap_or(dir);
    match name.char_indices().nth(NAME_CHARS) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// Where a value stands: memory on a logarithmic scale, threads on a linear one.
fn x_of(report: &Report, value: u64) -> f64 {
    let scale = |value: u64| match report.knob {
        Knob::Ram => (value.max(1) as f64).ln(),
        Knob::Threads => value as f64,
    };
    let (left, _, width, _) = RATE;
    let ends = (report.arms.first(), report.arms.last());
    let (Some(least), Some(most)) = ends else { return left };
    let (least, most) = (scale(least.value), scale(most.value));
    // Room at both ends, so that names of values stay inside.
    let share = if most > least { (scale(value) - least) / (most - least) } else { 0.5 };
    left + width * (0.05 + 0.9 * share)
}

fn axes(svg: &mut String, (left, top, width, height): Plot, most: f64, unit: &str) {
    for step in 0..=4 {
        let share = f64::from(step) / 4.0;
        let y = top + height * (1.0 - share);
        line(svg, (left, y), (left + width, y), "#dddddd", 1.0);
        text(svg, left - 8.0, y + 4.0, "end", 11.0, &tick(share * most, most));
    }
    text(svg, left - 8.0, top - 10.0, "end", 11.0, unit);
}

/// A value on an axis that ends at `most`, with the digits that tell its steps apart.
fn tick(value: f64, most: f64) -> String {
    match most {
        _ if most >= 40.0 => format!("{value:.0}"),
        _ if most >= 4.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn series(
    svg: &mut String,
    report: &Report,
    (_, top, _, height): Plot,
    most: f64,
    colour: &str,
    of: impl Fn(&Sample) -> Option<f64> + Copy,
) {
    let y = |value: f64| top + height * (1.0 - value / most);
    let spread = |arm: &Arm| Some((x_of(report, arm.value), arm.spread(of)?));
    let points: Vec<(f64, [f64; 3])> = report.arms.iter().filter_map(spread).collect();
    svg::curve(svg, &points.iter().map(|(x, [median, ..])| (*x, y(*median))).collect::<Vec<_>>(), colour);
    for (x, [median, least, most]) in points {
        line(svg, (x, y(least)), (x, y(most)), colour, 1.5);
        point(svg, (x, y(median)), colour, colour);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_end_inside_the_picture_and_ticks_have_the_digits_they_need() {
        assert_eq!(short_name("/models/glm-5.2-int4/"), "glm-5.2-int4");
        let long = format!("/home/somebody/.cache/millstream/{}", "x".repeat(80));
        assert_eq!(short_name(&long), format!("{}...", "x".repeat(48)));
        // A quarter of 40 is 10, of 4 is 1, of 1.2 is 0.3.
        assert_eq!((tick(2000.0, 2000.0), tick(10.0, 40.0)), ("2000".into(), "10".into()));
        assert_eq!((tick(1.5, 6.0), tick(0.3, 1.2)), ("1.5".into(), "0.30".into()));
    }
}
