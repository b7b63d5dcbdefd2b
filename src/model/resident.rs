//! The weights that stay in memory: everything but the routed experts.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use millstream_io::{Arena, FileSet, FileSpan, IoError};
use thiserror::Error;

use super::weights::{
    AttentionWeights, FullWeights, IndexerWeights, LatentWeights, Layer, Matrix, Mlp, MlpWeights, Mtp,
};
use crate::checkpoint::arch::{Arch, AttentionArch, IndexerKind, LayerArch, MlpKind};
use crate::checkpoint::{Checkpoint, CheckpointError, MatrixSource, Shape};
use crate::kernels::{Kernels, WeightRef};
use crate::limits::LOAD_PART_BYTES;

/// Why the resident weights could not be loaded.
#[derive(Debug, Error)]
pub enum ResidentError {
    /// A tensor is not as the architecture needs it.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its bytes could not be read.
    #[error("cannot read tensor {tensor}")]
    Read {
        /// Tensor name.
        tensor: String,
        /// What failed.
        #[source]
        source: IoError,
    },
    /// No memory for the weights.
    #[error("cannot hold {bytes} bytes of resident weights")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What failed.
        #[source]
        source: IoError,
    },
    /// The cancel flag was found up.
    #[error("cancelled while the weights were read")]
    Cancelled,
}

/// All resident weights of a model.
pub struct Resident {
    arena: Arena,
    bytes: usize,
    /// `[vocab, hidden]`.
    pub embed: Matrix,
    /// `[vocab, hidden]`; the embedding again when the head is tied.
    pub head: Matrix,
    /// `[hidden]`.
    pub final_norm: Vec<f32>,
    /// Decoder layers in order.
    pub layers: Vec<Layer>,
    /// Present when asked for and declared by the checkpoint.
    pub mtp: Option<Mtp>,
}

/// A model whose resident tensors are known and not yet read: what memory is divided by.
pub struct Plan {
    files: Arc<FileSet>,
    pieces: Vec<Piece>,
    bytes: usize,
    model: Parts,
}

/// Everything of [`Resident`] but the bytes of its matrices.
struct Parts {
    embed: Matrix,
    head: Matrix,
    final_norm: Vec<f32>,
    layers: Vec<Layer>,
    mtp: Option<Mtp>,
}

impl Plan {
    /// Places every resident matrix of `checkpoint`; vectors (norms, biases) are small and read here.
    pub fn new(checkpoint: &Checkpoint, files: Arc<FileSet>, with_mtp: bool) -> Result<Plan, ResidentError> {
        let arch = &checkpoint.arch;
        let shapes = Checkpoint::shapes(arch);
        let mut p = Placer { checkpoint, shapes, files: &files, pieces: vec![], bytes: 0 };
        let embed = p.matrix("model.embed_tokens.weight")?;
        let head = match arch.tied_head {
            true => embed.clone(),
            false => p.matrix("lm_head.weight")?,
        };
        let final_norm = p.vector("model.norm.weight")?;
        let layers =
            arch.layers.iter().enumerate().map(|(i, kind)| p.layer(arch, i, *kind)).collect::<Result<_, _>>()?;
        let mtp = match arch.mtp.filter(|_| with_mtp) {
            Some(kind) => Some(p.mtp(arch, kind)?),
            None => None,
        };
        let model = Parts { embed, head, final_norm, layers, mtp };
        let Placer { pieces, bytes, .. } = p;
        Ok(Plan { files, pieces, bytes, model })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Reads them all into one arena; `cancel` is looked at every few megabytes.
    pub fn load(self, cancel: &AtomicBool) -> Result<Resident, ResidentError> {
        let arena = fill(&self.files, &self.pieces, self.bytes, cancel)?;
        let Parts { embed, head, final_norm, layers, mtp } = self.model;
        Ok(Resident { arena, bytes: self.bytes, embed, head, final_norm, layers, mtp })
    }
}

impl Resident {
    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes of one matrix.
    pub fn view(&self, m: &Matrix) -> WeightRef<'_> {
        let all = self.arena.as_slice();
        WeightRef::new(m.spec, &all[m.data.clone()], &all[m.scales.clone()])
    }
}

/// A piece of an arena and the file range that fills it.
pub struct Piece {
    /// What it is, for an error.
    pub tensor: String,
    /// The bytes.
    pub span: FileSpan,
    /// Where in the arena.
    pub at: usize,
}

/// Gives each matrix its place in the arena.
struct Placer<'a> {
    checkpoint: &'a Checkpoint,
    /// Shapes of all tensors by name: only what is in the list of required tensors can be placed.
    shapes: HashMap<String, Shape>,
    files: &'a FileSet,
    pieces: Vec<Piece>,
    bytes: usize,
}

