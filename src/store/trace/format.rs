//! A trace as a file.
//!
//! ```text
//! "MSTRACE\x02"
//! u64 fingerprint   u32 expert_bytes   u16 experts   u16 top_k   u16 layers   u16 layer, for each
//! u64 XXH3 of everything before
//! steps:  u32 bytes of the body
//!         body: u16 rows   u8 flags (1: first of a sequence)
//!               for each layer: u16 guessed one layer before   u16 guessed two layers before
//!                               rows * top_k ids   rows * guessed ids of the one   and of the other
//!         u32 XXH3 of the body, its low half
//! ```
//! Format 1 had one kind of guess, those one layer before; it is read.
//! All numbers are little-endian. An id is one byte where there are at most 256 experts, else two. A step is written
//! whole, so that a file cut short holds whole steps and a rest that is left out.

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use super::{Choice, Header, Trace};
use crate::limits::{LOOKAHEAD_LAYERS_MAX, MAX_EXPERTS, MAX_LAYERS, MAX_ROWS, MAX_TOP_K, MAX_TRACE_STEP_BYTES};

/// What a trace begins with; a byte follows that counts changes of the format.
const MAGIC: [u8; 7] = *b"MSTRACE";
/// Format that is written. All before it are read.
const VERSION: u8 = 2;
/// Kinds of guesses that format `version` has: made one layer before, two layers before.
const fn guesses_of(version: u8) -> usize {
    match version {
        1 => 1,
        _ => 2,
    }
}
const FLAG_BEGINS: u8 = 1;

/// Bytes that hold no trace.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TraceError {
    /// They begin like something else.
    #[error("it is not a routing trace")]
    Foreign,
    /// They begin like a trace of another program version.
    #[error("it is a routing trace of format {0}; this program reads formats up to {VERSION}")]
    Version(u8),
    /// The header is cut short, fails its checksum, or describes no model.
    #[error("its header is damaged")]
    Header,
}

/// A trace that was read, and what had to be left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Every whole step.
    pub trace: Trace,
    /// Why steps are missing at the end.
    pub note: Option<String>,
}

impl Trace {
    /// The trace as the bytes of a file.
    pub fn encode(&self) -> Vec<u8> {
        let Header { fingerprint, layers, experts, top_k, expert_bytes } = &self.header;
        let mut out = [&MAGIC[..], &[VERSION]].concat();
        out.extend(fingerprint.to_le_bytes());
        out.extend(expert_bytes.to_le_bytes());
        for number in [*experts, *top_k, layers.len() as u16].iter().chain(layers) {
            out.extend(number.to_le_bytes());
        }
        out.extend(xxh3_64(&out).to_le_bytes());
        let mut body = Vec::new();
        for step in 0..self.steps() {
            body.clear();
            let rows = self.rows(step);
            body.extend((rows as u16).to_le_bytes());
            body.push(if self.begins(step) { FLAG_BEGINS } else { 0 });
            for layer in 0..layers.len() {
                let Choice { ids, guesses } = self.choice(step, layer);
                guesses.iter().for_each(|guess| body.extend(((guess.len() / rows) as u16).to_le_bytes()));
                ids.iter().chain(guesses.into_iter().flatten()).for_each(|&id| put_id(&mut body, *experts, id));
            }
            out.extend((body.len() as u32).to_le_bytes());
            out.extend_from_slice(&body);
            out.extend((xxh3_64(&body) as u32).to_le_bytes());
        }
        out
    }

    /// Reads what [`Trace::encode`] wrote. Damage after the header costs the steps from there on.
    pub fn decode(bytes: &[u8]) -> Result<Decoded, TraceError> {
        let mut input = Input { bytes, at: 0 };
        let (version, header) = header(&mut input)?;
        let mut trace = Trace::new(header);
        let mut note = None;
        while input.at < bytes.len() {
            let before = input.at;
            let body = whole_body(&mut input);
            if body.and_then(|body| step(&mut trace, version, body)).is_none() {
                note = Some(format!(
                    "damaged or cut short at byte {before} of {}: the {} steps before are used",
                    bytes.len(),
                    trace.steps()
                ));
                break;
            }
        }
        Ok(Decoded { trace, note })
    }
}

fn put_id(out: &mut Vec<u8>, experts: u16, id: u16) {
    let bytes = id.to_le_bytes();
    out.extend_from_slice(if is_narrow(experts) { &bytes[..1] } else { &bytes });
}

fn is_narrow(experts: u16) -> bool {
    experts <= 256
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..)?.get(..count)?;
        self.at += count;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// The format's number and the header.
