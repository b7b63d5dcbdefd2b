//! In which format a conversion stores each weight. Decided whole before the first byte.

use super::options::ConvertOptions;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::container::{self, MatrixSource};
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::required::{self, Required, Shape};
use crate::checkpoint::write::layout::{Item, ShardPlan};
use crate::checkpoint::write::plan;
use crate::kernels::{Format, MatrixSpec};

/// The shards of the container that `options` ask for.
pub(crate) fn shards(source: &Checkpoint, options: &ConvertOptions) -> Result<Vec<ShardPlan>> {
    let mut required = Checkpoint::required(&source.arch);
    let optional = required::mtp_optional(&source.arch);
    required.extend(optional.into_iter().filter(|tensor| source.tensors.get(&tensor.name).is_some()));
    plan::shards(&source.arch, required, &|tensor| item(source, options, tensor))
}

fn item(source: &Checkpoint, options: &ConvertOptions, tensor: Required) -> Result<Item> {
    let Required { name, shape, role, .. } = tensor;
    let MatrixSource { spec: MatrixSpec { format, rows, cols }, data, .. } = shape.source(&name, &source.tensors)?;
    let target = match shape {
        Shape::Vector(_) if options.repack => format,
        Shape::Vector(_) => Format::F32,
        Shape::Matrix { .. } => options.target(role, cols, format),
    };
    if target == Format::Nvfp4 {
        return Err(CheckpointError::ConvertOptions {
            what: format!("--repack: {}: tensor {name}", source.tensors.path(data.file).display()),
            expected: "a format that a container can hold".to_owned(),
            found: format!("{format}, which has to be converted"),
        });
    }
    if format.is_integer() && target != format {
        let file = source.tensors.path(data.file).to_owned();
        return Err(CheckpointError::Quantized { file, tensor: name, format, target });
    }
    let item = Item { name, shape, target };
    if target.is_integer() {
        let read_as = container::inferred(rows, cols, item.data_bytes(), item.scale_count());
        if read_as != Some(target) {
            let option = if matches!(target, Format::Int4Group { .. }) { "--group" } else { "the width" };
            return Err(CheckpointError::ConvertOptions {
                what: format!("{option}: tensor {} [{rows}, {cols}]", item.name),
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
