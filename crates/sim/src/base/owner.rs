//! The owners of memory, and what the race detector asks of the registry of memory.

use std::fmt;

/// The owner of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Window {
        id: u32,
        rank: usize,
    },
    Resources {
        id: u32,
        rank: usize,
    },
    Buffer {
        id: u32,
        rank: usize,
    },
    /// Pinned host memory.
    Pinned,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window { id, rank } => write!(f, "window id {id}, rank {rank}'s part"),
            Self::Resources { id, rank } => {
                write!(f, "barriers and buffers of device communicator {id}, rank {rank}'s part")
            }
            Self::Pinned => write!(f, "pinned memory of the host"),
            Self::Buffer { id, rank } => write!(f, "buffer {id} of rank {rank}"),
        }
    }
}

impl Owner {
    /// Returns a text of how the host freed memory of this kind.
    pub(crate) fn freed_by(self) -> &'static str {
        match self {
            Self::Window { .. } => "which its rank has deregistered (ncclCommWindowDeregister)",
            Self::Resources { .. } => "which its rank has destroyed (ncclDevCommDestroy)",
            Self::Buffer { .. } => "which was freed",
            Self::Pinned => "which was freed (cuMemFreeHost)",
        }
    }
}

/// The registry of live memory, as the race detector uses it.
pub(crate) trait Registry {
    /// Returns the canonical address of a byte: one for all addresses at which it is mapped.
    fn canonical(&self, address: usize) -> usize;

    /// Returns whether NCCL has allocated the memory, which has no content until something writes
    /// it.
    fn is_of_nccl(&self, address: usize) -> bool;

    /// Returns the owner of a byte of live memory, and the byte's offset in the owner's memory.
    fn owner_at(&self, address: usize) -> Option<(Owner, usize)>;

    /// Does the same as [`owner_at`](Self::owner_at), for each address at which the byte is mapped.
    fn owners_at(&self, address: usize) -> Vec<(Owner, usize)>;
}
