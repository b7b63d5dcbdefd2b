//! Arithmetic on weights as they are stored.
//!
//! [`Kernels`] is a table of functions for one instruction set; the scalar one is the definition and every other table must
//! give the same bits for every input. That holds for floats too, because the order of additions is part of the
//! definition: a dot product keeps 32 lanes, lane `j` takes the elements `i = j mod 32` in order with fused
//! multiply-adds (elements past the end contribute nothing), and the lanes are added as the tree 16+16, 8+8, 4+4, 2+2,
//! 1+1.
//!
//! A matrix multiplies in one of two ways. The *exact path* turns each weight into the f32 nearest to
//! `stored value * scale` and takes the dot product above. The *integer path* multiplies the stored integers by int8
//! activations into exact i32 sums, and then, per row, `sum as f32 * weight scale * activation scale`; with scales per
//! group, `acc = acc + (group sum as f32 * group scale)` unfused and in column order, times the activation scale at the
//! end. Every output is computed by one thread, and rows of a batch do not see each other.
//!
//! Not-a-number results are NaN on every table, but their sign and payload are unspecified.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod chunks;
mod encode;
mod format;
#[cfg(target_arch = "x86_64")]
mod groups;
mod lanes;
mod matmul;
mod panel;
#[cfg(test)]
mod parity;
mod quantized;
mod requantize;
mod rows;
mod scalar;
mod team;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use encode::{EncodeError, encode};
pub use format::{FP8_BLOCK, Format, INT3_GROUP, MatrixSpec, NVFP4_GROUP, WeightRef};
pub use matmul::{Input, matmul};
pub use quantized::Quantized;
pub use requantize::{Requantizer, Unfit};
pub use rows::{RowsAt, Table, bf16_of};
pub use team::Team;

use panel::{Panel, Put, TILE_ROWS};
use quantized::{QuantRow, QuantRowMut};

/// Rows of a batch that one kernel call takes at most, but for the integer path of some tables.
pub(crate) const MAX_BATCH: usize = 8;

/// Rows of a batch that one call of any table's integer path takes at most.
const MAX_INTEGER_BATCH: usize = 32;

/// An instruction set that has a table of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Portable Rust; the definition of every kernel.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// That with VBMI, and AMX with products of bytes.
    Amx,
}

impl Isa {
    /// Every instruction set, slowest first, whether or not this CPU has it.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The name `FromStr` accepts.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(text: &str) -> Result<Isa, UnknownIsa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| UnknownIsa { given: text.to_owned() })
    }
}

/// A name that is no instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set `{given}`; known are scalar, avx2, avx512, amx")]
pub struct UnknownIsa {
    /// What was given.
    pub given: String,
}

/// As [`encode`].
type EncodeRow = unsafe fn(Format, &[f32], &mut [u8], &mut [f32]) -> Result<(), EncodeError>;

/// The kernels of one instruction set. A reference to one proves that this CPU can run it: the only ways to get one are
/// [`Kernels::best`], [`Kernels::for_isa`] and [`Kernels::all_available`], which look at the CPU.
pub struct Kernels {
    /// Which instruction set.
    pub isa: Isa,
    dot: unsafe fn(&[f32], &[f32]) -> f32,
    axpy: unsafe fn(f32, &[f32], &mut [f32]),
    dots: unsafe fn(&[f32], &RowsAt, &mut [f32]),
    add_weighted: unsafe fn(&[f32], &RowsAt, &mut [f32]),
    decode_row: unsafe fn(&WeightRef, usize, &mut [f32]),
    add_scaled_rows: unsafe fn(&WeightRef, Range<usize>, &[f32], &mut [f32]),
    silu_mul: unsafe fn(&[f32], &mut [f32]),
    exp_shifted: unsafe fn(&mut [f32], f32) -> f32,
    quantize_row: unsafe fn(&[f32], QuantRowMut),
    encode_row: EncodeRow,
    /// `tile[i * rows.len() + r]` for `batch` rows of `x` (each `w.cols()` long): the exact path.
    exact: unsafe fn(&WeightRef, Range<usize>, &[f32], &mut [f32]),
    /// Rows of a batch that `integer` takes at most, up to [`MAX_INTEGER_BATCH`].
    integer_batch: usize,
    /// As `exact`, from quantized rows: the integer path. The format is an integer one.
    integer: unsafe fn(&WeightRef, Range<usize>, &[QuantRow], &mut [f32]),
    /// As `integer` for runs of 16 rows.
    tiles: Option<TileKernel>,
}

