//! The memory of messages that are their own flags.

use devcomm_host::{Buffer, Communicator, Result, Window};
use nccl_device::{EMPTY, LamportSlots};

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

/// The words of slots for `capacity` vectors from each of 2, 4 or 8 ranks.
pub(crate) fn slot_words(ranks: usize, capacity: usize) -> usize {
    match ranks {
        2 => LamportSlots::<2>::words(capacity),
        4 => LamportSlots::<4>::words(capacity),
        _ => LamportSlots::<8>::words(capacity),
    }
}
