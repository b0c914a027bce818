//! The memory of messages that are their own flags, between two ranks.

use devcomm_host::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, Result, SymmetricBuffer, Window,
};
use nccl_device::{EMPTY, Lamport, LamportSlots};

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
        let slots = comm.window::<u32>(LamportSlots::<2>::words(capacity as usize))?;
        let empty = vec![EMPTY; slots.len().min(1 << 20)];
        for first in (0..slots.len()).step_by(empty.len()) {
            let part = slots.slice(first..slots.len().min(first + empty.len()))?;
            part.copy_from_host(&empty[..part.len()])?;
        }
        let state = comm.mem_alloc::<u32>(Lamport::<2>::STATE)?;
        state.fill_bytes(0)?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
        // No rank sends before all slots are empty.
        comm.barrier()?;
        Ok(Self { dev_comm, slots, state, capacity })
    }
}
