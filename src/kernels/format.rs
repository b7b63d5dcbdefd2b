//! How a weight matrix is stored, and how many bytes that takes.
//!
//! A matrix is `[rows, cols]`, row-major, and multiplies as `y = x W^T`: one output per row. Everything here is
//! arithmetic on sizes; decoding lives in the kernels. The table of formats is the one of the published containers
//! (see the manual's chapter on file formats).

use std::fmt;

/// Side of the square blocks that share one scale in FP8 checkpoints.
pub const FP8_BLOCK: usize = 128;
/// Columns that share a scale in the three-bit format.
pub const INT3_GROUP: usize = 64;
/// Bytes of such a group: 16 of two low bits a column, then 8 of the high bits.
pub(super) const INT3_GROUP_BYTES: usize = 24;
/// Columns that share a scale in NVFP4.
pub const NVFP4_GROUP: usize = 16;

/// Storage format of one weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Format {
    /// Little-endian float32.
    F32,
    /// The upper half of a float32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// E4M3 bytes, one f32 scale per 128 x 128 block; blocks at the right and lower edge may be partial.
    Fp8Block,
    /// Signed bytes, one f32 scale per row.
    Int8Row,
    /// Two weights a byte, the even column in the low nibble, value `nibble - 8`, one f32 scale per row.
    Int4Row,
    /// As `Int4Row`, with one scale per run of `group` columns: scale index `row * groups + g`.
    Int4Group {
        /// Columns that share a scale.
        group: u16,
    },
    /// Per run of 64 columns 16 bytes of low bits, four columns a byte as in `Int2Row`, then 8 bytes of high bits, eight
    /// columns a byte, lowest first; value `field - 4`, one f32 scale per run. The last run of a row is stored whole.
    Int3Group,
    /// Four weights a byte, lowest bits first, value `field - 2`, one f32 scale per row.
    Int2Row,
    /// Two E2M1 floats a byte, the even column in the low nibble, an E4M3 scale per run of 16 columns, and a factor for the
    /// matrix. Publishers store it; it is a source to convert.
    Nvfp4,
}

impl Format {
    /// Bytes of one row's weights, without scales.
    #[inline]
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::F32 => cols * 4,
            Format::Bf16 | Format::F16 => cols * 2,
            Format::Fp8Block | Format::Int8Row => cols,
            Format::Int4Row | Format::Int4Group { .. } | Format::Nvfp4 => cols.div_ceil(2),
            Format::Int3Group => cols.div_ceil(INT3_GROUP) * INT3_GROUP_BYTES,
            Format::Int2Row => cols.div_ceil(4),
        }
    }

    /// Bytes of a whole matrix's weights, without scales.
    pub fn data_bytes(self, rows: usize, cols: usize) -> usize {
        rows * self.row_bytes(cols)
    }

    /// How many scales a matrix has; 0 for formats that store values themselves.
    pub fn scale_count(self, rows: usize, cols: usize) -> usize {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => 0,
            Format::Fp8Block => rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
            Format::Int8Row | Format::Int4Row | Format::Int2Row => rows,
            Format::Int4Group { .. } | Format::Int3Group => rows * cols.div_ceil(self.group(cols)),
            Format::Nvfp4 => rows * cols.div_ceil(NVFP4_GROUP),
        }
    }

    /// Whether runs of columns have scales of their own.
    pub(super) fn is_grouped(self) -> bool {
        matches!(self, Format::Int4Group { .. } | Format::Int3Group)
    }

    /// Columns of an integer format that share a scale: all of a row, unless it is a grouped format.
    #[inline]
    pub(super) fn group(self, cols: usize) -> usize {
        match self {
            Format::Int4Group { group } => group.into(),
            Format::Int3Group => INT3_GROUP,
            _ => cols,
        }
    }

    /// Bytes of a matrix's scales: floats, but for NVFP4.
    pub fn scale_bytes(self, rows: usize, cols: usize) -> usize {
        let each = if self == Format::Nvfp4 { 1 } else { 4 };
        each * self.scale_count(rows, cols)
    }

    /// Weights and scales together, in bytes.
    pub fn total_bytes(self, rows: usize, cols: usize) -> usize {
        self.data_bytes(rows, cols) + self.scale_bytes(rows, cols)
    }

    /// Whether the integer path (int8 activations, i32 sums) exists for this format.
    pub fn is_integer(self) -> bool {
        !matches!(self, Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block | Format::Nvfp4)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::F32 => f.write_str("f32"),
            Format::Bf16 => f.write_str("bf16"),
            Format::F16 => f.write_str("f16"),
            Format::Fp8Block => f.write_str("fp8-b128"),
            Format::Int8Row => f.write_str("int8"),
            Format::Int4Row => f.write_str("int4"),
            Format::Int4Group { group } => write!(f, "int4-g{group}"),
            Format::Int3Group => f.write_str("int3-g64"),
            Format::Int2Row => f.write_str("int2"),
            Format::Nvfp4 => f.write_str("nvfp4"),
        }
    }
}

/// Shape and format of a matrix, without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSpec {
    /// Storage format.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

impl MatrixSpec {
    /// Bytes of the weights, without scales.
    pub fn data_bytes(&self) -> usize {
        self.format.data_bytes(self.rows, self.cols)
    }

    /// Bytes of the scales.
    pub fn scale_bytes(&self) -> usize {
        self.format.scale_bytes(self.rows, self.cols)
    }
}

