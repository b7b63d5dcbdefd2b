//! A text scored once with the weights as they are, then with each container.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::census::Census;
use crate::checkpoint::convert::{Cancel, ConvertOptions, convert_opened};
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::engine::quality::{Quality, Window};
use crate::engine::{Engine, EngineConfig, Finish};

use super::arms::Arm;
use super::scratch::Scratch;
use super::{Base, bundled, job};
use crate::cli::render::Waiting;
use crate::cli::{Failure, cold, hanging, render};

/// What to do about logits that are not finite.
const NO_DISTRIBUTION_HINT: &str = "weights or memory are damaged, or values beyond what the arithmetic holds: millstream doctor --deep reads the whole model";

/// What every arm is measured with.
pub struct Study<'a> {
    pub source: &'a Checkpoint,
    pub windows: &'a [Vec<u32>],
    pub engine: EngineConfig,
    pub scratch: &'a Scratch,
    /// Raised when the user wants it to end.
    pub stop: Arc<AtomicBool>,
    pub quiet: bool,
}

/// Measures every arm that can be made; whether the user stopped it comes last.
pub fn measure(study: &Study, mut arms: Vec<Arm>) -> Result<(Base, Vec<Arm>, bool), Failure> {
    let waiting = Waiting::begin("scoring the weights as they are", study.quiet);
    let logits = study.scratch.path("logits");
    let mut base = study.describe()?;
    let Some(resident_bytes) = study.keep_logits(&logits)? else { return Ok((base, arms, true)) };
    base.resident_bytes = resident_bytes;
    let count = arms.len();
    for (number, arm) in arms.iter_mut().enumerate().filter(|(_, arm)| arm.failed.is_none()) {
        waiting.say(format!("precision {} of {count}, {}", number + 1, arm.precision));
        match study.arm(arm, &logits) {
            Ok(Some(windows)) => {
                let nll: f64 = windows.iter().map(|window| window.base_nll).sum();
                let tokens: usize = windows.iter().map(|window| window.tokens).sum();
                base.perplexity = Some((nll / tokens.max(1) as f64).exp());
                arm.quality = Quality::of(&windows);
            }
            Ok(None) => return Ok((base, arms, true)),
            Err(failure) => arm.failed = Some(failure),
        }
    }
    Ok((base, arms, false))
}

