//! Every bound of the engine, related to each other by assertions the compiler checks.

use std::time::Duration;

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
/// Rows of one forward step: a prefill chunk, or the sequences of a batch. A chunk reads nearly all experts of a model that
/// is larger than memory, so that a long prompt is read by as few as possible.
pub const MAX_ROWS: usize = 2048;
/// Rows of a step that attention takes at a time: it reads no expert, and its buffers are the widest that rows have.
pub const ATTENTION_ROWS: usize = 512;
/// Every weight, gain of a norm and bias is smaller than this: then whatever the tokens are, nothing that a forward step
/// makes of them is beyond f32, as the assertions at the end say. What was trained is smaller than 100, and nearly all of it
/// than 1; a wrong bit in an exponent makes it larger by powers of ten.
pub const WEIGHT_BELOW: f32 = 1024.0;
/// Factor on the outputs of chosen experts: published ones are 16 at most.
pub const MAX_ROUTED_SCALING: f32 = 64.0;
/// What a norm adds to the mean of squares: of less, a row of zeros would be divided by zero.
pub const MIN_NORM_EPS: f64 = 1e-30;
/// Base of the rotations: of less than this, angles grow along a head and become infinite.
pub const MIN_ROPE_THETA: f64 = 1.0;
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
/// Stop strings of a generation.
pub const MAX_STOPS: usize = 64;
/// Bytes of a stop string: text is held back for at most this long.
pub const MAX_STOP_BYTES: usize = 1024;
/// Higher temperatures only produce noise.
pub const MAX_TEMPERATURE: f32 = 100.0;
/// A repeat penalty beyond this leaves nothing of what was said once.
pub const REPEAT_PENALTY_MAX: f32 = 100.0;
/// Presence and frequency penalties are no farther from 0, as in the API that has them.
pub const PENALTY_MAX: f32 = 2.0;
/// Nor is a logit's bias farther than this, unless it bans the token.
pub const LOGIT_BIAS_MAX: f32 = 100.0;
/// Tokens that have a bias.
pub const LOGIT_BIASES_MAX: usize = 1024;
/// Most likely tokens whose log probabilities are told, as in the API that has them.
pub const LOGPROBS_MAX: usize = 20;
/// Bytes of a grammar or schema that is read.
pub const MAX_GRAMMAR_BYTES: u64 = 4 << 20;
/// States of the automaton that tells the terminals of a grammar, of 1 to 2 kB each.
pub const GRAMMAR_STATES_MAX: usize = 50_000;
/// What a grammar may take beside a trie of the vocabulary.
pub const GRAMMAR_BYTES: u64 = 100 << 20;
/// Longest token that a grammar leads to. No published vocabulary has a longer one.
pub const GRAMMAR_TOKEN_BYTES_MAX: usize = 1024;
/// Most bytes of all tokens: the trie of a grammar numbers its nodes with 22 bits, and has no more nodes than bytes.
pub const GRAMMAR_VOCABULARY_BYTES_MAX: usize = (1 << 22) - 1;
/// Rules of a grammar in GBNF.
pub const GBNF_RULES_MAX: usize = 4096;
/// Parentheses in each other there.
pub const GBNF_NESTING_MAX: usize = 24;
/// Times that a part is repeated there.
pub const GBNF_REPEATS_MAX: u32 = 100_000;
/// Bytes of a prompt that is read: more than any context holds.
pub const MAX_PROMPT_BYTES: u64 = 256 << 20;
/// Threads that read headers.
pub const HEADER_THREADS_MAX: usize = 8;
/// Shards from which on threads share their headers.
pub const HEADER_SHARDS_MIN: usize = 64;
/// Bytes of a small JSON file that is read.
pub const MAX_SMALL_FILE_BYTES: u64 = 64 << 20;
/// Bytes of a `tokenizer.json` that is read: several times the largest published one.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;
/// Bytes of a tuning profile that is read: fifty times what one has.
pub const MAX_PROFILE_BYTES: u64 = 64 << 10;
/// Bytes of a chat template that is read: a hundred times the largest published one.
pub const MAX_TEMPLATE_BYTES: u64 = 4 << 20;
/// Instructions a chat template may execute: a published one uses a few hundred for each message.
pub const MAX_TEMPLATE_STEPS: u64 = 50_000_000;
/// Depth of a value that a chat template writes as JSON, which takes a call each.
pub const MAX_JSON_DEPTH: usize = 200;
/// Bytes of a shard's header that is read, as in the format's own library.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the record of a source whose shards are removed: ten times the headers of the largest published model.
pub const MAX_RECORD_BYTES: u64 = 1 << 30;
/// Shards that are looked for by the numbers in the names of others.
pub const MAX_NUMBERED_SHARDS: u32 = 10_000;
/// Bytes of a tensor's name.
pub const MAX_NAME_BYTES: usize = 1024;
/// Dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 8;
/// Slabs that experts which are quantized on their way are read into: as many as a drive is given at a time, and as many
/// again that wait to be quantized or were guessed.
pub const STAGING_SLABS: usize = 8;
/// Of those, as many are left to what is waited for.
pub const STAGING_DEMAND: usize = 4;
/// Of a wait for a read that is watched, so much at a time: how soon an interrupt is seen.
pub const WAIT_STEP: Duration = Duration::from_millis(100);
/// A drive that answers nothing for as long as this is reported.
pub const HUNG_AFTER: Duration = Duration::from_secs(30);
/// Slabs without which no expert can be served.
pub const MIN_SLABS: usize = 1;
/// Shortest measurement of a way of reading, in seconds.
pub const SECONDS_MIN: f64 = 0.01;
/// Longest one.
pub const SECONDS_MAX: f64 = 600.0;
/// Most measurements of one way of reading.
pub const ROUNDS_MAX: usize = 1000;
/// Slabs in flight that `bench-io` goes up to.
pub const SWEEP_DEPTH_MAX: u64 = 16;
/// Values that `sweep` tries.
pub const SWEEP_VALUES_MAX: usize = 64;
/// Tests of one `bench`.
pub const BENCH_TESTS_MAX: usize = 256;
/// Bytes of a list of token ids that is read: ten million of them.
pub const MAX_IDS_FILE_BYTES: u64 = 1 << 27;
/// Questions that `eval choices` asks.
pub const MAX_QUESTIONS: usize = 1 << 20;
/// Ways of reading that `tune` tries in generations, besides the defaults.
pub const CHALLENGERS_MAX: usize = 4;
/// Most tokens of a generation of `tune`.
pub const TRIAL_TOKENS_MAX: usize = 256;
/// Most bytes between the tensors of a run, all together: what aligns the elements of up to six tensors.
pub const CHECKED_RUN_GAP_MAX: u64 = 64;
/// Largest slab that the check of checksums reads into. A longer run is hashed in parts.
pub const CHECK_SLAB_BYTES_MAX: usize = 8 << 20;
/// Less memory than this holds no model: a size without its unit.
pub const RAM_BYTES_MIN: u64 = 1 << 20;
/// Resident weights are read so much at a time: whoever cancels waits no longer than that takes.
pub const LOAD_PART_BYTES: usize = 8 << 20;
/// So much of those that are quantized on the way, which lies beside the others meanwhile; more where 128 rows, which share
/// FP8 scales, have more.
pub const LOAD_ENCODED_PART_BYTES: usize = 1 << 20;
/// Threads that load weights: a drive wants several requests at a time.
pub const LOAD_WORKERS_MIN: usize = 4;
/// And most of them, where weights are quantized.
pub const LOAD_WORKERS_MAX: usize = 32;
/// Experts not in memory any more whose copies are read again when a drive gave wrong bytes: 1.2 GB of the largest.
pub const GONE_CHECKED_MAX: usize = 64;
/// Bytes of the source that a conversion reads at a time; more where 128 rows, which share FP8 scales, have more.
pub const CONVERT_PIECE_BYTES: usize = 8 << 20;
/// Small tensors that are read together to be looked at.
pub const FINITE_SPANS_MAX: usize = 6;
/// Tensors that are named for numbers that no weight is, and parts that cannot be read: what is wrong with more of them is
/// wrong with the whole.
pub const BAD_NUMBERS_NAMED_MAX: usize = 20;
/// Such pieces in memory: enough for the drive to be busy while one is encoded.
pub const AHEAD_SLABS: usize = 6;
/// Buffers that a shard is read back into once it is written.
pub const READ_BACK_SLABS: usize = 6;
/// Threads that hash. One is faster than one drive; several drives, or a slow processor, need more.
pub const CHECK_WORKERS_MAX: usize = 4;
/// Tokens drafted for one step: loops and quotations are taken in steps of this length, and no text is foreseen further.
pub const DRAFT_TOKENS_MAX: usize = 32;
/// Places of a pair that are looked at for a draft, the latest first.
pub const NGRAM_CHAIN_MAX: usize = 16;
/// Tokens of a place that are compared: more that agree make no better draft.
pub const NGRAM_MATCH_MAX: usize = 16;
/// Part of the cache of experts that buffers of drafts may take where the engine decides of them.
pub const DRAFT_CACHE_SHARE: u64 = 64;
/// Plain steps after which it is forgotten that drafts do not pay, where that was found once.
pub const DRAFT_TRIAL_PAUSE_MIN: u32 = 16;
/// Most of them.
pub const DRAFT_TRIAL_PAUSE_MAX: u32 = 256;
/// Layers ahead of which experts are guessed.
pub const LOOKAHEAD_LAYERS_MAX: usize = 2;
/// Bytes of one step in a routing trace: every layer's choices and guesses for as many rows as a step may have.
pub const MAX_TRACE_STEP_BYTES: usize = 1 << 30;
/// Bytes of a usage history that is read: one number for every expert that a model may have.
pub const MAX_HISTORY_BYTES: u64 = 1 << 28;
/// Layers that the file of a context may name: those of a model, and what may come to keep something of each position beside
/// them.
pub const KV_FILE_LAYERS_MAX: usize = 2 * MAX_LAYERS;
/// The file of a context is read and written so much at a time; a position that takes more, by itself.
pub const KV_FILE_BUFFER_BYTES: usize = 1 << 20;
/// Positions of an answer that are not in the file of its context yet: what is lost where the process is killed.
pub const KV_FILE_UNWRITTEN_MAX: usize = 8;
/// Names that files of other contexts are put aside under.
pub const KV_FILES_ASIDE_MAX: usize = 100;
/// Lines of earlier chats that can be called back.
pub const CHAT_HISTORY_MAX: usize = 1000;
/// Percent of the expert cache that a history of selections may pin.
pub const PIN_SHARE_PERCENT_MAX: u64 = 50;
/// Bytes of a routing trace that is read: a million tokens of the largest published model.
pub const MAX_TRACE_BYTES: u64 = 1 << 30;

