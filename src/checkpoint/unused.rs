//! What a checkpoint holds and the model does not use: a line about it, unless it changes what a used weight means.

use super::arch::{Arch, MlpKind};
use super::container::{FP8_SCALES_SUFFIX, SCALES_SUFFIX, is_read_with};
use super::error::{CheckpointError, Result};
use super::names::Names;
use super::required::Required;
use super::tensors::TensorMap;
use std::collections::HashSet;

/// Last parts of names beside a weight's, in other quantizers' layouts: what stands there scales or orders the weight.
const SIBLINGS: [&str; 9] =
    ["scale", "scales", "scale_inv", "zeros", "qzeros", "zero_point", "zero_points", "g_idx", "absmax"];

/// One line about tensors that nothing will read, so that a redundant head or a stray layer does not go unseen. What is
/// named after a used tensor (`<weight>_scale`, `<weight>.zeros`) and is not read is an error: whatever it is, the weight
/// is not what it would be taken for.
pub(super) fn note(arch: &Arch, tensors: &TensorMap, required: &[Required]) -> Result<Option<String>> {
    let named: HashSet<&str, Names> = required.iter().map(|tensor| tensor.name.as_str()).collect();
    let uses = |name: &str| named.contains(name) || is_expert(arch, name);
    let mut unused: Vec<&str> = Vec::new();
    for (name, _) in tensors.iter().filter(|(name, _)| !uses(name)) {
        match owner(name, &uses) {
            None => unused.push(name),
            Some(weight) if is_read_with(tensors, weight, &name[weight.len()..]) => {}
            Some(weight) => return Err(ignored(tensors, weight, name)),
        }
    }
    unused.sort_unstable();
    Ok(unused.first().map(|first| {
        format!(
            "{} tensor{} not used by this model, such as {first}: ignored",
            unused.len(),
            if unused.len() == 1 { " is" } else { "s are" }
        )
    }))
}

/// The used tensor that `name` is named after: its name is the beginning of this one, or they differ in their last parts
/// and this one's is among [`SIBLINGS`].
fn owner<'a>(name: &'a str, uses: &impl Fn(&str) -> bool) -> Option<&'a str> {
    // Nearly all of a container's are these, and there are tens of thousands.
    let known = [SCALES_SUFFIX, FP8_SCALES_SUFFIX].into_iter().find_map(|suffix| name.strip_suffix(suffix));
    let starts = || name.rmatch_indices(['.', '_']).map(|(at, _)| &name[..at]);
    let longer = known.filter(|start| uses(start)).or_else(|| starts().find(|start| uses(start)));
    longer.or_else(|| {
        let (stem, last) = name.rsplit_once('.')?;
        (SIBLINGS.contains(&last) && uses(&format!("{stem}.weight"))).then_some(name)
    })
}

fn ignored(tensors: &TensorMap, weight: &str, name: &str) -> CheckpointError {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let weight = if weight == name { format!("{stem}.weight") } else { weight.to_owned() };
    let Some(tensor) = tensors.get(name) else { unreachable!("{name} is one of the tensors") };
    let expected = match tensors.get(&weight) {
        Some(owner) => format!("nothing of that name beside {weight}, which is {}", owner.describe()),
        None => format!("nothing of that name beside {weight}"),
    };
    let found = format!("{}, which would be ignored", tensor.describe());
    tensors.tensor_fault(name, tensor, "part of a weight", expected, found)
}

/// Whether `name` is a matrix of a routed expert.
fn is_expert(arch: &Arch, name: &str) -> bool {
    let expert = || {
        let mut parts = name.strip_prefix("model.layers.")?.split('.');
        let layer: usize = parts.next()?.parse().ok()?;
        let kind = arch.layers.iter().chain(&arch.mtp).nth(layer)?;
        let tail = (parts.next()?, parts.next()?);
        let expert: usize = parts.next()?.parse().ok()?;
        let known = matches!(parts.next()?, "gate_proj" | "up_proj" | "down_proj")
            && parts.next()? == "weight"
            && parts.next().is_none();
        let sparse = kind.mlp == MlpKind::Sparse && expert < arch.moe.experts;
        (tail == ("mlp", "experts") && known && sparse).then_some(())
    };
    expert().is_some()
}
