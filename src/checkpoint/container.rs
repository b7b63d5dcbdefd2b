//! Which format a weight matrix has, and which bytes are its scales.
//!
//! Float matrices say so themselves. FP8 comes with `<name>_scale_inv`. Everything else is U8 with `<name>.qs`, and the
//! format follows from the two byte counts; a stamp in the shard's metadata may confirm it or break a tie.

use super::error::{CheckpointError, Result};
use super::tensors::{Dtype, TensorInfo, TensorMap};
use crate::kernels::{Format, MatrixSpec, NVFP4_GROUP};
use millstream_io::FileSpan;

/// Group sizes a container may use, in the order in which they are tried.
pub const GROUP_SIZES: [u16; 8] = [16, 32, 48, 64, 96, 128, 192, 256];
/// Suffix of the scales of a U8 weight.
pub const SCALES_SUFFIX: &str = ".qs";
/// Suffix of the block scales of an FP8 weight.
pub const FP8_SCALES_SUFFIX: &str = "_scale_inv";

/// Suffix of the E4M3 scales of an NVFP4 weight, and of the factor of the whole.
pub const NVFP4_SCALES_SUFFIX: &str = "_scale";
/// See [`NVFP4_SCALES_SUFFIX`].
pub const NVFP4_FACTOR_SUFFIX: &str = "_scale_2";

/// Where a matrix lies and how to read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixSource {
    /// Format and shape.
    pub spec: MatrixSpec,
    /// The weights, `spec.data_bytes()` long.
    pub data: FileSpan,
    /// The scales, `spec.scale_bytes()` long; `None` for formats that store values themselves.
    pub scales: Option<FileSpan>,
    /// The factor of the whole matrix, an f32, which NVFP4 has.
    pub factor: Option<FileSpan>,
}

/// The name of a format in a container's metadata; grouped int4 of any size has one.
pub fn stamp_name(format: Format) -> &'static str {
    match format {
        Format::F32 => "f32",
        Format::Bf16 => "bf16",
        Format::F16 => "f16",
        Format::Fp8Block => "fp8-e4m3-b128",
        Format::Int8Row => "int8-row",
        Format::Int4Row => "int4-row",
        Format::Int4Group { .. } => "int4-grouped",
        Format::Int3Group => "int3-g64",
        Format::Int2Row => "int2-row",
        Format::Nvfp4 => "nvfp4",
    }
}

/// Whether the weight `name` is read together with the tensor whose name is longer by `suffix`.
pub(crate) fn is_read_with(tensors: &TensorMap, name: &str, suffix: &str) -> bool {
    match tensors.get(name).map(|tensor| tensor.dtype) {
        Some(Dtype::F8E4M3) => suffix == FP8_SCALES_SUFFIX,
        Some(Dtype::U8) if suffix == SCALES_SUFFIX => true,
        Some(Dtype::U8) if [NVFP4_SCALES_SUFFIX, NVFP4_FACTOR_SUFFIX].contains(&suffix) => {
            tensors.get(&format!("{name}{SCALES_SUFFIX}")).is_none()
        }
        _ => false,
    }
}

impl TensorMap {
    /// Resolves the weight matrix `name` of shape `[rows, cols]`: exact sizes, known format, scales present.
    ///
    /// Errors name the shard, the tensor, what the shape asks for and what is there.
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<MatrixSource> {
        let tensor = self.required(name, || format!("a matrix [{rows}, {cols}]"))?;
        match tensor.dtype {
            Dtype::F32 => self.float_matrix(name, tensor, Format::F32, rows, cols),
            Dtype::Bf16 => self.float_matrix(name, tensor, Format::Bf16, rows, cols),
            Dtype::F16 => self.float_matrix(name, tensor, Format::F16, rows, cols),
            Dtype::F8E4M3 => self.fp8_matrix(name, tensor, rows, cols),
            Dtype::U8 => self.packed_matrix(name, tensor, rows, cols),
            _ => {
                let expected = "F32, BF16, F16, F8_E4M3 or U8".to_owned();
                Err(self.tensor_fault(name, tensor, "dtype", expected, tensor.dtype.to_string()))
            }
        }
    }

