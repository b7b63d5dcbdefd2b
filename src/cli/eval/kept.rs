//! Logits in files. Kept ones are a safetensors file with the tensors `logits` `[windows, positions, vocab]` and `ids`
//! `[windows, tokens]`, so that any program can read and make one; its metadata say at which position of a window the logits
//! begin. Logits alone may come as an array of numpy.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use millstream_io::FileId;
use serde_json::json;

use super::windows::Windows;
use super::{Failure, ids, npy, rows, size};
use crate::checkpoint::{Dtype, header};
use crate::cli::output;
use crate::limits::MAX_IDS_FILE_BYTES;

/// Bytes that the header takes, blanks at its end included: it is written once it is known how many windows there are.
const HEADER_BYTES: usize = 1016;
/// Bytes of an array of numpy in which its head ends.
const NPY_HEAD_BYTES: u64 = 64 << 10;
const FIRST_KEY: &str = "first_position";

/// Logits of a file.
#[derive(Debug)]
pub struct Kept {
    path: PathBuf,
    file: File,
    dtype: Dtype,
    data: u64,
    /// Sequences of tokens, positions of each that have logits, logits of a position.
    pub shape: [usize; 3],
    /// Ids of all sequences, where the file has them, and how many each has.
    pub ids: Option<(Vec<u32>, usize)>,
    /// The first position that has logits, where the file says so.
    pub first: Option<usize>,
    bytes: Vec<u8>,
    row: Vec<f32>,
}

impl Kept {
    /// Opens a file and reads what it says it holds. Logits must be of `vocab` ids.
    pub fn open(path: &Path, vocab: usize) -> Result<Kept, Failure> {
        let mut start = Vec::new();
        let file = File::open(path).map_err(|e| cannot_read(path, &e))?;
        (&file).take(NPY_HEAD_BYTES).read_to_end(&mut start).map_err(|e| cannot_read(path, &e))?;
        match npy::is_npy(&start) {
            true => Kept::array(path, file, &start, vocab),
            false => Kept::tensors(path, file, vocab),
        }
    }

    fn array(path: &Path, file: File, start: &[u8], vocab: usize) -> Result<Kept, Failure> {
        let bytes = file.metadata().map_err(|e| cannot_read(path, &e))?.len();
        let npy::Array { dtype, shape, data } = npy::parse(start, bytes).map_err(|e| cannot_read(path, &e))?;
        Kept::new(path, file, dtype, &shape, data as u64, vocab)
    }

    fn tensors(path: &Path, file: File, vocab: usize) -> Result<Kept, Failure> {
        let hint = "it is a safetensors file with the tensors `logits` and `ids`, or an array of numpy.save";
        let head = header::read(path, FileId(0)).map_err(|e| cannot_read(path, &e).hint(hint))?;
        let tensor = |name: &str| head.tensors.iter().find(|(other, _)| other == name).map(|(_, tensor)| tensor);
        let logits = tensor("logits").ok_or_else(|| cannot_read(path, &"it has no tensor logits").hint(hint))?;
        let mut kept = Kept::new(path, file, logits.dtype, &logits.shape, logits.offset, vocab)?;
        if let Some(tensor) = tensor("ids") {
            let fits = match tensor.shape[..] {
                [_] => kept.shape[0] == 1,
                [windows, _] => windows == kept.shape[0] as u64,
                _ => false,
            };
            if !fits || tensor.bytes > MAX_IDS_FILE_BYTES {
                let found = format!("ids {} do not go with logits {}", tensor.describe(), logits.describe());
                return Err(cannot_read(path, &found).hint("a row of ids for each sequence of logits"));
            }
            let mut bytes = vec![0; tensor.bytes as usize];
            kept.file.read_exact_at(&mut bytes, tensor.offset).map_err(|e| cannot_read(path, &e))?;
            let wrong = || cannot_read(path, &format!("its ids are {}, and ids are whole numbers", tensor.dtype));
            let numbers = rows::integers(tensor.dtype, &bytes).ok_or_else(wrong)?;
            let ids = ids::check(&numbers, vocab).map_err(|e| cannot_read(path, &e))?;
            kept.ids = Some((ids, tensor.shape.last().copied().unwrap_or(0) as usize));
        }
        if let Some(first) = head.metadata.get(FIRST_KEY) {
            let wrong = |_| cannot_read(path, &format!("its {FIRST_KEY} is '{first}'"));
            kept.first = Some(first.parse().map_err(wrong)?);
        }
        Ok(kept)
    }

