//! Which layers share slabs of one size. Pure.
//!
//! Most models have experts of one size, and all layers share all slabs. Where some layers have wider weights, as an MTP
//! layer mostly has, slabs for the widest would waste memory on every other expert, so each width gets slabs of its own.

/// A layer, or several that share slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabSize {
    /// Bytes that the largest of their experts needs.
    pub slab_bytes: usize,
    /// Experts of theirs.
    pub experts: usize,
}

/// Layers whose experts would leave more than one part in so many of a slab unused get slabs of their own. Where an expert
/// begins in its file moves its size by a sector or two, which is no other width.
const WASTE_ONE_IN: usize = 8;

/// The sizes that `layers` need, the one that takes most memory first, and which of them is each layer's; `None` for a
/// layer without experts. There are no more sizes than layers, of which a `u16` can count all.
pub(super) fn group(layers: &[SlabSize]) -> (Vec<SlabSize>, Vec<Option<u16>>) {
    let mut routed: Vec<usize> = (0..layers.len()).filter(|&layer| layers[layer].experts > 0).collect();
    routed.sort_by_key(|&layer| std::cmp::Reverse(layers[layer].slab_bytes));
    let mut groups: Vec<(SlabSize, Vec<usize>)> = vec![];
    for layer in routed {
        let SlabSize { slab_bytes, experts } = layers[layer];
        match groups.last_mut() {
            Some((size, members)) if slab_bytes >= size.slab_bytes - size.slab_bytes / WASTE_ONE_IN => {
                size.experts += experts;
                members.push(layer);
            }
            _ => groups.push((layers[layer], vec![layer])),
        }
    }
    groups.sort_by_key(|(size, _)| std::cmp::Reverse(size.slab_bytes as u128 * size.experts as u128));
    let mut size_of = vec![None; layers.len()];
    for (number, (_, members)) in (0..).zip(&groups) {
        members.iter().for_each(|&layer| size_of[layer] = Some(number));
    }
    (groups.into_iter().map(|(size, _)| size).collect(), size_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(slab_bytes: usize, experts: usize) -> SlabSize {
        SlabSize { slab_bytes, experts }
    }

    #[test]
    fn layers_of_nearly_one_size_share_slabs_of_the_largest() {
        let layers = [size(0, 0), size(80_000, 8), size(84_096, 8), size(88_192, 8), size(80_000, 8)];
        let (sizes, size_of) = group(&layers);
        assert_eq!(sizes, [size(88_192, 32)]);
        assert_eq!(size_of, [None, Some(0), Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn a_layer_of_wide_experts_has_slabs_of_its_own_and_the_usual_size_comes_first() {
        let layers = [(19_000_000, 256), (19_000_000, 256), (19_000_000, 256), (38_000_000, 256)];
        let expected = vec![size(19_000_000, 768), size(38_000_000, 256)];
        assert_eq!(
            group(&layers.map(|(bytes, experts)| size(bytes, experts))),
            (expected, vec![Some(0), Some(0), Some(0), Some(1)])
        );
        // By the memory that all of them take, not by their number.
        let few = [size(19_000_000, 256), size(38_000_000, 256)];
        assert_eq!(group(&few), (vec![size(38_000_000, 256), size(19_000_000, 256)], vec![Some(1), Some(0)]));
        assert_eq!(group(&[]), (vec![], vec![]));
        assert_eq!(group(&[size(0, 0)]), (vec![], vec![None]));
    }

    #[test]
    fn no_slab_is_wasted_by_more_than_an_eighth_and_sizes_stay_few() {
        // Every size from a sector to the largest slab, a twentieth apart.
        let bytes = std::iter::successors(Some(4096.0), |bytes| Some(bytes * 1.05)).take_while(|bytes| *bytes <= 1e9);
        let layers: Vec<SlabSize> = bytes.map(|bytes: f64| size(bytes as usize, 3)).collect();
        let (sizes, size_of) = group(&layers);
        assert!(sizes.len() < 100, "{}", sizes.len());
        for (layer, size) in layers.iter().zip(size_of) {
            let slab = sizes[usize::from(size.unwrap())].slab_bytes;
            assert!(
                layer.slab_bytes <= slab && (slab - layer.slab_bytes) * WASTE_ONE_IN <= slab,
                "{layer:?} in {slab}"
            );
        }
        assert_eq!(sizes.iter().map(|size| size.experts).sum::<usize>(), 3 * layers.len());
    }
}
