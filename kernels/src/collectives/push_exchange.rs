//! All-gather, broadcast and all-to-all of long messages within the LSA team: every rank stores its
//! messages to the peers' windows, between two barriers.

use super::prelude::*;

/// Vectors that a thread has in flight.
const UNROLL: usize = 4;

/// Sends messages between the ranks of the LSA team, which has at least two.
///
/// The output begins at byte `first` of `output`. A rank's message to itself is copied, unless it
/// is already in its place.
///
/// Grid: any, up to the device communicator's LSA barriers, the same in every rank. Block: a
/// multiple of 32 threads up to 512, one-dimensional. Dependent launch: allowed. `first` and
/// `messages` are the same in every rank.
///
/// # Safety
///
/// `input` has the messages, in ranks that send. All messages begin at a multiple of 16 bytes, in
/// the input and in the output. Nothing else accesses these bytes until the kernel has ended in
/// every rank, and they do not overlap, except that a rank's message to itself may be in its place.
#[kernel(
    max_threads = 512,
    min_blocks = 2,
    requires(
        block.x.is_multiple_of(32),
        first <= output.len(),
        messages.output_bytes <= output.len() - first
    )
)]
pub unsafe fn push_exchange(
    comm: DevComm,
    input: *const u8,
    output: Window<u8>,
    first: usize,
    messages: Messages,
) {
    let team = comm.lsa_team();
    let copy = |distance: i32| {
        let to = team.rotated(distance);
        let output = if distance == 0 { output.local() } else { output.lsa(to) };
        let into = output.as_ptr().wrapping_add(first + messages.output(team.rank));
        Transfer { from: input.wrapping_add(messages.input(to)), into, bytes: messages.bytes }
    };
    // The loads of the windows' addresses take their time during the wait and the barrier.
    let (mut own, mut message) = (copy(0), copy(1));
    if own.from == own.into.cast_const() {
        own.bytes = 0; // The message to this rank is in its place.
    }
    grid::wait_for_previous();
    grid::launch_next();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    barrier.sync(MemoryOrder::Acquire); // Now no earlier work of a rank accesses its output.
    if messages.are_from(team.rank) {
        for distance in 1..team.n_ranks {
            // This rank's message is copied while NVLink is busy with the first one.
            // SAFETY: the kernel's caller guarantees the memory; one thread copies each vector.
            unsafe { copy_both([message, own]) };
            (message, own.bytes) = (copy(distance + 1), 0); // The last one is not used.
        }
    }
    barrier.sync(MemoryOrder::Release);
}

/// A message to copy, and its place.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    pub(super) from: *const u8,
    pub(super) into: *mut u8,
    pub(super) bytes: usize,
}

/// Copies this thread's part of two messages, whose vectors are in flight together, and the second
/// of which is as long as the first or empty. Nothing else accesses these bytes, which begin at
/// multiples of 16. The whole grid calls this.
unsafe fn copy_both(both: [Transfer; 2]) {
    // SAFETY: nothing else accesses the bytes, as the caller guarantees.
    unsafe {
        for first in strip::of_grid::<UNROLL>(both[0].bytes / 16) {
            let mut loaded = [Vec16::<u8>::from_bits([0; 4]); 2 * UNROLL];
            for i in 0..2 * UNROLL {
                let (message, at) = (both[i / UNROLL], first + i % UNROLL * strip::ROW);
                if at < message.bytes / 16 {
                    loaded[i] = mem::load_vec(message.from.wrapping_add(16 * at));
                }
            }
            for i in 0..2 * UNROLL {
                let (message, at) = (both[i / UNROLL], first + i % UNROLL * strip::ROW);
                if at < message.bytes / 16 {
                    mem::store_vec(message.into.wrapping_add(16 * at), loaded[i]);
                }
            }
        }
        if thread::first() {
            for i in 0..2 {
                for at in both[i].bytes / 16 * 16..both[i].bytes {
                    both[i].copy_byte(at);
                }
            }
        }
    }
}

impl Transfer {
    /// Copies this thread's part of the message, which begins anywhere. Nothing else accesses these
    /// bytes. The whole grid calls this.
    pub(super) unsafe fn copy(self) {
        // SAFETY: nothing else accesses the bytes, as the caller guarantees.
        unsafe {
            if (self.from.addr() | self.into.addr()).is_multiple_of(16) {
                copy_both([self, Self { bytes: 0, ..self }]);
            } else {
                for at in thread::grid_strided(self.bytes) {
                    self.copy_byte(at);
                }
            }
        }
    }

    /// Copies a byte, which nothing else accesses.
    unsafe fn copy_byte(self, at: usize) {
        // SAFETY: nothing else accesses the bytes, as the caller guarantees.
        unsafe { mem::store(self.into.wrapping_add(at), mem::load(self.from.wrapping_add(at))) }
    }
}