fn header(input: &mut Input) -> Result<(u8, Header), TraceError> {
    let (magic, version) = input.array().zip(input.array()).ok_or(TraceError::Foreign)?;
    let [version] = version;
    if magic != MAGIC {
        return Err(TraceError::Foreign);
    }
    if !(1..=VERSION).contains(&version) {
        return Err(TraceError::Version(version));
    }
    let read = |input: &mut Input| {
        let (fingerprint, expert_bytes) = (input.u64()?, input.u32()?);
        let (experts, top_k, layers) = (input.u16()?, input.u16()?, input.u16()?);
        let layers = (0..layers).map(|_| input.u16()).collect::<Option<Vec<u16>>>()?;
        let end = input.at;
        (input.u64()? == xxh3_64(&input.bytes[..end])).then_some(Header {
            fingerprint,
            layers,
            experts,
            top_k,
            expert_bytes,
        })
    };
    read(input).filter(Header::is_sound).map(|header| (version, header)).ok_or(TraceError::Header)
}

/// The body of the next step, where it is whole and its checksum is right.
fn whole_body<'a>(input: &mut Input<'a>) -> Option<&'a [u8]> {
    let len = input.u32().map(|len| len as usize).filter(|&len| len <= MAX_TRACE_STEP_BYTES)?;
    let body = input.take(len)?;
    (input.u32()? == xxh3_64(body) as u32).then_some(body)
}

/// Adds the step of `body`, which is of format `version`, or nothing where it is not one.
fn step(trace: &mut Trace, version: u8, body: &[u8]) -> Option<()> {
    let (layers, top_k) = (trace.header.layers.len(), usize::from(trace.header.top_k));
    let mut input = Input { bytes: body, at: 0 };
    let rows = usize::from(input.u16()?);
    let [flags] = input.array()?;
    if !(1..=MAX_ROWS).contains(&rows) || flags & !FLAG_BEGINS != 0 {
        return None;
    }
    // Ids of a layer one after another, the choices before the guesses.
    let (mut ids, mut guess_lens) = (Vec::new(), Vec::with_capacity(layers));
    for _ in 0..layers {
        let mut lens = [0; LOOKAHEAD_LAYERS_MAX];
        for len in &mut lens[..guesses_of(version)] {
            *len = usize::from(input.u16().filter(|&per_row| per_row <= trace.header.experts)?) * rows;
        }
        guess_lens.push(lens);
        for _ in 0..rows * top_k + lens.iter().sum::<usize>() {
            let id = if is_narrow(trace.header.experts) { input.array().map(|[id]| id.into()) } else { input.u16() };
            ids.push(id.filter(|&id| id < trace.header.experts)?);
        }
    }
    if input.at != body.len() {
        return None;
    }
    let mut rest = &ids[..];
    let mut take = |len| {
        let (taken, later) = rest.split_at(len);
        rest = later;
        taken
    };
    let choices = guess_lens.iter().map(|lens| Choice { ids: take(rows * top_k), guesses: lens.map(&mut take) });
    trace.push(rows, flags & FLAG_BEGINS != 0, choices);
    Some(())
}

