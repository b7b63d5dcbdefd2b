//! The heat of every expert as a picture: a row a layer, a cell an expert, and how often it was chosen as colour.

use std::fmt::Write as _;

use crate::cli::svg;
use crate::store::trace::report::Report;

const MARGIN: f64 = 60.0;
const WIDTH: f64 = 1000.0;
/// From never to the most that any expert was chosen, in equal steps of the logarithm over the average.
const COLOURS: [&str; 7] = ["#ffffff", "#fdeacb", "#fcc68a", "#f79450", "#e0602f", "#b3341b", "#6d1410"];
/// A colour begins at these shares of the average; below the first an expert was chosen, but seldom.
const STEPS: [f64; 5] = [0.25, 0.7, 1.4, 2.8, 5.6];

/// The picture, self-contained, on white.
pub fn draw(head: &str, report: &Report) -> String {
    let experts = report.layers.iter().map(|layer| layer.selections.len()).max().unwrap_or(1);
    let cell = ((WIDTH - 2.0 * MARGIN) / experts as f64).clamp(2.0, 24.0);
    let (columns, rows) = (experts as f64 * cell, report.layers.len() as f64 * cell.max(6.0));
    let row = cell.max(6.0);
    let (width, height) = ((columns + 2.0 * MARGIN).max(WIDTH), rows + 140.0);
    let mut svg = svg::begin(width, height, 11);
    svg::text(&mut svg, MARGIN, 26.0, "start", 16.0, "How often each expert was chosen");
    svg::text(&mut svg, MARGIN, 46.0, "start", 11.0, head);
    // One path a colour: tens of thousands of cells stay a small file.
    let mut paths = vec![String::new(); COLOURS.len()];
    for (number, layer) in report.layers.iter().enumerate() {
        let mean = layer.selections.iter().sum::<u64>() as f64 / layer.selections.len() as f64;
        let y = 60.0 + number as f64 * row;
        for (expert, &count) in layer.selections.iter().enumerate() {
            let path = &mut paths[colour(count, mean)];
            let _ = write!(path, "M{:.1} {y:.1}h{cell:.1}v{row:.1}h-{cell:.1}z", MARGIN + expert as f64 * cell);
        }
        if number % (14.0 / row).ceil() as usize == 0 {
            let (x, y) = (MARGIN - 8.0, y + row / 2.0 + 4.0);
            let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>", layer.layer);
        }
    }
    for (path, colour) in paths.iter().zip(COLOURS).filter(|(path, _)| !path.is_empty()) {
        let _ = writeln!(svg, "<path d=\"{path}\" fill=\"{colour}\"/>");
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{MARGIN}\" y=\"60\" width=\"{columns:.1}\" height=\"{rows:.1}\" fill=\"none\" stroke=\"#bbbbbb\"/>"
    );
    legend(&mut svg, rows + 84.0);
    svg + "</svg>\n"
}

fn legend(svg: &mut String, y: f64) {
    let names = ["never", "below 1/4 of the average", "1/4", "0.7", "1.4", "2.8", "5.6 times and more"];
    let mut x = MARGIN;
    for (name, colour) in names.iter().zip(COLOURS) {
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"14\" height=\"14\" fill=\"{colour}\" stroke=\"#bbbbbb\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
            x + 20.0,
            y + 11.0
        );
        x += 46.0 + 6.5 * name.len() as f64;
    }
    let _ = writeln!(
        svg,
        "<text x=\"{MARGIN}\" y=\"{:.1}\">experts of a layer from left to right, layers from top to bottom</text>",
        y + 34.0
    );
}

fn colour(count: u64, mean: f64) -> usize {
    match count {
        0 => 0,
        _ => 1 + STEPS.iter().filter(|&&step| count as f64 >= step * mean).count(),
    }
}
