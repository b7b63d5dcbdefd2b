//! How long the chunks of a prompt are.
//!
//! A chunk of a long prompt reads nearly every expert once, so that twice the rows read half as much. But rows need buffers,
//! and what those take the cache of experts lacks, for the answer too.

use super::budget::{Demand, default_total};
use super::config::{DEFAULT_PREFILL_ROWS, EngineConfig, Memory};

/// What rows beyond the default take may be one part in so many of what the experts would get without them: a prompt of
/// four such chunks reads more than an answer of some hundred tokens does for a cache a quarter smaller.
const ROWS_ONE_IN: u64 = 4;

/// Rows of a chunk in a context of `context` positions, where everything but the experts takes `demand(rows)`.
pub(super) fn choose(config: &EngineConfig, context: usize, demand: impl Fn(usize) -> Demand<'static>) -> usize {
    let most = config.prefill_rows.min(context);
    let Memory::Total(ram) = config.memory else { return most };
    if most <= DEFAULT_PREFILL_ROWS {
        return most;
    }
    let bytes = |demand: &Demand| demand.activations + demand.working;
    let default = demand(DEFAULT_PREFILL_ROWS);
    let others = default.program + default.resident + default.kv + default.reconstruction;
    let total = ram.unwrap_or(default_total(config.available_bytes));
    let experts = total.saturating_sub(others + bytes(&default));
    // Buffers are as many times larger as there are rows, but for a part that all have.
    let more = bytes(&demand(2 * DEFAULT_PREFILL_ROWS)).saturating_sub(bytes(&default));
    let per_row = more.div_ceil(DEFAULT_PREFILL_ROWS as u64).max(1);
    most.min(DEFAULT_PREFILL_ROWS + (experts / ROWS_ONE_IN / per_row) as usize)
}

/// `tokens` in chunks of `most` at most, all as long as one another: a short one at the end would read as much as a long one.
pub(super) fn chunk_of(tokens: usize, most: usize) -> usize {
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_chunks_are_had_where_they_leave_the_experts_three_quarters() {
        let config =
            |rows, ram| EngineConfig { prefill_rows: rows, memory: Memory::Total(Some(ram)), ..EngineConfig::new(0) };
        // 100 bytes whatever the rows, and 10 a row; 900 of everything else: 512 rows leave 1,000,000 - 6,120.
        let demand = |rows: usize| Demand {
            ram: None,
            available: 0,
            program: 100,
            resident: 500,
            saved: 0,
            kv: 200,
            reconstruction: 100,
            activations: 100 + 7 * rows as u64,
            working: 3 * rows as u64,
            staging: 0,
            buffered: 0,
            experts: &[],
        };
        let chosen = |rows, ram, context| choose(&config(rows, ram), context, demand);
        assert_eq!(chosen(2048, 1_000_000, 1 << 20), 2048);
        // A quarter of 40,000 are 1,000 rows more.
        assert_eq!(chosen(2048, 46_120, 1 << 20), 1512);
        assert_eq!(chosen(1300, 46_120, 1 << 20), 1300);
        assert_eq!(chosen(2048, 46_120, 1000), 1000, "no more than the context");
        assert_eq!(chosen(2048, 100, 1 << 20), 512, "what is too small is refused elsewhere");
        assert_eq!(chosen(64, 100, 1 << 20), 64);
        let slabs = EngineConfig { memory: Memory::Slabs(1), ..config(2048, 0) };
        assert_eq!(choose(&slabs, 1 << 20, demand), 2048);
    }

    #[test]
    fn chunks_of_a_prompt_are_as_long_as_one_another() {
        assert_eq!([1, 512, 513, 1024, 1030].map(|tokens| chunk_of(tokens, 512)), [1, 512, 257, 512, 344]);
        assert_eq!((chunk_of(2049, 2048), chunk_of(0, 512)), (1025, 1));
    }
}
