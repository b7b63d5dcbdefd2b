//! Full attention: norms over all queries and all keys of a row, keys and values cached.

use crate::checkpoint::arch::FullArch;
use crate::forward::state::{LayerCache, quantized};
use crate::forward::{Model, Rows};
use crate::kernels::{Input, Kernels, Quantized};
use crate::model::weights::FullWeights;
use crate::ops::attention::full::{self, Shape};
use crate::ops::norm;
use crate::ops::room::Room;

/// Buffers of the block, `[rows, ..]`.
pub struct Scratch {
    arch: FullArch,
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    context: Vec<f32>,
    quantized: Quantized,
}

impl Scratch {
    pub(super) fn new(k: &Kernels, a: &FullArch, rows: usize, room: &mut Room) -> Scratch {
        let shape = shape_of(a);
        Scratch {
            arch: *a,
            q: room.floats(rows * shape.queries()),
            keys: room.floats(rows * shape.keys()),
            values: room.floats(rows * shape.keys()),
            context: room.floats(rows * shape.queries()),
            quantized: quantized(k, rows, shape.queries(), room),
        }
    }
}

/// Attends from the rows of `x`; the result, `[rows, hidden]`, goes to `out`.
pub(super) fn attend(
    model: &Model,
    w: &FullWeights,
    cache: &mut LayerCache,
    scratch: &mut Scratch,
    x: &Input,
    rows: Rows,
    out: &mut [f32],
) {
    let (c, n, eps) = (&model.compute, rows.count, model.arch.norm_eps);
    let (a, shape) = (scratch.arch, shape_of(&scratch.arch));
    let view = |m| model.resident.view(m);
    let q = &mut scratch.q[..n * shape.queries()];
    let keys = &mut scratch.keys[..n * shape.keys()];
    let values = &mut scratch.values[..n * shape.keys()];

    c.matmul(&view(&w.q), x, q);
    c.matmul(&view(&w.k), x, keys);
    c.matmul(&view(&w.v), x, values);
    q.chunks_exact_mut(shape.queries()).for_each(|row| norm::rms_in_place(row, &w.q_norm, eps));
    keys.chunks_exact_mut(shape.keys()).for_each(|row| norm::rms_in_place(row, &w.k_norm, eps));
    if let Some(clip) = a.clip {
        for part in [&mut *q, &mut *keys, &mut *values] {
            part.iter_mut().for_each(|v| *v = v.clamp(-clip, clip));
        }
    }
    for (i, row) in q.chunks_exact_mut(shape.queries()).enumerate() {
        row.chunks_exact_mut(a.dim).for_each(|head| model.rope.rotate(head, rows.start + i));
    }
    let cached = keys.chunks_exact_mut(shape.keys()).zip(values.chunks_exact(shape.keys()));
    for (i, (keys, values)) in cached.enumerate() {
        keys.chunks_exact_mut(a.dim).for_each(|head| model.rope.rotate(head, rows.start + i));
        cache.write(rows.start + i, 0, keys);
        cache.write(rows.start + i, shape.keys(), values);
    }

    let context = &mut scratch.context[..n * shape.queries()];
    full::attend(c, &shape, q, cache.rows(rows.start + n), rows.start, context);
    let context = c.input(context, n, shape.queries(), &mut scratch.quantized);
    c.matmul(&view(&w.o), &context, out);
}

fn shape_of(a: &FullArch) -> Shape {
    Shape { heads: a.heads, kv_heads: a.kv_heads, dim: a.dim }
}
