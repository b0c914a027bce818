//! All-gather, broadcast and all-to-all of short messages within the LSA team in one step, by
//! messages without separate flags (`Lamport`).
//!
//! A slot is empty while a word of it is [`EMPTY`], which may also be payload. So 31 lanes of a
//! warp send 16 bytes each, and the last one sends marks: which of those words were [`EMPTY`].

use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use cuda_std::{hint, mem};
use nccl_device::{DevComm, EMPTY, Element, Lamport, LamportMemory};

use super::exchange::Messages;
use super::one_step::{OneStep, exchange};

/// The lane that sends marks instead of payload.
pub(super) const MARKS: u32 = warp::WARP_SIZE - 1;

/// Sends messages between the ranks of the LSA team, which has 2, 4 or 8 ranks.
///
/// Messages are elements `T`, aligned to their size. A rank's message to itself is copied, unless
/// it is already in its place. The launch uses [`slots`] of `memory`.
///
/// Grid: any. Block: a multiple of 32 threads up to 512, one-dimensional. Dependent
/// launch: allowed. `messages` are the same in every rank.
///
/// # Safety
///
/// `input` has the messages, in ranks that send, and `output` has `messages.output_bytes`. Nothing
/// else accesses these until the kernel has ended, and they do not overlap, except that a rank's
/// message to itself may be in its place. `memory` is as [`LamportSlots`] needs it.
///
/// [`LamportSlots`]: nccl_device::LamportSlots
#[kernel(T = [Vector, u32, u8], max_threads = 512, min_blocks = 2)]
pub unsafe fn lamport_exchange<T: Unit>(
    comm: DevComm,
    memory: LamportMemory,
    input: *const T,
    output: *mut T,
    messages: Messages,
) {
    let part = Part { comm: &comm, input, output, messages };
    // SAFETY: the kernel's caller guarantees the messages and the memory of the slots.
    unsafe { exchange(&comm, &memory, &part) }
}

/// Returns how many slots a message of `bytes` bytes uses.
#[must_use]
pub const fn slots(bytes: usize) -> usize {
    bytes.div_ceil(16 * MARKS as usize) * warp::WARP_SIZE as usize
}

struct Part<'a, T> {
    comm: &'a DevComm,
    input: *const T,
    output: *mut T,
    messages: Messages,
}

impl<T: Unit> Part<'_, T> {
    /// Returns the message to the rank that is `distance` after this one.
    fn message(&self, distance: usize) -> *const T {
        let to = opaque::<T>(self.comm.lsa_team().rotated(distance as i32));
        self.input.wrapping_byte_add(self.messages.input(to))
    }

    /// Returns where in a message the payload of a slot is; `None` for marks.
    fn place(&self, slot: u32) -> Option<Place> {
        let (row, lane) = ((slot / warp::WARP_SIZE) as usize, slot % warp::WARP_SIZE);
        let at = (row * MARKS as usize + lane as usize) * 16;
        let left = self.messages.bytes.saturating_sub(at);
        (lane != MARKS).then_some(Place::new(at, left))
    }

    /// Stores payload from a rank; nothing in the lane of the marks.
    unsafe fn store(&self, from: i32, slot: u32, payload: Payload) {
        let from = opaque::<T>(from);
        let message = self.output.wrapping_byte_add(self.messages.output(from));
        if let Some(place) = self.place(slot) {
            // SAFETY: the kernel's caller guarantees the messages, and only this thread has this
            // part of them.
            unsafe { T::store(message, place, payload) };
        }
    }
}

