//! What identifies a place in a kernel, a thread, a grid and a client.

use std::fmt;
use std::panic::Location;

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

/// Identifies a launched grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GridId(pub(crate) u64);

/// A client's number, in order of registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientId(pub(crate) u32);
