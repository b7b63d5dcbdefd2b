//! Weights drawn from a seed: the bytes of a tensor depend on its name, its format and the seed, and on nothing else.
//!
//! Every format is a table: a random byte picks the bytes that are stored, so that drawing costs the same
//! whatever the width. The values are bell-shaped and centred, and no function is used that one machine rounds
//! otherwise than another.

use crate::checkpoint::error::Result;
use crate::checkpoint::required::Shape;
use crate::checkpoint::write::Weights;
use crate::checkpoint::write::layout::Item;
use crate::kernels::{Format, Kernels, MatrixSpec, WeightRef};
use rayon::ThreadPool;
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes drawn at a time: bounds the memory, whatever the size of a matrix.
const CHUNK_BYTES: usize = 8 << 20;
/// Bytes that one thread draws at a time.
const BLOCK_BYTES: usize = 128 << 10;
/// A scale differs from the mean of its matrix by up to a quarter.
const SCALE_STEPS: f64 = 512.0;

const _: () = assert!(CHUNK_BYTES.is_multiple_of(BLOCK_BYTES));

/// The weights of a seed.
pub(crate) struct Generator {
    seed: u64,
    /// Those that draw, where there are any.
    threads: Option<ThreadPool>,
    buffer: Vec<u8>,
}

impl Generator {
    pub fn new(seed: u64, threads: Option<ThreadPool>) -> Generator {
        Generator { seed, threads, buffer: Vec::new() }
    }
}

impl Weights for Generator {
    fn write(&mut self, item: &Item, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>> {
        let codes = Codes::new(item.target, &Spread::of(item));
        let key = xxh3_64_with_seed(item.name.as_bytes(), self.seed);
        let bytes = item.data_bytes() as usize;
        for start in (0..bytes).step_by(CHUNK_BYTES) {
            self.buffer.resize(CHUNK_BYTES.min(bytes - start), 0);
            codes.fill(key, start, &mut self.buffer, self.threads.as_ref());
            put(&self.buffer)?;
        }
        Ok(codes.scales(!key, item.scale_count() as usize))
    }
}

/// How the values of a tensor are spread.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Spread {
    centre: f64,
    /// Root of the mean square distance from the centre.
    deviation: f64,
}

impl Spread {
    /// What keeps a model of any depth in the range of its formats: a projection keeps the size of its input, and what a
    /// layer adds to the residual stream is half of what is there at first.
    fn of(item: &Item) -> Spread {
        let is = |tail: &str| item.name.ends_with(tail);
        match item.shape {
            // A correction of this size gives a quarter of 256 experts half of all tokens, and the luckiest five times
            // the mean.
            Shape::Vector(_) if is("bias") => Spread { centre: 0.0, deviation: 0.05 },
            Shape::Vector(_) => Spread { centre: 1.0, deviation: 0.1 },
            // Rows of the embedding are looked up, not multiplied.
            Shape::Matrix { .. } if is("embed_tokens.weight") => Spread { centre: 0.0, deviation: 1.0 },
            Shape::Matrix { cols, .. } => {
                let gain = if is("o_proj.weight") || is("down_proj.weight") { 0.5 } else { 1.0 };
                Spread { centre: 0.0, deviation: gain / (cols as f64).sqrt() }
            }
        }
    }
}

/// The bytes a random byte stands for, and the scale that gives them their spread.
struct Codes {
    /// `width` bytes for each random byte.
    table: Vec<u8>,
    width: usize,
    scale: f64,
}

