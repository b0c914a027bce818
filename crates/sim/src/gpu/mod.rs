//! The simulated GPUs: their threads, what these execute, and the scheduler that runs them.

pub(crate) mod barrier;
pub(crate) mod cluster;
pub(crate) mod copies;
pub(crate) mod dev_comm;
pub(crate) mod gpus;
pub(crate) mod hooks;
pub(crate) mod nccl;
pub(crate) mod panics;
pub(crate) mod polls;
pub(crate) mod products;
pub(crate) mod ranks;
pub(crate) mod registers;
pub(crate) mod scheduler;
pub(crate) mod shared;
pub(crate) mod stack;
pub(crate) mod thread;
pub(crate) mod trap;
pub(crate) mod waits;
pub(crate) mod warp;
