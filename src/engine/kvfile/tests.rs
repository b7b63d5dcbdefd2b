//! The file of a context over a storage in memory: killed anywhere, damaged anywhere, full anywhere.

use std::io;
use std::sync::{Arc, Mutex};

use super::format::Header;
use super::kept::{KvFile, Storage};
use crate::checkpoint::Arch;
use crate::forward::{Form, KvBits, KvCache};
use crate::limits::KV_FILE_UNWRITTEN_MAX;

const CONTEXT: usize = 64;
const FORM: Form = Form::Absorbed;

/// What was done to a storage.
#[derive(Clone, Debug)]
enum Change {
    Cut(u64),
    Append(u64, Vec<u8>),
}

#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    changes: Vec<Change>,
    /// It takes no more than so many bytes.
    room: Option<usize>,
}

impl Disk {
    fn apply(bytes: &mut Vec<u8>, change: &Change, part: usize) {
        match change {
            Change::Cut(len) => bytes.truncate(*len as usize),
            Change::Append(offset, added) => {
                assert_eq!(bytes.len() as u64, *offset, "written behind the end or before it");
                bytes.extend(&added[..part.min(added.len())]);
            }
        }
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Disk>>);

impl Shared {
    fn holding(bytes: &[u8]) -> Shared {
        Shared(Arc::new(Mutex::new(Disk { bytes: bytes.to_vec(), ..Disk::default() })))
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().bytes.clone()
    }
}

impl Storage for Shared {
    fn name(&self) -> String {
        "a.kv".to_owned()
    }

    fn len_bytes(&mut self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }

