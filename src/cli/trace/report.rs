//! `trace report`: what is in traces, as text, JSON and a picture.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::meter::Share;
use crate::store::trace::Trace;
use crate::store::trace::report::{Foretold, LayerReport, Report};

use super::{read_all, shape, svg};
use crate::cli::{Done, Failure, output, size};

/// Columns of the picture in text.
const COLUMNS: usize = 64;
/// From never chosen to chosen four times as often as the average.
const SHADES: [char; 6] = [' ', '.', ':', '+', '*', '#'];
const BAR: usize = 40;

/// Flags of `trace report`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream trace report fox.trace
  millstream trace report tales.trace --svg heat.svg --json")]
pub struct ReportArgs {
    /// Traces of one model
    #[arg(value_name = "FILE", required = true)]
    traces: Vec<PathBuf>,
    /// Draw the heat of every expert into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Looks at traces.
pub fn report(args: &ReportArgs) -> Result<Done, Failure> {
    let traces = read_all(&args.traces)?;
    if let Some(path) = &args.svg {
        output::check(path, "picture", &args.traces)?;
    }
    let report = Report::of(&traces.iter().collect::<Vec<_>>());
    let head = head(&traces);
    let closed = output::print(&if args.json { json_text(&traces, &report) } else { text(&head, &report) })?;
    if let Some(path) = &args.svg {
        output::write(path, "picture", svg::draw(&head, &report))?;
    }
    Ok(closed.unwrap_or(Done::Whole))
}

fn head(traces: &[Trace]) -> String {
    let tokens: u64 = traces.iter().map(Trace::tokens).sum();
    let steps: usize = traces.iter().map(Trace::steps).sum();
    format!("{}; {} tokens in {} steps", shape(&traces[0]), size::grouped(tokens), size::grouped(steps as u64))
}

fn text(head: &str, report: &Report) -> String {
    let mut text = format!(
        "{head}\n\nheat of experts, a line a layer ('.' less than half of the average, '#' four times as much)\n"
    );
    for layer in &report.layers {
        let _ = writeln!(text, "{:>6} |{}|", layer.layer, heat_line(&layer.selections));
    }
    text += "\n layer   hottest quarter   Gini   entropy\n";
    for LayerReport { layer, gini, entropy_bits, hottest_quarter, .. } in &report.layers {
        let quarter = format!("{:.1} %", 100.0 * hottest_quarter);
        let _ = writeln!(text, "{layer:>6}{quarter:>18}{gini:>7.3}{entropy_bits:>10.2}");
    }
    foretold(&mut text, report);
    text += "\nreuse distance: different experts asked for between two uses of one\n";
    let most = report.reuse.iter().copied().chain([report.first_uses]).max().unwrap_or(0).max(1);
    let mut line = |name: String, count: u64| {
        let bar = "#".repeat((count as f64 / most as f64 * BAR as f64).round() as usize);
        let _ = writeln!(text, "{name:>12} {:>12} {bar}", size::grouped(count));
    };
    for (place, &count) in report.reuse.iter().enumerate() {
        line(format!("below {}", 1u64 << place), count);
    }
    line("first use".into(), report.first_uses);
    text
}

/// How well the choices of each layer can be foretold.
fn foretold(text: &mut String, report: &Report) {
    *text += "\nrecall: of what a token chose, what the token before had chosen ('p'), and what was guessed one layer before \
              (to the end of '#') and two layers before ('2')\n layer   token before   one layer   two layers\n";
    let share = |share: Share| share.fraction().map_or_else(|| "-".into(), |share| format!("{:.1} %", 100.0 * share));
    let mut line = |name: &str, foretold: &Foretold| {
        let Foretold { previous, recall, .. } = foretold;
        let _ = writeln!(
            text,
            "{name:>6}{:>15}{:>12}{:>13}  |{}|",
            share(*previous),
            share(recall[0]),
            share(recall[1]),
            recall_bar(foretold)
        );
    };
    report.layers.iter().for_each(|layer| line(&layer.layer.to_string(), &layer.foretold));
    line("all", &report.foretold());
}

/// Recall from none to all.
fn recall_bar(foretold: &Foretold) -> String {
    let column = |share: Share| share.fraction().map(|share| (share * BAR as f64).round() as usize);
    let mut bar = [' '; BAR];
    bar[..column(foretold.recall[0]).unwrap_or(0)].fill('#');
    for (mark, share) in [('p', foretold.previous), ('2', foretold.recall[1])] {
        if let Some(column) = column(share) {
            bar[column.saturating_sub(1)] = mark;
        }
    }
    bar.iter().collect()
}

/// Selections as shades; experts share a column where there are more than columns.
fn heat_line(selections: &[u64]) -> String {
    let total: u64 = selections.iter().sum();
    let mean = total as f64 / selections.len() as f64;
    let per_column = selections.len().div_ceil(COLUMNS);
    let shade = |experts: &[u64]| {
        let heat = experts.iter().sum::<u64>() as f64 / experts.len() as f64;
        SHADES[shade(heat, mean)]
    };
    selections.chunks(per_column).map(shade).collect()
}

/// The shade of `heat` beside the average.
fn shade(heat: f64, mean: f64) -> usize {
    if heat == 0.0 {
        return 0;
    }
    1 + [0.5, 1.0, 2.0, 4.0].iter().filter(|&&factor| heat >= factor * mean).count()
}

fn json_text(traces: &[Trace], report: &Report) -> String {
    let layers: Vec<Json> = report
        .layers
        .iter()
        .map(|layer| {
            let mut json = json!({
                "layer": layer.layer,
                "selections": layer.selections,
                "gini": rounded(layer.gini),
                "entropy_bits": rounded(layer.entropy_bits),
                "hottest_quarter": rounded(layer.hottest_quarter),
            });
            add_foretold(&mut json, &layer.foretold);
            json
        })
        .collect();
    let header = traces[0].header();
    let mut json = json!({
        "schema_version": 1,
        "model": format!("{:016x}", header.fingerprint),
        "experts": header.experts,
        "top_k": header.top_k,
        "tokens": traces.iter().map(Trace::tokens).sum::<u64>(),
        "layers": layers,
        "reuse_distance_below_power_of_two": report.reuse,
        "first_uses": report.first_uses,
    });
    add_foretold(&mut json, &report.foretold());
    json.to_string() + "\n"
}

fn add_foretold(json: &mut Json, foretold: &Foretold) {
    let share = |share: Share| share.fraction().map_or(Json::Null, rounded);
    let Foretold { previous, recall: [one, two] } = *foretold;
    json["previous_token_recall"] = share(previous);
    json["lookahead_recall"] = share(one);
    json["lookahead_recall_two_ahead"] = share(two);
}

fn rounded(value: f64) -> Json {
    Json::from((value * 1e6).round() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_are_told_by_the_average() {
        // The average is 2.
        assert_eq!(heat_line(&[0, 0, 1, 2, 3, 4, 8, 0, 0, 2]), "  :++*#  +");
        let many: Vec<u64> = (0..128).map(|expert| u64::from(expert < 2)).collect();
        assert_eq!(heat_line(&many).trim_end(), "#");
        assert_eq!(heat_line(&many).len(), 64);
    }
}
