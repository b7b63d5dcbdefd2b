//! The store over a real file and a simulated device, and over devices that misbehave on purpose.

// Declared as a test file, for the scanner of tests/tidy.rs.
#[cfg(test)]
mod doubt;
#[cfg(test)]
mod hung;

use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millstream_io::{
    DeviceReport, DeviceStats, FileId, FileSet, FileSpan, IoMode, Mirror, Rejected, SimConfig, SimFault, sim_device,
};
use proptest::prelude::*;

use super::*;
use crate::checkpoint::{ExpertIndex, ExpertSource, MatrixSource};
use crate::kernels::{Format, Kernels, MatrixSpec};

#[path = "guess_tests.rs"]
mod guesses;

const LAYERS: usize = 2;
const EXPERTS: usize = 6;
const SECTOR: u64 = 4096;
const WIDTH: usize = 2;
const HIDDEN: usize = 3;

/// A file of experts, one a sector, in another order than their ids, and what is in it.
struct Fixture {
    _file: tempfile::NamedTempFile,
    files: Arc<FileSet>,
    index: ExpertIndex,
}

/// Place of an expert in the file, in sectors: within a layer 0, 5, 4, 3, 2, 1.
fn sector_of(layer: usize, expert: usize) -> u64 {
    (layer * EXPERTS + expert * 5 % EXPERTS) as u64
}

/// Every value of a matrix (0 gate, 1 up, 2 down) of an expert.
fn value_of(layer: usize, expert: usize, matrix: usize) -> f32 {
    (100 * layer + 10 * expert + matrix) as f32
}

fn fixture() -> Fixture {
    let mut bytes = vec![0; LAYERS * EXPERTS * SECTOR as usize];
    let matrix = |offset: u64, i: usize| MatrixSource {
        factor: None,
        spec: match i {
            2 => MatrixSpec { format: Format::F32, rows: HIDDEN, cols: WIDTH },
            _ => MatrixSpec { format: Format::F32, rows: WIDTH, cols: HIDDEN },
        },
        data: FileSpan { file: FileId(0), offset: offset + 24 * i as u64, len: 24 },
        scales: None,
    };
    let mut layers = vec![];
    for layer in 0..LAYERS {
        let experts = (0..EXPERTS).map(|expert| {
            let offset = sector_of(layer, expert) * SECTOR;
            for i in 0..3 * WIDTH * HIDDEN {
                let value = value_of(layer, expert, i / (WIDTH * HIDDEN));
                bytes[offset as usize + 4 * i..][..4].copy_from_slice(&value.to_le_bytes());
            }
            ExpertSource { gate: matrix(offset, 0), up: matrix(offset, 1), down: matrix(offset, 2) }
        });
        layers.push(Some(experts.collect()));
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    let files = Arc::new(FileSet::open(&[file.path().to_owned()], IoMode::Buffered).unwrap());
    Fixture { _file: file, files, index: ExpertIndex { layers } }
}

/// Gives the fixture a mirror, a copy with changed bytes; its directory, and the copy.
fn copied(fixture: &mut Fixture, change: impl Fn(&mut [u8])) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (own, copy) = (fixture.files.path(FileId(0)).to_owned(), dir.path().join("copy"));
    let mut bytes = std::fs::read(&own).unwrap();
    change(&mut bytes);
    std::fs::write(&copy, bytes).unwrap();
    let mirror = Mirror { dir: dir.path().to_owned(), copies: vec![Some(copy.clone())], seen: vec![] };
    fixture.files = Arc::new(FileSet::open_mirrored(&[own], &[mirror], IoMode::Buffered).unwrap());
    (dir, copy)
}

impl Fixture {
    fn table(&self) -> ExpertTable {
        ExpertTable::build(&self.index, &self.files, |_| true, |_, _| None, false).unwrap()
    }

    fn store(&self, slabs: usize, device: impl Fn(&SlabPool) -> Box<dyn Device>) -> ExpertStore {
        let table = self.table();
        let sizes: Vec<_> = table.sizes().iter().map(|size| (size.slab_bytes, slabs)).collect();
        let pool = SlabPool::of_sizes(&sizes).unwrap();
        let mut store = ExpertStore::new(table, device(&pool), pool);
        // The policy whose victims are easily told.
        store.set_policy(PolicyKind::Lru);
        store
    }