    fn read(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let disk = self.0.lock().unwrap();
        let found = disk.bytes.get(offset as usize..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn append(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        let change = Change::Append(offset, bytes.to_vec());
        let room = disk.room.map_or(bytes.len(), |room| room - disk.bytes.len());
        Disk::apply(&mut disk.bytes, &change, room);
        disk.changes.push(change);
        if room < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        let mut disk = self.0.lock().unwrap();
        disk.bytes.truncate(len as usize);
        disk.changes.push(Change::Cut(len));
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn cache() -> KvCache {
    KvCache::new(&Arch::small(), CONTEXT, false, KvBits::Bits32)
}

fn header() -> Header {
    let widths = cache().widths().map(|(row, key)| (row as u32, key as u32)).collect();
    Header { model: 1, arithmetic: 2, bits: KvBits::Bits32, widths }
}

/// What a model would keep of the last of `tokens`: it depends on all of them.
fn row(tokens: &[u32], bytes: &mut [u8]) {
    let hash = tokens.iter().fold(7u32, |hash, token| hash.wrapping_mul(31).wrapping_add(*token));
    for (i, number) in bytes.as_chunks_mut().0.iter_mut().enumerate() {
        *number = ((hash % 9973) as f32 + i as f32 / 8.0).to_le_bytes();
    }
}

/// Puts tokens into `kv` as a step does.
fn step(file: &mut KvFile, kv: &mut KvCache, all: &[u32], rows: usize, form: Form) {
    file.keep(kv);
    let mut bytes = vec![0; kv.position_bytes()];
    let start = kv.len();
    for position in start..start + rows {
        row(&all[..=position], &mut bytes);
        kv.import(position, &bytes);
    }
    kv.advance(rows);
    file.note(kv, &all[start..start + rows], form);
}

/// A generation of `tokens`, the first `prompt` of which are read at once. What was taken, and the file.
fn generate(disk: &Shared, tokens: &[u32], prompt: usize) -> (usize, KvFile) {
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    let taken = file.begin(&mut kv, &tokens[..prompt], Some(FORM));
    assert_eq!(kv.len(), taken);
    assert_holds(&kv, tokens);
    step(&mut file, &mut kv, tokens, prompt - taken, FORM);
    while kv.len() < tokens.len() {
        step(&mut file, &mut kv, tokens, 1, FORM);
    }
    file.end(&kv, None);
    (taken, file)
}

#[track_caller]
fn assert_holds(kv: &KvCache, tokens: &[u32]) {
    let (mut found, mut expected) = (vec![0; kv.position_bytes()], vec![0; kv.position_bytes()]);
    for position in 0..kv.len() {
        kv.export(position, &mut found);
        row(&tokens[..=position], &mut expected);
        assert_eq!(found, expected, "position {position}");
    }
}

/// What the file has of `tokens`, which is more than it can have, all of it right.
fn taken_of(bytes: &[u8], tokens: &[u32]) -> (usize, Vec<String>) {
    let mut kv = cache();
    let mut file = KvFile::new(Box::new(Shared::holding(bytes)), &header(), CONTEXT, false);
    let taken = file.begin(&mut kv, tokens, Some(FORM));
    assert_holds(&kv, tokens);
    (taken, file.warnings().to_vec())
}

fn tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|i| (i * 7 + seed) % 32).collect()
}

/// `count` tokens in common, then others.
fn other_way(of: &[u32], count: usize, more: usize) -> Vec<u32> {
    of[..count].iter().copied().chain((0..more).map(|i| (of[count] + 1 + i as u32) % 32)).collect()
}

fn begun() -> Shared {
    Shared::holding(&header().encode())
}

fn block_bytes() -> usize {
    header().blocks().bytes
}

#[test]
fn what_two_prompts_have_in_common_is_taken_and_the_last_token_never() {
    let disk = begun();
    let first = tokens(30, 3);
    assert_eq!(generate(&disk, &first, 20).0, 0);
    assert_eq!(disk.bytes().len(), header().encode().len() + 30 * block_bytes());
    // The same prompt; one that goes on; one that goes another way in the middle; one of which nothing is known.
    let on = [&first[..], &tokens(20, 9)[..]].concat();
    let way = other_way(&on, 11, 20);
    for (tokens, prompt, expected, added) in [
        (&first, 20, 19, 0),
        (&first, 30, 29, 0),
        (&on, 45, 30, 20),
        (&way, 25, 11, 20),
        (&first, 20, 11, 19),
        (&tokens(9, 8), 5, 0, 9),
    ] {
        let (taken, file) = generate(&disk, tokens, prompt);
        assert_eq!((taken, file.warnings()), (expected, &[][..]));
        assert_eq!(file.stats().added, added);
        let fresh = begun();
        generate(&fresh, tokens, prompt);
        assert!(disk.bytes() == fresh.bytes(), "the file is the one that a run from nothing leaves");
    }
}

#[test]
fn what_is_computed_again_costs_nothing_of_what_lies_behind_it() {
    let disk = begun();
    let all = tokens(40, 3);
    generate(&disk, &all, 20);
    let whole = disk.bytes();
    disk.0.lock().unwrap().changes.clear();
    for (len, prompt) in [(5, 5), (21, 20), (30, 5), (40, 20)] {
        let (taken, file) = generate(&disk, &all[..len], prompt);
        assert_eq!((taken, file.stats().added, file.warnings()), (prompt - 1, 0, &[][..]));
        assert!(disk.0.lock().unwrap().changes.is_empty(), "{len} of 40");
    }
    // The same prompt and another answer: cut where that begins, and not where the prompt ends.
    let way = other_way(&all, 33, 4);
    assert_eq!(generate(&disk, &way, 20).1.stats().added, 4);
    let fresh = begun();
    generate(&fresh, &way, 20);
    assert!(disk.bytes() == fresh.bytes());
    assert!(matches!(disk.0.lock().unwrap().changes[0], Change::Cut(at) if at == header().blocks().offset(33)));
    // Damage behind what is taken is mended, and what lies behind that is gone.
    let mut flipped = whole.clone();
    flipped[header().blocks().offset(25) as usize + 3] ^= 1;
    let disk = Shared::holding(&flipped);
    generate(&disk, &all[..28], 10);
    assert!(disk.bytes() == whole[..header().blocks().offset(28) as usize]);
}

#[test]
fn a_process_killed_at_any_byte_of_any_write_leaves_all_before_and_nothing_wrong() {
    let disk = begun();
    let old = tokens(30, 3);
    generate(&disk, &old, 20);
    let before = disk.bytes();
    disk.0.lock().unwrap().changes.clear();
    let new = other_way(&old, 13, 30);
    generate(&disk, &new, 25);
    let changes = disk.0.lock().unwrap().changes.clone();
    assert!(matches!(changes[0], Change::Cut(_)) && changes.len() >= 4, "{} changes", changes.len());
    let ask = |tokens: &[u32]| [tokens, &[0]].concat();
    let mut image = before;
    for change in &changes {
        let parts = match change {
            Change::Cut(_) => 1,
            Change::Append(_, bytes) => bytes.len(),
        };
        for part in 0..=parts {
            let mut killed = image.clone();
            Disk::apply(&mut killed, change, part);
            let (of_old, of_new) = (taken_of(&killed, &ask(&old)).0, taken_of(&killed, &ask(&new)).0);
            let whole = header().blocks().held(killed.len() as u64).0;
            assert!(of_old >= 13 && of_new >= 13, "what both have in common is there at every moment");
            assert_eq!(of_new.max(of_old), whole, "every whole block counts");
        }
        // What the next process makes of the worst of them.
        let mut killed = image.clone();
        Disk::apply(&mut killed, change, parts / 2);
        let again = Shared::holding(&killed);
        generate(&again, &new, 25);
        assert!(again.bytes() == disk.bytes());
        Disk::apply(&mut image, change, parts);
    }
    assert!(image == disk.bytes());
    let unwritten = changes.iter().filter(|change| matches!(change, Change::Append(..))).count();
    assert!(unwritten >= (new.len() - 25) / KV_FILE_UNWRITTEN_MAX, "an answer is not kept until its end");
}

#[test]
fn a_power_cut_that_loses_the_order_of_writes_leaves_nothing_wrong() {
    // What was cut away is still there behind what was written after it, or what was written never came.
    let disk = begun();
    let old = tokens(30, 3);
    generate(&disk, &old, 20);
    let before = disk.bytes();
    let new = other_way(&old, 13, 17);
    generate(&disk, &new, 25);
    let after = disk.bytes();
    assert_eq!(before.len(), after.len());
    let (first, bytes) = (header().blocks().first as usize, block_bytes());
    for mask in 0u32..1 << 8 {
        // Blocks 13 to 20 are the new ones where the mask says so.
        let mut mixed = before.clone();
        for block in (0..8).filter(|block| mask >> block & 1 == 1) {
            let place = first + (13 + block) * bytes..first + (14 + block) * bytes;
            mixed[place.clone()].copy_from_slice(&after[place]);
        }
        let asked = [&new[..], &[0]].concat();
        assert_eq!(taken_of(&mixed, &asked).0, 13 + (mask.trailing_ones() as usize).min(8));
        taken_of(&mixed, &[&old[..], &[0]].concat());
    }
}

#[test]
fn damage_at_any_byte_and_any_length_costs_what_follows_it_and_one_line() {
    let disk = begun();
    let all = tokens(12, 3);
    generate(&disk, &all, 6);
    let (whole, first) = (disk.bytes(), header().blocks().first as usize);
    let asked = [&all[..], &[0]].concat();
    assert_eq!(taken_of(&whole, &asked), (12, vec![]));
    for at in first..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        let (taken, warnings) = taken_of(&flipped, &asked);
        assert_eq!(taken, (at - first) / block_bytes());
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("a.kv") && warnings[0].contains("damaged"), "{warnings:?}");
    }
    for len in first..whole.len() {
        let (taken, warnings) = taken_of(&whole[..len], &asked);
        assert_eq!(taken, (len - first) / block_bytes());
        let torn = !(len - first).is_multiple_of(block_bytes());
        assert_eq!(warnings.len(), usize::from(torn), "{warnings:?}");
    }
    // A damaged file is mended by the next generation.
    let mut flipped = whole.clone();
    flipped[first + 5 * block_bytes() + 3] ^= 1;
    let mended = Shared::holding(&flipped);
    let (taken, file) = generate(&mended, &all, 6);
    assert_eq!((taken, file.warnings().len()), (5, 0), "the prompt's last token is not looked up");
    assert!(mended.bytes() == whole);
}

#[test]
fn a_full_disk_costs_a_line_and_what_did_not_fit() {
    let all = tokens(40, 3);
    let whole = begun();
    generate(&whole, &all, 10);
    let whole = whole.bytes();
    let first = header().blocks().first as usize;
    for room in first..whole.len() {
        let disk = begun();
        disk.0.lock().unwrap().room = Some(room);
        let (_, file) = generate(&disk, &all, 10);
        let warnings = file.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("cannot be written"), "{warnings:?}");
        let left = disk.bytes();
        assert!(whole.starts_with(&left) && (left.len() - first).is_multiple_of(block_bytes()), "{} bytes", left.len());
        assert!(room - left.len() <= (KV_FILE_UNWRITTEN_MAX + 10) * block_bytes(), "what fits is there");
    }
}