/// What the process holds besides its own file and everything that is counted one by one: shared libraries, histograms,
/// the allocator's spare, and the huge pages that two arenas end in. As a part of the program's file is never touched, the
/// peak of the bundled model stays 8 MB below the sum.
pub const PROGRAM_REST_BYTES: u64 = 8 << 20;
/// What a compute thread holds: the part of its stack that it uses, and the allocator's spare of its own.
pub const THREAD_BYTES: u64 = 128 << 10;
/// Address space that a thread takes, whatever it uses: its stack, with its guard and that of signals.
pub const THREAD_SPACE_BYTES: u64 = (2 << 20) + (64 << 10);
/// Threads besides those that compute and those that read: of the ring, of the line that shows progress, and one to spare.
pub const THREADS_BESIDES: usize = 3;
/// A tokenizer in memory takes so many times the bytes of its file.
pub const TOKENIZER_TIMES: u64 = 8;
/// What a tensor takes in the index of a checkpoint: its name, its place, its share of a table that may be half empty, and
/// for every second one the same of the format it is stamped with.
pub const TENSOR_INDEX_BYTES: u64 = 448;
/// What the heap keeps mapped of what reading a tensor's header took.
pub const TENSOR_UNHELD_BYTES: u64 = 192;
/// What the cache keeps of an expert beside its slab, for each size of slabs: where it is, how often it was chosen, what a
/// policy knows of it.
pub const EXPERT_RECORD_BYTES: u64 = 128;

