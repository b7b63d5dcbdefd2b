//! What a generation did, in numbers: the source of the printed statistics and of `--stats-json`.
//!
//! Whoever runs a generation fills in what was counted and timed; [`Stats::derive`] adds what follows from it. All
//! times are in seconds unless the name says otherwise, all sizes in bytes.

use millstream_io::{Access, IoMode};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::drafts::Drafts;
use super::kvfile::KvFile;
pub use super::kvfile::KvFileStats;
use super::overlap::judge;
pub use super::overlap::{OverlapStats, Verdict};
use super::{DraftSource, Engine};
use crate::meter::Stage;

/// Numbers of one generation. Field names are stable; more may be added.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Stats {
    /// Version of the field names.
    pub schema_version: SchemaVersion,
    /// What ran.
    pub model: ModelStats,
    /// Every setting as resolved, by name.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// What it ran on.
    pub machine: MachineStats,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, taken from the context of the last generation or the file of one instead of being computed.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub tokens: usize,
    /// Tokens that went back into the model after the prompt: steps, where nothing was drafted.
    pub decode_steps: usize,
    /// Ids of the generated tokens.
    pub ids: Vec<u32>,
    /// What the model thought of each of them, before temperature and all that shapes logits, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The answer as shown.
    pub text: String,
    /// `stop`, `length` or `interrupted`.
    pub finish_reason: &'static str,
    /// Whether the context ended the answer, and not the number of tokens asked for.
    pub context_full: bool,
    /// The stop string that ended the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_string: Option<String>,
    /// Opening the model.
    pub load_s: f64,
    /// From the start of the generation to its first token; none when there was none.
    pub ttft_s: Option<f64>,
    /// From the start of the generation to the logits of the last prompt token.
    pub prefill_s: f64,
    /// From there to the end of the generation.
    pub decode_s: f64,
    /// Prompt tokens that were computed, per second of prefill.
    pub prefill_tok_s: Option<f64>,
    /// Of those a second of decode; none where there was none.
    pub decode_tok_s: Option<f64>,
    /// The generation, prefill and decode, without loading.
    pub wall_s: f64,
    /// Where the wall time went.
    pub stages: Stages,
    /// Reading.
    pub io: IoStats,
    /// Disk against arithmetic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap: Option<OverlapStats>,
    /// What the file of the context was to it, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_file: Option<KvFileStats>,
    /// Where experts came from.
    pub experts: ExpertStats,
    /// What the prompt had of both; the rest was of the answer.
    pub prefill: Fetched,
    /// What drafts were worth; none where nothing drafts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftStats>,
    /// How the answer followed its grammar, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<GrammarStats>,
    /// What memory is used for.
    pub memory: MemoryStats,
    /// What bound the decode; none where nothing was decoded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// What to change; filled in by who knows the machine and what was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// A token and how likely the model found it. Fields have the names that the API of OpenAI gives them.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TopLogprob {
    /// The token.
    pub id: u32,
    /// Its text, with U+FFFD for bytes that are no character by themselves; none without a tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<Vec<u8>>,
    /// Natural logarithm of its probability.
    pub logprob: f64,
}

/// A token of the answer, and those that were most likely in its place.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TokenLogprob {
    /// The token.
    #[serde(flatten)]
    pub token: TopLogprob,
    /// The most likely ones, best first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// The version of the field names, always 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct SchemaVersion;

impl Serialize for SchemaVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(1)
    }
}

/// The model.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct ModelStats {
    /// Its directory.
    pub dir: String,
    /// Its family, as config.json calls it.
    pub arch: String,
    /// Decoder layers.
    pub layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Storage formats that occur, such as `int4`.
    pub formats: Vec<String>,
}

/// The machine.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct MachineStats {
    /// Name of the processor.
    pub cpu: String,
    /// Instruction set of the kernels that ran.
    pub kernels: String,
    /// Memory of the machine, in bytes.
    pub ram: u64,
    /// Release of the operating system's kernel.
    pub kernel: String,
    /// File system of the model.
    pub fs: String,
}

/// Stages in the order they were first met, as a map.
#[derive(Clone, Debug, Default)]
pub struct Stages(pub Vec<(&'static str, StageStats)>);

impl Stages {
    /// Busy time of all stages.
    pub fn busy_s(&self) -> f64 {
        self.0.iter().map(|(_, stage)| stage.busy_s).sum()
    }
}

impl Serialize for Stages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, stage) in &self.0 {
            map.serialize_entry(name, stage)?;
        }
        map.end()
    }
}

