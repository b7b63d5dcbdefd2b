//! The `census` command: what a model's bytes are for, by part and by format, and what single tensors hold.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::checkpoint::census::{Census, Sample, Tally};
use crate::checkpoint::{Checkpoint, CheckpointError, Part};

use super::args::{ModelArgs, WidthArgs};
use super::machine::Machine;
use super::svg::{self, COLOURS};
use super::{Done, Failure, job, output, size};

/// Packed bytes, scales and values of a sample.
const SAMPLE_VALUES: usize = 16;

/// Flags of `census`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream census /models/glm-5.2-int4 --svg census.svg
  millstream census -m /models/glm-5.2-int4 --sample model.layers.3.mlp.experts.0.gate_proj.weight

Only headers are read, and the beginning of what is sampled. The lines add up to the bytes of the shards.
Exit codes: 0 done, 1 the work failed, 2 usage.")]
pub struct CensusArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Show the first bytes of this tensor as they are stored, and the values they stand for; may be given again
    #[arg(long, value_name = "TENSOR")]
    sample: Vec<String>,
    /// Draw the census into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Counts, and prints.
pub fn census(args: &CensusArgs, machine: &Machine) -> Result<Done, Failure> {
    if let Some(path) = &args.svg {
        output::check(path, "picture", &args.model.inputs(machine))?;
    }
    let Some((checkpoint, _)) = job::open_model(&args.model, WidthArgs::default(), machine)? else {
        return Ok(Done::Interrupted);
    };
    let failed = |error: CheckpointError| Failure::of(&error).hint(error.hint());
    let census = Census::take(&checkpoint).map_err(failed)?;
    let mut samples = Vec::new();
    for name in &args.sample {
        let sample = Sample::read(&checkpoint, name, SAMPLE_VALUES).map_err(failed)?;
        samples.push(sample.ok_or_else(|| unknown(&checkpoint, name))?);
    }
    let text = if args.json {
        as_json(&checkpoint, &census, &samples).to_string() + "\n"
    } else {
        as_text(&checkpoint, &census) + &samples.iter().map(|s| sample_text(&checkpoint, s)).collect::<String>()
    };
    let closed = output::print(&text)?;
    if let Some(path) = &args.svg {
        output::write(path, "picture", picture(&checkpoint, &census))?;
    }
    Ok(closed.unwrap_or(Done::Whole))
}

/// The refusal of a name that no shard has, with those that are like it.
fn unknown(checkpoint: &Checkpoint, name: &str) -> Failure {
    let mut like: Vec<&str> =
        checkpoint.tensors.iter().map(|(known, _)| known).filter(|known| known.contains(name)).collect();
    like.sort_unstable();
    let hint = match like.as_slice() {
        [] => "names are like model.layers.0.self_attn.o_proj.weight".to_owned(),
        [one] => format!("there is {one}"),
        [first, ..] => format!("there are {} with this in their names, such as {first}", like.len()),
    };
    Failure::usage(format!("no shard of {} has a tensor {name}", checkpoint.dir.display())).hint(hint)
}

fn as_text(checkpoint: &Checkpoint, census: &Census) -> String {
    let (tensors, shards) = (checkpoint.tensors.len() as u64, checkpoint.tensors.paths().len());
    let mut text = format!(
        "{}: {} in {shards} shard{}, {} tensors\n\n",
        checkpoint.dir.display(),
        size::show(census.bytes),
        if shards == 1 { "" } else { "s" },
        size::grouped(tensors),
    );
    let _ = writeln!(
        text,
        "{:<16} {:<10} {:>9} {:>17} {:>5} {:>9} {:>7}",
        "part", "format", "tensors", "weights", "bits", "bytes", "share"
    );
    let mut row = |part: &str, format: &str, tally: Tally| {
        let bits = if tally.weights == 0 { 0.0 } else { tally.bytes as f64 * 8.0 / tally.weights as f64 };
        let (weights, bytes) = (size::grouped(tally.weights), size::show(tally.bytes));
        let _ = writeln!(
            text,
            "{part:<16} {format:<10} {:>9} {weights:>17} {bits:>5.2} {bytes:>9} {:>5.1} %",
            size::grouped(tally.tensors),
            share(tally.bytes, census)
        );
    };
    for (&(part, format), &tally) in &census.kinds {
        row(part.name(), &format.to_string(), tally);
    }
    row("all that is used", "", census.used());
    text += "\n";
    for (name, bytes) in [("not used", census.unused_bytes), ("headers, padding", census.other_bytes)] {
        let _ = writeln!(text, "{name:<16} {:>53} {:>5.1} %", size::show(bytes), share(bytes, census));
    }
    text += "\n";
    for format in census.formats() {
        let tally = census.format(format);
        let _ = writeln!(
            text,
            "{:<16} {:>53} {:>5.1} %",
            format.to_string(),
            size::show(tally.bytes),
            share(tally.bytes, census)
        );
    }
    text
}

fn share(bytes: u64, census: &Census) -> f64 {
    100.0 * bytes as f64 / census.bytes.max(1) as f64
}

