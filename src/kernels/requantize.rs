//! Weights from the format they are stored in into another one, divided among a team by rows.

use std::sync::{Mutex, PoisonError};

use super::format::{Format, MatrixSpec, WeightRef};
use super::{EncodeError, Kernels, Team};

/// Tasks of each thread: threads that are late leave less of the last one to wait for.
const TASKS: usize = 4;

/// A weight that a format cannot hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unfit {
    /// Its row.
    pub row: usize,
    /// Its column.
    pub col: usize,
    /// Its value.
    pub value: f32,
}

impl Kernels {
    /// Encodes a row as `target` stores it: an integer format, F32, which takes any value as it is, or BF16. The error is
    /// column and value of what it cannot hold.
    pub fn store_row(
        &self,
        target: Format,
        row: &[f32],
        data: &mut [u8],
        scales: &mut [f32],
    ) -> Result<(), (usize, f32)> {
        match target {
            Format::F32 => {
                data.as_chunks_mut().0.iter_mut().zip(row).for_each(|(out, value)| *out = value.to_le_bytes());
                Ok(())
            }
            Format::Bf16 => {
                let halves = data.as_chunks_mut().0.iter_mut().zip(row).enumerate();
                halves.map(|(col, (out, &value))| (col, out, value, half::bf16::from_f32(value))).try_for_each(
                    |(col, out, value, half)| {
                        *out = half.to_le_bytes();
                        if half.is_finite() { Ok(()) } else { Err((col, value)) }
                    },
                )
            }
            _ => match self.encode_row(target, row, data, scales) {
                Ok(()) => Ok(()),
                Err(EncodeError::NotFinite { index, value }) => Err((index, value)),
                Err(other) => unreachable!("{other}: weights become integers, F32 or BF16, or stay as they are"),
            },
        }
    }
}

/// What rows are decoded into on their way, allocated once.
pub struct Requantizer {
    floats: Vec<f32>,
}

impl Requantizer {
    /// With room for as many floats as [`Requantizer::floats`] counts.
    pub fn new(floats: Vec<f32>) -> Requantizer {
        Requantizer { floats }
    }

    /// Floats that a team of `threads`, or of fewer, needs to make a matrix of this form.
    pub fn floats(threads: usize, target: &MatrixSpec) -> usize {
        // No task has more rows than a thread alone makes of it, and only the last has fewer than others.
        let (most_of_task, _) = tasks_of(1, target.rows);
        TASKS * threads * target.cols + (target.rows + most_of_task) * target.format.scale_count(1, target.cols)
    }

    /// Writes `w` as `target`: `data` is `[target.data_bytes(rows, cols)]`, and `scales` its little-endian scales. The bytes
    /// are those of [`Kernels::store_row`] for each row, whatever the team. Of several weights that cannot be held the
    /// error is the first.
    pub fn run(
        &mut self,
        k: &Kernels,
        team: &Team,
        w: &WeightRef,
        target: Format,
        data: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), Unfit> {
        let (rows, cols) = (w.rows(), w.cols());
        assert_eq!(data.len(), target.data_bytes(rows, cols), "bytes of a matrix as {target}");
        assert_eq!(scales.len(), target.scale_bytes(rows, cols), "bytes of its scales");
        let (row_bytes, row_scales) = (target.row_bytes(cols), target.scale_count(1, cols));
        let (rows_of_task, tasks) = tasks_of(team.threads(), rows);
        let of_task = cols + rows_of_task * row_scales;
        let floats = &mut self.floats[..tasks * of_task];
        let unfit: Mutex<Option<Unfit>> = Mutex::new(None);
        team.for_chunks2(data, rows_of_task * row_bytes, floats, of_task, &|task, data, floats| {
            let (values, scales) = floats.split_at_mut(cols);
            for (at, data) in data.chunks_mut(row_bytes).enumerate() {
                let row = task * rows_of_task + at;
                k.decode_row(w, row, values);
                let stored = k.store_row(target, values, data, &mut scales[at * row_scales..][..row_scales]);
                if let Err((col, value)) = stored {
                    let mut first = unfit.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.is_none_or(|first| row < first.row) {
                        *first = Some(Unfit { row, col, value });
                    }
                    return;
                }
            }
        });
        if let Some(unfit) = unfit.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(unfit);
        }
        let made = floats.chunks(of_task).flat_map(|floats| &floats[cols..]);
        scales.as_chunks_mut().0.iter_mut().zip(made).for_each(|(out, scale)| *out = scale.to_le_bytes());
        Ok(())
    }
}

