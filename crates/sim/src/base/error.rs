//! The errors of a simulated machine.

mod race;
mod stall;

use std::fmt;
use std::time::Duration;

pub use self::race::{Race, RaceAccess};
pub(crate) use self::stall::thread_ids;
pub use self::stall::{Returned, Stall, Waiter, Waiting};
pub use crate::base::ids::{Site, ThreadId};

/// A `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid settings of the machine.
    #[error("simulator: {0}")]
    Settings(String),
    /// The host has not enough memory or address space.
    #[error("cannot map {bytes} bytes for each of {ranks} ranks: {source}")]
    Memory {
        /// Bytes per rank.
        bytes: usize,
        /// The number of ranks.
        ranks: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The stacks of the simulated threads cannot be mapped.
    #[error(
        "cannot map {threads} stacks of {bytes} bytes: {source}; launch fewer blocks, or set a \
        smaller Simulation::stack_size"
    )]
    Stacks {
        /// The number of simulated threads that exist at the same time.
        threads: usize,
        /// Bytes per thread.
        bytes: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// An invalid launch, which a GPU or the simulator refuses.
    #[error("{kernel} cannot be launched: {reason}")]
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// The reason, and what to do.
        reason: String,
    },
    /// Two accesses to the same memory that nothing orders, one of them a write.
    #[error("{_0}")]
    Race(Box<Race>),
    /// An operation that is not a kernel reads memory that nothing has written.
    #[error("{access}: {memory}, which nothing has written")]
    Unwritten {
        /// The operation.
        access: Box<RaceAccess>,
        /// The first byte that nothing has written.
        memory: String,
    },
    /// Deadlock: every thread waits, and nothing can wake one.
    #[error("deadlock{_0}")]
    Deadlock(Box<Stall>),
    /// Livelock: every thread polls or waits, and none stores.
    #[error(
        "livelock in {}: {} threads poll or wait, and none stores{_0}",
        _0.kernel,
        _0.threads()
    )]
    Livelock(Box<Stall>),
    /// The step or time limit was reached.
    #[error("{} did not end within {limit}{stall}", stall.kernel)]
    Limit {
        /// The limit.
        limit: Limit,
        /// The waits of all threads.
        stall: Box<Stall>,
    },
    /// Threads that must reach the same synchronisation reached different ones.
    #[error("{kernel}: {thread} is at {what} {at}, others of its block are at {other}")]
    Divergent {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread that arrived second.
        thread: ThreadId,
        /// The operation.
        what: String,
        /// Where the thread is.
        at: Site,
        /// Where the first thread is.
        other: Site,
    },
    /// An access outside the memory that the kernel may use.
    #[error("{kernel}: {thread} {access} {bytes} bytes at {address:#x}, {where_to} ({at})")]
    OutOfBounds {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// `loads`, `stores` or `updates`.
        access: &'static str,
        /// Length of the access.
        bytes: usize,
        /// The address.
        address: usize,
        /// The address relative to the nearest live memory.
        where_to: String,
        /// Where in the kernel.
        at: Site,
    },
    /// A fault of a plain dereference, which the simulator does not check.
    #[error("{kernel}: {thread} accessed {where_to}, by a plain dereference")]
    Fault {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The address, if the processor reports one.
        address: Option<usize>,
        /// The address, also relative to the nearest live memory.
        where_to: String,
    },
    /// A write beyond the end of a shared array.
    #[error("{kernel}: rank {rank} block {block} wrote beyond the end of {what}")]
    SharedOverrun {
        /// Name of the kernel.
        kernel: &'static str,
        /// Rank in the world.
        rank: usize,
        /// The block's number in its grid, x first.
        block: u32,
        /// The array, with its line and length.
        what: String,
        /// The array's length.
        bytes: usize,
    },
    /// A kernel panicked.
    #[error("{kernel}: {thread} panicked at {at}: {message}")]
    Panic {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The location of the panic, as `file:line:column`.
        at: String,
        /// The panic's message.
        message: String,
    },
    /// A call that violates the called function's contract.
    #[error("{kernel}: {thread} at {at}: {what}")]
    Misuse {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// A description of the fault.
        what: String,
        /// Where in the kernel.
        at: Site,
    },
    /// An operation of a stream uses memory that it may not use, or that is no longer there.
    #[error("{operation}: {what}")]
    Operation {
        /// The operation.
        operation: String,
        /// The driver's error.
        what: String,
    },
    /// The host freed memory or destroyed a handle that a running kernel was given.
    #[error(
        "{call}: {what}, which was passed to {kernel}, and that kernel has not ended on rank \
        {rank}: synchronize its stream first"
    )]
    Closed {
        /// The host's call.
        call: &'static str,
        /// The memory or handle.
        what: String,
        /// Name of the kernel.
        kernel: &'static str,
        /// The rank on which it runs.
        rank: usize,
    },
    /// A block needs more static shared memory than the limit.
    #[error(
        "{kernel}: {thread} needs a shared array of {bytes} bytes, but a block has at most {limit} \
        bytes of static shared memory"
    )]
    SharedMemory {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// Length of the array that does not fit.
        bytes: usize,
        /// The limit of a block, in bytes.
        limit: usize,
    },
    /// A thread overflowed its stack.
    #[error(
        "{kernel}: {thread} used more than its {stack} bytes of stack; raise \
        Simulation::stack_size, or use less"
    )]
    StackOverflow {
        /// Name of the kernel.
        kernel: &'static str,
        /// The thread.
        thread: ThreadId,
        /// The size of a stack in bytes.
        stack: usize,
    },
}

/// The limit that a kernel reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// Switches between threads.
    Steps(u64),
    /// Processor time.
    Time(Duration),
    /// Processor time without a call into the simulator.
    Calls(Duration),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "its limit of {steps} steps"),
            Self::Time(time) => write!(f, "its limit of {time:?}"),
            Self::Calls(time) => write!(f, "{time:?} without a call into cuda_std or nccl_device"),
        }
    }
}