    fn simulated(&self, slabs: usize, config: &SimConfig) -> ExpertStore {
        self.store(slabs, |pool| sim_device(config, self.files.clone(), pool).unwrap())
    }

    /// A calm store that keeps a list of the sectors whose reads were taken by the device.
    fn watched(&self, slabs: usize, config: &SimConfig) -> (ExpertStore, Arc<Mutex<Vec<u64>>>) {
        let taken = Arc::new(Mutex::new(vec![]));
        let store = self.store(slabs, |pool| {
            let device = sim_device(config, self.files.clone(), pool).unwrap();
            Box::new(Watched { device, taken: taken.clone() })
        });
        (store, taken)
    }
}

/// Notes the sectors of accepted reads.
struct Watched {
    device: Box<dyn Device>,
    taken: Arc<Mutex<Vec<u64>>>,
}

impl Device for Watched {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        self.device.submit(read, slab)?;
        self.taken.lock().unwrap().push(read.segments[0].offset / SECTOR);
        Ok(())
    }
    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError> {
        self.device.reap(wait)
    }
    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
    fn cancel_lookahead(&mut self) -> usize {
        self.device.cancel_lookahead()
    }
    fn promote(&mut self, tag: u64) {
        self.device.promote(tag);
    }
    fn stats(&self) -> DeviceStats {
        self.device.stats()
    }
    fn describe(&self) -> &DeviceReport {
        self.device.describe()
    }
}

/// Takes reads and dies with them: what a thread does that is killed in the kernel.
#[derive(Default)]
struct DiesWithItsReads {
    slabs: Vec<Slab>,
    report: DeviceReport,
}

impl Device for DiesWithItsReads {
    fn submit(&mut self, _: Read, slab: Slab) -> Result<(), Rejected> {
        self.slabs.push(slab);
        Ok(())
    }
    fn reap(&mut self, _: Wait) -> Result<Option<Completion>, IoError> {
        Err(IoError::DeviceDied { cause: "test".to_owned() })
    }
    fn in_flight(&self) -> usize {
        self.slabs.len()
    }
    fn cancel_lookahead(&mut self) -> usize {
        0
    }
    fn promote(&mut self, _: u64) {}
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
    fn describe(&self) -> &DeviceReport {
        &self.report
    }
}

/// Every value of the leased expert is the file's.
fn check_weights(store: &ExpertStore, layer: usize, lease: &Lease) {
    let w = store.weights(lease);
    for (i, matrix) in [w.gate, w.up, w.down].iter().enumerate() {
        let mut row = [f32::NAN; HIDDEN];
        let row = &mut row[..matrix.cols()];
        for r in 0..matrix.rows() {
            Kernels::best().decode_row(matrix, r, row);
            assert!(row.iter().all(|&v| v == value_of(layer, lease.expert().into(), i)), "{row:?}");
        }
    }
}

/// Serves a request as the executor does, one lease at a time; the order in which experts were lent.
fn serve(store: &mut ExpertStore, layer: usize, experts: &[u16]) -> Result<Vec<u16>, StoreError> {
    store.request(layer, experts)?;
    let mut lent = vec![];
    while let Some(lease) = store.next_ready()? {
        check_weights(store, layer, &lease);
        lent.push(lease.expert());
        store.release(lease)?;
    }
    Ok(lent)
}

fn assert_no_slab_is_lost(store: &ExpertStore) {
    assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
}

#[test]
fn misses_are_read_in_file_order_and_hits_are_lent_first() {
    let fixture = fixture();
    let (mut store, taken) = fixture.watched(6, &SimConfig::calm(1));
    store.request(1, &[0, 1, 2, 3]).unwrap();
    // All are with the device before the first is waited for.
    assert_eq!(*taken.lock().unwrap(), [6, 9, 10, 11]);
    assert_eq!(store.pool().free(), 2);
    while let Some(lease) = store.next_ready().unwrap() {
        store.release(lease).unwrap();
    }
    assert_eq!(serve(&mut store, 1, &[2, 3, 4, 5]).unwrap(), [2, 3, 5, 4]);
    assert_eq!(taken.lock().unwrap()[4..], [7, 8]);
    let stats = store.stats();
    assert_eq!((stats.requested, stats.hits, stats.misses), (8, 2, 6));
    let device = store.device_stats();
    assert_eq!((device.reads, device.bytes, stats.useful_bytes), (6, 6 * SECTOR, 6 * 72));
}

