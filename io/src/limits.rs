//! Every bound of the crate, related by const asserts.

use std::time::Duration;

/// File ranges one read may gather: three matrices and their scales, with two to spare.
pub const MAX_SEGMENTS: usize = 8;
/// A gap between two ranges of one file up to this many bytes is read through: a second request costs more.
pub const GAP_BYTES_MAX: u64 = 64 * KIB;
/// Largest slab. The kernel refuses to register a buffer above 1 GiB.
pub const SLAB_BYTES_MAX: usize = GIB as usize;
/// Alignment of offsets, lengths and addresses unless a device needs more.
pub const SECTOR_BYTES: u32 = 4096;
/// Largest alignment a device may ask for; above it slabs would be mostly padding.
pub const SECTOR_BYTES_MAX: u32 = 2 << 20;
/// The page size worth having: one device request covers megabytes instead of scattered 4 KiB pages.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Memory is faulted in by as many threads as there are such pieces of it: one takes ten times what a thread takes to start.
pub const POPULATE_PIECE_BYTES: usize = 16 << 20;
/// Ordinary page.
pub const PAGE_BYTES: usize = 4096;
/// Default cap on bytes handed to the kernel; beyond the knee more depth buys only latency.
pub const DEPTH_BYTES_MIN: u64 = 64 * MIB;
/// The default cap is never below this many slabs.
pub const DEPTH_SLABS_MIN: u64 = 4;
/// Request size while the arena is registered: a huge page, and a lone slab still is many requests.
pub const RING_CHUNK_BYTES: u32 = 2 << 20;
/// Request size of a reader thread while there are fewer reads than threads: a lone slab occupies every thread.
pub const THREAD_CHUNK_BYTES: u32 = 4 << 20;
/// Smallest request size that may be configured.
pub const CHUNK_BYTES_MIN: u32 = 64 << 10;
/// Submission entries of the ring.
pub const RING_ENTRIES: u32 = 256;
/// Smallest ring: one entry for the wake-up poll, one for a read.
pub const RING_ENTRIES_MIN: u32 = 2;
/// Largest ring the kernel offers.
pub const RING_ENTRIES_MAX: u32 = 32768;
/// Idle time after which a kernel thread that polls for submissions goes to sleep.
pub const SQPOLL_IDLE_MS: u32 = 100;
/// Kernel workers that serve buffered reads of a ring.
pub const RING_BUFFERED_WORKERS: u32 = 8;
/// Reads queued and in flight together, by default.
pub const QUEUE_READS: usize = 256;
/// Most reads a queue may hold.
pub const QUEUE_READS_MAX: usize = 65536;
/// Reader threads, by default.
pub const READER_THREADS: usize = 4;
/// Most reader threads.
pub const READER_THREADS_MAX: usize = 64;
/// Stack of one, which makes calls and nothing else: all of it counts where address space is limited.
pub const READER_STACK_BYTES: usize = 256 << 10;
/// System calls one request may take before it is given up, whatever the reason each fell short.
pub const ATTEMPTS_MAX: u32 = 64;
/// `EAGAIN`s one request may meet.
pub const AGAIN_MAX: u32 = 16;
/// Repeats of a request that met a device error.
pub const DAMAGE_RETRIES_MAX: u32 = 1;
/// Consecutive reads that may end at the same byte before that byte is the end of the file.
pub const SAME_END_MAX: u32 = 2;
/// First pause after `EAGAIN`; it doubles.
pub const BACKOFF_NS_MIN: u64 = 50_000;
/// Longest pause after `EAGAIN`.
pub const BACKOFF_NS_MAX: u64 = 100_000_000;
/// Longest wait for the read that shows whether a ring works, over all its system calls.
pub const PROBE_MAX: Duration = Duration::from_secs(10);
/// What is in flight once nobody wants it any more is waited for this long, then left to the end of the process.
pub const LEAVE_AFTER: Duration = Duration::from_secs(1);
/// Consecutive failed waits on a ring that report a passing condition before the ring counts as dead.
pub const ENTER_RETRIES_MAX: u32 = 1000;
/// Drives that may hold copies of the same files: a bit each in a byte.
pub const DRIVES_MAX: usize = 8;
/// Largest request where several drives hold the bytes: a slab is then striped over them.
pub const STRIPE_BYTES: u32 = 2 << 20;
/// Busy time of a drive that its rate is measured over, doubled at most.
pub const RATE_WINDOW_NS: u64 = 100_000_000;
/// Requests that a drive may have in hand while its rate is not known.
pub const UNKNOWN_CALLS_MAX: usize = 2;
/// Requests that a drive has in hand at most with one of a guess among them: with a single one it would be idle until
/// the next is handed out.
pub const LOOKAHEAD_CALLS: usize = 2;
/// Or more, where they are small.
pub const LOOKAHEAD_BYTES: u64 = RING_CHUNK_BYTES as u64;
/// And a single one where what it has takes longer than this: no request is handed out as late as that.
pub const LOOKAHEAD_NS: u64 = 2_000_000;
/// A drive that was left out for being slow is asked again after so many times as long as a request takes it.
pub const PROBE_PAUSES: u64 = 32;
/// Longest time of work of the others until it is asked again.
pub const PROBE_PAUSE_NS_MAX: u64 = 30_000_000_000;
/// A drive gets nothing more when its answer takes so many times as long as everything it has in hand should.
pub const STALL_TIMES: u64 = 4;
/// And this much longer: rates of a few requests mean little.
pub const STALL_NS_MIN: u64 = 50_000_000;
/// The end of a throttled wait that is spent looking at the clock: longer than a sleeper is late as a rule.
pub const THROTTLE_SPIN: Duration = Duration::from_micros(100);
/// Fewer bytes are not worth the two reads through the page cache that a direct one needs besides.
pub const PLACED_BYTES_MIN: usize = 128 << 10;
/// Nodes of memory, or cores, that can be told apart: all that the kernel can be built for.
pub const NUMBERED_MAX: usize = 8192;
/// Bytes written at a time: a few requests of any drive, all of them whole.
pub const WRITE_SLAB_BYTES: usize = 4 << 20;
/// Buffers of a writer: one is filled, one is written, and two even out the difference.
pub const WRITE_SLABS: usize = 4;
/// Bytes that may be dirty in the page cache where a file is written through it.
pub const WRITEBACK_BYTES: u64 = 64 * MIB;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const _: () = assert!(SECTOR_BYTES.is_power_of_two() && SECTOR_BYTES_MAX.is_power_of_two());
const _: () = assert!(SECTOR_BYTES <= CHUNK_BYTES_MIN && CHUNK_BYTES_MIN <= RING_CHUNK_BYTES);
const _: () = assert!(SECTOR_BYTES_MAX as usize <= HUGE_PAGE_BYTES);
const _: () = assert!(SLAB_BYTES_MAX <= u32::MAX as usize && SLAB_BYTES_MAX as u64 >= DEPTH_BYTES_MIN);
const _: () = assert!(AGAIN_MAX < ATTEMPTS_MAX && DAMAGE_RETRIES_MAX < ATTEMPTS_MAX && SAME_END_MAX < ATTEMPTS_MAX);
const _: () = assert!(DRIVES_MAX > 1 && STRIPE_BYTES >= CHUNK_BYTES_MIN && STRIPE_BYTES >= SECTOR_BYTES_MAX);
const _: () = assert!(RATE_WINDOW_NS < PROBE_PAUSE_NS_MAX && PROBE_PAUSES > 1 && STALL_TIMES > 1);
const _: () = assert!(LOOKAHEAD_CALLS >= 2 && LOOKAHEAD_NS < STALL_NS_MIN && LOOKAHEAD_BYTES < DEPTH_BYTES_MIN);
const _: () = assert!(BACKOFF_NS_MIN < BACKOFF_NS_MAX);
const _: () = assert!(RING_ENTRIES_MIN <= RING_ENTRIES && RING_ENTRIES <= RING_ENTRIES_MAX);
const _: () = assert!(QUEUE_READS <= QUEUE_READS_MAX && READER_THREADS <= READER_THREADS_MAX);
const _: () = assert!(HUGE_PAGE_BYTES.is_multiple_of(PAGE_BYTES) && PAGE_BYTES.is_multiple_of(SECTOR_BYTES as usize));
const _: () =
    assert!(WRITE_SLAB_BYTES.is_multiple_of(HUGE_PAGE_BYTES) && WRITE_SLABS >= 2 && WRITEBACK_BYTES <= u32::MAX as u64);
