//! How memory is divided before anything is loaded. Pure arithmetic.

use std::fmt;

use super::space::Space;
use crate::limits::MIN_SLABS;

/// Share of the available memory that is used when nothing was said.
const DEFAULT_SHARE_PERCENT: u64 = 85;

/// What the kernel's page cache is left where files are read through it: with none to spare buffered reads were measured
/// to fall from 800 to 180 MB/s. It takes no more than the experts get, so that it refuses nobody what would run.
const PAGE_CACHE_RESERVE_BYTES: u64 = 2_500_000_000;

/// What may be used of `available` bytes where nothing was said.
pub fn default_total(available: u64) -> u64 {
    available / 100 * DEFAULT_SHARE_PERCENT
}

/// Everything the process will hold, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// What may be used in all.
    pub total: u64,
    /// The program itself, its tokenizer, and what it knows of the model.
    pub program: u64,
    /// Weights that stay in memory.
    pub resident: u64,
    /// What those would take more as they are stored; 0 where none is quantized while it is loaded.
    pub saved: u64,
    /// Key-value cache of the whole context.
    pub kv: u64,
    /// Rebuilt keys and values of explicit attention; 0 where it is never used.
    pub reconstruction: u64,
    /// Scratch of a step, its experts' aside.
    pub activations: u64,
    /// Scratch that the experts of a step are computed in. The slabs that a step uses are those of the expert pool.
    pub working: u64,
    /// Slabs that experts are read into which are quantized on their way; 0 where none is.
    pub staging: u64,
    /// What the kernel's page cache is left; 0 where reads go around it.
    pub page_cache: u64,
    /// Bytes of a slab for every expert.
    pub every_expert: u64,
    /// Slabs of the expert pool, by their size, in the order in which they were asked for.
    pub slabs: Vec<Slabs>,
}

/// Slabs of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slabs {
    /// Distance between two of them.
    pub bytes: u64,
    /// How many there are; in a [`Demand`], how many experts they are for: more are of no use.
    pub count: u64,
}

impl Slabs {
    /// Bytes of all.
    fn all(&self) -> u64 {
        self.bytes * self.count
    }
}

/// A model that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model needs {} of memory and {} may be used: {}", shown(self.needed()), shown(least.total), least.parts())]
pub struct TooSmall {
    /// The division with as few slabs as work; its total is what may be used.
    pub least: Box<Budget>,
    /// What allows no more.
    pub bound: Bound,
    /// What quantizing weights while they are loaded would save, where it would.
    pub narrower: Option<Narrower>,
}

/// What says how much memory may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The user.
    User,
    /// What the machine and its control group have left.
    Machine,
    /// A limit on what this process may map.
    Space {
        /// The limit.
        space: Space,
        /// Bytes by which it is too small for what is mapped besides a budget alone.
        short: u64,
    },
}

/// Resident weights that could take less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Narrower {
    /// In 8 bits they would take so many bytes less.
    pub saves: u64,
    /// Whether attention, dense and shared layers would.
    pub dense: bool,
    /// Whether embeddings and head would.
    pub io: bool,
}

impl fmt::Display for Narrower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = [(self.dense, "--dense-bits 8"), (self.io, "--io-bits 8")];
        let flags: Vec<&str> = flags.into_iter().filter(|(saves, _)| *saves).map(|(_, flag)| flag).collect();
        write!(f, "{} quantizes weights while they are loaded, which saves {}", flags.join(" "), shown(self.saves))
    }
}

impl TooSmall {
    /// Least bytes that work.
    pub fn needed(&self) -> u64 {
        self.least.fixed() + self.least.experts()
    }

    /// What to do where it is `space` that allows no more, and is `short` of what is mapped besides.
    pub fn raised(&self, space: &Space, short: u64) -> String {
        let least = space.raised(self.needed().saturating_sub(self.least.total) + short);
        format!("this process may map no more: `{} {least}` and above works", space.set_by)
    }

