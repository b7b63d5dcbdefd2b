//! A drive that hangs: what the user is told, and how they leave it.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::engine::{Engine, Notice, Watch};
use crate::store::Vigil;

use super::render;

/// Says that a drive hangs while an engine generates, and gives up once `interrupted` is raised.
pub fn watch_reads(interrupted: Arc<AtomicBool>, quiet: bool) -> Watch {
    Box::new(move |what| {
        match what {
            Notice::Waiting => {}
            Notice::Hung(hung) => render::aside(quiet, &goes_on(&hung.to_string())),
            Notice::Answered { waited } => render::aside(quiet, &answered(waited)),
        }
        match interrupted.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })
}

/// Leaves an engine to the end of the process, where it gave up its reads. The kernel may still write to their slabs, so
/// dropping it would wait for the drive.
pub fn leave(engine: Engine, quiet: bool) {
    if engine.store().gave_up() {
        tell_left(engine.store().device().in_flight(), quiet);
        std::mem::forget(engine);
    }
}

/// Says that reads are left behind, where some are.
pub fn tell_left(reads: usize, quiet: bool) {
    if reads > 0 {
        render::note(quiet, &format!("{reads} reads are left behind that the drive has not answered"));
    }
}

/// Drives under reads that no engine makes.
#[derive(Default)]
pub struct Silence {
    vigil: Vigil,
}

impl Silence {
    /// The drive has answered nothing for `silent`: the line to say, where it is time to.
    pub fn lasts(&mut self, silent: Duration) -> Option<String> {
        if silent < self.vigil.waited() {
            let before = std::mem::take(&mut self.vigil);
            self.vigil.lasts(silent);
            return before.reported().then(|| answered(before.waited()));
        }
        let due = self.vigil.lasts(silent);
        due.then(|| goes_on(&format!("the drive has not answered for {} s", silent.as_secs())))
    }
}

fn goes_on(what: &str) -> String {
    format!("{what}; waiting goes on, Ctrl-C ends it")
}

fn answered(waited: Duration) -> String {
    format!("the drive answered after {} s", waited.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_given_up_once_the_user_asks_and_not_before() {
        let interrupted = Arc::new(AtomicBool::new(false));
        let mut watch = watch_reads(interrupted.clone(), true);
        let answered = Notice::Answered { waited: Duration::from_secs(31) };
        assert!(watch(Notice::Waiting).is_continue() && watch(answered).is_continue());
        interrupted.store(true, Ordering::Relaxed);
        assert!(watch(Notice::Waiting).is_break());
    }

    #[test]
    fn silence_is_told_after_thirty_seconds_then_at_doubled_times_and_its_end_once() {
        let mut silence = Silence::default();
        let mut told = Vec::new();
        for seconds in (0..=130).chain(0..=31).chain([0, 1, 0]) {
            told.extend(silence.lasts(Duration::from_secs(seconds)).map(|line| (seconds, line)));
        }
        let hangs = |s: u64| (s, format!("the drive has not answered for {s} s; waiting goes on, Ctrl-C ends it"));
        let answered = |s: u64| (0, format!("the drive answered after {s} s"));
        assert_eq!(told, [hangs(30), hangs(60), hangs(120), answered(130), hangs(30), answered(31)]);
    }
}
