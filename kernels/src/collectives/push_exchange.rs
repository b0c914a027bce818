//! All-gather, broadcast and all-to-all of long messages within the LSA team: every rank stores its
//! messages to the peers' windows, between two barriers.

use super::exchange::Messages;
use super::strip;
use crate::prelude::*;

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
    let (own, mut message) = (copy(0), copy(1));
    // The message to this rank is not copied if it is in its place.
    let mut own = (own.from != own.into).then_some(own);
    grid::wait_for_previous();
    grid::launch_next();
    let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
    // After this, no other work of a rank's stream accesses its output.
    barrier.sync(MemoryOrder::Acquire);
    if messages.are_from(team.rank) {
        for distance in 1..team.n_ranks {
            // This rank's message is copied while NVLink is busy with the first one.
            // SAFETY: the kernel's caller guarantees the memory; one thread copies each vector.
            unsafe { copy_both(message, own) };
            (message, own) = (copy(distance + 1), None); // The last one is not used.
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

/// Copies this thread's vectors of two messages of the same length, which are in flight together.
/// Nothing else accesses these bytes, which begin at multiples of 16. All threads of the grid call
/// this.
unsafe fn copy_both(message: Transfer, own: Option<Transfer>) {
    let own = own.map(|own| Transfer { bytes: message.bytes, ..own });
    // SAFETY: nothing else accesses the bytes, as the caller guarantees.
    unsafe {
        for at in strip::of_grid::<UNROLL>(message.bytes / 16) {
            let loaded = (message.load_rows(at), own.map(|own| (own, own.load_rows(at))));
            message.store_rows(at, loaded.0);
            if let Some((own, loaded)) = loaded.1 {
                own.store_rows(at, loaded);
            }
        }
        if thread::first() {
            message.copy_tail();
            if let Some(own) = own {
                own.copy_tail();
            }
        }
    }
}

impl Transfer {
    /// Copies this thread's part of the message, which begins anywhere. Nothing else accesses these
    /// bytes. All threads of the grid call this.
    pub(super) unsafe fn copy(self) {
        // SAFETY: nothing else accesses the bytes, as the caller guarantees.
        unsafe {
            if (self.from.addr() | self.into.addr()).is_multiple_of(16) {
                copy_both(self, None);
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

    /// Loads this thread's whole vectors of a strip, the first of which is `at`. Nothing writes
    /// these vectors.
    unsafe fn load_rows(self, at: usize) -> [Vec16<u8>; UNROLL] {
        let mut loaded = [Vec16::from_bits([0; 4]); UNROLL];
        for u in 0..UNROLL {
            let at = at + u * strip::ROW;
            if at < self.bytes / 16 {
                // SAFETY: the caller guarantees the vectors of the message, which is aligned.
                loaded[u] = unsafe { mem::load_vec(self.from.wrapping_add(16 * at)) };
            }
        }
        loaded
    }

    /// Stores this thread's whole vectors of a strip, the first of which is `at`. Nothing else
    /// accesses these vectors.
    unsafe fn store_rows(self, at: usize, loaded: [Vec16<u8>; UNROLL]) {
        for u in 0..UNROLL {
            let at = at + u * strip::ROW;
            if at < self.bytes / 16 {
                // SAFETY: the caller guarantees the vectors of the place, which is aligned.
                unsafe { mem::store_vec(self.into.wrapping_add(16 * at), loaded[u]) };
            }
        }
    }

    /// Copies the bytes after the whole vectors. Nothing else accesses these bytes.
    unsafe fn copy_tail(self) {
        for at in self.bytes / 16 * 16..self.bytes {
            // SAFETY: nothing else accesses the bytes, as the caller guarantees.
            unsafe { self.copy_byte(at) };
        }
    }
}
