//! The memory of Lamport messages.

use cuda_std::prelude::*;

use super::{BANKS, SLOT, sources};
use crate::Window;

/// Returns the number of words of a window for `capacity` slots for each source rank of `ranks`
/// ranks. All words are [`EMPTY`](super::EMPTY) before the first launch.
#[must_use]
pub const fn lamport_words(ranks: usize, capacity: usize) -> usize {
    BANKS as usize * sources(ranks) * capacity * SLOT
}

/// The memory of Lamport messages, as a kernel's parameter. The host's type of this name allocates
/// it.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct LamportMemory {
    /// The [`lamport_words`] of the slots.
    pub slots: Window<u32>,
    /// [`Lamport::STATE`](super::Lamport::STATE) words of this GPU's memory, 0 before the first
    /// launch.
    pub state: *mut u32,
    /// The number of slots for a source rank in a bank.
    pub capacity: u32,
    /// Whether the launches with this memory have the GPU to themselves: then a launch may let the
    /// next one begin early ([`grid::launch_next`](cuda_std::grid::launch_next)), whose waiting
    /// blocks take no room from other kernels.
    pub alone: bool,
}
