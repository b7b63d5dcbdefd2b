//! How memory is divided before anything is loaded. Pure arithmetic.

use std::fmt;

use crate::limits::MIN_SLABS;

/// Share of the available memory that is used when nothing was said.
const DEFAULT_SHARE_PERCENT: u64 = 85;

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
    /// Distance between slabs.
    pub slab: u64,
    /// Slabs of the expert pool.
    pub slabs: u64,
}

/// A model that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model needs {needed} bytes of memory and {available} may be used")]
pub struct TooSmall {
    /// Least bytes that work.
    pub needed: u64,
    /// Bytes that may be used.
    pub available: u64,
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
    /// Distance between slabs; 0 for a model without routed experts.
    pub slab: u64,
    /// Experts of the model: more slabs than this are of no use.
    pub experts: u64,
}

impl Budget {
    /// Gives the expert pool what is left of the total after everything else.
    pub fn divide(d: &Demand) -> Result<Budget, TooSmall> {
        let total = d.ram.unwrap_or(d.available / 100 * DEFAULT_SHARE_PERCENT);
        let fixed = d.resident + d.kv + d.reconstruction + d.activations;
        let least = fixed + d.slab * MIN_SLABS as u64;
        if total < least {
            return Err(TooSmall { needed: least, available: total });
        }
        let slabs = (total - fixed).checked_div(d.slab).map_or(0, |slabs| slabs.min(d.experts));
        Ok(Budget {
            total,
            resident: d.resident,
            kv: d.kv,
            reconstruction: d.reconstruction,
            activations: d.activations,
            slab: d.slab,
            slabs,
        })
    }

    /// Bytes of the expert pool.
    pub fn experts(&self) -> u64 {
        self.slab * self.slabs
    }
}

impl fmt::Display for Budget {
    /// The sum, as a line a person can check; sizes in MB of 10^6 bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |b: u64| b as f64 / 1e6;
        write!(
            f,
            "memory: {:.1} MB resident + {:.1} KV + {:.1} attention + {:.1} activations + {:.1} experts ({} slabs of {:.2}) \
             of {:.1} MB allowed",
            mb(self.resident),
            mb(self.kv),
            mb(self.reconstruction),
            mb(self.activations),
            mb(self.experts()),
            self.slabs,
            mb(self.slab),
            mb(self.total)
        )
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
        slab: 20,
        experts: 1000,
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
    fn too_small_says_what_is_needed() {
        let refused = Budget::divide(&Demand { ram: Some(619), ..DEMAND });
        assert_eq!(refused, Err(TooSmall { needed: 620, available: 619 }));
        assert_eq!(Budget::divide(&Demand { ram: Some(620), ..DEMAND }).unwrap().slabs, 1);
    }
}