#[test]
fn positions_of_another_form_are_computed_anew_with_all_after_them() {
    let disk = begun();
    let all = tokens(20, 3);
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    file.begin(&mut kv, &all[..9], Some(FORM));
    step(&mut file, &mut kv, &all, 9, FORM);
    (9..20).for_each(|_| step(&mut file, &mut kv, &all, 1, Form::Explicit));
    file.end(&kv, None);
    assert_eq!(taken_of(&disk.bytes(), &all), (9, vec![]));
}

#[test]
fn drafts_that_are_taken_back_never_get_into_the_file() {
    let disk = begun();
    let all = tokens(40, 3);
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    file.begin(&mut kv, &all[..9], Some(FORM));
    step(&mut file, &mut kv, &all, 9, FORM);
    while kv.len() < 36 {
        // Four tokens at once, of which the last two were guessed wrong.
        let start = kv.len();
        let drafted = other_way(&all, start + 2, 2);
        step(&mut file, &mut kv, &drafted, 4, FORM);
        kv.truncate(start + 2);
    }
    file.end(&kv, None);
    let len = kv.len();
    assert_eq!(taken_of(&disk.bytes(), &all), (len, vec![]));
    assert_eq!(header().blocks().held(disk.bytes().len() as u64), (len, 0));
}

