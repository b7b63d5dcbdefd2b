//! A small safetensors reader and writer of its own, so that tests do not judge the engine's code by itself.
#![allow(dead_code)]

use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// One tensor with its bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

impl Tensor {
    pub fn new(name: &str, dtype: &str, shape: &[u64], data: Vec<u8>) -> Tensor {
        Tensor { name: name.to_owned(), dtype: dtype.to_owned(), shape: shape.to_vec(), data }
    }
}

/// A shard in memory.
#[derive(Clone, Debug, Default)]
pub struct Shard {
    pub tensors: Vec<Tensor>,
    pub metadata: Map<String, Value>,
}

impl Shard {
    pub fn read(path: &Path) -> Shard {
        let bytes = fs::read(path).unwrap();
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..][..header_bytes]).unwrap();
        let data = &bytes[8 + header_bytes..];
        let mut shard = Shard::default();
        for (name, value) in header {
            if name == "__metadata__" {
                shard.metadata = value.as_object().unwrap().clone();
                continue;
            }
            let offsets: Vec<usize> = serde_json::from_value(value["data_offsets"].clone()).unwrap();
            shard.tensors.push(Tensor {
                name,
                dtype: value["dtype"].as_str().unwrap().to_owned(),
                shape: serde_json::from_value(value["shape"].clone()).unwrap(),
                data: data[offsets[0]..offsets[1]].to_vec(),
            });
        }
        shard
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("{name}"))
    }

    pub fn get_mut(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub fn remove(&mut self, name: &str) -> Tensor {
        let index = self.tensors.iter().position(|tensor| tensor.name == name).unwrap();
        self.tensors.remove(index)
    }

    pub fn header(&self) -> Map<String, Value> {
        let mut header = Map::new();
        if !self.metadata.is_empty() {
            header.insert("__metadata__".to_owned(), Value::Object(self.metadata.clone()));
        }
        let mut begin = 0;
        for tensor in &self.tensors {
            let end = begin + tensor.data.len();
            header.insert(
                tensor.name.clone(),
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}),
            );
            begin = end;
        }
        header
    }

    pub fn data(&self) -> Vec<u8> {
        self.tensors.iter().flat_map(|tensor| tensor.data.iter().copied()).collect()
    }

    pub fn write(&self, path: &Path) {
        fs::write(path, file_bytes(&Value::Object(self.header()).to_string(), &self.data())).unwrap();
    }
}

/// A shard file of this header text, padded with spaces to 8 bytes, and this data.
pub fn file_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    let mut header = header.as_bytes().to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    bytes
}

/// The tiny random model of the repository.
pub fn tiny_model() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-glm-moe-dsa"))
}

/// The tiny random model of the other family.
pub fn tiny_olmoe() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-olmoe"))
}

/// A writable copy of a tiny model, gone when dropped.
pub struct Model {
    pub dir: tempfile::TempDir,
}

impl Model {
    pub fn tiny() -> Model {
        Model::copy_of(tiny_model())
    }

    pub fn copy_of(source: &Path) -> Model {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(source).unwrap() {
            let path = entry.unwrap().path();
            fs::write(dir.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
        }
        Model { dir }
    }

    /// As [`Model::copy_of`], without the directories in it.
    pub fn copy_of_files(source: &Path) -> Model {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(source).unwrap().map(Result::unwrap).filter(|e| e.path().is_file()) {
            fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        Model { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn shard_path(&self) -> PathBuf {
        self.path().join("model.safetensors")
    }

    pub fn edit_json(&self, file: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.path().join(file);
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(value.as_object_mut().unwrap());
        fs::write(&path, value.to_string()).unwrap();
    }

    pub fn edit_config(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        self.edit_json("config.json", edit);
    }

    pub fn edit_shard(&self, edit: impl FnOnce(&mut Shard)) {
        let mut shard = Shard::read(&self.shard_path());
        edit(&mut shard);
        shard.write(&self.shard_path());
    }

    /// Rewrites the header as JSON, leaving the data as it is.
    pub fn edit_header(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let shard = Shard::read(&self.shard_path());
        let mut header = shard.header();
        edit(&mut header);
        let bytes = file_bytes(&Value::Object(header).to_string(), &shard.data());
        fs::write(self.shard_path(), bytes).unwrap();
    }

    /// Splits the model into two shards with an index; tensors from number `at` on go to the second.
    pub fn split(&self, at: usize) {
        let mut first = Shard::read(&self.shard_path());
        let second = Shard { tensors: first.tensors.split_off(at), ..Shard::default() };
        fs::remove_file(self.shard_path()).unwrap();
        let mut weight_map = Map::new();
        for (number, shard) in [first, second].into_iter().enumerate() {
            let name = format!("model-0000{}-of-00002.safetensors", number + 1);
            for tensor in &shard.tensors {
                weight_map.insert(tensor.name.clone(), Value::from(name.clone()));
            }
            shard.write(&self.path().join(name));
        }
        let index = json!({"metadata": {}, "weight_map": weight_map});
        fs::write(self.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}
