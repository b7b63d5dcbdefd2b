//! What follows from bytes that were wrong: for what rests, for what is gone, and for what comes later.

use super::*;

/// Gives the fixture a mirror that is wrong in the last useful byte of every expert, and is read as long as it is trusted:
/// the model's own file counts as one that failed once.
fn wrong_mirror(fixture: &mut Fixture) -> (tempfile::TempDir, PathBuf) {
    let mirror = copied(fixture, flip);
    fixture.files.avoid(FileId(0), 0, &IoError::DeviceDied { cause: "test".to_owned() });
    mirror
}

fn flip(bytes: &mut [u8]) {
    bytes.chunks_mut(SECTOR as usize).for_each(|expert| expert[71] ^= 1);
}

/// A seed whose sample is one expert of the second layer and none of the first.
fn drawn(fixture: &Fixture) -> (u64, u16) {
    for seed in 0.. {
        let mut store = fixture.simulated(1, &SimConfig::calm(1));
        store.set_checks(checks(fixture, &store, Verify::Sample, seed));
        let mut drawn = vec![];
        for (layer, expert) in (0..LAYERS).flat_map(|layer| (0..EXPERTS as u16).map(move |expert| (layer, expert))) {
            let before = store.stats().checked;
            serve(&mut store, layer, &[expert]).unwrap();
            drawn.extend((store.stats().checked > before).then_some((layer, expert)));
        }
        if let [(1, expert)] = drawn[..] {
            return (seed, expert);
        }
    }
    unreachable!("some seed draws it")
}

/// A store that checks what `seed` draws, and the first reads only where `first` says so.
fn sampled(fixture: &Fixture, slabs: usize, seed: u64, first: bool) -> ExpertStore {
    let mut store = fixture.simulated(slabs, &SimConfig::calm(1));
    let mut checks = checks(fixture, &store, Verify::Sample, seed);
    if !first {
        checks.first = 0;
        checks.first_of.clear();
    }
    store.set_checks(checks);
    store
}

/// Takes what is served without looking at it.
fn take(store: &mut ExpertStore, layer: usize, experts: &[u16]) {
    store.request(layer, experts).unwrap();
    while let Some(lease) = store.next_ready().unwrap() {
        store.release(lease).unwrap();
    }
}

const ALL: [u16; EXPERTS] = [0, 1, 2, 3, 4, 5];

#[test]
fn a_mirror_that_is_no_copy_is_found_before_any_of_it_is_used() {
    let mut fixture = fixture();
    let (seed, _) = drawn(&fixture);
    for slabs in [1, 3, 12] {
        let _mirror = wrong_mirror(&mut fixture);
        let mut store = sampled(&fixture, slabs, seed, true);
        for layer in [0, 1, 0] {
            assert_eq!(serve(&mut store, layer, &ALL).unwrap().len(), EXPERTS);
        }
        let stats = store.stats();
        assert!(stats.healed > 0 && stats.discarded == 0, "{stats:?}");
        assert_no_slab_is_lost(&store);
    }
}

#[test]
fn a_mirror_that_is_wrong_in_a_later_layer_only_is_found_at_its_first_read() {
    let mut fixture = fixture();
    let (seed, drawn) = drawn(&fixture);
    let _mirror = copied(&mut fixture, |bytes| flip(&mut bytes[EXPERTS * SECTOR as usize..]));
    fixture.files.avoid(FileId(0), 0, &IoError::DeviceDied { cause: "test".to_owned() });
    let mut store = fixture.simulated(12, &SimConfig::calm(1));
    let mut checks = checks(&fixture, &store, Verify::Sample, seed);
    // As of a model whose first layers have used them up.
    checks.first = 0;
    store.set_checks(checks);
    assert_eq!(serve(&mut store, 0, &ALL).unwrap().len(), EXPERTS);
    assert_eq!((store.stats().checked, store.stats().healed), (2, 0), "one for each drive");
    let other = (drawn + 1) % EXPERTS as u16;
    assert_eq!(serve(&mut store, 1, &[other]).unwrap(), [other]);
    assert_eq!(store.stats().healed, 1);
}

