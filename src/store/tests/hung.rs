//! Drives that answer late or never, on the simulator's clock: nothing here takes as long as it says.

use std::ops::ControlFlow;

use super::*;

/// A store whose calls, counted from 0, take as long as `stalls` says, and what its watch was told. The watch breaks
/// the wait once the counter of `patience` runs out.
fn watched(
    fixture: &Fixture,
    slabs: usize,
    stalls: &[(u64, u64)],
    patience: Arc<Mutex<u64>>,
) -> (ExpertStore, Arc<Mutex<Vec<Notice>>>) {
    let script = stalls.iter().map(|&(call, seconds)| (call, SimFault::Stall(Duration::from_secs(seconds)))).collect();
    let mut store = fixture.simulated(slabs, &SimConfig { script, reorder: true, ..SimConfig::calm(1) });
    let told = Arc::new(Mutex::new(vec![]));
    let all = told.clone();
    let watch = move |what| {
        all.lock().unwrap().push(what);
        let mut left = patience.lock().unwrap();
        *left = left.saturating_sub(1);
        if *left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    store.set_watch(Box::new(watch), fixture.files.clone());
    (store, told)
}

fn endless() -> Arc<Mutex<u64>> {
    Arc::new(Mutex::new(u64::MAX))
}

fn is_waiting(what: &Notice) -> bool {
    *what == Notice::Waiting
}

#[test]
fn a_read_that_hangs_is_named_after_thirty_seconds_then_at_doubled_times_and_its_answer_is_told() {
    let fixture = fixture();
    // In file order the reads are of experts 5 (call 0), 4 and 2; sectors 7, 8 and 10.
    let (mut store, told) = watched(&fixture, 3, &[(0, 200), (2, 500)], endless());
    assert_eq!(serve(&mut store, 1, &[2, 4, 5]).unwrap(), [4, 5, 2]);
    let mut told = told.lock().unwrap().clone();
    told.retain(|what| !is_waiting(what));
    let hung = |expert, sector: u64, reads, seconds| {
        Notice::Hung(Hung {
            key: ExpertKey { layer: 1, expert },
            file: fixture.files.path(FileId(0)).to_owned(),
            offset: sector * SECTOR,
            bytes: SECTOR,
            reads,
            waited: Duration::from_secs(seconds),
        })
    };
    let answered = |seconds| Notice::Answered { waited: Duration::from_secs(seconds) };
    let expected = [
        hung(5, 7, 2, 30),
        hung(5, 7, 2, 60),
        hung(5, 7, 2, 120),
        // The step in which the answer comes is not counted as waited.
        Notice::Answered { waited: Duration::from_millis(199_900) },
        // From 200 to 500 seconds nothing more is answered.
        hung(2, 10, 1, 30),
        hung(2, 10, 1, 60),
        hung(2, 10, 1, 120),
        hung(2, 10, 1, 240),
        answered(300),
    ];
    assert_eq!(told.len(), expected.len(), "{told:?}");
    for (told, expected) in told.iter().zip(&expected) {
        match (told, expected) {
            (Notice::Answered { waited }, Notice::Answered { waited: expected }) => {
                assert!(waited.abs_diff(*expected) <= Duration::from_millis(100), "{waited:?}");
            }
            _ => assert_eq!(told, expected),
        }
    }
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_slow_read_is_not_worth_a_word() {
    let fixture = fixture();
    let (mut store, told) = watched(&fixture, 3, &[(0, 29)], endless());
    assert_eq!(serve(&mut store, 0, &[1]).unwrap(), [1]);
    let told = told.lock().unwrap();
    assert!(told.iter().all(is_waiting) && told.len() >= 289, "asked ten times a second: {}", told.len());
}

#[test]
fn the_notice_says_which_expert_where_and_how_long() {
    let hung = Hung {
        key: ExpertKey { layer: 7, expert: 211 },
        file: "/models/glm/experts-03.safetensors".into(),
        offset: 19_922_944,
        bytes: 65_536,
        reads: 3,
        waited: Duration::from_secs(60),
    };
    assert_eq!(
        hung.to_string(),
        "the drive has not answered for 60 s: expert 211 of layer 7, 65536 bytes at 19922944 of \
         /models/glm/experts-03.safetensors, and 2 more"
    );
}

#[test]
fn a_wait_that_is_given_up_keeps_the_slabs_and_the_next_request_waits_for_them() {
    let fixture = fixture();
    let patience = Arc::new(Mutex::new(400));
    let (mut store, told) = watched(&fixture, 3, &[(0, 100)], patience.clone());
    // Three slabs for four experts: one read hangs, one expert has no slab yet.
    let error = serve(&mut store, 0, &[0, 1, 2, 3]).unwrap_err();
    assert!(matches!(error, StoreError::GivenUp), "{error}");
    assert_eq!(told.lock().unwrap().len(), 400, "asked no more once it broke");
    assert!(store.gave_up());
    assert_eq!((store.device().in_flight(), store.pool().free()), (1, 0), "the slab stays with the device");

    // Given up again: 40 of the 100 seconds went by, 10 more do.
    *patience.lock().unwrap() = 100;
    assert!(matches!(store.request(0, &[2]), Err(StoreError::GivenUp)));
    assert_eq!(store.device().in_flight(), 1);
    *patience.lock().unwrap() = u64::MAX;
    told.lock().unwrap().clear();
    assert_eq!(serve(&mut store, 0, &[0, 1, 2, 3]).unwrap().len(), 4);
    assert!(!store.gave_up());
    assert!(matches!(told.lock().unwrap().last(), Some(Notice::Answered { .. })));
    assert_no_slab_is_lost(&store);
}

#[test]
fn a_hung_read_that_fails_at_last_is_answered_too() {
    let fixture = fixture();
    // A stall, then both tries of the read fail.
    let stall = SimFault::Stall(Duration::from_secs(45));
    let eio = SimFault::Errno(5);
    let script = vec![(0, stall), (1, eio), (2, eio)];
    let mut store = fixture.simulated(2, &SimConfig { script, ..SimConfig::calm(1) });
    let told = Arc::new(Mutex::new(vec![]));
    let all = told.clone();
    let watch = move |what| {
        all.lock().unwrap().push(what);
        ControlFlow::Continue(())
    };
    store.set_watch(Box::new(watch), fixture.files.clone());
    let error = serve(&mut store, 0, &[0, 1]).unwrap_err();
    assert!(matches!(error, StoreError::Read { .. }), "{error}");
    let told = told.lock().unwrap();
    assert_eq!(told.iter().filter(|what| matches!(what, Notice::Hung(_))).count(), 1);
    assert_eq!(told.iter().filter(|what| matches!(what, Notice::Answered { .. })).count(), 1);
    assert_no_slab_is_lost(&store);
}

#[test]
fn the_mirror_that_hangs_is_named_and_not_the_model() {
    let mut fixture = fixture();
    let (_dir, copy) = copied(&mut fixture, |_| {});
    for (hung, path) in [(0, fixture.files.path(FileId(0)).to_owned()), (1, copy)] {
        let config = SimConfig { hangs: Some((hung, 0)), reorder: true, ..SimConfig::calm(1) };
        let mut store = fixture.simulated(6, &config);
        let named = Arc::new(Mutex::new(None));
        let seen = named.clone();
        let watch = move |what| match what {
            Notice::Hung(hung) => {
                *seen.lock().unwrap() = Some(hung.file);
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        };
        store.set_watch(Box::new(watch), fixture.files.clone());
        assert!(matches!(serve(&mut store, 0, &[0, 1, 2, 3, 4, 5]), Err(StoreError::GivenUp)));
        assert_eq!(named.lock().unwrap().take(), Some(path));
    }
}