/// Rows of a task, and tasks, where `threads` divide `rows`.
fn tasks_of(threads: usize, rows: usize) -> (usize, usize) {
    let rows_of_task = rows.div_ceil(TASKS * threads).max(1);
    (rows_of_task, rows.div_ceil(rows_of_task))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: [Format; 7] = [
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Group { group: 48 },
        Format::Int3Group,
        Format::Int2Row,
        Format::Bf16,
        Format::F32,
    ];

    /// Values of many magnitudes that weights have, ties, zeros and both signs.
    fn values(count: usize) -> Vec<f32> {
        let value = |i: usize| match i % 7 {
            0 => 0.0,
            1 => ((i * 2_654_435_761) % 4001) as f32 / 7.0 - 285.5,
            2 => -((i % 13) as f32) * 0.5,
            3 => f32::from_bits(((i * 40_503) % 0x7f80) as u32 * 0x1_0000 % 0x4480_0000),
            _ => (i % 255) as f32 - 127.0,
        };
        (0..count).map(value).collect()
    }

    #[test]
    fn every_table_and_team_writes_what_the_definition_writes() {
        for (rows, cols) in [(1, 1), (3, 17), (129, 66), (70, 128), (33, 201)] {
            let stored: Vec<u8> = values(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect();
            let w = WeightRef::new(MatrixSpec { format: Format::F32, rows, cols }, &stored, &[]);
            for target in TARGETS {
                let spec = MatrixSpec { format: target, rows, cols };
                let (mut data, mut scales) = (vec![], vec![]);
                for row in values(rows * cols).chunks(cols) {
                    let mut bytes = vec![0; target.row_bytes(cols)];
                    let mut floats = vec![0.0; target.scale_count(1, cols)];
                    match target {
                        Format::Bf16 => {
                            bytes = row.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
                        }
                        Format::F32 => bytes = row.iter().flat_map(|v| v.to_le_bytes()).collect(),
                        _ => crate::kernels::encode(target, cols, row, &mut bytes, &mut floats).unwrap(),
                    }
                    data.extend(bytes);
                    scales.extend(floats.iter().flat_map(|scale| scale.to_le_bytes()));
                }
                for k in Kernels::all_available() {
                    for threads in [1, 2, 5] {
                        let mut requantizer = Requantizer::new(vec![0.0; Requantizer::floats(5, &spec)]);
                        let (mut out, mut out_scales) = (vec![9; data.len()], vec![9; scales.len()]);
                        let team = Team::new(threads);
                        requantizer.run(k, &team, &w, target, &mut out, &mut out_scales).unwrap();
                        assert!(out == data && out_scales == scales, "{k:?} {target} {rows}x{cols} {threads}");
                    }
                }
            }
        }
    }

    #[test]
    fn of_several_weights_that_cannot_be_held_the_first_is_named() {
        let (rows, cols) = (40, 8);
        let mut values = vec![1.0f32; rows * cols];
        (values[7 * cols + 3], values[7 * cols + 5], values[31 * cols]) = (f32::NAN, 1.0, f32::INFINITY);
        let stored: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let w = WeightRef::new(MatrixSpec { format: Format::F32, rows, cols }, &stored, &[]);
        for target in [Format::Int8Row, Format::Int4Group { group: 16 }, Format::Bf16] {
            let spec = MatrixSpec { format: target, rows, cols };
            for threads in [1, 3] {
                let mut requantizer = Requantizer::new(vec![0.0; Requantizer::floats(threads, &spec)]);
                let (mut data, mut scales) = (vec![0; spec.data_bytes()], vec![0; spec.scale_bytes()]);
                let team = Team::new(threads);
                let unfit = requantizer.run(Kernels::best(), &team, &w, target, &mut data, &mut scales).unwrap_err();
                assert!((unfit.row, unfit.col) == (7, 3) && unfit.value.is_nan(), "{target}: {unfit:?}");
            }
        }
    }
}