#[test]
fn what_a_wrong_mirror_left_in_memory_ends_the_request_and_is_read_again() {
    let mut fixture = fixture();
    let (seed, expert) = drawn(&fixture);
    let _mirror = wrong_mirror(&mut fixture);
    let mut store = sampled(&fixture, 7, seed, false);
    take(&mut store, 0, &ALL);
    assert_eq!(store.stats().checked, 0, "the sample found nothing");
    let error = serve(&mut store, 1, &[expert]).unwrap_err();
    let StoreError::Spoilt(damaged) = &error else { panic!("{error}") };
    assert_eq!(damaged.key.layer, 0);
    let text = error.to_string();
    assert!(text.contains("computed so far is wrong") && text.contains(" of layer 0 was used"), "{text}");
    let stats = store.stats();
    assert_eq!((stats.checked, stats.healed, stats.discarded), (7, 1, 6), "one was read and six rested");
    assert_no_slab_is_lost(&store);
    assert_eq!(store.resting(), 1);
    assert_eq!(serve(&mut store, 1, &[expert]).unwrap(), [expert], "a hit, put right");
    assert_eq!(serve(&mut store, 0, &ALL).unwrap().len(), EXPERTS);
    let stats = store.stats();
    assert_eq!((stats.hits, stats.checked), (1, 7 + 6), "each read again was checked");
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_wrong_expert_that_is_gone_again_ends_the_request_too() {
    let mut fixture = fixture();
    let (seed, expert) = drawn(&fixture);
    let (_mirror, copy) = wrong_mirror(&mut fixture);
    let mut store = sampled(&fixture, 1, seed, false);
    take(&mut store, 0, &[3, 4]);
    // The one slab is emptied for the read that is checked, so that nothing rests.
    let error = serve(&mut store, 1, &[expert]).unwrap_err();
    let StoreError::Spoilt(damaged) = &error else { panic!("{error}") };
    assert_eq!((damaged.key.layer, &damaged.shard), (0, &copy), "the copy that is wrong is named");
    assert_eq!((store.stats().healed, store.stats().discarded), (1, 0));
    assert_eq!(serve(&mut store, 0, &[3, 4]).unwrap().len(), 2, "told once");
}

#[test]
fn what_was_right_when_it_was_read_does_not_end_the_request() {
    let mut fixture = fixture();
    let (seed, expert) = drawn(&fixture);
    let (_mirror, copy) = copied(&mut fixture, |_| ());
    for slabs in [1, 7] {
        let mut bytes = std::fs::read(fixture.files.path(FileId(0))).unwrap();
        std::fs::write(&copy, &bytes).unwrap();
        let mut store = sampled(&fixture, slabs, seed, true);
        assert_eq!(serve(&mut store, 0, &ALL).unwrap().len(), EXPERTS);
        flip(&mut bytes);
        std::fs::write(&copy, &bytes).unwrap();
        for layer in [1, 0] {
            assert_eq!(serve(&mut store, layer, &[expert]).unwrap(), [expert]);
        }
    }
}

#[test]
fn once_something_was_wrong_every_read_is_checked() {
    let fixture = fixture();
    let (seed, expert) = drawn(&fixture);
    let mut store = sampled(&fixture, 2, seed, false);
    let other = (expert + 1) % EXPERTS as u16;
    for bad in [expert, other] {
        damage(&fixture, 1, bad.into());
    }
    take(&mut store, 1, &[other]);
    assert!(matches!(serve(&mut store, 1, &[expert]), Err(StoreError::Damaged(e)) if e.key.expert == expert));
    assert!(matches!(store.confirm(), Err(StoreError::Spoilt(e)) if e.key.expert == other));
    // It is not served again, and its read is refused.
    assert!(matches!(serve(&mut store, 1, &[other]), Err(StoreError::Damaged(e)) if e.key.expert == other));
    assert_eq!(serve(&mut store, 0, &[0, 1]).unwrap().len(), 2);
    assert_eq!((store.stats().checked, store.stats().hits), (1 + 1 + 1 + 2, 0));
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_lent_expert_that_was_wrong_is_served_no_more_and_its_slab_comes_back() {
    let fixture = fixture();
    let (seed, expert) = drawn(&fixture);
    let mut store = sampled(&fixture, 3, seed, false);
    damage(&fixture, 1, expert.into());
    damage(&fixture, 0, 4);
    store.request(0, &[4]).unwrap();
    let lease = store.next_ready().unwrap().unwrap();
    assert!(store.next_ready().unwrap().is_none());
    assert!(matches!(serve(&mut store, 1, &[expert]), Err(StoreError::Damaged(_))));
    assert!(store.confirm().is_err());
    for layer in [0, 1] {
        assert!(matches!(serve(&mut store, layer, &[4]), Err(StoreError::Spoilt(_))), "it is still in use");
    }
    store.release(lease).unwrap();
    assert!(matches!(serve(&mut store, 0, &[4]), Err(StoreError::Damaged(_))), "it is read again");
    for layer in [0, 1] {
        assert_eq!(serve(&mut store, layer, &[(expert + 1) % 4]).unwrap().len(), 1);
    }
    assert_no_slab_is_lost(&store);
}
