//! Arithmetic on slices, one operation a file. Nothing here knows a model, a file or an expert.

pub mod attention;
pub mod indexer;
pub mod norm;
pub mod room;
pub mod rope;
pub mod route;
pub mod topk;

use crate::kernels::{self, Input, Kernels, Quantized, Team, WeightRef};

/// How matmuls with integer weights see their input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Each input row is quantized to int8 and products are summed exactly as integers.
    Int8,
    /// Inputs stay f32 and weights are decoded on use.
    F32,
}

/// The kernels, the threads and the precision that a forward pass computes with.
pub struct Compute {
    /// Kernels of the chosen instruction set.
    pub kernels: &'static Kernels,
    /// Compute threads.
    pub team: Team,
    /// Input precision of integer matmuls.
    pub activations: Activations,
}

impl Compute {
    /// Prepares `values` (`[rows, cols]`) as the input of one or several matmuls, quantizing it once into `scratch`
    /// when the integer path is on.
    pub fn input<'a>(&self, values: &'a [f32], rows: usize, cols: usize, scratch: &'a mut Quantized) -> Input<'a> {
        let quantized = match self.activations {
            Activations::Int8 => {
                scratch.quantize(self.kernels, values, rows, cols);
                Some(&*scratch)
            }
            Activations::F32 => None,
        };
        Input { rows, cols, values, quantized }
    }

    /// An input that is never quantized: the router, and whatever else must stay f32.
    pub fn exact<'a>(&self, values: &'a [f32], rows: usize, cols: usize) -> Input<'a> {
        Input { rows, cols, values, quantized: None }
    }

    /// `out[r, o] = w[o, :] . x[r, :]` for every row and output; `out` is `[x.rows, w.rows]`.
    pub fn matmul(&self, w: &WeightRef, x: &Input, out: &mut [f32]) {
        kernels::matmul(self.kernels, &self.team, w, x, out);
    }
}