#[test]
fn every_read_is_timed_from_submission_to_completion_and_its_queue_apart() {
    let fixture = fixture();
    let ms = Duration::from_millis;
    // One at a time, and each takes 10 ms: a union of four ends at 10, 20, 30 and 40 ms.
    let serial = SimConfig { delay: ms(10)..ms(10), depth_bytes: 1, ..SimConfig::calm(1) };
    let mut store = fixture.simulated(6, &serial);
    assert_eq!(store.read_times().at(0.5), None);
    serve(&mut store, 0, &[0, 1, 2, 3]).unwrap();
    for (share, expected) in [(0.25, 10.0), (0.5, 20.0), (0.75, 30.0), (0.99, 40.0)] {
        let at = store.read_times().at(share).unwrap().as_secs_f64() * 1e3;
        assert!((at / expected - 1.0).abs() <= 0.01, "{share}: {at} ms of {expected}");
    }
    let device = store.device_stats();
    assert_eq!((device.queued_ns, device.service_ns, device.busy_ns), (60_000_000, 40_000_000, 40_000_000));
    // What was counted before is another generation's; a hit is no read.
    store.reset_stats();
    serve(&mut store, 0, &[0]).unwrap();
    assert_eq!((store.read_times().at(0.5), store.device_stats().reads, store.device_stats().service_ns), (None, 0, 0));
}

#[test]
fn the_expert_used_longest_ago_is_evicted() {
    let fixture = fixture();
    let mut store = fixture.simulated(3, &SimConfig::calm(1));
    for expert in [0, 1, 2, 0, 3] {
        serve(&mut store, 0, &[expert]).unwrap();
    }
    store.reset_stats();
    for expert in [2, 0, 3] {
        serve(&mut store, 0, &[expert]).unwrap();
    }
    assert_eq!((store.stats().hits, store.stats().misses), (3, 0));
    serve(&mut store, 0, &[1]).unwrap();
    serve(&mut store, 0, &[2]).unwrap();
    assert_eq!((store.stats().hits, store.stats().misses), (3, 2), "1 was evicted, and then 2 for it");
}

#[test]
fn the_same_expert_number_of_another_layer_is_another_expert() {
    let fixture = fixture();
    let mut store = fixture.simulated(4, &SimConfig::calm(1));
    serve(&mut store, 0, &[3]).unwrap();
    serve(&mut store, 1, &[3]).unwrap();
    assert_eq!((store.stats().hits, store.stats().misses), (0, 2));
}

