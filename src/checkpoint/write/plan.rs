//! Which shards a container has and what each holds.

use super::layout::{Item, MTP_STEM, Run, STEM, ShardPlan};
use crate::checkpoint::arch::{Arch, MlpKind};
use crate::checkpoint::error::Result;
use crate::checkpoint::required::{self, Required};
use std::collections::BTreeMap;

/// The shards in the order in which they are written: first what belongs to no layer, then layer by layer the dense
/// weights and the experts, the MTP layer in files of its own. `item` settles how a tensor is stored.
pub(crate) fn shards(
    arch: &Arch,
    required: Vec<Required>,
    item: &dyn Fn(Required) -> Result<Item>,
) -> Result<Vec<ShardPlan>> {
    let mut by_layer: BTreeMap<Option<usize>, Vec<Run>> = BTreeMap::new();
    for tensor in required {
        let (layer, name) = (tensor.layer, tensor.name.clone());
        by_layer.entry(layer).or_default().push(Run { name, items: vec![item(tensor)?] });
    }
    let mtp_layer = arch.layers.len();
    let (mut plain, mut mtp) = (0, 0);
    let mut shards = Vec::new();
    for (layer, runs) in by_layer {
        let mut push = |experts: bool, runs: Vec<Run>| {
            let (stem, number) = match layer == Some(mtp_layer) {
                true => (MTP_STEM, &mut mtp),
                false => (STEM, &mut plain),
            };
            let file_name = format!("{stem}-{number:05}.safetensors");
            *number += 1;
            shards.push(ShardPlan { file_name, experts, hollow: false, runs });
        };
        push(false, runs);
        let is_sparse =
            |&layer: &usize| arch.layers.iter().chain(&arch.mtp).nth(layer).is_some_and(|l| l.mlp == MlpKind::Sparse);
        if let Some(layer) = layer.filter(is_sparse) {
            let run = |expert| {
                let items = required::expert(arch, layer, expert).into_iter().map(item).collect::<Result<_>>()?;
                Ok(Run { name: format!("model.layers.{layer}.mlp.experts.{expert}"), items })
            };
            push(true, (0..arch.moe.experts).map(run).collect::<Result<_>>()?);
        }
    }
    Ok(shards)
}

/// The same weights as publishers lay them out: one tensor after the other, each with its scales, in numbered shards that
/// end behind the tensor with which they reach `shard_bytes`, wherever in an expert that is.
pub(crate) fn as_published(shards: Vec<ShardPlan>, shard_bytes: u64) -> Vec<ShardPlan> {
    let mut published: Vec<Vec<Run>> = vec![Vec::new()];
    let mut bytes = 0;
    for item in shards.into_iter().flat_map(|shard| shard.runs).flat_map(|run| run.items) {
        if bytes >= shard_bytes {
            published.push(Vec::new());
            bytes = 0;
        }
        bytes += item.data_bytes() + 4 * item.scale_count();
        if let Some(runs) = published.last_mut() {
            runs.push(Run { name: item.name.clone(), items: vec![item] });
        }
    }
    let of = published.len();
    let shard = |(number, runs)| ShardPlan {
        file_name: format!("model-{number:05}-of-{of:05}.safetensors"),
        experts: false,
        hollow: false,
        runs,
    };
    (1..).zip(published).map(shard).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::required::Shape;
    use crate::kernels::Format;

    #[test]
    fn published_shards_end_inside_an_expert_and_hold_every_tensor_once_in_order() {
        let item =
            |name: String| Item { name, shape: Shape::Matrix { rows: 128, cols: 128 }, target: Format::Fp8Block };
        let run = |expert: usize| Run {
            name: format!("expert.{expert}"),
            items: ["gate", "up", "down"].map(|part| item(format!("{expert}.{part}"))).to_vec(),
        };
        let runs = (0..3).map(run).collect();
        let plan = ShardPlan { file_name: "out-00000.safetensors".to_owned(), experts: true, hollow: false, runs };
        // A tensor has 16,384 bytes and a scale: two of them reach 20,000.
        let published = as_published(vec![plan], 20_000);
        let names: Vec<(&str, Vec<&str>)> = published
            .iter()
            .map(|shard| (shard.file_name.as_str(), shard.runs.iter().map(|run| run.name.as_str()).collect()))
            .collect();
        let expected = [
            ("model-00001-of-00005.safetensors", vec!["0.gate", "0.up"]),
            ("model-00002-of-00005.safetensors", vec!["0.down", "1.gate"]),
            ("model-00003-of-00005.safetensors", vec!["1.up", "1.down"]),
            ("model-00004-of-00005.safetensors", vec!["2.gate", "2.up"]),
            ("model-00005-of-00005.safetensors", vec!["2.down"]),
        ];
        assert_eq!(names, expected);
    }
}
