//! Copies on other drives: the same bytes from every device, whichever copy fails and whenever.
#![allow(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Kind, Model, check_bytes, demand, kinds, open, plan_of, span};
use millstream_io::{
    Device, DeviceConfig, DriveStats, Errno, FileId, FileSet, FileSpan, IoError, IoMode, Mirror, SimConfig, SlabPool,
    Wait, sim_device,
};

const KIB: u64 = 1024;
const SIZES: [u64; 2] = [2000 * KIB, 1500 * KIB + 77];

/// Reads over both files, some of both, up to their last bytes.
fn reads() -> Vec<Vec<FileSpan>> {
    let both = |i: u64| vec![span(0, i * 90_001, 200 * KIB + i * 13), span(1, i * 70_003 + 1, 150 * KIB + i)];
    (0..18).map(both).chain([vec![span(1, SIZES[1] - 5000, 5000)], vec![span(0, 0, 1)]]).collect()
}

/// The model and copies of its first `copies` files.
fn mirrored(copies: usize) -> (Model, Model, Mirror) {
    let (model, other) = (Model::new(&SIZES), Model::new(&SIZES[..copies]));
    let mirror = mirror_of(&other);
    (model, other, mirror)
}

fn mirror_of(other: &Model) -> Mirror {
    let copies: Vec<Option<PathBuf>> = other.paths.iter().cloned().map(Some).chain([None, None]).take(2).collect();
    Mirror { dir: other.dir.path().to_owned(), copies, seen: vec![] }
}

fn open_both(model: &Model, mirror: &Mirror, mode: IoMode) -> Arc<FileSet> {
    Arc::new(FileSet::open_mirrored(&model.paths, std::slice::from_ref(mirror), mode).unwrap())
}

/// Makes every read; checks every byte of those that succeed and returns the errors of the others.
fn read_all(device: &mut dyn Device, files: &FileSet, pool: &SlabPool, context: &str) -> Vec<IoError> {
    let wanted = reads();
    let plans: Vec<_> = wanted.iter().map(|spans| plan_of(files, spans)).collect();
    let (mut next, mut errors) = (0, Vec::new());
    loop {
        while next < plans.len()
            && let Some(slab) = pool.take()
        {
            device.submit(demand(next as u64, &plans[next]), slab).unwrap();
            next += 1;
        }
        let Some(done) = device.reap(Wait::Block).unwrap() else { return errors };
        match done.result {
            Ok(()) => {
                let tag = done.tag as usize;
                check_bytes(&plans[tag], &wanted[tag], done.slab.bytes(), context);
            }
            Err(error) => errors.push(error),
        }
    }
}

fn pool() -> SlabPool {
    SlabPool::new(400 * KIB as usize, 4).unwrap()
}

/// Requests small enough that each read is striped.
fn striping() -> DeviceConfig {
    DeviceConfig { chunk_bytes: Some(64 << 10), ..DeviceConfig::default() }
}

fn bytes(drives: &[DriveStats]) -> Vec<u64> {
    drives.iter().map(|drive| drive.bytes).collect()
}

#[test]
fn every_device_reads_the_same_bytes_from_two_drives_as_from_one() {
    for kind in kinds() {
        for mode in kind.modes() {
            let (model, _other, mirror) = mirrored(2);
            let (files, pool) = (open_both(&model, &mirror, mode), pool());
            let mut device = open(kind, &striping(), &files, &pool);
            let context = format!("{kind:?} {mode}");
            assert_eq!(read_all(&mut *device, &files, &pool, &context), [], "{context}");
            let drives = device.drives();
            assert!(drives.len() == 2 && drives.iter().all(|drive| drive.bytes > 0 && drive.errors == 0), "{context}");
            assert_eq!(bytes(&drives).iter().sum::<u64>(), device.stats().bytes, "{context}");
            assert_eq!(files.warnings(), [""; 0], "{context}");
            assert_eq!(files.len(), 2, "copies are no files of the model");
        }
    }
}

