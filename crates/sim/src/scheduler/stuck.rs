//! When threads only wait: the network's turn, the end of waits with a timeout, and the report if nothing helps.

use super::{Pass, Scheduler};
use crate::error::{Error, Result};
use crate::thread::{Thread, Wait};

/// Passes without news after which a run is looked over for being stuck.
const QUIET: u32 = 3;
/// Polls without news after which waits with a timeout are over, where threads poll that do not say for what.
const IDLE_TIMEOUT: u64 = 1 << 12;

impl Scheduler<'_> {
    /// In random order: perhaps delivers something.
    pub(super) fn deliver_at_random(&mut self) {
        if let Some(rng) = self.rng.as_mut().filter(|_| !self.run.network.is_idle()) {
            for _ in 0..rng.below(4) {
                self.run.network.step(rng);
                self.run.progress();
            }
        }
    }

    /// Delivers something, if any thread waits.
    pub(super) fn deliver(&mut self) {
        let run = self.run;
        let waits = self.pass.looks + self.pass.spins > 0 || !self.at_network.is_empty();
        if run.network.is_idle() || !(waits || run.queue.borrow().is_empty()) {
            return;
        }
        match &mut self.rng {
            Some(rng) => run.network.step(rng),
            None => run.network.deliver(),
        }
        run.progress();
    }

    /// Finds out whether all that threads do is to wait for each other. `idle` is the count before the pass.
    pub(super) fn look_for_news(&mut self, idle: u64) -> Result<()> {
        let run = self.run;
        let Pass { looks, spins, other } = self.pass;
        if other || !run.network.is_idle() || run.idle.get() != idle + looks + spins {
            self.quiet = 0;
            return Ok(());
        }
        if spins > 0 {
            self.quiet = 0;
            // Who spins may count its rounds. A timeout may always come, but a report may not.
            if run.idle.get() > IDLE_TIMEOUT.max(64 * self.live as u64) {
                self.time_out();
            }
            return Ok(());
        }
        if self.quiet == 0 {
            run.streak.set(run.streak.get() + 1);
        }
        self.quiet += 1;
        if self.quiet < QUIET {
            return Ok(());
        }
        // A first look may have begun before the streak did.
        let looked = |thread: &Thread| match thread.wait.get() {
            Wait::Ready | Wait::Spin { .. } => {
                let (streak, looks) = run.waits[thread.id as usize].looks.get();
                streak == run.streak.get() && looks >= 2
            }
            _ => true,
        };
        if !run.threads.iter().all(looked) || self.time_out() {
            return Ok(());
        }
        Err(Error::Deadlock(self.stall()))
    }

    /// Ends the wait with a timeout that is over first; says whether there was any.
    pub(super) fn time_out(&mut self) -> bool {
        let run = self.run;
        let deadline = |thread: &Thread| {
            let parked = matches!(thread.wait.get(), Wait::Network);
            let polls = matches!(thread.wait.get(), Wait::Spin { .. } | Wait::Ready);
            let state = &run.waits[thread.id as usize];
            let waits = thread.waits.get() && (parked || polls) && !state.over.get();
            state.named.get().filter(|_| waits).and_then(|named| named.deadline)
        };
        let timed = run.threads.iter().filter_map(|thread| Some((deadline(thread)?, thread)));
        let Some((first, thread)) = timed.min_by_key(|(deadline, _)| *deadline) else {
            return false;
        };
        run.clock.set(run.clock.get().max(first));
        run.waits[thread.id as usize].over.set(true);
        run.progress();
        self.quiet = 0;
        true
    }
}
