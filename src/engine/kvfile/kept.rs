//! The file of a context while it is used: what of it holds, what is added, what is cut away.

use std::io;
use std::time::Instant;

use super::format::{self, BESIDE_BYTES, Blocks, Header, Place};
use crate::forward::{Form, KvCache};
use crate::limits::{KV_FILE_BUFFER_BYTES, KV_FILE_UNWRITTEN_MAX};

/// Where the bytes of a context are.
pub trait Storage: Send {
    /// As people know it.
    fn name(&self) -> String;
    /// Its length.
    fn len_bytes(&mut self) -> io::Result<u64>;
    /// Fills `out` with what begins at `offset`.
    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`, which is its end. Where that fails, a part may be there.
    fn append(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Cuts away what is beyond `len` bytes.
    fn cut(&mut self, len: u64) -> io::Result<()>;
    /// Makes durable what was written.
    fn sync(&mut self) -> io::Result<()>;
}

/// What the file of a context was to a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct KvFileStats {
    /// Positions that were taken from it.
    pub taken: usize,
    /// Bytes of it that were read, and checked.
    pub read_bytes: u64,
    /// Time that took.
    pub read_s: f64,
    /// Positions that were added to it.
    pub added: usize,
    /// Bytes of those.
    pub written_bytes: u64,
    /// Time that took. That which is added after the last token, and making it durable, is not part of the generation.
    pub write_s: f64,
}

/// A file that contexts are taken from and added to.
pub struct KvFile {
    storage: Box<dyn Storage>,
    writable: bool,
    blocks: Blocks,
    /// Whole blocks.
    buffer: Vec<u8>,
    /// A block of the file, to be compared.
    found: Vec<u8>,
    /// Tokens of the context, as far as they are known, each with the form that it was computed in.
    places: Vec<Place>,
    /// Checksums of the positions that are in the file: read and compared, or written.
    sums: Vec<u64>,
    /// Positions that were there when the generation began.
    begun: usize,
    /// There may be bytes after those that are held.
    tail: bool,
    /// A generation is under way.
    active: bool,
    stats: KvFileStats,
    warnings: Vec<String>,
}

impl KvFile {
    /// Over a storage that begins with `header`, for contexts of up to `context` positions.
    pub fn new(storage: Box<dyn Storage>, header: &Header, context: usize, writable: bool) -> KvFile {
        let blocks = header.blocks();
        KvFile {
            storage,
            writable,
            blocks,
            buffer: vec![0; buffer_bytes(blocks.bytes)],
            found: vec![0; blocks.bytes],
            places: Vec::with_capacity(context),
            sums: Vec::with_capacity(context),
            begun: 0,
            tail: true,
            active: false,
            stats: KvFileStats::default(),
            warnings: Vec::new(),
        }
    }

    /// Bytes that one takes for contexts of `context` positions with `position_bytes` each.
    pub fn room_bytes(position_bytes: usize, context: usize) -> usize {
        let block = position_bytes + BESIDE_BYTES;
        buffer_bytes(block) + block + context * (size_of::<Place>() + size_of::<u64>())
    }

    /// What it was to the last generation.
    pub fn stats(&self) -> KvFileStats {
        self.stats
    }

    /// What was wrong with it.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Forgets the positions of the context from `keep` on: others will take their places.
    pub fn forget(&mut self, keep: usize) {
        self.sums.truncate(keep);
        self.places.truncate(keep);
    }

    /// Begins a generation whose context is the beginning of `prompt` that `kv` has: takes into it what the file has more of
    /// the prompt, as far as it was computed in `form`, where that matters. Positions that are in `kv` now; never all of the
    /// prompt.
    pub fn begin(&mut self, kv: &mut KvCache, prompt: &[u32], form: Option<Form>) -> usize {
        let (began, keep) = (Instant::now(), kv.len());
        assert_eq!(self.places.len(), keep, "places that are known, and those of the context");
        (self.tail, self.active, self.stats) = (true, true, KvFileStats::default());
        // What follows a position that is not in the file is not looked up there.
        if self.held() == keep
            && let Err(error) = self.take(kv, &prompt[..prompt.len() - 1], form)
        {
            self.leave_alone(&error);
        }
        self.begun = self.held();
        self.stats.taken = self.places.len() - keep;
        kv.advance(self.stats.taken);
        self.stats.read_s = began.elapsed().as_secs_f64();
        kv.len()
    }

    /// Positions that are in the file.
    fn held(&self) -> usize {
        self.sums.len()
    }

    /// Checksum of the last of them.
    fn chain(&self) -> u64 {
        self.sums.last().copied().unwrap_or(self.blocks.seed)
    }

    fn take(&mut self, kv: &mut KvCache, tokens: &[u32], form: Option<Form>) -> io::Result<()> {
        let (there, rest) = self.blocks.held(self.storage.len_bytes()?);
        let bytes = self.blocks.bytes;
        while self.held() < there.min(tokens.len()) {
            let count = (self.buffer.len() / bytes).min(there.min(tokens.len()) - self.held());
            let read = &mut self.buffer[..count * bytes];
            self.storage.read(self.blocks.offset(self.sums.len()), read)?;
            self.stats.read_bytes += read.len() as u64;
            for block in read.chunks_exact_mut(bytes) {
                let (held, chain) = (self.sums.len(), self.sums.last().copied().unwrap_or(self.blocks.seed));
                let Some((place, sum)) = format::open(block, chain) else {
                    let name = self.storage.name();
                    self.warnings
                        .push(format!("{name} is damaged behind {held} positions: what follows is computed anew"));
                    return Ok(());
                };
                if place.token != tokens[held] || form.is_some_and(|form| form != place.form) {
                    return Ok(());
                }
                kv.import(held, format::numbers(block));
                self.sums.push(sum);
                self.places.push(place);
            }
        }
        if self.held() == there && rest > 0 {
            let (name, held) = (self.storage.name(), self.held());
            self.warnings.push(format!("{name} ends in the middle of a position, behind {held} whole ones"));
        }
        Ok(())
    }

    /// Makes a note of the tokens that a step has just added to `kv`.
    pub fn note(&mut self, kv: &KvCache, tokens: &[u32], form: Form) {
        let (before, held) = (kv.len() - tokens.len(), self.held());
        assert!(held <= before && before <= self.places.len(), "a step at {before}, {held} kept");
        self.places.truncate(before);
        self.places.extend(tokens.iter().map(|&token| Place { token, form }));
    }

    /// Adds what `kv` has more than the file, once it is more than a few positions. Whether it did.
    pub fn keep(&mut self, kv: &KvCache) -> bool {
        let due = self.active && kv.len() >= self.held() + KV_FILE_UNWRITTEN_MAX;
        if due {
            self.add(kv);
        }
        due
    }

    /// Ends a generation and makes durable what it came to: adds the rest or, where the positions from `doubted` on cannot be
    /// relied on, takes back what it added, and those.
    pub fn end(&mut self, kv: &KvCache, doubted: Option<usize>) {
        if !std::mem::replace(&mut self.active, false) {
            return;
        }
        let keep = doubted.map(|doubted| doubted.min(self.begun));
        if keep.is_none() {
            self.add(kv);
        }
        let began = Instant::now();
        if (self.stats.written_bytes > 0 || keep.is_some_and(|keep| keep < self.held()))
            && let Err(error) = self.settle(keep)
        {
            self.fail(&error);
        }
        self.stats.write_s += began.elapsed().as_secs_f64();
    }

    /// Makes durable what was added, or that all but the first `keep` positions are gone.
    fn settle(&mut self, keep: Option<usize>) -> io::Result<()> {
        if let Some(keep) = keep {
            (self.tail, self.stats.added) = (true, 0);
            self.sums.truncate(keep);
            self.storage.cut(self.blocks.offset(self.held()))?;
        }
        self.storage.sync()
    }

    /// Adds everything that `kv` has more than the file.
    fn add(&mut self, kv: &KvCache) {
        if !self.writable {
            return;
        }
        let began = Instant::now();
        if let Err(error) = self.pass_over(kv) {
            self.leave_alone(&error);
        } else if let Err(error) = self.write(kv) {
            // What was written in part would be found, and the room that it takes would be missing elsewhere.
            let _ = self.storage.cut(self.blocks.offset(self.held()));
            self.fail(&error);
        }
        self.stats.write_s += began.elapsed().as_secs_f64();
    }

    /// Counts as held what the file has already, bit for bit as it would be written: a shorter prompt, or an answer that is
    /// given again, must not cost what lies behind it.
    fn pass_over(&mut self, kv: &KvCache) -> io::Result<()> {
        if !self.tail {
            return Ok(());
        }
        let there = self.blocks.held(self.storage.len_bytes()?).0;
        let block = &mut self.buffer[..self.blocks.bytes];
        while self.sums.len() < there.min(kv.len()) {
            let (held, chain) = (self.sums.len(), self.sums.last().copied().unwrap_or(self.blocks.seed));
            kv.export(held, format::numbers(block));
            let sum = format::seal(block, self.places[held], chain);
            self.storage.read(self.blocks.offset(held), &mut self.found)?;
            if *block != self.found {
                break;
            }
            self.sums.push(sum);
        }
        Ok(())
    }

    fn write(&mut self, kv: &KvCache) -> io::Result<()> {
        let bytes = self.blocks.bytes;
        while self.held() < kv.len() {
            let held = self.held();
            let count = (self.buffer.len() / bytes).min(kv.len() - held);
            // Sums of blocks that are not written count only once they are.
            let mut chain = self.chain();
            for (position, block) in (held..).zip(self.buffer[..count * bytes].chunks_exact_mut(bytes)) {
                kv.export(position, format::numbers(block));
                chain = format::seal(block, self.places[position], chain);
            }
            if self.tail {
                self.storage.cut(self.blocks.offset(held))?;
                self.tail = false;
            }
            self.storage.append(self.blocks.offset(held), &self.buffer[..count * bytes])?;
            self.sums.extend(self.buffer[..count * bytes].chunks_exact(bytes).map(format::sum_of));
            self.stats.added += count;
            self.stats.written_bytes += (count * bytes) as u64;
        }
        Ok(())
    }

    /// Nothing is written any more: whoever cannot read it must not cut it either.
    fn leave_alone(&mut self, error: &io::Error) {
        self.writable = false;
        let (name, held) = (self.storage.name(), self.held());
        self.warnings.push(format!("{name} cannot be read beyond {held} positions, and is left alone: {error}"));
    }

    /// Nothing is written any more.
    fn fail(&mut self, error: &io::Error) {
        self.writable = false;
        let (name, held) = (self.storage.name(), self.held());
        self.warnings.push(format!("{name} cannot be written and holds {held} positions of this context: {error}"));
    }
}

/// Whole blocks of `block` bytes, as many as there is room for.
fn buffer_bytes(block: usize) -> usize {
    (KV_FILE_BUFFER_BYTES / block).max(1) * block
}