#[test]
fn what_a_mirror_lacks_is_read_from_the_model() {
    for kind in kinds() {
        let (model, other, mirror) = mirrored(1);
        let (files, pool) = (open_both(&model, &mirror, kind.mode()), pool());
        let note = format!("mirror {} has 1 of 2 files", other.dir.path().display());
        assert_eq!(files.describe().iter().filter(|line| line.starts_with(&note)).count(), 1, "{:?}", files.describe());
        let mut device = open(kind, &striping(), &files, &pool);
        assert_eq!(read_all(&mut *device, &files, &pool, "partial"), []);
        // 18 reads of the second file take at least 150 KiB each from the only drive that has it.
        let drives = bytes(&device.drives());
        assert!(drives[0] >= 18 * 150 * KIB && drives[1] > 0, "{kind:?}: {drives:?}");
    }
}

#[test]
fn a_mirror_that_fails_while_it_is_read_costs_one_warning_and_no_byte() {
    for kind in kinds() {
        let (model, other, mirror) = mirrored(2);
        let (files, pool) = (open_both(&model, &mirror, kind.mode()), pool());
        let mut device = open(kind, &striping(), &files, &pool);
        assert_eq!(read_all(&mut *device, &files, &pool, "before"), []);
        for path in &other.paths {
            std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(8192).unwrap();
        }
        // A drive that was slow for a moment is left out for a while, though not as long as this.
        let began = Instant::now();
        while device.drives()[1].errors == 0 && began.elapsed() < Duration::from_secs(100) {
            assert_eq!(read_all(&mut *device, &files, &pool, "after"), [], "{kind:?}");
        }
        assert_eq!(read_all(&mut *device, &files, &pool, "after the warning"), [], "{kind:?}");
        let warnings = files.warnings();
        assert!(warnings.len() == 1, "{kind:?}: {warnings:?}");
        let names_it = warnings[0].contains(&*other.dir.path().to_string_lossy());
        assert!(names_it && warnings[0].contains("file ends early"), "{kind:?}: {warnings:?}");
        let drives = device.drives();
        assert!(drives[0].errors == 0 && drives[1].errors > 0, "{kind:?}: {drives:?}");
    }
}

#[test]
fn the_models_own_damage_is_covered_by_a_mirror_and_told() {
    for kind in kinds() {
        let (model, other, mirror) = mirrored(2);
        let (files, pool) = (open_both(&model, &mirror, kind.mode()), pool());
        let mut device = open(kind, &striping(), &files, &pool);
        let shorten = |path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap();
        shorten(&model.paths[0]);
        for _ in 0..2 {
            assert_eq!(read_all(&mut *device, &files, &pool, "covered"), [], "{kind:?}");
        }
        let warnings = files.warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("own directory is damaged"), "{kind:?}: {warnings:?}");

        // With both copies gone the error is the model's, whichever copy was asked last.
        shorten(&other.paths[0]);
        let errors = read_all(&mut *device, &files, &pool, "gone");
        assert!(errors.len() >= 18, "{kind:?}: {}", errors.len());
        for error in errors {
            let IoError::EndOfFile { range } = error else { panic!("{kind:?}: {error:?}") };
            assert_eq!(*range.path, *model.paths[0], "{kind:?}");
        }
    }
}

#[test]
fn what_is_read_once_comes_from_the_model_or_not_at_all() {
    let (model, other, mirror) = mirrored(2);
    // As long as the model's, with other bytes: nothing would tell them from the right ones.
    std::fs::write(&other.paths[0], vec![0x5A; SIZES[0] as usize]).unwrap();
    let files = open_both(&model, &mirror, IoMode::Auto);
    let mut buf = vec![0; 70_000];
    files.read_exact_at(FileId(0), 1_000_001, &mut buf).unwrap();
    assert!(buf.iter().zip(1_000_001..).all(|(byte, offset)| *byte == common::byte_at(0, offset)));
    std::fs::OpenOptions::new().write(true).open(&model.paths[0]).unwrap().set_len(4096).unwrap();
    let error = files.read_exact_at(FileId(0), 1_000_001, &mut buf).unwrap_err();
    assert!(matches!(error, IoError::EndOfFile { range } if *range.path == *model.paths[0]));
}

#[test]
fn one_drive_lost_at_any_moment_changes_no_byte() {
    let (model, _other, mirror) = mirrored(2);
    for seed in 0..200 {
        for lost in [0, 1] {
            let files = open_both(&model, &mirror, IoMode::Auto);
            let storm = SimConfig { lost: Some((lost, seed)), ..bounded(seed) };
            let pool = pool();
            let mut device = sim_device(&storm, Arc::clone(&files), &pool).unwrap();
            let context = format!("seed {seed}, drive {lost} lost");
            assert_eq!(read_all(&mut *device, &files, &pool, &context), [], "{context}");
            let told = files.warnings().len();
            assert!(told <= 1 && (told == 1) == (device.drives()[lost].errors > 0), "{context}");
            drop(device);
            assert_eq!(pool.free(), 4, "{context}: a slab leaked");
        }
    }
}

