//! All-to-all with a length for each pair of ranks within the LSA team: this kernel sends the short
//! messages in one step, as `lamport_exchange` does.
//!
//! In front of its message a rank sends each peer a vector that says where the peer's message
//! belongs. So every message has a slot, and `push_exchange_v` knows where long ones go.

use super::marks;
use super::prelude::*;

/// The bytes in front of a message.
const HEADER: usize = 16;

/// Sends `sent` to the ranks of the LSA team, which has 2, 4 or 8, and receives `received`: the
/// messages of at most `longest` bytes.
///
/// Messages begin anywhere, best at a multiple of 16 bytes. A rank's message to itself is copied.
/// The launch uses `used` slots of `memory`: at least [`slots`] of the longest of these messages.
/// `first` is the [`Target::offer`](super::exchange::Target::offer) of this rank's output. `offers`
/// gets two numbers from each peer: the peer's `first` plus the offset of its part from this rank,
/// and the length of that part.
///
/// Grid: any; ranks may have different ones. Block: a multiple of 32 threads up to 512,
/// one-dimensional. Dependent launch: allowed. What a rank sends is as long as what the peer
/// receives; `longest` is the same in every rank.
///
/// # Safety
///
/// `input` has the parts that are sent, `output` those that are received, and `offers`, aligned to
/// 16 bytes, two numbers for each rank. Nothing else accesses these until the kernel has ended, and
/// they do not overlap. `memory` is as [`LamportSlots`] needs it.
#[kernel(max_threads = 512, min_blocks = 2, requires(block.x.is_multiple_of(32)))]
pub unsafe fn lamport_exchange_v(
    comm: DevComm,
    memory: LamportMemory,
    used: u32,
    longest: usize,
    input: *const u8,
    output: *mut u8,
    sent: GridConstant<Parts>,
    received: GridConstant<Parts>,
    first: usize,
    offers: *mut u64,
) {
    let (sent, received) = (&*sent, &*received);
    let exchange =
        Exchange { comm: &comm, used, longest, input, output, sent, received, first, offers };
    // SAFETY: the kernel's caller guarantees the parts and the memory of the slots.
    unsafe { exchange.run(LamportSlots::new(&comm, &memory)) };
}

/// Returns the length in bytes of the longest message that uses at most `slots` slots.
#[must_use]
pub const fn longest(slots: usize) -> usize {
    (slots / warp::WARP_SIZE as usize * MARKS as usize * 16).saturating_sub(HEADER)
}

/// Returns how many slots a message of `bytes` bytes uses: at least a warp's.
#[must_use]
pub const fn slots(bytes: usize) -> usize {
    marks::slots(HEADER + bytes)
}

/// The kernel's arguments.
struct Exchange<'a> {
    comm: &'a DevComm,
    used: u32,
    longest: usize,
    input: *const u8,
    output: *mut u8,
    sent: &'a Parts,
    received: &'a Parts,
    first: usize,
    offers: *mut u64,
}

impl Exchange<'_> {
    unsafe fn run(&self, slots: LamportSlots<'_, ANY_RANKS>) {
        let team = self.comm.lsa_team();
        let (me, ranks) = (team.rank as usize, team.n_ranks as usize);
        grid::wait_for_previous();
        // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread, and
        // all lanes of a warp use those of a row together: a message has whole rows.
        unsafe {
            let session = slots.begin(self.used);
            for slot in thread::grid_strided(self.used) {
                for distance in 1..ranks {
                    let to = team.rotated(distance as i32) as usize;
                    if slot < self.slots_of(self.sent.bytes[to]) {
                        session.send(distance, slot, marked(self.load(to, slot)));
                    }
                }
                if slot < self.slots_of(self.sent.bytes[me]) {
                    self.store(me, slot, self.load(me, slot));
                }
            }
            grid::launch_next();
            for slot in thread::grid_strided(self.used) {
                for source in 0..ranks {
                    if source != me && slot < self.slots_of(self.received.bytes[source]) {
                        let payload: Vec16<u8> = unmarked(session.receive(source, slot));
                        if slot == 0 {
                            mem::store_vec(self.offers.add(2 * source).cast(), payload);
                        }
                        self.store(source, slot, payload);
                    }
                }
            }
            thread::sync_threads();
            session.end(Coop::cta());
        }
    }

    /// Loads the part of the message to a rank that a slot carries. The header comes first.
    unsafe fn load(&self, to: usize, slot: u32) -> Vec16<u8> {
        if slot == 0 {
            let (at, bytes) = (self.first + self.received.at[to], self.received.bytes[to]);
            // The lower word of each number is the first.
            return Vec16::from_bits([at, at >> 32, bytes, bytes >> 32].map(|word| word as u32));
        }
        let Some(place) = self.place(slot, self.sent.bytes[to]) else {
            return Vec16::from_bits([0; 4]);
        };
        let message = self.input.wrapping_byte_add(self.sent.at[to]);
        // SAFETY: the kernel's caller guarantees the parts, and only this thread uses the slot.
        unsafe {
            match message.addr().is_multiple_of(16) && place.is_whole() {
                true => mem::load_vec(place.address_in(message)),
                false => place.load(message),
            }
        }
    }

    /// Stores the part of the message from a rank that a slot carries.
    unsafe fn store(&self, from: usize, slot: u32, payload: Vec16<u8>) {
        let Some(place) = self.place(slot, self.received.bytes[from]) else { return };
        let message = self.output.wrapping_byte_add(self.received.at[from]);
        // SAFETY: the kernel's caller guarantees the parts, and only this thread uses the slot.
        unsafe {
            match message.addr().is_multiple_of(16) && place.is_whole() {
                true => mem::store_vec(place.address_in(message).cast_mut(), payload),
                false => place.store(message, payload),
            }
        }
    }

    /// Returns how many bytes of a message this launch sends: none of a long one.
    fn short(&self, bytes: usize) -> usize {
        if bytes > self.longest { 0 } else { bytes }
    }

    fn slots_of(&self, bytes: usize) -> u32 {
        slots(self.short(bytes)) as u32
    }

    /// Returns where in such a message a slot's payload is; `None` for the header and marks.
    fn place(&self, slot: u32, bytes: usize) -> Option<Place> {
        if slot > 0 { Place::of(slot, HEADER, self.short(bytes)) } else { None }
    }
}
