//! Looking on while routers choose.

use super::{ExpertCall, ExpertExecutor, ForwardError, Guess};
use crate::meter::Meter;

/// Who looks on: a closure, at choices alone.
pub trait Observer {
    /// A model layer chose the expert `ids` (`[rows, top_k]`, each row ascending) with these gates (`[rows, top_k]`).
    fn chose(&mut self, layer: usize, ids: &[u16], gates: &[f32]);

    /// So many positions of a prompt are there already, and will not be computed.
    fn kept(&mut self, positions: usize) {
        let _ = positions;
    }

    /// Layers ahead, from the next one on, of which guesses are to be made for the observer, whether they are of use
    /// otherwise or not.
    fn hints(&self) -> usize {
        0
    }

    /// A guess was made.
    fn guessed(&mut self, guess: &Guess<'_>) {
        let _ = guess;
    }
}

/// Nobody.
impl Observer for () {
    fn chose(&mut self, _layer: usize, _ids: &[u16], _gates: &[f32]) {}
}

impl<F: FnMut(usize, &[u16], &[f32])> Observer for F {
    fn chose(&mut self, layer: usize, ids: &[u16], gates: &[f32]) {
        self(layer, ids, gates);
    }
}

/// Another executor, with an observer who sees every call before it is served.
pub struct Observed<'a> {
    /// Serves the calls.
    pub inner: &'a mut dyn ExpertExecutor,
    /// Looks on.
    pub observer: &'a mut dyn Observer,
}

impl ExpertExecutor for Observed<'_> {
    fn request(&mut self, call: &ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        self.observer.chose(call.layer, call.ids, call.gates);
        self.inner.request(call, meter)
    }

    fn hints(&self) -> usize {
        self.inner.hints().max(self.observer.hints())
    }

    fn hint(&mut self, guess: &Guess<'_>) {
        self.observer.guessed(guess);
        if guess.ahead <= self.inner.hints() {
            self.inner.hint(guess);
        }
    }

    fn serve(&mut self, call: ExpertCall<'_>, meter: &mut Meter) -> Result<(), ForwardError> {
        self.inner.serve(call, meter)
    }
}
