//! What a constraint is to the engine: something that follows an answer token by token and says which may come next. The
//! engine knows no grammar; whoever has one puts it behind this.

use std::fmt;

/// Follows an answer from its first token on.
///
/// The answer goes on with `accept`, and nothing is ever taken back: drafts are looked at one by one, in the order in which
/// they would have been chosen, and only what becomes part of the answer is accepted.
pub trait Constraint {
    /// Tokens that must come next, in order, if there are any: the answer has no other way, or what text it must have is cut
    /// into tokens in no other way. They are taken without being sampled.
    fn forced(&mut self) -> Result<&[u32], ConstraintError>;

    /// Which tokens may come next: bit `id % 32` of word `id / 32` for each id; ids behind the end may not. Where the answer
    /// may end, the ids that end it are among them.
    fn allowed(&mut self) -> Result<&[u32], ConstraintError>;

    /// The answer goes on with `token`, which was allowed.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether nothing may follow: the answer is whole, and ends.
    fn has_ended(&self) -> bool;
}

/// Why a constraint cannot say how an answer goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintError(pub String);

impl fmt::Display for ConstraintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConstraintError {}

/// Whether `mask`, as of [`Constraint::allowed`], has `id`.
pub fn allows(mask: &[u32], id: usize) -> bool {
    mask.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::allows;

    #[test]
    fn a_mask_has_a_bit_for_each_id_and_none_behind_its_end() {
        let mask = [0b101, 1 << 31];
        let allowed: Vec<usize> = (0..200).filter(|&id| allows(&mask, id)).collect();
        assert_eq!(allowed, [0, 2, 63]);
    }
}
