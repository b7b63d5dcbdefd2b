use super::*;
use crate::access::IoMode;
use crate::drive::Mirror;
use crate::plan::Segments;

const SLAB: u32 = 1 << 20;
const CHUNK: u32 = 256 << 10;

/// Four chunks a read, over a file nobody reads.
fn schedule(depth_bytes: u64, calls: usize) -> (Schedule, SlabPool, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let files = Arc::new(FileSet::open(&[file.path().to_owned()], IoMode::Buffered).unwrap());
    let pool = SlabPool::new(SLAB as usize, 8).unwrap();
    let whole_when_waiting = usize::MAX;
    let limits = Limits {
        depth_bytes,
        chunk_bytes: CHUNK,
        whole_when_waiting,
        calls,
        calls_of_drive: usize::MAX,
        reads: 8,
        caps: [None; 8],
    };
    (Schedule::new(files, pool.clone(), limits), pool, file)
}

fn read(tag: u64, priority: Priority, offset: u64) -> Read {
    let segment = Segment { file: FileId(0), offset, len: SLAB, at: 0, want: SLAB };
    Read { tag, priority, segments: Segments::from_slice(&[segment]).unwrap() }
}

fn offsets(schedule: &mut Schedule) -> Vec<u64> {
    std::iter::from_fn(|| schedule.next(0)).map(|issue| issue.offset / u64::from(CHUNK)).collect()
}

/// Completes every call that is out, in full, and hands out what may follow; the order of offsets in chunks.
fn run_dry(schedule: &mut Schedule) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(issue) = schedule.next(0) {
        order.push(issue.offset / u64::from(CHUNK));
        schedule.complete(issue.op, issue.len as i32, 0);
    }
    order
}

#[test]
fn demand_goes_first_then_by_offset_and_started_reads_are_finished() {
    let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
    let slab = || pool.take().unwrap();
    let mib = u64::from(SLAB);
    schedule.admit(read(0, Priority::Lookahead, 0), slab(), 0).unwrap();
    let first = schedule.next(0).unwrap();
    schedule.admit(read(1, Priority::Demand, 9 * mib), slab(), 0).unwrap();
    schedule.admit(read(2, Priority::Demand, 5 * mib), slab(), 0).unwrap();
    schedule.admit(read(3, Priority::Lookahead, 2 * mib), slab(), 0).unwrap();
    assert_eq!(offsets(&mut schedule), [], "the depth is one chunk");
    schedule.complete(first.op, CHUNK as i32, 0);
    let (five, nine, zero, two) = ([20, 21, 22, 23], [36, 37, 38, 39], [1, 2, 3], [8, 9, 10, 11]);
    assert_eq!(run_dry(&mut schedule), [&five[..], &nine, &zero, &two].concat());
    let tags: Vec<u64> = std::iter::from_fn(|| schedule.take_ready()).map(|done| done.tag).collect();
    assert_eq!(tags, [2, 1, 0, 3]);
}

