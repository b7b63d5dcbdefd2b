//! Mutated files, seeded: whatever the bytes, an error or a model that holds together, never a panic.
//!
//! `FUZZ_ROUNDS=n` multiplies the rounds, `FUZZ_SEED=n` starts from another seed.
// An engine's error is large, and made once a mutant at most.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::result_large_err)]

mod checkpoint;
mod mutate;
mod text;
