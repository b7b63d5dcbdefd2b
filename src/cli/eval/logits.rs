//! `eval logits`: the logits of given tokens against those that a file has of them.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::kept::Kept;
use super::{Common, Examiner, NO_DISTRIBUTION_HINT, Subject, ids, show};
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, output, render, size};
use crate::engine::quality::{Quality, Window};

/// Flags of `eval logits`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream eval logits reference.safetensors --activations f32
  millstream eval logits logits.npy --ids-file ids.npy -m /models/glm-5.2-int4 --bound 1e-3

The file has the logits that another program gave for the same tokens: a safetensors file with the tensors `logits`, [positions, \
vocab] or [sequences, positions, vocab], and `ids`, or an array of numpy.save beside --ids-file. Fewer positions than tokens are \
the last ones, or begin at first_position of the file's metadata. With --bound the exit code is 1 where a logit is off by more.")]
pub struct LogitsArgs {
    /// The logits to compare with
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Their token ids, where the file has none: a list, or an array of numpy.save
    #[arg(long, value_name = "FILE")]
    ids_file: Option<PathBuf>,
    /// The largest difference that will do [default: none]
    #[arg(long, value_name = "X", value_parser = parse_bound)]
    bound: Option<f64>,
    #[command(flatten)]
    common: Common,
}

/// Reads `--bound`.
fn parse_bound(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(bound) if bound >= 0.0 && bound.is_finite() => Ok(bound),
        _ => Err("it must be a number from 0 on, such as 1e-4".to_owned()),
    }
}

/// The logits, and the tokens that they are of.
struct Reference {
    kept: Kept,
    ids: Vec<u32>,
    /// Tokens of a sequence.
    length: usize,
    /// Position of a sequence that its first logits are of.
    first: usize,
}

/// How far logits are from others.
#[derive(Clone, Debug, Default, PartialEq)]
struct Difference {
    largest: f64,
    /// Where that is: sequence, position, token id, and the two logits.
    place: Option<(usize, usize, usize, f32, f32)>,
    squares: f64,
    count: usize,
    /// Position after position, a sequence each.
    windows: Vec<Window>,
}

/// Compares and reports.
pub fn logits(args: &LogitsArgs, machine: &Machine) -> Result<Done, Failure> {
    let Some(subject) = Subject::open(&args.common, machine)? else { return Ok(Done::Interrupted) };
    let mut reference = Reference::open(args, subject.checkpoint.arch.vocab)?;
    subject.check_length(reference.length, "sequences")?;
    let dir = subject.files.dir.clone();
    let Some(mut examiner) = subject.load(reference.length)? else { return Ok(Done::Interrupted) };
    let (difference, interrupted) = compare(&mut examiner, &mut reference, &args.file)?;
    let (cost, settings) = examiner.leave();
    if difference.count == 0 {
        render::stderr("interrupted before the first sequence was compared\n");
        return Ok(Done::Interrupted);
    }
    let quality = Quality::of(&difference.windows);
    let is_within = args.bound.is_none_or(|bound| difference.largest <= bound);
    let text = if args.common.json {
        let place = difference.place.map(|(sequence, position, token, ours, theirs)| {
            json!({ "sequence": sequence, "position": position, "token": token, "logit": ours, "reference": theirs })
        });
        let object = json!({
            "schema_version": 1,
            "eval": "logits",
            "model": dir.display().to_string(),
            "reference": args.file.display().to_string(),
            "sequences": difference.windows.len(),
            "positions": difference.positions(),
            "agreement": difference.agreement(),
            "difference_largest": difference.largest,
            "difference_place": place,
            "difference_rms": difference.rms(),
            "divergence_nats": difference.divergence(),
            "divergence_largest": difference.divergence_largest(),
            "compared": quality.map(|quality| show::compared_json(&quality, &difference.windows)),
            "bound": args.bound,
            "within_bound": args.bound.map(|_| is_within),
            "interrupted": interrupted,
            "settings": show::settings(&settings),
            "cost": cost.json(),
        });
        format!("{object:#}\n")
    } else {
        text_of(&difference, interrupted, args.bound)
    };
    let closed = output::print(&text)?;
    Ok(match closed {
        Some(done) => done,
        None if interrupted => Done::Interrupted,
        None if !is_within => Done::Unwell,
        None => Done::Whole,
    })
}

impl Reference {
    fn open(args: &LogitsArgs, vocab: usize) -> Result<Reference, Failure> {
        let kept = Kept::open(&args.file, vocab)?;
        let [sequences, positions, _] = kept.shape;
        let bad =
            |cause: String| Failure::usage(format!("cannot use the logits of {}", args.file.display())).cause(cause);
        let (ids, length) = match (&args.ids_file, &kept.ids) {
            (Some(path), _) => {
                let ids::Ids { ids, row } = ids::read(path, vocab)?;
                let length = row.unwrap_or(ids.len() / sequences);
                (ids, length)
            }
            (None, Some((ids, length))) => (ids.clone(), *length),
            (None, None) => {
                return Err(
                    bad("it does not say of which tokens they are".to_owned()).hint("name their ids with --ids-file")
                );
            }
        };
        if ids.len() != sequences * length || length == 0 {
            return Err(bad(format!("it has {sequences} sequences, and the ids are {}", ids.len())));
        }
        let Some(first) = kept.first.or(length.checked_sub(positions)).filter(|first| first + positions <= length)
        else {
            return Err(bad(format!("it has logits of {positions} positions, and a sequence {length} tokens")));
        };
        Ok(Reference { kept, ids, length, first })
    }
}