impl Study<'_> {
    fn describe(&self) -> Result<Base, Failure> {
        let census = Census::take(self.source).map_err(|e| Failure::of(&e).hint(e.hint()))?;
        Ok(Base {
            formats: self.source.formats().map(|format| format.to_string()).collect(),
            bytes: census.used().bytes,
            expert_bytes: expert_bytes(self.source),
            resident_bytes: 0,
            perplexity: None,
        })
    }

    /// Scores the source and writes its logits. Returns the bytes of weights that stay in memory; `None` where the user
    /// stopped it.
    fn keep_logits(&self, path: &Path) -> Result<Option<u64>, Failure> {
        let cannot = |e: std::io::Error| Failure::work(format!("cannot write {}", path.display())).cause(e);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(cannot)?);
        let Some(mut engine) = self.open(bundled::open(&self.source.dir)?)? else { return Ok(None) };
        let mut written = Ok(());
        for window in self.windows {
            let mut take = |logits: &[f32]| {
                for logit in logits {
                    if written.is_ok() {
                        written = file.write_all(&logit.to_le_bytes());
                    }
                }
            };
            if engine.score_to(window, &self.stop, &mut take).map_err(job::engine_failure)? == Finish::Interrupted {
                hanging::leave(engine, self.quiet);
                return Ok(None);
            }
        }
        written.and_then(|()| file.flush()).map_err(cannot)?;
        Ok(Some(engine.budget().resident))
    }

    /// Makes the container, scores it against the logits that were kept, and removes it; `None` where the user stopped it.
    fn arm(&self, arm: &mut Arm, logits: &Path) -> Result<Option<Vec<Window>>, Failure> {
        let dir = self.scratch.path("model");
        let options = ConvertOptions { cancel: Some(Cancel(self.stop.clone())), ..arm.precision.options() };
        let made = convert_opened(self.source, &dir, &options, &mut |_| ());
        let measured = match made {
            Ok(_) => self.compare(arm, &dir, logits),
            Err(CheckpointError::Interrupted { .. }) => Ok(None),
            Err(e) => Err(Failure::of(&e).hint(e.hint())),
        };
        // Whatever became of it, the next one needs its room.
        let removed = fs::remove_dir_all(&dir);
        if let (Ok(Some(_)), Err(error)) = (&measured, removed) {
            return Err(Failure::work(format!("cannot remove {}", dir.display())).cause(error));
        }
        measured
    }

    fn compare(&self, arm: &mut Arm, dir: &Path, logits: &Path) -> Result<Option<Vec<Window>>, Failure> {
        let cannot = |e: std::io::Error| Failure::work(format!("cannot read {}", logits.display())).cause(e);
        let mut base = Rows::open(logits, self.source.arch.vocab).map_err(cannot)?;
        let checkpoint = bundled::open(dir)?;
        arm.expert_bytes = expert_bytes(&checkpoint);
        let Some(mut engine) = self.open(checkpoint)? else { return Ok(None) };
        arm.resident_bytes = engine.budget().resident;
        let mut windows = Vec::with_capacity(self.windows.len());
        for ids in self.windows {
            let (mut window, mut position, mut read) = (Window::default(), 0, Ok(Ok(())));
            let mut take = |logits: &[f32]| {
                for row in logits.chunks_exact(self.source.arch.vocab) {
                    if let Ok(Ok(())) = read {
                        read = base.next().map(|base| window.add(base, row, ids.get(position + 1).copied()));
                    }
                    position += 1;
                }
            };
            if engine.score_to(ids, &self.stop, &mut take).map_err(job::engine_failure)? == Finish::Interrupted {
                hanging::leave(engine, self.quiet);
                return Ok(None);
            }
            read.map_err(cannot)?.map_err(|error| Failure::of(&error).hint(NO_DISTRIBUTION_HINT))?;
            windows.push(window);
        }
        engine.warnings().iter().for_each(|line| render::note(self.quiet && !engine.warns_of_damage(), line));
        Ok(Some(windows))
    }

    fn open(&self, checkpoint: Checkpoint) -> Result<Option<Engine>, Failure> {
        cold::open(checkpoint, &self.engine, &self.stop, self.quiet).map_err(job::engine_failure_as_stored)
    }
}

/// Bytes of a routed expert, on average.
fn expert_bytes(checkpoint: &Checkpoint) -> u64 {
    let (mut bytes, mut experts) = (0, 0);
    for expert in checkpoint.routed().flatten() {
        (bytes, experts) = (bytes + expert.bytes(), experts + 1);
    }
    bytes / experts.max(1)
}

/// Logits that were kept, a position at a time.
struct Rows {
    file: BufReader<File>,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl Rows {
    fn open(path: &Path, vocab: usize) -> std::io::Result<Rows> {
        let file = BufReader::with_capacity(1 << 20, File::open(path)?);
        Ok(Rows { file, bytes: vec![0; vocab * size_of::<f32>()], row: Vec::with_capacity(vocab) })
    }

    fn next(&mut self) -> std::io::Result<&[f32]> {
        self.file.read_exact(&mut self.bytes)?;
        self.row.clear();
        self.row.extend(self.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(&self.row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_model_is_not_loaded_once_the_user_stopped_it() {
        let below = tempfile::tempdir().unwrap();
        let scratch = Scratch::make(below.path(), fs::metadata(below.path()).unwrap().uid()).unwrap();
        let open = || Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-olmoe")).unwrap();
        let (source, engine) = (open(), EngineConfig::new(1 << 30));
        let stop = Arc::new(AtomicBool::new(true));
        let study = Study { source: &source, windows: &[vec![1, 2]], engine, scratch: &scratch, stop, quiet: true };
        assert!(study.open(open()).unwrap().is_none());
        assert_eq!(study.keep_logits(&scratch.path("logits")).unwrap(), None);
    }
}