#[test]
fn a_union_larger_than_the_pool_is_served_in_waves() {
    let fixture = fixture();
    for slabs in 1..EXPERTS {
        let (mut store, taken) = fixture.watched(slabs, &SimConfig::calm(1));
        store.request(0, &[0, 1, 2, 3, 4, 5]).unwrap();
        assert_eq!(taken.lock().unwrap().len(), slabs);
        let mut lent = vec![];
        while let Some(lease) = store.next_ready().unwrap() {
            check_weights(&store, 0, &lease);
            lent.push(lease.expert());
            store.release(lease).unwrap();
        }
        assert_eq!(lent, [0, 5, 4, 3, 2, 1], "file order, each once, with {slabs} slabs");
        assert_eq!(*taken.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
        assert_no_slab_is_lost(&store);
    }
}

#[test]
fn an_expert_gives_way_only_to_one_that_fits_in_its_place() {
    // The experts of layer 1 take two sectors: their last matrix lies in the second.
    let mut fixture = fixture();
    for expert in fixture.index.layers[1].iter_mut().flatten() {
        expert.down.data.offset += SECTOR;
    }
    let (last, len) = (sector_of(1, 1) * SECTOR, (LAYERS * EXPERTS + 1) as u64 * SECTOR);
    assert!(last + SECTOR < len);
    let path = fixture.files.path(FileId(0)).to_owned();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len).unwrap();
    fixture.files = Arc::new(FileSet::open(&[path], IoMode::Buffered).unwrap());
    let mut store = fixture.simulated(2, &SimConfig::calm(1));
    let sizes: Vec<_> = store.table.sizes().iter().map(|size| (size.slab_bytes, size.experts)).collect();
    assert_eq!(sizes, [(2 * SECTOR as usize, EXPERTS), (SECTOR as usize, EXPERTS)]);
    assert_eq!(store.pool().slabs(), 4, "two of each");
    serve(&mut store, 0, &[0, 1]).unwrap();
    // More than its slabs hold, of the other layer: nothing of the first goes.
    for expert in 0..EXPERTS as u16 {
        assert_eq!(plain(&mut store, 1, &[expert]), [expert]);
    }
    store.reset_stats();
    serve(&mut store, 0, &[0, 1]).unwrap();
    assert_eq!((plain(&mut store, 1, &[5]), store.stats().hits), (vec![5], 3));
    // Guesses leave each size what demand needs there.
    store.allow_guesses(100, 1);
    store.hint(1, &[0, 1, 2, 3]);
    assert_eq!(store.stats().guessed, 1);
    store.drop_guesses();
    // Selections are remembered by layer and number whatever the size, and each size has its own pins.
    let usage = store.usage();
    assert_eq!((usage[0], usage[1], usage[EXPERTS], usage[EXPERTS + 5]), (2, 2, 1, 2));
    assert_no_slab_is_lost(&store);
    let mut store = fixture.simulated(2, &SimConfig::calm(1));
    let history: Vec<u64> = (0..12).map(|key| if key % EXPERTS == 4 { 1_000_000 } else { 1 }).collect();
    store.remember(history.clone(), 1, Some(true));
    assert_eq!((store.pinned(), store.usage()), (2, history));
    for layer in 0..2 {
        for expert in 0..EXPERTS as u16 {
            plain(&mut store, layer, &[expert]);
        }
        assert_eq!(store.tier(ExpertKey { layer: layer as u16, expert: 4 }), Tier::Pinned);
    }
}

/// Serves without a look at the weights.
fn plain(store: &mut ExpertStore, layer: usize, experts: &[u16]) -> Vec<u16> {
    store.request(layer, experts).unwrap();
    let mut lent = vec![];
    while let Some(lease) = store.next_ready().unwrap() {
        lent.push(lease.expert());
        store.release(lease).unwrap();
    }
    lent
}

#[test]
fn a_leased_expert_stays_while_others_pass_through_the_pool() {
    let fixture = fixture();
    let mut store = fixture.simulated(2, &SimConfig::calm(1));
    store.request(0, &[2]).unwrap();
    let kept = store.next_ready().unwrap().unwrap();
    assert!(store.next_ready().unwrap().is_none());
    assert_eq!(serve(&mut store, 1, &[0, 1, 2, 3, 4, 5]).unwrap().len(), 6);
    check_weights(&store, 0, &kept);
    store.release(kept).unwrap();
    store.reset_stats();
    serve(&mut store, 0, &[2]).unwrap();
    assert_eq!(store.stats().hits, 1);
}

#[test]
fn a_wanted_hit_is_not_evicted_for_a_miss_of_the_same_request() {
    let fixture = fixture();
    let mut store = fixture.simulated(2, &SimConfig::calm(1));
    serve(&mut store, 0, &[4, 5]).unwrap();
    store.reset_stats();
    // File order alone would read 0 into the slab of one of the hits before it is lent.
    assert_eq!(serve(&mut store, 0, &[0, 4, 5]).unwrap(), [4, 5, 0]);
    assert_eq!((store.stats().hits, store.device_stats().reads), (2, 1));
}

#[test]
fn a_device_queue_smaller_than_the_misses_delays_and_loses_nothing() {
    let fixture = fixture();
    for queue in 1..EXPERTS {
        let config =
            SimConfig { queue, reorder: true, delay: Duration::ZERO..Duration::from_millis(1), ..SimConfig::calm(7) };
        let (mut store, taken) = fixture.watched(EXPERTS, &config);
        for layer in [0, 1, 0] {
            let mut lent = serve(&mut store, layer, &[0, 1, 2, 3, 4, 5]).unwrap();
            lent.sort_unstable();
            assert_eq!(lent, [0, 1, 2, 3, 4, 5]);
            assert_no_slab_is_lost(&store);
        }
        assert_eq!(taken.lock().unwrap().len(), 3 * EXPERTS, "each miss is read once");
    }
}