    fn new(path: &Path, file: File, dtype: Dtype, shape: &[u64], data: u64, vocab: usize) -> Result<Kept, Failure> {
        let shape = match *shape {
            [vocab] => [1, 1, vocab],
            [positions, vocab] => [1, positions, vocab],
            [windows, positions, vocab] => [windows, positions, vocab],
            _ => return Err(cannot_read(path, &format!("its logits have the shape {shape:?}"))),
        };
        if !rows::is_float(dtype) {
            return Err(cannot_read(path, &format!("its logits are {dtype}, and F64, F32, F16 and BF16 are read")));
        }
        let shape @ [windows, positions, found] = shape.map(|dim| dim as usize);
        if found != vocab {
            return Err(cannot_read(path, &format!("its logits are of {found} ids, and the model has {vocab}"))
                .hint("they are of another model"));
        }
        if windows == 0 || positions == 0 {
            return Err(cannot_read(path, &"it has no logits"));
        }
        let bytes = vec![0; shape[2] * dtype.bytes() as usize];
        let path = path.to_owned();
        Ok(Kept { path, file, dtype, data, shape, ids: None, first: None, bytes, row: Vec::with_capacity(shape[2]) })
    }

    /// The logits of one position of those that have some.
    pub fn row(&mut self, window: usize, position: usize) -> Result<&[f32], Failure> {
        let at = self.data + ((window * self.shape[1] + position) * self.bytes.len()) as u64;
        self.file.read_exact_at(&mut self.bytes, at).map_err(|e| cannot_read(&self.path, &e))?;
        rows::floats(self.dtype, &self.bytes, &mut self.row);
        Ok(&self.row)
    }
}

fn cannot_read(path: &Path, cause: &dyn Display) -> Failure {
    Failure::usage(format!("cannot read the logits of {}", path.display())).cause(cause)
}

/// Logits on their way into a file, which stands under its name once it is whole.
pub struct Keeper {
    path: PathBuf,
    made: PathBuf,
    file: BufWriter<File>,
    /// Logits of a window, in bytes.
    window_bytes: u64,
    vocab: usize,
    done: usize,
}

