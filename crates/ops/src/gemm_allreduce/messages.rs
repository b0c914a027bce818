//! The memory of messages that are their own flags, of products.

use devcomm_host::{
    Communicator, DevCommRequirements, DevCommResource, Result, SymmetricBuffer, Window,
};
use nccl_device::{ANY_RANKS, Lamport, lamport_words};

use crate::slots::empty_slots;

/// Slots in a window, the state of their session, and a device communicator.
pub(crate) struct Messages {
    pub(crate) dev_comm: DevCommResource,
    pub(crate) slots: Window<u32>,
    pub(crate) state: SymmetricBuffer<u32>,
    pub(crate) capacity: u32,
}

impl Messages {
    /// This many slots for each rank's messages, and LSA barriers for as many blocks. *Collective*;
    /// no rank may send before all ranks have returned.
    pub(crate) fn new(comm: &Communicator, capacity: u32, barriers: u32) -> Result<Self> {
        let slots = empty_slots(comm, lamport_words(comm.n_ranks(), capacity as usize))?;
        let state = comm.mem_alloc::<u32>(Lamport::<ANY_RANKS>::STATE)?;
        state.fill_bytes(0)?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(barriers))?;
        Ok(Self { dev_comm, slots, state, capacity })
    }
}
