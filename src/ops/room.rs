//! Counts buffers as they are made, so that what a budget subtracts is what was allocated.

/// A tally of allocated bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    bytes: u64,
}

impl Room {
    /// Zeroed floats. The system gives their pages when they are first written.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        self.counted(vec![0.0; count])
    }

    /// An empty vector with room for `count` elements.
    pub fn empty<T>(&mut self, count: usize) -> Vec<T> {
        self.counted(Vec::with_capacity(count))
    }

    /// Counts a vector that was made elsewhere.
    pub fn counted<T>(&mut self, vector: Vec<T>) -> Vec<T> {
        self.add(vector.capacity() * size_of::<T>());
        vector
    }

    /// Counts `bytes` more.
    pub fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
