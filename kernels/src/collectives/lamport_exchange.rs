//! All-gather, broadcast and all-to-all of short messages within the LSA team in one step, by
//! messages without separate flags (`Lamport`), which have marks.

pub use super::marks::slots;
pub use super::one_step::is_long;
use super::prelude::*;

/// Sends messages between the ranks of the LSA team, which has 2, 4 or 8 ranks.
///
/// Messages are elements `T`, aligned to their size. A rank's message to itself is copied, unless
/// it is already in its place. The launch uses [`slots`] of `memory`.
///
/// Messages of vectors are [short](Vector) or [long](LongVector), which changes only the time: the
/// code of both together would take longer for short ones.
///
/// Grid: any. Block: a multiple of 32 threads up to 512, one-dimensional. Dependent
/// launch: allowed. `messages` are the same in every rank.
///
/// # Safety
///
/// `input` has the messages, in ranks that send, and `output` has `messages.output_bytes`. Nothing
/// else accesses these until the kernel has ended, and they do not overlap, except that a rank's
/// message to itself may be in its place. `memory` is as [`LamportSlots`] needs it.
#[kernel(
    T = [Vector, LongVector, u32, u8],
    max_threads = 512,
    min_blocks = 2,
    requires(block.x.is_multiple_of(32))
)]
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
        Place::of(slot, 0, self.messages.bytes)
    }

    /// Stores payload from a rank; nothing in the lane of the marks.
    unsafe fn store(&self, from: i32, slot: u32, payload: Vec16<u32>) {
        let from = opaque::<T>(from);
        let message = self.output.wrapping_byte_add(self.messages.output(from));
        if let Some(place) = self.place(slot) {
            // SAFETY: the kernel's caller guarantees the messages; one thread has this part.
            unsafe { store(message, place, payload) };
        }
    }
}

impl<T: Unit> OneStep for Part<'_, T> {
    type Element = u32;

    fn used(&self) -> u32 {
        self::slots(self.messages.bytes) as u32
    }

    fn is_long(&self) -> bool {
        T::IS_LONG.unwrap_or_else(|| is_long(self.used(), threads()))
    }

    fn sends(&self) -> bool {
        self.messages.are_from(self.comm.lsa_team().rank)
    }

    unsafe fn prefetch<const N: usize>(&self, slot: u32) {
        let Some(place) = self.place(slot).filter(|place| place.left > 0) else { return };
        for distance in 0..N {
            // SAFETY: the kernel's caller guarantees the messages.
            unsafe { mem::prefetch(place.address_in(self.message(distance))) };
        }
    }

    /// Loads the payload of a slot for each rank; 0 in the lane of the marks.
    unsafe fn load<const N: usize>(&self, slot: u32) -> [Vec16<u32>; N] {
        let mut loaded = [Vec16::from_bits([0; 4]); N];
        let Some(place) = self.place(slot) else { return loaded };
        for distance in 0..N {
            // SAFETY: the kernel's caller guarantees the messages, which nothing writes.
            loaded[distance] = unsafe { load(self.message(distance), place) };
        }
        loaded
    }

    /// Sends the payload to the peers, and copies the message to this rank.
    unsafe fn send<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        slot: u32,
        mine: &[Vec16<u32>; N],
    ) {
        let me = self.comm.lsa_team().rank;
        for distance in 1..N {
            // SAFETY: a whole warp calls this, and only this thread uses the slot.
            unsafe { session.send(distance, slot, marked(mine[distance])) };
        }
        let is_in_place = self.input.wrapping_byte_add(self.messages.input(me)).addr()
            == self.output.wrapping_byte_add(self.messages.output(me)).addr();
        if !is_in_place {
            // SAFETY: the kernel's caller guarantees the messages; one thread has this part.
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
        // SAFETY: only this thread uses the slot, and all lanes call this together.
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
        // SAFETY: only this thread uses the slots, and all lanes call this together.
        unsafe {
            if self.messages.are_from(peer) {
                let received: [Vec16<u32>; 2] =
                    session.receive_several(peer as usize, |i| Some(slots[i]), 0);
                self.store(peer, slots[0], unmarked(received[0]));
                self.store(peer, slots[1], unmarked(received[1]));
            }
        }
    }

    unsafe fn receive_nothing<const N: usize>(&self, session: &Lamport<'_, N>) {
        let (me, sender) = (self.comm.lsa_team().rank as usize, self.messages.sender);
        if sender == Messages::ALL {
            return;
        }
        for source in 0..N {
            if source != me && source != sender as usize {
                // SAFETY: one thread calls this, and a rank that sends nothing has sent slot 0.
                unsafe { session.receive::<u8>(source, 0) };
            }
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
    /// Whether at least half of the threads have several slots, if it is known.
    const IS_LONG: Option<bool> = None;
}

/// A unit of messages whose length and alignment are multiples of 16 bytes.
pub type Vector = Vec16<u32>;

/// A [`Vector`] of a message that [is long](is_long).
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct LongVector(pub Vector);

impl Unit for Vector {
    const IS_LONG: Option<bool> = Some(false);
}
impl Unit for LongVector {
    const IS_LONG: Option<bool> = Some(true);
}
impl Unit for u32 {}
impl Unit for u8 {}

/// Loads a part of a message, 0 after its end. The message is allocated, and nothing writes it.
unsafe fn load<T: Unit>(message: *const T, place: Place) -> Vec16<u32> {
    // SAFETY: the caller guarantees this part of the message.
    unsafe {
        match size_of::<T>() {
            1 => Vec16::from_bits(place.load::<u8>(message.cast()).to_bits()),
            4 => place.load::<u32>(message.cast()),
            _ if place.left == 0 => Vec16::from_bits([0; 4]),
            _ => mem::load_vec(place.address_in(message).cast()),
        }
    }
}

/// Stores a part of a message. The message is allocated, and nothing else accesses this part.
unsafe fn store<T: Unit>(message: *mut T, place: Place, payload: Vec16<u32>) {
    // SAFETY: the caller guarantees this part of the message.
    unsafe {
        match size_of::<T>() {
            1 => place.store::<u8>(message.cast(), Vec16::from_bits(payload.to_bits())),
            4 => place.store::<u32>(message.cast(), payload),
            _ if place.left == 0 => {}
            _ => mem::store_vec(place.address_in(message).cast_mut().cast(), payload),
        }
    }
}