    /// Resolves the unquantized vector `name` of `len` values, in F32, BF16 or F16.
    pub fn vector(&self, name: &str, len: usize) -> Result<TensorInfo> {
        let tensor = self.required(name, || format!("a vector [{len}]"))?;
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16) {
            let expected = "F32, BF16 or F16".to_owned();
            let found = tensor.dtype.to_string();
            return Err(self.tensor_fault(name, tensor, "dtype", expected, found));
        }
        self.check_shape(name, tensor, &[len as u64])?;
        Ok(tensor.clone())
    }

    fn required(&self, name: &str, shape: impl Fn() -> String) -> Result<&TensorInfo> {
        if let Some(tensor) = self.get(name) {
            return Ok(tensor);
        }
        let packed = format!("{name}_packed");
        if let Some(tensor) = self.get(&packed) {
            let expected = format!("{name}, as modelopt stores NVFP4");
            let found = format!("{}, as compressed-tensors does", tensor.describe());
            return Err(self.tensor_fault(&packed, tensor, "layout", expected, found));
        }
        Err(CheckpointError::TensorMissing {
            dir: self.dir().to_owned(),
            tensor: name.to_owned(),
            expected: shape(),
            shards: self.paths().len(),
            absent: self.absent(),
        })
    }

    fn float_matrix(
        &self,
        name: &str,
        tensor: &TensorInfo,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource> {
        self.check_shape(name, tensor, &[rows as u64, cols as u64])?;
        for suffix in [SCALES_SUFFIX, FP8_SCALES_SUFFIX] {
            if self.get(&format!("{name}{suffix}")).is_some() {
                let expected = format!("no {name}{suffix}, since the weight is {}", tensor.dtype);
                let found = "scales that would be ignored".to_owned();
                return Err(self.tensor_fault(name, tensor, "scales", expected, found));
            }
        }
        let spec = MatrixSpec { format, rows, cols };
        Ok(MatrixSource { spec, data: tensor.span(), scales: None, factor: None })
    }

    fn fp8_matrix(&self, name: &str, tensor: &TensorInfo, rows: usize, cols: usize) -> Result<MatrixSource> {
        self.check_shape(name, tensor, &[rows as u64, cols as u64])?;
        let spec = MatrixSpec { format: Format::Fp8Block, rows, cols };
        let blocks = [rows.div_ceil(128) as u64, cols.div_ceil(128) as u64];
        let scales_name = format!("{name}{FP8_SCALES_SUFFIX}");
        let scales = self.scales(name, tensor, &scales_name, &format!("F32 {blocks:?}"))?;
        self.check_shape(&scales_name, scales, &blocks)?;
        Ok(MatrixSource { spec, data: tensor.span(), scales: Some(scales.span()), factor: None })
    }

    fn nvfp4_matrix(&self, name: &str, tensor: &TensorInfo, rows: usize, cols: usize) -> Result<MatrixSource> {
        let spec = MatrixSpec { format: Format::Nvfp4, rows, cols };
        self.check_shape(name, tensor, &[rows as u64, spec.format.row_bytes(cols) as u64])?;
        let shape = [rows as u64, cols.div_ceil(NVFP4_GROUP) as u64];
        let part = |suffix: &str, dtype: Dtype, expected: String| {
            let name_of_part = format!("{name}{suffix}");
            let Some(part) = self.get(&name_of_part) else {
                return Err(self.scale_missing(name, tensor, name_of_part, expected));
            };
            if part.dtype == dtype {
                return Ok((name_of_part, part));
            }
            Err(self.tensor_fault(&name_of_part, part, "dtype", dtype.to_string(), part.dtype.to_string()))
        };
        let (scales_name, scales) = part(NVFP4_SCALES_SUFFIX, Dtype::F8E4M3, format!("F8_E4M3 {shape:?}"))?;
        self.check_shape(&scales_name, scales, &shape)?;
        let (factor_name, factor) = part(NVFP4_FACTOR_SUFFIX, Dtype::F32, "F32, one value".to_owned())?;
        if factor.bytes != 4 {
            let found = format!("{:?}", factor.shape);
            return Err(self.tensor_fault(&factor_name, factor, "shape", "one value".to_owned(), found));
        }
        Ok(MatrixSource { spec, data: tensor.span(), scales: Some(scales.span()), factor: Some(factor.span()) })
    }

    fn packed_matrix(&self, name: &str, tensor: &TensorInfo, rows: usize, cols: usize) -> Result<MatrixSource> {
        let scales_name = format!("{name}{SCALES_SUFFIX}");
        let has = |suffix: &str| self.get(&format!("{name}{suffix}")).is_some();
        if !has(SCALES_SUFFIX) && (has(NVFP4_SCALES_SUFFIX) || has(NVFP4_FACTOR_SUFFIX)) {
            return self.nvfp4_matrix(name, tensor, rows, cols);
        }
        let expected = format!("F32, one a row ({rows}) or a group");
        let scales = self.scales(name, tensor, &scales_name, &expected)?;
        let scale_count = scales.bytes / 4;
        let fitting = candidates(rows, cols, tensor.bytes, scale_count);
        let found = || format!("{} bytes with {scale_count} scales", tensor.bytes);
        let Some(&first) = fitting.first() else {
            let expected = sizes_expected(rows, cols);
            return Err(self.tensor_fault(name, tensor, "size", expected, found()));
        };
        let format = match self.stamp(name) {
            None => first,
            Some(stamp) => match fitting.iter().find(|&&fit| stamp_name(fit) == stamp) {
                Some(&fit) => fit,
                None => {
                    let names: Vec<_> = fitting.iter().map(|&fit| stamp_name(fit)).collect();
                    let found = format!("{}, which is {}", found(), names.join(" or "));
                    let expected = format!("{stamp} of [{rows}, {cols}], as the shard's metadata and config.json say");
                    return Err(self.tensor_fault(name, tensor, "format", expected, found));
                }
            },
        };
        let spec = MatrixSpec { format, rows, cols };
        Ok(MatrixSource { spec, data: tensor.span(), scales: Some(scales.span()), factor: None })
    }

    /// The F32 scales of a quantized weight.
    fn scales(&self, name: &str, tensor: &TensorInfo, scales_name: &str, expected: &str) -> Result<&TensorInfo> {
        let Some(scales) = self.get(scales_name) else {
            return Err(self.scale_missing(name, tensor, scales_name.to_owned(), expected.to_owned()));
        };
        if scales.dtype != Dtype::F32 {
            let found = scales.dtype.to_string();
            return Err(self.tensor_fault(scales_name, scales, "dtype", "F32".to_owned(), found));
        }
        Ok(scales)
    }

    fn scale_missing(&self, name: &str, tensor: &TensorInfo, scales: String, expected: String) -> CheckpointError {
        CheckpointError::ScaleMissing {
            file: self.path(tensor.file).to_owned(),
            tensor: name.to_owned(),
            dtype: tensor.dtype.to_string(),
            scales,
            expected,
        }
    }

    fn check_shape(&self, name: &str, tensor: &TensorInfo, shape: &[u64]) -> Result<()> {
        if tensor.shape == shape {
            return Ok(());
        }
        let found = format!("{:?}", tensor.shape);
        Err(self.tensor_fault(name, tensor, "shape", format!("{shape:?}"), found))
    }

    pub(crate) fn tensor_fault(
        &self,
        name: &str,
        tensor: &TensorInfo,
        what: &'static str,
        expected: String,
        found: String,
    ) -> CheckpointError {
        CheckpointError::Tensor {
            file: self.path(tensor.file).to_owned(),
            tensor: name.to_owned(),
            what,
            expected,
            found,
        }
    }
}

