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