/// A weight matrix somewhere in memory. Neither slice needs any alignment: they may point into the middle of a slab.
#[derive(Clone, Copy, Debug)]
pub struct WeightRef<'a> {
    spec: MatrixSpec,
    data: &'a [u8],
    scales: &'a [u8],
    factor: f32,
}

impl<'a> WeightRef<'a> {
    /// Joins a shape with its bytes. Panics when the lengths disagree: callers resolve sizes when they open the file.
    pub fn new(spec: MatrixSpec, data: &'a [u8], scales: &'a [u8]) -> Self {
        assert_eq!(data.len(), spec.data_bytes(), "weight bytes of {spec:?}");
        assert_eq!(scales.len(), spec.scale_bytes(), "scale bytes of {spec:?}");
        WeightRef { spec, data, scales, factor: 1.0 }
    }

    /// The same with a factor of the whole matrix, which NVFP4 has.
    pub fn with_factor(self, factor: f32) -> Self {
        assert_eq!(self.spec.format, Format::Nvfp4, "a factor of {:?}", self.spec);
        WeightRef { factor, ..self }
    }

    /// Shape and format.
    pub fn spec(&self) -> MatrixSpec {
        self.spec
    }

    /// Storage format.
    #[inline]
    pub fn format(&self) -> Format {
        self.spec.format
    }

    /// Output features.
    #[inline]
    pub fn rows(&self) -> usize {
        self.spec.rows
    }

    /// Input features.
    #[inline]
    pub fn cols(&self) -> usize {
        self.spec.cols
    }

    /// All weight bytes.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// All scale bytes (little-endian f32, but for NVFP4).
    #[inline]
    pub fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// Weight bytes of one row.
    #[inline]
    pub fn row(&self, row: usize) -> &'a [u8] {
        let n = self.spec.format.row_bytes(self.spec.cols);
        &self.data[row * n..][..n]
    }

    /// Scale number `index`; in NVFP4 times the factor.
    #[inline]
    pub fn scale(&self, index: usize) -> f32 {
        if self.spec.format == Format::Nvfp4 {
            return e4m3(self.scales[index]) * self.factor;
        }
        let b = &self.scales[4 * index..][..4];
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }

    /// Rows `start..start + count` as a matrix of their own. For FP8, `start` must lie on a block boundary.
    pub fn row_range(&self, start: usize, count: usize) -> WeightRef<'a> {
        let spec = MatrixSpec { rows: count, ..self.spec };
        let n = spec.format.row_bytes(spec.cols);
        if spec.format == Format::Fp8Block {
            assert_eq!(start % FP8_BLOCK, 0, "row {start} is inside an FP8 block");
        }
        let first_scale = spec.format.scale_bytes(start, spec.cols);
        WeightRef {
            spec,
            data: &self.data[start * n..][..count * n],
            scales: &self.scales[first_scale..][..spec.scale_bytes()],
            factor: self.factor,
        }
    }
}

/// The value of an E4M3 byte: exponent bias 7, subnormals, no infinities, NaN where all seven low bits are set.
pub(super) fn e4m3(byte: u8) -> f32 {
    let mantissa = f32::from(byte & 7);
    let magnitude = match byte >> 3 & 15 {
        15 if byte & 7 == 7 => f32::NAN,
        0 => mantissa * f32::from_bits((127 - 9) << 23),
        exponent => (8.0 + mantissa) * f32::from_bits((u32::from(exponent) + 127 - 10) << 23),
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_a_glm_5_2_expert() {
        // 2048 x 6144 at int4: 6,291,456 bytes and 2,048 scales; three matrices make the published 18.92 MB.
        let up = MatrixSpec { format: Format::Int4Row, rows: 2048, cols: 6144 };
        let down = MatrixSpec { format: Format::Int4Row, rows: 6144, cols: 2048 };
        assert_eq!(up.data_bytes(), 6_291_456);
        let slab = 2 * (up.data_bytes() + up.scale_bytes()) + down.data_bytes() + down.scale_bytes();
        assert_eq!(slab, 18_874_368 + 40_960);
        assert_eq!(slab, 4618 * 4096);
        let grouped = Format::Int4Group { group: 64 };
        assert_eq!(2 * grouped.total_bytes(2048, 6144) + grouped.total_bytes(6144, 2048), 18_874_368 + 2_359_296);
    }

    #[test]
    fn odd_columns_round_a_row_up_to_whole_bytes() {
        assert_eq!(Format::Int4Row.data_bytes(3, 5), 9);
        assert_eq!(Format::Int2Row.data_bytes(3, 5), 6);
        assert_eq!(Format::Int3Group.total_bytes(3, 65), 3 * 2 * (24 + 4));
        assert_eq!(Format::Nvfp4.total_bytes(3, 17), 3 * (9 + 2));
        assert_eq!(Format::Fp8Block.scale_count(129, 128), 2);
        assert_eq!(Format::Int4Group { group: 64 }.scale_count(2, 65), 4);
    }

    #[test]
    fn a_row_range_takes_its_own_scales() {
        let spec = MatrixSpec { format: Format::Int4Group { group: 16 }, rows: 4, cols: 32 };
        let data: Vec<u8> = (0..64).collect();
        let scales: Vec<u8> = (0..8u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let part = WeightRef::new(spec, &data, &scales).row_range(2, 2);
        assert_eq!(part.row(0)[0], 32);
        assert_eq!(part.scale(0), 4.0);
    }
}