#[test]
fn of_guesses_the_first_goes_first_and_what_is_not_handed_out_can_be_taken_back() {
    let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
    for (tag, offset) in [(0, 9), (1, 2), (2, 5)] {
        let read = read(tag, Priority::Lookahead, offset * u64::from(SLAB));
        schedule.admit(read, pool.take().unwrap(), 0).unwrap();
    }
    let handed_out: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
    let chunks: Vec<u64> = handed_out.iter().map(|issue| issue.offset / u64::from(CHUNK)).collect();
    assert_eq!(chunks, [36], "a request of the first, though another lies before it");
    // A millisecond for a request: a third is given to a drive that has two, which are 2 ms of work and far from 2 MiB.
    let now_ns = 1_000_000;
    schedule.complete(handed_out[0].op, CHUNK as i32, now_ns);
    let mut more: Vec<Issue> = std::iter::from_fn(|| schedule.next(now_ns)).collect();
    for _ in 0..2 {
        schedule.complete(more.remove(0).op, CHUNK as i32, now_ns);
        more.extend(schedule.next(now_ns));
    }
    let chunks: Vec<u64> = more.iter().map(|issue| issue.offset / u64::from(CHUNK)).collect();
    assert_eq!(chunks, [39, 8, 9], "the rest of the first, half of the second");
    assert_eq!(schedule.cancel_lookahead(0), 2, "the second, and the third");
    assert!(schedule.next(0).is_none() && !schedule.has_work());
    for issue in more {
        schedule.complete(issue.op, CHUNK as i32, 0);
    }
    let done: Vec<_> =
        std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result, done.bytes)).collect();
    let (whole, cancelled) = (u64::from(SLAB), Err(IoError::Cancelled));
    assert_eq!(done, [(2, cancelled.clone(), 0), (0, Ok(()), whole), (1, cancelled, 2 * u64::from(CHUNK))]);
    assert_eq!((schedule.in_flight(), schedule.started, pool.free()), (0, 0, 8));
}

#[test]
fn while_a_read_is_there_it_is_in_the_queue_or_served_whatever_becomes_of_it() {
    let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
    let admit = |schedule: &mut Schedule, tag, priority, now_ns| {
        schedule.admit(read(tag, priority, tag << 20), pool.take().unwrap(), now_ns).unwrap();
    };
    // A guess alone from 10 to 40 that nothing is handed out of, and is taken back.
    admit(&mut schedule, 0, Priority::Lookahead, 10);
    assert_eq!(schedule.cancel_lookahead(40), 1);
    let times = |schedule: &Schedule| {
        let stats = schedule.stats();
        (stats.queued_ns, stats.service_ns, stats.busy_ns)
    };
    assert_eq!(times(&schedule), (30, 0, 30));
    // A demand from 100 that goes out at 105 and fails at 125, beside a guess from 110 to 120.
    admit(&mut schedule, 1, Priority::Demand, 100);
    let calls: Vec<Issue> = std::iter::from_fn(|| schedule.next(105)).collect();
    admit(&mut schedule, 2, Priority::Lookahead, 110);
    assert_eq!(schedule.cancel_lookahead(120), 1);
    calls.iter().for_each(|issue| schedule.complete(issue.op, -libc::ENODEV, 125));
    assert_eq!((times(&schedule), schedule.stats().reads), ((30 + 5 + 10, 20, 30 + 25), 1));
}

#[test]
fn a_promoted_read_goes_in_its_turn_among_the_demands_and_is_finished_once() {
    let mib = u64::from(SLAB);
    let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
    let slab = || pool.take().unwrap();
    // Being handed out when it is promoted, with a demand in between; queued; and never promoted.
    schedule.admit(read(0, Priority::Lookahead, 0), slab(), 0).unwrap();
    let first = schedule.next(0).unwrap();
    schedule.admit(read(1, Priority::Demand, 7 * mib), slab(), 0).unwrap();
    schedule.complete(first.op, CHUNK as i32, 0);
    let second = schedule.next(0).unwrap();
    assert_eq!(second.offset, 7 * mib);
    for (tag, offset) in [(2, 9), (3, 2), (4, 3)] {
        schedule.admit(read(tag, Priority::Lookahead, offset * mib), slab(), 0).unwrap();
    }
    for tag in [2, 0, 0, 1, 77] {
        schedule.promote(tag);
    }
    assert_eq!(schedule.cancel_lookahead(0), 2);
    schedule.complete(second.op, CHUNK as i32, 0);
    assert_eq!(run_dry(&mut schedule), [29, 30, 31, 36, 37, 38, 39, 1, 2, 3]);
    let done: Vec<_> = std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result)).collect();
    let cancelled = Err(IoError::Cancelled);
    assert_eq!(done, [(4, cancelled.clone()), (3, cancelled), (1, Ok(())), (2, Ok(())), (0, Ok(()))]);
    assert_eq!((schedule.in_flight(), schedule.started, schedule.stats().reads), (0, 0, 3));
}

