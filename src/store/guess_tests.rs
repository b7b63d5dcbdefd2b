//! Guesses: what they read, what they cost, and that nobody who asks is worse off for them.

use super::*;

/// Serves a request with a hint in its middle, as a layer does.
fn serve_and_hint(store: &mut ExpertStore, layer: usize, experts: &[u16], guess: &[u16]) -> Result<(), StoreError> {
    store.request(layer, experts)?;
    store.hint(layer + 1, guess);
    while let Some(lease) = store.next_ready()? {
        check_weights(store, layer, &lease);
        store.release(lease)?;
    }
    Ok(())
}

/// Reads begin one after the other, so that some guesses have not begun when they are judged.
fn one_call() -> SimConfig {
    SimConfig { calls: 1, ..SimConfig::calm(1) }
}

/// A drive that finishes reads only while somebody waits for one.
struct Slow {
    device: Box<dyn Device>,
    taken_back: usize,
    taken: Arc<Mutex<Vec<u64>>>,
}

impl Device for Slow {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        self.device.submit(read, slab)?;
        self.taken.lock().unwrap().push(read.segments[0].offset / SECTOR);
        Ok(())
    }
    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError> {
        if wait == Wait::No && self.taken_back == 0 {
            return Ok(None);
        }
        let done = self.device.reap(wait)?;
        let cancelled = done.as_ref().is_some_and(|done| done.result == Err(IoError::Cancelled));
        self.taken_back -= usize::from(cancelled);
        Ok(done)
    }
    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
    fn cancel_lookahead(&mut self) -> usize {
        let count = self.device.cancel_lookahead();
        self.taken_back += count;
        count
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

/// A store over such a drive, and the sectors it took reads of.
fn slow(fixture: &Fixture, slabs: usize) -> (ExpertStore, Arc<Mutex<Vec<u64>>>) {
    let taken = Arc::new(Mutex::new(vec![]));
    let store = fixture.store(slabs, |pool| {
        let device = sim_device(&one_call(), fixture.files.clone(), pool).unwrap();
        Box::new(Slow { device, taken_back: 0, taken: taken.clone() })
    });
    (store, taken)
}

fn sectors(layer: usize, experts: &[usize]) -> Vec<u64> {
    experts.iter().map(|&expert| sector_of(layer, expert)).collect()
}

#[test]
fn a_right_guess_is_read_once_and_is_there() {
    let fixture = fixture();
    let (mut store, taken) = fixture.watched(6, &SimConfig::calm(1));
    store.allow_guesses(3, 2);
    serve_and_hint(&mut store, 0, &[0, 1], &[4, 2]).unwrap();
    assert_eq!(serve(&mut store, 1, &[2, 4]).unwrap().len(), 2);
    assert_eq!(*taken.lock().unwrap(), [sectors(0, &[0, 1]), sectors(1, &[4, 2])].concat());
    let stats = store.stats();
    assert_eq!((stats.requested, stats.hits, stats.prefetched + stats.late), (4, 0, 2));
    assert_eq!((stats.misses, stats.guessed, stats.wasted, stats.cancelled), (2 + stats.late, 2, 0, 0));
    // From then on it is a member of the cache like any other.
    serve(&mut store, 1, &[2, 4]).unwrap();
    assert_eq!(store.stats().hits, 2);
    assert_no_slab_is_lost(&store);
}

#[test]
fn guesses_that_misses_leave_no_slab_are_read_once_those_have_theirs() {
    let fixture = fixture();
    // A request of twice the slabs there are, as a long prompt makes it: while it is served, slabs come free for what
    // comes after it, two of three for guesses.
    let (mut store, taken) = fixture.watched(3, &SimConfig::calm(1));
    store.allow_guesses(2, 1);
    serve_and_hint(&mut store, 0, &[0, 1, 2, 3, 4, 5], &[4, 2, 3]).unwrap();
    assert_eq!(taken.lock().unwrap()[..6].iter().collect::<std::collections::BTreeSet<_>>().len(), 6);
    assert_eq!(taken.lock().unwrap()[6..], sectors(1, &[4, 2]), "after every miss, the likeliest first");
    store.reset_stats();
    serve(&mut store, 1, &[2, 3, 4]).unwrap();
    let stats = store.stats();
    assert_eq!((stats.prefetched + stats.late, stats.misses), (2, 1 + stats.late));
    // What waits is forgotten with its request.
    serve_and_hint(&mut store, 0, &[0], &[]).unwrap();
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_guess_that_is_still_being_read_is_waited_for_and_not_read_again() {
    let fixture = fixture();
    let (mut store, taken) = slow(&fixture, 6);
    store.allow_guesses(4, 2);
    serve_and_hint(&mut store, 0, &[0], &[1, 2, 3]).unwrap();
    // The drive has 1, the likeliest, and 2 and 3 wait, in sectors 10 and 9: now demands like 5, in 7.
    assert_eq!(serve(&mut store, 1, &[1, 2, 3, 5]).unwrap(), [1, 5, 3, 2]);
    let stats = store.stats();
    assert_eq!((stats.late, stats.guessed, stats.cancelled, stats.wasted), (3, 3, 0, 0));
    assert_eq!((stats.requested, stats.hits, stats.prefetched, stats.misses), (5, 0, 0, 5));
    assert_eq!(taken.lock().unwrap().len(), 5, "each expert once");
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_wrong_guess_is_taken_back_where_it_has_not_begun_and_evicted_first_where_it_has() {
    let fixture = fixture();
    let (mut store, _) = slow(&fixture, 6);
    serve(&mut store, 0, &[3, 4]).unwrap();
    store.allow_guesses(3, 2);
    serve_and_hint(&mut store, 0, &[0], &[1, 2, 3]).unwrap();
    // One of three is with the drive by now.
    serve(&mut store, 1, &[5]).unwrap();
    store.drop_guesses();
    let stats = store.stats();
    assert_eq!((stats.guessed, stats.cancelled, stats.wasted, stats.wasted_bytes), (3, 2, 1, SECTOR));
    assert_no_slab_is_lost(&store);
    assert_eq!((store.resting(), store.pool().free()), (5, 1), "the miss took a slot whose guess was taken back");
    // The empty slot and the one of the wrong guess are used up before anything that was asked for goes.
    store.reset_stats();
    serve(&mut store, 0, &[5]).unwrap();
    serve(&mut store, 1, &[0]).unwrap();
    serve(&mut store, 0, &[0, 3, 4, 5]).unwrap();
    serve(&mut store, 1, &[0, 5]).unwrap();
    assert_eq!((store.stats().hits, store.stats().misses), (6, 2));
}

#[test]
fn a_run_of_wrong_guesses_costs_the_slots_of_the_bound_and_no_more() {
    let fixture = fixture();
    // Five experts that are asked for again and again, and as many slots more as guesses may hold.
    let mut store = fixture.simulated(7, &SimConfig::calm(1));
    store.allow_guesses(2, 2);
    serve(&mut store, 0, &[0, 1, 2, 3]).unwrap();
    serve(&mut store, 1, &[5]).unwrap();
    store.reset_stats();
    for round in 0..10 {
        let wrong = [0, 1, 2, 3].map(|i| (round + i) % 5);
        serve_and_hint(&mut store, 0, &[0, 1, 2, 3], &wrong).unwrap();
        serve(&mut store, 1, &[5]).unwrap();
    }
    store.drop_guesses();
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses), (50, 0), "{stats:?}");
    assert!(stats.guessed >= 10 && stats.guessed <= 20, "{stats:?}");
    assert_eq!(stats.wasted + stats.cancelled, stats.guessed);
}

#[test]
fn demand_always_finds_the_slots_that_were_kept_for_it() {
    let fixture = fixture();
    for (slabs, most, demand) in [(6, 9, 2), (6, 9, 5), (4, 3, 3), (3, 1, 2), (2, 5, 1), (1, 8, 1), (1, 8, 0)] {
        let (mut store, taken) = fixture.watched(slabs, &one_call());
        store.allow_guesses(most, demand);
        store.request(0, &[0]).unwrap();
        store.hint(1, &[0, 1, 2, 3, 4, 5]);
        let guessed = store.stats().guessed as usize;
        assert!(guessed <= most.min(slabs - demand.max(1)), "{guessed} guesses in {slabs} slabs");
        let lease = store.next_ready().unwrap().unwrap();
        store.release(lease).unwrap();
        // Another layer than the guesses are for: they stay, and what is left is enough.
        taken.lock().unwrap().clear();
        store.request(0, &[1, 2, 3, 4, 5]).unwrap();
        assert!(taken.lock().unwrap().len() >= demand.min(5), "{slabs} slabs, {demand} for demand");
        store.abandon();
        assert_no_slab_is_lost(&store);
    }
}

#[test]
fn pinned_experts_and_guesses_together_leave_demand_its_slots() {
    let fixture = fixture();
    let (mut store, taken) = fixture.watched(4, &one_call());
    // Two are pinned, the half of the cache.
    let history =
        (0..2 * EXPERTS as u64).map(|key| [500_000, 400_000].get(key as usize).copied().unwrap_or(0)).collect();
    store.remember(history, 1, Some(true));
    assert_eq!(store.pinned(), 2);
    store.allow_guesses(2, 1);
    // Before they are there they have their slots too.
    serve_and_hint(&mut store, 0, &[], &[3, 4]).unwrap();
    assert_eq!(*taken.lock().unwrap(), sectors(1, &[3]));
    store.drop_guesses();
    serve_and_hint(&mut store, 0, &[0, 1], &[3, 4]).unwrap();
    assert_eq!(serve(&mut store, 0, &[2]).unwrap(), [2]);
    assert_eq!(store.tier(ExpertKey { layer: 0, expert: 1 }), Tier::Pinned);
    assert_no_slab_is_lost(&store);
}

#[test]
fn nothing_is_guessed_while_a_miss_waits_for_a_slab_or_when_nothing_is_allowed() {
    let fixture = fixture();
    let (mut store, taken) = fixture.watched(3, &SimConfig::calm(1));
    store.hint(0, &[0, 1]);
    assert_eq!(taken.lock().unwrap().len(), 0, "guesses are off until they are allowed");
    store.allow_guesses(2, 1);
    store.request(0, &[0, 1, 2, 3]).unwrap();
    store.hint(1, &[0, 1]);
    assert_eq!((taken.lock().unwrap().len(), store.stats().guessed), (3, 0));
    store.abandon();
}

#[test]
fn a_guess_that_fails_is_silent_and_its_expert_is_read_for_who_asks() {
    let fixture = fixture();
    // Call 1 is the guess and call 2 its repeat.
    let eio = SimFault::Errno(5);
    let config = SimConfig { script: vec![(1, eio), (2, eio)], ..SimConfig::calm(1) };
    let mut store = fixture.simulated(4, &config);
    store.allow_guesses(2, 1);
    serve_and_hint(&mut store, 0, &[0], &[1]).unwrap();
    store.drop_guesses();
    assert_no_slab_is_lost(&store);
    assert_eq!(store.resting(), 1);
    assert_eq!(serve(&mut store, 1, &[1]).unwrap(), [1]);
    // The same while somebody waits for it is that one's error.
    let mut store = fixture.simulated(4, &config);
    store.allow_guesses(2, 1);
    store.request(0, &[0]).unwrap();
    store.hint(1, &[1]);
    let lease = store.next_ready().unwrap().unwrap();
    store.release(lease).unwrap();
    if let Err(error) = serve(&mut store, 1, &[1]) {
        assert_eq!(error.to_string(), "cannot read expert 1 of layer 1");
    }
    assert_no_slab_is_lost(&store);
    assert_eq!(serve(&mut store, 1, &[1]).unwrap(), [1]);
}

#[test]
fn a_device_that_dies_under_guesses_is_named_by_the_next_request() {
    let fixture = fixture();
    for at in 1..4 {
        let config = SimConfig { script: vec![(at, SimFault::Die)], ..one_call() };
        let mut store = fixture.simulated(6, &config);
        store.allow_guesses(3, 1);
        let first = serve_and_hint(&mut store, 0, &[0], &[1, 2, 3]);
        let error = first.and_then(|()| serve(&mut store, 1, &[1, 2, 3, 4]).map(drop)).unwrap_err();
        assert!(matches!(error, StoreError::Device(_) | StoreError::Read { .. }), "{error}");
        for _ in 0..2 {
            let error = serve(&mut store, 1, &[1]).unwrap_err();
            assert!(matches!(error, StoreError::Device(IoError::DeviceDied { .. })), "{error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_guesses_give_the_same_experts_and_lose_no_slab(
        slabs in 1..13usize, most in 0..8usize, demand in 0..6usize, queue in 1..8usize, calls in 1..4usize,
        seed in any::<u64>(), requests in requests(),
        guesses in prop::collection::vec(prop::collection::vec(0..EXPERTS as u16, 0..5), 24),
    ) {
        let fixture = fixture();
        let config = SimConfig { queue, calls, eio_per_mille: 60, zero_per_mille: 30, ..SimConfig::stormy(seed) };
        let mut store = fixture.simulated(slabs, &config);
        store.allow_guesses(most, demand);
        for (round, ((_, experts), guess)) in requests.iter().zip(&guesses).enumerate() {
            let layer = round % LAYERS;
            let served = store.request(layer, experts).and_then(|()| {
                store.hint((layer + 1) % LAYERS, guess);
                if seed % 2 == 0 {
                    store.wait_for_all()?;
                }
                let mut lent = vec![];
                while let Some(lease) = store.next_ready()? {
                    check_weights(&store, layer, &lease);
                    lent.push(lease.expert());
                    store.release(lease)?;
                }
                Ok(lent)
            });
            match served {
                Ok(mut lent) => {
                    lent.sort_unstable();
                    prop_assert_eq!(&lent, experts);
                }
                Err(StoreError::Read { key, .. }) => prop_assert!(experts.contains(&key.expert)),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
        store.drop_guesses();
        assert_no_slab_is_lost(&store);
        let s = store.stats();
        prop_assert_eq!(s.requested, s.hits + s.prefetched + s.misses);
        prop_assert!(s.prefetched + s.late + s.cancelled + s.wasted <= s.guessed, "{:?}", s);
    }
}