/// One stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct StageStats {
    /// Time spent in it.
    pub busy_s: f64,
    /// Median of one visit, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of one visit, in microseconds.
    pub p99_us: f64,
    /// Visits.
    pub n: u64,
}

/// Whether reads go around the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Directness {
    /// They do.
    Direct,
    /// They were asked to and the file system quietly does not.
    SilentlyBuffered,
    /// They do not.
    #[default]
    Buffered,
}

impl Serialize for Directness {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Directness::Direct => serializer.serialize_bool(true),
            Directness::Buffered => serializer.serialize_bool(false),
            Directness::SilentlyBuffered => serializer.serialize_str("silently-buffered"),
        }
    }
}

/// Reading during the generation.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct IoStats {
    /// Mode that ran: `direct` or `buffered`.
    pub mode: String,
    /// Device that ran: `uring`, `threads`, ...
    pub device: String,
    /// Whether the page cache is bypassed.
    pub direct: Directness,
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Of those, bytes that were asked for.
    pub useful_bytes: u64,
    /// Time that reads stood in the queue before the drive was asked, added up.
    pub queued_s: f64,
    /// Time from there to their completion, added up.
    pub service_s: f64,
    /// Time the generation stood still for a read.
    pub wait_s: f64,
    /// Time with at least one read in flight.
    pub busy_s: f64,
    /// Bytes read per second of `busy_s`, in 1e9 bytes.
    pub gb_s: Option<f64>,
    /// Median time of one expert's read from submission to completion, in milliseconds; none where nothing was read.
    pub slab_p50_ms: Option<f64>,
    /// 99th percentile of it.
    pub slab_p99_ms: Option<f64>,
    /// Processor time of the threads that read; none where threads of the kernel read for them.
    pub cpu_s: Option<f64>,
    /// Reads in flight, averaged over `busy_s`.
    pub depth_mean: Option<f64>,
    /// The drives that shared the reads, the model's own first; none where there are no mirrors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drives: Vec<DriveUse>,
}

/// One of the drives that hold the model or copies of it.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct DriveUse {
    /// The directory.
    pub path: String,
    /// Bytes read from it.
    pub bytes: u64,
    /// Time with at least one request to it.
    pub busy_s: f64,
    /// Bytes read per second of `busy_s`, in 1e9 bytes.
    pub gb_s: Option<f64>,
    /// Requests it failed, which went to another drive where one had the bytes.
    pub errors: u64,
    /// Whether it gave bytes that failed their checksum.
    pub wrong: bool,
    /// Whether it is a mirror and not read any more for that.
    pub dropped: bool,
}

/// Where experts came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct ExpertStats {
    /// Experts asked for by layers.
    pub requested: u64,
    /// Of those, found in the cache and pinned there.
    pub hit_pinned: u64,
    /// Of those, found in the rest of the cache, where an earlier layer or token had asked for them.
    pub hit_cached: u64,
    /// Of those, found in the cache thanks to a guess.
    pub hit_prefetched: u64,
    /// Of those, waited for while they were read.
    pub missed: u64,
    /// Share found in memory; none when nothing was requested.
    pub hit_rate: Option<f64>,
    /// Guesses whose reads were submitted.
    pub prefetch_issued: u64,
    /// Of those, asked for by the layer they were for, `prefetch_late` included.
    pub prefetch_used: u64,
    /// Of those, still being read when they were asked for; they are counted as missed too.
    pub prefetch_late: u64,
    /// Of those issued, taken back before they were read, or before they were wholly read.
    pub prefetch_cancelled: u64,
    /// Of those issued, read and not asked for by the layer they were for.
    pub prefetch_wasted: u64,
    /// Bytes read for those, and for guesses that were taken back half read.
    pub prefetch_wasted_bytes: u64,
    /// Share of the experts that tokens chose that had been guessed one layer before, whatever was in the cache; none when
    /// nothing was guessed.
    pub lookahead_recall: Option<f64>,
    /// Share of the different experts guessed for a step's layer that it asked for: what reading them is worth.
    pub lookahead_precision: Option<f64>,
    /// Of the guesses made two layers before: share of the experts chosen that were among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookahead_recall_two_ahead: Option<f64>,
    /// Share of the experts that tokens chose that the same layer had chosen for the token before: what a guess has to
    /// beat. None where no token had one before it.
    pub previous_token_recall: Option<f64>,
    /// Experts compared with their checksum.
    pub verified: u64,
    /// Of those, wrong ones that were put right from another copy as they were read.
    pub healed: u64,
    /// Of those, wrong ones in memory, which were discarded: the generation fails where there are any.
    pub discarded: u64,
    /// Time that took, on the thread that computes.
    pub verify_s: f64,
}