    /// Least bytes that work, rounded up, as they are typed.
    pub fn typed(&self) -> String {
        let needed = self.needed();
        if needed >= 1_000_000_000 {
            let hundredths = needed.div_ceil(10_000_000);
            return format!("{}.{:02}GB", hundredths / 100, hundredths % 100);
        }
        let tenths = needed.div_ceil(100_000);
        format!("{}.{}MB", tenths / 10, tenths % 10)
    }
}

/// What the budget is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// Bytes the user allows; `None` for a share of `available`.
    pub ram: Option<u64>,
    /// Bytes the machine and its control group have left.
    pub available: u64,
    /// What this process may map, where that is limited.
    pub space: Option<Space>,
    /// What is mapped and takes no memory.
    pub unheld: u64,
    /// The program itself, its tokenizer, and what it knows of the model.
    pub program: u64,
    /// Weights that stay in memory.
    pub resident: u64,
    /// What those would take more as they are stored.
    pub saved: u64,
    /// Key-value cache.
    pub kv: u64,
    /// Rebuilt keys and values.
    pub reconstruction: u64,
    /// Scratch of a step.
    pub activations: u64,
    /// Scratch of its experts.
    pub working: u64,
    /// Slabs that are read into by what is quantized on its way.
    pub staging: u64,
    /// Bytes of the files that are read through the page cache and stay in it.
    pub buffered: u64,
    /// A slab for every expert: every model has some, and all sizes are above 0.
    pub experts: &'a [Slabs],
}

impl Demand<'_> {
    /// What may be used in all, and what says so.
    fn allowed(&self) -> (u64, Bound) {
        let (total, bound) = match self.ram {
            Some(ram) => (ram, Bound::User),
            None => (default_total(self.available), Bound::Machine),
        };
        // Nobody but this process takes of it, so that no share is left to others.
        match self.space.map(|space| (space.most(self.unheld), space)) {
            Some((most, space)) if most < total => {
                let short = self.unheld.saturating_sub(space.most(0));
                (most, Bound::Space { space, short })
            }
            _ => (total, bound),
        }
    }

    /// The budget with so many slabs of each size, as far as there are experts for them; its total is what that takes.
    fn with_slabs(&self, count: u64) -> Budget {
        let budget = Budget {
            total: 0,
            program: self.program,
            resident: self.resident,
            saved: self.saved,
            kv: self.kv,
            reconstruction: self.reconstruction,
            activations: self.activations,
            working: self.working,
            staging: self.staging,
            page_cache: 0,
            every_expert: self.experts.iter().map(Slabs::all).sum(),
            slabs: self.experts.iter().map(|all| Slabs { count: count.min(all.count), ..*all }).collect(),
        };
        Budget { total: budget.fixed() + budget.experts(), ..budget }
    }

    /// Divides `pool` bytes, enough for the least, among the sizes: every layer may keep the same part of its experts.
    fn share(&self, pool: u64) -> Vec<Slabs> {
        let (mut left, mut wanted) = (pool, self.experts.iter().map(|all| u128::from(all.all())).sum::<u128>());
        let mut slabs = Vec::with_capacity(self.experts.len());
        // The first size, which takes most, comes last: it gets what rounding left.
        for (position, all) in self.experts.iter().enumerate().rev() {
            let least_of_others: u64 =
                self.experts[..position].iter().map(|other| other.bytes * MIN_SLABS as u64).sum();
            let share = (u128::from(left) * u128::from(all.all()) / wanted.max(1)) as u64;
            let count = (share.min(left - least_of_others) / all.bytes).clamp(MIN_SLABS as u64, all.count);
            slabs.push(Slabs { count, ..*all });
            left -= count * all.bytes;
            wanted -= u128::from(all.all());
        }
        slabs.reverse();
        slabs
    }
}