#[test]
fn what_cannot_be_relied_on_is_taken_back() {
    let disk = begun();
    let all = tokens(40, 3);
    generate(&disk, &all[..20], 10);
    let before = disk.bytes();
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    assert_eq!(file.begin(&mut kv, &all[..30], Some(FORM)), 20);
    step(&mut file, &mut kv, &all, 10, FORM);
    step(&mut file, &mut kv, &all, 1, FORM);
    assert!(disk.bytes().len() > before.len());
    file.end(&kv, Some(usize::MAX));
    assert!(disk.bytes() == before);
    // The next generation of the same process goes on from there.
    kv.truncate(0);
    file.forget(0);
    assert_eq!(file.begin(&mut kv, &all[..30], Some(FORM)), 20);
}

#[test]
fn earlier_generations_of_a_context_that_turns_out_wrong_are_taken_back_too() {
    let disk = begun();
    let all = tokens(40, 3);
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    file.begin(&mut kv, &all[..20], Some(FORM));
    step(&mut file, &mut kv, &all, 20, FORM);
    file.end(&kv, None);
    assert_eq!(taken_of(&disk.bytes(), &all).0, 20);
    // The next one begins with it, and ends before it wrote anything.
    assert_eq!(file.begin(&mut kv, &all[..30], Some(FORM)), 20);
    file.end(&kv, Some(0));
    assert_eq!(taken_of(&disk.bytes(), &all).0, 0);
}

#[test]
fn a_file_that_may_not_be_written_is_read_and_left_alone() {
    let disk = begun();
    let all = tokens(20, 3);
    generate(&disk, &all, 10);
    let before = disk.bytes();
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, false));
    assert_eq!(file.begin(&mut kv, &all[..15], Some(FORM)), 14);
    step(&mut file, &mut kv, &all, 6, FORM);
    file.end(&kv, None);
    assert!(disk.bytes() == before && file.warnings().is_empty());
}

#[test]
fn a_context_that_lasts_goes_on_without_reading_what_it_has() {
    let disk = begun();
    let all = tokens(40, 3);
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    let mut turn = |kv: &mut KvCache, all: &[u32], keep: usize, prompt: usize| {
        kv.truncate(keep);
        file.forget(keep);
        let taken = file.begin(kv, &all[..prompt], None);
        assert_holds(kv, all);
        step(&mut file, kv, all, prompt - taken, FORM);
        (prompt..all.len()).for_each(|_| step(&mut file, kv, all, 1, Form::Explicit));
        file.end(kv, None);
        assert_eq!(header().blocks().held(disk.bytes().len() as u64), (all.len(), 0));
        (taken, file.stats().read_bytes)
    };
    assert_eq!(turn(&mut kv, &all[..20], 0, 10), (0, 0));
    assert_eq!(turn(&mut kv, &all, 20, 30), (20, 0));
    // Another way from position 13 on.
    let way = other_way(&all, 13, 20);
    disk.0.lock().unwrap().changes.clear();
    let (taken, read) = turn(&mut kv, &way, 13, 20);
    assert_eq!((taken, read), (13, 6 * block_bytes() as u64), "what may follow is looked up, and is of another token");
    assert!(matches!(disk.0.lock().unwrap().changes[0], Change::Cut(at) if at == header().blocks().offset(13)));
    // Another process takes it all, of whatever form each position is; none but the first where that matters.
    let ask = [&way[..], &[0]].concat();
    let mut again = KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true);
    assert_eq!(again.begin(&mut cache(), &ask, None), 33);
    assert_eq!(taken_of(&disk.bytes(), &ask).0, 10);
}

#[test]
fn what_could_not_be_written_of_a_context_that_lasts_is_not_written_around() {
    let disk = begun();
    let all = tokens(40, 3);
    let (mut kv, mut file) = (cache(), KvFile::new(Box::new(disk.clone()), &header(), CONTEXT, true));
    file.begin(&mut kv, &all[..10], None);
    step(&mut file, &mut kv, &all, 10, FORM);
    disk.0.lock().unwrap().room = Some(header().blocks().offset(6) as usize);
    file.end(&kv, None);
    assert_eq!(file.warnings().len(), 1);
    disk.0.lock().unwrap().room = None;
    assert_eq!(file.begin(&mut kv, &all[..20], None), 10, "from the context");
    step(&mut file, &mut kv, &all, 10, FORM);
    file.end(&kv, None);
    assert_eq!(taken_of(&disk.bytes(), &all).0, 0, "nothing of a write that failed");
}