#[test]
fn a_promoted_read_that_fails_while_it_waits_is_handed_out_no_more() {
    let (mut schedule, pool, _file) = schedule(u64::from(CHUNK) * 2, 64);
    schedule.admit(read(0, Priority::Lookahead, 0), pool.take().unwrap(), 0).unwrap();
    let first = schedule.next(0).unwrap();
    schedule.admit(read(1, Priority::Demand, 64 << 20), pool.take().unwrap(), 0).unwrap();
    let other = schedule.next(0).unwrap();
    schedule.promote(0);
    schedule.complete(first.op, -libc::ENODEV, 0);
    schedule.complete(other.op, CHUNK as i32, 0);
    assert_eq!(run_dry(&mut schedule), [257, 258, 259]);
    let failed = schedule.take_ready().unwrap();
    assert!(failed.tag == 0 && failed.result.is_err());
    assert!(schedule.take_ready().unwrap().result.is_ok());
    assert_eq!((schedule.in_flight(), schedule.started, schedule.has_work()), (0, 0, false));
}

#[test]
fn requests_of_the_drive_are_counted_by_their_size_and_never_pass_the_bound() {
    let chunk = u64::from(CHUNK);
    // Requests of half a chunk, of one, and of more: a call takes two, one, one.
    for (request_bytes, calls_out) in [(chunk / 2, 3), (chunk, 7), (chunk * 3, 7)] {
        let (mut schedule, pool, _file) = schedule(1 << 40, 64);
        schedule.router = Router::new(&[Some(RequestCap { requests: 7, request_bytes })], 1 << 40, usize::MAX);
        for tag in 0..8 {
            let offset = tag * u64::from(SLAB);
            schedule.admit(read(tag, Priority::Demand, offset), pool.take().unwrap(), 0).unwrap();
        }
        let mut out = Vec::new();
        let mut done = 0;
        while done < 8 * u64::from(SLAB / CHUNK) {
            out.extend(std::iter::from_fn(|| schedule.next(0)));
            assert!(out.len() <= calls_out && (out.len() == calls_out || !schedule.has_work()), "{}", out.len());
            let issue: Issue = out.pop().unwrap();
            schedule.complete(issue.op, issue.len as i32, 0);
            done += 1;
        }
        assert_eq!(schedule.calls_out(), 0);
    }
    // One call passes, whatever it takes.
    let (mut schedule, pool, _file) = schedule(1 << 40, 64);
    schedule.router = Router::new(&[Some(RequestCap { requests: 1, request_bytes: 4096 })], 1 << 40, usize::MAX);
    schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    assert_eq!(run_dry(&mut schedule), [0, 1, 2, 3]);
}

