//! Waits of kernels, and their aborts by the host.
//!
//! The host keeps an [`AbortBlock`] in memory that the GPU can access, and the device communicator
//! points at it: its first word is the abort flag that NCCL's own waits read. A wait of
//! `nccl_device` that finds the flag set writes what it waited for into the block, and its thread
//! exits the kernel.

use core::fmt;

/// The kind of object that a wait is for.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WaitKind {
    /// The arrival of a peer at an LSA barrier.
    LsaBarrier = 1,
    /// The arrival of a peer at a GIN barrier.
    GinBarrier = 2,
    /// A value of an indexed signal.
    Signal = 3,
    /// A value of a signal at an address in a window.
    VaSignal = 4,
    /// A value of a counter.
    Counter = 5,
    /// The completion of all operations of a GIN context.
    Flush = 6,
    /// The completion of a GIN context's operations to one peer.
    Request = 7,
    /// An element of an LL all-to-all.
    LlA2a = 8,
    /// A condition that the kernel defines.
    Poll = 9,
    /// A value of a flag: a word of a window that a peer sets.
    Flag = 10,
    /// The other blocks of the grid.
    GridBarrier = 11,
    /// A slot of a Lamport session: a message that is its own flag.
    Lamport = 12,
}

impl WaitKind {
    /// Returns the kind whose number is `raw`; `None` where no kind has that number.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Option<Self> {
        Some(match raw {
            1 => Self::LsaBarrier,
            2 => Self::GinBarrier,
            3 => Self::Signal,
            4 => Self::VaSignal,
            5 => Self::Counter,
            6 => Self::Flush,
            7 => Self::Request,
            8 => Self::LlA2a,
            9 => Self::Poll,
            10 => Self::Flag,
            11 => Self::GridBarrier,
            12 => Self::Lamport,
            _ => return None,
        })
    }
}

/// The object that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFor {
    /// The kind of object.
    pub kind: WaitKind,
    /// Which one: the index of the barrier, of the element, or of the flag in its window; the id of
    /// the signal or counter; the byte offset of a signal in a window, divided by the 8 bytes of a
    /// signal.
    pub index: u32,
    /// The GIN context, for kinds that have one.
    pub context: u32,
    /// World rank of the peer that is waited for, or -1 where that is not known.
    pub peer: i32,
    /// The value that would end the wait.
    pub wanted: u64,
    /// The value seen last.
    pub seen: u64,
}

impl WaitFor {
    /// Returns a wait for anything of a kind.
    #[must_use]
    pub const fn of(kind: WaitKind) -> Self {
        Self { kind, index: 0, context: 0, peer: -1, wanted: 0, seen: 0 }
    }
}

impl fmt::Display for WaitFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, index, context, peer, wanted, seen } = *self;
        match kind {
            WaitKind::LsaBarrier => write!(f, "LSA barrier {index}")?,
            WaitKind::GinBarrier => write!(f, "GIN barrier {index} on context {context}")?,
            WaitKind::Signal => write!(f, "signal {index} of context {context}")?,
            WaitKind::VaSignal => {
                write!(f, "the signal at byte {} of a window", u64::from(index) * 8)?;
            }
            WaitKind::Counter => write!(f, "counter {index} of context {context}")?,
            WaitKind::Flush => write!(f, "a flush of context {context}")?,
            WaitKind::Request => write!(f, "a flush of context {context} to one peer")?,
            WaitKind::LlA2a => write!(f, "element {index} of an LL all-to-all")?,
            WaitKind::Poll => write!(f, "a value that it polls")?,
            WaitKind::Flag if peer >= 0 => write!(f, "flag {index} of rank {peer}")?,
            WaitKind::Flag => write!(f, "flag {index}")?,
            WaitKind::GridBarrier => write!(f, "the other blocks of the grid")?,
            WaitKind::Lamport => write!(f, "slot {index} of a Lamport session")?,
        }
        match kind {
            WaitKind::LsaBarrier | WaitKind::GinBarrier if peer >= 0 => {
                write!(f, ", where rank {peer} has not arrived")
            }
            WaitKind::Signal | WaitKind::VaSignal | WaitKind::Counter | WaitKind::Flag => {
                write!(f, ", which is {seen} and not yet {wanted}")
            }
            _ if peer >= 0 => write!(f, ", of rank {peer}"),
            _ => Ok(()),
        }
    }
}

/// The number of records in an [`AbortBlock`]. Warp `w` of a grid uses record
/// `w % STUCK_RECORDS`.
pub const STUCK_RECORDS: usize = 4096;

/// A wait that an abort ended, as the waiting warp recorded it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct StuckRecord {
    /// [`WaitKind`]'s number; 0 while there is no record. Written last.
    pub kind: u32,
    /// `blockIdx.x`.
    pub block: u32,
    /// [`WaitFor::index`].
    pub index: u32,
    /// [`WaitFor::context`].
    pub context: u32,
    /// [`WaitFor::peer`].
    pub peer: i32,
    /// `threadIdx.x`.
    pub thread: u32,
    /// [`WaitFor::wanted`].
    pub wanted: u64,
    /// [`WaitFor::seen`].
    pub seen: u64,
}

/// The abort flag and the records of aborted waits, in host memory that the GPU can access.
#[repr(C, align(64))]
pub struct AbortBlock {
    /// If not 0, every wait ends. Waits read it once in a few thousand polls.
    pub flag: u32,
    /// Not 0 if an abort ended a wait without a record, whose thread went on.
    pub continued: u32,
    /// The wait of each warp.
    pub records: [StuckRecord; STUCK_RECORDS],
}

const _: () = {
    assert!(size_of::<StuckRecord>() == 64);
    assert!(core::mem::offset_of!(AbortBlock, flag) == 0);
    assert!(core::mem::offset_of!(AbortBlock, records) == 64);
};

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;

    #[test]
    fn a_signal_is_named_by_its_byte_also_beyond_4_gib() {
        let index = ((5_u64 << 30) / 8) as u32;
        let wait = WaitFor { index, wanted: 1, ..WaitFor::of(WaitKind::VaSignal) };
        let text = std::format!("{wait}");
        assert!(text.starts_with("the signal at byte 5368709120 of a window"), "{text}");
    }
}