/// A storm with bounds that depend on the seed, so that every way to cut and to hold back is met.
fn bounded(seed: u64) -> SimConfig {
    SimConfig {
        eio_per_mille: 0,
        zero_per_mille: 0,
        chunk_bytes: 16 << (10 + seed % 3),
        whole_when_waiting: if seed.is_multiple_of(2) { usize::MAX } else { 3 },
        requests: (seed % 3 == 1).then_some((5, 16 << 10)),
        calls_of_drive: [usize::MAX, 1, 4][(seed % 3) as usize],
        calls: 2 + (seed % 13) as usize,
        ..SimConfig::stormy(seed)
    }
}

/// As `read_all`, as far as it goes within a minute of the simulated clock; the reads that are done.
fn read_for_a_minute(device: &mut dyn Device, files: &FileSet, pool: &SlabPool, context: &str) -> usize {
    let wanted = reads();
    let plans: Vec<_> = wanted.iter().map(|spans| plan_of(files, spans)).collect();
    let (mut next, mut done) = (0, 0);
    loop {
        while next < plans.len()
            && let Some(slab) = pool.take()
        {
            device.submit(demand(next as u64, &plans[next]), slab).unwrap();
            next += 1;
        }
        let Some(read) = device.reap(Wait::AtMost(Duration::from_secs(60))).unwrap() else { return done };
        assert_eq!(read.result, Ok(()), "{context}");
        let tag = read.tag as usize;
        check_bytes(&plans[tag], &wanted[tag], read.slab.bytes(), context);
        done += 1;
    }
}

#[test]
fn a_drive_that_hangs_holds_up_the_reads_it_has_and_no_other() {
    let (model, _other, mirror) = mirrored(2);
    for seed in 0..200 {
        let hung = (seed % 2) as usize;
        let files = open_both(&model, &mirror, IoMode::Auto);
        let bounded = bounded(seed);
        let calls = bounded.calls.max(8);
        let storm = SimConfig { hangs: Some((hung, 3 * seed)), calls, stall_per_mille: 0, ..bounded };
        // Slabs enough for every read: what hangs keeps its slab.
        let pool = SlabPool::new(400 * KIB as usize, 24).unwrap();
        let mut device = sim_device(&storm, Arc::clone(&files), &pool).unwrap();
        let context = format!("seed {seed}, drive {hung} hangs");
        let done = read_for_a_minute(&mut *device, &files, &pool, &context);
        let owed: Vec<usize> = device.drives().iter().map(|drive| drive.owed).collect();
        assert_eq!(owed[1 - hung], 0, "{context}");
        let left = reads().len() - done;
        assert!(left == device.in_flight() && left <= owed[hung], "{context}: {left} of {owed:?}");
        drop(device);
        assert_eq!(pool.free(), 24, "{context}: a slab leaked");
    }
}

#[test]
fn what_waits_for_a_drive_that_hangs_goes_to_the_other_at_once() {
    let (model, _other, mirror) = mirrored(2);
    let files = open_both(&model, &mirror, IoMode::Auto);
    // One call of a drive at a time: the one that hangs is full when the next read comes, and nothing else happens.
    let calm = SimConfig { delay: Duration::from_millis(1)..Duration::from_millis(1), ..SimConfig::calm(1) };
    let sim = SimConfig { reorder: true, calls_of_drive: 1, chunk_bytes: 64 << 10, hangs: Some((1, 40)), ..calm };
    let pool = SlabPool::new(400 * KIB as usize, 24).unwrap();
    let mut device = sim_device(&sim, Arc::clone(&files), &pool).unwrap();
    let done = read_for_a_minute(&mut *device, &files, &pool, "hangs");
    assert_eq!((done, device.drives()[1].owed), (reads().len() - 1, 1));
}

