//! Directories for tests that write much.

use std::path::Path;

/// A directory where making files durable costs nothing, where there is one with room: some machines have 64 MB of it.
pub fn quick_dir() -> tempfile::TempDir {
    const ROOM_BYTES: u64 = 1 << 30;
    let memory = Path::new("/dev/shm");
    let roomy = millstream_io::free_bytes(memory).is_ok_and(|free| free >= ROOM_BYTES);
    let in_memory = roomy.then(|| tempfile::tempdir_in(memory).ok()).flatten();
    in_memory.unwrap_or_else(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
}
