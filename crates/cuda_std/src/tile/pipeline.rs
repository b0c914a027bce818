//! A pipeline of stages in shared memory.

use crate::mbarrier::{self, MBarrier};
use crate::track_callers;

/// Stages, each with an `mbarrier` for *full* and one for *empty*. Producers wait until a stage is
/// empty and fill it; consumers wait until it is full and release it.
///
/// The number of stages is usually a constant, which the compiler then folds.
#[derive(Clone, Copy)]
pub struct Pipeline {
    barriers: MBarrier,
    stages: u32,
}

/// A position in the sequence of stages: the stage, and the parity of its current use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineState {
    /// The stage's index.
    pub stage: u32,
    parity: u32,
}

impl PipelineState {
    /// The first use of the first stage.
    pub const FIRST: Self = Self { stage: 0, parity: 0 };

    /// Returns the position after this one, in a pipeline of `stages` stages.
    #[must_use]
    pub fn next(self, stages: u32) -> Self {
        if self.stage + 1 == stages {
            Self { stage: 0, parity: self.parity ^ 1 }
        } else {
            Self { stage: self.stage + 1, parity: self.parity }
        }
    }
}

#[track_callers]
impl Pipeline {
    /// Returns the number of words that the barriers of `stages` stages take.
    pub const fn words(stages: u32) -> usize {
        2 * stages as usize
    }

    /// Returns the pipeline whose barriers are the [`words`](Self::words) at this address.
    ///
    /// # Safety
    ///
    /// The words lie in shared memory, and only pipelines at this address use them. One thread
    /// calls [`init`](Self::init) before any calls another method.
    pub unsafe fn at(barriers: *mut u64, stages: u32) -> Self {
        // SAFETY: the caller passes aligned words in shared memory that only this pipeline uses.
        Self { barriers: unsafe { MBarrier::at(barriers) }, stages }
    }

    /// Initialises the barriers: a stage is full after `producers` arrivals and the bytes that they
    /// expect, and empty after `consumers` arrivals. A barrier of the block, or of the cluster,
    /// follows.
    ///
    /// # Safety
    ///
    /// One thread calls this, and no thread uses the pipeline yet.
    pub unsafe fn init(self, producers: u32, consumers: u32) {
        let mut state = PipelineState::FIRST;
        // Each stage once: the parity changes after the last one.
        while state.parity == 0 {
            // SAFETY: one thread of the caller's block calls this, before any other uses the words.
            unsafe {
                self.full(state).init(producers);
                self.empty(state).init(consumers);
            }
            state = self.next(state);
        }
        mbarrier::fence_init();
    }

    /// Returns the position after `state`.
    #[must_use]
    pub fn next(self, state: PipelineState) -> PipelineState {
        state.next(self.stages)
    }

    /// Returns the barrier that completes when the stage is full.
    #[must_use]
    pub fn full(self, state: PipelineState) -> MBarrier {
        self.barriers.after(state.stage)
    }

    /// Returns the barrier that completes when the stage is empty.
    #[must_use]
    pub fn empty(self, state: PipelineState) -> MBarrier {
        self.barriers.after(self.stages + state.stage)
    }

    /// Waits until the stage is full.
    pub fn wait_full(self, state: PipelineState) {
        self.full(state).wait(state.parity);
    }

    /// Waits until the stage is empty; at its first use it is.
    pub fn wait_empty(self, state: PipelineState) {
        self.empty(state).wait(state.parity ^ 1);
    }
}
