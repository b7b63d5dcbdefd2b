//! The weights that stay in memory: everything but the routed experts.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::limits::{PAGE_BYTES, PLACED_BYTES_MIN};
use millstream_io::{Arena, FileSet, FileSpan};

use super::load::{Content, LoadError, Loaded, Piece, fill, scratch_bytes};
use super::weights::{
    AttentionWeights, FullWeights, IndexerWeights, LatentWeights, Layer, Matrix, Mlp, MlpWeights, Mtp,
};
use crate::checkpoint::arch::{Arch, AttentionArch, IndexerKind, LayerArch, MlpKind};
use crate::checkpoint::convert::Widths;
use crate::checkpoint::finite::{self, BadNumber};
use crate::checkpoint::required::Role;
use crate::checkpoint::{Checkpoint, MatrixSource, Required};
use crate::kernels::{Kernels, MatrixSpec, WeightRef};
use crate::limits::WEIGHT_BELOW;

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
    /// Every matrix as it is stored, and what it is for.
    stored: Vec<(Role, MatrixSpec)>,
    /// Matrices that were to become what they are too narrow for.
    narrow: usize,
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
    /// Places every resident matrix of `checkpoint`, those with a width in what that makes of them; vectors (norms, biases)
    /// are small and read here.
    pub fn new(
        checkpoint: &Checkpoint,
        files: Arc<FileSet>,
        with_mtp: bool,
        widths: &Widths,
    ) -> Result<Plan, LoadError> {
        let arch = &checkpoint.arch;
        let mut p = Placer::new(checkpoint, &files, widths);
        let parts = p.parts(arch, 0..arch.layers.len(), arch.vocab)?;
        let mtp = match arch.mtp.filter(|_| with_mtp) {
            Some(kind) => Some(p.mtp(arch, kind)?),
            None => None,
        };
        let Placer { pieces, bytes, stored, narrow, .. } = p;
        Ok(Plan { files, pieces, bytes, stored, narrow, model: Parts { mtp, ..parts } })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that they would take as they are stored.
    pub fn stored_bytes(&self) -> usize {
        self.stored.iter().map(|(_, spec)| spec.format.total_bytes(spec.rows, spec.cols)).sum()
    }

    /// Bytes that they would take in these widths; `None` where one is stored so that it cannot be had in its width.
    pub fn bytes_in(&self, widths: &Widths) -> Option<usize> {
        let of = |(role, spec): &(Role, MatrixSpec)| {
            widths.held(*role, spec.cols, spec.format).ok().map(|held| held.total_bytes(spec.rows, spec.cols))
        };
        self.stored.iter().map(of).sum()
    }

    /// How many there are.
    pub fn matrices(&self) -> usize {
        self.stored.len()
    }

    /// Matrices that stay as they are although something wider, or another format as wide, was asked for.
    pub fn narrow(&self) -> usize {
        self.narrow
    }

    /// Bytes that loading takes besides, where `threads` compute.
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        scratch_bytes(&self.files, &self.pieces, threads)
    }

    /// Loads them all into one arena, quantizing in as many as `threads`; `cancel` is looked at every few megabytes.
    pub fn load(self, threads: usize, cancel: &AtomicBool, loaded: &Loaded) -> Result<Resident, LoadError> {
        let arena = fill(&self.files, &self.pieces, self.bytes, threads, cancel, loaded)?;
        let Parts { embed, head, final_norm, layers, mtp } = self.model;
        Ok(Resident { arena, bytes: self.bytes, embed, head, final_norm, layers, mtp })
    }
}

/// A slice of a model with zeros for its matrices, which take as long to compute with as weights do. Nothing but vectors is
/// read.
pub struct Blank {
    bytes: usize,
    model: Parts,
}

impl Blank {
    /// These layers of `checkpoint` only, numbered anew, the first `vocab` rows of the head, and of an embedding that is not
    /// the head that of the first token. Once matrices take `least` bytes, the next ones lie where the first do: zeros are
    /// zeros, and who computes with all of them in turn meets the same ones again after `least` bytes of others.
    pub fn slice(
        checkpoint: &Checkpoint,
        files: &FileSet,
        layers: &[usize],
        vocab: usize,
        widths: &Widths,
        least: usize,
    ) -> Result<Blank, LoadError> {
        let mut placer = Placer { again_after: least, ..Placer::new(checkpoint, files, widths) };
        let model = placer.parts(&checkpoint.arch, layers.iter().copied(), vocab)?;
        Ok(Blank { bytes: placer.most.max(placer.bytes), model })
    }