/// Visits of stages, and reads, that a timeline keeps: some fifty tokens of the largest model, 7 MB.
pub const TIMELINE_EVENTS_MAX: usize = 1 << 16;
/// Longest duration that percentiles tell apart; a longer one counts as this long in them.
pub const DURATION_NS_MAX: u64 = 600_000_000_000;
/// Steps between two trials of a switch while little is known of it.
pub const PROBE_PAUSE_MIN: u32 = 3;
/// Most steps between them: a drive that changes is noticed within a few minutes.
pub const PROBE_PAUSE_MAX: u32 = 256;

const _: () = assert!(0 < STAGING_DEMAND && STAGING_DEMAND < STAGING_SLABS);
const _: () = assert!(WAIT_STEP.as_nanos() < HUNG_AFTER.as_nanos());
const _: () = assert!(LOAD_ENCODED_PART_BYTES <= LOAD_PART_BYTES && LOAD_WORKERS_MIN <= LOAD_WORKERS_MAX);
const _: () = assert!(PIN_SHARE_PERCENT_MAX <= 100 && SECONDS_MIN < SECONDS_MAX);
const _: () = assert!(DRAFT_TOKENS_MAX < MAX_ROWS);
const _: () = assert!(0 < DRAFT_TRIAL_PAUSE_MIN && DRAFT_TRIAL_PAUSE_MIN < DRAFT_TRIAL_PAUSE_MAX);
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
const _: () = assert!(0 < PROBE_PAUSE_MIN && PROBE_PAUSE_MIN < PROBE_PAUSE_MAX);

