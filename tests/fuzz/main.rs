//! Mutated files, seeded: whatever the bytes, an error or a model that holds together, never a panic.
//!
//! `FUZZ_ROUNDS=n` multiplies the rounds, `FUZZ_SEED=n` starts from another seed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod checkpoint;
mod mutate;
mod text;
