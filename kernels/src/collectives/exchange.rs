//! What ranks send to each other, as bytes: all-gather, broadcast, all-to-all, and this with a
//! length for each pair of ranks.

use cuda_std::prelude::*;

/// A message of the same length from each rank, or only one, to each rank.
///
/// The message to rank `p` begins `p * input_stride` bytes behind the beginning of the input. The
/// output is the messages in the order of the ranks that send.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Messages {
    /// The length of a message in bytes.
    pub bytes: usize,
    /// Bytes between the messages to two ranks; 0 if they get the same.
    pub input_stride: usize,
    /// The length of the output in bytes.
    pub output_bytes: usize,
    /// The rank that sends, or [`ALL`](Self::ALL).
    pub sender: u32,
}

impl Messages {
    /// The `sender` if all ranks send.
    pub const ALL: u32 = u32::MAX;

    /// Whether a rank sends.
    #[inline(always)]
    pub(super) fn are_from(self, rank: i32) -> bool {
        self.sender == Self::ALL || self.sender == rank as u32
    }

    /// The offset of the message to a rank.
    #[inline(always)]
    pub(super) fn input(self, to: i32) -> usize {
        to as usize * self.input_stride
    }

    /// The offset of the message from a rank.
    #[inline(always)]
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
    /// How many bytes it has.
    pub bytes: [usize; Self::RANKS],
}

impl Parts {
    /// The most ranks.
    pub const RANKS: usize = 8;
}

// SAFETY: `Abi` is the type itself.
unsafe impl devcomm_types::KernelParam for Parts {
    type Abi = Self;
}