fn sample_text(checkpoint: &Checkpoint, sample: &Sample) -> String {
    let Sample { name, tensor, .. } = sample;
    let scales = if sample.scales_of.is_some() { "scales of " } else { "" };
    let part = sample.part.map_or("not used by the model", Part::name);
    let format = sample.spec.map_or_else(
        || format!("{}, which says nothing of values", tensor.describe()),
        |spec| format!("{} [{}, {}]", spec.format, spec.rows, spec.cols),
    );
    let mut text = format!("\n{name}: {scales}{part}, {format}\n");
    let shard = checkpoint.tensors.path(tensor.file);
    let scales = if sample.scale_bytes > 0 {
        format!(" and {} of scales", size::show(sample.scale_bytes))
    } else {
        String::new()
    };
    let _ = writeln!(
        text,
        "  in {} from byte {}, {} bytes{scales}",
        shard.display(),
        size::grouped(tensor.offset),
        size::grouped(tensor.bytes)
    );
    let mut line = |name: &str, values: Vec<String>| {
        if !values.is_empty() {
            let _ = writeln!(text, "  {name:<7} {}", values.join(" "));
        }
    };
    line("packed", sample.packed.iter().map(|byte| format!("{byte:02x}")).collect());
    line("scales", sample.scales.iter().map(|scale| format!("{scale:.6e}")).collect());
    line("values", sample.values.iter().map(|value| format!("{value:.6}")).collect());
    text
}

fn as_json(checkpoint: &Checkpoint, census: &Census, samples: &[Sample]) -> Json {
    let row = |tally: Tally| json!({ "tensors": tally.tensors, "weights": tally.weights, "bytes": tally.bytes });
    let kinds = census.kinds.iter().map(|((part, format), &tally)| {
        let mut object = row(tally);
        object["part"] = part.name().into();
        object["format"] = format.to_string().into();
        object
    });
    let formats = census.formats().into_iter().map(|format| (format.to_string(), row(census.format(format))));
    let samples = samples.iter().map(|sample| {
        json!({
            "tensor": sample.name,
            "part": sample.part.map(Part::name),
            "scales_of": sample.scales_of,
            "format": sample.spec.map(|spec| spec.format.to_string()),
            "shape": sample.spec.map(|spec| [spec.rows, spec.cols]),
            "dtype": sample.tensor.dtype.name(),
            "shard": checkpoint.tensors.path(sample.tensor.file).display().to_string(),
            "offset": sample.tensor.offset,
            "bytes": sample.tensor.bytes,
            "packed": sample.packed,
            "scales": sample.scales,
            "values": sample.values,
        })
    });
    json!({
        "schema_version": 1,
        "dir": checkpoint.dir.display().to_string(),
        "shards": checkpoint.tensors.paths().len(),
        "tensors": checkpoint.tensors.len(),
        "bytes": census.bytes,
        "used": row(census.used()),
        "unused_bytes": census.unused_bytes,
        "other_bytes": census.other_bytes,
        "kinds": kinds.collect::<Vec<_>>(),
        "formats": formats.collect::<serde_json::Map<_, _>>(),
        "samples": samples.collect::<Vec<_>>(),
    })
}

/// A bar for each part, its formats side by side. The scale is logarithmic: norms and experts are six powers apart.
fn picture(checkpoint: &Checkpoint, census: &Census) -> String {
    let (left, top, full, height) = (150.0, 84.0, 520.0, 30.0);
    let parts: Vec<Part> = Part::ALL.into_iter().filter(|&part| census.part(part).bytes > 0).collect();
    let formats = census.formats();
    let end = top + height * parts.len() as f64 + 70.0;
    let mut picture = svg::begin(820.0, end, 12);
    svg::text(&mut picture, 20.0, 28.0, "start", 17.0, "What the bytes are for");
    let name = checkpoint.dir.file_name().unwrap_or(checkpoint.dir.as_os_str()).to_string_lossy();
    let under = format!(
        "{name}: {} of shards, {} values; the scale is logarithmic",
        size::show(census.bytes),
        size::grouped(census.used().weights)
    );
    svg::text(&mut picture, 20.0, 48.0, "start", 12.0, &under);
    let largest = parts.iter().map(|&part| census.part(part).bytes).max().unwrap_or(1).max(1000) as f64;
    // A power of ten, so that the others on the axis are too.
    let most = 10f64.powf(largest.log10().ceil());
    // From a hundredth of a hundredth of a percent on; what is smaller has a stub.
    let x = |bytes: u64| full * (1.0 + (bytes.max(1) as f64 / most).log10() / 6.0).clamp(0.01, 1.0);
    let bottom = top + height * parts.len() as f64;
    for power in 0..=6 {
        let at = left + full * f64::from(power) / 6.0;
        svg::line(&mut picture, (at, top - 8.0), (at, bottom), "#dddddd", 1.0);
        let bytes = most / 10f64.powi(6 - power);
        svg::text(&mut picture, at, top - 14.0, "middle", 10.0, &size::show(bytes as u64));
    }
    for (row, &part) in parts.iter().enumerate() {
        let (y, all) = (top + height * row as f64, census.part(part).bytes);
        svg::text(&mut picture, left - 10.0, y + 15.0, "end", 12.0, part.name());
        let mut from = left;
        for (number, &format) in formats.iter().enumerate() {
            let Some(tally) = census.kinds.get(&(part, format)) else { continue };
            let width = x(all) * tally.bytes as f64 / all as f64;
            svg::bar(&mut picture, (from, y), (width, height - 10.0), COLOURS[number % COLOURS.len()]);
            from += width;
        }
        let said = format!("{} ({:.1} %)", size::show(all), share(all, census));
        svg::text(&mut picture, from + 8.0, y + 15.0, "start", 11.0, &said);
    }
    let mut at = left;
    for (number, format) in formats.iter().enumerate() {
        svg::bar(&mut picture, (at, bottom + 24.0), (14.0, 14.0), COLOURS[number % COLOURS.len()]);
        let said = format!("{format} {}", size::show(census.format(*format).bytes));
        svg::text(&mut picture, at + 20.0, bottom + 36.0, "start", 12.0, &said);
        at += 40.0 + 7.5 * said.len() as f64;
    }
    picture + "</svg>\n"
}
