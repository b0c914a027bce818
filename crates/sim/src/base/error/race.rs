//! The report of a race.

use std::fmt;

use cuda_std::arch::Scope;

use crate::base::ids::{Site, ThreadId};

/// One of the accesses of a race.
#[derive(Clone, Debug)]
pub struct RaceAccess {
    /// The kernel or other operation.
    pub operation: String,
    /// The GPU's rank in the world.
    pub rank: usize,
    /// The thread; `None` for an operation that is not a kernel.
    pub thread: Option<ThreadId>,
    /// The kind of access, such as "stores" or "loads by a bulk copy".
    pub what: String,
    /// The scope of an atomic or ordered access.
    pub scope: Option<Scope>,
    /// The location in the kernel's source.
    pub at: Option<Site>,
}

impl fmt::Display for RaceAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, rank, thread, what, at, .. } = self;
        match thread {
            Some(thread) => write!(f, "{thread} of {operation} {what}")?,
            None => write!(f, "{operation} of rank {rank} {what}")?,
        }
        match at {
            Some(at) => write!(f, " ({at})"),
            None => Ok(()),
        }
    }
}

/// Two accesses to the same memory that nothing orders.
#[derive(Clone, Debug)]
pub struct Race {
    /// The access that found the race.
    pub access: RaceAccess,
    /// The access that was made earlier.
    pub other: RaceAccess,
    /// The memory, such as "element 2 of `out` (window id 3, rank 0's part)".
    pub memory: String,
    /// What the program needs to order them.
    pub remedy: String,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { access, other, memory, remedy } = self;
        write!(f, "a race on {memory}: {access}, and {other}; {remedy}")
    }
}
