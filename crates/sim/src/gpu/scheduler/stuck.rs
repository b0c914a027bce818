//! Handles passes in which threads only wait: delivers network operations, expires timeouts and
//! detects deadlocks.

use super::{POLLS_PER_THREAD, PassStats, Scheduler};
use crate::base::error::Result;
use crate::gpu::gpus::{Gpus, Step};
use crate::gpu::thread::{Thread, Wait};

/// The number of passes without progress after which the scheduler checks for a deadlock.
const MAX_IDLE_PASSES: u32 = 3;
/// The number of polls without progress after which time may advance, if threads poll without a
/// named wait ([`waits`](crate::gpu::waits)).
const IDLE_TIMEOUT: u64 = 1 << 12;

impl Scheduler {
    /// Lets the network make 0 to 3 random steps, if the order is random.
    pub(super) fn deliver_at_random(&mut self, gpus: &Gpus) -> Result<()> {
        if self.chooser.random().is_some() && !gpus.network.is_idle() {
            for _ in 0..self.choose(4) {
                gpus.network.step(&mut |n| self.chooser.choose(n))?;
                gpus.progress();
            }
        }
        Ok(())
    }

    /// Delivers network operations, if any thread waits or none is ready.
    pub(super) fn deliver(&mut self, gpus: &Gpus) -> Result<()> {
        let waits = self.pass.waits + self.pass.spins > 0 || !self.at_network.is_empty();
        // With a list of choices, a delivery is one of the alternatives.
        let chosen = self.steps.is_some() && self.chooser.random().is_none();
        if chosen || gpus.network.is_idle() || !(waits || gpus.queue.borrow().is_empty()) {
            return Ok(());
        }
        self.deliver_some(gpus)
    }

    /// Lets the network make progress: a random step with a seed, else one in every queue.
    pub(super) fn deliver_some(&mut self, gpus: &Gpus) -> Result<()> {
        gpus.progress();
        match self.chooser.random() {
            Some(_) => gpus.network.step(&mut |n| self.chooser.choose(n)),
            None => gpus.network.deliver(),
        }
    }

    /// Lets asynchronous copies of kernels make progress, in about one of four calls. (Copies are
    /// under way only if the order is random.)
    pub(super) fn step_copies(&mut self, gpus: &Gpus) {
        if !gpus.copies.is_idle() && self.choose(4) == 0 {
            gpus.copies.step(&gpus.memory, |n| self.chooser.choose(n));
            gpus.progress();
        }
    }

    /// Returns whether the pass did more than poll. `idle` is [`Gpus::idle_polls`] before the pass.
    pub(super) fn progressed(&self, gpus: &Gpus, idle: u64) -> bool {
        let PassStats { waits, spins, other } = self.pass;
        let changed = gpus.idle_polls.get() != idle + waits + spins || !self.changed.is_empty();
        other || changed || !gpus.network.is_idle() || !gpus.copies.is_idle()
    }

    /// Checks, after a pass, whether threads only wait for each other.
    pub(super) fn detect_stuck(&mut self, gpus: &Gpus, progressed: bool) -> Step {
        if progressed {
            self.idle_passes = 0;
            return Step::Progress;
        }
        if self.pass.spins > 0 {
            self.idle_passes = 0;
            // A spinning thread may stop after some iterations: a timeout is still possible, a
            // deadlock report is not.
            let least = IDLE_TIMEOUT.max(POLLS_PER_THREAD * self.live as u64);
            let long = gpus.idle_polls.get() > least;
            return if long { Step::Spinning } else { Step::Progress };
        }
        if self.idle_passes == 0 {
            gpus.streak.set(gpus.streak.get() + 1);
        }
        self.idle_passes += 1;
        if self.idle_passes < MAX_IDLE_PASSES {
            return Step::Progress;
        }
        // A thread must have polled twice, since the first poll may have begun before the streak.
        let has_polled = |thread: &Thread| match thread.wait.get() {
            Wait::Ready | Wait::Spin { .. } => {
                let (streak, polls) = thread.state.polls.get();
                streak == gpus.streak.get() && polls >= 2
            }
            _ => true,
        };
        if self.threads().all(has_polled) { Step::Stuck } else { Step::Progress }
    }

    /// Makes threads poll again, since the host may have written what they wait for.
    pub(crate) fn recheck_waits(&mut self) {
        self.idle_passes = 0;
    }

    /// Returns the threads of the running blocks.
    pub(super) fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.blocks.iter().flatten().flat_map(|block| block.threads())
    }

    /// Returns the first deadline of a wait, and the waiting thread.
    fn first_timeout(&self) -> Option<(u64, &Thread)> {
        let deadline = |thread: &Thread| {
            let parked = matches!(thread.wait.get(), Wait::Network);
            let polls = matches!(thread.wait.get(), Wait::Spin { .. } | Wait::Ready);
            let waits =
                thread.in_named_wait.get() && (parked || polls) && !thread.state.timed_out.get();
            thread.state.named.get().filter(|_| waits).and_then(|named| named.deadline)
        };
        let timed = self.threads().filter_map(|thread| Some((deadline(thread)?, thread)));
        timed.min_by_key(|(deadline, _)| *deadline)
    }

    /// Returns the first deadline of a wait.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        self.first_timeout().map(|(deadline, _)| deadline)
    }

    /// Ends the wait with the first deadline, if that deadline has passed.
    pub(crate) fn time_out(&mut self, gpus: &Gpus) {
        let first = self.first_timeout().filter(|(deadline, _)| *deadline <= gpus.now());
        if let Some((_, thread)) = first {
            thread.state.timed_out.set(true);
            gpus.progress();
            self.idle_passes = 0;
        }
    }
}
