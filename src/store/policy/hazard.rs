//! How likely an expert is to be chosen at the next visit of its layer, learned from the visits before.
//!
//! Neither frequency nor recency says it alone, and how they weigh against each other differs from model to model: in one
//! trace an expert that the last token chose is half again as likely as its frequency says, in another ten times. So the
//! chance is counted for each pair of age and frequency.

/// Ages are told apart by powers of two, the last open to the end.
const AGES: usize = 8;
/// Rates are told apart by half powers of two.
const RATES: usize = 34;
/// What its rate says counts like this many visits that were seen.
const PRIOR: u32 = 16;
/// A cell that has seen this many forgets half.
const FULL: u32 = 1 << 14;

/// A pair of age and rate.
pub(super) type CellNumber = u16;

#[derive(Clone, Copy, Default)]
struct Cell {
    seen: u32,
    chosen: u32,
}

/// For every age and rate, how many experts of that kind a layer could choose, and how many it chose.
pub(super) struct Hazard {
    cells: [Cell; AGES * RATES],
}

impl Hazard {
    pub(super) fn new() -> Hazard {
        Hazard { cells: [Cell::default(); AGES * RATES] }
    }

    /// The cell of an expert that was chosen `age` visits (1 or more) before the next, at `rate` chances in 65536.
    pub(super) fn cell(age: u32, rate: u32) -> CellNumber {
        let age = (age.max(1).ilog2() as usize).min(AGES - 1);
        let rate = rate.clamp(1, 65536);
        let octave = rate.ilog2();
        let upper_half = if octave > 0 { rate >> (octave - 1) & 1 } else { 0 };
        (age * RATES + (2 * octave + upper_half) as usize) as CellNumber
    }

    /// An expert of this cell could be chosen, and was or was not.
    pub(super) fn saw(&mut self, cell: CellNumber, chosen: bool) {
        let cell = &mut self.cells[usize::from(cell)];
        cell.seen += 1;
        cell.chosen += u32::from(chosen);
        if cell.seen >= FULL {
            cell.seen /= 2;
            cell.chosen /= 2;
        }
    }

    /// Chances in 65536 that an expert of this cell, and of this rate, is chosen at the next visit.
    pub(super) fn chance(&self, cell: CellNumber, rate: u32) -> u32 {
        let Cell { seen, chosen } = self.cells[usize::from(cell)];
        ((u64::from(chosen) * 65536 + u64::from(PRIOR) * u64::from(rate)) / u64::from(seen + PRIOR)) as u32
    }
}

const _: () = assert!(2 * 16 + 1 < RATES && AGES * RATES <= CellNumber::MAX as usize);