#[test]
fn a_failed_read_names_its_expert_and_the_next_request_is_served() {
    let fixture = fixture();
    // Calls 0 to 3 are the four reads in file order; call 4 is the repeat of call 1.
    let eio = SimFault::Errno(5);
    let config = SimConfig { script: vec![(1, eio), (4, eio)], ..SimConfig::calm(1) };
    let mut store = fixture.simulated(4, &config);
    let error = serve(&mut store, 1, &[0, 1, 2, 3]).unwrap_err();
    let StoreError::Read { key, source } = &error else { panic!("{error}") };
    assert_eq!(*key, ExpertKey { layer: 1, expert: 3 }, "the expert in sector 9, second of 6, 9, 10 and 11");
    let IoError::Read { range, errno } = source else { panic!("{source}") };
    assert_eq!((errno.0, range.offset), (5, 9 * SECTOR));
    assert_eq!(error.to_string(), "cannot read expert 3 of layer 1");
    assert_no_slab_is_lost(&store);
    assert_eq!((store.resting(), store.pool().free()), (3, 1), "what arrived is kept, the failed slab is free");
    store.reset_stats();
    assert_eq!(serve(&mut store, 1, &[0, 1, 2, 3]).unwrap(), [0, 1, 2, 3]);
    assert_eq!((store.stats().hits, store.stats().misses), (3, 1));
    assert_no_slab_is_lost(&store);
}