impl<T: Unit> OneStep for Part<'_, T> {
    type Element = u32;

    fn used(&self) -> u32 {
        self::slots(self.messages.bytes) as u32
    }

    fn sends(&self) -> bool {
        self.messages.are_from(self.comm.lsa_team().rank)
    }

    unsafe fn prefetch<const N: usize>(&self, slot: u32) {
        let Some(place) = self.place(slot).filter(|place| place.left > 0) else { return };
        for distance in 0..N {
            // SAFETY: the kernel's caller guarantees the messages, and only this thread has this
            // part of them.
            unsafe { mem::prefetch(place.address_in(self.message(distance))) };
        }
    }

    /// Loads the payload of a slot for each rank; 0 in the lane of the marks.
    unsafe fn load<const N: usize>(&self, slot: u32) -> [Payload; N] {
        let mut loaded = [Vec16::from_bits([0; 4]); N];
        let Some(place) = self.place(slot) else { return loaded };
        for distance in 0..N {
            // SAFETY: the kernel's caller guarantees the messages, and only this thread has this
            // part of them.
            loaded[distance] = unsafe { T::load(self.message(distance), place) };
        }
        loaded
    }

    /// Sends the payload to the peers, and copies the message to this rank.
    unsafe fn send<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        slot: u32,
        mine: &[Payload; N],
    ) {
        let me = self.comm.lsa_team().rank;
        for distance in 1..N {
            // SAFETY: all lanes of a warp call this together, and only this thread uses the slot.
            unsafe { session.send(distance, slot, marked(mine[distance])) };
        }
        let is_in_place = self.input.wrapping_byte_add(self.messages.input(me)).addr()
            == self.output.wrapping_byte_add(self.messages.output(me)).addr();
        if !is_in_place {
            // SAFETY: the kernel's caller guarantees the messages, and only this thread has this
            // part of them.
            unsafe { self.store(me, slot, mine[0]) };
        }
    }

    unsafe fn send_nothing<const N: usize>(&self, session: &Lamport<'_, N>) {
        for distance in 1..N {
            // SAFETY: one thread calls this, and the launch uses at least one slot.
            unsafe { session.send(distance, 0, Vec16::<u8>::from_bits([0; 4])) };
        }
    }

    unsafe fn receive<const N: usize>(&self, session: &Lamport<'_, N>, slot: u32) {
        let sender = self.messages.sender;
        // SAFETY: the session has begun, only this thread uses the slot, and all lanes call this
        // together.
        unsafe {
            if sender == Messages::ALL {
                let (me, nothing) = (self.comm.lsa_team().rank, Vec16::from_bits([0; 4]));
                session.receive_in_order(slot, nothing, |source, received| {
                    if source as i32 != me {
                        self.store(source as i32, slot, unmarked(received));
                    }
                });
            } else if !self.sends() {
                let received = unmarked(session.receive(sender as usize, slot));
                self.store(sender as i32, slot, received);
            }
        }
    }

    unsafe fn receive_two<const N: usize>(&self, session: &Lamport<'_, N>, slots: [u32; 2]) {
        let peer = 1 - self.comm.lsa_team().rank;
        // SAFETY: the session has begun, only this thread uses the slots, and all lanes call this
        // together.
        unsafe {
            if self.messages.are_from(peer) {
                let received: [Payload; 2] =
                    session.receive_several(peer as usize, |i| Some(slots[i]), 0);
                self.store(peer, slots[0], unmarked(received[0]));
                self.store(peer, slots[1], unmarked(received[1]));
            }
        }
    }

    unsafe fn receive_nothing<const N: usize>(&self, session: &Lamport<'_, N>) {
        let (me, sender) = (self.comm.lsa_team().rank as usize, self.messages.sender);
        let mut source = 0;
        while source < N && sender != Messages::ALL {
            if source != me && source != sender as usize {
                // SAFETY: one thread calls this, and a rank that sends nothing has sent slot 0.
                unsafe { session.receive::<u8>(source, 0) };
            }
            source += 1;
        }
    }
}

/// Returns the rank. For messages of bytes it is opaque to the compiler: the addresses of all
/// ranks' messages would take registers in the loop.
fn opaque<T>(rank: i32) -> i32 {
    if size_of::<T>() == 1 { hint::opaque_usize(rank as usize) as i32 } else { rank }
}

/// A type of which messages consist, and to the size of which they are aligned.
pub trait Unit: Copy + 'static {
    /// Loads a part of a message, 0 after its end.
    ///
    /// # Safety
    ///
    /// The message is allocated, and nothing writes this part.
    unsafe fn load(message: *const Self, place: Place) -> Payload;

    /// Stores a part of a message.
    ///
    /// # Safety
    ///
    /// The message is allocated, and nothing else accesses this part.
    unsafe fn store(message: *mut Self, place: Place, payload: Payload);
}

/// A unit of messages whose length and alignment are multiples of 16 bytes.
pub type Vector = Vec16<u32>;

