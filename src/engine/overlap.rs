//! Disk against arithmetic: how well they overlapped, and what bound.

use std::time::Duration;

use millstream_io::DeviceStats;

use crate::meter::{Meter, Stage};

/// Disk against arithmetic, during decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct OverlapStats {
    /// Time with at least one read in flight.
    pub disk_busy_s: f64,
    /// Time spent computing.
    pub compute_busy_s: f64,
    /// Time stood still for a read: what of `disk_busy_s` arithmetic did not hide.
    pub wait_s: f64,
    /// Wall time.
    pub wall_s: f64,
    /// The longer of disk and arithmetic divided by the wall time: 1 is perfect overlap.
    pub efficiency: f64,
}

/// Readings of clocks that only go forward, at one moment of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Readings {
    wall: Duration,
    compute: Duration,
    wait: Duration,
    disk_ns: u64,
}

impl Readings {
    /// The readings now.
    pub(super) fn take(meter: &Meter, device: &DeviceStats) -> Readings {
        let compute = Stage::ALL.iter().filter(|stage| stage.computes()).map(|&stage| meter.stage(stage).busy).sum();
        Readings { wall: meter.wall(), compute, wait: meter.stage(Stage::Wait).busy, disk_ns: device.busy_ns }
    }

    /// What went by since `before`; none where that is no time.
    pub(super) fn since(&self, before: &Readings) -> Option<OverlapStats> {
        let wall = self.wall - before.wall;
        if wall.is_zero() {
            return None;
        }
        let disk_busy = Duration::from_nanos(self.disk_ns - before.disk_ns).min(wall);
        let compute_busy = self.compute - before.compute;
        Some(OverlapStats {
            disk_busy_s: disk_busy.as_secs_f64(),
            compute_busy_s: compute_busy.as_secs_f64(),
            wait_s: (self.wait - before.wait).as_secs_f64(),
            wall_s: wall.as_secs_f64(),
            efficiency: disk_busy.max(compute_busy).as_secs_f64() / wall.as_secs_f64(),
        })
    }
}

/// What bound a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It mostly waited for reads.
    DiskBound,
    /// It mostly computed, and mostly experts.
    ComputeBound,
    /// It mostly computed, and mostly attention.
    AttentionBound,
    /// Neither would help much alone.
    Balanced,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Verdict::DiskBound => "by the disk",
            Verdict::ComputeBound => "by arithmetic",
            Verdict::AttentionBound => "by attention",
            Verdict::Balanced => "by neither alone",
        })
    }
}

/// Waiting for more of the time than this is being bound by the disk.
const DISK_BOUND: f64 = 0.25;
/// Waiting for less of it is being bound by arithmetic.
const COMPUTE_BOUND: f64 = 0.05;

/// The verdict on `overlap`, of which attention took `attention_s`. What to change for it is for those who know the machine.
pub(super) fn judge(overlap: &OverlapStats, attention_s: f64) -> Verdict {
    let waited = overlap.wait_s / overlap.wall_s;
    if waited > DISK_BOUND {
        Verdict::DiskBound
    } else if waited >= COMPUTE_BOUND {
        Verdict::Balanced
    } else if 2.0 * attention_s > overlap.compute_busy_s {
        Verdict::AttentionBound
    } else {
        Verdict::ComputeBound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn readings(wall: u32, compute: u32, wait: u32, disk: u64) -> Readings {
        Readings { wall: wall * SECOND, compute: compute * SECOND, wait: wait * SECOND, disk_ns: disk * 1_000_000_000 }
    }

    #[test]
    fn the_longer_of_the_two_over_the_wall_is_the_efficiency() {
        let before = readings(10, 4, 6, 9);
        assert_eq!(before.since(&before), None);
        let disk = readings(20, 8, 11, 18).since(&before).unwrap();
        assert_eq!((disk.disk_busy_s, disk.compute_busy_s, disk.wait_s, disk.wall_s), (9.0, 4.0, 5.0, 10.0));
        assert_eq!(disk.efficiency, 0.9);
        assert_eq!(readings(20, 12, 6, 10).since(&before).unwrap().efficiency, 0.8);
    }

    #[test]
    fn the_verdict_follows_what_was_waited_for() {
        let overlap =
            |wait_s, compute_busy_s| OverlapStats { wait_s, compute_busy_s, wall_s: 10.0, ..Default::default() };
        let verdict = |wait, compute, attention| judge(&overlap(wait, compute), attention);
        assert_eq!(verdict(6.0, 4.0, 1.0), Verdict::DiskBound);
        assert_eq!(verdict(1.0, 9.0, 1.0), Verdict::Balanced);
        assert_eq!(verdict(0.2, 9.0, 1.0), Verdict::ComputeBound);
        assert_eq!(verdict(0.2, 9.0, 5.0), Verdict::AttentionBound);
        assert_eq!(serde_json::to_value(Verdict::DiskBound).unwrap(), "disk-bound");
    }
}