#[test]
fn an_abandoned_request_pins_nothing() {
    let fixture = fixture();
    let (mut store, taken) = fixture.watched(3, &SimConfig::calm(1));
    // Two hits, one read under way, two experts without a slab.
    serve(&mut store, 0, &[0, 1]).unwrap();
    store.request(0, &[0, 1, 2, 3, 4]).unwrap();
    store.abandon();
    assert_no_slab_is_lost(&store);
    assert_eq!(store.resting(), 3, "the read under way was waited for and kept");
    taken.lock().unwrap().clear();
    store.request(1, &[0, 1, 2, 3, 4, 5]).unwrap();
    assert_eq!(taken.lock().unwrap().len(), 3, "every slab can be had");
    store.abandon();
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_device_that_died_with_every_slab_is_an_error_for_the_next_request_too() {
    let fixture = fixture();
    for slabs in [1, 2, 6] {
        let mut store = fixture.store(slabs, |_| Box::<DiesWithItsReads>::default());
        for _ in 0..3 {
            let error = serve(&mut store, 0, &[0, 1]).unwrap_err();
            assert!(matches!(error, StoreError::Device(IoError::DeviceDied { .. })), "{error}");
        }
    }
}

#[test]
fn a_device_that_dies_in_the_simulator_is_named_and_stays_dead() {
    let fixture = fixture();
    for at in 0..3 {
        let config = SimConfig { script: vec![(at, SimFault::Die)], ..SimConfig::calm(1) };
        let mut store = fixture.simulated(3, &config);
        // The read that was cut off may be named first; whoever asks after that hears of the death.
        serve(&mut store, 0, &[0, 2, 3]).unwrap_err();
        for _ in 0..3 {
            let error = serve(&mut store, 0, &[0, 2, 3]).unwrap_err();
            assert!(matches!(error, StoreError::Device(IoError::DeviceDied { .. })), "{error}");
        }
    }
}

/// A cache kept in plain lists and searched from end to end.
struct Naive {
    empty: usize,
    /// Evictable experts, used longest ago first.
    resting: Vec<(usize, u16)>,
}

impl Naive {
    /// Serves a request; returns the experts read, in order.
    fn serve(&mut self, layer: usize, experts: &[u16]) -> Vec<u16> {
        let (hits, mut missing): (Vec<u16>, Vec<u16>) =
            experts.iter().partition(|&&expert| self.resting.contains(&(layer, expert)));
        self.resting.retain(|&(l, expert)| l != layer || !hits.contains(&expert));
        missing.sort_by_key(|&expert| sector_of(layer, expert.into()));
        let mut missing = VecDeque::from(missing);
        let (mut lendable, mut read) = (VecDeque::from(hits), vec![]);
        loop {
            while let Some(&expert) = missing.front() {
                match (self.empty, self.resting.is_empty()) {
                    (0, true) => break,
                    (0, false) => drop(self.resting.remove(0)),
                    _ => self.empty -= 1,
                }
                missing.pop_front();
                read.push(expert);
                lendable.push_back(expert);
            }
            let Some(expert) = lendable.pop_front() else { return read };
            self.resting.push((layer, expert));
        }
    }
}

fn requests() -> impl Strategy<Value = Vec<(usize, Vec<u16>)>> {
    let experts = prop::sample::subsequence((0..EXPERTS as u16).collect::<Vec<_>>(), 1..=EXPERTS);
    prop::collection::vec((0..LAYERS, experts), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn reads_what_a_naive_cache_reads(slabs in 1..13usize, requests in requests()) {
        let fixture = fixture();
        let (mut store, taken) = fixture.watched(slabs, &SimConfig::calm(3));
        let mut naive = Naive { empty: slabs, resting: vec![] };
        for (layer, experts) in requests {
            taken.lock().unwrap().clear();
            let mut lent = serve(&mut store, layer, &experts).unwrap();
            lent.sort_unstable();
            prop_assert_eq!(&lent, &experts);
            let read: Vec<u64> = naive.serve(layer, &experts).iter().map(|&e| sector_of(layer, e.into())).collect();
            prop_assert_eq!(&*taken.lock().unwrap(), &read);
            prop_assert_eq!(store.resting(), naive.resting.len());
            assert_no_slab_is_lost(&store);
        }
    }

    #[test]
    fn a_storm_gives_the_right_bytes_or_a_named_error(
        slabs in 1..13usize, queue in 1..8usize, seed in any::<u64>(), requests in requests(),
    ) {
        let fixture = fixture();
        let config = SimConfig { queue, eio_per_mille: 100, zero_per_mille: 50, ..SimConfig::stormy(seed) };
        let mut store = fixture.simulated(slabs, &config);
        for (layer, experts) in requests {
            match serve(&mut store, layer, &experts) {
                Ok(mut lent) => {
                    lent.sort_unstable();
                    prop_assert_eq!(&lent, &experts);
                }
                Err(StoreError::Read { key, .. }) => {
                    prop_assert_eq!(usize::from(key.layer), layer);
                    prop_assert!(experts.contains(&key.expert));
                }
                Err(StoreError::Device(e)) => prop_assert!(false, "the device lives: {e}"),
                Err(StoreError::Damaged(e)) => prop_assert!(false, "nothing is checked: {e}"),
                Err(StoreError::Spoilt(e)) => prop_assert!(false, "nothing is checked: {e}"),
                Err(StoreError::Unfit(e)) => prop_assert!(false, "nothing is quantized: {e}"),
                Err(StoreError::GivenUp) => prop_assert!(false, "nobody watches"),
            }
            assert_no_slab_is_lost(&store);
        }
    }
}

/// Checks that know every expert's span and hash, read from the file by other means.
fn checks(fixture: &Fixture, store: &ExpertStore, verify: Verify, seed: u64) -> Checks {
    let path = fixture.files.path(FileId(0)).to_owned();
    let bytes = std::fs::read(&path).unwrap();
    let expected = |key: ExpertKey| {
        let offset = sector_of(key.layer.into(), key.expert.into()) * SECTOR;
        let hash = xxhash_rust::xxh3::xxh3_64(&bytes[offset as usize..][..72]);
        Some((FileSpan { file: FileId(0), offset, len: 72 }, hash))
    };
    let (checks, unchecked) = Checks::new(&store.table, verify, seed, fixture.files.clone(), expected);
    assert_eq!(unchecked, 0);
    checks
}

/// Flips a bit of the last useful byte of an expert, behind the back of everybody.
fn damage(fixture: &Fixture, layer: usize, expert: usize) -> (u64, u64) {
    use std::os::unix::fs::FileExt;
    let offset = sector_of(layer, expert) * SECTOR;
    let mut bytes = [0; 72];
    let file = fixture._file.as_file();
    file.read_exact_at(&mut bytes, offset).unwrap();
    let before = xxhash_rust::xxh3::xxh3_64(&bytes);
    bytes[71] ^= 1;
    file.write_all_at(&bytes[71..], offset + 71).unwrap();
    (before, xxhash_rust::xxh3::xxh3_64(&bytes))
}

#[test]
fn with_every_read_checked_a_damaged_expert_is_refused_each_time_and_the_others_are_served() {
    let fixture = fixture();
    let mut store = fixture.simulated(3, &SimConfig::calm(1));
    store.set_checks(checks(&fixture, &store, Verify::All, 0));
    let (before, after) = damage(&fixture, 1, 4);
    for _ in 0..2 {
        let error = serve(&mut store, 1, &[2, 4]).unwrap_err();
        let StoreError::Damaged(damaged) = &error else { panic!("{error}") };
        assert_eq!(damaged.key, ExpertKey { layer: 1, expert: 4 });
        assert_eq!((damaged.expected, damaged.found), (before, after));
        // 4 * 5 % 6 = 2: the third sector of the second layer.
        assert_eq!((damaged.span.offset, damaged.span.len), (8 * SECTOR, 72));
        let text = error.to_string();
        for part in ["expert 4 of layer 1", "72 bytes at 32768", &format!("{before:016x}"), &format!("{after:016x}")] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(text.contains(fixture.files.path(FileId(0)).to_str().unwrap()));
        assert_no_slab_is_lost(&store);
        assert_eq!(serve(&mut store, 1, &[0, 1, 2, 3, 5]).unwrap().len(), 5);
    }
    assert_eq!(store.stats().checked, store.device_stats().reads, "each read, the refused ones too");
}

#[test]
fn unchecked_a_damaged_expert_is_not_noticed() {
    let fixture = fixture();
    let mut store = fixture.simulated(3, &SimConfig::calm(1));
    store.set_checks(checks(&fixture, &store, Verify::Off, 0));
    damage(&fixture, 0, 0);
    store.request(0, &[0]).unwrap();
    let lease = store.next_ready().unwrap().unwrap();
    store.release(lease).unwrap();
    assert_eq!(store.stats().checked, 0);
}

#[test]
fn a_sample_checks_the_first_read_of_what_the_seed_draws_and_refuses_it_until_it_is_whole() {
    let fixture = fixture();
    // Twelve experts at one in 64: look for a seed that draws one of them, and one that draws none.
    let drawn = |seed| {
        let mut store = fixture.simulated(1, &SimConfig::calm(1));
        store.set_checks(checks(&fixture, &store, Verify::Sample, seed));
        let mut drawn = vec![];
        for layer in 0..LAYERS {
            for expert in 0..EXPERTS as u16 {
                let before = store.stats().checked;
                serve(&mut store, layer, &[expert]).unwrap();
                drawn.extend((store.stats().checked > before).then_some((layer, expert)));
            }
        }
        // One slab: all of them are read again, and none is a first read.
        let (before, reads) = (store.stats(), store.device_stats().reads);
        for layer in 0..LAYERS {
            serve(&mut store, layer, &[0, 1, 2, 3, 4, 5]).unwrap();
        }
        assert_eq!((store.stats().checked, store.device_stats().reads), (before.checked, reads + 12));
        drawn
    };
    assert!((0..64).any(|seed| drawn(seed).is_empty()));
    let (seed, drawn) = (0..).map(|seed| (seed, drawn(seed))).find(|(_, drawn)| drawn.len() == 1).unwrap();
    let (layer, expert) = drawn[0];
    let mut store = fixture.simulated(1, &SimConfig::calm(1));
    store.set_checks(checks(&fixture, &store, Verify::Sample, seed));
    damage(&fixture, layer, expert.into());
    for _ in 0..3 {
        assert!(matches!(serve(&mut store, layer, &[expert]), Err(StoreError::Damaged(_))));
    }
    damage(&fixture, layer, expert.into());
    assert_eq!(serve(&mut store, layer, &[expert]).unwrap(), [expert]);
}

#[test]
fn a_hash_of_other_bytes_than_the_expert_is_not_used() {
    let fixture = fixture();
    let store = fixture.simulated(1, &SimConfig::calm(1));
    let expected = |key: ExpertKey| {
        let offset = sector_of(key.layer.into(), key.expert.into()) * SECTOR;
        let len = if key.expert == 0 { 71 } else { 72 };
        (key.expert != 1).then_some((FileSpan { file: FileId(0), offset, len }, 0))
    };
    let (_, unchecked) = Checks::new(&store.table, Verify::All, 0, fixture.files.clone(), expected);
    assert_eq!(unchecked, 2 * LAYERS, "experts 0 and 1 of each layer");
}
