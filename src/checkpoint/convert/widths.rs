//! The precision that each kind of weight gets: one table for what a conversion writes and for what is quantized while it
//! is loaded, so that both make the same bytes.

use super::options::Width;
use crate::checkpoint::container::GROUP_SIZES;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::required::Role;
use crate::kernels::{Format, INT3_GROUP};
use std::fmt;

/// Widths by what weights are for; a kind without one stays as the source has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Widths {
    /// Routed experts of the decoder layers.
    pub experts: Option<Width>,
    /// Attention, dense MLPs and shared experts of the decoder layers.
    pub dense: Option<Width>,
    /// Embeddings and output head.
    pub io: Option<Width>,
    /// The MTP layer.
    pub mtp: Option<Width>,
    /// The sparse-attention indexer, the MTP layer's too.
    pub indexer: Option<Width>,
    /// Columns that share a scale in every 4-bit weight; `None` is one scale a row. Those of 3 bits have their 64 anyway.
    pub group: Option<u16>,
}

impl Widths {
    /// Everything that is loaded whole in `width`.
    pub const fn resident(width: Width) -> Widths {
        let all = Some(width);
        Widths { experts: None, dense: all, io: all, mtp: all, indexer: all, group: None }
    }

    /// The width of weights of this role; none where they stay as they are. Norms, biases and the router have none.
    fn of(&self, role: Role) -> Option<Width> {
        match role {
            Role::Exact => None,
            Role::Io => self.io,
            Role::Indexer => self.indexer,
            Role::Mtp => self.mtp,
            Role::Expert => self.experts,
            Role::Dense => self.dense,
        }
    }

    /// The format that a conversion gives a weight of this role, `cols` wide and stored as `source`; none where it stays.
    pub(crate) fn target(&self, role: Role, cols: usize, source: Format) -> Option<Format> {
        Some(match (self.of(role)?, self.group) {
            (Width::Bits2, _) => Format::Int2Row,
            (Width::Bits3, _) => Format::Int3Group,
            // One group a row is the same bytes as a scale a row, and has that name.
            (Width::Bits4, Some(group)) if cols > group.into() => Format::Int4Group { group },
            (Width::Bits4, _) => Format::Int4Row,
            (Width::Bits8, _) => Format::Int8Row,
            (Width::Bits16, _) if source == Format::F16 => Format::F16,
            (Width::Bits16, _) => Format::Bf16,
        })
    }

    /// The format in which a weight is held that a checkpoint stores as `source`: what a conversion would make of it, but
    /// never a wider one, which would take memory for nothing. A quantized weight that has as few bits stays as it is;
    /// one with more is refused, with what it should become: quantized twice it is not what a conversion makes of the
    /// original.
    pub fn held(&self, role: Role, cols: usize, source: Format) -> std::result::Result<Format, Format> {
        let Some(target) = self.target(role, cols, source) else { return Ok(source) };
        // A run of columns that every format stores in whole bytes.
        let [stored, asked] = [source, target].map(|format| format.row_bytes(64));
        match source.is_integer() {
            true if asked < stored => Err(target),
            false if asked <= stored => Ok(target),
            _ => Ok(source),
        }
    }

    /// Whether nothing is to be quantized.
    pub fn is_empty(&self) -> bool {
        *self == Widths { group: self.group, ..Widths::default() }
    }

    /// Refuses a group that no reader would recognize, or that nothing would use.
    pub fn check(&self) -> Result<()> {
        let Some(group) = self.group else { return Ok(()) };
        let fault = |expected: String, found: String| {
            Err(CheckpointError::ConvertOptions { what: "--group".to_owned(), expected, found })
        };
        if !GROUP_SIZES.contains(&group) {
            let sizes = GROUP_SIZES.map(|size| size.to_string()).join(", ");
            return fault(format!("one of {sizes}"), group.to_string());
        }
        let is_of_three = self.all().contains(&Some(Width::Bits3)) && usize::from(group) == INT3_GROUP;
        if !(self.uses_group() || is_of_three) {
            let expected = format!("a 4-bit width for groups of {group} to apply to (3-bit ones have {INT3_GROUP})");
            let found = self.named();
            return fault(expected, if found.is_empty() { "none".to_owned() } else { found.trim_end().to_owned() });
        }
        Ok(())
    }