#[test]
fn newcomers_in_front_do_not_starve_a_read_behind_the_sweep() {
    let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
    let mib = u64::from(SLAB);
    for (tag, offset) in [(0, 4 * mib), (1, 8 * mib)] {
        schedule.admit(read(tag, Priority::Demand, offset), pool.take().unwrap(), 0).unwrap();
    }
    let mut order = Vec::new();
    for tag in 2..6 {
        while order.len() < (tag - 1) * 4 {
            let issue = schedule.next(0).unwrap();
            schedule.complete(issue.op, issue.len as i32, 0);
            order.push(issue.offset / mib);
        }
        drop(schedule.take_ready());
        schedule.admit(read(tag as u64, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    }
    assert_eq!(order[..8], [4, 4, 4, 4, 8, 8, 8, 8], "the sweep reaches 8 before it turns back to 0");
}

#[test]
fn bytes_and_calls_out_stay_below_their_caps() {
    let (mut schedule, pool, _file) = schedule(6 * u64::from(CHUNK), 64);
    for tag in 0..3 {
        schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
    }
    assert_eq!(offsets(&mut schedule), [0, 1, 2, 3, 4, 5]);

    let (mut schedule, pool, _file) = self::schedule(8 * u64::from(CHUNK), 64);
    for tag in 0..3 {
        schedule.admit(read(tag, Priority::Lookahead, tag << 20), pool.take().unwrap(), 0).unwrap();
    }
    assert_eq!(offsets(&mut schedule), [0], "of a drive that is not known yet");
    schedule.admit(read(7, Priority::Demand, 64 << 20), pool.take().unwrap(), 0).unwrap();
    assert_eq!(offsets(&mut schedule), [256, 257, 258, 259], "demand has what lookahead leaves");

    let (mut schedule, pool, _file) = self::schedule(u64::MAX, 3);
    schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    assert_eq!(offsets(&mut schedule), [0, 1, 2]);
    assert_eq!(schedule.calls_out(), 3);
}

#[test]
fn reads_are_split_only_while_there_are_fewer_than_could_be_read_at_once() {
    let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
    schedule.limits.whole_when_waiting = 2;
    let admit = |schedule: &mut Schedule, tag| {
        schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
    };
    (0..4).for_each(|tag| admit(&mut schedule, tag));
    let whole: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
    assert_eq!(whole.iter().map(|issue| issue.len / CHUNK).collect::<Vec<_>>(), [4, 4, 4, 4]);
    for issue in &whole[..2] {
        schedule.complete(issue.op, SLAB as i32, 0);
    }
    // The next makes three with the two that are still out.
    admit(&mut schedule, 4);
    assert_eq!(schedule.next(0).unwrap().len, SLAB);
    while schedule.take_ready().is_some() {}

    // Alone, a read is split for whoever is idle; the third call makes three.
    let (mut schedule, pool, _file) = self::schedule(u64::MAX, 64);
    schedule.limits.whole_when_waiting = 2;
    schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    let lens: Vec<u32> = std::iter::from_fn(|| schedule.next(0)).map(|issue| issue.len / CHUNK).collect();
    assert_eq!(lens, [1, 1, 1, 1]);
}

#[test]
fn the_error_reported_is_the_one_nearest_the_start_whatever_the_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        let issues: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
        // The file ends inside the second chunk; the rest returns nothing.
        let result = |offset: u64| (300_000 - offset as i64).clamp(0, i64::from(CHUNK)) as i32;
        for index in order {
            schedule.complete(issues[index].op, result(issues[index].offset), 0);
        }
        while let Some(issue) = schedule.next(0) {
            schedule.complete(issue.op, result(issue.offset), 0);
        }
        let done = schedule.take_ready().unwrap();
        let IoError::EndOfFile { range } = done.result.unwrap_err() else { panic!("not the end of the file") };
        assert_eq!((range.offset, range.wanted, range.got), (0, u64::from(SLAB), 300_000));
        assert_eq!(schedule.in_flight(), 0);
    }
}

/// As `schedule`, with copies of the file on a second drive.
fn mirrored(depth_bytes: u64, calls: usize, mode: IoMode) -> (Schedule, SlabPool, [tempfile::NamedTempFile; 2]) {
    let files = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    let [own, copy] = [&files[0], &files[1]].map(|file| file.path().to_owned());
    let mirror = Mirror { dir: "mirror".into(), copies: vec![Some(copy)], seen: vec![] };
    let set = FileSet::open_mirrored(&[own], &[mirror], mode).unwrap();
    let (mut schedule, pool, _) = schedule(depth_bytes, calls);
    schedule = Schedule::new(Arc::new(set), pool.clone(), schedule.limits);
    (schedule, pool, files)
}

