//! All-gather, broadcast and all-to-all of short messages within the LSA team in one step, by
//! messages that are their own flags.
//!
//! A slot is empty while a word of it is [`EMPTY`], which may also be payload. So 31 lanes of a
//! warp send 16 bytes each, and the last one sends which words of theirs were [`EMPTY`].

use cuda_std::prelude::*;
use cuda_std::vector::Vec16;
use cuda_std::{grid, hint, mem};
use nccl_device::{Coop, DevComm, EMPTY, Lamport, LamportSlots, Window};

use super::exchange::{Bytes, Messages};
use super::lamport_rmsnorm::clear;

/// The lane that sends marks instead of payload.
const MARKS: u32 = warp::WARP_SIZE - 1;

/// Sends messages between the ranks of the LSA team, which has 2, 4 or 8.
///
/// Messages may have any length and alignment. A message to the own rank is copied, unless it is
/// there. `slots` and `state` are the memory of [`Lamport`] messages, with `capacity` slots for
/// vectors from each rank, of which the launch uses [`slots`].
///
/// Grid: any. Block: a multiple of 32 threads up to 512, one-dimensional. May be a dependent
/// launch. `messages` are the same in every rank.
///
/// # Safety
///
/// `input` has the messages, in ranks that send, and `output` its bytes. Nothing else accesses
/// these until the kernel has ended, and they do not overlap, except that a rank's message to
/// itself may be in its place. `slots` and `state` are as [`LamportSlots`] needs them.
#[kernel(max_threads = 512)]
pub unsafe fn lamport_exchange(
    comm: DevComm,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    input: *const u8,
    output: *mut u8,
    messages: Messages,
) {
    let part = Part { comm: &comm, input, output, messages };
    // SAFETY: the kernel's contract.
    unsafe {
        match comm.lsa_team().n_ranks {
            2 => part.exchange(LamportSlots::<2>::new(&comm, slots, capacity), state),
            4 => part.exchange(LamportSlots::<4>::new(&comm, slots, capacity), state),
            8 => part.exchange(LamportSlots::<8>::new(&comm, slots, capacity), state),
            _ => panic!("the LSA team has 2, 4 or 8 ranks"),
        }
    }
}

/// The slots that a message of this many bytes uses.
#[must_use]
#[inline(always)]
pub const fn slots(bytes: usize) -> usize {
    bytes.div_ceil(16 * MARKS as usize) * warp::WARP_SIZE as usize
}

struct Part<'a> {
    comm: &'a DevComm,
    input: *const u8,
    output: *mut u8,
    messages: Messages,
}

