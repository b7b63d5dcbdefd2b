//! What the rounds of a candidate say together, and which candidate to take. Pure.

use hdrhistogram::Histogram;

use crate::arena::PageKind;
use crate::measure::plan::Candidate;

/// Candidates this close to the fastest count as equally fast.
pub const NEAR: f64 = 0.98;
/// However much rounds differ, nothing that reaches less of the fastest is as fast.
const FAR: f64 = 0.9;
/// What takes more than so many times the least CPU among those as fast is none of them.
const FRUGAL: f64 = 2.0;
/// Below this share of the wanted bytes moved by the drive, memory served the rest.
const MOVED_MIN: f64 = 0.95;
/// Above this share of pages in memory before a round, it may be served from there.
const RESIDENT_MAX: f64 = 0.05;

/// What one round of one candidate measured.
#[derive(Clone, Debug)]
pub struct Round {
    /// Wall time.
    pub seconds: f64,
    /// Bytes wanted and delivered.
    pub bytes: u64,
    /// Bytes the drive moved meanwhile, for anybody; `None` where it does not count.
    pub disk_bytes: Option<u64>,
    /// Requests the drive served meanwhile.
    pub disk_requests: Option<u64>,
    /// User and system time of the whole process, kernel workers included.
    pub cpu_seconds: f64,
    /// Nanoseconds from submit to complete, per slab.
    pub took: Histogram<u64>,
    /// Nanoseconds of a submit call.
    pub submit: Histogram<u64>,
    /// Whether memory served it, all or in part.
    pub cached: bool,
    /// Bytes of slabs that were registered.
    pub registered_bytes: u64,
    /// Pages that the slabs were really on.
    pub pages: PageKind,
}

/// The rounds of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// What was measured.
    pub candidate: Candidate,
    /// Whether slabs were really registered.
    pub registered: bool,
    /// Pages that the slabs were really on.
    pub pages: PageKind,
    /// How many rounds.
    pub rounds: usize,
    /// Median of GB/s (10^9 bytes).
    pub gb_s: f64,
    /// Slowest round.
    pub gb_s_min: f64,
    /// Fastest round.
    pub gb_s_max: f64,
    /// Median of CPU seconds per GB.
    pub cpu_s_per_gb: f64,
    /// Slabs of all rounds.
    pub slabs: u64,
    /// Median slab, milliseconds from submit to complete, over all rounds.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Median submit call, microseconds.
    pub submit_p50_us: f64,
    /// 99th percentile.
    pub submit_p99_us: f64,
    /// Median of bytes moved by the drive per byte wanted.
    pub amplification: Option<f64>,
    /// Median size of a request at the drive, KiB.
    pub request_kib: Option<f64>,
    /// Whether memory served a round, all or in part: then the figures are not the drive's.
    pub cached: bool,
}

/// Which candidate to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recommendation {
    /// Position of the fastest in the list.
    pub best: usize,
    /// Position of the one to take.
    pub take: usize,
    /// Why that one.
    pub reason: String,
}

/// Middle value; mean of the middle two of an even count. `None` for an empty list.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0) }
}

/// Whether memory may have served a round that wanted `wanted` bytes. `resident` is the share of the files' pages in
/// memory before it, `disk_bytes` what the drive moved; `None` is unknown. Of a round through the page cache that
/// nothing is known about, the worst is assumed.
pub fn is_cached(page_cache: bool, resident: Option<f64>, disk_bytes: Option<u64>, wanted: u64) -> bool {
    match disk_bytes {
        Some(moved) if (moved as f64) < MOVED_MIN * wanted as f64 => true,
        Some(_) => page_cache && resident.is_some_and(|share| share > RESIDENT_MAX),
        None => page_cache && resident.is_none_or(|share| share > RESIDENT_MAX),
    }
}