    /// Whether a group is more than what 3-bit weights have anyway.
    pub fn uses_group(&self) -> bool {
        self.all().contains(&Some(Width::Bits4))
    }

    fn all(&self) -> [Option<Width>; 5] {
        [self.experts, self.dense, self.io, self.mtp, self.indexer]
    }

    /// Every width with its name, each with a blank behind it.
    fn named(&self) -> String {
        let names = ["experts", "dense", "io", "mtp", "indexer"].into_iter().zip(self.all());
        names.filter_map(|(name, width)| width.map(|width| format!("{name}={width} "))).collect()
    }
}

impl fmt::Display for Widths {
    /// One line; of a kind that stays as it is nothing is said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A group of 64 that is only that of 3-bit weights changes nothing.
        let group = self.group.filter(|_| self.uses_group()).map_or("row".to_owned(), |group| group.to_string());
        write!(f, "{}group={group}", self.named())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_what_a_conversion_makes_but_never_wider() {
        let held = |width, source| Widths::resident(width).held(Role::Dense, 4096, source);
        for source in [Format::F32, Format::Bf16, Format::F16, Format::Fp8Block] {
            assert_eq!(held(Width::Bits8, source), Ok(Format::Int8Row), "{source}");
            assert_eq!(held(Width::Bits4, source), Ok(Format::Int4Row), "{source}");
            assert_eq!(held(Width::Bits3, source), Ok(Format::Int3Group), "{source}");
            assert_eq!(held(Width::Bits2, source), Ok(Format::Int2Row), "{source}");
        }
        let sixteen = |source| held(Width::Bits16, source);
        assert_eq!((sixteen(Format::F32), sixteen(Format::Bf16)), (Ok(Format::Bf16), Ok(Format::Bf16)));
        assert_eq!((sixteen(Format::F16), sixteen(Format::Fp8Block)), (Ok(Format::F16), Ok(Format::Fp8Block)));
        let grouped = Format::Int4Group { group: 64 };
        for narrow in [grouped, Format::Int4Row, Format::Int3Group, Format::Int2Row] {
            assert_eq!(held(Width::Bits8, narrow), Ok(narrow));
            assert_eq!(held(Width::Bits4, narrow), Ok(narrow));
        }
        assert_eq!(held(Width::Bits8, Format::Int8Row), Ok(Format::Int8Row));
        assert_eq!(held(Width::Bits4, Format::Int8Row), Err(Format::Int4Row));
        assert_eq!(held(Width::Bits2, Format::Int3Group), Err(Format::Int2Row));
    }

    #[test]
    fn each_kind_has_its_own_width_and_the_router_has_none() {
        let widths = Widths { dense: Some(Width::Bits4), io: Some(Width::Bits8), group: Some(64), ..Widths::default() };
        let held = |role, cols| widths.held(role, cols, Format::Bf16);
        assert_eq!(held(Role::Dense, 128), Ok(Format::Int4Group { group: 64 }));
        assert_eq!(held(Role::Dense, 64), Ok(Format::Int4Row));
        assert_eq!(held(Role::Io, 128), Ok(Format::Int8Row));
        for role in [Role::Exact, Role::Indexer, Role::Mtp, Role::Expert] {
            assert_eq!(held(role, 128), Ok(Format::Bf16));
        }
        assert_eq!(widths.to_string(), "dense=4 io=8 group=64");
        let three = Widths { experts: Some(Width::Bits3), group: Some(64), ..Widths::default() };
        assert!(three.check().is_ok() && Widths { group: Some(32), ..three }.check().is_err());
        assert_eq!(three.to_string(), "experts=3 group=row");
        assert!(!widths.is_empty() && Widths { group: Some(64), ..Widths::default() }.is_empty());
    }
}
