//! A pipeline of stages in shared memory.

use crate::mbarrier::{self, MBarrier};

/// `STAGES` stages, each with an `mbarrier` for *full* and one for *empty*. Producers wait until a
/// stage is empty and fill it; consumers wait until it is full and release it.
#[derive(Clone, Copy)]
pub struct Pipeline<const STAGES: u32> {
    barriers: *mut u64,
}

/// A position in the sequence of stages: the stage, and the parity of its current use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineState<const STAGES: u32> {
    /// The stage's index.
    pub stage: u32,
    parity: u32,
}

impl<const STAGES: u32> PipelineState<STAGES> {
    /// The first use of the first stage.
    pub const FIRST: Self = Self { stage: 0, parity: 0 };

    /// The next stage.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub fn next(self) -> Self {
        if self.stage + 1 == STAGES {
            Self { stage: 0, parity: self.parity ^ 1 }
        } else {
            Self { stage: self.stage + 1, parity: self.parity }
        }
    }
}

impl<const STAGES: u32> Pipeline<STAGES> {
    /// The number of words that the barriers take.
    pub const WORDS: usize = 2 * STAGES as usize;

    /// The pipeline whose barriers are the [`WORDS`](Self::WORDS) words at this address.
    ///
    /// # Safety
    ///
    /// The words lie in shared memory, and only pipelines at this address use them. One thread
    /// calls [`init`](Self::init) before any calls another method.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const unsafe fn at(barriers: *mut u64) -> Self {
        Self { barriers }
    }

    /// Initialises the barriers: a stage is full after `producers` arrivals and the bytes that they
    /// expect, and empty after `consumers` arrivals. A barrier of the block, or of the cluster,
    /// follows.
    ///
    /// # Safety
    ///
    /// One thread calls this, and no thread uses the pipeline yet.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn init(self, producers: u32, consumers: u32) {
        let mut state = PipelineState::FIRST;
        while state.parity == 0 {
            // SAFETY: the caller's contract.
            unsafe {
                self.full(state).init(producers);
                self.empty(state).init(consumers);
            }
            state = state.next();
        }
        mbarrier::fence_init();
    }

    /// The barrier that completes when the stage is full.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub fn full(self, state: PipelineState<STAGES>) -> MBarrier {
        // SAFETY: the contract of `at`.
        unsafe { MBarrier::at(self.barriers.wrapping_add(state.stage as usize)) }
    }

    /// The barrier that completes when the stage is empty.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub fn empty(self, state: PipelineState<STAGES>) -> MBarrier {
        // SAFETY: the contract of `at`.
        unsafe { MBarrier::at(self.barriers.wrapping_add((STAGES + state.stage) as usize)) }
    }

    /// Waits until the stage is full.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn wait_full(self, state: PipelineState<STAGES>) {
        self.full(state).wait(state.parity);
    }

    /// Waits until the stage is empty; at its first use it is.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn wait_empty(self, state: PipelineState<STAGES>) {
        self.empty(state).wait(state.parity ^ 1);
    }
}