/// Puts every sequence through the model; whether the user stopped it comes second.
fn compare(examiner: &mut Examiner, reference: &mut Reference, path: &Path) -> Result<(Difference, bool), Failure> {
    let Reference { kept, ids, length, first } = reference;
    let [sequences, positions, _] = kept.shape;
    let waiting = render::Waiting::begin("scoring the first sequence", examiner.quiet);
    let mut difference = Difference::default();
    for (sequence, ids) in ids.chunks_exact(*length).enumerate() {
        let mut window = Window::default();
        let mut partial = Difference { windows: Vec::new(), ..difference.clone() };
        let mut row = |position: usize, ours: &[f32]| {
            let Some(at) = position.checked_sub(*first).filter(|at| *at < positions) else { return Ok(()) };
            let theirs = kept.row(sequence, at)?;
            let whole = window.add(theirs, ours, ids.get(position + 1).copied());
            whole.map_err(|error| {
                let whose = if error.base { path.display().to_string() } else { "the model".to_owned() };
                Failure::work(format!(
                    "the logits of {whose} are not finite at position {position} of sequence {sequence}"
                ))
                .hint(NO_DISTRIBUTION_HINT)
            })?;
            partial.take(sequence, position, ours, theirs);
            Ok(())
        };
        if !examiner.score(0, ids, &mut row)? {
            return Ok((difference, true));
        }
        partial.windows = std::mem::take(&mut difference.windows);
        partial.windows.push(window);
        difference = partial;
        waiting.say(format!("{} of {sequences} sequences are compared", sequence + 1));
    }
    Ok((difference, false))
}

impl Difference {
    fn take(&mut self, sequence: usize, position: usize, ours: &[f32], theirs: &[f32]) {
        for (token, (&ours, &theirs)) in ours.iter().zip(theirs).enumerate() {
            // What cannot come to both is as far off as it can be from nothing.
            let off = if ours == theirs { 0.0 } else { (f64::from(ours) - f64::from(theirs)).abs() };
            self.squares += off * off;
            if off > self.largest {
                self.largest = off;
                self.place = Some((sequence, position, token, ours, theirs));
            }
        }
        self.count += ours.len();
    }

    fn positions(&self) -> usize {
        self.windows.iter().map(|window| window.divergences.len()).sum()
    }

    fn agreement(&self) -> f64 {
        self.windows.iter().map(|window| window.same).sum::<usize>() as f64 / self.positions() as f64
    }

    fn rms(&self) -> f64 {
        (self.squares / self.count as f64).sqrt()
    }

    fn divergence(&self) -> f64 {
        self.divergences().sum::<f64>() / self.positions() as f64
    }

    fn divergence_largest(&self) -> f64 {
        self.divergences().fold(f64::NEG_INFINITY, f64::max)
    }

    fn divergences(&self) -> impl Iterator<Item = f64> {
        self.windows.iter().flat_map(|window| window.divergences.iter().copied())
    }
}

fn text_of(difference: &Difference, interrupted: bool, bound: Option<f64>) -> String {
    let (positions, sequences) = (difference.positions(), difference.windows.len());
    let mut text =
        format!("{} of {}\n", size::counted(positions as u64, "position"), size::counted(sequences as u64, "sequence"));
    if interrupted {
        text += "interrupted: there are more\n";
    }
    let place = difference.place.map_or_else(String::new, |(sequence, position, token, ours, theirs)| {
        format!(", token {token} at position {position} of sequence {sequence}: {ours} here, {theirs} there")
    });
    text += &format!("largest difference  {:.3e}{place}\n", difference.largest);
    text += &format!("root mean square    {:.3e}\n", difference.rms());
    text += &format!("same most likely    {:.3} %\n", 100.0 * difference.agreement());
    text += &format!(
        "divergence, nats    {:.3e} on average, {:.3e} at most\n",
        difference.divergence(),
        difference.divergence_largest()
    );
    if let Some(bound) = bound {
        let is_within = if difference.largest <= bound { "within" } else { "beyond" };
        text += &format!("{is_within} the bound of {bound:e}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_and_its_place_are_found() {
        let mut difference = Difference::default();
        let never = f32::NEG_INFINITY;
        difference.take(0, 3, &[1.0, 2.0, never], &[1.0, 2.25, never]);
        difference.take(1, 4, &[1.0, 2.0, 3.0], &[1.0, 2.0, 2.5]);
        assert_eq!((difference.largest, difference.place), (0.5, Some((1, 4, 2, 3.0, 2.5))));
        assert_eq!(difference.rms(), (0.3125f64 / 6.0).sqrt());
        difference.windows = vec![Window { divergences: vec![0.5, 0.25], same: 1, ..Window::default() }];
        assert_eq!(
            (difference.agreement(), difference.divergence(), difference.divergence_largest()),
            (0.5, 0.375, 0.5)
        );
        let text = text_of(&difference, false, Some(0.4));
        assert!(text.contains("token 2 at position 4 of sequence 1: 3 here, 2.5 there"), "{text}");
        assert!(text.contains("beyond the bound of 4e-1") && text.starts_with("2 positions of 1 sequence\n"), "{text}");
    }

    #[test]
    fn a_bound_is_a_number_from_nothing_on() {
        assert_eq!(parse_bound("1e-4"), Ok(1e-4));
        for bad in ["-1", "nan", "inf", "x"] {
            assert!(parse_bound(bad).is_err(), "{bad}");
        }
    }
}
