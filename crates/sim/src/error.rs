//! The errors of a simulated machine, and what every thread waits for at a deadlock.

use std::fmt;
use std::panic::Location;
use std::time::Duration;

use devcomm_types::{WaitFor, WaitKind};

pub use crate::race::{Race, RaceAccess};

/// A `Result` with this crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A location in a kernel's source.
pub type Site = &'static Location<'static>;

/// Identifies a simulated thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadId {
    /// Rank in the world, which is also the GPU's number.
    pub rank: usize,
    /// The block's number in its grid, x first.
    pub block: u32,
    /// The thread's number in its block, x first.
    pub thread: u32,
}

impl fmt::Display for ThreadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} block {} thread {}", self.rank, self.block, self.thread)
    }
}

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waiting {
    /// A barrier of the block: 0 is `sync_threads`.
    Block {
        /// Number of the barrier.
        barrier: u32,
    },
    /// The barrier of the cluster.
    Cluster,
    /// The end of a phase of an `mbarrier`.
    Phase {
        /// Where the barrier is.
        memory: String,
        /// The parity of the phase.
        parity: u32,
        /// Arrivals that it lacks.
        arrivals: u32,
        /// Bytes of copies that it lacks; negative if more have arrived than are expected so far.
        bytes: i32,
    },
    /// Registers, which other threads of the block have to give back.
    Registers {
        /// How many each thread of the warpgroup is to have.
        count: u32,
        /// How many more the warpgroup needs.
        more: u32,
        /// How many the block has left.
        spare: u32,
    },
    /// The end of the previous kernel of the stream.
    Previous,
    /// The other lanes of `mask`, in a shuffle, a vote or `sync_warp`.
    Warp {
        /// Lanes that take part.
        mask: u32,
    },
    /// The other threads of the same coop (NCCL's thread group), in a cooperative call.
    Coop {
        /// The call and its arguments.
        call: String,
    },
    /// What a wait in `nccl_device`, or an NCCL call that waits for the network, declares.
    For(WaitFor),
    /// Messages of a Lamport session or of an LL all-to-all.
    Messages {
        /// The wait for the first of them.
        first: WaitFor,
        /// Their slots or elements.
        indices: Vec<u32>,
    },
    /// Peers, in an LSA barrier.
    Peers {
        /// Index of the barrier.
        index: u32,
        /// The ranks of the barrier's team that have not arrived, as world ranks.
        missing: Vec<usize>,
    },
    /// A store by another thread: the thread polls memory.
    Spin,
    /// As [`Spin`](Self::Spin), by plain loads.
    PlainSpin,
    /// Nothing: the thread is ready to run.
    Nothing,
    /// Nothing: the thread runs without calls into the simulator.
    Computing,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block { barrier: 0 } => write!(f, "sync_threads"),
            Self::Block { barrier } => write!(f, "barrier {barrier} of the block"),
            Self::Cluster => write!(f, "cluster::sync"),
            Self::Phase { memory, parity, arrivals, bytes } => write!(
                f,
                "the phase of parity {parity} of the mbarrier at {memory}, which lacks {arrivals} \
                 arrivals and {bytes} bytes"
            ),
            Self::Registers { count, more, spare } => write!(
                f,
                "{count} registers for each thread of its warpgroup: {more} more, of which the \
                 block has {spare} left"
            ),
            Self::Previous => write!(f, "grid::wait_for_previous"),
            Self::Warp { mask } => write!(f, "the lanes {mask:#010x} of the warp"),
            Self::Coop { call } => write!(f, "the rest of its coop in {call}"),
            Self::For(what) => what.fmt(f),
            Self::Messages { first, indices } => match (&indices[..], first.kind) {
                ([] | [_], _) => first.fmt(f),
                (_, WaitKind::Lamport) => write!(f, "slots {} of a Lamport session", runs(indices)),
                (..) => write!(f, "elements {} of an LL all-to-all", runs(indices)),
            },
            Self::Peers { index, missing } => {
                write!(f, "LSA barrier {index}")?;
                for (i, rank) in missing.iter().enumerate() {
                    let before = match (i, missing.len()) {
                        (0, 1) => ", where rank",
                        (0, _) => ", where ranks",
                        _ => ",",
                    };
                    write!(f, "{before} {rank}")?;
                }
                match missing.len() {
                    0 => write!(f, ", where all have arrived"),
                    1 => write!(f, " has not arrived"),
                    _ => write!(f, " have not arrived"),
                }
            }
            Self::Spin => write!(f, "a value that it polls"),
            Self::PlainSpin => write!(
                f,
                "a value that it polls by plain loads, of which a compiler may make one: poll by \
                 ordered loads"
            ),
            Self::Nothing => write!(f, "its turn"),
            Self::Computing => {
                write!(f, "nothing: it loops without a call into cuda_std or nccl_device")
            }
        }
    }
}

impl Waiting {
    /// Whether it is a poll of memory that a report names.
    pub(crate) fn is_poll(&self) -> bool {
        use WaitKind::{Flag, GridBarrier, Lamport, LlA2a, Poll};
        match self {
            Self::Spin | Self::PlainSpin | Self::Messages { .. } => true,
            Self::For(what) => matches!(what.kind, Poll | Flag | GridBarrier | Lamport | LlA2a),
            _ => false,
        }
    }
}