/// Medians and spread over `rounds`; `None` without any.
pub fn summarize(candidate: Candidate, rounds: &[Round]) -> Option<Summary> {
    let of = |value: &dyn Fn(&Round) -> Option<f64>| rounds.iter().filter_map(value).collect::<Vec<f64>>();
    let speeds = of(&|round| Some(round.bytes as f64 / 1e9 / round.seconds));
    let mut took = Histogram::<u64>::new(3).ok()?;
    let mut submit = took.clone();
    for round in rounds {
        took.add(&round.took).ok()?;
        submit.add(&round.submit).ok()?;
    }
    let ms = |quantile| took.value_at_quantile(quantile) as f64 / 1e6;
    let us = |quantile| submit.value_at_quantile(quantile) as f64 / 1e3;
    Some(Summary {
        candidate,
        registered: rounds.iter().all(|round| round.registered_bytes > 0),
        pages: rounds.first()?.pages,
        rounds: rounds.len(),
        gb_s: median(&speeds)?,
        gb_s_min: speeds.iter().copied().fold(f64::INFINITY, f64::min),
        gb_s_max: speeds.iter().copied().fold(0.0, f64::max),
        cpu_s_per_gb: median(&of(&|round| Some(round.cpu_seconds / (round.bytes as f64 / 1e9))))?,
        slabs: took.len(),
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        submit_p50_us: us(0.5),
        submit_p99_us: us(0.99),
        amplification: median(&of(&|round| Some(round.disk_bytes? as f64 / round.bytes as f64))),
        request_kib: median(&of(&|round| {
            let requests = round.disk_requests.filter(|count| *count > 0)?;
            Some(round.disk_bytes? as f64 / 1024.0 / requests as f64)
        })),
        cached: rounds.iter().any(|round| round.cached),
    })
}

/// Of what memory did not serve and a user can ask for: the smallest depth of those that cannot be told apart from the
/// fastest, the least CPU among equals. `None` where memory served everything.
pub fn recommend(list: &[Summary]) -> Option<Recommendation> {
    let real = || list.iter().enumerate().filter(|(_, summary)| !summary.cached);
    let offered = || real().filter(|(_, summary)| summary.candidate.is_offered());
    let (best, fastest) = real().max_by(|a, b| a.1.gb_s.total_cmp(&b.1.gb_s))?;
    // What is only for comparison may be the fastest: then what comes nearest counts.
    let (_, nearest) = offered().max_by(|a, b| a.1.gb_s.total_cmp(&b.1.gb_s))?;
    let floor = floor_of(nearest);
    let alike = || offered().filter(|(_, summary)| summary.gb_s >= floor);
    let frugal = alike().map(|(_, summary)| summary.cpu_s_per_gb).fold(f64::INFINITY, f64::min);
    let near = || alike().filter(|(_, summary)| summary.cpu_s_per_gb <= FRUGAL * frugal);
    let (take, taken) = near().min_by(|(_, a), (_, b)| {
        let by_cpu = a.cpu_s_per_gb.total_cmp(&b.cpu_s_per_gb);
        a.candidate.depth.cmp(&b.candidate.depth).then(by_cpu).then(b.gb_s.total_cmp(&a.gb_s))
    })?;
    let same_depth = near().filter(|(_, summary)| summary.candidate.depth == taken.candidate.depth).count();
    let reason = reason(fastest, nearest, taken, near().count(), same_depth);
    Some(Recommendation { best, take, reason })
}

/// From what rate on a candidate is taken for as fast as the fastest: within 2 % of it, or no slower than its own slowest
/// round. One round among many that something else disturbed says little, so that has an end.
fn floor_of(fastest: &Summary) -> f64 {
    (NEAR * fastest.gb_s).min(fastest.gb_s_min.max(FAR * fastest.gb_s))
}

