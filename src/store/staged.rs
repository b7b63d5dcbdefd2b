//! Experts that are quantized on their way.
//!
//! Such an expert is read into a slab of the size that it is stored in, one of a few that all share, and stays there until it
//! is lent: only then is its own slab filled with what a conversion would have written, so that a wrong guess costs
//! no arithmetic. Guesses leave some of those slabs to what is waited for. What is not wanted any more before it was lent
//! is thrown away: nothing keeps such a slab for long.

use std::path::PathBuf;

use millstream_io::limits::PAGE_BYTES;
use millstream_io::{FileId, FileSet, Place, Slab};

use super::table::{Entry, Matrix};
use super::{Content, ExpertKey, ExpertStore, ExpertTable, Lease, StoreError};
use crate::checkpoint::{CheckpointError, ExpertSource, expert_name};
use crate::kernels::{MatrixSpec, WeightRef};
use crate::limits::{STAGING_DEMAND, STAGING_SLABS};

/// How those of a table are stored.
#[derive(Default)]
pub(super) struct Staged {
    /// By number of the expert; ends with the last that is quantized.
    experts: Vec<Option<Stored>>,
    /// Bytes of the largest as it is read.
    slab_bytes: usize,
    /// Of all files, where there are any experts.
    paths: Vec<PathBuf>,
}

/// An expert as it is read.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    matrices: [Matrix; 3],
    files: [FileId; 3],
}

impl Staged {
    /// Notes that expert `number` is read as `planned` and becomes `held`: weights, then scales, as a conversion lays them
    /// out. Its entry, and bytes of its own slab.
    pub(super) fn quantized(
        &mut self,
        number: usize,
        source: &ExpertSource,
        (entry, stored_bytes): (Entry, usize),
        held: [MatrixSpec; 3],
        files: &FileSet,
    ) -> (Entry, usize) {
        if self.paths.is_empty() {
            self.paths = (0..files.len() as u32).map(|file| files.path(FileId(file)).to_owned()).collect();
        }
        self.slab_bytes = self.slab_bytes.max(stored_bytes);
        self.experts.resize(number, None);
        let files = source.matrices().map(|matrix| matrix.data.file);
        self.experts.push(Some(Stored { matrices: entry.matrices(), files }));
        let mut end = 0;
        let mut place = |bytes: usize| {
            let place = Place { at: end as u32, len: bytes as u32 };
            end += bytes;
            place
        };
        let data = held.map(|spec| place(spec.data_bytes()));
        let scales = held.map(|spec| place(spec.scale_bytes()));
        let matrices = std::array::from_fn(|i| Matrix { spec: held[i], data: data[i], scales: scales[i] });
        (entry.holding(matrices), end.next_multiple_of(PAGE_BYTES))
    }

    pub(super) fn get(&self, number: usize) -> Option<&Stored> {
        self.experts.get(number)?.as_ref()
    }

    /// Size and number of the slabs that are read into.
    pub(super) fn slabs(&self) -> Option<(usize, usize)> {
        (!self.experts.is_empty()).then_some((self.slab_bytes, STAGING_SLABS))
    }

    /// Bytes of memory that this takes.
    pub(super) fn own_bytes(&self) -> u64 {
        (self.experts.len() * size_of::<Option<Stored>>()) as u64
    }
}

impl ExpertTable {
    /// Fills the slab of an expert from what was read; what stays as it is stored is copied.
    fn quantize(
        &self,
        key: ExpertKey,
        read: &[u8],
        slab: &mut [u8],
        mut quantize: impl FnMut(&WeightRef, MatrixSpec, &mut [u8], &mut [u8]) -> Result<(), (usize, usize, f32)>,
    ) -> Result<(), CheckpointError> {
        let Some(stored) = self.staged().get(self.index(key)) else { unreachable!("{key:?} is not quantized") };
        let held = self.matrices(key);
        let scales_at = held[0].scales.at;
        let (data, scales) = slab.split_at_mut(scales_at as usize);
        for (at, held) in held.iter().enumerate() {
            let weights = stored.matrices[at].weights(read, read);
            let data = &mut data[held.data.at as usize..][..held.data.len as usize];
            let scales = &mut scales[(held.scales.at - scales_at) as usize..][..held.scales.len as usize];
            if stored.matrices[at].spec == held.spec {
                data.copy_from_slice(weights.data());
                scales.copy_from_slice(weights.scales());
                continue;
            }
            quantize(&weights, held.spec, data, scales).map_err(|(row, col, value)| CheckpointError::NotFinite {
                file: self.staged().paths[stored.files[at].0 as usize].clone(),
                tensor: expert_name(key.layer.into(), key.expert.into(), ["gate", "up", "down"][at]),
                row,
                col,
                value,
            })?;
        }
        Ok(())
    }
}

impl ExpertStore {
    /// Makes what a leased expert is held as of what was read, where that is something else and was not done before; whether it
    /// was. Before its weights are asked for. `quantize` writes weights of a form, and their scales, as another; its
    /// error is row, column and value of what cannot be held. On an error the lease is void and the request is over.
    pub fn quantize(
        &mut self,
        lease: &Lease,
        quantize: impl FnMut(&WeightRef, MatrixSpec, &mut [u8], &mut [u8]) -> Result<(), (usize, usize, f32)>,
    ) -> Result<bool, StoreError> {
        let content = &mut self.slots[lease.slot as usize];
        if !matches!(content, Content::Stored { .. }) {
            return Ok(false);
        }
        let Content::Stored { key, read, mut own } = std::mem::replace(content, Content::Empty) else {
            unreachable!("it was looked at")
        };
        let made = self.table.quantize(key, read.bytes(), own.bytes_mut(), quantize);
        // Free for the next read, which may have waited for it.
        drop(read);
        if let Err(unfit) = made {
            self.clear(lease.slot, key);
            self.abandon();
            return Err(StoreError::Unfit(Box::new(unfit)));
        }
        self.slots[lease.slot as usize] = Content::Resting(key, own);
        if let Err(error) = self.submit_missing() {
            self.placement.let_go(lease.slot);
            return Err(error);
        }
        Ok(true)
    }

    /// Whether there is a slab to read `key` into besides its own, where it needs one. A guess leaves some.
    pub(super) fn may_stage(&self, key: ExpertKey, is_guess: bool) -> bool {
        let least = if is_guess { STAGING_DEMAND } else { 0 };
        !self.table.is_quantized(key) || self.pool.free_of(self.table.sizes().len()) > least
    }

    /// The slab that `key` is read into, which there [must be](ExpertStore::may_stage), and its own where that is another.
    pub(super) fn stage(&self, key: ExpertKey, own: Slab) -> (Slab, Option<Slab>) {
        if !self.table.is_quantized(key) {
            return (own, None);
        }
        let Some(into) = self.pool.take_of(self.table.sizes().len()) else {
            unreachable!("{key:?} is read with no slab to read it into")
        };
        (into, Some(own))
    }

    /// Empties a slot in nobody's use whose expert was read and not yet quantized; whether it was such a one.
    pub(super) fn drop_if_stored(&mut self, slot: u32) -> bool {
        let Content::Stored { key, .. } = self.slots[slot as usize] else { return false };
        self.forget(slot, key);
        true
    }
}