/// Drafts of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct DraftStats {
    /// What drafted, as it was asked for.
    pub source: &'static str,
    /// Steps after the prompt.
    pub forwards: usize,
    /// Tokens that went back into the model, of each of those.
    pub tokens_per_forward: Option<f64>,
    /// Tokens drafted; those behind the end of the answer are not counted.
    pub drafted: u64,
    /// Of those, what the model chose too.
    pub accepted: u64,
    /// Share of them; none where nothing was drafted.
    pub acceptance: Option<f64>,
    /// Of those accepted, what the grammar of the answer had no other way than.
    pub forced: u64,
}

/// The grammar of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct GrammarStats {
    /// Whether the answer was held to it; otherwise it drafted only.
    pub constrains: bool,
    /// Whether the answer is one that it describes, and not the beginning of one.
    pub complete: bool,
    /// Tokens that were followed.
    pub tokens: u32,
    /// Of those, what it had no other way than.
    pub forced: u32,
    /// Times that it was asked what may come.
    pub masks: u32,
    /// Time to compile it, the vocabulary included.
    pub compile_s: f64,
    /// Time to tell what may come, added up.
    pub mask_s: f64,
    /// Longest of those times, in microseconds.
    pub mask_max_us: f64,
}

/// Experts asked for and bytes read by a part of a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Fetched {
    /// Experts asked for by layers.
    pub requested: u64,
    /// Of those, waited for while they were read.
    pub missed: u64,
    /// Bytes read, those of reads that ended in it.
    pub bytes: u64,
    /// Time with at least one read in flight.
    pub busy_s: f64,
}

impl Fetched {
    /// Share of the experts that was found in memory; none where none was asked for.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.requested > 0).then(|| (self.requested - self.missed) as f64 / self.requested as f64)
    }

    /// Bytes read per second of `busy_s`, in 1e9 bytes; none where nothing was read.
    pub fn gb_s(&self) -> Option<f64> {
        (self.busy_s > 0.0).then(|| self.bytes as f64 / 1e9 / self.busy_s)
    }
}

impl Stats {
    /// What prompt and answer fetched together.
    pub fn whole(&self) -> Fetched {
        let Stats { experts, io, .. } = self;
        Fetched { requested: experts.requested, missed: experts.missed, bytes: io.bytes, busy_s: io.busy_s }
    }

    /// What the answer fetched.
    pub fn decode(&self) -> Fetched {
        let (whole, prefill) = (self.whole(), self.prefill);
        Fetched {
            requested: whole.requested - prefill.requested,
            missed: whole.missed - prefill.missed,
            bytes: whole.bytes - prefill.bytes,
            busy_s: (whole.busy_s - prefill.busy_s).max(0.0),
        }
    }
}

/// What memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct MemoryStats {
    /// Bytes the program allowed itself: at least the sum of `program`, `resident`, `kv`, `reconstruction`, `activations`,
    /// `staging`, `page_cache_reserve` and `cache`.
    pub budget: u64,
    /// The program itself, its tokenizer, and what it knows of the model.
    pub program: u64,
    /// Weights that are always there.
    pub resident: u64,
    /// Cached keys and values.
    pub kv: u64,
    /// Rebuilt keys and values of explicit attention.
    pub reconstruction: u64,
    /// Scratch of a step and of its experts.
    pub activations: u64,
    /// Slabs that experts are read into which are quantized on their way.
    pub staging: u64,
    /// What the kernel's page cache is left.
    pub page_cache_reserve: u64,
    /// The expert cache.
    pub cache: u64,
    /// What it would take if it held every expert.
    pub cache_whole: u64,
    /// Largest resident set of the process.
    pub rss_peak: u64,
}

