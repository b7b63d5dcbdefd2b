//! What was done when, as a file that ui.perfetto.dev and chrome://tracing open: the trace event format, in JSON.
//!
//! Arithmetic, waits, reads and reads ahead have tracks of their own. Reads that were under way together lie on as many
//! tracks as it takes, since what lies on one track must not overlap.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::Engine;
use crate::meter::{Lap, Stage};
use crate::store::ReadRecord;

/// Track of arithmetic and bookkeeping.
const COMPUTE: usize = 1;
/// Track of waits.
const WAITS: usize = 2;
/// First track of reads that somebody waited for.
const READS: usize = 100;
/// First track of guesses.
const GUESSES: usize = 500;

impl Engine {
    /// The last generation; empty unless the engine was opened to keep it.
    pub fn timeline(&self) -> String {
        render(self.meter.started(), self.meter.laps(), self.experts.store.reads())
    }
}

fn render<'a>(
    began: Instant,
    laps: impl Iterator<Item = &'a Lap>,
    reads: impl Iterator<Item = &'a ReadRecord>,
) -> String {
    let mut trace = Trace { text: String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":["), began, first: true };
    trace.track(COMPUTE, "arithmetic");
    trace.track(WAITS, "waiting for reads");
    for lap in laps {
        let track = if lap.stage == Stage::Wait { WAITS } else { COMPUTE };
        let args = lap.layer.map_or_else(String::new, |layer| format!("\"layer\":{layer}"));
        trace.event(track, lap.stage.name(), lap.began, lap.took, &args);
    }
    let mut reads: Vec<&ReadRecord> = reads.collect();
    reads.sort_by_key(|read| read.submitted);
    let mut lanes = [Lanes::new(READS, "read"), Lanes::new(GUESSES, "read ahead")];
    for read in reads {
        let track = lanes[usize::from(read.guess)].take(read, &mut trace);
        let name = format!("layer {} expert {}", read.key.layer, read.key.expert);
        trace.event(track, &name, read.submitted, read.took, &format!("\"whole\":{}", read.well));
    }
    trace.text.push_str("\n]}\n");
    trace.text
}

/// Tracks that are free from some moment on.
struct Lanes {
    first: usize,
    name: &'static str,
    free_from: Vec<Instant>,
}

impl Lanes {
    fn new(first: usize, name: &'static str) -> Lanes {
        Lanes { first, name, free_from: vec![] }
    }

    /// A track that is free when `read` begins; reads come in the order in which they begin.
    fn take(&mut self, read: &ReadRecord, trace: &mut Trace) -> usize {
        let end = read.submitted + read.took;
        let lane = match self.free_from.iter().position(|&free| free <= read.submitted) {
            Some(lane) => lane,
            None => {
                self.free_from.push(end);
                let lane = self.free_from.len() - 1;
                trace.track(self.first + lane, &format!("{} {}", self.name, lane + 1));
                lane
            }
        };
        self.free_from[lane] = end;
        self.first + lane
    }
}

struct Trace {
    text: String,
    began: Instant,
    first: bool,
}

impl Trace {
    fn track(&mut self, track: usize, name: &str) {
        self.separate();
        let _ = write!(
            self.text,
            "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{track},\"args\":{{\"name\":\"{name}\"}}}}"
        );
    }

    fn event(&mut self, track: usize, name: &str, at: Instant, took: Duration, args: &str) {
        self.separate();
        let us = |time: Duration| time.as_nanos() as f64 / 1e3;
        let (at, took) = (us(at.saturating_duration_since(self.began)), us(took));
        let _ = write!(
            self.text,
            "{{\"ph\":\"X\",\"name\":\"{name}\",\"pid\":1,\"tid\":{track},\"ts\":{at:.3},\"dur\":{took:.3},\"args\":{{{args}}}}}"
        );
    }

    fn separate(&mut self) {
        self.text.push_str(if self.first { "\n" } else { ",\n" });
        self.first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ExpertKey;

    #[test]
    fn laps_and_reads_lie_on_tracks_of_their_own_and_none_overlap() {
        let began = Instant::now();
        let at = |us| began + Duration::from_micros(us);
        let lap =
            |stage, layer, from, to| Lap { stage, layer, began: at(from), took: Duration::from_micros(to - from) };
        let laps =
            [lap(Stage::Embed, None, 0, 10), lap(Stage::Wait, Some(3), 10, 25), lap(Stage::Experts, Some(3), 25, 40)];
        let read = |expert, guess, from, to| ReadRecord {
            key: ExpertKey { layer: 3, expert },
            guess,
            well: true,
            submitted: at(from),
            took: Duration::from_micros(to - from),
        };
        // Two together, one after them, and a guess beside all; in the order in which they came in.
        let reads = [read(1, false, 5, 20), read(0, false, 4, 25), read(7, true, 6, 30), read(2, false, 20, 30)];
        let json: serde_json::Value = serde_json::from_str(&render(began, laps.iter(), reads.iter())).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let spans: Vec<_> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|e| {
                (
                    e["name"].as_str().unwrap(),
                    e["tid"].as_u64().unwrap(),
                    e["ts"].as_f64().unwrap(),
                    e["dur"].as_f64().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            spans,
            [
                ("embed", 1, 0.0, 10.0),
                ("wait", 2, 10.0, 15.0),
                ("experts", 1, 25.0, 15.0),
                ("layer 3 expert 0", 100, 4.0, 21.0),
                ("layer 3 expert 1", 101, 5.0, 15.0),
                ("layer 3 expert 7", 500, 6.0, 24.0),
                ("layer 3 expert 2", 101, 20.0, 10.0),
            ]
        );
        let tracks: Vec<_> =
            events.iter().filter(|e| e["ph"] == "M").map(|e| e["args"]["name"].as_str().unwrap()).collect();
        assert_eq!(tracks, ["arithmetic", "waiting for reads", "read 1", "read 2", "read ahead 1"]);
    }

    #[test]
    fn nothing_kept_is_a_trace_of_nothing() {
        let json: serde_json::Value = serde_json::from_str(&render(Instant::now(), [].iter(), [].iter())).unwrap();
        assert_eq!(json["traceEvents"].as_array().unwrap().len(), 2, "the names of two tracks");
    }
}
