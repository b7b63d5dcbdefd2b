//! The arms of the trial: which are tried, how they are run against each other, and which one is kept.

use millstream_io::measure::{Candidate, Summary};

use super::Conditions;
use super::choose::{self, Pair, Rerun, Sample};
use super::trial::Measured;
use crate::cli::Failure;
use crate::cli::reading::Reading;
use crate::cli::render::Waiting;

/// Generations of each way of reading before the rerun.
pub const ROUNDS: usize = 3;
/// Pairs of the rerun.
pub const PAIRS: usize = 6;

/// A way of reading, what was measured of it, and what became of it.
pub struct Arm {
    /// The way of reading.
    pub candidate: Candidate,
    /// The settings that ask for it.
    pub reading: Reading,
    /// Reads alone.
    pub summary: Option<Summary>,
    /// Generations.
    pub samples: Vec<Sample>,
    /// Why it could not be had.
    pub unavailable: Option<String>,
    /// Whether it is tried in generations.
    pub tried: bool,
}

/// The challenger that was fastest at first, and its rerun.
pub struct Lead {
    /// Its position.
    pub arm: usize,
    /// The rerun.
    pub pairs: Vec<Pair>,
}

/// Whether the user let a part of the work come to its end.
pub enum Went<T> {
    /// They did.
    On(T),
    /// They did not.
    Stopped,
}

/// Generates once, reading this way; `None` where the user stopped it.
pub type Run<'a> = dyn FnMut(&Reading) -> Result<Option<Measured>, Failure> + 'a;

/// The candidates with what was measured of them; the first is the default.
pub fn arms(candidates: &[Candidate], results: &[Summary], unavailable: &[(String, String)]) -> Vec<Arm> {
    let mut arms: Vec<Arm> = candidates
        .iter()
        .enumerate()
        .map(|(index, candidate)| {
            let name = candidate.to_string();
            Arm {
                candidate: *candidate,
                reading: if index == 0 { Reading::DEFAULT } else { Reading::of(candidate) },
                summary: results.iter().find(|summary| summary.candidate == *candidate).cloned(),
                samples: Vec::new(),
                unavailable: unavailable.iter().find(|(other, _)| *other == name).map(|(_, why)| why.clone()),
                tried: false,
            }
        })
        .collect();
    let challengers = choose::challengers(results, &candidates[0]);
    for challenger in challengers {
        let candidate = results[challenger].candidate;
        arms.iter_mut().filter(|arm| arm.candidate == candidate).for_each(|arm| arm.tried = true);
    }
    arms[0].tried = arms.iter().any(|arm| arm.tried);
    arms
}

/// Generates with every arm that is to be tried, then once more with the one that leads.
pub fn generate(
    arms: &mut [Arm],
    run: &mut Run,
    progress: &Waiting,
    conditions: &mut Conditions,
) -> Result<Went<Option<Lead>>, Failure> {
    let mut order: Vec<usize> = (0..arms.len()).filter(|index| arms[*index].tried).collect();
    for round in 0..ROUNDS {
        for (done, index) in order.iter().enumerate() {
            let (number, count) = (round * order.len() + done + 1, ROUNDS * order.len());
            progress.say(format!("generation {number} of {count}, {}", arms[*index].reading));
            let Went::On(measured) = one(*index, arms, run)? else { return Ok(Went::Stopped) };
            if let Some(Measured { sample, bytes, direct, .. }) = measured {
                arms[*index].samples.push(sample);
                if *index == 0 {
                    (conditions.bytes, conditions.direct) = (bytes, direct);
                    conditions.cold &= !sample.cached;
                }
            }
        }
        order.reverse();
    }
    let rate = |arm: &Arm| choose::rate(&arm.samples).filter(|_| arm.unavailable.is_none());
    let others: Vec<Option<f64>> = arms[1..].iter().map(rate).collect();
    let Some(leader) = choose::leader(rate(&arms[0]), &others).map(|index| index + 1) else {
        return Ok(Went::On(None));
    };
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        progress.say(format!("rerun {} of {PAIRS}, {} against the defaults", number + 1, arms[leader].reading));
        // The other way round than before, and every time the other way round.
        let first = if number % 2 == 0 { [leader, 0] } else { [0, leader] };
        let mut rates = [None; 2];
        for index in first {
            let Went::On(measured) = one(index, arms, run)? else { return Ok(Went::Stopped) };
            rates[usize::from(index == 0)] = measured.map(|m| m.sample).filter(|s| !s.cached).map(|s| s.tok_s);
        }
        if let [Some(challenger), Some(default)] = rates {
            pairs.push(Pair { challenger, default });
        }
    }
    Ok(Went::On(Some(Lead { arm: leader, pairs })))
}