/// The integer path for activations that were packed for it: on tile registers, or with a lane for each row.
#[derive(Clone, Copy)]
struct TileKernel {
    /// Whether there is one for a format.
    takes: fn(Format) -> bool,
    /// Rows of a last run that are so few that `integer` takes them sooner.
    few: usize,
    /// Weight rows times all rows of a panel.
    product: unsafe fn(&WeightRef, Range<usize>, &Panel, Put),
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({})", self.isa)
    }
}

#[allow(unsafe_code)]
impl Kernels {
    /// The fastest table this CPU can run.
    pub fn best() -> &'static Kernels {
        Isa::ALL.into_iter().rev().find_map(Kernels::for_isa).unwrap_or(&scalar::TABLE)
    }

    /// The table of `isa`, or `None` when this CPU cannot run it.
    pub fn for_isa(isa: Isa) -> Option<&'static Kernels> {
        match isa {
            Isa::Scalar => Some(&scalar::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::table(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::table(),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => amx::table(),
            #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
            Isa::Amx => None,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => None,
        }
    }

    /// Why there is no table of `isa`, where it takes more than the instructions and more is known.
    pub fn why_missing(isa: Isa) -> Option<String> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if isa == Isa::Amx {
            return amx::missing().map(|missing| missing.to_string());
        }
        let _ = isa;
        None
    }

    /// Every table this CPU can run, slowest first.
    pub fn all_available() -> Vec<&'static Kernels> {
        Isa::ALL.into_iter().filter_map(Kernels::for_isa).collect()
    }

    /// Dot product of two vectors of the same length, in the lane order of the module's documentation.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "lengths of a dot product");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.dot)(a, b) }
    }

    /// `y[i] = a * x[i] + y[i]`, fused.
    pub fn axpy(&self, a: f32, x: &[f32], y: &mut [f32]) {
        assert_eq!(x.len(), y.len(), "lengths of axpy");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.axpy)(a, x, y) }
    }

    /// Dot products of several vectors with several rows: `out[v * rows.len() + r] = vectors[v] . rows[r]`, each as
    /// [`Kernels::dot`] gives it. `vectors` is `[n, rows.width()]` and `out` is `[n, rows.len()]`.
    pub fn dots(&self, vectors: &[f32], rows: &RowsAt, out: &mut [f32]) {
        rows.check(vectors, out);
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.dots)(vectors, rows, out) }
    }

    /// Several weighted sums of the same rows: `out[v] = weights[v][r] * rows[r] + out[v]`, fused, for `r` in order.
    /// `weights` is `[n, rows.len()]` and `out` is `[n, rows.width()]`.
    pub fn add_weighted(&self, weights: &[f32], rows: &RowsAt, out: &mut [f32]) {
        rows.check(out, weights);
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.add_weighted)(weights, rows, out) }
    }

    /// Row `row` as f32, each value the nearest f32 to `stored value * scale`. `out` is `[w.cols()]`.
    pub fn decode_row(&self, w: &WeightRef, row: usize, out: &mut [f32]) {
        assert!(row < w.rows(), "row {row} of {}", w.rows());
        assert_eq!(out.len(), w.cols(), "columns of a decoded row");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.decode_row)(w, row, out) }
    }

    /// `out[c] = coef[i] * W[rows.start + i, c] + out[c]`, fused, for `i` in order. `out` is `[w.cols()]`.
    pub fn add_scaled_rows(&self, w: &WeightRef, rows: Range<usize>, coef: &[f32], out: &mut [f32]) {
        assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
        assert_eq!(coef.len(), rows.len(), "one coefficient a row");
        assert_eq!(out.len(), w.cols(), "columns of the sum");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.add_scaled_rows)(w, rows, coef, out) }
    }

    /// `up[i] = gate[i] / (1 + exp(-gate[i])) * up[i]`. A gate of minus infinity gives NaN.
    pub fn silu_mul(&self, gate: &[f32], up: &mut [f32]) {
        assert_eq!(gate.len(), up.len(), "lengths of gate and up");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.silu_mul)(gate, up) }
    }

    /// Replaces each value by `exp(value - shift)` and returns their sum, in 32 lanes as in a dot product. With `shift`
    /// the largest value (and finite) every result lies between 0 and 1; minus infinity becomes exactly 0, NaN stays.
    pub fn exp_shifted(&self, x: &mut [f32], shift: f32) -> f32 {
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.exp_shifted)(x, shift) }
    }

    fn quantize_row(&self, x: &[f32], row: QuantRowMut) {
        assert_eq!(row.natural.len(), quantized::padded(x.len()), "columns of a quantized row");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.quantize_row)(x, row) }
    }

    /// As [`encode`], bit for bit.
    fn encode_row(&self, format: Format, row: &[f32], data: &mut [u8], scales: &mut [f32]) -> Result<(), EncodeError> {
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.encode_row)(format, row, data, scales) }
    }

    /// The exact path of rows `rows` for up to [`MAX_BATCH`] rows of `x`, on this thread: `tile[i * rows.len() + r]`.
    pub(crate) fn exact_tile(&self, w: &WeightRef, rows: Range<usize>, x: &[f32], batch: usize, tile: &mut [f32]) {
        check_tile(w, &rows, batch, MAX_BATCH, tile);
        assert_eq!(x.len(), batch * w.cols(), "activations of a tile");
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.exact)(w, rows, x, tile) }
    }

    fn integer_tile(&self, w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
        check_tile(w, &rows, x.len(), self.integer_batch, tile);
        assert!(w.format().is_integer(), "{} has no integer path", w.format());
        for row in x {
            row.check(w.cols());
        }
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (self.integer)(w, rows, x, tile) }
    }

    /// Whether it packs activations for whole batches.
    pub fn has_tiles(&self) -> bool {
        self.tiles.is_some()
    }

    /// Whether whole batches of such a matrix meet packed activations.
    fn takes_tiles(&self, format: Format) -> bool {
        self.tiles.is_some_and(|kernel| (kernel.takes)(format))
    }

    /// Of the rows of a batch, those that are packed: the others are the last, and few. Behind one run or two these would be as
    /// dear as a run, and all go together.
    fn packed_rows(&self, rows: usize) -> usize {
        let (runs, last) = (rows / TILE_ROWS, rows % TILE_ROWS);
        match self.tiles.map_or(TILE_ROWS, |kernel| kernel.few) {
            few if last > few => rows,
            few if few > 0 && runs <= 2 && last > 0 => 0,
            _ => rows - last,
        }
    }

    /// The integer path of rows `rows` for all rows of `x`, on this thread, where [`Kernels::takes_tiles`].
    fn tile_product(&self, w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
        assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
        assert_eq!(x.cols, w.cols(), "columns of a panel");
        let kernel = self.tiles.filter(|kernel| (kernel.takes)(w.format()));
        let Some(kernel) = kernel else { unreachable!("{} on tiles", w.format()) };
        // SAFETY: holding this table proves that the CPU has the instructions of its functions.
        unsafe { (kernel.product)(w, rows, x, put) }
    }
}