impl Engine {
    /// Numbers of the last generation; what only the caller knows (text, ids, settings, machine) is left empty.
    pub fn stats(&self) -> Stats {
        let (times, arch) = (&self.times, &self.model.arch);
        let stages = Stage::ALL.iter().map(|&stage| {
            let time = self.meter.stage(stage);
            let us = |d: std::time::Duration| d.as_secs_f64() * 1e6;
            let stats = StageStats {
                busy_s: time.busy.as_secs_f64(),
                p50_us: us(time.p50),
                p99_us: us(time.p99),
                n: time.laps,
            };
            (stage.name(), stats)
        });
        let (store, guesses) = (self.experts.store.stats(), self.state.lookahead.tally());
        let wall = self.meter.wall();
        let prefill = times.prefill.unwrap_or(wall);
        let mut stats = Stats {
            model: ModelStats {
                arch: arch.family.name().into(),
                layers: arch.layers.len(),
                experts: arch.moe.experts,
                ..ModelStats::default()
            },
            machine: MachineStats { kernels: self.model.compute.kernels.isa.to_string(), ..MachineStats::default() },
            prompt_tokens: times.prompt_tokens,
            cached_tokens: times.cached_tokens,
            tokens: times.tokens,
            decode_steps: times.decode_steps,
            load_s: self.load.as_secs_f64(),
            ttft_s: times.first_token.map(|t| t.as_secs_f64()),
            prefill_s: prefill.as_secs_f64(),
            decode_s: (wall - prefill).as_secs_f64(),
            wall_s: wall.as_secs_f64(),
            stages: Stages(stages.filter(|(_, stage)| stage.n > 0).collect()),
            io: self.io_stats(),
            kv_file: self.kv_file.as_ref().map(KvFile::stats),
            overlap: times.prefill.and_then(|_| self.readings().since(&times.before_decode)),
            experts: ExpertStats {
                requested: store.requested,
                hit_pinned: store.pinned,
                hit_cached: store.hits - store.pinned,
                hit_prefetched: store.prefetched,
                missed: store.misses,
                hit_rate: None,
                prefetch_issued: store.guessed,
                prefetch_used: store.prefetched + store.late,
                prefetch_late: store.late,
                prefetch_cancelled: store.cancelled,
                prefetch_wasted: store.wasted,
                prefetch_wasted_bytes: store.wasted_bytes,
                lookahead_recall: guesses.recall[0].fraction(),
                lookahead_precision: guesses.precision.fraction(),
                lookahead_recall_two_ahead: guesses.recall[1].fraction(),
                previous_token_recall: guesses.previous.fraction(),
                verified: store.checked,
                healed: store.healed,
                discarded: store.discarded,
                verify_s: store.checking.as_secs_f64(),
            },
            prefill: times.prefill.map_or_else(|| self.fetched(), |_| times.of_prefill),
            draft: self.draft_stats(),
            memory: MemoryStats {
                budget: self.budget.total,
                program: self.budget.program,
                resident: self.budget.resident,
                kv: self.budget.kv,
                reconstruction: self.budget.reconstruction,
                activations: self.budget.activations + self.budget.working,
                staging: self.budget.staging,
                page_cache_reserve: self.budget.page_cache,
                cache: self.budget.experts(),
                cache_whole: self.budget.every_expert,
                rss_peak: 0,
            },
            ..Stats::default()
        };
        stats.derive();
        stats
    }

    fn draft_stats(&self) -> Option<DraftStats> {
        let Drafts { rule, tally, .. } = &self.drafts;
        (rule.source != DraftSource::Off).then(|| DraftStats {
            source: rule.source.name(),
            forwards: self.times.forwards,
            drafted: tally.drafted,
            accepted: tally.accepted,
            forced: tally.forced,
            ..DraftStats::default()
        })
    }

    /// What was fetched since the counters began.
    pub(super) fn fetched(&self) -> Fetched {
        let (store, io) = (self.experts.store.stats(), self.experts.store.device_stats());
        Fetched { requested: store.requested, missed: store.misses, bytes: io.bytes, busy_s: io.busy_ns as f64 / 1e9 }
    }

