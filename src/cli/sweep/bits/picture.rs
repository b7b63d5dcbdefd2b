//! The precisions as a picture: how far each diverges over how large it is.

use crate::checkpoint::convert::Width;
use crate::cli::svg::{self, COLOURS, line, point, text};

use super::arms::Arm;
use super::{Report, show, size};

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 92.0;
const ACROSS: f64 = 690.0;
const DOWN: f64 = 370.0;

/// Scales of the two axes.
struct Axes {
    bytes: [f64; 2],
    /// Powers of ten.
    powers: [f64; 2],
}

impl Axes {
    fn at(&self, bytes: u64, divergence: f64) -> (f64, f64) {
        let share = |value: f64, [from, to]: [f64; 2]| if to > from { (value - from) / (to - from) } else { 0.5 };
        let (x, y) = (share(bytes as f64, self.bytes), share(divergence.log10(), self.powers));
        (LEFT + ACROSS * x, TOP + DOWN * (1.0 - y))
    }
}

/// The picture, self-contained, on white.
pub fn draw(report: &Report) -> String {
    let mut svg = svg::begin(WIDTH, HEIGHT, 12);
    text(&mut svg, 20.0, 28.0, "start", 17.0, "What precision costs");
    let name = report.dir.file_name().unwrap_or(report.dir.as_os_str()).to_string_lossy();
    let under = format!(
        "{name}, {} windows of {} tokens: mean divergence from the unquantized logits in nats, over the bytes of the container",
        report.windows, report.window
    );
    text(&mut svg, 20.0, 48.0, "start", 12.0, &under);
    if let Some(said) = show::conclusion(report) {
        text(&mut svg, 20.0, 66.0, "start", 12.0, &said);
    }
    let measured: Vec<(&Arm, f64)> = report.arms.iter().filter_map(|arm| Some((arm, drawn(arm)?))).collect();
    let Some(axes) = axes(&measured) else { return svg + "</svg>\n" };
    grid(&mut svg, &axes);
    let mut dense: Vec<Width> = Vec::new();
    for (arm, _) in &measured {
        if !dense.contains(&arm.precision.dense) {
            dense.push(arm.precision.dense);
        }
    }
    for (number, &width) in dense.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        series(&mut svg, &axes, &measured, width, colour);
        let x = LEFT + 130.0 * number as f64;
        point(&mut svg, (x, HEIGHT - 40.0), colour, colour);
        text(&mut svg, x + 10.0, HEIGHT - 36.0, "start", 12.0, &format!("dense {width}"));
    }
    let legend = "numbers: width of the experts; lines: one scale a row; hollow points: grouped scales";
    text(&mut svg, LEFT, HEIGHT - 14.0, "start", 12.0, legend);
    svg + "</svg>\n"
}

/// The divergence, where it has a place on a logarithmic scale.
fn drawn(arm: &Arm) -> Option<f64> {
    arm.quality.map(|quality| quality.divergence.mean).filter(|mean| mean.is_finite() && *mean > 0.0)
}

fn axes(measured: &[(&Arm, f64)]) -> Option<Axes> {
    let bytes = |pick: fn(f64, f64) -> f64| measured.iter().map(|(arm, _)| arm.bytes as f64).reduce(pick);
    let powers = |pick: fn(f64, f64) -> f64| measured.iter().map(|(_, mean)| mean.log10()).reduce(pick);
    let (least, most) = (bytes(f64::min)?, bytes(f64::max)?);
    let room = 0.06 * (most - least).max(0.1 * most);
    Some(Axes {
        bytes: [least - room, most + room],
        powers: [powers(f64::min)?.floor(), powers(f64::max)?.floor() + 1.0],
    })
}

fn grid(svg: &mut String, axes: &Axes) {
    let [from, to] = axes.powers;
    for power in from as i32..=to as i32 {
        let (_, y) = axes.at(0, 10f64.powi(power));
        line(svg, (LEFT, y), (LEFT + ACROSS, y), "#dddddd", 1.0);
        let shown = if power < -3 { format!("1e{power}") } else { format!("{}", 10f64.powi(power)) };
        text(svg, LEFT - 8.0, y + 4.0, "end", 11.0, &shown);
    }
    for step in 0..=4 {
        let bytes = axes.bytes[0] + (axes.bytes[1] - axes.bytes[0]) * f64::from(step) / 4.0;
        let (x, _) = axes.at(bytes as u64, 1.0);
        line(svg, (x, TOP), (x, TOP + DOWN), "#eeeeee", 1.0);
        text(svg, x, TOP + DOWN + 18.0, "middle", 11.0, &size::show(bytes as u64));
    }
}

/// The points of one dense width, those with a scale a row joined.
fn series(svg: &mut String, axes: &Axes, measured: &[(&Arm, f64)], dense: Width, colour: &str) {
    let mut rows: Vec<(f64, f64)> = Vec::new();
    for (arm, mean) in measured.iter().filter(|(arm, _)| arm.precision.dense == dense) {
        let at = axes.at(arm.bytes, *mean);
        let grouped = arm.precision.group.is_some();
        if !grouped {
            rows.push(at);
        }
        let fill = if grouped { "#ffffff" } else { colour };
        point(svg, at, fill, colour);
        text(svg, at.0 + 7.0, at.1 - 5.0, "start", 10.0, &arm.precision.experts.to_string());
    }
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    svg::curve(svg, &rows, colour);
}
