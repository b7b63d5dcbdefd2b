//! placeholder
#![allow(missing_docs)]
pub mod cli;
pub mod engine;
pub mod model;

/// Stand-in: replaced by the real checkpoint layer.
pub mod checkpoint {
    use std::path::{Path, PathBuf};
    pub mod arch;
    pub use arch::Arch;

    #[derive(Debug, thiserror::Error)]
    #[error("the checkpoint layer is not part of this build")]
    pub struct CheckpointError;
    impl CheckpointError {
        pub fn hint(&self) -> &'static str {
            "build the whole program"
        }
    }

    pub struct Checkpoint {
        pub dir: PathBuf,
        pub arch: Arch,
    }
    impl Checkpoint {
        pub fn open(_dir: &Path) -> Result<Checkpoint, CheckpointError> {
            Err(CheckpointError)
        }
        pub fn notes(&self) -> &[String] {
            &[]
        }
        pub fn fingerprint_hex(&self) -> String {
            String::new()
        }
    }

    pub mod convert {
        use super::CheckpointError;
        use std::path::Path;
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Width {
            Bits16,
            Bits8,
            Bits4,
            Bits2,
        }
        #[derive(Clone, Debug)]
        pub struct ConvertOptions {
            pub experts: Width,
            pub dense: Width,
            pub io_bits: Width,
            pub mtp: Width,
            pub indexer: Width,
            pub group: Option<u16>,
        }
        impl Default for ConvertOptions {
            fn default() -> Self {
                let (experts, b8) = (Width::Bits4, Width::Bits8);
                ConvertOptions { experts, dense: b8, io_bits: b8, mtp: b8, indexer: b8, group: None }
            }
        }
        pub struct Progress {
            pub done_bytes: u64,
            pub total_bytes: u64,
        }
        pub struct ConvertReport {
            pub bytes: u64,
        }
        pub fn convert(
            _src: &Path,
            _dst: &Path,
            _opts: &ConvertOptions,
            _progress: &mut dyn FnMut(Progress),
        ) -> Result<ConvertReport, CheckpointError> {
            Err(CheckpointError)
        }
    }
}
