//! The waits of all threads at a deadlock or a limit.

use std::fmt;

use devcomm_types::{WaitFor, WaitKind};

use crate::base::ids::Site;

/// The condition that a thread waits for.
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
        /// The name of the barrier's memory.
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
        /// The number of registers that each thread of the warpgroup is to have.
        count: u32,
        /// The number of further registers that the warpgroup needs.
        more: u32,
        /// The number of registers that the block has left.
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
    /// The condition of a wait in `nccl_device`, or of an NCCL call that waits for the network.
    For(WaitFor),
    /// Messages of a Lamport session or of an LL all-to-all.
    Messages {
        /// The wait for the first of them.
        first: WaitFor,
        /// The slots or elements.
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
    /// A [`Spin`](Self::Spin) by plain loads.
    PlainSpin,
    /// No wait: the thread is ready to run.
    Nothing,
    /// No wait: the thread runs without calls into the simulator.
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
    /// Returns whether this is a poll of memory, which reports name.
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
    /// The numbers in the block.
    pub ids: Vec<u32>,
    /// The condition that the threads wait for.
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

/// The waits of all threads at a deadlock, or when a kernel reaches a limit.
#[derive(Clone, Debug)]
pub struct Stall {
    /// The waits of host threads and streams, one per line; empty where only kernels are involved.
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
    /// Returns the number of threads that have not ended.
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
