//! The memory of [`Lamport`] messages, which need no separate flags.

use devcomm_host::{Buffer, Communicator, Result, SymmetricBuffer, Window};
use nccl_device::{ANY_RANKS, EMPTY, Lamport, lamport_words};

/// The slots of a session of Lamport messages, its state, and the slots of each rank's messages:
/// what a kernel's `slots`, `state` and `capacity` are.
pub(crate) struct LamportMemory {
    pub(crate) slots: Window<u32>,
    pub(crate) state: SymmetricBuffer<u32>,
    pub(crate) capacity: u32,
}

impl LamportMemory {
    /// Allocates the memory, with empty slots. *Collective*. No rank may send before all ranks'
    /// slots are empty, which needs a barrier.
    pub(crate) fn new(comm: &Communicator, capacity: u32) -> Result<Self> {
        let words = lamport_words(comm.n_ranks(), capacity as usize);
        let slots = comm.window::<u32>(words)?;
        let empty = vec![EMPTY; words.min(1 << 18)];
        for first in (0..words).step_by(empty.len()) {
            let part = slots.slice(first..words.min(first + empty.len()))?;
            part.copy_from_host(&empty[..part.len()])?;
        }
        // New memory is zeroed, as the state must be.
        Ok(Self { slots, state: comm.mem_alloc(Lamport::<ANY_RANKS>::STATE)?, capacity })
    }
}
