//! What a conversion is asked to do.

use super::widths::Widths;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::required::Role;
use crate::checkpoint::write::Cancel;
use crate::kernels::Format;
use std::fmt;
use std::str::FromStr;

/// Bits of a stored weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// `Int2Row`.
    Bits2,
    /// `Int3Group`: there is no other group than its 64 columns.
    Bits3,
    /// `Int4Row`, or `Int4Group` when a group is asked for.
    Bits4,
    /// `Int8Row`.
    Bits8,
    /// BF16; a source in F16 stays F16, so that 16-bit sources are kept bit for bit.
    Bits16,
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Width::Bits2 => "2",
            Width::Bits3 => "3",
            Width::Bits4 => "4",
            Width::Bits8 => "8",
            Width::Bits16 => "16",
        })
    }
}

impl FromStr for Width {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Width, String> {
        match text {
            "2" => Ok(Width::Bits2),
            "3" => Ok(Width::Bits3),
            "4" => Ok(Width::Bits4),
            "8" => Ok(Width::Bits8),
            "16" => Ok(Width::Bits16),
            _ => Err(format!("a width is 2, 3, 4, 8 or 16, not {text}")),
        }
    }
}

/// Precision of each kind of weight in the container. Norms, biases and the router are always F32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Routed experts of the decoder layers.
    pub experts: Width,
    /// Attention, dense MLPs and shared experts of the decoder layers.
    pub dense: Width,
    /// Embeddings and output head.
    pub io_bits: Width,
    /// The MTP layer, its experts included.
    pub mtp: Width,
    /// The sparse-attention indexer, the MTP layer's too.
    pub indexer: Width,
    /// Columns that share a scale in every 4-bit weight; `None` is one scale a row. Those of 3 bits have their 64 anyway.
    pub group: Option<u16>,
    /// Keep every weight as the source has it, bit for bit, and change only the layout. The widths are then not used.
    pub repack: bool,
    /// Remove each shard of the source once all that is made from it is durable and was read back.
    pub delete_source: bool,
    /// Take the destination to have this many bytes free, instead of asking its file system.
    pub free_bytes: Option<u64>,
    /// Ends the conversion early; what is finished stays.
    pub cancel: Option<Cancel>,
}

impl Default for ConvertOptions {
    /// Experts tolerate 4 bits, what every token passes through does not: see `bench/record`.
    fn default() -> Self {
        ConvertOptions {
            experts: Width::Bits4,
            dense: Width::Bits8,
            io_bits: Width::Bits8,
            mtp: Width::Bits8,
            indexer: Width::Bits8,
            group: None,
            repack: false,
            delete_source: false,
            free_bytes: None,
            cancel: None,
        }
    }
}

impl ConvertOptions {
    /// Everything that decides the output's bytes, as one line.
    pub fn parameters(&self) -> String {
        if self.repack { "repack".to_owned() } else { self.widths().to_string() }
    }

    /// The widths of every kind of weight.
    fn widths(&self) -> Widths {
        Widths {
            experts: Some(self.experts),
            dense: Some(self.dense),
            io: Some(self.io_bits),
            mtp: Some(self.mtp),
            indexer: Some(self.indexer),
            group: self.group,
        }
    }

    /// Whether a group is more than what 3-bit weights have anyway.
    pub fn uses_group(&self) -> bool {
        self.widths().uses_group()
    }

    /// Refuses a group that no reader would recognize, or that nothing would use.
    pub(crate) fn check(&self) -> Result<()> {
        match self.group {
            Some(group) if self.repack => Err(CheckpointError::ConvertOptions {
                what: "--group".to_owned(),
                expected: format!("a 4-bit width for groups of {group} to apply to"),
                found: self.parameters(),
            }),
            _ => self.widths().check(),
        }
    }

    /// The format for a weight of this role, `cols` wide and stored as `source`.
    pub(crate) fn target(&self, role: Role, cols: usize, source: Format) -> Format {
        match self.widths().target(role, cols, source) {
            _ if self.repack => source,
            Some(target) => target,
            None => Format::F32,
        }
    }
}
