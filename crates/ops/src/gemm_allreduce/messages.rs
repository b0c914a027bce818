//! The memory of messages that are their own flags, between two ranks.

use devcomm_host::{
    Communicator, DevCommRequirements, DevCommResource, Result, SymmetricBuffer, Window,
};
use nccl_device::{Lamport, lamport_words};

use crate::slots::empty_slots;

/// Slots in a window, the state of their session, and a device communicator.
pub(crate) struct Messages {
    pub(crate) dev_comm: DevCommResource,
    pub(crate) slots: Window<u32>,
    pub(crate) state: SymmetricBuffer<u32>,
    pub(crate) capacity: u32,
}

impl Messages {
    /// This many slots. *Collective*.
    pub(crate) fn new(comm: &Communicator, capacity: u32) -> Result<Self> {
        let slots = empty_slots(comm, lamport_words(2, capacity as usize))?;
        let state = comm.mem_alloc::<u32>(Lamport::<2>::STATE)?;
        state.fill_bytes(0)?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
        // No rank sends before all slots are empty.
        comm.barrier()?;
        Ok(Self { dev_comm, slots, state, capacity })
    }
}