/// The formats whose sizes are these, the one to assume without a stamp first.
///
/// Int8 comes before FP8, which has the same weight bytes: where both scale counts fit, a file without a stamp was
/// written before FP8 containers existed. Of the group sizes only the first that fits is a candidate.
fn candidates(rows: usize, cols: usize, bytes: u64, scales: u64) -> Vec<Format> {
    let group = GROUP_SIZES
        .into_iter()
        .filter(|&group| cols.div_ceil(group as usize) > 1)
        .map(|group| Format::Int4Group { group })
        .find(|format| format.scale_count(rows, cols) as u64 == scales);
    [Format::Int8Row, Format::Fp8Block, Format::Int4Row]
        .into_iter()
        .chain(group)
        .chain([Format::Int2Row, Format::Int3Group])
        .filter(|format| format.data_bytes(rows, cols) as u64 == bytes)
        .filter(|format| format.scale_count(rows, cols) as u64 == scales)
        .collect()
}

fn sizes_expected(rows: usize, cols: usize) -> String {
    let size = |format: Format| {
        let (bytes, scales) = (format.data_bytes(rows, cols), format.scale_count(rows, cols));
        format!("{format} {bytes} + {scales} scales")
    };
    let sizes = [Format::Int8Row, Format::Int4Row, Format::Int3Group, Format::Int2Row].map(size);
    format!("for [{rows}, {cols}] one of: {}, or int4 with more scales", sizes.join(", "))
}

/// The format a reader infers from sizes alone; `None` when nothing fits.
pub(crate) fn inferred(rows: usize, cols: usize, bytes: u64, scales: u64) -> Option<Format> {
    candidates(rows, cols, bytes, scales).first().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_follow_from_sizes_of_a_glm_5_2_expert() {
        let (rows, cols) = (2048, 6144);
        let at = |bytes, scales| inferred(rows, cols, bytes, scales);
        assert_eq!(at(12_582_912, 2048), Some(Format::Int8Row));
        assert_eq!(at(12_582_912, 16 * 48), Some(Format::Fp8Block));
        assert_eq!(at(6_291_456, 2048), Some(Format::Int4Row));
        assert_eq!(at(6_291_456, 196_608), Some(Format::Int4Group { group: 64 }));
        assert_eq!(at(6_291_456, 2048 * 32), Some(Format::Int4Group { group: 192 }));
        assert_eq!(at(3_145_728, 2048), Some(Format::Int2Row));
        assert_eq!(at(2048 * 96 * 24, 196_608), Some(Format::Int3Group));
        assert_eq!(at(6_291_456, 2049), None);
        assert_eq!(at(6_291_455, 2048), None);
    }

    #[test]
    fn one_group_a_row_is_per_row() {
        assert_eq!(inferred(8, 64, 256, 8), Some(Format::Int4Row));
        assert_eq!(inferred(8, 65, 264, 16), Some(Format::Int4Group { group: 48 }));
    }

    #[test]
    fn int8_wins_over_fp8_where_both_counts_fit() {
        // One row: one row scale, and one block a 128 columns.
        assert_eq!(inferred(1, 100, 100, 1), Some(Format::Int8Row));
        assert_eq!(candidates(1, 100, 100, 1).len(), 2);
    }
}
