//! Unfair schedules: some threads run only when nothing else can.

use fastrand::Rng;

use super::{Scheduler, ThreadAt};
use crate::base::schedule::{Lag, Schedule};
use crate::base::simulation::Simulation;
use crate::gpu::gpus::Gpus;
use crate::gpu::thread::Block;
use crate::gpu::warp::WARP;

/// The number of passes without progress after which only the late threads can make progress: in
/// two passes, each thread that polls has read what it polls.
const STUCK_PASSES: u32 = 2;

/// The state of an unfair schedule.
pub(super) struct Lagging {
    what: Lag,
    /// The late rank, and numbers whose remainders are the late block of each grid and the late
    /// thread of each block, since grids and blocks have different sizes.
    gpu: usize,
    block: u32,
    thread: u32,
    /// Late threads that are ready.
    waiting: Vec<ThreadAt>,
    /// The number of consecutive passes without progress.
    idle_passes: u32,
    /// Whether late threads may run in this pass.
    pub(super) late_may_run: bool,
}

impl Lagging {
    /// Returns the state for these settings, if their schedule is unfair.
    pub(super) fn new(settings: &Simulation) -> Option<Box<Self>> {
        let Schedule::Lag(what) = settings.schedule else { return None };
        let mut rng = Rng::with_seed(settings.random_seed().unwrap_or(0));
        let (gpu, block, thread) = (rng.usize(..settings.gpus.max(1)), rng.u32(..), rng.u32(..));
        let (waiting, idle_passes, late_may_run) = (Vec::new(), 0, false);
        Some(Box::new(Self { what, gpu, block, thread, waiting, idle_passes, late_may_run }))
    }

    /// Returns the late rank, if a whole rank is late.
    pub(super) fn rank(&self) -> Option<usize> {
        matches!(self.what, Lag::Rank).then_some(self.gpu)
    }

    /// Returns whether only late threads can make progress.
    pub(super) fn is_stuck(&self) -> bool {
        self.idle_passes >= STUCK_PASSES
    }

    /// Returns whether a thread of a block is late.
    fn is_late(&self, block: &Block, tid: u32) -> bool {
        if block.gpu != self.gpu {
            return false;
        }
        let is_block = block.index == self.block % block.grid.blocks;
        let late = self.thread % block.size;
        match self.what {
            Lag::Rank => true,
            Lag::Block => is_block,
            Lag::Warp => is_block && tid / WARP == late / WARP,
            Lag::Thread => is_block && tid == late,
        }
    }

    /// Removes the late threads of a round.
    pub(super) fn hold_back(&mut self, block: &Block, round: &mut Vec<u32>) {
        if self.late_may_run {
            return;
        }
        round.retain(|tid| {
            let late = self.is_late(block, *tid);
            if late {
                self.waiting.push(ThreadAt { slot: block.slot, tid: *tid });
            }
            !late
        });
    }
}

impl Scheduler {
    /// Lets the late threads run before a pass, if nothing else can make progress.
    pub(super) fn release_late(&mut self, gpus: &Gpus) {
        let Some(lagging) = &mut self.lagging else { return };
        lagging.late_may_run = lagging.is_stuck() && gpus.host.waits.get();
        if lagging.late_may_run {
            for at in lagging.waiting.drain(..) {
                if let Some(block) = &self.blocks[at.slot as usize] {
                    block.thread(at.tid).enqueue();
                }
            }
        }
    }

    /// Records, after a pass, whether there was progress; returns whether late threads wait.
    pub(super) fn count_pass(&mut self, progressed: bool) -> bool {
        self.lagging.as_mut().is_some_and(|lagging| {
            lagging.idle_passes = if progressed { 0 } else { lagging.idle_passes + 1 };
            !lagging.waiting.is_empty()
        })
    }
}
