//! How memory is divided before anything is loaded. Pure arithmetic.

use std::fmt;

use crate::limits::MIN_SLABS;

/// Share of the available memory that is used when nothing was said.
const DEFAULT_SHARE_PERCENT: u64 = 85;

/// What the kernel's page cache is left where files are read through it: with none to spare buffered reads were measured
/// to fall from 800 to 180 MB/s. It takes no more than the experts get, so that it refuses nobody what would run.
const PAGE_CACHE_RESERVE_BYTES: u64 = 2_500_000_000;

/// Everything the process will hold, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// What may be used in all.
    pub total: u64,
    /// Weights that stay in memory.
    pub resident: u64,
    /// Key-value cache of the whole context.
    pub kv: u64,
    /// Rebuilt keys and values of explicit attention; 0 where it is never used.
    pub reconstruction: u64,
    /// Scratch of a step and of its experts.
    pub activations: u64,
    /// What the kernel's page cache is left; 0 where reads go around it.
    pub page_cache: u64,
    /// Distance between slabs.
    pub slab: u64,
    /// Slabs of the expert pool.
    pub slabs: u64,
    /// Distance between slabs of the MTP layer's experts, which are wider than the others; 0 where it is not loaded.
    pub mtp_slab: u64,
    /// Slabs of theirs.
    pub mtp_slabs: u64,
}

/// A model that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model needs {} of memory and {} may be used: {}", shown(self.needed()), shown(least.total), least.parts())]
pub struct TooSmall {
    /// The division with as few slabs as work; its total is what may be used.
    pub least: Budget,
    /// Whether it is the user who allows no more, and not the machine.
    pub by_user: bool,
}

impl TooSmall {
    /// Least bytes that work.
    pub fn needed(&self) -> u64 {
        self.least.fixed() + self.least.experts()
    }

    /// Least bytes that work, rounded up, as they are typed.
    pub fn typed(&self) -> String {
        let tenths = self.needed().div_ceil(100_000);
        format!("{}.{}MB", tenths / 10, tenths % 10)
    }
}

/// What the budget is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Bytes the user allows; `None` for a share of `available`.
    pub ram: Option<u64>,
    /// Bytes the machine and its control group have left.
    pub available: u64,
    /// Weights that stay in memory.
    pub resident: u64,
    /// Key-value cache.
    pub kv: u64,
    /// Rebuilt keys and values.
    pub reconstruction: u64,
    /// Scratch.
    pub activations: u64,
    /// Bytes of the files that are read through the page cache and stay in it.
    pub buffered: u64,
    /// Distance between slabs, above 0: every model has routed experts.
    pub slab: u64,
    /// Experts of the model: more slabs than this are of no use.
    pub experts: u64,
    /// Distance between slabs of the MTP layer's experts; 0 where it is not loaded.
    pub mtp_slab: u64,
    /// Experts of the MTP layer.
    pub mtp_experts: u64,
}

impl Demand {
    /// Slabs of the MTP layer out of `pools` bytes for all slabs: of its experts it may keep the same part as the other
    /// layers of theirs.
    fn mtp_share(&self, pools: u64) -> u64 {
        let (mtp, others) = (self.mtp_slab * self.mtp_experts, self.slab * self.experts);
        if mtp == 0 {
            return 0;
        }
        let share = u128::from(pools) * u128::from(mtp) / u128::from(mtp + others);
        // No more than `pools`, so that it fits.
        (share as u64 / self.mtp_slab).clamp(MIN_SLABS as u64, self.mtp_experts)
    }
}

impl Budget {
    /// Gives the expert pool what is left of the total after everything else.
    pub fn divide(d: &Demand) -> Result<Budget, TooSmall> {
        let total = d.ram.unwrap_or(d.available / 100 * DEFAULT_SHARE_PERCENT);
        let least = Budget {
            total,
            resident: d.resident,
            kv: d.kv,
            reconstruction: d.reconstruction,
            activations: d.activations,
            page_cache: 0,
            slab: d.slab,
            slabs: MIN_SLABS as u64,
            mtp_slab: d.mtp_slab,
            mtp_slabs: d.mtp_experts.min(MIN_SLABS as u64),
        };
        if total < least.fixed() + least.experts() {
            return Err(TooSmall { least, by_user: d.ram.is_some() });
        }
        let spare = total - least.fixed() - least.experts();
        let page_cache = PAGE_CACHE_RESERVE_BYTES.min(d.buffered).min(spare / 2);
        let pools = total - least.fixed() - page_cache;
        let mtp_slabs = d.mtp_share(pools);
        let slabs = ((pools - d.mtp_slab * mtp_slabs) / d.slab).min(d.experts);
        Ok(Budget { page_cache, slabs, mtp_slabs, ..least })
    }

