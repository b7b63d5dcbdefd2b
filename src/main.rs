//! The `millstream` binary.
fn main() {}
