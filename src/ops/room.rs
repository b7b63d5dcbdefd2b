//! Counts buffers as they are made, or in their place, so that what a budget subtracts is what will be allocated.

/// A tally of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    bytes: u64,
    counts_only: bool,
}

impl Room {
    /// A tally of what would be made: every buffer is counted, and is empty. What is built of those serves for nothing.
    pub fn counting() -> Room {
        Room { counts_only: true, ..Room::default() }
    }

    /// Zeroed floats. The system gives their pages when they are first written.
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        vec![0.0; self.add_elements::<f32>(count)]
    }

    /// `count` times `value`.
    pub fn filled<T: Clone>(&mut self, value: T, count: usize) -> Vec<T> {
        vec![value; self.add_elements::<T>(count)]
    }

    /// An empty vector with room for `count` elements.
    pub fn empty<T>(&mut self, count: usize) -> Vec<T> {
        Vec::with_capacity(self.add_elements::<T>(count))
    }

    /// The first `count` of `elements`.
    pub fn collected<T>(&mut self, count: usize, elements: impl Iterator<Item = T>) -> Vec<T> {
        let count = self.add_elements::<T>(count);
        let mut vector = Vec::with_capacity(count);
        vector.extend(elements.take(count));
        vector
    }

    /// What `make` makes, which takes `bytes`; nothing of it where it is only counted.
    pub fn made<T: Default>(&mut self, bytes: usize, make: impl FnOnce() -> T) -> T {
        self.add(bytes);
        if self.counts_only { T::default() } else { make() }
    }

    /// Counts `bytes` more.
    pub fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts elements; how many of them are to be made.
    fn add_elements<T>(&mut self, count: usize) -> usize {
        self.add(count.saturating_mul(size_of::<T>()));
        if self.counts_only { 0 } else { count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_only_counted_is_as_much_and_takes_nothing() {
        let take = |room: &mut Room| {
            let (floats, ids, none) = (room.floats(10), room.filled(7u16, 3), room.empty::<u64>(5));
            let squares = room.collected(4, (0u32..).map(|n| n * n));
            let made = room.made(100, || vec![1u8; 100]);
            (floats, ids, none.capacity(), squares, made)
        };
        let (mut made, mut counted) = (Room::default(), Room::counting());
        assert_eq!(take(&mut made), (vec![0.0; 10], vec![7; 3], 5, vec![0, 1, 4, 9], vec![1; 100]));
        assert_eq!(take(&mut counted), (vec![], vec![], 0, vec![], vec![]));
        // 40 + 6 + 40 + 16 + 100.
        assert_eq!([made.bytes(), counted.bytes()], [202, 202]);
        // More than there is memory for anywhere.
        assert!(counted.floats(1 << 60).is_empty());
    }
}
