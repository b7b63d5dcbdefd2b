//! The one thing to change. Pure: numbers of a run in, a flag to type out, with the reason in those numbers.
//!
//! For each verdict there is a list of rules in the order in which they are worth trying: what costs nothing first (a
//! switch that was turned off, cores that idle), then what the machine has and the run did not use, last what costs
//! quality or money. The first rule that applies is the advice.

mod facts;

use std::fmt;

use crate::cli::size;
use crate::engine::stats::Verdict;
pub use facts::{Judgement, Known};

/// More memory is worth a word where it is at least so many times what was used.
const MORE_RAM: f64 = 1.1;
/// A drive that delivers less than this of what it can is not used well.
const SLOW_DRIVE: f64 = 0.8;
/// Weights of more bits than this can be made narrower without losing much.
const WIDE_BITS: f64 = 5.0;

/// The numbers that advice follows from.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What bound it.
    pub verdict: Verdict,
    /// Bytes the run allowed itself, and what it could be allowed here.
    pub budget: u64,
    /// See [`Facts::budget`].
    pub budget_most: u64,
    /// Bytes of cached experts, and of all of them.
    pub cache: u64,
    /// See [`Facts::cache`].
    pub cache_whole: u64,
    /// Threads that computed, and cores they could use.
    pub threads: usize,
    /// See [`Facts::threads`].
    pub cores: usize,
    /// What the drive delivered while busy over what it can; none where either is unknown.
    pub drive_share: Option<f64>,
    /// Whether a tuning profile was used.
    pub tuned: bool,
    /// Flags on the way reads are made that were given, such as `--depth`.
    pub reading_flags: Vec<&'static str>,
    /// Whether `--pipeline off` was given, and `--prefetch off`.
    pub serial: bool,
    /// See [`Facts::serial`].
    pub no_prefetch: bool,
    /// `--kernels` of another instruction set than the best.
    pub kernels_given: bool,
    /// `--activations f32` with weights that have an integer path.
    pub exact: bool,
    /// `--dsa off` of a model that has an indexer.
    pub dense_attention: bool,
    /// Bits a weight of an expert takes.
    pub expert_bits: f64,
}

/// What to change, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What to type; none where nothing on this machine would help.
    pub knob: Option<String>,
    /// Why.
    pub reason: String,
}