    /// Bytes that the zeros take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes them.
    pub fn make(self) -> Result<Resident, LoadError> {
        let bytes = self.bytes;
        let arena = Arena::new(bytes.max(1)).map_err(|source| LoadError::Memory { bytes, source })?;
        let Parts { embed, head, final_norm, layers, mtp } = self.model;
        Ok(Resident { arena, bytes, embed, head, final_norm, layers, mtp })
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

/// Gives each matrix its place in the arena.
struct Placer<'a> {
    checkpoint: &'a Checkpoint,
    /// All tensors by name: only what is in the list of required tensors can be placed.
    required: HashMap<String, Required>,
    files: &'a FileSet,
    widths: &'a Widths,
    pieces: Vec<Piece>,
    bytes: usize,
    /// Once so many bytes are placed, the next matrix lies where the first does.
    again_after: usize,
    /// Bytes that there were when that happened, at most.
    most: usize,
    stored: Vec<(Role, MatrixSpec)>,
    narrow: usize,
}

impl<'a> Placer<'a> {
    /// A place for each matrix.
    fn new(checkpoint: &'a Checkpoint, files: &'a FileSet, widths: &'a Widths) -> Placer<'a> {
        let required = Checkpoint::resident(&checkpoint.arch).map(|tensor| (tensor.name.clone(), tensor)).collect();
        Placer {
            checkpoint,
            required,
            files,
            widths,
            pieces: vec![],
            bytes: 0,
            again_after: usize::MAX,
            most: 0,
            stored: vec![],
            narrow: 0,
        }
    }

    /// Layers of these numbers, and as many rows of embedding and head as the vocabulary has, or of the embedding one.
    fn parts(&mut self, arch: &Arch, layers: impl Iterator<Item = usize>, vocab: usize) -> Result<Parts, LoadError> {
        let embedded = if arch.tied_head || vocab == arch.vocab { vocab } else { 1 };
        let embed = self.matrix_of("model.embed_tokens.weight", embedded)?;
        let head = match arch.tied_head {
            true => embed.clone(),
            false => self.matrix_of("lm_head.weight", vocab)?,
        };
        let final_norm = self.vector("model.norm.weight")?;
        let layer = |(index, named)| Ok(Layer { index, ..self.layer(arch, named, arch.layers[named])? });
        let layers = layers.enumerate().map(layer).collect::<Result<_, LoadError>>()?;
        Ok(Parts { embed, head, final_norm, layers, mtp: None })
    }

    fn matrix(&mut self, name: &str) -> Result<Matrix, LoadError> {
        self.matrix_of(name, usize::MAX)
    }

    /// The first rows of a matrix, at most so many.
    fn matrix_of(&mut self, name: &str, rows: usize) -> Result<Matrix, LoadError> {
        if self.bytes >= self.again_after {
            (self.most, self.bytes) = (self.most.max(self.bytes), 0);
        }
        let mut source = self.source(name)?;
        if rows < source.spec.rows {
            source.spec.rows = rows;
            source.data.len = source.spec.data_bytes() as u64;
            source.scales = source.scales.map(|scales| FileSpan { len: source.spec.scale_bytes() as u64, ..scales });
        }
        let (spec, role) = (source.spec, self.required(name).role);
        self.stored.push((role, spec));
        let held = self.widths.held(role, spec.cols, spec.format).map_err(|asked| LoadError::Requantized {
            file: self.files.path(source.data.file).display().to_string(),
            tensor: name.to_owned(),
            stored: spec.format,
            asked,
        })?;
        if held == spec.format {
            self.narrow += usize::from(self.widths.target(role, spec.cols, held).is_some_and(|asked| asked != held));
            let data = self.read(name, source.data);
            let scales = source.scales.map_or(0..0, |s| self.read(name, s));
            return Ok(Matrix { spec, data, scales });
        }
        let spec = MatrixSpec { format: held, ..spec };
        let (data, scales) = (self.place(spec.data_bytes()), self.place(spec.scale_bytes()));
        let content = Content::Encoded { source, target: held, scales_at: scales.start };
        self.pieces.push(Piece { tensor: name.to_owned(), at: data.start, content });
        Ok(Matrix { spec, data, scales })
    }

    /// Room for bytes that stay as they are. Many of them lie in a page of memory as they do in one of the file, so that a
    /// direct read puts them there.
    fn read(&mut self, tensor: &str, span: FileSpan) -> Range<usize> {
        let (align, offset) = (self.files.align() as usize, span.offset as usize);
        let room = match align <= PAGE_BYTES && span.len as usize >= PLACED_BYTES_MIN {
            true => {
                let at = self.bytes + (offset + align - self.bytes % align) % align;
                self.bytes = at + span.len as usize;
                at..self.bytes
            }
            false => self.place(span.len as usize),
        };
        self.pieces.push(Piece { tensor: tensor.to_owned(), at: room.start, content: Content::Stored(span) });
        room
    }

    /// Reserves room that starts on a cache line.
    fn place(&mut self, bytes: usize) -> Range<usize> {
        let at = self.bytes.next_multiple_of(64);
        self.bytes = at + bytes;
        at..self.bytes
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>, LoadError> {
        let MatrixSource { spec, data, .. } = self.source(name)?;
        let mut bytes = vec![0; data.len as usize];
        self.files
            .read_exact_at(data.file, data.offset, &mut bytes)
            .map_err(|source| LoadError::Read { tensor: name.to_owned(), source })?;
        let mut values = vec![0.0; spec.cols];
        Kernels::best().decode_row(&WeightRef::new(spec, &bytes, &[]), 0, &mut values);
        let is_bad = |value: &&f32| !finite::is_weight(**value);
        if let Some((index, &value)) = values.iter().enumerate().find(|(_, value)| is_bad(value)) {
            let others = values[index + 1..].iter().filter(is_bad).count() as u64;
            let (shard, tensor) = (self.files.path(data.file).to_owned(), name.to_owned());
            let (row, index, below) = (Some(0), index as u64, WEIGHT_BELOW);
            return Err(BadNumber { shard, tensor, row, index, value, below, others }.into());
        }
        Ok(values)
    }

    fn required(&self, name: &str) -> &Required {
        let Some(tensor) = self.required.get(name) else {
            unreachable!("{name} is not in the list of required tensors")
        };
        tensor
    }

    fn source(&self, name: &str) -> Result<MatrixSource, LoadError> {
        Ok(self.required(name).source(&self.checkpoint.tensors)?)
    }

    fn optional(&mut self, name: &str) -> Result<Option<Matrix>, LoadError> {
        match self.checkpoint.tensors.get(name) {
            Some(_) => self.matrix(name).map(Some),
            None => Ok(None),
        }
    }

    fn mlp(&mut self, prefix: &str) -> Result<Mlp, LoadError> {
        Ok(Mlp {
            gate: self.matrix(&format!("{prefix}.gate_proj.weight"))?,
            up: self.matrix(&format!("{prefix}.up_proj.weight"))?,
            down: self.matrix(&format!("{prefix}.down_proj.weight"))?,
        })
    }

    fn layer(&mut self, arch: &Arch, index: usize, kind: LayerArch) -> Result<Layer, LoadError> {
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

    fn attention(&mut self, arch: &Arch, prefix: &str, kind: LayerArch) -> Result<AttentionWeights, LoadError> {
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

    fn latent(&mut self, arch: &Arch, prefix: &str, kind: LayerArch) -> Result<LatentWeights, LoadError> {
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

    fn mtp(&mut self, arch: &Arch, kind: LayerArch) -> Result<Mtp, LoadError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::IoMode;
    use std::path::Path;

    #[test]
    fn weights_are_read_to_the_end_unless_somebody_cancels() {
        let checkpoint = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/glm-tales")).unwrap();
        let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Buffered).unwrap());
        let plan = || Plan::new(&checkpoint, files.clone(), false, &Widths::default()).unwrap();
        let cancelled = plan().load(1, &AtomicBool::new(true), &Loaded::default()).err();
        assert!(matches!(cancelled, Some(LoadError::Cancelled)), "{cancelled:?}");
        let resident = plan().load(1, &AtomicBool::new(false), &Loaded::default()).unwrap();
        let embedding = checkpoint.tensors.get("model.embed_tokens.weight").unwrap();
        let mut expected = vec![0; embedding.bytes as usize];
        files.read_exact_at(embedding.file, embedding.offset, &mut expected).unwrap();
        assert_eq!(resident.arena.as_slice()[resident.embed.data.clone()], expected);
    }
}
