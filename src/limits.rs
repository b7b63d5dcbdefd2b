//! Every bound of the engine, related to each other by assertions the compiler checks.

/// Layers a model may have, the MTP layer included.
pub const MAX_LAYERS: usize = 1024;
/// Token ids are below this: the largest published vocabularies have about 260,000 entries.
pub const MAX_VOCAB: usize = 1 << 22;
/// Width of the residual stream: the MTP layer joins two of them into one matrix input.
pub const MAX_HIDDEN: usize = MAX_COLUMNS / 2;
/// Query heads of attention, and of the indexer.
pub const MAX_HEADS: usize = 1 << 12;
/// Routed experts a layer may have: expert ids fit in 16 bits.
pub const MAX_EXPERTS: usize = 1 << 14;
/// Groups of experts; the router sums and keeps them on the stack.
pub const MAX_GROUPS: usize = 256;
/// Experts a token may choose in one layer.
pub const MAX_TOP_K: usize = 64;
/// Rows of one forward step: a prefill chunk, or the sequences of a batch.
pub const MAX_ROWS: usize = 512;
/// Compute threads.
pub const MAX_THREADS: usize = 1024;
/// Width of the compressed key-value latent; absorbed attention decodes one such row on the stack.
pub const MAX_KV_RANK: usize = 2048;
/// Rotated values of a key; a rotation keeps its input on the stack.
pub const MAX_ROPE: usize = 512;
/// Positions of a context.
pub const MAX_CONTEXT: usize = 1 << 21;
/// Widest matrix input: an i32 holds `cols` products of 8-bit values.
pub const MAX_COLUMNS: usize = 1 << 17;
/// Attended positions scored together; their scores live on the stack.
pub const SCORE_BLOCK: usize = 128;
/// Heads that walk one block of cached positions together, so that the block is read from cache memory once.
pub const HEAD_GROUP: usize = 8;
/// Slabs without which no expert can be served.
pub const MIN_SLABS: usize = 1;

const _: () = assert!(MAX_EXPERTS <= u16::MAX as usize + 1);
const _: () = assert!(MAX_TOP_K <= MAX_EXPERTS);
const _: () = assert!(MAX_GROUPS <= MAX_EXPERTS);
const _: () = assert!(2 * MAX_HIDDEN <= MAX_COLUMNS);
const _: () = assert!(MAX_KV_RANK <= MAX_COLUMNS);
const _: () = assert!(MAX_ROPE.is_multiple_of(2));
const _: () = assert!(MAX_LAYERS <= u16::MAX as usize);
const _: () = assert!(MAX_VOCAB <= u32::MAX as usize);
const _: () = assert!(MAX_COLUMNS as i64 * 128 * 127 <= i32::MAX as i64);
const _: () = assert!(MAX_CONTEXT <= u32::MAX as usize);