#[test]
fn bits_that_a_drive_flips_are_its_own_and_end_when_it_is_distrusted() {
    let (model, _other, mirror) = mirrored(2);
    let wanted = reads();
    let mut found = [0; 2];
    for seed in 0..100 {
        let bad = (seed % 2) as usize;
        let files = open_both(&model, &mirror, IoMode::Auto);
        let storm = SimConfig { flips: Some((bad, 300)), ..bounded(seed) };
        let pool = pool();
        let mut device = sim_device(&storm, Arc::clone(&files), &pool).unwrap();
        for (tag, spans) in wanted.iter().enumerate() {
            let plan = plan_of(&files, spans);
            device.submit(demand(tag as u64, &plan), pool.take().unwrap()).unwrap();
            let read = device.reap(Wait::Block).unwrap().unwrap();
            assert_eq!(read.result, Ok(()));
            let is_right = plan.places.iter().zip(spans).all(|(place, span)| {
                let bytes = &read.slab.bytes()[place.at as usize..][..place.len as usize];
                bytes.iter().zip(span.offset..).all(|(byte, offset)| *byte == common::byte_at(span.file.0, offset))
            });
            let known = files.warnings().len();
            assert!(is_right || known == 0, "seed {seed}: drive {bad} was distrusted before");
            if !is_right {
                found[bad] += 1;
                (0..2).for_each(|file| files.distrust(FileId(file), bad, "a bit is flipped"));
            }
        }
    }
    // Of 50 seeds each: three calls in ten, and most reads are several.
    assert!(found[0] > 40 && found[1] > 40, "{found:?}");
}

#[test]
fn a_copy_known_to_be_wrong_is_no_way_to_save_a_read() {
    let (model, wrong, right) = (Model::new(&SIZES), Model::new(&SIZES), Model::new(&SIZES));
    for (path, bytes) in wrong.paths.iter().zip(SIZES) {
        std::fs::write(path, vec![0x5A; bytes as usize]).unwrap();
    }
    for seed in 0..50 {
        let calm = SimConfig { chunk_bytes: 16 << (10 + seed % 3), lost: Some((0, seed)), ..SimConfig::calm(seed) };
        let pool = pool();
        // A mirror is wrong and the model's drive fails: what is read comes from the other mirror.
        let mirrors = [mirror_of(&wrong), mirror_of(&right)];
        let files = Arc::new(FileSet::open_mirrored(&model.paths, &mirrors, IoMode::Auto).unwrap());
        files.distrust(FileId(1), 1, "a byte is wrong");
        let mut device = sim_device(&calm, Arc::clone(&files), &pool).unwrap();
        let context = format!("seed {seed}");
        assert_eq!(read_all(&mut *device, &files, &pool, &context), [], "{context}");
        assert_eq!(bytes(&device.drives())[1], 0, "{context}: nothing is asked of a wrong mirror");

        // Without the other mirror it is an error.
        let files = open_both(&model, &mirrors[0], IoMode::Auto);
        files.distrust(FileId(0), 1, "a byte is wrong");
        let mut device = sim_device(&calm, Arc::clone(&files), &pool).unwrap();
        assert!(!read_all(&mut *device, &files, &pool, &context).is_empty(), "{context}");
    }
}

#[test]
fn the_models_wrong_copy_is_read_only_when_the_mirrors_have_failed() {
    let (wrong, failing, right) = (Model::new(&SIZES), Model::new(&SIZES), Model::new(&SIZES));
    for (path, bytes) in wrong.paths.iter().zip(SIZES) {
        std::fs::write(path, vec![0x5A; bytes as usize]).unwrap();
    }
    let mirrors = [mirror_of(&failing), mirror_of(&right)];
    for seed in 0..50 {
        let files = Arc::new(FileSet::open_mirrored(&wrong.paths, &mirrors, IoMode::Auto).unwrap());
        (0..2).for_each(|file| files.distrust(FileId(file), 0, "a byte is wrong"));
        let calm = SimConfig { chunk_bytes: 16 << (10 + seed % 3), lost: Some((1, seed)), ..SimConfig::calm(seed) };
        let pool = pool();
        let mut device = sim_device(&calm, Arc::clone(&files), &pool).unwrap();
        let context = format!("seed {seed}");
        assert_eq!(read_all(&mut *device, &files, &pool, &context), [], "{context}");
        assert_eq!(bytes(&device.drives())[0], 0, "{context}");
    }
}