impl Placer<'_> {
    fn matrix(&mut self, name: &str) -> Result<Matrix, ResidentError> {
        let source = self.source(name)?;
        let data = self.place(name, source.data);
        let scales = source.scales.map_or(0..0, |s| self.place(name, s));
        Ok(Matrix { spec: source.spec, data, scales })
    }

    /// Reserves room that starts on a cache line.
    fn place(&mut self, tensor: &str, span: FileSpan) -> Range<usize> {
        let at = self.bytes.next_multiple_of(64);
        self.bytes = at + span.len as usize;
        self.pieces.push(Piece { tensor: tensor.to_owned(), span, at });
        at..self.bytes
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, ResidentError> {
        let MatrixSource { spec, data, .. } = self.source(name)?;
        let mut bytes = vec![0; data.len as usize];
        self.files
            .read_exact_at(data.file, data.offset, &mut bytes)
            .map_err(|source| ResidentError::Read { tensor: name.to_owned(), source })?;
        let mut values = vec![0.0; spec.cols];
        Kernels::best().decode_row(&WeightRef::new(spec, &bytes, &[]), 0, &mut values);
        Ok(values)
    }

    fn source(&self, name: &str) -> Result<MatrixSource, ResidentError> {
        let Some(shape) = self.shapes.get(name) else { unreachable!("{name} is not in the list of required tensors") };
        Ok(shape.source(name, &self.checkpoint.tensors)?)
    }

    fn optional(&mut self, name: &str) -> Result<Option<Matrix>, ResidentError> {
        match self.checkpoint.tensors.get(name) {
            Some(_) => self.matrix(name).map(Some),
            None => Ok(None),
        }
    }

    fn mlp(&mut self, prefix: &str) -> Result<Mlp, ResidentError> {
        Ok(Mlp {
            gate: self.matrix(&format!("{prefix}.gate_proj.weight"))?,
            up: self.matrix(&format!("{prefix}.up_proj.weight"))?,
            down: self.matrix(&format!("{prefix}.down_proj.weight"))?,
        })
    }

    fn layer(&mut self, arch: &Arch, index: usize, kind: LayerArch) -> Result<Layer, ResidentError> {
        let prefix = format!("model.layers.{index}");
        let mlp = match kind.mlp {
            MlpKind::Dense { .. } => MlpWeights::Dense(self.mlp(&format!("{prefix}.mlp"))?),
            MlpKind::Sparse => MlpWeights::Sparse {
                router: self.matrix(&format!("{prefix}.mlp.gate.weight"))?,
                bias: match arch.moe.router_bias {
                    true => self.vector(&format!("{prefix}.mlp.gate.e_score_correction_bias"))?,
                    false => vec![0.0; arch.moe.experts],
                },
                shared: match arch.moe.shared_width {
                    0 => None,
                    _ => Some(self.mlp(&format!("{prefix}.mlp.shared_experts"))?),
                },
            },
        };
        Ok(Layer {
            arch: kind,
            index,
            input_norm: self.vector(&format!("{prefix}.input_layernorm.weight"))?,
            post_norm: self.vector(&format!("{prefix}.post_attention_layernorm.weight"))?,
            attention: self.attention(arch, &format!("{prefix}.self_attn"), kind)?,
            mlp,
        })
    }

    fn attention(&mut self, arch: &Arch, prefix: &str, kind: LayerArch) -> Result<AttentionWeights, ResidentError> {
        Ok(match arch.attention {
            AttentionArch::Latent(_) => AttentionWeights::Latent(Box::new(self.latent(arch, prefix, kind)?)),
            AttentionArch::Full(_) => AttentionWeights::Full(Box::new(FullWeights {
                q: self.matrix(&format!("{prefix}.q_proj.weight"))?,
                q_norm: self.vector(&format!("{prefix}.q_norm.weight"))?,
                k: self.matrix(&format!("{prefix}.k_proj.weight"))?,
                k_norm: self.vector(&format!("{prefix}.k_norm.weight"))?,
                v: self.matrix(&format!("{prefix}.v_proj.weight"))?,
                o: self.matrix(&format!("{prefix}.o_proj.weight"))?,
            })),
        })
    }

    fn latent(&mut self, arch: &Arch, prefix: &str, kind: LayerArch) -> Result<LatentWeights, ResidentError> {
        let indexer = match (kind.indexer, arch.indexer) {
            (IndexerKind::Full, Some(_)) => Some(IndexerWeights {
                wq_b: self.matrix(&format!("{prefix}.indexer.wq_b.weight"))?,
                wk: self.matrix(&format!("{prefix}.indexer.wk.weight"))?,
                weights_proj: self.matrix(&format!("{prefix}.indexer.weights_proj.weight"))?,
                k_norm: self.vector(&format!("{prefix}.indexer.k_norm.weight"))?,
                k_bias: self.vector(&format!("{prefix}.indexer.k_norm.bias"))?,
            }),
            _ => None,
        };
        Ok(LatentWeights {
            q_a: self.matrix(&format!("{prefix}.q_a_proj.weight"))?,
            q_a_norm: self.vector(&format!("{prefix}.q_a_layernorm.weight"))?,
            q_b: self.matrix(&format!("{prefix}.q_b_proj.weight"))?,
            kv_a: self.matrix(&format!("{prefix}.kv_a_proj_with_mqa.weight"))?,
            kv_a_norm: self.vector(&format!("{prefix}.kv_a_layernorm.weight"))?,
            kv_b: self.matrix(&format!("{prefix}.kv_b_proj.weight"))?,
            o: self.matrix(&format!("{prefix}.o_proj.weight"))?,
            indexer,
        })
    }

    fn mtp(&mut self, arch: &Arch, kind: LayerArch) -> Result<Mtp, ResidentError> {
        let index = arch.layers.len();
        let prefix = format!("model.layers.{index}");
        Ok(Mtp {
            enorm: self.vector(&format!("{prefix}.enorm.weight"))?,
            hnorm: self.vector(&format!("{prefix}.hnorm.weight"))?,
            eh_proj: self.matrix(&format!("{prefix}.eh_proj.weight"))?,
            layer: self.layer(arch, index, kind)?,
            head_norm: self.vector(&format!("{prefix}.shared_head.norm.weight"))?,
            embed: self.optional(&format!("{prefix}.embed_tokens.weight"))?,
            head: self.optional(&format!("{prefix}.shared_head.head.weight"))?,
        })
    }
}

