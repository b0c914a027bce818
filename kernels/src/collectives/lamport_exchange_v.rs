//! All-to-all with a length for each pair of ranks within the LSA team: this kernel sends the short
//! messages in one step, as `lamport_exchange` does.
//!
//! In front of its message a rank sends each peer a vector that says where the peer's message
//! belongs. So every message has a slot, and `push_exchange_v` knows where long ones go.

use super::marks::{self, MARKS};
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
    let (sent, received, team) = (&*sent, &*received, comm.lsa_team());
    let (me, ranks) = (team.rank as usize, team.n_ranks as usize);
    // This launch sends nothing of a long message.
    let short = |bytes: usize| if bytes > longest { 0 } else { bytes };
    let slots_of = |parts: &Parts, rank: usize| slots(short(parts.bytes[rank])) as u32;
    let part = |buffer: *mut u8, parts: &Parts, rank: usize| {
        let address = buffer.wrapping_byte_add(parts.at[rank]);
        Elements::<_, true>::new(address, short(parts.bytes[rank]))
    };
    // The first vector is the header.
    let load = |to: usize, slot: u32| match vector_of(slot) {
        Some(0) => header(first + received.at[to], received.bytes[to]),
        // Opaque, as the addresses in all messages would take registers in the loop.
        // SAFETY: the kernel's caller guarantees the parts, which nothing writes.
        Some(at) => unsafe { part(input.cast_mut(), sent, to).load(hint::opaque_usize(at - 1)) },
        None => Vec16::from_bits([0; 4]),
    };
    // SAFETY: the kernel's caller guarantees the parts and offers; one thread uses each slot.
    let store = |from: usize, slot: u32, payload: Vec16<u8>| unsafe {
        match vector_of(slot) {
            Some(0) if from == me => {}
            Some(0) => mem::store_vec(offers.add(2 * from).cast(), payload),
            Some(at) => part(output, received, from).store(at - 1, payload),
            None => {}
        }
    };
    // SAFETY: the kernel's caller guarantees the memory. Each slot is used by one thread, and all
    // lanes of a warp use those of a row together: a message has whole rows.
    unsafe {
        let memory = LamportSlots::<ANY_RANKS>::new(&comm, &memory);
        grid::wait_for_previous();
        let session = memory.begin(used);
        for slot in thread::grid_strided(used) {
            for distance in 1..ranks {
                let to = team.rotated(distance as i32) as usize;
                if slot < slots_of(sent, to) {
                    session.send(distance, slot, marked(load(to, slot)));
                }
            }
            if slot < slots_of(sent, me) {
                store(me, slot, load(me, slot));
            }
        }
        grid::launch_next();
        for slot in thread::grid_strided(used) {
            for source in 0..ranks {
                if source != me && slot < slots_of(received, source) {
                    store(source, slot, unmarked(session.receive(source, slot)));
                }
            }
        }
        thread::sync_threads();
        session.end(Coop::cta());
    }
}

/// Returns the vector in front of a message, with the lower word of each number first.
fn header(at: usize, bytes: usize) -> Vec16<u8> {
    Vec16::from_bits([at, at >> 32, bytes, bytes >> 32].map(|word| word as u32))
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
