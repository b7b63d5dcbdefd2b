//! In which formats experts are held, where they are quantized on their way from the drive.

use super::{EngineConfig, EngineError};
use crate::checkpoint::convert::Widths;
use crate::checkpoint::required::Role;
use crate::checkpoint::{Checkpoint, ExpertSource, expert_name};
use crate::kernels::{MatrixSpec, Requantizer};
use crate::model::load::LoadError;

/// What an expert of `layer`, of a model of so many decoder layers, is held as; `None` where that is as it is stored, or
/// was refused by [`check`].
pub(super) fn held(layers: usize, layer: usize, source: &ExpertSource, widths: &Widths) -> Option<[MatrixSpec; 3]> {
    source.held(role(layers, layer), widths).unwrap_or_default()
}

/// The MTP layer comes behind the decoder's, and its experts have its width.
fn role(layers: usize, layer: usize) -> Role {
    if layer < layers { Role::Expert } else { Role::Mtp }
}

/// Whether the experts of a layer can be asked for: those of the MTP layer where that is loaded.
pub(super) fn is_loaded(checkpoint: &Checkpoint, config: &EngineConfig, layer: usize) -> bool {
    let arch = &checkpoint.arch;
    layer < arch.layers.len() || (arch.mtp.is_some() && config.loads_mtp())
}

/// Refuses experts that are quantized and would have to be quantized again, by name. Floats that the threads of `config`
/// make the others with.
pub(super) fn check(checkpoint: &Checkpoint, config: &EngineConfig) -> Result<usize, EngineError> {
    let (layers, mut floats) = (checkpoint.arch.layers.len(), 0);
    let loaded = |(layer, _): &(usize, _)| is_loaded(checkpoint, config, *layer);
    for (layer, experts) in checkpoint.experts.layers.iter().enumerate().filter(loaded) {
        for (expert, source) in experts.iter().flatten().enumerate() {
            let held = source.held(role(layers, layer), &config.widths).map_err(|(at, asked)| {
                let matrix = source.matrices()[at];
                LoadError::Requantized {
                    file: checkpoint.tensors.path(matrix.data.file).display().to_string(),
                    tensor: expert_name(layer, expert, ["gate", "up", "down"][at]),
                    stored: matrix.spec.format,
                    asked,
                }
            })?;
            let most = held.iter().flatten().map(|spec| Requantizer::floats(config.threads, spec)).max();
            floats = floats.max(most.unwrap_or(0));
        }
    }
    Ok(floats)
}