impl Keeper {
    /// Begins the file at `path` for the logits that are scored of `windows`. Refuses where there is no room.
    pub fn create(path: &Path, windows: &Windows, vocab: usize) -> Result<Keeper, Failure> {
        let window_bytes = (windows.scored() * vocab * size_of::<f32>()) as u64;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let free = millstream_io::free_bytes(parent).map_err(|e| cannot_write(path, &e))?;
        let needed = window_bytes * windows.count as u64;
        if needed > free {
            let (needed, free, one) = (size::show(needed), size::show(free), size::show(window_bytes));
            return Err(cannot_write(path, &format!("they take {needed}, {one} a window, and {free} are free"))
                .hint("keep those of fewer windows, with --chunks"));
        }
        let made = output::beside(path);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&made).map_err(|e| cannot_write(path, &e))?);
        file.write_all(&[0; 8 + HEADER_BYTES]).map_err(|e| cannot_write(path, &e))?;
        Ok(Keeper { path: path.to_owned(), made, file, window_bytes, vocab, done: 0 })
    }

    /// Adds the logits of a position.
    pub fn row(&mut self, logits: &[f32]) -> Result<(), Failure> {
        for logit in logits {
            self.file.write_all(&logit.to_le_bytes()).map_err(|e| cannot_write(&self.path, &e))?;
        }
        Ok(())
    }

    /// All of a window is there.
    pub fn end_window(&mut self) {
        self.done += 1;
    }

    /// Gives the file its name, with the windows that are whole; nothing where none is. Returns its bytes.
    pub fn finish(mut self, windows: &Windows) -> Result<u64, Failure> {
        if self.done == 0 {
            return Ok(0);
        }
        self.write_rest(windows).map_err(|e| cannot_write(&self.path, &e))
    }

    fn write_rest(&mut self, windows: &Windows) -> std::io::Result<u64> {
        let (logits, ids) = (self.window_bytes * self.done as u64, (windows.length * self.done * 8) as u64);
        let header = json!({
            "__metadata__": { FIRST_KEY: windows.first.to_string(), "made_by": "millstream eval perplexity" },
            "logits": {
                "dtype": "F32", "shape": [self.done, windows.scored(), self.vocab], "data_offsets": [0, logits],
            },
            "ids": { "dtype": "I64", "shape": [self.done, windows.length], "data_offsets": [logits, logits + ids] },
        });
        let header = format!("{:<HEADER_BYTES$}", header.to_string());
        self.file.flush()?;
        let file = self.file.get_mut();
        // What there is of a window that was not scored to its end.
        file.set_len(8 + header.len() as u64 + logits)?;
        file.seek(SeekFrom::End(0))?;
        for window in 0..self.done {
            let bytes: Vec<u8> = windows.at(window).iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
            file.write_all(&bytes)?;
        }
        file.write_all_at(&(header.len() as u64).to_le_bytes(), 0)?;
        file.write_all_at(header.as_bytes(), 8)?;
        file.sync_all()?;
        fs::rename(&self.made, &self.path)?;
        Ok(8 + header.len() as u64 + logits + ids)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Where it has its name, it is gone already.
        let _ = fs::remove_file(&self.made);
    }
}

fn cannot_write(path: &Path, cause: &dyn Display) -> Failure {
    Failure::work(format!("cannot write the logits to {}", path.display())).cause(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(path: &Path, windows: &Windows, whole: usize) {
        let mut keeper = Keeper::create(path, windows, 3).unwrap();
        for window in 0..whole {
            for position in 0..windows.scored() {
                keeper.row(&[window as f32, position as f32, -0.5]).unwrap();
            }
            keeper.end_window();
        }
        keeper.row(&[9.0; 3]).unwrap();
        keeper.finish(windows).unwrap();
    }

    #[test]
    fn what_is_kept_is_found_again_without_the_window_that_was_not_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kept");
        let windows = Windows::plain((0..12).map(|id| id % 3).collect(), 6, Some(2)).unwrap();
        keep(&path, &windows, 1);
        let mut kept = Kept::open(&path, 3).unwrap();
        assert_eq!((kept.shape, kept.first), ([1, 3, 3], Some(2)));
        assert_eq!(kept.ids, Some((vec![0, 1, 2, 0, 1, 2], 6)));
        assert_eq!(kept.row(0, 2).unwrap(), [0.0, 2.0, -0.5]);
        let again = Windows::plain((0..12).map(|id| id % 3).collect(), 6, Some(2)).unwrap();
        keep(&path, &again, 2);
        assert_eq!(Kept::open(&path, 3).unwrap().row(1, 0).unwrap(), [1.0, 0.0, -0.5]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing beside it");
    }

    #[test]
    fn of_no_whole_window_nothing_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let windows = Windows::plain(vec![1; 4], 4, None).unwrap();
        keep(&dir.path().join("kept"), &windows, 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_holds_no_logits_of_this_model_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kept");
        let windows = Windows::plain(vec![1; 4], 4, None).unwrap();
        keep(&path, &windows, 1);
        let whole = fs::read(&path).unwrap();
        let refused = |vocab| Kept::open(&path, vocab).unwrap_err().text();
        assert!(refused(4).contains("of 3 ids, and the model has 4"));
        assert!(refused(1).contains("3 ids"), "told before its ids are looked at");
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!(refused(3).contains("cut short"));
        fs::write(&path, "hello, this is no file of logits").unwrap();
        assert!(refused(3).contains("hint: it is a safetensors file"));
        fs::write(&path, "").unwrap();
        assert!(refused(3).contains("cannot read the logits"));
    }
}
