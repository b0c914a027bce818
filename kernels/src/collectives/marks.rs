//! Messages of any bits, in slots that count as empty while one of their words is [`EMPTY`].
//!
//! That word may also be payload. So 31 lanes of a warp send 16 bytes each, and the last one sends
//! *marks*: which of those words were [`EMPTY`].

use nccl_device::EMPTY;

use crate::prelude::*;

/// The lane that sends marks instead of payload.
pub(super) const MARKS: u32 = warp::WARP_SIZE - 1;

/// Returns how many slots a message of `bytes` bytes uses.
#[must_use]
pub const fn slots(bytes: usize) -> usize {
    bytes.div_ceil(16 * MARKS as usize) * warp::WARP_SIZE as usize
}

/// Returns which vector of a message a slot carries; `None` for marks.
pub(super) fn vector_of(slot: u32) -> Option<usize> {
    let (row, lane) = (slot / warp::WARP_SIZE, slot % warp::WARP_SIZE);
    (lane != MARKS).then_some((row * MARKS + lane) as usize)
}

/// Returns what a lane sends: its payload or, for each word, a mask of the lanes where it is
/// [`EMPTY`]. The lane of the marks has payload 0, so that its bit is never set in a mark. A whole
/// warp calls this.
pub(super) unsafe fn marked<T: Element>(payload: Vec16<T>) -> Vec16<T> {
    let words = payload.to_bits();
    // SAFETY: the whole warp is here, as the caller guarantees.
    unsafe {
        if !warp::any(words.contains(&EMPTY)) {
            return payload;
        }
        let marks = words.map(|word| warp::ballot(word == EMPTY));
        if warp::lane_id() == MARKS { Vec16::from_bits(marks) } else { payload }
    }
}

/// Returns the payload that a lane has received, with the marked words. A whole warp calls this.
pub(super) unsafe fn unmarked<T: Element>(received: Vec16<T>) -> Vec16<T> {
    let words = received.to_bits();
    let is_mark = warp::lane_id() == MARKS && words != [0; 4];
    // SAFETY: the whole warp is here, as the caller guarantees.
    unsafe {
        if !warp::any(is_mark) {
            return received;
        }
        Vec16::from_bits(words.map(|word| {
            let marks = warp::shuffle_idx(word, MARKS);
            if marks >> warp::lane_id() & 1 == 1 { EMPTY } else { word }
        }))
    }
}