/// The vector that a slot carries, without marks.
pub type Payload = Vec16<u32>;

impl Unit for Vector {
    unsafe fn load(message: *const Self, place: Place) -> Payload {
        if place.left == 0 {
            return Vec16::from_bits([0; 4]);
        }
        // SAFETY: the caller guarantees this part, which is all 16 bytes.
        unsafe { mem::load_vec(place.address_in(message).cast()) }
    }

    unsafe fn store(message: *mut Self, place: Place, payload: Payload) {
        if place.left > 0 {
            // SAFETY: the caller guarantees this part, which is all 16 bytes.
            unsafe { mem::store_vec(place.address_in(message).cast_mut().cast(), payload) };
        }
    }
}

macro_rules! units {
    ($($type:ident)*) => { $(
        impl Unit for $type {
            unsafe fn load(message: *const Self, place: Place) -> Payload {
                // SAFETY: the caller guarantees this part of the message.
                Vec16::from_bits(unsafe { place.load(message) }.to_bits())
            }

            unsafe fn store(message: *mut Self, place: Place, payload: Payload) {
                // SAFETY: the caller guarantees this part of the message.
                unsafe { place.store(message, Vec16::from_bits(payload.to_bits())) };
            }
        }
    )* };
}

units!(u32 u8);

/// The part of a message that is sent in a slot, in bytes.
#[derive(Clone, Copy)]
pub struct Place {
    at: usize,
    /// How many bytes the message has from `at` on.
    left: usize,
}

impl Place {
    /// Makes the place of `left` bytes from offset `at` on.
    pub(super) fn new(at: usize, left: usize) -> Self {
        Self { at, left }
    }

    pub(super) fn is_whole(self) -> bool {
        self.left >= 16
    }

    /// Returns the address of this part of a message.
    pub(super) fn address_in<T>(self, message: *const T) -> *const T {
        message.wrapping_byte_add(self.at)
    }

    /// Loads the part element by element, 0 after the last one.
    ///
    /// # Safety
    ///
    /// The message is allocated, and nothing writes these elements.
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

    /// Stores the part element by element.
    ///
    /// # Safety
    ///
    /// The message is allocated, and nothing else accesses these elements.
    pub(super) unsafe fn store<T: Element>(self, message: *mut T, payload: Vec16<T>) {
        // SAFETY: the caller guarantees this part of the message.
        self.each::<T>(|i| unsafe {
            mem::store(self.address_in(message).wrapping_add(i).cast_mut(), payload.lane(i));
        });
    }

    /// Calls `f` with the index of each element `T`: bytes in a loop, which is shorter, and words
    /// without one, so that loads are in flight together.
    fn each<T: Element>(self, mut f: impl FnMut(usize)) {
        let mut i = 0;
        if size_of::<T>() == 1 {
            while i < hint::opaque_usize(16) && i < self.left {
                f(i);
                i += 1;
            }
        } else {
            while i < Vec16::<T>::LANES {
                if i * size_of::<T>() < self.left {
                    f(i);
                }
                i += 1;
            }
        }
    }
}

/// Returns what a lane sends: its payload or, for each word, a mask of the lanes where it is
/// [`EMPTY`]. The lane of the marks has payload 0, so that its bit is never set in a mark.
///
/// # Safety
///
/// All lanes of the warp call this together.
pub(super) unsafe fn marked<T: Element>(payload: Vec16<T>) -> Vec16<T> {
    let words = payload.to_bits();
    // SAFETY: all lanes of the warp are here, as the caller guarantees.
    unsafe {
        if !warp::any(words.contains(&EMPTY)) {
            return payload;
        }
        let marks = words.map(|word| warp::ballot(word == EMPTY));
        if warp::lane_id() == MARKS { Vec16::from_bits(marks) } else { payload }
    }
}

/// Returns the payload that a lane has received, with the words that are marked as [`EMPTY`].
///
/// # Safety
///
/// All lanes of the warp call this together.
pub(super) unsafe fn unmarked<T: Element>(received: Vec16<T>) -> Vec16<T> {
    let words = received.to_bits();
    let is_mark = warp::lane_id() == MARKS && words != [0; 4];
    // SAFETY: all lanes of the warp are here, as the caller guarantees.
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