impl Part<'_> {
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn exchange<const N: usize>(&self, slots: LamportSlots<'_, N>, state: *mut u32) {
        let (me, sender) = (self.comm.lsa_team().rank, self.messages.sender);
        let used = self::slots(self.messages.bytes) as u32;
        let threads = thread::grid_dim_x() * thread::block_dim_x();
        let first = thread::index_1d();
        let sends = self.messages.are_from(me);
        grid::launch_next();
        grid::wait_for_previous();
        // SAFETY: the caller's contract. Each slot is used by one thread, and all lanes of a warp
        // use those of a row together.
        unsafe {
            // Loads before the first send, which waits for the number of the launch.
            let mut mine = [Vec16::from_bits([0; 4]); N];
            if sends && first < used {
                mine = self.load(first);
            }
            let session = slots.begin(state, used);
            if sends {
                let mut slot = first;
                while slot < used {
                    self.send(&session, slot, &mine);
                    slot += threads;
                    if slot < used {
                        mine = self.load(slot);
                    }
                }
            } else if first == 0 {
                send_nothing(&session);
            }
            // While the messages are on their way.
            clear(&session);
            let mut slot = first;
            while slot < used {
                if sender == Messages::ALL {
                    self.receive(slot, session.receive_all(slot, Vec16::from_bits([0; 4])));
                } else if !sends {
                    let received = unmarked(session.receive(sender as usize, slot));
                    self.store(sender as i32, slot, received);
                }
                slot += threads;
            }
            if sender != Messages::ALL && first == 0 {
                receive_nothing(&session, [me as usize, sender as usize]);
            }
            thread::sync_threads();
            session.end(Coop::cta());
        }
    }

    /// The payload of a slot, in the order of the distances to the ranks that get it; 0 in the lane
    /// of the marks.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn load<const N: usize>(&self, slot: u32) -> [Vec16<u8>; N] {
        let Messages { bytes: len, input_stride, .. } = self.messages;
        let message = |distance: usize| {
            let to = self.comm.lsa_team().rotated(distance as i32);
            Bytes { address: self.input.wrapping_add(self.messages.input(to)).cast_mut(), len }
        };
        let mut loaded = [Vec16::from_bits([0; 4]); N];
        let Some(at) = vector_of(slot) else { return loaded };
        let are_aligned = (self.input.addr() | input_stride).is_multiple_of(16);
        let mut distance = 0;
        // SAFETY: the caller's contract.
        unsafe {
            if are_aligned && 16 * (at + 1) <= len {
                // All in flight together.
                while distance < N {
                    loaded[distance] =
                        mem::load_vec(message(distance).address.wrapping_add(16 * at));
                    distance += 1;
                }
            } else {
                // A loop that is not unrolled, since a step has many instructions.
                while distance < hint::opaque_usize(N) {
                    let payload = message(distance).load(at);
                    let mut i = 0;
                    while i < N {
                        loaded[i] = if i == distance { payload } else { loaded[i] };
                        i += 1;
                    }
                    distance += 1;
                }
            }
        }
        loaded
    }

    /// Sends it to the peers, and copies the message to this rank.
    ///
    /// # Safety
    ///
    /// The kernel's contract; all lanes of the warp call this together.
    #[inline(always)]
    unsafe fn send<const N: usize>(
        &self,
        session: &Lamport<'_, N>,
        slot: u32,
        mine: &[Vec16<u8>; N],
    ) {
        let me = self.comm.lsa_team().rank;
        let mut distance = 1;
        while distance < N {
            // SAFETY: the caller's contract; only this thread uses the slot.
            unsafe { session.send(distance, slot, marked(mine[distance])) };
            distance += 1;
        }
        let is_there = self.input.wrapping_add(self.messages.input(me)).addr()
            == self.output.wrapping_add(self.messages.output(me)).addr();
        if !is_there {
            // SAFETY: the caller's contract.
            unsafe { self.store(me, slot, mine[0]) };
        }
    }

    /// Stores what the peers have sent to a slot.
    ///
    /// # Safety
    ///
    /// As [`send`](Self::send).
    #[inline(always)]
    unsafe fn receive<const N: usize>(&self, slot: u32, received: [Vec16<u8>; N]) {
        let mut source = 0;
        // A loop that is not unrolled, since a step has many instructions.
        while source < hint::opaque_usize(N) {
            let mut of_source = received[0];
            let mut i = 1;
            while i < N {
                of_source = if i == source { received[i] } else { of_source };
                i += 1;
            }
            // SAFETY: the caller's contract.
            unsafe {
                if source as i32 != self.comm.lsa_team().rank {
                    self.store(source as i32, slot, unmarked(of_source));
                }
            }
            source += 1;
        }
    }

    /// Stores payload from a rank; nothing in the lane of the marks.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    #[inline(always)]
    unsafe fn store(&self, from: i32, slot: u32, payload: Vec16<u8>) {
        let address = self.output.wrapping_add(self.messages.output(from));
        if let Some(at) = vector_of(slot) {
            // SAFETY: the caller's contract.
            unsafe { Bytes { address, len: self.messages.bytes }.store(at, payload) };
        }
    }
}

/// The vector of a message that is sent in a slot; `None` for marks.
#[inline(always)]
fn vector_of(slot: u32) -> Option<usize> {
    let (row, lane) = (slot / warp::WARP_SIZE, slot % warp::WARP_SIZE);
    (lane != MARKS).then_some((row * MARKS + lane) as usize)
}

/// What a lane sends: its payload, or which words of the others' are [`EMPTY`]. The lane of the
/// marks has no such word, so that its bit is never set, and no mark is [`EMPTY`].
///
/// # Safety
///
/// All lanes of the warp call this together.
#[inline(always)]
unsafe fn marked(payload: Vec16<u8>) -> Vec16<u8> {
    // SAFETY: the caller's contract.
    let marks = payload.to_bits().map(|word| unsafe { warp::ballot(word == EMPTY) });
    if warp::lane_id() == MARKS { Vec16::from_bits(marks) } else { payload }
}

/// The payload that a lane has received.
///
/// # Safety
///
/// All lanes of the warp call this together.
#[inline(always)]
unsafe fn unmarked(received: Vec16<u8>) -> Vec16<u8> {
    Vec16::from_bits(received.to_bits().map(|word| {
        // SAFETY: the caller's contract.
        let marks = unsafe { warp::shuffle_idx(word, MARKS) };
        if marks >> warp::lane_id() & 1 == 1 { EMPTY } else { word }
    }))
}

/// Sends a message without payload to each peer: the session requires one.
///
/// # Safety
///
/// One thread of a rank that sends no other messages calls this.
#[inline(always)]
unsafe fn send_nothing<const N: usize>(session: &Lamport<'_, N>) {
    let mut distance = 1;
    while distance < N {
        // SAFETY: the caller's contract; the launch uses at least one slot.
        unsafe { session.send(distance, 0, Vec16::<u8>::from_bits([0; 4])) };
        distance += 1;
    }
}

/// Receives the messages without payload of all ranks but these.
///
/// # Safety
///
/// One thread calls this, and those ranks send them.
#[inline(always)]
unsafe fn receive_nothing<const N: usize>(session: &Lamport<'_, N>, but: [usize; 2]) {
    let mut source = 0;
    while source < N {
        if source != but[0] && source != but[1] {
            // SAFETY: the caller's contract.
            unsafe { session.receive::<u8>(source, 0) };
        }
        source += 1;
    }
}