impl Codes {
    fn new(format: Format, spread: &Spread) -> Codes {
        let fine = levels(256, 127);
        let floats = |bytes: &dyn Fn(f32) -> Vec<u8>| {
            let unit = rms(&fine);
            let table = fine.iter().flat_map(|level| bytes((spread.centre + spread.deviation * level / unit) as f32));
            let table: Vec<u8> = table.collect();
            Codes { width: table.len() / 256, table, scale: 0.0 }
        };
        // A byte of several fields takes a level for each from its own bits; `offset` makes fields unsigned.
        let packed = |bits: usize, limit: i32, offset: i32| {
            let levels = levels(1 << bits, limit);
            let field = |byte: usize, at: usize| {
                let level = levels[byte >> (bits * at) & ((1 << bits) - 1)] as i32;
                ((level + offset) as u8 & (u8::MAX >> (8 - bits))) << (bits * at)
            };
            let byte = |byte: usize| (0..8 / bits).fold(0, |all, at| all | field(byte, at));
            Codes { table: (0..256).map(byte).collect(), width: 1, scale: spread.deviation / rms(&levels) }
        };
        match format {
            Format::F32 => floats(&|value| value.to_le_bytes().to_vec()),
            Format::Bf16 => floats(&|value| half::bf16::from_f32(value).to_le_bytes().to_vec()),
            Format::F16 => floats(&|value| half::f16::from_f32(value).to_le_bytes().to_vec()),
            Format::Fp8Block => {
                let (table, values): (Vec<u8>, Vec<f64>) = fine.iter().map(|&level| nearest_e4m3(level)).unzip();
                Codes { table, width: 1, scale: spread.deviation / rms(&values) }
            }
            Format::Int8Row => packed(8, 127, 0),
            Format::Int4Row | Format::Int4Group { .. } => packed(4, 7, 8),
            Format::Int2Row => packed(2, 1, 2),
            Format::Int3Group | Format::Nvfp4 => unreachable!("{format} is read, never made"),
        }
    }

    /// Bytes `start..` of the stream of `key`; `start` is a multiple of [`BLOCK_BYTES`].
    fn fill(&self, key: u64, start: usize, out: &mut [u8], threads: Option<&ThreadPool>) {
        let block = |(number, out): (usize, &mut [u8])| {
            let first = (start + number * BLOCK_BYTES) / (8 * self.width);
            match self.width {
                1 => self.fill_block::<1>(key, first, out),
                2 => self.fill_block::<2>(key, first, out),
                4 => self.fill_block::<4>(key, first, out),
                width => unreachable!("no format has elements of {width} bytes"),
            }
        };
        match threads {
            Some(threads) => threads.install(|| out.par_chunks_mut(BLOCK_BYTES).enumerate().for_each(block)),
            None => out.chunks_mut(BLOCK_BYTES).enumerate().for_each(block),
        }
    }

    fn fill_block<const WIDTH: usize>(&self, key: u64, first: usize, out: &mut [u8]) {
        let (table, _) = self.table.as_chunks::<WIDTH>();
        for (number, out) in out.chunks_mut(8 * WIDTH).enumerate() {
            let word = random(key, (first + number) as u64).to_le_bytes();
            for (out, byte) in out.chunks_exact_mut(WIDTH).zip(word) {
                out.copy_from_slice(&table[usize::from(byte)]);
            }
        }
    }

    fn scales(&self, key: u64, count: usize) -> Vec<u8> {
        let fine = levels(256, 127);
        let scale = |number: usize| {
            let level = fine[random(key, number as u64) as usize % 256];
            ((self.scale * (1.0 + level / SCALE_STEPS)) as f32).to_le_bytes()
        };
        (0..count).flat_map(scale).collect()
    }
}

