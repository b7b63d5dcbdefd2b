//! Stand-in: replaced by the real engine. Signatures only.
#![allow(missing_docs)]
pub mod sampler;
pub mod stats;
pub mod stop;

use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;

pub use sampler::Sampling;
pub use stats::Stats;

macro_rules! named {
    ($($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),* })*) => {$(
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($variant),* }
        impl FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<$name, String> {
                match text { $($text => Ok($name::$variant),)* _ => Err(format!("unknown value '{text}'")) }
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($name::$variant => $text),* })
            }
        }
    )*};
}
named! {
    IoMode { Auto = "auto", Direct = "direct", Buffered = "buffered" }
    DeviceKind { Auto = "auto", Uring = "uring", Threads = "threads" }
    Isa { Scalar = "scalar", Avx2 = "avx2", Avx512 = "avx512" }
    Activations { Int8 = "int8", F32 = "f32" }
    AttentionForm { Auto = "auto", Absorbed = "absorbed", Explicit = "explicit" }
    Dsa { Auto = "auto", On = "on", Off = "off" }
}

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub dir: PathBuf,
    pub io: IoMode,
    pub device: DeviceKind,
    pub depth_bytes: Option<u64>,
    pub ram: Option<u64>,
    pub available_bytes: u64,
    pub threads: usize,
    pub context: usize,
    pub isa: Option<Isa>,
    pub activations: Activations,
    pub attention: AttentionForm,
    pub dsa: Dsa,
    pub load_mtp: bool,
}

#[derive(Clone, Debug)]
pub struct Job {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub sampling: Sampling,
    pub stop_ids: Vec<u32>,
    pub ignore_eos: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Stop,
    Length,
    StopString,
    Interrupted,
}

#[derive(Clone, Debug)]
pub struct Outcome {
    pub ids: Vec<u32>,
    pub finish: Finish,
}

#[derive(Debug, thiserror::Error)]
#[error("the engine is not part of this build")]
pub struct EngineError;
impl EngineError {
    pub fn hint(&self) -> Option<&'static str> {
        None
    }
}

pub struct Engine;
impl Engine {
    pub fn open(_config: EngineConfig) -> Result<Engine, EngineError> {
        Err(EngineError)
    }
    pub fn notes(&self) -> &[String] {
        &[]
    }
    pub fn generate(
        &mut self,
        _job: &Job,
        _cancel: &AtomicBool,
        _on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Outcome, EngineError> {
        Err(EngineError)
    }
    pub fn stats(&self) -> Stats {
        Stats::default()
    }
}