#[test]
fn a_drive_that_cannot_be_asked_keeps_its_rate() {
    let (mut schedule, pool, _files) = mirrored(u64::MAX, 1, IoMode::Buffered);
    // The second drive is slow, and was left alone for long while the first one worked.
    for (drive, from, to) in [(1, 0, 1_000_000_000), (0, 1_000_000_000, 80_000_000_000)] {
        schedule.router.went(drive, CHUNK, from);
        let bytes = if drive == 0 { u64::MAX >> 20 } else { 1 << 20 };
        schedule.router.came(drive, CHUNK, bytes, to);
    }
    let now_ns = 80_000_000_000;
    schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), now_ns).unwrap();
    let asked = schedule.next(now_ns).unwrap();
    assert_eq!(schedule.ops[asked.op as usize].drive, 1, "the slow drive is due");
    schedule.complete(asked.op, 1 << 18, now_ns + 1_000_000_000);
    let first = schedule.next(now_ns + 1_000_000_000).unwrap();
    assert_eq!(schedule.ops[first.op as usize].drive, 0);
    // No operation is left, and the slow drive is due once more: nothing goes out, and nothing is forgotten.
    let later = now_ns + 60_000_000_000;
    schedule.router.went(0, 4096, later);
    schedule.router.came(0, 4096, 4096, later + 31_000_000_000);
    let soonest = |schedule: &Schedule| schedule.router.soonest(DriveSet::FIRST.with(1), CHUNK, later);
    let before = soonest(&schedule);
    assert!(schedule.next(later + 31_000_000_000).is_none());
    assert_eq!((before, soonest(&schedule)), (Some(0), Some(0)));
}

#[test]
fn the_error_of_two_copies_is_what_the_models_own_had_to_say() {
    let own_says = [(libc::EIO, libc::EINVAL), (libc::EINVAL, libc::EIO)];
    for (own, other) in own_says {
        let (mut schedule, pool, files) = mirrored(u64::MAX, 4, IoMode::Buffered);
        schedule.files = match FileSet::open_mirrored(
            &[files[0].path().to_owned()],
            &[Mirror { dir: "mirror".into(), copies: vec![Some(files[1].path().to_owned())], seen: vec![] }],
            IoMode::Direct,
        ) {
            Ok(files) => Arc::new(files),
            Err(error) => return eprintln!("skipped: {error}"),
        };
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        while let Some(issue) = schedule.next(0) {
            let errno = if issue.file == FileId(0) { own } else { other };
            schedule.complete(issue.op, -errno, 0);
        }
        let error = schedule.take_ready().unwrap().result.unwrap_err();
        let path = match &error {
            IoError::Read { range, errno } if errno.0 == libc::EIO && own == libc::EIO => &range.path,
            IoError::DirectRefused { path, .. } if own == libc::EINVAL => path,
            _ => panic!("{own}, {other}: {error:?}"),
        };
        assert_eq!(&**path, files[0].path());
        let lines = schedule.files.warnings();
        let about = |line: &String| line.contains("own directory is damaged");
        assert_eq!((lines.len(), lines.iter().any(about)), (2, own == libc::EIO), "{lines:?}");
    }
}

#[test]
fn an_abandoned_slab_is_never_given_back() {
    let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
    schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    assert!(schedule.next(0).is_some());
    schedule.admit(read(1, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
    schedule.abandon();
    drop(schedule);
    assert_eq!(pool.free(), 7, "the one the kernel has stays out, the other comes back");
}

#[test]
fn stopping_gives_back_what_the_kernel_does_not_have() {
    let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
    for tag in 0..3 {
        schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
    }
    let issue = schedule.next(0).unwrap();
    schedule.stop(0);
    assert!(schedule.next(0).is_none());
    let results: Vec<_> = std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result)).collect();
    assert_eq!(results, [(1, Err(IoError::Cancelled)), (2, Err(IoError::Cancelled))]);
    schedule.complete(issue.op, CHUNK as i32, 0);
    assert_eq!(schedule.take_ready().unwrap().result, Err(IoError::Cancelled), "three chunks never went out");
    assert_eq!((schedule.in_flight(), pool.free()), (0, 8));
}