fn reason(fastest: &Summary, nearest: &Summary, taken: &Summary, near: usize, same_depth: usize) -> String {
    let depth = taken.candidate.depth;
    let mut reason = if near == 1 {
        format!("the fastest that can be asked for at {:.2} GB/s, and no other comes within 2 % of it", taken.gb_s)
    } else {
        let plural = if depth == 1 { "slab" } else { "slabs" };
        let alike = match floor_of(nearest) < NEAR * nearest.gb_s {
            true => "cannot be told apart here from",
            false => "are within 2 % of",
        };
        format!(
            "{near} {alike} the fastest that can be asked for ({:.2} GB/s); {depth} {plural} in flight is the least among \
             them, and more would only add latency",
            nearest.gb_s
        )
    };
    if same_depth > 1 {
        reason += &format!("; of {same_depth} with that depth it takes the least CPU ({:.4} s/GB)", taken.cpu_s_per_gb);
    }
    if fastest.gb_s * NEAR > nearest.gb_s {
        reason += &format!("; {} reached {:.2} GB/s, but only for comparison", fastest.candidate, fastest.gb_s);
    }
    let spread = taken.gb_s_max - taken.gb_s_min;
    if taken.rounds > 1 && spread > 0.1 * taken.gb_s {
        let percent = 100.0 * spread / taken.gb_s;
        reason += &format!("; its rounds differ by {percent:.0} %, so small differences here mean nothing");
    }
    reason
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(depth: u32) -> Candidate {
        Candidate { depth, ..Candidate::RING }
    }

    fn round(gb: f64, seconds: f64, cpu_seconds: f64, took_ms: &[u64]) -> Round {
        let mut took = Histogram::new(3).unwrap();
        took_ms.iter().for_each(|ms| took.record(ms * 1_000_000).unwrap());
        let mut submit = Histogram::new(3).unwrap();
        submit.record(7000).unwrap();
        let bytes = (gb * 1e9) as u64;
        let disk_bytes = Some(bytes / 2 * 3);
        let disk_requests = Some(bytes / 2 * 3 / 1024 / 100);
        Round {
            seconds,
            bytes,
            disk_bytes,
            disk_requests,
            cpu_seconds,
            took,
            submit,
            cached: false,
            registered_bytes: 1,
            pages: PageKind::Transparent,
        }
    }

    fn summary(depth: u32, gb_s: f64, cpu_s_per_gb: f64, cached: bool) -> Summary {
        let rounds = [round(gb_s, 1.0, cpu_s_per_gb * gb_s, &[1])];
        Summary { cached, ..summarize(candidate(depth), &rounds).unwrap() }
    }

    #[test]
    fn medians_by_hand() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 5.0]), Some(5.0));
        assert_eq!(median(&[9.0, 1.0, 5.0, 2.0]), Some(3.5));
    }

    #[test]
    fn a_summary_is_median_and_extremes_of_the_rounds() {
        let rounds = [
            round(2.0, 1.0, 0.02, &[10, 10, 20]),
            round(6.0, 2.0, 0.03, &[10, 30]),
            round(2.0, 2.0, 0.04, &[10, 10, 10, 10, 90]),
        ];
        let all = summarize(candidate(4), &rounds).unwrap();
        // 2, 3 and 1 GB/s; 0.01, 0.005 and 0.02 s/GB.
        assert_eq!((all.gb_s, all.gb_s_min, all.gb_s_max), (2.0, 1.0, 3.0));
        assert_eq!(all.cpu_s_per_gb, 0.01);
        assert_eq!((all.rounds, all.slabs), (3, 10));
        assert!((all.p50_ms - 10.0).abs() < 0.05 && (all.p99_ms - 90.0).abs() < 0.2, "{all:?}");
        assert!((all.submit_p99_us - 7.0).abs() < 0.02);
        assert_eq!(all.amplification, Some(1.5));
        assert!((all.request_kib.unwrap() - 100.0).abs() < 0.1);
        assert!(!all.cached && all.registered);
        let warm = [rounds[0].clone(), Round { cached: true, registered_bytes: 0, ..rounds[1].clone() }];
        let warm = summarize(candidate(4), &warm).unwrap();
        assert!(warm.cached && !warm.registered, "one warm round makes the figure warm");
        assert_eq!(summarize(candidate(4), &[]), None);
        let unknown = Round { disk_bytes: None, disk_requests: None, ..rounds[0].clone() };
        assert_eq!(summarize(candidate(4), &[unknown]).unwrap().amplification, None);
    }

    #[test]
    fn memory_is_told_from_the_drive() {
        for (page_cache, resident, disk_bytes, cached) in [
            (true, Some(0.0), Some(1000), false),
            (true, Some(0.0), Some(1500), false),
            (true, Some(0.0), Some(900), true),
            (true, Some(0.0), Some(0), true),
            (true, Some(0.5), Some(1000), true),
            (true, Some(0.0), None, false),
            (true, Some(1.0), None, true),
            (true, None, None, true),
            (true, None, Some(1000), false),
            (false, Some(1.0), Some(1000), false),
            (false, None, None, false),
            (false, None, Some(10), true),
        ] {
            let found = is_cached(page_cache, resident, disk_bytes, 1000);
            assert_eq!(found, cached, "{page_cache} {resident:?} {disk_bytes:?}");
        }
    }

    #[test]
    fn the_smallest_depth_near_the_best_is_taken_and_cpu_decides_among_equals() {
        let list = [
            summary(1, 1.50, 0.001, false),
            summary(2, 1.97, 0.002, false),
            summary(2, 1.98, 0.0015, false),
            summary(4, 1.99, 0.001, false),
            summary(8, 2.00, 0.001, false),
            summary(1, 9.00, 0.001, true),
        ];
        let found = recommend(&list).unwrap();
        assert_eq!((found.best, found.take), (4, 2));
        assert!(found.reason.starts_with("4 are within") && found.reason.contains("2 slabs"), "{}", found.reason);
        assert!(found.reason.contains("least CPU (0.0015 s/GB)"), "{}", found.reason);
    }

    #[test]
    fn what_stands_alone_is_said_to_and_memory_is_never_recommended() {
        let list = [summary(1, 1.0, 0.01, false), summary(8, 2.0, 0.01, false)];
        let found = recommend(&list).unwrap();
        assert_eq!((found.best, found.take), (1, 1));
        assert!(found.reason.contains("at 2.00 GB/s, and no other"), "{}", found.reason);
        assert_eq!(recommend(&[summary(1, 9.0, 0.1, true)]), None);
        assert_eq!(recommend(&[]), None);
    }

    #[test]
    fn what_is_only_for_comparison_is_not_recommended() {
        let mut polled = summary(1, 3.0, 0.3, false);
        polled.candidate.sqpoll = true;
        let list = [polled.clone(), summary(4, 1.99, 0.01, false), summary(2, 2.0, 0.02, false)];
        let found = recommend(&list).unwrap();
        assert_eq!((found.best, found.take), (0, 2));
        assert!(found.reason.contains("sqpoll reached 3.00 GB/s"), "{}", found.reason);
        assert_eq!(recommend(&[polled]), None);
    }

    #[test]
    fn what_the_rounds_of_the_fastest_do_not_tell_apart_is_alike_and_twice_the_cpu_is_not() {
        // Threads at 3.68 (3.61 to 3.75) for 0.0119 s/GB; the ring at 3.63 for 0.0038, and at 3.60, slower than any round.
        let fastest = Summary { gb_s_min: 3.61, gb_s_max: 3.75, ..summary(8, 3.68, 0.0119, false) };
        let list = [fastest.clone(), summary(16, 3.63, 0.0038, false), summary(4, 3.60, 0.0037, false)];
        // 3.60 is below 3.61, and below 98 % of 3.68 = 3.6064.
        let found = recommend(&list).unwrap();
        assert_eq!((found.best, found.take), (0, 1));
        // The same with a slowest round that tells less: now depth 4 is alike, and the least.
        let wider = Summary { gb_s_min: 3.5, ..fastest.clone() };
        let found = recommend(&[wider, list[1].clone(), list[2].clone()]).unwrap();
        assert_eq!(found.take, 2);
        assert!(found.reason.starts_with("2 cannot be told apart here from"), "{}", found.reason);
        // A round that stands alone does not make a rate alike that is 10 % lower: 0.9 * 3.68 = 3.312.
        let disturbed = Summary { gb_s_min: 0.5, ..fastest };
        let found = recommend(&[disturbed, summary(1, 3.3, 0.0119, false)]).unwrap();
        assert_eq!(found.take, 0);
    }

    #[test]
    fn a_wide_spread_is_part_of_the_reason() {
        let rounds = [round(1.0, 1.0, 0.01, &[1]), round(2.0, 1.0, 0.01, &[1]), round(3.0, 1.0, 0.01, &[1])];
        let found = recommend(&[summarize(candidate(1), &rounds).unwrap()]).unwrap();
        assert!(found.reason.contains("differ by 100 %"), "{}", found.reason);
    }
}
