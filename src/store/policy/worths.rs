//! What a cached expert is worth: how soon it will be used, learned from what became of experts like it.
//!
//! A use at the next visit of its layer counts one, and half as much for every round that it is away: what is far will
//! have been evicted before it comes, whatever is done now. An expert that is chosen at its rate, however long ago it was
//! chosen last, is worth a sum that can be written down. Real ones are not so: how much more or less an expert is worth
//! differs from model to model, by how long ago it was chosen and by whether it came more often lately. So the worths that
//! came true are added up for each kind of expert, beside those that the rates had foretold.

/// Worth of an expert that the next visit of its layer chooses.
pub(super) const SURE: u32 = 65536;

/// Ages are told apart by powers of two, the last open to the end.
const AGES: usize = 8;
/// Rates are told apart by half powers of two.
const RATES: usize = 34;
/// Rates of late are told apart by how they stand to those of long: below half, up to the same, twice, four times, above.
const TRENDS: usize = 5;
/// What a rate foretells counts like this many visits at which it came true.
const PRIOR: u32 = 16;
/// A kind that has been seen this often forgets half.
const FULL: u32 = 1 << 14;

/// A kind of expert: its age, its rate, and its trend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kind(u16);

impl Kind {
    /// Of an expert that was chosen `age` visits (1 or more) before the next, at `rate` chances in 65536, and lately at
    /// `lately`.
    pub(super) fn of(age: u32, rate: u32, lately: u32) -> Kind {
        let age = (age.max(1).ilog2() as usize).min(AGES - 1);
        let octave = rate.max(1).ilog2().min(16);
        let upper_half = if octave > 0 { (rate >> (octave - 1)) & 1 } else { 0 };
        let rate_kind = (2 * octave + upper_half) as usize;
        let trend = [rate / 2, rate, 2 * rate, 4 * rate].iter().filter(|&&edge| lately >= edge).count();
        Kind(((age * RATES + rate_kind) * TRENDS + trend) as u16)
    }
}

/// Worth of an expert that every visit chooses with `rate` chances in 65536, whatever happened before: `rate` and, where it
/// is not chosen, half of the same again.
pub(super) fn by_rate(rate: u32) -> u32 {
    let rate = u64::from(rate.min(SURE));
    (2 * u64::from(SURE) * rate / (u64::from(SURE) + rate)) as u32
}

#[derive(Clone, Copy, Default)]
struct Cell {
    seen: u32,
    foretold: u32,
    came: u32,
}

/// What each kind of expert was worth.
pub(super) struct Worths {
    cells: Vec<Cell>,
}

impl Worths {
    pub(super) fn new() -> Worths {
        Worths { cells: vec![Cell::default(); AGES * RATES * TRENDS] }
    }

    /// An expert of this kind was foretold to be worth so much, by its rate, and was worth what `came`.
    pub(super) fn saw(&mut self, kind: Kind, foretold: u32, came: u32) {
        let cell = &mut self.cells[usize::from(kind.0)];
        cell.seen += 1;
        cell.foretold += foretold;
        cell.came += came;
        if cell.seen >= FULL {
            *cell = Cell { seen: cell.seen / 2, foretold: cell.foretold / 2, came: cell.came / 2 };
        }
    }

    /// What an expert of this kind is worth, where its rate foretells `foretold`, at least one.
    pub(super) fn worth(&self, kind: Kind, foretold: u32) -> u32 {
        let Cell { foretold: all_foretold, came, .. } = self.cells[usize::from(kind.0)];
        let (foretold, prior) = (u64::from(foretold), u64::from(PRIOR) * u64::from(foretold));
        let worth = foretold * (u64::from(came) + prior) / (u64::from(all_foretold) + prior);
        worth.min(SURE.into()) as u32
    }
}

const _: () = assert!(2 * 16 + 1 < RATES && AGES * RATES * TRENDS <= u16::MAX as usize);
const _: () = assert!(FULL as u64 * SURE as u64 <= u32::MAX as u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worth_by_rate_is_the_sum_over_all_rounds() {
        for rate in [1u32, 100, 8192, 20_000, 65_535, 65_536] {
            let chance = f64::from(rate) / 65536.0;
            let first_use = |round: i32| chance * (1.0 - chance).powi(round) / 2f64.powi(round);
            let sum: f64 = (0..60).map(first_use).sum();
            assert!((f64::from(by_rate(rate)) - 65536.0 * sum).abs() <= 1.0, "{rate}");
        }
    }

    #[test]
    fn what_came_true_of_a_kind_outweighs_what_was_foretold() {
        let (mut worths, kind) = (Worths::new(), Kind::of(1, 8192, 8192));
        assert_eq!(worths.worth(kind, 1000), 1000);
        // Three times what was foretold, over and over, also where the sums are halved.
        (0..3 * FULL).for_each(|_| worths.saw(kind, 1000, 3000));
        assert!((2990..=3000).contains(&worths.worth(kind, 1000)));
        assert!((1490..=1500).contains(&worths.worth(kind, 500)));
        assert_eq!(worths.worth(Kind::of(2, 8192, 8192), 1000), 1000, "another kind");
        (0..FULL).for_each(|_| worths.saw(kind, 1, SURE));
        assert_eq!(worths.worth(kind, SURE), SURE, "nothing is worth more than what is sure");
    }

    #[test]
    fn kinds_are_told_apart_at_their_edges() {
        let same = |a: (u32, u32, u32), b: (u32, u32, u32)| Kind::of(a.0, a.1, a.2) == Kind::of(b.0, b.1, b.2);
        // Ages 4 to 7; rates 4096 to 6143; trends by halves and doubles.
        assert!(same((4, 4096, 4096), (7, 6143, 6143)));
        assert!(!same((3, 4096, 4096), (4, 4096, 4096)) && !same((7, 4096, 4096), (8, 4096, 4096)));
        assert!(!same((4, 6143, 6144), (4, 6144, 6144)) && !same((4, 4095, 4096), (4, 4096, 4096)));
        let trends =
            [0, 2047, 2048, 4095, 4096, 8191, 8192, 16383, 16384, 65536].map(|lately| Kind::of(1, 4096, lately));
        assert!(trends.chunks_exact(2).all(|pair| pair[0] == pair[1]));
        assert!(trends.windows(3).all(|three| three[0] != three[2]));
        assert!(same((128, 1, 1), (u32::MAX, 1, 1)));
    }
}