/// A generation with one arm; none where it cannot be had. The defaults must be had.
fn one(index: usize, arms: &mut [Arm], run: &mut Run) -> Result<Went<Option<Measured>>, Failure> {
    if arms[index].unavailable.is_some() {
        return Ok(Went::On(None));
    }
    match run(&arms[index].reading) {
        Ok(None) => Ok(Went::Stopped),
        Ok(measured) => Ok(Went::On(measured)),
        Err(failure) if index == 0 => Err(failure),
        Err(failure) => {
            let cause = failure.cause.map(|cause| format!(": {cause}")).unwrap_or_default();
            arms[index].unavailable = Some(failure.error + &cause);
            Ok(Went::On(None))
        }
    }
}

/// The arm that is kept, and why.
pub fn verdict(arms: &[Arm], lead: Option<&Lead>) -> (usize, String) {
    let stay = |why: &str| (0, format!("the defaults are best here: {why}"));
    if !arms[0].tried {
        return stay("there is no other way of reading, or memory served all of them");
    }
    if arms[0].samples.iter().any(|sample| sample.cached) {
        return stay("memory served some of their reads, so that nothing can be told of the drive");
    }
    let Some(Lead { arm: leader, pairs }) = lead else {
        return stay("no other way of reading generated 3 % faster");
    };
    let name = &arms[*leader].reading;
    let found = match Rerun::of(pairs) {
        Some(found) if found.pairs == PAIRS => found,
        _ => return stay(&format!("{name} led, but not all of its rerun could be measured")),
    };
    let percent = 100.0 * (found.gain - 1.0);
    let told = format!("in the median of {} reversed pairs, faster in {} of them", found.pairs, found.faster);
    match found.holds() {
        true => (*leader, format!("{name} generates {percent:.1} % faster than the defaults {told}")),
        false => stay(&format!("{name} led at first, but its rerun gained {percent:.1} % {told}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Depth;

    fn arm(rates: &[f64], cached: bool) -> Arm {
        Arm {
            candidate: Candidate::RING,
            reading: Reading::of(&Candidate::RING),
            summary: None,
            samples: rates.iter().map(|&tok_s| Sample { tok_s, cached }).collect(),
            unavailable: None,
            tried: true,
        }
    }

    fn pairs(gain: f64, count: usize) -> Lead {
        Lead { arm: 1, pairs: vec![Pair { challenger: 10.0 * gain, default: 10.0 }; count] }
    }

    /// Arms of the depths 1, 2, ... that are tried, the first by the name of the defaults.
    fn by_depth(count: u32) -> Vec<Arm> {
        let arm = |depth| Arm { reading: Reading::of(&Candidate { depth, ..Candidate::RING }), ..arm(&[], false) };
        (1..=count).map(arm).collect()
    }

    fn conditions() -> Conditions {
        Conditions { prompt_tokens: 1, tokens: 1, slabs: 1, experts: 1, bytes: 0, direct: true, cold: true }
    }

    /// Generates with arms whose rates are `rates`, 0 for one that cannot be had and an end at `stop`; which were run.
    fn generated(rates: &[f64], stop: usize) -> (Result<Went<Option<Lead>>, Failure>, Vec<usize>) {
        let mut arms = by_depth(rates.len() as u32);
        let mut ran = Vec::new();
        let mut run = |reading: &Reading| {
            let Depth::Slabs(depth) = reading.depth else { panic!("{reading}") };
            ran.push(depth as usize - 1);
            let tok_s = rates[depth as usize - 1];
            if tok_s == 0.0 {
                return Err(Failure::work("refused"));
            }
            let sample = Sample { tok_s, cached: false };
            Ok((ran.len() < stop).then_some(Measured { sample, bytes: 7, before_s: 0.0, direct: true }))
        };
        let outcome = generate(&mut arms, &mut run, &Waiting::begin("", true), &mut conditions());
        (outcome, ran)
    }

    #[test]
    fn arms_take_turns_in_reversed_order_and_the_rerun_begins_with_the_one_that_did_not_come_last() {
        let (outcome, ran) = generated(&[10.0, 11.0, 12.0], usize::MAX);
        let rounds = [0, 1, 2, 2, 1, 0, 0, 1, 2];
        let rerun = [2, 0, 0, 2, 2, 0, 0, 2, 2, 0, 0, 2];
        assert_eq!(ran, [&rounds[..], &rerun[..]].concat());
        let Ok(Went::On(Some(lead))) = outcome else { panic!("depth 3 leads") };
        assert_eq!((lead.arm, lead.pairs), (2, vec![Pair { challenger: 12.0, default: 10.0 }; PAIRS]));
    }

    #[test]
    fn what_cannot_be_had_is_run_once_and_without_a_gain_there_is_no_rerun() {
        let (outcome, ran) = generated(&[10.0, 0.0, 10.2], usize::MAX);
        assert_eq!(ran, [0, 1, 2, 2, 0, 0, 2]);
        assert!(matches!(outcome, Ok(Went::On(None))));
        assert!(generated(&[0.0, 11.0], usize::MAX).0.is_err(), "the defaults must be had");
    }

    #[test]
    fn whoever_stops_it_stops_it_at_once() {
        for stop in [1, 4, 10, 15] {
            let (outcome, ran) = generated(&[10.0, 11.0, 12.0], stop);
            assert!(matches!(outcome, Ok(Went::Stopped)) && ran.len() == stop, "{stop}: {ran:?}");
        }
    }

    #[test]
    fn only_a_gain_that_holds_up_is_kept() {
        let arms = [arm(&[10.0], false), arm(&[11.0], false)];
        let (kept, reason) = verdict(&arms, Some(&pairs(1.05, PAIRS)));
        assert_eq!(kept, 1);
        assert!(
            reason.contains("--depth 4 generates 5.0 % faster than the defaults in the median of 6 reversed pairs"),
            "{reason}"
        );
        for (rerun, words) in [
            (Some(pairs(1.02, PAIRS)), "gained 2.0 % in the median of 6 reversed pairs, faster in 6"),
            (Some(pairs(1.05, PAIRS - 1)), "not all of its rerun"),
            (Some(pairs(1.05, 0)), "not all of its rerun"),
            (None, "no other way of reading generated 3 % faster"),
        ] {
            let (kept, reason) = verdict(&arms, rerun.as_ref());
            assert!(
                kept == 0 && reason.starts_with("the defaults are best here") && reason.contains(words),
                "{reason}"
            );
        }
        let (kept, reason) = verdict(&[arm(&[10.0], true), arm(&[11.0], false)], None);
        assert!(kept == 0 && reason.contains("memory served"), "{reason}");
        let alone = [Arm { tried: false, ..arm(&[], false) }];
        assert_eq!(verdict(&alone, None).0, 0);
    }

    #[test]
    fn what_could_not_be_measured_keeps_its_reason_and_the_default_is_tried_where_another_is() {
        let candidates = [Candidate::RING, Candidate::THREADS];
        let refused = [(Candidate::THREADS.to_string(), "no threads".to_owned())];
        let arms = arms(&candidates, &[], &refused);
        assert_eq!((arms[0].reading, arms[0].tried, arms[1].tried), (Reading::DEFAULT, false, false));
        assert_eq!(arms[1].unavailable.as_deref(), Some("no threads"));
    }
}