const _: () = assert!(guesses_of(VERSION) == LOOKAHEAD_LAYERS_MAX);
const _: () = assert!(
    MAX_TRACE_STEP_BYTES
        >= 3 + MAX_LAYERS * 2 * (LOOKAHEAD_LAYERS_MAX + MAX_ROWS * MAX_TOP_K * (1 + LOOKAHEAD_LAYERS_MAX))
);
const _: () = assert!(MAX_TRACE_STEP_BYTES < u32::MAX as usize && MAX_EXPERTS <= u16::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn traces() -> impl Strategy<Value = Trace> {
        let header = (any::<u64>(), 1..4u16, prop::sample::select(vec![4u16, 256, 300]), 1..4u16);
        let guessed = (0..4usize, 0..4usize);
        (header, prop::collection::vec((1..4usize, any::<bool>(), guessed, any::<u64>()), 0..6)).prop_map(
            |((fingerprint, layers, experts, top_k), steps)| {
                let layers = (0..layers).map(|layer| 2 * layer + 1).collect();
                let mut trace = Trace::new(Header { fingerprint, layers, experts, top_k, expert_bytes: 9 });
                for (rows, begins, guessed, seed) in steps {
                    let some = |count: usize, salt: u64| -> Vec<u16> {
                        (0..count as u64)
                            .map(|i| (xxh3_64(&(seed ^ salt, i).0.to_le_bytes()) + i) as u16 % experts)
                            .collect()
                    };
                    let layer = |layer| {
                        let [one, two] = [(guessed.0, layer + 99), (guessed.1, layer + 999)];
                        (some(rows * usize::from(top_k), layer), some(rows * one.0, one.1), some(rows * two.0, two.1))
                    };
                    let data: Vec<_> = (0..trace.header.layers.len() as u64).map(layer).collect();
                    trace.push(rows, begins, data.iter().map(|(ids, one, two)| Choice { ids, guesses: [one, two] }));
                }
                trace
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(trace in traces()) {
            prop_assert_eq!(Trace::decode(&trace.encode()), Ok(Decoded { trace, note: None }));
        }

        #[test]
        fn a_file_cut_short_keeps_its_whole_steps(trace in traces(), cut in any::<prop::sample::Index>()) {
            let bytes = trace.encode();
            let cut = cut.index(bytes.len());
            if let Ok(Decoded { trace: short, note }) = Trace::decode(&bytes[..cut]) {
                let again = short.encode();
                prop_assert_eq!(&again[..], &bytes[..again.len()]);
                prop_assert_eq!(note.is_none(), again.len() == cut);
            }
        }

        #[test]
        fn a_changed_byte_is_found(trace in traces(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = trace.encode();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            if let Ok(Decoded { trace: read, note }) = Trace::decode(&bytes) {
                prop_assert!(read.steps() < trace.steps() && note.is_some());
            }
        }

        #[test]
        fn no_bytes_are_too_strange(mut bytes in prop::collection::vec(any::<u8>(), 0..200), is_trace in any::<bool>()) {
            if is_trace && bytes.len() >= 8 {
                bytes[..7].copy_from_slice(&MAGIC);
                bytes[7] = bytes[7] % VERSION + 1;
            }
            let _ = Trace::decode(&bytes);
        }
    }

    #[test]
    fn a_step_that_lies_about_itself_is_left_out() {
        let header = Header { fingerprint: 0, layers: vec![0], experts: 4, top_k: 1, expert_bytes: 1 };
        let head = Trace::new(header).encode();
        // No rows, too many rows, an unknown flag, an id too large, a guess that is not there, one of more experts than
        // there are, a byte too many.
        let bodies: [&[u8]; 7] = [
            &[0, 0, 0, 0, 0, 0, 0],
            &[255, 255, 0, 0, 0, 0, 0, 1],
            &[1, 0, 2, 0, 0, 0, 0, 1],
            &[1, 0, 0, 0, 0, 0, 0, 4],
            &[1, 0, 0, 0, 0, 3, 0, 1],
            &[1, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0, 0, 1, 1],
        ];
        let framed = |body: &[u8]| {
            [&head, &(body.len() as u32).to_le_bytes()[..], body, &(xxh3_64(body) as u32).to_le_bytes()].concat()
        };
        for body in bodies {
            let read = Trace::decode(&framed(body)).unwrap();
            assert!(read.trace.steps() == 0 && read.note.is_some(), "{body:?}");
        }
        let read = Trace::decode(&framed(&[1, 0, 1, 2, 0, 1, 0, 1, 2, 3, 0])).unwrap();
        assert_eq!((read.trace.choice(0, 0), read.note), (Choice { ids: &[1], guesses: [&[2, 3], &[0]] }, None));
        let longer = [&framed(&[1, 0, 1, 0, 0, 0, 0, 1])[..], &[255; 4]].concat();
        assert!(Trace::decode(&longer).unwrap().note.unwrap().contains("the 1 steps before"));
    }

    #[test]
    fn a_trace_of_the_first_format_is_read() {
        // Two layers of four experts, one a token: a step of two rows with a guess of the second layer, then one of one row.
        let mut bytes = b"MSTRACE\x01".to_vec();
        bytes.extend(7u64.to_le_bytes());
        bytes.extend(100u32.to_le_bytes());
        [4u16, 1, 2, 3, 5].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        for body in [&[2, 0, 1, 0, 0, 1, 3, 1, 0, 0, 2, 2, 3][..], &[1, 0, 0, 0, 0, 2, 0, 0, 1]] {
            bytes.extend((body.len() as u32).to_le_bytes());
            bytes.extend(body);
            bytes.extend((xxh3_64(body) as u32).to_le_bytes());
        }
        let Decoded { trace, note } = Trace::decode(&bytes).unwrap();
        assert_eq!((trace.header().layers.as_slice(), trace.steps(), note), (&[3, 5][..], 2, None));
        assert_eq!(trace.choice(0, 0), Choice { ids: &[1, 3], ..Choice::default() });
        assert_eq!(trace.choice(0, 1), Choice { ids: &[0, 2], guesses: [&[2, 3], &[]] });
        assert_eq!((trace.choice(1, 1).ids, trace.begins(0), trace.begins(1)), (&[1][..], true, false));
        assert_eq!(Trace::decode(&trace.encode()).unwrap().trace, trace, "and written in the format of today");
    }

    #[test]
    fn another_version_and_another_file_are_told_apart() {
        let error = |bytes: &[u8]| Trace::decode(bytes).unwrap_err();
        assert_eq!(error(b"MSTRACE\x03........"), TraceError::Version(3));
        assert_eq!(error(b"MSTRACE\0........"), TraceError::Version(0));
        assert_eq!(error(b"MSTRACE\x02...."), TraceError::Header);
        assert_eq!(error(b"{\"a\": 1}....."), TraceError::Foreign);
        assert_eq!(error(b"MSTRACE\x01...."), TraceError::Header);
        assert_eq!(error(b""), TraceError::Foreign);
    }
}
