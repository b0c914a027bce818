//! Ends kernels that have failed, that reach a limit, or that are livelocked.

use std::time::Duration;

use super::{POLLS_PER_THREAD, Scheduler};
use crate::base::error::{Error, Limit, Result};
use crate::gpu::gpus::Gpus;
use crate::gpu::trap::{PATIENCE, Watchdog, processor_time};

/// The number of steps between checks of the time limit.
const STEPS_PER_CHECK: u64 = 1 << 14;
/// The number of accesses that count as one step there.
const ACCESSES_PER_STEP: u64 = 16;

/// The number of polls without progress after which threads that all poll or wait are livelocked.
/// Without `Simulation::watch`, the limit is higher, since stores are not seen.
const MAX_IDLE: u64 = 1 << 20;
const MAX_IDLE_UNWATCHED: u64 = 1 << 26;

/// A period in which at least one GPU is busy; the step and time limits apply to each period.
pub(super) struct BusyPeriod {
    /// Switches and processor time at the start.
    switches: u64,
    started: Duration,
    /// The passes so far: also those in which no thread is ready take time.
    passes: u64,
    /// The work, in steps and passes, after which the time limit is checked next.
    next_check: u64,
    _watchdog: Watchdog,
}

impl Scheduler {
    /// Counts a pass in which GPUs are busy.
    pub(super) fn begin_pass(&mut self, gpus: &Gpus) {
        let time_limit = self.settings.time_limit;
        let busy = self.busy.get_or_insert_with(|| BusyPeriod {
            switches: gpus.switches.get(),
            started: processor_time(),
            passes: 0,
            next_check: 0,
            _watchdog: Watchdog::new(time_limit),
        });
        busy.passes += 1;
    }

    /// Fails if the kernels are livelocked or have reached a limit.
    pub(super) fn check_limits(&mut self, gpus: &Gpus) -> Result<()> {
        let allowed = if self.settings.watch { MAX_IDLE } else { MAX_IDLE_UNWATCHED };
        // Time may advance, for waits with a timeout, after half of these polls.
        let least = 2 * POLLS_PER_THREAD * self.live as u64;
        let is_long = gpus.idle_polls.get() > allowed.max(least);
        if is_long && !gpus.host.is_away.get() {
            return Err(Error::Livelock(self.stall()));
        }
        let Some(busy) = &mut self.busy else { return Ok(()) };
        let steps = gpus.switches.get() - busy.switches;
        if let Some(limit) = self.settings.step_limit.filter(|limit| steps >= *limit) {
            return Err(Error::Limit { limit: Limit::Steps(limit), stall: self.stall() });
        }
        let work = gpus.switches.get() + gpus.accesses.get() / ACCESSES_PER_STEP + busy.passes;
        if work < busy.next_check {
            return Ok(());
        }
        busy.next_check = work + STEPS_PER_CHECK;
        let took = processor_time().saturating_sub(busy.started);
        match self.settings.time_limit.filter(|limit| took >= *limit) {
            Some(limit) => Err(Error::Limit { limit: Limit::Time(limit), stall: self.stall() }),
            None => Ok(()),
        }
    }

    /// Returns the error that a thread has recorded, if any.
    #[inline]
    pub(super) fn check_failure(&self, gpus: &Gpus) -> Result<()> {
        if gpus.interrupted.get() {
            // Without a limit there is no watchdog.
            let limit = self.settings.time_limit.unwrap_or_default();
            let limit = if limit < PATIENCE { Limit::Time(limit) } else { Limit::Calls(PATIENCE) };
            return Err(Error::Limit { limit, stall: self.stall() });
        }
        match gpus.failed() {
            true => gpus.failure.take().map_or(Ok(()), Err),
            false => Ok(()),
        }
    }
}
