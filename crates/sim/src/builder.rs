//! Settings of a simulator.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::gpus::Settings;
use crate::memory::page_size;
use crate::world::Simulator;

/// Ranks that a simulator can have.
const MAX_RANKS: usize = 1 << 15;

/// Settings of a [`Simulator`].
#[derive(Clone, Copy, Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    gpus: Settings,
    lsa_ranks: Option<usize>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            gpus: Settings {
                gpus: 1,
                multiprocessors: 132,
                seed: None,
                preempt: false,
                watch: true,
                stack_size: 64 << 10,
                step_limit: None,
                time_limit: Some(Duration::from_secs(600)),
            },
            lsa_ranks: None,
        }
    }
}

impl Builder {
    /// How many GPUs: one a rank. Default 1.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.gpus.gpus = ranks;
        self
    }

    /// How many neighbouring ranks reach each other by load and store; it divides the ranks. Default: all.
    pub fn lsa_ranks(mut self, ranks: usize) -> Self {
        self.lsa_ranks = Some(ranks);
        self
    }

    /// Runs threads and blocks in a random order that is a function of `seed`, and lets the network deliver at random moments.
    /// Every launch starts from the seed. Default: in the order of ranks, blocks and threads.
    pub fn seed(mut self, seed: u64) -> Self {
        self.gpus.seed = Some(seed);
        self
    }

    /// Whether other threads may run between any two accesses that go through cuda_std, not only where threads synchronise.
    /// It is several times slower, and finds more. Implies [`watch`](Self::watch). Default: no.
    pub fn preempt(mut self, preempt: bool) -> Self {
        self.gpus.preempt = preempt;
        self
    }

    /// Whether each access that goes through cuda_std is checked to lie in a window, a buffer, shared memory or the stack.
    /// Without it, a wild access is a fault or goes unseen, and livelocks are found later. Default: yes.
    pub fn watch(mut self, watch: bool) -> Self {
        self.gpus.watch = watch;
        self
    }

    /// Stack of a simulated thread in bytes. Memory is taken as it is used. Default: 64 KiB.
    pub fn stack_size(mut self, bytes: usize) -> Self {
        self.gpus.stack_size = bytes;
        self
    }

    /// Ends a launch with [`Error::Limit`] after so many switches between threads. Default: never.
    pub fn step_limit(mut self, steps: u64) -> Self {
        self.gpus.step_limit = Some(steps);
        self
    }

    /// Ends a launch with [`Error::Limit`] after so much processor time, also a kernel that loops
    /// without any call into cuda_std or nccl_device (where signals can stop it: on Linux on x86-64
    /// and aarch64). Default: ten minutes.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.gpus.time_limit = Some(limit);
        self
    }

    /// Multiprocessors of a simulated GPU; each holds 2048 threads, and at most 32 blocks. Default: 132, an H200's.
    pub fn multiprocessors(mut self, multiprocessors: u32) -> Self {
        self.gpus.multiprocessors = multiprocessors;
        self
    }

    /// The simulator.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] where they make no sense.
    pub fn build(self) -> Result<Simulator> {
        let refuse = |reason: String| Err(Error::Settings(reason));
        let Settings { gpus: ranks, stack_size: stack, multiprocessors, .. } = self.gpus;
        let lsa_ranks = self.lsa_ranks.unwrap_or(ranks);
        if ranks == 0 || ranks > MAX_RANKS {
            return refuse(format!("{ranks} ranks, where 1 to {MAX_RANKS} are possible"));
        }
        if lsa_ranks == 0 || !ranks.is_multiple_of(lsa_ranks) {
            return refuse(format!("{ranks} ranks do not divide into LSA teams of {lsa_ranks}"));
        }
        let least = min_stack();
        if stack < least || stack > MAX_STACK {
            return refuse(format!("stacks of {stack} bytes, of {least} to {MAX_STACK}"));
        }
        if multiprocessors == 0 {
            return refuse("a GPU without multiprocessors".to_owned());
        }
        let watch = self.gpus.watch || self.gpus.preempt;
        Ok(Simulator::with(Settings { watch, ..self.gpus }, lsa_ranks))
    }
}

/// The largest stack that a simulated thread can have.
const MAX_STACK: usize = 1 << 30;

/// The smallest stack that a simulated thread can have.
fn min_stack() -> usize {
    4 * page_size()
}
