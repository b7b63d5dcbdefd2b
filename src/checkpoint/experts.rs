//! Routed experts: which layer and number lies where.

use super::arch::{Arch, MlpKind};
use super::container::MatrixSource;
use super::convert::Widths;
use super::error::Result;
use super::required::{self, Role};
use super::tensors::{TensorMap, shared};
use crate::kernels::{Format, MatrixSpec};
use millstream_io::FileSpan;

/// The three matrices of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSource {
    /// `[width, hidden]`.
    pub gate: MatrixSource,
    /// `[width, hidden]`.
    pub up: MatrixSource,
    /// `[hidden, width]`.
    pub down: MatrixSource,
}

impl ExpertSource {
    /// The matrices in the order in which they are used.
    pub fn matrices(&self) -> [&MatrixSource; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Places in the files that hold it: adjacent weights and scales are one.
    pub fn pieces(&self) -> usize {
        let spans = self.matrices().into_iter().flat_map(|matrix| [Some(matrix.data), matrix.scales]).flatten();
        let mut spans: Vec<FileSpan> = spans.collect();
        spans.sort_unstable_by_key(|span| (span.file.0, span.offset));
        let adjacent =
            |pair: &&[FileSpan]| pair[0].file == pair[1].file && pair[0].offset + pair[0].len == pair[1].offset;
        spans.len() - spans.windows(2).filter(adjacent).count()
    }

    /// The forms in which its matrices are held where the experts of their role have these widths; `None` where all stay as
    /// they are stored. The error is one that is quantized and would have to be again, and to what.
    pub fn held(&self, role: Role, widths: &Widths) -> std::result::Result<Option<[MatrixSpec; 3]>, (usize, Format)> {
        let mut held = self.matrices().map(|matrix| matrix.spec);
        for (at, spec) in held.iter_mut().enumerate() {
            spec.format = widths.held(role, spec.cols, spec.format).map_err(|asked| (at, asked))?;
        }
        let stays = self.matrices().iter().zip(&held).all(|(matrix, held)| matrix.spec == *held);
        Ok((!stays).then_some(held))
    }

    /// Bytes of weights and scales.
    pub fn bytes(&self) -> u64 {
        self.matrices().iter().map(|matrix| matrix.data.len + matrix.scales.map_or(0, |scales| scales.len)).sum()
    }
}

/// Every routed expert of a model.
#[derive(Clone, Debug, Default)]
pub struct ExpertIndex {
    /// By model layer: `None` for a dense one. Where the model has an MTP layer, it is the last entry.
    pub layers: Vec<Option<Vec<ExpertSource>>>,
}

impl ExpertIndex {
    /// Resolves every expert of every sparse layer, and of the MTP layer if `arch` has one.
    pub fn build(arch: &Arch, tensors: &TensorMap) -> Result<ExpertIndex> {
        let kinds: Vec<MlpKind> = arch.layers.iter().chain(&arch.mtp).map(|layer| layer.mlp).collect();
        let layers = shared(&kinds, tensors.paths().len(), |layer, kind| match kind {
            MlpKind::Dense { .. } => Ok(None),
            MlpKind::Sparse => layer_experts(arch, tensors, layer).map(Some),
        });
        Ok(ExpertIndex { layers: layers.into_iter().collect::<Result<_>>()? })
    }

    /// An expert of a sparse layer; `None` for a dense layer, or a number out of range.
    pub fn get(&self, layer: usize, expert: usize) -> Option<&ExpertSource> {
        self.layers.get(layer)?.as_ref()?.get(expert)
    }
}

fn layer_experts(arch: &Arch, tensors: &TensorMap, layer: usize) -> Result<Vec<ExpertSource>> {
    let source = |expert| {
        let [gate, up, down] = required::expert(arch, layer, expert);
        Ok(ExpertSource { gate: gate.source(tensors)?, up: up.source(tensors)?, down: down.source(tensors)? })
    };
    (0..arch.moe.experts).map(source).collect()
}