/// Number `index` of the stream of `key`: SplitMix64, which can begin anywhere.
fn random(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// The centres of `count` equally likely slices of a bell curve, as whole numbers up to `limit`.
///
/// The curve is Tukey's lambda distribution of 1/8, close to the normal one, whose quantiles need no more than square
/// roots: those are the same on every machine.
fn levels(count: usize, limit: i32) -> Vec<f64> {
    let root8 = |p: f64| p.sqrt().sqrt().sqrt();
    let quantile = |p: f64| root8(p) - root8(1.0 - p);
    let share = |number: usize| (number as f64 + 0.5) / count as f64;
    let most = quantile(share(count - 1));
    (0..count).map(|number| (quantile(share(number)) / most * f64::from(limit)).round()).collect()
}

fn rms(values: &[f64]) -> f64 {
    (values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64).sqrt()
}

/// The E4M3 byte nearest to `value`, and what it stands for.
fn nearest_e4m3(value: f64) -> (u8, f64) {
    /// Magnitudes are the bytes below the one that is not a number.
    const MAGNITUDES: usize = 0x7f;
    let spec = MatrixSpec { format: Format::Fp8Block, rows: 1, cols: MAGNITUDES };
    let bytes: Vec<u8> = (0..MAGNITUDES as u8).collect();
    let mut values = vec![0.0; MAGNITUDES];
    Kernels::best().decode_row(&WeightRef::new(spec, &bytes, &1f32.to_le_bytes()), 0, &mut values);
    let distance = |byte: &u8| (f64::from(values[usize::from(*byte)]) - value.abs()).abs();
    let byte = bytes.iter().copied().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    let magnitude = f64::from(values[usize::from(byte)]);
    if value < 0.0 { (byte | 0x80, -magnitude) } else { (byte, magnitude) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(name: &str, rows: usize, cols: usize, target: Format) -> Item {
        Item { name: name.to_owned(), shape: Shape::Matrix { rows, cols }, target }
    }

    /// Weights and scales of an item.
    fn drawn(seed: u64, item: &Item) -> (Vec<u8>, Vec<u8>) {
        let mut bytes = Vec::new();
        let scales = Generator::new(seed, None).write(item, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        });
        (bytes, scales.unwrap())
    }

    const FORMATS: [Format; 8] = [
        Format::F32,
        Format::Bf16,
        Format::F16,
        Format::Fp8Block,
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Group { group: 64 },
        Format::Int2Row,
    ];

    #[test]
    fn levels_are_centred_reach_the_limit_and_are_bell_shaped() {
        assert_eq!(levels(4, 1), [-1.0, 0.0, 0.0, 1.0]);
        let four = levels(16, 7);
        assert_eq!((four[0], four[15]), (-7.0, 7.0));
        let eight = levels(256, 127);
        assert_eq!((eight[0], eight[255]), (-127.0, 127.0));
        for levels in [four, eight] {
            let mirrored: Vec<f64> = levels.iter().rev().map(|level| 0.0 - level).collect();
            assert_eq!(levels, mirrored);
            assert!(levels.is_sorted());
            // Half of the levels are within a third of the limit; of evenly spread ones a third would be.
            let limit = levels.last().unwrap() / 3.0;
            assert!(levels.iter().filter(|level| level.abs() <= limit).count() * 2 >= levels.len());
        }
    }

    #[test]
    fn every_format_decodes_to_the_spread_that_was_asked_for() {
        for format in FORMATS {
            let (rows, cols) = (512, 1024);
            let (bytes, scales) = drawn(7, &item("model.layers.0.self_attn.o_proj.weight", rows, cols, format));
            let weights = WeightRef::new(MatrixSpec { format, rows, cols }, &bytes, &scales);
            let (mut row_values, mut sum, mut squares) = (vec![0f32; cols], 0.0, 0.0);
            for row in 0..rows {
                Kernels::best().decode_row(&weights, row, &mut row_values);
                sum += row_values.iter().map(|&v| f64::from(v)).sum::<f64>();
                squares += row_values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>();
            }
            let count = (rows * cols) as f64;
            // Half of one over the root of 1,024 columns; 524,288 draws are within a few thousandths of it.
            let (mean, deviation) = (sum / count, (squares / count).sqrt());
            assert!((deviation * 64.0 - 1.0).abs() < 0.02, "{format}: {deviation}");
            assert!((mean * 64.0).abs() < 0.01, "{format}: {mean}");
        }
    }

    #[test]
    fn bytes_depend_on_seed_and_name_and_not_on_where_a_block_ends() {
        for format in FORMATS {
            // More than one chunk, and a ragged end.
            let large = item("model.layers.3.mlp.experts.9.up_proj.weight", 9001, 1024, format);
            let first = drawn(1, &large);
            assert!(first == drawn(1, &large), "{format}");
            assert!(first.0 != drawn(2, &large).0, "{format}");
            let other = Item { name: "model.layers.3.mlp.experts.8.up_proj.weight".to_owned(), ..large.clone() };
            assert!(first.0 != drawn(1, &other).0, "{format}");
            let small = item(&large.name, 3, 1024, format);
            assert!(first.0.starts_with(&drawn(1, &small).0), "{format}");
        }
    }

    #[test]
    fn the_stream_is_that_of_splitmix64() {
        // The first numbers of the published generator with seed 1234567.
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0, 1, 2].map(|index| random(1_234_567, index)), expected);
    }
}
