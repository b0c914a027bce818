//! All-gather, broadcast and all-to-all of short messages within the LSA team in one step, by
//! messages without separate flags (`Lamport`), which have marks.

use super::elements::{load_each, store_each};
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
    fn sent(&self, distance: usize) -> Elements<T::Element, true> {
        let to = opaque::<T>(self.comm.lsa_team().rotated(distance as i32));
        self.message(self.input.cast_mut(), self.messages.input(to))
    }

    /// Returns the place of the message from a rank.
    fn received(&self, from: i32) -> Elements<T::Element, true> {
        self.message(self.output, self.messages.output(opaque::<T>(from)))
    }

    fn message(&self, buffer: *mut T, offset: usize) -> Elements<T::Element, true> {
        let count = self.messages.bytes / size_of::<T::Element>();
        Elements::new(buffer.wrapping_byte_add(offset).cast(), count)
    }

    /// Stores payload from a rank; nothing in the lane of the marks.
    unsafe fn store(&self, from: i32, slot: u32, payload: Vec16<T::Element>) {
        let message = self.received(from);
        let Some(at) = vector_of(slot) else { return };
        // SAFETY: the kernel's caller guarantees the messages; one thread has this part.
        unsafe {
            match size_of::<T>() {
                16 if at < message.vectors() => mem::store_vec(message.address(at), payload),
                16 => {}
                _ => store_each::<_, true>(message.address(at), message.left(at), payload),
            }
        }
    }
}

impl<T: Unit, const N: usize> OneStep<N> for Part<'_, T> {
    type Element = T::Element;

    fn used(&self) -> u32 {
        self::slots(self.messages.bytes) as u32
    }

    fn is_long(&self) -> bool {
        T::IS_LONG.unwrap_or_else(|| is_long(self::slots(self.messages.bytes) as u32, threads()))
    }

    fn sender(&self) -> u32 {
        self.messages.sender
    }

    unsafe fn prefetch(&self, slot: u32) {
        let Some(at) = vector_of(slot) else { return };
        for distance in 0..N {
            // SAFETY: the kernel's caller guarantees the messages.
            unsafe { self.sent(distance).prefetch(at) };
        }
    }

    /// Loads the payload of a slot for each rank; 0 in the lane of the marks.
    unsafe fn load(&self, slot: u32) -> [Vec16<T::Element>; N] {
        let mut loaded = [Vec16::from_bits([0; 4]); N];
        let Some(at) = vector_of(slot) else { return loaded };
        for distance in 0..N {
            let message = self.sent(distance);
            // SAFETY: the kernel's caller guarantees the messages, which nothing writes.
            unsafe {
                match size_of::<T>() {
                    16 if at < message.vectors() => {
                        loaded[distance] = mem::load_vec(message.address(at));
                    }
                    16 => {}
                    _ => {
                        loaded[distance] =
                            load_each::<_, true>(message.address(at), message.left(at))
                    }
                }
            }
        }
        loaded
    }

    /// Sends the payload to the peers, and copies the message to this rank.
    unsafe fn send(&self, session: &Lamport<'_, N>, slot: u32, mine: &[Vec16<T::Element>; N]) {
        let me = self.comm.lsa_team().rank;
        for distance in 1..N {
            // SAFETY: a whole warp calls this, and only this thread uses the slot.
            unsafe { session.send(distance, slot, marked(mine[distance])) };
        }
        if self.sent(0).address(0) != self.received(me).address(0) {
            // SAFETY: the kernel's caller guarantees the messages; one thread has this part.
            unsafe { self.store(me, slot, mine[0]) };
        }
    }

    unsafe fn receive(&self, session: &Lamport<'_, N>, slot: u32) {
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
            } else if sender != self.comm.lsa_team().rank as u32 {
                let received = unmarked(session.receive(sender as usize, slot));
                self.store(sender as i32, slot, received);
            }
        }
    }

    unsafe fn receive_two(&self, session: &Lamport<'_, N>, slots: [u32; 2]) {
        let peer = 1 - self.comm.lsa_team().rank;
        // SAFETY: only this thread uses the slots, and all lanes call this together.
        unsafe {
            if self.messages.are_from(peer) {
                let received: [Vec16<T::Element>; 2] =
                    session.receive_several(peer as usize, |i| Some(slots[i]), 0);
                self.store(peer, slots[0], unmarked(received[0]));
                self.store(peer, slots[1], unmarked(received[1]));
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
    /// The elements by which messages are loaded and stored, unless they have whole vectors.
    type Element: Element;
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
    type Element = u32;
    const IS_LONG: Option<bool> = Some(false);
}
impl Unit for LongVector {
    type Element = u32;
    const IS_LONG: Option<bool> = Some(true);
}
impl Unit for u32 {
    type Element = u32;
}
impl Unit for u8 {
    type Element = u8;
}