    fn io_stats(&self) -> IoStats {
        let store = &self.experts.store;
        let io = store.device_stats();
        let at = |share| store.read_times().at(share).map(|time| time.as_secs_f64() * 1e3);
        let direct = self.files.accesses().map(|access| match access {
            Access::Direct { .. } => Directness::Direct,
            Access::SilentlyBuffered { .. } => Directness::SilentlyBuffered,
            Access::Buffered { .. } | Access::DontCache | Access::Mapped | Access::Dropped => Directness::Buffered,
        });
        // One file that is not read directly spoils the claim for all.
        let direct = direct.max_by_key(|access| *access as u8).unwrap_or_default();
        let seconds = |ns: u64| ns as f64 / 1e9;
        IoStats {
            mode: match self.files.mode() {
                _ if direct == Directness::Direct => "direct",
                IoMode::Auto | IoMode::Direct | IoMode::Buffered => "buffered",
                other => other.name(),
            }
            .into(),
            device: store.device().describe().name.into(),
            direct,
            reads: io.reads,
            bytes: io.bytes,
            useful_bytes: store.stats().useful_bytes,
            queued_s: seconds(io.queued_ns),
            service_s: seconds(io.service_ns),
            wait_s: self.meter.stage(Stage::Wait).busy.as_secs_f64(),
            busy_s: seconds(io.busy_ns),
            slab_p50_ms: at(0.5),
            slab_p99_ms: at(0.99),
            cpu_s: io.cpu_ns.map(seconds),
            depth_mean: (io.busy_ns > 0).then(|| io.service_ns as f64 / io.busy_ns as f64),
            drives: self.drives(),
            ..IoStats::default()
        }
    }

    /// What each drive did during the generation, where there are several.
    fn drives(&self) -> Vec<DriveUse> {
        if self.files.drives() == 1 {
            return Vec::new();
        }
        let uses = self.experts.store.drive_stats().enumerate().map(|(drive, did)| DriveUse {
            path: self.files.drive_dir(drive).display().to_string(),
            bytes: did.bytes,
            busy_s: did.busy_ns as f64 / 1e9,
            gb_s: None,
            errors: did.errors,
            wrong: self.files.was_wrong(drive),
            dropped: drive > 0 && self.files.was_wrong(drive),
        });
        uses.collect()
    }
}

impl Stats {
    /// Fills in what follows from the counted and timed fields: rates and the hit rate. Fractions keep the digits that
    /// mean something: nanoseconds of times, six decimals of everything else.
    pub fn derive(&mut self) {
        let rate = |count: f64, seconds: f64| (count > 0.0 && seconds > 0.0).then(|| count / seconds);
        // Of a prompt that was interrupted only a part was read.
        let was_read = self.ttft_s.is_some() || self.finish_reason != "interrupted";
        let computed = self.prompt_tokens.saturating_sub(self.cached_tokens);
        self.prefill_tok_s = rate(computed as f64, self.prefill_s).filter(|_| was_read);
        self.decode_tok_s = rate(self.decode_steps as f64, self.decode_s);
        self.io.gb_s = rate(self.io.bytes as f64 / 1e9, self.io.busy_s);
        for drive in &mut self.io.drives {
            drive.gb_s = rate(drive.bytes as f64 / 1e9, drive.busy_s);
        }
        self.experts.hit_rate = (self.experts.requested > 0)
            .then(|| 1.0 - self.experts.missed.min(self.experts.requested) as f64 / self.experts.requested as f64);
        if let Some(draft) = &mut self.draft {
            draft.tokens_per_forward = (draft.forwards > 0).then(|| self.decode_steps as f64 / draft.forwards as f64);
            draft.acceptance = (draft.drafted > 0).then(|| draft.accepted as f64 / draft.drafted as f64);
        }
        if let Some(overlap) = self.overlap.filter(|_| self.decode_steps > 0) {
            // Of the whole generation, which the verdict is about the longer part of.
            let attention = self.stages.0.iter().find(|(name, _)| *name == Stage::Attention.name());
            let share = if self.wall_s > 0.0 { overlap.wall_s / self.wall_s } else { 1.0 };
            let attention_s = attention.map_or(0.0, |(_, stage)| stage.busy_s * share);
            self.verdict = Some(judge(&overlap, attention_s));
        }
        self.round();
    }

