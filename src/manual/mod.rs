//! The manual: what the program does and why it does it so. Modules of prose, no code.

#[doc = include_str!("design.md")]
pub mod design {}

#[doc = include_str!("arithmetic.md")]
pub mod arithmetic {}

#[doc = include_str!("families.md")]
pub mod families {}

#[doc = include_str!("files.md")]
pub mod files {}

#[doc = include_str!("reading.md")]
pub mod reading {}

#[doc = include_str!("pipeline.md")]
pub mod pipeline {}

#[doc = include_str!("caching.md")]
pub mod caching {}

#[doc = include_str!("sampling.md")]
pub mod sampling {}

#[doc = include_str!("speculation.md")]
pub mod speculation {}

#[doc = include_str!("chatting.md")]
pub mod chatting {}

#[doc = include_str!("evaluating.md")]
pub mod evaluating {}

#[doc = include_str!("profiling.md")]
pub mod profiling {}

#[doc = include_str!("planning.md")]
pub mod planning {}
