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

/// The part of a message that is sent in a slot, in bytes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    at: usize,
    /// How many bytes the message has from `at` on.
    pub(super) left: usize,
}

impl Place {
    /// Returns the part that a slot carries of a message of `bytes` bytes, which `header` bytes
    /// precede; `None` for marks. The slots of the header have no place.
    pub(super) fn of(slot: u32, header: usize, bytes: usize) -> Option<Self> {
        let (row, lane) = ((slot / warp::WARP_SIZE) as usize, slot % warp::WARP_SIZE);
        let at = (row * MARKS as usize + lane as usize) * 16 - header;
        (lane != MARKS).then_some(Self { at, left: bytes.saturating_sub(at) })
    }

    pub(super) fn is_whole(self) -> bool {
        self.left >= 16
    }

    /// Returns the address of this part of a message.
    pub(super) fn address_in<T>(self, message: *const T) -> *const T {
        message.wrapping_byte_add(self.at)
    }

    /// Loads the part by elements, 0 after the last one. The message is allocated and not written.
    pub(super) unsafe fn load<T: Element + Into<u128>>(self, message: *const T) -> Vec16<T> {
        let mut bits = 0;
        self.each::<T>(|i| {
            let from = self.address_in(message).wrapping_add(i);
            // SAFETY: the caller guarantees this part of the message.
            let element: u128 = unsafe { mem::load(from) }.into();
            bits |= element << (8 * size_of::<T>() * i);
        });
        Vec16::from_bits([0, 32, 64, 96].map(|shift: u32| (bits >> shift) as u32))
    }

    /// Stores the part by elements, which are allocated, and which nothing else accesses.
    pub(super) unsafe fn store<T: Element>(self, message: *mut T, payload: Vec16<T>) {
        // SAFETY: the caller guarantees this part of the message.
        self.each::<T>(|i| unsafe {
            mem::store(self.address_in(message).wrapping_add(i).cast_mut(), payload.lane(i));
        });
    }

    /// Calls `f` with the index of each element `T`: bytes in a loop, which is shorter, and words
    /// without one, so that loads are in flight together.
    fn each<T: Element>(self, mut f: impl FnMut(usize)) {
        if size_of::<T>() == 1 {
            let mut i = 0; // A range would be unrolled.
            while i < hint::opaque_usize(16) && i < self.left {
                f(i);
                i += 1;
            }
        } else {
            for i in 0..Vec16::<T>::LANES {
                if i * size_of::<T>() < self.left {
                    f(i);
                }
            }
        }
    }
}