    fn round(&mut self) {
        let io = &mut self.io;
        let times = [&mut self.load_s, &mut self.prefill_s, &mut self.decode_s, &mut self.wall_s];
        let times = times.into_iter().chain(&mut self.ttft_s);
        let times = times.chain([&mut io.queued_s, &mut io.service_s, &mut io.wait_s, &mut io.busy_s]);
        let times = times.chain(&mut io.cpu_s);
        let rates = [&mut self.prefill_tok_s, &mut self.decode_tok_s, &mut io.gb_s];
        let experts = &mut self.experts;
        let rates = rates.into_iter().chain([&mut experts.hit_rate, &mut experts.lookahead_recall]);
        let rates = rates.chain([&mut experts.lookahead_precision, &mut experts.lookahead_recall_two_ahead]);
        let rates = rates.chain([&mut experts.previous_token_recall]);
        let rates = rates.chain([&mut io.depth_mean, &mut io.slab_p50_ms, &mut io.slab_p99_ms]);
        let rates = rates.chain(io.drives.iter_mut().map(|drive| &mut drive.gb_s));
        let rates =
            rates.chain(self.draft.iter_mut().flat_map(|draft| [&mut draft.tokens_per_forward, &mut draft.acceptance]));
        rates.flatten().for_each(|rate| *rate = rounded(*rate, 1e6));
        times.for_each(|time| *time = rounded(*time, 1e9));
        io.drives.iter_mut().for_each(|drive| drive.busy_s = rounded(drive.busy_s, 1e9));
        if let Some(overlap) = &mut self.overlap {
            let OverlapStats { disk_busy_s, compute_busy_s, wait_s, wall_s, efficiency } = overlap;
            [disk_busy_s, compute_busy_s, wait_s, wall_s].into_iter().for_each(|time| *time = rounded(*time, 1e9));
            *efficiency = rounded(*efficiency, 1e6);
        }
        if let Some(file) = &mut self.kv_file {
            [&mut file.read_s, &mut file.write_s].into_iter().for_each(|time| *time = rounded(*time, 1e9));
        }
        for (_, stage) in &mut self.stages.0 {
            stage.busy_s = rounded(stage.busy_s, 1e9);
            stage.p50_us = rounded(stage.p50_us, 1e3);
            stage.p99_us = rounded(stage.p99_us, 1e3);
        }
    }
}

/// `value` in whole units of one part in `parts`.
fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_derived() {
        let stage = |busy_s| StageStats { busy_s, p50_us: 1.0, p99_us: 2.0, n: 3 };
        let mut stats = Stats {
            prompt_tokens: 10,
            tokens: 5,
            decode_steps: 4,
            prefill_s: 2.0,
            decode_s: 8.0,
            wall_s: 10.0,
            stages: Stages(vec![("attention", stage(4.0)), ("experts", stage(5.5))]),
            io: IoStats { bytes: 3_000_000_000, busy_s: 1.5, ..IoStats::default() },
            experts: ExpertStats { requested: 8, hit_cached: 6, missed: 2, ..ExpertStats::default() },
            ..Stats::default()
        };
        stats.derive();
        let json = serde_json::to_value(&stats).unwrap();
        assert_eq!(json["schema_version"], 1);
        assert_eq!(json["prefill_tok_s"], 5.0);
        assert_eq!(json["decode_tok_s"], 0.5);
        assert_eq!(json["io"]["gb_s"], 2.0);
        assert_eq!(json["io"]["direct"], false);
        assert_eq!(json["experts"]["hit_rate"], 0.75);
        assert_eq!(json["stages"].as_object().unwrap().keys().collect::<Vec<_>>(), ["attention", "experts"]);
    }

    #[test]
    fn fractions_have_no_digits_that_mean_nothing() {
        let stage = StageStats { busy_s: 0.1 + 0.2, p50_us: 12.345_678_9, p99_us: 1.0 / 3.0, n: 1 };
        let mut stats = Stats {
            prompt_tokens: 1,
            prefill_s: 3.0,
            ttft_s: Some(2.000_000_000_4),
            stages: Stages(vec![("attention", stage)]),
            ..Stats::default()
        };
        stats.derive();
        let json = serde_json::to_string(&stats).unwrap();
        for text in [
            "\"busy_s\":0.3,",
            "\"p50_us\":12.346,",
            "\"p99_us\":0.333,",
            "\"ttft_s\":2.0,",
            "\"prefill_tok_s\":0.333333,",
        ] {
            assert!(json.contains(text), "no {text} in {json}");
        }
    }

    #[test]
    fn a_prompt_that_was_interrupted_has_no_speed() {
        let of = |finish_reason, ttft_s| {
            let mut stats = Stats { prompt_tokens: 2000, prefill_s: 2.0, finish_reason, ttft_s, ..Stats::default() };
            stats.derive();
            stats.prefill_tok_s
        };
        assert_eq!(
            [of("interrupted", None), of("interrupted", Some(2.0)), of("length", None)],
            [None, Some(1e3), Some(1e3)]
        );
    }

    #[test]
    fn nothing_done_has_no_rates() {
        let mut stats = Stats { tokens: 1, ..Stats::default() };
        stats.derive();
        assert_eq!(
            (stats.prefill_tok_s, stats.decode_tok_s, stats.io.gb_s, stats.experts.hit_rate),
            (None, None, None, None)
        );
    }
}