    /// As many slabs as `slabs`, whatever they take, and as many for the MTP layer, as far as it has experts.
    pub fn of_slabs(d: &Demand, slabs: u64) -> Budget {
        let (slabs, mtp_slabs) = (slabs.min(d.experts), slabs.min(d.mtp_experts));
        let budget = Budget {
            total: 0,
            resident: d.resident,
            kv: d.kv,
            reconstruction: d.reconstruction,
            activations: d.activations,
            page_cache: 0,
            slab: d.slab,
            slabs,
            mtp_slab: d.mtp_slab,
            mtp_slabs,
        };
        Budget { total: budget.fixed() + budget.experts(), ..budget }
    }

    /// Bytes of everything but the expert pool.
    fn fixed(&self) -> u64 {
        self.resident + self.kv + self.reconstruction + self.activations + self.page_cache
    }

    /// Bytes of all slabs.
    pub fn experts(&self) -> u64 {
        self.slab * self.slabs + self.mtp_slab * self.mtp_slabs
    }

    /// The terms of the sum.
    fn parts(&self) -> String {
        let page_cache = match self.page_cache {
            0 => String::new(),
            bytes => format!("{} page cache + ", shown(bytes)),
        };
        let slabs =
            |count: u64, slab: u64| format!("{count} slab{} of {}", if count == 1 { "" } else { "s" }, shown(slab));
        let mtp = match self.mtp_slabs {
            0 => String::new(),
            count => format!(", {} for the MTP layer", slabs(count, self.mtp_slab)),
        };
        format!(
            "{} resident + {} KV + {} attention + {} activations + {page_cache}{} experts ({}{mtp})",
            shown(self.resident),
            shown(self.kv),
            shown(self.reconstruction),
            shown(self.activations),
            shown(self.experts()),
            slabs(self.slabs, self.slab),
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
fn shown(bytes: u64) -> String {
    match bytes {
        0..100_000 => format!("{:.2} MB", bytes as f64 / 1e6),
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
        resident: 400,
        kv: 100,
        reconstruction: 0,
        activations: 100,
        buffered: 0,
        slab: 20,
        experts: 1000,
        mtp_slab: 0,
        mtp_experts: 0,
    };

    #[test]
    fn experts_get_what_is_left() {
        let b = Budget::divide(&DEMAND).unwrap();
        assert_eq!((b.slabs, b.experts()), (20, 400));
    }

    #[test]
    fn more_slabs_than_experts_are_not_taken() {
        assert_eq!(Budget::divide(&Demand { experts: 7, ..DEMAND }).unwrap().slabs, 7);
    }

    #[test]
    fn nothing_said_is_85_percent_of_what_is_available() {
        assert_eq!(Budget::divide(&Demand { ram: None, ..DEMAND }).unwrap().total, 85_000);
    }

    #[test]
    fn a_page_cache_that_is_used_is_left_something() {
        let divided = |demand: Demand| Budget::divide(&demand).map(|b| (b.page_cache, b.slabs));
        // Files smaller than the reserve need no more than they are. Of 400 left for experts one takes 20 in any case.
        assert_eq!(divided(Demand { buffered: 40, ..DEMAND }), Ok((40, 18)));
        assert_eq!(divided(Demand { buffered: 9000, ..DEMAND }), Ok((190, 10)));
        assert_eq!(divided(Demand { buffered: 9000, ram: Some(620), ..DEMAND }), Ok((0, 1)));
        let large = Demand { ram: Some(40_000_000_000), buffered: 372_000_000_000, slab: 1_000_000_000, ..DEMAND };
        assert_eq!(divided(large), Ok((2_500_000_000, 37)));
    }

    #[test]
    fn the_mtp_layer_keeps_the_same_part_of_its_experts_and_doubles_nothing_else() {
        // Of 1,000 experts of 20 and 100 of 40, 24,000 in all, 400 are had for: a sixtieth.
        let demand = Demand { mtp_slab: 40, mtp_experts: 100, ..DEMAND };
        let b = Budget::divide(&demand).unwrap();
        assert_eq!((b.slabs, b.mtp_slabs, b.experts()), (18, 1, 400));
        let half = Budget::divide(&Demand { ram: Some(12_600), ..demand }).unwrap();
        assert_eq!((half.slabs, half.mtp_slabs), (500, 50));
        let all = Budget::divide(&Demand { ram: Some(50_000), ..demand }).unwrap();
        assert_eq!((all.slabs, all.mtp_slabs), (1000, 100));
        let refused = Budget::divide(&Demand { ram: Some(659), ..demand }).unwrap_err();
        assert_eq!(refused.needed(), 660, "one slab of each");
        assert!(Budget::divide(&Demand { ram: Some(660), ..demand }).is_ok());
        assert!(b.to_string().contains("(18 slabs of 0.00 MB, 1 slab of 0.00 MB for the MTP layer)"), "{b}");
        let counted = Budget::of_slabs(&demand, 7);
        assert_eq!((counted.slabs, counted.mtp_slabs, counted.total), (7, 7, 600 + 7 * 20 + 7 * 40));
    }

    #[test]
    fn whatever_is_divided_fits() {
        for (experts, mtp_experts) in [(1, 1), (3, 3), (256, 256), (19_200, 256)] {
            for (slab, mtp_slab) in [(7, 7), (7, 14), (100, 205), (14, 7)] {
                let demand = Demand { slab, experts, mtp_slab, mtp_experts, ..DEMAND };
                for spare in slab + mtp_slab..slab + mtp_slab + 3000 {
                    let b = Budget::divide(&Demand { ram: Some(600 + spare), ..demand }).unwrap();
                    assert!(b.slabs > 0 && b.mtp_slabs > 0 && b.experts() <= spare, "{demand:?}: {b:?}");
                }
            }
        }
    }

    #[test]
    fn too_small_says_what_is_needed() {
        let refused = Budget::divide(&Demand { ram: Some(619), ..DEMAND }).unwrap_err();
        assert_eq!((refused.needed(), refused.least.total, refused.by_user), (620, 619, true));
        assert_eq!(Budget::divide(&Demand { ram: Some(620), ..DEMAND }).unwrap().slabs, 1);
        let refused = Budget::divide(&Demand { ram: None, available: 700, ..DEMAND }).unwrap_err();
        assert_eq!((refused.needed(), refused.least.total, refused.by_user), (620, 595, false));
    }

    #[test]
    fn sizes_are_shown_with_their_units() {
        let demand = Demand {
            ram: Some(14_000_000),
            resident: 4_060_000,
            kv: 246_000,
            reconstruction: 12_000,
            activations: 2_990_000,
            slab: 6_543_210,
            ..DEMAND
        };
        assert_eq!(
            Budget::divide(&demand).unwrap().to_string(),
            "memory: 4.1 MB resident + 0.2 MB KV + 0.01 MB attention + 3.0 MB activations + 6.5 MB experts \
             (1 slab of 6.5 MB) of 14.0 MB allowed"
        );
        let refused = Budget::divide(&Demand { ram: Some(13_000_000), ..demand }).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the model needs 13.9 MB of memory and 13.0 MB may be used: 4.1 MB resident + 0.2 MB KV + 0.01 MB attention + \
             3.0 MB activations + 6.5 MB experts (1 slab of 6.5 MB)"
        );
        // 4,060,000 + 246,000 + 12,000 + 2,990,000 + 6,543,210 = 13,851,210.
        assert_eq!(refused.typed(), "13.9MB");
        let large = Budget::divide(&Demand { ram: Some(20_866_200_000), ..demand }).unwrap().to_string();
        assert!(large.ends_with("6.54 GB experts (1000 slabs of 6.5 MB) of 20.87 GB allowed"), "{large}");
    }
}