impl Budget {
    /// Gives the expert pool what is left of the total after everything else.
    pub fn divide(d: &Demand) -> Result<Budget, TooSmall> {
        let (total, bound) = d.allowed();
        let least = d.with_slabs(MIN_SLABS as u64);
        let Some(spare) = total.checked_sub(least.total) else {
            return Err(TooSmall { least: Box::new(Budget { total, ..least }), bound, narrower: None });
        };
        let page_cache = PAGE_CACHE_RESERVE_BYTES.min(d.buffered).min(spare / 2);
        let slabs = d.share(total - least.fixed() - page_cache);
        Ok(Budget { total, page_cache, slabs, ..least })
    }

    /// As many slabs of each size as `slabs`, whatever they take, as far as there are experts for them.
    pub fn of_slabs(d: &Demand, slabs: u64) -> Budget {
        d.with_slabs(slabs)
    }

    /// Bytes of everything but the expert pool.
    fn fixed(&self) -> u64 {
        self.program
            + self.resident
            + self.kv
            + self.reconstruction
            + self.activations
            + self.working
            + self.staging
            + self.page_cache
    }

    /// Bytes that are left for more slabs than those without which nothing runs, whether there are experts for them or not.
    pub(super) fn spare(&self) -> u64 {
        let least = self.slabs.iter().map(|slabs| slabs.bytes * MIN_SLABS as u64).sum::<u64>();
        self.total.saturating_sub(self.fixed() + least)
    }

    /// Bytes of all slabs.
    pub fn experts(&self) -> u64 {
        self.slabs.iter().map(Slabs::all).sum()
    }

    /// Slabs of all sizes: experts that can be in memory.
    pub fn slots(&self) -> u64 {
        self.slabs.iter().map(|slabs| slabs.count).sum()
    }

    /// The terms of the sum.
    fn parts(&self) -> String {
        let page_cache = match self.page_cache {
            0 => String::new(),
            bytes => format!("{} page cache + ", shown(bytes)),
        };
        let staging = match self.staging {
            0 => String::new(),
            bytes => format!("{} to quantize experts from + ", shown(bytes)),
        };
        let slabs = |Slabs { bytes, count }: &Slabs| {
            format!("{count} slab{} of {}", if *count == 1 { "" } else { "s" }, shown(*bytes))
        };
        let slabs: Vec<String> = self.slabs.iter().map(slabs).collect();
        let stored = match self.saved {
            0 => String::new(),
            saved => format!(" (of {} stored)", shown(self.resident + saved)),
        };
        format!(
            "{} program + {} resident{stored} + {} KV + {} attention + {} activations + {staging}{page_cache}{} experts ({})",
            shown(self.program),
            shown(self.resident),
            shown(self.kv),
            shown(self.reconstruction),
            shown(self.activations + self.working),
            shown(self.experts()),
            slabs.join(", "),
        )
    }
}

impl fmt::Display for Budget {
    /// The sum, as a line a person can check.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory: {} of {} allowed", self.parts(), shown(self.total))
    }
}