#[test]
fn a_mirror_that_failed_and_then_is_wrong_is_told_twice_and_no_more() {
    let (model, other, mirror) = mirrored(2);
    let files = open_both(&model, &mirror, IoMode::Auto);
    for _ in 0..2 {
        let error = files.read_copy(FileId(1), 1, SIZES[1], &mut [0; 4]).unwrap().unwrap_err();
        files.avoid(FileId(1), 1, &error);
        files.distrust(FileId(0), 1, "a byte is wrong");
    }
    let warnings = files.warnings();
    assert!(warnings.len() == 2, "{warnings:?}");
    let dir = other.dir.path().display().to_string();
    assert!(warnings.iter().all(|line| line.starts_with(&dir)), "{warnings:?}");
    assert!(warnings[0].ends_with("this mirror is not read any more where it failed"), "{warnings:?}");
    assert!(warnings[1].ends_with("a byte is wrong; this mirror is not read any more"), "{warnings:?}");
}

#[test]
fn both_drives_lost_is_an_error_of_the_models_file() {
    let (model, _other, mirror) = mirrored(2);
    let files = open_both(&model, &mirror, IoMode::Auto);
    let storm = SimConfig { eio_per_mille: 1000, delay: Duration::ZERO..Duration::ZERO, ..SimConfig::calm(3) };
    let pool = pool();
    let mut device = sim_device(&storm, Arc::clone(&files), &pool).unwrap();
    let errors = read_all(&mut *device, &files, &pool, "both");
    assert_eq!(errors.len(), reads().len());
    for error in errors {
        let IoError::Read { range, errno } = error else { panic!("{error:?}") };
        assert!(errno == Errno(libc::EIO) && model.paths.iter().any(|path| **path == *range.path), "{range:?}");
    }
    assert_eq!(files.warnings().len(), 2, "one for each drive");
}

#[test]
fn what_is_no_copy_is_refused() {
    let (model, other, mirror) = mirrored(2);
    let open = |mirrors: &[Mirror]| FileSet::open_mirrored(&model.paths, mirrors, IoMode::Auto);
    let many = vec![mirror.clone(); 8];
    assert!(matches!(open(&many), Err(IoError::BadRequest { .. })), "a bit each in a byte, the model's own included");
    assert!(open(&many[..7]).is_ok());
    std::fs::OpenOptions::new().write(true).open(&other.paths[1]).unwrap().set_len(SIZES[1] - 1).unwrap();
    let error = open(std::slice::from_ref(&mirror)).unwrap_err();
    let IoError::NotACopy { path, of, what } = &error else { panic!("{error:?}") };
    assert_eq!((&**path, &**of), (&*other.paths[1], &*model.paths[1]));
    assert!(what.contains(&SIZES[1].to_string()), "{what}");
    std::fs::remove_file(&other.paths[1]).unwrap();
    let error = open(std::slice::from_ref(&mirror)).unwrap_err();
    assert!(matches!(error, IoError::Open { path, .. } if *path == *other.paths[1]));
}

#[test]
fn a_copy_that_is_not_the_file_that_was_compared_is_refused() {
    use std::os::unix::fs::MetadataExt;
    let (model, other, mirror) = mirrored(2);
    let seen = |path: &PathBuf| std::fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    let mirror = Mirror { seen: other.paths.iter().map(seen).collect(), ..mirror };
    let open = || FileSet::open_mirrored(&model.paths, std::slice::from_ref(&mirror), IoMode::Auto);
    assert!(open().is_ok());
    let moved = other.dir.path().join("moved");
    std::fs::rename(&other.paths[1], &moved).unwrap();
    std::fs::copy(&moved, &other.paths[1]).unwrap();
    assert!(matches!(open(), Err(IoError::Changed { path, .. }) if *path == *other.paths[1]));
}

#[test]
fn two_directories_on_one_device_are_said_to_be() {
    let (model, other, mirror) = mirrored(2);
    let files = open_both(&model, &mirror, IoMode::Auto);
    let note = format!("mirror {} is on the same block device", other.dir.path().display());
    assert!(files.describe().iter().any(|line| line.starts_with(&note)), "{:?}", files.describe());
    assert!(kinds().contains(&Kind::Sim) && files.drives() == 2);
    assert_eq!((files.drive_dir(0), files.drive_dir(1)), (model.dir.path(), other.dir.path()));
}
