//! The `millstream` binary.

/// Whoever runs out of memory is told so.
#[global_allocator]
static HEAP: millstream_io::Heap = millstream_io::Heap;

fn main() -> std::process::ExitCode {
    millstream::cli::main(std::env::args_os())
}
