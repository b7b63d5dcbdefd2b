//! Which precisions are tried, and what follows from them. Pure.

use std::fmt;

use super::*;

/// Widths that are tried where none are named.
const WIDTHS: [Width; 4] = [Width::Bits16, Width::Bits8, Width::Bits4, Width::Bits2];
/// Perplexity may rise by this part.
pub const WITHIN: f64 = 0.01;

/// How many columns share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group(pub Option<u16>);

impl Group {
    /// Reads `row`, or a number that `convert --group` takes.
    pub fn parse(text: &str) -> Result<Group, String> {
        if text == "row" {
            return Ok(Group(None));
        }
        args::parse_group(text).map(|group| Group(Some(group))).map_err(|why| format!("row, or {why}"))
    }
}

/// A container that `convert` makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    pub experts: Width,
    pub dense: Width,
    pub io_bits: Width,
    pub group: Option<u16>,
}

impl Precision {
    pub fn options(self) -> ConvertOptions {
        let Precision { experts, dense, io_bits, group } = self;
        ConvertOptions { experts, dense, io_bits, group, ..ConvertOptions::default() }
    }

    /// Flags of `convert` that make it.
    pub fn flags(self) -> String {
        let group = self.group.map_or(String::new(), |group| format!(" --group {group}"));
        format!("--experts {} --dense {} --io-bits {}{group}", self.experts, self.dense, self.io_bits)
    }
}

impl fmt::Display for Precision {
    /// `4 g64 / 8`: experts, then what is dense.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grouped = self.group.map_or(String::new(), |group| format!(" g{group}"));
        write!(f, "experts {}, dense {}, io {}{grouped}", self.experts, self.dense, self.io_bits)
    }
}

/// A precision and what was measured of it.
#[derive(Clone, Debug)]
pub struct Arm {
    pub precision: Precision,
    /// Bytes of all its weights and scales.
    pub bytes: u64,
    /// Bytes of its shards, with headers and padding.
    pub file_bytes: u64,
    /// Bytes of one routed expert, on average: what is read.
    pub expert_bytes: u64,
    /// Bytes of weights that stay in memory.
    pub resident_bytes: u64,
    pub quality: Option<Quality>,
    /// Why there is none.
    pub failed: Option<Failure>,
}

impl Arm {
    pub fn new(precision: Precision) -> Arm {
        Arm { precision, bytes: 0, file_bytes: 0, expert_bytes: 0, resident_bytes: 0, quality: None, failed: None }
    }
}

/// Every combination that `convert` takes, widest first. A group that would apply to nothing makes no second container.
pub fn precisions(experts: &[Width], dense: &[Width], io_bits: &[Width], groups: &[Group]) -> Vec<Precision> {
    let or = |given: &[Width], default: &[Width]| if given.is_empty() { default.to_vec() } else { given.to_vec() };
    let groups = if groups.is_empty() { &[Group(None), Group(Some(64))] } else { groups };
    let mut all: Vec<Precision> = Vec::new();
    for io_bits in or(io_bits, &[ConvertOptions::default().io_bits]) {
        for &dense in &or(dense, &WIDTHS) {
            for &experts in &or(experts, &WIDTHS) {
                for &Group(group) in groups {
                    let precision = Precision { experts, dense, io_bits, group };
                    let options = precision.options();
                    let applies = group.is_none() || options.uses_group();
                    if applies && options.check().is_ok() && !all.contains(&precision) {
                        all.push(precision);
                    }
                }
            }
        }
    }
    all
}

/// Whether no other precision is as small and diverges less, or smaller and diverges no more.
pub fn is_best_of_its_size(arm: &Arm, arms: &[Arm]) -> bool {
    let Some(quality) = &arm.quality else { return false };
    !arms.iter().any(|other| {
        other.quality.as_ref().is_some_and(|of_other| {
            let (here, there) = (quality.divergence.mean, of_other.divergence.mean);
            (other.bytes <= arm.bytes && there < here) || (other.bytes < arm.bytes && there <= here)
        })
    })
}

/// The smallest container whose perplexity is no more than [`WITHIN`] above that of the weights as they are.
pub fn smallest_within(arms: &[Arm]) -> Option<&Arm> {
    let good = |arm: &&Arm| arm.quality.as_ref().is_some_and(|quality| quality.ratio() <= 1.0 + WITHIN);
    arms.iter().filter(good).min_by_key(|arm| arm.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::quality::Estimate;

    #[test]
    fn every_combination_is_tried_once_and_groups_only_where_they_apply() {
        let all = precisions(&[], &[], &[], &[]);
        // Sixteen with a scale a row; seven of them have a width that takes groups.
        assert_eq!((all.len(), all.iter().filter(|p| p.group == Some(64)).count()), (23, 7));
        assert!(all.iter().all(|p| p.io_bits == Width::Bits8));
        let few = precisions(&[Width::Bits4, Width::Bits4], &[Width::Bits8], &[Width::Bits16], &[Group(None)]);
        assert_eq!(few.iter().map(ToString::to_string).collect::<Vec<_>>(), ["experts 4, dense 8, io 16"]);
        assert_eq!(few[0].flags(), "--experts 4 --dense 8 --io-bits 16");
        assert_eq!((Group::parse("row"), Group::parse("64")), (Ok(Group(None)), Ok(Group(Some(64)))));
        // Three bits come in groups of 64, whatever is asked for.
        let three = precisions(&[Width::Bits3], &[Width::Bits8, Width::Bits4], &[], &[Group(None), Group(Some(64))]);
        let shown: Vec<String> = three.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["experts 3, dense 8, io 8", "experts 3, dense 4, io 8", "experts 3, dense 4, io 8 g64"]);
        assert!(Group::parse("65").is_err() && Group::parse("").is_err());
    }

    fn arm(bytes: u64, loss: f64, divergence: f64) -> Arm {
        let estimate = |mean| Estimate { mean, error: None };
        let quality = Quality {
            positions: 1,
            tokens: 1,
            agreement: 1.0,
            perplexity: 2.0,
            loss: estimate(loss),
            divergence: estimate(divergence),
            divergence_p99: 0.0,
            divergence_largest: 0.0,
        };
        let precision = precisions(&[], &[], &[], &[])[0];
        Arm { bytes, quality: Some(quality), ..Arm::new(precision) }
    }

    #[test]
    fn a_precision_is_worth_its_bytes_where_no_smaller_one_is_as_near() {
        let arms = [arm(10, 0.0, 0.1), arm(20, 0.0, 0.1), arm(20, 0.0, 0.05), arm(30, 0.0, 0.05), arm(40, 0.0, 0.01)];
        let best: Vec<bool> = arms.iter().map(|arm| is_best_of_its_size(arm, &arms)).collect();
        assert_eq!(best, [true, false, true, false, true]);
        let failed = Arm { quality: None, bytes: 1, ..arms[0].clone() };
        assert!(!is_best_of_its_size(&failed, &arms) && is_best_of_its_size(&arms[0], &[failed, arms[0].clone()]));
    }

    #[test]
    fn the_smallest_that_is_good_enough_is_found_by_its_perplexity() {
        let arms = [arm(30, 0.0, 0.0), arm(20, 0.009, 0.0), arm(10, 0.011, 0.0)];
        assert_eq!(smallest_within(&arms).map(|arm| arm.bytes), Some(20));
        assert!(smallest_within(&arms[2..]).is_none());
    }
}
