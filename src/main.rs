//! The `millstream` binary.

fn main() -> std::process::ExitCode {
    millstream::cli::main(std::env::args_os())
}
