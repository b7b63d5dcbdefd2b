//! Signals. Interrupts: the first asks for an orderly end, the second ends the process. The limit on the size of files: no
//! signal is needed to know of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};

use super::Failure;

struct Watch {
    /// An interrupt came.
    raised: Arc<AtomicBool>,
    /// The next one ends the process, as if nobody watched.
    fatal: Arc<AtomicBool>,
    /// It was the whole program that was asked to end.
    terminated: Arc<AtomicBool>,
}

static WATCH: OnceLock<Watch> = OnceLock::new();

/// From here to [`unwatch`], the first interrupt raises the flag returned, and a second ends the process.
pub fn watch() -> Result<Arc<AtomicBool>, Failure> {
    let watch = match WATCH.get() {
        Some(watch) => watch,
        None => {
            let made = register().map_err(|e| Failure::work("cannot watch for interrupts").cause(e))?;
            WATCH.get_or_init(|| made)
        }
    };
    watch.raised.store(false, Ordering::SeqCst);
    watch.fatal.store(false, Ordering::SeqCst);
    Ok(watch.raised.clone())
}

/// Whether one of the interrupts was SIGTERM, which asks for the end of the program and not of what it is doing.
pub fn is_terminated() -> bool {
    WATCH.get().is_some_and(|watch| watch.terminated.load(Ordering::SeqCst))
}

/// An interrupt ends the process again, as before [`watch`].
pub fn unwatch() {
    if let Some(watch) = WATCH.get() {
        watch.fatal.store(true, Ordering::SeqCst);
    }
}

/// A write beyond `ulimit -f` is an error like others, EFBIG, which names its file. By default the kernel sends a signal
/// first that ends the process without a word; with a handler, whatever it does, the write comes back instead.
pub fn survive_file_limit() {
    // Where no handler can be had, a write ends the process as it would have.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

fn register() -> std::io::Result<Watch> {
    let watch = Watch { raised: Arc::default(), fatal: Arc::default(), terminated: Arc::default() };
    signal_hook::flag::register(SIGTERM, watch.terminated.clone())?;
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds `fatal` down and raises it, the second finds it up.
        signal_hook::flag::register_conditional_default(signal, watch.fatal.clone())?;
        signal_hook::flag::register(signal, watch.fatal.clone())?;
        signal_hook::flag::register(signal, watch.raised.clone())?;
    }
    Ok(watch)
}