/// A verdict as it is called in JSON.
pub fn name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::DiskBound => "disk-bound",
        Verdict::ComputeBound => "compute-bound",
        Verdict::AttentionBound => "attention-bound",
        Verdict::Balanced => "balanced",
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.knob {
            Some(knob) => write!(f, "{knob}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

type Rule = fn(&Facts) -> Option<Advice>;

/// The advice.
pub fn advise(facts: &Facts) -> Advice {
    let rules: &[Rule] = match facts.verdict {
        Verdict::DiskBound => &[overlap, read_ahead, drive, first_reads, memory, tune, narrower],
        Verdict::Balanced => &[overlap, read_ahead, threads, memory, kernels, integers, narrower],
        Verdict::ComputeBound => &[threads, kernels, integers, narrower],
        Verdict::AttentionBound => &[threads, kernels, sparse_attention],
    };
    rules.iter().find_map(|rule| rule(facts)).unwrap_or_else(|| Advice { knob: None, reason: nothing(facts) })
}

fn turn(knob: impl Into<String>, reason: impl Into<String>) -> Option<Advice> {
    Some(Advice { knob: Some(knob.into()), reason: reason.into() })
}

fn overlap(facts: &Facts) -> Option<Advice> {
    turn("--pipeline auto", "reads and arithmetic took turns, and could go on side by side").filter(|_| facts.serial)
}

fn read_ahead(facts: &Facts) -> Option<Advice> {
    turn("--prefetch auto", "nothing was read before it was asked for").filter(|_| facts.no_prefetch)
}

fn drive(facts: &Facts) -> Option<Advice> {
    let share = facts.drive_share.filter(|share| *share < SLOW_DRIVE)?;
    let slow = format!("the drive delivered {:.0} % of what it can", 100.0 * share);
    match (facts.reading_flags.is_empty(), facts.tuned) {
        (false, _) => turn("millstream tune", format!("{slow}; leave out {}", facts.reading_flags.join(" and "))),
        (true, false) => turn("millstream tune", slow),
        (true, true) => None,
    }
}

/// Where there is room for every expert, what is read is what was never asked for before, and no memory saves that.
fn first_reads(facts: &Facts) -> Option<Advice> {
    let reason = "there is room for every expert, and each was read once, when it was first asked for: the longer the \
                  answer, the less it waits";
    (facts.cache >= facts.cache_whole).then(|| Advice { knob: None, reason: reason.to_owned() })
}

fn memory(facts: &Facts) -> Option<Advice> {
    // What everything else takes, and every expert in the cache: more than that is of no use.
    let useful = (facts.budget - facts.cache.min(facts.budget)).saturating_add(facts.cache_whole);
    let most = facts.budget_most.min(useful);
    if (most as f64) < MORE_RAM * facts.budget as f64 {
        return None;
    }
    // Rounded down it would be too little for the last experts; but never more than there is.
    let above = size::typed_above(most);
    let typed =
        if size::parse(&above).is_ok_and(|bytes| bytes <= facts.budget_most) { above } else { size::typed(most) };
    let given = size::parse(&typed).unwrap_or(most);
    let held = |cache: u64| 100.0 * cache.min(facts.cache_whole) as f64 / facts.cache_whole.max(1) as f64;
    let (now, then) = (held(facts.cache), held(facts.cache + given.saturating_sub(facts.budget)));
    turn(
        format!("--ram {typed}"),
        format!("the cache holds {now:.0} % of the experts, and could hold {then:.0} % of them here"),
    )
}

fn tune(facts: &Facts) -> Option<Advice> {
    let reason = "there is no more memory to be had, and whether there is a faster way of reading was never tried here";
    turn("millstream tune", reason).filter(|_| !facts.tuned && facts.drive_share.is_none())
}

fn narrower(facts: &Facts) -> Option<Advice> {
    let bits = facts.expert_bits;
    let reason =
        format!("experts have {bits:.1} bits a weight: with 4 a read is shorter and the cache holds more of them");
    turn("millstream convert --experts 4", reason).filter(|_| bits > WIDE_BITS)
}

fn threads(facts: &Facts) -> Option<Advice> {
    let Facts { threads, cores, .. } = *facts;
    let reason = match threads < cores {
        true => format!("{threads} of {cores} cores computed"),
        false => format!("{threads} threads shared {cores} cores and waited for each other"),
    };
    turn(format!("--threads {cores}"), reason).filter(|_| threads != cores)
}

fn kernels(facts: &Facts) -> Option<Advice> {
    turn("--kernels auto", "this processor has a wider instruction set than was asked for")
        .filter(|_| facts.kernels_given)
}

fn integers(facts: &Facts) -> Option<Advice> {
    turn("--activations int8", "quantized weights were multiplied as floats").filter(|_| facts.exact)
}

fn sparse_attention(facts: &Facts) -> Option<Advice> {
    turn("--dsa auto", "every position was attended to, and the model knows which matter")
        .filter(|_| facts.dense_attention)
}

/// What is left where no flag helps.
fn nothing(facts: &Facts) -> String {
    match facts.verdict {
        Verdict::DiskBound => {
            "the drive is used as well as it can be: a second one with copies of the shards (--mirror DIR), a faster one, \
             or more memory"
        }
        Verdict::ComputeBound => "every core computed as fast as it can: a faster processor, or more cores",
        Verdict::AttentionBound => "attention over a long context is arithmetic: a shorter prompt, or more cores",
        Verdict::Balanced => "drive and arithmetic keep pace with each other: no single change would help much",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1 << 30;

    /// Nothing is wrong and nothing is left over.
    fn facts(verdict: Verdict) -> Facts {
        Facts {
            verdict,
            budget: 10 * GB,
            budget_most: 10 * GB,
            cache: 6 * GB,
            cache_whole: 60 * GB,
            threads: 8,
            cores: 8,
            drive_share: Some(0.95),
            tuned: true,
            reading_flags: vec![],
            serial: false,
            no_prefetch: false,
            kernels_given: false,
            exact: false,
            dense_attention: false,
            expert_bits: 4.0,
        }
    }

    #[track_caller]
    fn knob(facts: &Facts) -> String {
        advise(facts).knob.unwrap_or_else(|| panic!("no knob for {facts:?}"))
    }

    const ALL: [Verdict; 4] = [Verdict::DiskBound, Verdict::ComputeBound, Verdict::AttentionBound, Verdict::Balanced];

    #[test]
    fn verdicts_have_one_name() {
        for verdict in ALL {
            assert_eq!(serde_json::to_value(verdict).unwrap(), name(verdict));
        }
    }

    #[test]
    fn where_nothing_is_left_over_no_flag_is_named() {
        for verdict in ALL {
            let advice = advise(&facts(verdict));
            assert_eq!(advice.knob, None, "{advice}");
            assert!(!advice.reason.is_empty());
        }
    }

    #[test]
    fn memory_is_asked_for_where_there_is_more_and_never_more_than_there_is_or_is_of_use() {
        let more = Facts { budget_most: 20 * GB, ..facts(Verdict::DiskBound) };
        assert_eq!(knob(&more), "--ram 20.0G");
        // 6 of 60 is a tenth, and 16 of 60 a quarter and a bit.
        assert!(advise(&more).reason.contains("10 %") && advise(&more).reason.contains("27 %"), "{}", advise(&more));
        let small_model = Facts { cache_whole: 8 * GB, ..more.clone() };
        assert_eq!(knob(&small_model), "--ram 12.0G", "4G besides the cache, and 8G of experts");
        let all_there = Facts { cache_whole: 6 * GB, drive_share: None, tuned: false, ..more };
        let said = advise(&all_there);
        assert!(said.knob.is_none() && said.reason.contains("first asked for"), "{said}");
        assert!(!said.reason.contains("more memory"), "{said}");
        let hardly_more = Facts { budget_most: 10 * GB + GB / 2, ..facts(Verdict::DiskBound) };
        assert_eq!(advise(&hardly_more).knob, None);
    }

    #[test]
    fn memory_that_is_asked_for_is_enough_for_what_is_said_of_it() {
        // 4 GiB besides the cache, and 8 GiB and a byte of experts.
        let last = Facts { budget_most: 20 * GB, cache_whole: 8 * GB + 1, ..facts(Verdict::DiskBound) };
        assert_eq!(knob(&last), "--ram 12.1G");
        assert!(advise(&last).reason.contains("100 %"), "{}", advise(&last));
        // 12.04 GiB are there, and 12.1 are not: what is typed leaves 8 GiB for 8.05.
        let short = Facts { budget_most: 12 * GB + GB / 25, cache_whole: 8 * GB + GB / 20, ..last };
        assert_eq!(knob(&short), "--ram 12.0G");
        assert!(advise(&short).reason.contains("99 %"), "{}", advise(&short));
    }

    #[test]
    fn a_drive_below_what_it_can_is_tuned_unless_it_was() {
        let slow = Facts { drive_share: Some(0.5), tuned: false, ..facts(Verdict::DiskBound) };
        assert_eq!(knob(&slow), "millstream tune");
        assert!(advise(&slow).reason.contains("50 %"));
        let told = Facts { reading_flags: vec!["--depth"], ..slow.clone() };
        assert!(advise(&told).reason.contains("--depth"));
        assert_eq!(advise(&Facts { tuned: true, ..slow }).knob, None);
        let unknown = Facts { drive_share: None, tuned: false, ..facts(Verdict::DiskBound) };
        assert_eq!(knob(&unknown), "millstream tune");
        let and_memory = Facts { budget_most: 20 * GB, ..unknown };
        assert_eq!(knob(&and_memory), "--ram 20.0G", "memory helps for sure");
    }

    #[test]
    fn switches_that_were_turned_off_come_before_everything_else() {
        for verdict in [Verdict::DiskBound, Verdict::Balanced] {
            let serial = Facts { serial: true, no_prefetch: true, budget_most: 20 * GB, threads: 1, ..facts(verdict) };
            assert_eq!(knob(&serial), "--pipeline auto");
            assert_eq!(knob(&Facts { serial: false, ..serial }), "--prefetch auto");
        }
    }

    #[test]
    fn arithmetic_takes_the_cores_there_are_then_better_kernels_then_fewer_bits() {
        let slow = Facts {
            threads: 3,
            kernels_given: true,
            exact: true,
            expert_bits: 16.0,
            budget_most: 20 * GB,
            ..facts(Verdict::ComputeBound)
        };
        assert_eq!(knob(&slow), "--threads 8");
        assert_eq!(knob(&Facts { threads: 16, ..slow.clone() }), "--threads 8");
        let slow = Facts { threads: 8, ..slow };
        assert_eq!(knob(&slow), "--kernels auto");
        let slow = Facts { kernels_given: false, ..slow };
        assert_eq!(knob(&slow), "--activations int8");
        let slow = Facts { exact: false, ..slow };
        assert_eq!(knob(&slow), "millstream convert --experts 4");
        assert_eq!(advise(&Facts { expert_bits: 4.5, ..slow }).knob, None, "memory is no cure for arithmetic");
    }

    #[test]
    fn attention_that_was_made_dense_is_told() {
        let dense = Facts { dense_attention: true, expert_bits: 16.0, ..facts(Verdict::AttentionBound) };
        assert_eq!(knob(&dense), "--dsa auto");
        assert_eq!(advise(&Facts { dense_attention: false, ..dense }).knob, None);
    }
}
