//! The memory of messages that are their own flags.

use devcomm_host::{Buffer, Communicator, Result, Window};
use nccl_device::EMPTY;

/// A window of so many words, all of which are empty. *Collective*. No rank may send before all
/// ranks' windows are empty, which needs a barrier.
pub(crate) fn empty_slots(comm: &Communicator, words: usize) -> Result<Window<u32>> {
    let slots = comm.window::<u32>(words)?;
    let empty = vec![EMPTY; words.min(1 << 18)];
    for first in (0..words).step_by(empty.len()) {
        let part = slots.slice(first..words.min(first + empty.len()))?;
        part.copy_from_host(&empty[..part.len()])?;
    }
    Ok(slots)
}
