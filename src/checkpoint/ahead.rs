//! Pieces of files in the order in which somebody wants them, read ahead of him into a bounded number of buffers.

use super::error::{CheckpointError, Result};
use crate::limits::AHEAD_SLABS;
use millstream_io::{
    Completion, Device, DeviceConfig, DeviceKind, FileSet, FileSpan, IoError, Place, Priority, Read, RejectReason,
    Slab, SlabLayout, SlabPool, Wait, layout, leave, open_device,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Longest time without asking whether to go on.
const PATIENCE: Duration = Duration::from_millis(200);

/// A piece that is there: the spans that were asked for together.
pub(crate) struct Piece {
    slab: Slab,
    places: Vec<Place>,
}

impl Piece {
    /// The bytes of span number so-and-so; none of one that was not asked for.
    pub fn bytes(&self, span: usize) -> &[u8] {
        self.places.get(span).map_or(&[], |place| &self.slab.bytes()[place.at as usize..][..place.len as usize])
    }
}

/// A piece that is being read.
type Awaited = (Vec<Place>, Option<std::result::Result<Slab, IoError>>);

/// Opens the device that reads.
type Open<'a> = &'a dyn Fn(Arc<FileSet>, &SlabPool) -> std::result::Result<Box<dyn Device>, IoError>;

/// Reads pieces, several at a time, and gives them out one after the other. Where not one more thread can be had, which a
/// device needs, each is read when it is asked for.
pub(crate) struct ReadAhead {
    files: Arc<FileSet>,
    pool: SlabPool,
    /// None where there is no thread for one.
    device: Option<Box<dyn Device>>,
    /// Pieces to read, and those of them that are submitted.
    plans: Vec<SlabLayout>,
    submitted: usize,
    /// Number of the first of `window`.
    base: usize,
    window: VecDeque<Awaited>,
}

impl ReadAhead {
    /// Begins to read; each piece is a few spans of `files`, none of them empty.
    pub fn begin(files: FileSet, pieces: &[Vec<FileSpan>]) -> Result<ReadAhead> {
        ReadAhead::begin_through(files, pieces, DeviceKind::Auto)
    }

    /// As [`ReadAhead::begin`], through a device of this kind.
    pub fn begin_through(files: FileSet, pieces: &[Vec<FileSpan>], kind: DeviceKind) -> Result<ReadAhead> {
        let config = DeviceConfig { kind, ..DeviceConfig::default() };
        ReadAhead::begin_on(files, pieces, &|files, pool| open_device(&config, files, pool))
    }

    fn begin_on(files: FileSet, pieces: &[Vec<FileSpan>], open: Open) -> Result<ReadAhead> {
        let files = Arc::new(files);
        let plans: Vec<SlabLayout> =
            pieces.iter().map(|spans| layout(spans, &files)).collect::<std::result::Result<_, _>>()?;
        let slab_bytes = plans.iter().map(|plan| plan.slab_bytes as usize).max().unwrap_or(1);
        let pool = SlabPool::new(slab_bytes, AHEAD_SLABS.min(plans.len()).max(1))?;
        let device = match open(Arc::clone(&files), &pool) {
            Err(IoError::Start { .. }) => None,
            opened => Some(opened?),
        };
        let window = VecDeque::with_capacity(AHEAD_SLABS);
        let mut ahead = ReadAhead { files, pool, device, plans, submitted: 0, base: 0, window };
        ahead.submit()?;
        Ok(ahead)
    }

    /// The next piece; its buffer is read into again once it is dropped. While it has not come, `waiting` is asked now
    /// and then whether to go on. Behind one that cannot be read comes the one after it.
    pub fn next(&mut self, waiting: &mut dyn FnMut() -> Result<()>) -> Result<Piece> {
        if self.device.is_none() {
            return self.read();
        }
        self.submit()?;
        loop {
            if self.window.front().is_some_and(|(_, done)| done.is_some())
                && let Some((places, Some(result))) = self.window.pop_front()
            {
                self.base += 1;
                return Ok(Piece { slab: result?, places });
            }
            let Some(device) = self.device.as_mut().filter(|_| !self.window.is_empty()) else {
                return Err(none_left());
            };
            match device.reap(Wait::AtMost(PATIENCE))? {
                Some(Completion { tag, slab, result, .. }) => {
                    self.window[tag as usize - self.base].1 = Some(result.map(|()| slab));
                }
                None => waiting()?,
            }
        }
    }

    /// The next piece, without a device.
    fn read(&mut self) -> Result<Piece> {
        let (Some(plan), Some(mut slab)) = (self.plans.get(self.base), self.pool.take()) else {
            return Err(none_left());
        };
        self.base += 1;
        for segment in plan.segments.iter() {
            let to = &mut slab.bytes_mut()[segment.at as usize..][..segment.want as usize];
            self.files.read_exact_at(segment.file, segment.offset, to)?;
        }
        Ok(Piece { slab, places: plan.places.clone() })
    }

    /// Submits as many pieces as there are free buffers.
    fn submit(&mut self) -> Result<()> {
        let Some(device) = self.device.as_mut() else { return Ok(()) };
        while let Some(plan) = self.plans.get(self.submitted) {
            let Some(slab) = self.pool.take() else { break };
            let read = Read { tag: self.submitted as u64, priority: Priority::Demand, segments: plan.segments };
            if let Err(rejected) = device.submit(read, slab) {
                match rejected.why {
                    RejectReason::Full if !self.window.is_empty() => break,
                    RejectReason::Full => {
                        return Err(IoError::DeviceDied { cause: "it takes no read".to_owned() }.into());
                    }
                    RejectReason::Dead(error) | RejectReason::Bad(error) => return Err(error.into()),
                }
            }
            self.window.push_back((plan.places.clone(), None));
            self.submitted += 1;
        }
        Ok(())
    }

    /// Whether a file changed while it was read.
    pub fn check_unchanged(&self) -> Result<()> {
        Ok(self.files.check_unchanged()?)
    }
}

fn none_left() -> CheckpointError {
    CheckpointError::Device(IoError::BadRequest { what: "no piece is left to read".to_owned() })
}

impl Drop for ReadAhead {
    /// A drive that hangs is not waited for.
    fn drop(&mut self) {
        if let Some(device) = self.device.take() {
            leave(device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::{Errno, FileId, IoMode, SimConfig, SimFault, sim_device};

    #[test]
    fn pieces_come_in_order_whatever_their_number_and_place() {
        let dir = tempfile::tempdir().unwrap();
        let contents: Vec<Vec<u8>> =
            (1..=2usize).map(|k| (0..200_000).map(|i| (i * k % 251) as u8).collect()).collect();
        let paths: Vec<_> = (0..2).map(|k| dir.path().join(format!("{k}"))).collect();
        paths.iter().zip(&contents).for_each(|(path, bytes)| std::fs::write(path, bytes).unwrap());
        let span = |file: u32, offset: u64, len: u64| FileSpan { file: FileId(file), offset, len };
        let pieces: Vec<Vec<FileSpan>> = (0..40u64)
            .map(|i| vec![span((i % 2) as u32, i * 4801, 5000), span(((i + 1) % 2) as u32, 199_990 - i, 10)])
            .collect();
        let no_thread = |_, _: &SlabPool| Err(IoError::Start { what: "a reader thread", errno: Errno(libc::EAGAIN) });
        let files = || FileSet::open(&paths, IoMode::Auto).unwrap();
        for mut ahead in
            [ReadAhead::begin(files(), &pieces).unwrap(), ReadAhead::begin_on(files(), &pieces, &no_thread).unwrap()]
        {
            for spans in &pieces {
                let piece = ahead.next(&mut || Ok(())).unwrap();
                for (number, span) in spans.iter().enumerate() {
                    let expected = &contents[span.file.0 as usize][span.offset as usize..][..span.len as usize];
                    assert!(piece.bytes(number) == expected, "{span:?}");
                }
                assert!(piece.bytes(spans.len()).is_empty());
            }
            ahead.check_unchanged().unwrap();
            assert!(ahead.next(&mut || Ok(())).is_err(), "there is no further piece");
        }
    }

    #[test]
    fn a_file_that_shrank_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, vec![1; 100_000]).unwrap();
        let files = FileSet::open(std::slice::from_ref(&path), IoMode::Auto).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(50_000).unwrap();
        let pieces = [vec![FileSpan { file: FileId(0), offset: 90_000, len: 10 }]];
        let mut ahead = ReadAhead::begin(files, &pieces).unwrap();
        let error = ahead.next(&mut || Ok(())).err().unwrap().to_string();
        assert!(error.contains("shard") && error.contains("file ends early"), "{error}");
    }
    #[test]
    fn a_drive_that_fails_is_an_error_with_file_and_place_and_nothing_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let pieces: Vec<Vec<FileSpan>> =
            (0..20u64).map(|i| vec![FileSpan { file: FileId(0), offset: i * 50_000, len: 50_000 }]).collect();
        // Every request of the eighth call and those after it.
        let script = (7..60).map(|call| (call, SimFault::Errno(5))).collect();
        let sim = SimConfig { script, ..SimConfig::calm(3) };
        let files = FileSet::open(std::slice::from_ref(&path), IoMode::Auto).unwrap();
        let mut ahead = ReadAhead::begin_on(files, &pieces, &|files, pool| sim_device(&sim, files, pool)).unwrap();
        let error = (0..pieces.len()).find_map(|_| ahead.next(&mut || Ok(())).err()).unwrap();
        let CheckpointError::Device(IoError::Read { range, errno }) = &error else { panic!("{error}") };
        assert_eq!((&*range.path, errno.0), (path.as_path(), 5));
        assert!(error.to_string().contains("shard"), "{error}");
    }
}
