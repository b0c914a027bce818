//! The arguments of the collectives that only move bytes: all-gather, broadcast, all-to-all, and
//! all-to-all with a length for each pair of ranks.

use crate::prelude::*;

/// Messages of the same length: from each rank, or from only one rank, to each rank.
///
/// The message to rank `p` begins `p * input_stride` bytes after the beginning of the input. The
/// output is the messages in the order of the ranks that send.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Messages {
    /// The length of a message in bytes.
    pub bytes: usize,
    /// Bytes between the messages to two ranks; 0 if all ranks get the same message.
    pub input_stride: usize,
    /// The length of the output in bytes.
    pub output_bytes: usize,
    /// The rank that sends, or [`ALL`](Self::ALL).
    pub sender: u32,
}

impl Messages {
    /// The `sender` if all ranks send.
    pub const ALL: u32 = u32::MAX;

    pub(super) fn are_from(self, rank: i32) -> bool {
        self.sender == Self::ALL || self.sender == rank as u32
    }

    /// Returns the offset of the message to a rank.
    pub(super) fn input(self, to: i32) -> usize {
        to as usize * self.input_stride
    }

    /// Returns the offset of the message from a rank.
    pub(super) fn output(self, from: i32) -> usize {
        if self.sender == Self::ALL { from as usize * self.bytes } else { 0 }
    }
}

/// The parts of a buffer that a rank sends to each rank, or receives from each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Where the part of each rank begins, in bytes.
    pub at: [usize; Self::RANKS],
    /// How many bytes the part of each rank has.
    pub bytes: [usize; Self::RANKS],
}

impl Parts {
    /// The most ranks.
    pub const RANKS: usize = 8;
}

/// The window that a rank receives in.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The number of the window, by which ranks know that they mean the same one.
    pub number: usize,
    /// How many bytes it has in each rank.
    pub bytes: [usize; Parts::RANKS],
}

impl Target {
    /// The number of bits of the offset in an offer; the others are the window's number mod 2^16.
    const BITS: u32 = 48;

    /// Returns the offer that a peer stores its message from byte `at` of the window `number` on.
    #[must_use]
    pub const fn offer(number: usize, at: usize) -> usize {
        at & ((1 << Self::BITS) - 1) | number << Self::BITS
    }

    /// Returns the byte of the window that a peer's offer names for a message of `bytes` bytes.
    ///
    /// # Panics
    ///
    /// If the offer is for another window, or the message does not fit there.
    #[must_use]
    pub fn place(&self, peer: usize, offer: usize, bytes: usize) -> usize {
        let (at, len) = (Self::offer(0, offer), self.bytes[peer]);
        let is_same = offer >> Self::BITS == Self::offer(self.number, 0) >> Self::BITS;
        assert!(is_same, "a peer receives in another window: all ranks receive in the same one");
        assert!(bytes <= len && at <= len - bytes, "a message does not fit in a peer's window");
        at
    }
}

// SAFETY: `Abi` is the type itself, and all of its bytes are valid numbers.
unsafe impl devcomm_types::KernelParam for Target {
    type Abi = Self;
}

// SAFETY: `Abi` is the type itself, and all of its bytes are valid numbers.
unsafe impl devcomm_types::KernelParam for Parts {
    type Abi = Self;
}