/// Threads of one block that wait for the same thing.
#[derive(Clone, Debug)]
pub struct Waiter {
    /// Name of their kernel.
    pub kernel: &'static str,
    /// Rank in the world.
    pub rank: usize,
    /// Rank in the kernel's communicator, if it differs from `rank`.
    pub comm_rank: Option<usize>,
    /// The block's number in its grid, x first.
    pub block: u32,
    /// The number of threads.
    pub threads: u32,
    /// Their numbers in the block.
    pub ids: Vec<u32>,
    /// What they wait for.
    pub what: Waiting,
    /// The memory that the first of them polls, and its value.
    pub polled: Option<String>,
    /// Where they wait in the kernel's source.
    pub at: Option<Site>,
}

/// Threads of a running block that have left the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returned {
    /// Rank in the world.
    pub rank: usize,
    /// The block's number in its grid, x first.
    pub block: u32,
    /// The threads' numbers in the block.
    pub ids: Vec<u32>,
}

/// Writes numbers as `0 to 62, 64`.
fn runs(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first} to {last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// Writes numbers as `threads 0 to 62, 64`.
pub(crate) fn thread_ids(ids: &[u32]) -> String {
    let text = runs(ids);
    if ids.len() == 1 { format!("thread {text}") } else { format!("threads {text}") }
}

/// What every thread waits for, at a deadlock or when a kernel reaches a limit.
#[derive(Clone, Debug)]
pub struct Stall {
    /// What host threads and streams wait for, one per line; empty where only kernels are involved.
    pub host: Vec<String>,
    /// Name of the kernel, or of all running kernels.
    pub kernel: String,
    /// Waiting threads, by rank, block and what they wait for.
    pub waiters: Vec<Waiter>,
    /// Threads of these blocks that have left the kernel.
    pub returned: Vec<Returned>,
    /// Blocks that have ended, for each rank.
    pub ended: Vec<u32>,
    /// Blocks of the grid that have not started, for each rank.
    pub pending: Vec<u32>,
}

impl Stall {
    /// Number of threads that have not ended.
    pub fn threads(&self) -> u32 {
        self.waiters.iter().map(|w| w.threads).sum()
    }
}

/// Maximum number of waiters that a report lists; it only counts the others.
const MAX_LINES: usize = 40;

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.host.iter().try_for_each(|line| write!(f, "\n  {line}"))?;
        for w in self.waiters.iter().take(MAX_LINES) {
            let threads = if w.threads == 1 { "1 thread waits" } else { "threads wait" };
            write!(f, "\n  rank {}", w.rank)?;
            if let Some(rank) = w.comm_rank {
                write!(f, " (rank {rank} of its communicator)")?;
            }
            write!(f, " block {}", w.block)?;
            if w.kernel != self.kernel {
                write!(f, " of {}", w.kernel)?;
            }
            write!(f, ": ")?;
            if w.threads != 1 {
                write!(f, "{} ", w.threads)?;
            }
            write!(f, "{threads} for {}", w.what)?;
            if let Some(polled) = &w.polled {
                write!(f, " ({polled})")?;
            }
            if let Some(at) = w.at {
                write!(f, ", at {at}")?;
            }
            write!(f, " ({})", thread_ids(&w.ids))?;
        }
        for Returned { rank, block, ids } in self.returned.iter().take(MAX_LINES) {
            let have = if ids.len() == 1 { "has" } else { "have" };
            write!(f, "\n  rank {rank} block {block}: {} {have} left the kernel", thread_ids(ids))?;
        }
        if let Some(more) = self.waiters.len().checked_sub(MAX_LINES).filter(|more| *more > 0) {
            write!(f, "\n  and {more} more groups of threads")?;
        }
        for (rank, ended) in self.ended.iter().enumerate().filter(|(_, ended)| **ended > 0) {
            let have = if *ended == 1 { "block has" } else { "blocks have" };
            write!(f, "\n  rank {rank}: {ended} {have} ended")?;
        }
        for (rank, pending) in self.pending.iter().enumerate().filter(|(_, n)| **n > 0) {
            let wait = if *pending == 1 { "block waits" } else { "blocks wait" };
            write!(f, "\n  rank {rank}: {pending} {wait} for free resources on the GPU")?;
        }
        Ok(())
    }
}

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
        /// Simulated threads that exist at the same time.
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
        /// Why, and what to do.
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
        /// What every thread waited for.
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
        /// `loads` or `stores`.
        access: &'static str,
        /// Length of the access.
        bytes: usize,
        /// Its address.
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
        /// Where, as `file:line:column`.
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
        /// What is wrong.
        what: String,
        /// Where in the kernel.
        at: Site,
    },
    /// The host ended memory that a kernel still has.
    #[error(
        "{call}: {what}, which was passed to {kernel}, and that kernel has not ended on rank \
        {rank}: synchronize its stream first"
    )]
    Closed {
        /// The host's call.
        call: &'static str,
        /// The memory.
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
        /// Bytes of a stack.
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