fn check_tile(w: &WeightRef, rows: &Range<usize>, batch: usize, most: usize, tile: &[f32]) {
    assert!(rows.start <= rows.end && rows.end <= w.rows(), "rows {rows:?} of {}", w.rows());
    assert!((1..=most).contains(&batch), "a tile of {batch} activation rows");
    assert_eq!(tile.len(), batch * rows.len(), "elements of a tile");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert_eq!("neon".parse::<Isa>(), Err(UnknownIsa { given: "neon".into() }));
    }

    #[test]
    fn the_scalar_table_always_exists_and_the_best_is_the_last() {
        let all = Kernels::all_available();
        assert_eq!(all[0].isa, Isa::Scalar);
        assert_eq!(all[all.len() - 1].isa, Kernels::best().isa);
    }

    #[test]
    fn a_dot_product_adds_its_lanes_as_documented() {
        // Lanes 0 and 16 meet first: 2^24 - 2^24 leaves 0, and lane 1 survives. In order of index it would be lost.
        let mut a = [0.0f32; 32];
        (a[0], a[1], a[16]) = (16_777_216.0, 0.5, -16_777_216.0);
        for k in Kernels::all_available() {
            assert_eq!(k.dot(&a, &[1.0; 32]), 0.5, "{k:?}");
        }
    }

    #[test]
    fn exp_and_silu_at_known_points() {
        for k in Kernels::all_available() {
            let mut x = [7.0, f32::NEG_INFINITY, 7.0, -1000.0];
            assert_eq!(k.exp_shifted(&mut x, 7.0), 2.0, "{k:?}");
            assert_eq!(x, [1.0, 0.0, 1.0, 0.0], "{k:?}");
            let mut up = [3.0, 2.0, -4.0, 5.0];
            k.silu_mul(&[0.0, 100.0, -200.0, 1.0], &mut up);
            assert_eq!(up[..3], [0.0, 200.0, 0.0], "{k:?}");
            assert!((f64::from(up[3]) - 5.0 / (1.0 + (-1f64).exp())).abs() < 5e-7, "{k:?} {}", up[3]);
        }
    }

    #[test]
    #[should_panic(expected = "rows 1..4 of 3")]
    fn rows_past_the_matrix_are_refused() {
        let spec = MatrixSpec { format: Format::F32, rows: 3, cols: 1 };
        let w = WeightRef::new(spec, &[0; 12], &[]);
        Kernels::best().add_scaled_rows(&w, 1..4, &[0.0; 3], &mut [0.0]);
    }
}
