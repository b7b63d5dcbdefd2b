//! Which shards a conversion writes, and in which format each weight. Decided whole before the first byte.

use super::layout::{Item, Run, ShardPlan};
use super::options::ConvertOptions;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::arch::MlpKind;
use crate::checkpoint::container::{self, MatrixSource};
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::experts::expert_name;
use crate::checkpoint::required::{self, Required, Role, Shape};
use crate::checkpoint::tensors::Dtype;
use crate::kernels::{Format, MatrixSpec};
use std::collections::BTreeMap;

/// The shards in the order in which they are written: first what belongs to no layer, then layer by layer the dense
/// weights and the experts, the MTP layer in files of its own.
pub(crate) fn shards(source: &Checkpoint, options: &ConvertOptions) -> Result<Vec<ShardPlan>> {
    let mut required = Checkpoint::required(&source.arch);
    let optional = required::mtp_optional(&source.arch);
    required.extend(optional.into_iter().filter(|tensor| source.tensors.get(&tensor.name).is_some()));
    let mut by_layer: BTreeMap<Option<usize>, Vec<Run>> = BTreeMap::new();
    for tensor in &required {
        let item = dense_item(source, options, tensor)?;
        let run = Run { name: tensor.name.clone(), items: vec![item] };
        by_layer.entry(tensor.layer).or_default().push(run);
    }
    let mtp_layer = source.arch.layers.len();
    let (mut plain, mut mtp) = (0, 0);
    let mut shards = Vec::new();
    for (layer, runs) in by_layer {
        let mut push = |experts: bool, runs: Vec<Run>| {
            let (stem, number) = match layer == Some(mtp_layer) {
                true => ("out-mtp", &mut mtp),
                false => ("out", &mut plain),
            };
            let file_name = format!("{stem}-{number:05}.safetensors");
            *number += 1;
            shards.push(ShardPlan { file_name, experts, runs });
        };
        push(false, runs);
        if let Some(layer) = layer.filter(|&layer| is_sparse(source, layer)) {
            push(true, expert_runs(source, options, layer)?);
        }
    }
    Ok(shards)
}

/// Lines that say what will be written: for each kind of weight its format, count and bytes.
pub(crate) fn describe(shards: &[ShardPlan]) -> Vec<String> {
    let mut tally: BTreeMap<(&str, Format), (usize, u64)> = BTreeMap::new();
    for shard in shards {
        for item in shard.runs.iter().flat_map(|run| &run.items) {
            let kind = match (shard.experts, item.target) {
                (true, _) if shard.file_name.starts_with("out-mtp") => "MTP experts",
                (true, _) => "routed experts",
                (false, _) => "dense weights",
            };
            let (count, bytes) = tally.entry((kind, item.target)).or_default();
            *count += 1;
            *bytes += item.data_bytes() + 4 * item.scale_count();
        }
    }
    let line = |((kind, format), (count, bytes)): ((&str, Format), (usize, u64))| {
        format!("{kind}: {count} tensors as {format}, {bytes} bytes")
    };
    tally.into_iter().map(line).collect()
}

fn is_sparse(source: &Checkpoint, layer: usize) -> bool {
    source.arch.layers.iter().chain(&source.arch.mtp).nth(layer).is_some_and(|kind| kind.mlp == MlpKind::Sparse)
}

fn expert_runs(source: &Checkpoint, options: &ConvertOptions, layer: usize) -> Result<Vec<Run>> {
    let role = if layer == source.arch.layers.len() { Role::Mtp } else { Role::Dense };
    let experts = source.experts.layers[layer].as_deref().unwrap_or_default();
    let run = |(number, expert): (usize, &crate::checkpoint::ExpertSource)| {
        let item = |part: &str, matrix: &MatrixSource| {
            let name = expert_name(layer, number, part);
            make_item(source, options, name, role, true, *matrix)
        };
        Ok(Run {
            name: format!("model.layers.{layer}.mlp.experts.{number}"),
            items: vec![item("gate", &expert.gate)?, item("up", &expert.up)?, item("down", &expert.down)?],
        })
    };
    experts.iter().enumerate().map(run).collect()
}

fn dense_item(source: &Checkpoint, options: &ConvertOptions, tensor: &Required) -> Result<Item> {
    let name = tensor.name.clone();
    match tensor.shape {
        Shape::Matrix { rows, cols } => {
            let matrix = source.tensors.matrix(&name, rows, cols)?;
            make_item(source, options, name, tensor.role, false, matrix)
        }
        Shape::Vector(len) => {
            let info = source.tensors.vector(&name, len)?;
            let format = match info.dtype {
                Dtype::Bf16 => Format::Bf16,
                Dtype::F16 => Format::F16,
                _ => Format::F32,
            };
            let spec = MatrixSpec { format, rows: 1, cols: len };
            let vector = MatrixSource { spec, data: info.span(), scales: None };
            let target = if options.repack { format } else { Format::F32 };
            Ok(Item { name, shape: vec![len as u64], source: vector, target })
        }
    }
}

fn make_item(
    source: &Checkpoint,
    options: &ConvertOptions,
    name: String,
    role: Role,
    experts: bool,
    matrix: MatrixSource,
) -> Result<Item> {
    let MatrixSpec { format, rows, cols } = matrix.spec;
    let target = options.target(role, experts, cols, format);
    if format.is_integer() && target != format {
        return Err(CheckpointError::ConvertOptions {
            what: format!("{}: tensor {name}", source.tensors.path(matrix.data.file).display()),
            expected: "a float or FP8 source, or a repack that keeps the weights".to_owned(),
            found: format!("{format}, to be made {target}"),
        });
    }
    let item = Item { name, shape: vec![rows as u64, cols as u64], source: matrix, target };
    if target.is_integer() {
        let read_as = container::inferred(rows, cols, item.data_bytes(), item.scale_count());
        if read_as != Some(target) {
            return Err(CheckpointError::ConvertOptions {
                what: format!("tensor {} [{rows}, {cols}]", item.name),
                expected: "a format that readers recognize by its size".to_owned(),
                found: match read_as {
                    Some(other) => format!("{target}, which they would take for {other}"),
                    None => target.to_string(),
                },
            });
        }
    }
    Ok(item)
}