/// Bytes in MB of 10^6, or in GB of 10^9 where that is more than a thousand of them.
pub(super) fn shown(bytes: u64) -> String {
    match bytes {
        0 => "0 MB".to_owned(),
        1..100_000 => format!("{:.2} MB", bytes as f64 / 1e6),
        100_000..999_950_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEMAND: Demand = Demand {
        ram: Some(1000),
        available: 100_000,
        space: None,
        unheld: 0,
        program: 50,
        resident: 350,
        saved: 0,
        kv: 100,
        reconstruction: 0,
        activations: 60,
        working: 40,
        staging: 0,
        buffered: 0,
        experts: &[Slabs { bytes: 20, count: 1000 }],
    };

    fn slabs(bytes: u64, count: u64) -> Slabs {
        Slabs { bytes, count }
    }

    fn counts(budget: &Budget) -> Vec<u64> {
        budget.slabs.iter().map(|slabs| slabs.count).collect()
    }

    #[test]
    fn experts_get_what_is_left() {
        let b = Budget::divide(&DEMAND).unwrap();
        assert_eq!((b.slots(), b.experts()), (20, 400));
    }

    #[test]
    fn more_slabs_than_experts_are_not_taken() {
        assert_eq!(Budget::divide(&Demand { experts: &[slabs(20, 7)], ..DEMAND }).unwrap().slots(), 7);
    }

    #[test]
    fn nothing_said_is_85_percent_of_what_is_available() {
        assert_eq!(Budget::divide(&Demand { ram: None, ..DEMAND }).unwrap().total, 85_000);
    }

    #[test]
    fn a_page_cache_that_is_used_is_left_something() {
        let divided = |demand: Demand| Budget::divide(&demand).map(|b| (b.page_cache, b.slots()));
        // Files smaller than the reserve need no more than they are. Of 400 left for experts one takes 20 in any case.
        assert_eq!(divided(Demand { buffered: 40, ..DEMAND }), Ok((40, 18)));
        assert_eq!(divided(Demand { buffered: 9000, ..DEMAND }), Ok((190, 10)));
        assert_eq!(divided(Demand { buffered: 9000, ram: Some(620), ..DEMAND }), Ok((0, 1)));
        let experts = &[slabs(1_000_000_000, 1000)];
        let large = Demand { ram: Some(40_000_000_000), buffered: 372_000_000_000, experts, ..DEMAND };
        assert_eq!(divided(large), Ok((2_500_000_000, 37)));
    }

    #[test]
    fn layers_of_wider_experts_keep_the_same_part_of_them_and_double_nothing_else() {
        // Of 1,000 experts of 20 and 100 of 40, 24,000 in all, 400 are had for: a sixtieth.
        let demand = Demand { experts: &[slabs(20, 1000), slabs(40, 100)], ..DEMAND };
        let b = Budget::divide(&demand).unwrap();
        assert_eq!((counts(&b), b.experts()), (vec![18, 1], 400));
        let half = Budget::divide(&Demand { ram: Some(12_600), ..demand }).unwrap();
        assert_eq!(counts(&half), [500, 50]);
        let all = Budget::divide(&Demand { ram: Some(50_000), ..demand }).unwrap();
        assert_eq!(counts(&all), [1000, 100]);
        let refused = Budget::divide(&Demand { ram: Some(659), ..demand }).unwrap_err();
        assert_eq!(refused.needed(), 660, "one slab of each");
        assert!(Budget::divide(&Demand { ram: Some(660), ..demand }).is_ok());
        assert!(b.to_string().contains("experts (18 slabs of 0.00 MB, 1 slab of 0.00 MB)"), "{b}");
        let counted = Budget::of_slabs(&demand, 7);
        assert_eq!((counts(&counted), counted.total), (vec![7, 7], 600 + 7 * 20 + 7 * 40));
        assert_eq!(counts(&Budget::of_slabs(&demand, 700)), [700, 100]);
    }

    #[test]
    fn whatever_is_divided_fits_and_leaves_no_room_for_one_more_of_the_usual() {
        for (usual, wide) in [(1, 1), (3, 3), (256, 256), (19_200, 256)] {
            for (bytes, wide_bytes) in [(7, 7), (7, 14), (100, 205), (14, 7)] {
                let experts = [slabs(bytes, usual), slabs(wide_bytes, wide), slabs(3, 2)];
                let demand = Demand { experts: &experts, ..DEMAND };
                let least = bytes + wide_bytes + 3;
                for spare in least..least + 3000 {
                    let b = Budget::divide(&Demand { ram: Some(600 + spare), ..demand }).unwrap();
                    assert!(b.slabs.iter().all(|slabs| slabs.count > 0) && b.experts() <= spare, "{demand:?}: {b:?}");
                    let full = b.slabs[0].count == usual;
                    assert!(full || spare - b.experts() < bytes, "{demand:?}: {b:?}");
                }
            }
        }
    }

    #[test]
    fn too_small_says_what_is_needed() {
        let refused = Budget::divide(&Demand { ram: Some(619), ..DEMAND }).unwrap_err();
        assert_eq!((refused.needed(), refused.least.total, refused.bound), (620, 619, Bound::User));
        assert_eq!(Budget::divide(&Demand { ram: Some(620), ..DEMAND }).unwrap().slots(), 1);
        let refused = Budget::divide(&Demand { ram: None, available: 700, ..DEMAND }).unwrap_err();
        assert_eq!((refused.needed(), refused.least.total, refused.bound), (620, 595, Bound::Machine));
    }

    #[test]
    fn what_may_be_mapped_bounds_what_may_be_used_whoever_allows_more() {
        // Of the 50 of the program 40 are mapped, and 700 more may be, 130 of them for what holds nothing.
        let space = Space { set_by: "ulimit -v", limit: 1000, left: 700, program: 40, of_files: true };
        let limited = Demand { space: Some(space), unheld: 130, ..DEMAND };
        for demand in [Demand { ram: None, ..limited }, Demand { ram: Some(5000), ..limited }] {
            let refused = Budget::divide(&demand).unwrap_err();
            assert_eq!(
                (refused.needed(), refused.least.total, refused.bound),
                (620, 610, Bound::Space { space, short: 0 })
            );
            // What is mapped besides is by 60 more than there is: of the limit both that and the budget are wanting.
            let refused = Budget::divide(&Demand { unheld: 800, ..demand }).unwrap_err();
            assert_eq!((refused.least.total, refused.bound), (0, Bound::Space { space, short: 60 }));
            assert!(refused.raised(&space, 60).contains("`ulimit -v 1024`"), "{}", refused.raised(&space, 60));
            let unheld = 120;
            assert_eq!(Budget::divide(&Demand { unheld, ..demand }).map(|b| (b.total, b.slots())), Ok((620, 1)));
        }
        let refused = Budget::divide(&Demand { ram: Some(609), ..limited }).unwrap_err();
        assert_eq!(refused.bound, Bound::User);
        let wide = Demand { space: Some(Space { left: 1 << 40, ..space }), ram: None, ..limited };
        assert_eq!(Budget::divide(&wide).unwrap().total, 85_000);
    }

    #[test]
    fn sizes_are_shown_with_their_units() {
        let demand = Demand {
            ram: Some(14_000_000),
            program: 1_060_000,
            resident: 3_000_000,
            kv: 246_000,
            reconstruction: 12_000,
            activations: 2_000_000,
            working: 990_000,
            staging: 0,
            experts: &[slabs(6_543_210, 1000)],
            ..DEMAND
        };
        assert_eq!(
            Budget::divide(&demand).unwrap().to_string(),
            "memory: 1.1 MB program + 3.0 MB resident + 0.2 MB KV + 0.01 MB attention + 3.0 MB activations + 6.5 MB experts \
             (1 slab of 6.5 MB) of 14.0 MB allowed"
        );
        let refused = Budget::divide(&Demand { ram: Some(13_000_000), ..demand }).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the model needs 13.9 MB of memory and 13.0 MB may be used: 1.1 MB program + 3.0 MB resident + 0.2 MB KV + \
             0.01 MB attention + 3.0 MB activations + 6.5 MB experts (1 slab of 6.5 MB)"
        );
        // 1,060,000 + 3,000,000 + 246,000 + 12,000 + 2,990,000 + 6,543,210 = 13,851,210.
        assert_eq!(refused.typed(), "13.9MB");
        let large = Demand { ram: Some(13_000_000), resident: 12_000_000_001, ..demand };
        assert_eq!(Budget::divide(&large).unwrap_err().typed(), "12.02GB", "12,010,851,211 bytes, rounded up");
        let large = Budget::divide(&Demand { ram: Some(20_866_200_000), ..demand }).unwrap().to_string();
        assert!(large.ends_with("6.54 GB experts (1000 slabs of 6.5 MB) of 20.87 GB allowed"), "{large}");
    }
}