/// How large the numbers of a forward step become, as powers of two, where weights are smaller than [`WEIGHT_BELOW`].
///
/// A row over its root mean square is no longer than `sqrt(columns)`, nor is any value of it larger. A product of two
/// vectors, and each partial sum of it, is no larger than the product of their lengths, and than `columns` times the product
/// of their largest values; of a matrix, a row is no longer than `sqrt(columns)` times its largest weight. Rounding to f32
/// adds less than a hundredth to the longest sum, which what is rounded up here covers.
const _: () = {
    let gain = log2(WEIGHT_BELOW as usize);
    // The least code of two bits is -2, and the largest, which is what a scale is made of, 1.
    let weight = gain + 1;
    let (hidden, columns, latents) = (log2(MAX_HIDDEN), log2(MAX_COLUMNS), log2(MAX_KV_RANK));
    // Activations that are rounded to 8 bits have the same largest value, and as rows of a norm at most twice the length.
    let normed = gain + hidden.div_ceil(2) + 1;
    let projected = weight + hidden.div_ceil(2) + normed;

    // `down(silu(gate) * up)`; silu makes nothing larger. FP8 codes, of 448 at most, are multiplied before their scale is.
    let inner = projected + projected;
    assert!(columns + log2(448) + inner < f32::MAX_EXP as u32);
    let routed = columns + weight + inner + log2(MAX_TOP_K) + log2(MAX_ROUTED_SCALING as usize);
    // Every layer adds that much; the shared expert, attention and the embedding are in the last doubling.
    assert!(routed + log2(MAX_LAYERS) + 1 < f32::MAX_EXP as u32);

    // A rotation adds two products of a sine or cosine.
    let query = weight + columns.div_ceil(2) + (gain + columns.div_ceil(2) + 1) + 1;
    let (latent, rotary_key) = (gain + latents.div_ceil(2), projected + 1);
    let (carried, rebuilt) = (columns + weight + query, latents + weight + latent);
    assert!(latents + carried + latent < f32::MAX_EXP as u32 && columns + query + rebuilt < f32::MAX_EXP as u32);
    assert!(log2(MAX_ROPE) + query + rotary_key < f32::MAX_EXP as u32);
    // Values are summed over positions before they are divided by their number, with shares of 1 at most.
    assert!(rebuilt <= projected + 1 && log2(MAX_CONTEXT) + projected + 1 < f32::MAX_EXP as u32);
    assert!(columns + weight + projected + 1 < routed);

    // The indexer's product is divided by the root of its columns, and its sum by that of its heads.
    let index_key = gain + columns.div_ceil(2) + 2;
    assert!(columns + query + index_key < f32::MAX_EXP as u32);
    let scored = columns.div_ceil(2) + query + index_key;
    assert!(scored + projected + log2(MAX_HEADS).div_ceil(2) < f32::MAX_EXP as u32);
};

/// The power of two that is no smaller.
const fn log2(n: usize) -> u32 {
    usize::BITS - (n - 1).leading_zeros()
}