/// Allocates an arena and reads all pieces, which do not overlap and come in order, from as many threads as can be had, each
/// a run of the arena of its own.
pub fn fill(files: &FileSet, pieces: &[Piece], bytes: usize, cancel: &AtomicBool) -> Result<Arena, ResidentError> {
    const READERS: usize = 4;
    type Job<'a, 'b> = Vec<(&'a Piece, &'b mut [u8])>;
    let mut arena = Arena::new(bytes.max(1)).map_err(|source| ResidentError::Memory { bytes, source })?;
    let mut jobs: Vec<Job> = (0..READERS).map(|_| vec![]).collect();
    let (mut rest, mut at) = (arena.as_mut_slice(), 0);
    let share = bytes / READERS + 1;
    for piece in pieces {
        let (_, tail) = rest.split_at_mut(piece.at - at);
        let (own, tail) = tail.split_at_mut(piece.span.len as usize);
        jobs[piece.at / share].push((piece, own));
        (rest, at) = (tail, piece.at + piece.span.len as usize);
    }
    let left = Mutex::new(jobs);
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = || -> Result<(), ResidentError> {
        while let Some(job) = next() {
            for (piece, out) in job {
                read(files, piece, out, cancel)?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // A thread that cannot be started leaves its job to the others; this one takes part and needs no starting.
        let helpers: Vec<_> =
            (1..READERS).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let own = work();
        let all = helpers.into_iter().map(|r| r.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        all.fold(own, Result::and)
    })?;
    Ok(arena)
}

/// Reads a piece, a part at a time, so that nobody who cancels waits for a large tensor.
fn read(files: &FileSet, piece: &Piece, out: &mut [u8], cancel: &AtomicBool) -> Result<(), ResidentError> {
    let mut offset = piece.span.offset;
    for part in out.chunks_mut(LOAD_PART_BYTES) {
        if cancel.load(Ordering::Relaxed) {
            return Err(ResidentError::Cancelled);
        }
        files
            .read_exact_at(piece.span.file, offset, part)
            .map_err(|source| ResidentError::Read { tensor: piece.tensor.clone(), source })?;
        offset += part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::IoMode;
    use std::path::Path;

    #[test]
    fn weights_are_read_to_the_end_unless_somebody_cancels() {
        let checkpoint = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap();
        let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Buffered).unwrap());
        let plan = || Plan::new(&checkpoint, files.clone(), false).unwrap();
        let cancelled = plan().load(&AtomicBool::new(true)).err();
        assert!(matches!(cancelled, Some(ResidentError::Cancelled)), "{cancelled:?}");
        let resident = plan().load(&AtomicBool::new(false)).unwrap();
        let embedding = checkpoint.tensors.get("model.embed_tokens.weight").unwrap();
        let mut expected = vec![0; embedding.bytes as usize];
        files.read_exact_at(embedding.file, embedding.offset, &mut expected).unwrap();
        assert_eq!(resident.arena.as_slice()[resident.embed.data.clone()], expected);
    }
}
