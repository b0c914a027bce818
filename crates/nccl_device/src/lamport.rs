//! Messages of floats without separate flags, within the LSA team: the protocol that is named after
//! Leslie Lamport.
//!
//! A *slot* is 16 bytes of a rank's memory that is [`EMPTY`] until a peer stores a vector there.
//! The sender replaces a word that is [`EMPTY`] by 0, which changes at most the sign of a zero in
//! `f32`, `f16` and `bf16`; so a slot with no such word has arrived whole. All its bytes are
//! payload, no barrier or fence is needed, since nothing but the message is read because of it, and
//! it takes one-way latency.
//!
//! Two *banks* of slots take turns: a launch uses one, and the thread that has received a message
//! empties its slot, which another message reaches two launches later.
//!
//! # What a session requires
//!
//! In every launch each rank sends at least one vector to every peer, and receives every vector
//! that was sent to it. So a rank that begins launch `n` has messages of every peer's launch
//! `n - 1`, and the peer's launch `n - 2`, which emptied the slots of the same bank, has ended. The
//! end of that kernel, and not the messages, orders the stores that emptied the slots before this
//! rank's stores to them. Any other message that each peer sends in every launch will do too.
//!
//! A launch may be two kernels, of which the first one sends and the second one receives: then only
//! the second one ends the session.
//!
//! # Example
//!
//! ```
//! use cuda_std::vector::Accumulate;
//! use cuda_std::{grid, prelude::*};
//! use nccl_device::{Coop, DevComm, LamportMemory, LamportSlots};
//!
//! /// The sum of a vector for each thread of a block over two ranks.
//! ///
//! /// # Safety
//! ///
//! /// `memory` is for two ranks. `input` and `output` have a vector for each thread.
//! #[kernel]
//! pub unsafe fn sum(
//!     comm: DevComm,
//!     memory: LamportMemory,
//!     input: *const f32,
//!     output: *mut f32,
//! ) {
//!     let thread = thread::thread_idx_x();
//!     // SAFETY: the kernel's contract.
//!     unsafe {
//!         let slots = LamportSlots::<2>::new(&comm, &memory);
//!         grid::wait_for_previous();
//!         let mine = mem::load_vec(input.add(4 * thread as usize));
//!         let session = slots.begin(thread::block_dim_x());
//!         session.send(1, thread, mine);
//!         thread::sync_threads();
//!         session.end(Coop::cta());
//!         let [left, right] = session.receive_all(thread, mine).map(f32::widen);
//!         let sum = [0, 1, 2, 3].map(|i: usize| left[i] + right[i]);
//!         mem::store_vec(output.add(4 * thread as usize), f32::narrow(sum));
//!     }
//! }
//! # fn main() {}
//! ```

mod memory;
mod message;
#[cfg(not(target_arch = "nvptx64"))]
mod simulated;
mod slots;

use crate::prelude::*;
use cuda_std::atomic::AtomicU32;
use cuda_std::tile::SharedTile;

#[cfg(not(target_arch = "nvptx64"))]
pub use self::memory::LamportMemoryArgs;
pub use self::memory::{LamportMemory, lamport_words};
use self::message::is_message;
pub use self::message::{EMPTY, message, message_word};
pub use self::slots::LamportSlots;
use crate::LsaPtr;
use crate::flag::is_last_block;
use crate::wait::poll_by;

/// The value of `N` if the number of ranks is known only when the kernel runs.
pub const ANY_RANKS: usize = 0;

/// Banks of slots.
const BANKS: u32 = 2;

/// Offsets of the words of a session's state: how many blocks of this launch have ended the
/// session, and how many launches there were before it, modulo 2^32.
const ENDED: usize = 0;
const LAUNCHES: usize = 1;

/// Words of a slot.
const SLOT: usize = 4;

/// Whether a poll of several slots ends at the first one without a message: so the simulator's
/// reports show that one.
const STOPS_AT_MISSING: bool = cfg!(not(target_arch = "nvptx64"));

/// Returns the number of source ranks with slots of their own: with two ranks only the peer sends.
const fn sources(ranks: usize) -> usize {
    if ranks == 2 { 1 } else { ranks }
}

/// A session of a launch. A thread whose wait the host aborts exits the kernel if `EXITS`, or else
/// goes on.
#[derive(Clone, Copy)]
pub struct Lamport<'a, const N: usize, const EXITS: bool = true> {
    slots: LamportSlots<'a, N>,
    launch: u32,
    bank: u32,
    /// The number of slots with which it has begun, for the simulator's checks.
    #[cfg(not(target_arch = "nvptx64"))]
    used: u32,
}

impl<'a, const N: usize> Lamport<'a, N> {
    /// The words of a session's state.
    pub const STATE: usize = 2;

    /// Returns the session with waits after whose abort a thread goes on instead of exiting: for
    /// threads that others of their block or cluster wait for at a named barrier or an mbarrier.
    /// Vectors that have not arrived then have any bits. The host's report does not name the wait:
    /// a record of it would take registers from the values that are live there.
    #[must_use]
    pub fn continue_after_abort(self) -> Lamport<'a, N, false> {
        let Self { slots, launch, bank, .. } = self;
        Lamport {
            slots,
            launch,
            bank,
            #[cfg(not(target_arch = "nvptx64"))]
            used: self.used,
        }
    }
}

#[track_callers]
impl<const N: usize, const EXITS: bool> Lamport<'_, N, EXITS> {
    /// Returns how many launches there were before this one, modulo 2^32: the same in all ranks,
    /// and its lowest bit is the bank.
    pub fn launch(&self) -> u32 {
        self.launch
    }

    /// Returns this rank's number in the LSA team.
    pub(crate) fn me(&self) -> usize {
        self.slots.comm.lsa_team().rank as usize
    }

    /// Returns the address of the slot of source rank `source` in the part of the rank at a
    /// distance.
    fn slot(&self, distance: usize, source: usize, slot: u32) -> *mut u32 {
        self.in_part(self.slots.part(distance), source, slot)
    }

    /// Does the same as [`slot`](Self::slot), in the part of a rank.
    fn in_part(&self, part: LsaPtr<u32>, source: usize, slot: u32) -> *mut u32 {
        let sources = sources(self.slots.ranks());
        let source = if sources == 1 { 0 } else { source };
        let place = self.bank as usize * sources + source;
        let index = place * self.slots.capacity as usize + slot as usize;
        part.as_ptr().wrapping_add(SLOT * index)
    }

    /// Sends a vector to a slot of the rank that is `distance` after this one, modulo the number of
    /// ranks. If all ranks begin with 1, they send to different ranks.
    ///
    /// # Safety
    ///
    /// `distance` is below the number of ranks. It is not 0, which is this rank, if there are two.
    /// `slot` is below the number of slots that the launch uses, and no other thread sends to it.
    pub unsafe fn send<T: Element>(&self, distance: usize, slot: u32, vector: Vec16<T>) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_empty(distance, slot);
        let to = self.slot(distance, self.me(), slot);
        // SAFETY: the caller's thread alone fills this slot in this launch.
        unsafe { mem::store_vec_relaxed(to.cast(), message(vector), Scope::Sys) };
    }

    /// Sends a tile in shared memory, whose words are [`message`]s, to the slots from `slot` on:
    /// one for each 16 bytes, in the order in which they lie there. It is a part of the thread's
    /// bulk group.
    ///
    /// # Safety
    ///
    /// The contract is that of [`send`](Self::send), for each of the slots, and
    /// [`SharedTile::store_swizzled`].
    pub unsafe fn send_tile<T, const ROWS: u32>(
        &self,
        distance: usize,
        slot: u32,
        tile: SharedTile<T, ROWS>,
    ) {
        #[cfg(not(target_arch = "nvptx64"))]
        for i in 0..SharedTile::<T, ROWS>::BYTES / 16 {
            self.check_empty(distance, slot + i);
        }
        // This does not read `parts`: an index that is not constant would move it to memory.
        let part = self.slots.window.lsa(self.slots.comm.lsa_team().rotated(distance as i32));
        // SAFETY: the caller's thread alone fills this slot in this launch.
        unsafe { tile.store_swizzled(self.in_part(part, self.me(), slot)) };
    }

    /// Waits for the vectors that all ranks sent to a slot, empties it, and returns them in the
    /// order of the ranks, with `mine` for this one: a [`message`], if all ranks are to have the
    /// same bits. `N` is not [`ANY_RANKS`].
    ///
    /// # Safety
    ///
    /// The slot is below the number of slots that the launch uses, each peer sends to it, and no
    /// other thread receives from it.
    pub unsafe fn receive_all<T: Element>(&self, slot: u32, mine: Vec16<T>) -> [Vec16<T>; N] {
        let mut vectors = [mine; N];
        // SAFETY: the caller's thread alone empties this slot in this launch.
        unsafe { self.receive_in_order(slot, mine, |rank, vector| vectors[rank] = vector) };
        vectors
    }

    /// Does the same as [`receive_all`](Self::receive_all), but calls `each` with each rank and its
    /// vector, in the order of the ranks. It takes fewer registers for many ranks.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive_all`](Self::receive_all).
    pub unsafe fn receive_in_order<T: Element>(
        &self,
        slot: u32,
        mine: Vec16<T>,
        mut each: impl FnMut(usize, Vec16<T>),
    ) {
        const { assert!(N != ANY_RANKS, "the number of ranks is not a constant") };
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_slot(slot);
        let me = self.me();
        if N == 2 {
            // SAFETY: the caller's thread alone empties this slot in this launch.
            let theirs = unsafe { self.receive(1 - me, slot) };
            // An array indexed by `me` would compile to a branch.
            let [first, second] = if me == 0 { [mine, theirs] } else { [theirs, mine] };
            each(0, first);
            each(1, second);
            return;
        }
        // Four ranks are polled at a time: the addresses of more would take registers.
        let mut first = 0;
        while first < N {
            let mut vectors = [mine; 4];
            let peer = move |i| (first + i != me).then_some((first + i, slot));
            self.wait(slot, (4.min(N - first), peer), || {
                let mut i = 0;
                while i < 4 && first + i < N {
                    // All loads are in flight together. This rank's own slot, which no rank uses,
                    // is loaded too: a branch around its load would separate the others.
                    // SAFETY: the caller's contract.
                    vectors[i] = unsafe { self.load(first + i, slot) };
                    if STOPS_AT_MISSING && first + i != me && !is_message(vectors[i]) {
                        return false;
                    }
                    i += 1;
                }
                let (mut all, mut i) = (true, 0);
                while i < 4 && first + i < N {
                    all &= first + i == me || is_message(vectors[i]);
                    i += 1;
                }
                all
            });
            let mut i = 0;
            while i < 4 && first + i < N {
                each(first + i, if first + i == me { mine } else { vectors[i] });
                i += 1;
            }
            first += 4;
        }
        // This loop is not unrolled for many ranks, whose addresses would take registers.
        let (mut rank, ranks) = (0, if N > 4 { hint::opaque_usize(N) } else { N });
        while rank < ranks {
            if rank != me {
                // SAFETY: the caller's thread alone empties this slot in this launch.
                unsafe { self.empty(rank, slot) };
            }
            rank += 1;
        }
    }

    /// Waits for the vector that one rank sent to a slot, and empties it.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive_all`](Self::receive_all), for this peer only.
    pub unsafe fn receive<T: Element>(&self, source: usize, slot: u32) -> Vec16<T> {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_slot(slot);
        let mut vector = Vec16::from_bits([EMPTY; 4]);
        self.wait(slot, (1, move |_| Some((source, slot))), || {
            // SAFETY: the caller's thread alone empties this slot in this launch.
            vector = unsafe { self.load(source, slot) };
            is_message(vector)
        });
        // SAFETY: the caller's thread alone empties this slot in this launch.
        unsafe { self.empty(source, slot) };
        vector
    }

    /// Waits for the vectors that one rank sent to `K` slots, which are polled together, and
    /// empties these slots. `slot` returns the slot of a vector, or `None` for one that no rank
    /// sends: it is 0 in the result. The thread sleeps about `pause` nanoseconds between polls, so
    /// that it loads less often.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive_all`](Self::receive_all), for this peer and each of the
    /// slots.
    pub unsafe fn receive_several<T: Element, const K: usize>(
        &self,
        source: usize,
        slot: impl Fn(usize) -> Option<u32>,
        pause: u32,
    ) -> [Vec16<T>; K] {
        // SAFETY: the caller's thread alone empties this slot in this launch.
        unsafe {
            let nothing = [Vec16::from_bits([0; 4]); K];
            self.receive_each(nothing, |i| slot(i).map(|slot| (source, slot)), pause)
        }
    }

    /// Does the same as [`receive_several`](Self::receive_several), with a rank and a slot for each
    /// vector. Vectors that no rank sends are unchanged. A rank may also send to itself.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive_several`](Self::receive_several), for each of the ranks
    /// and its slot.
    pub unsafe fn receive_each<T: Element, const K: usize>(
        &self,
        mut vectors: [Vec16<T>; K],
        message: impl Fn(usize) -> Option<(usize, u32)>,
        pause: u32,
    ) -> [Vec16<T>; K] {
        #[cfg(not(target_arch = "nvptx64"))]
        for (_, slot) in (0..K).filter_map(&message) {
            self.check_slot(slot);
        }
        // The report of an abort names the first message's slot; it is 0 if no rank sends that one.
        // Slots are opaque, as their addresses would take registers from here to the end.
        self.wait(message(0).map_or(0, |(_, slot)| slot), (K, &message), || {
            let (mut all, mut i) = (true, 0);
            while i < K {
                if let Some((source, slot)) = message(i) {
                    // SAFETY: the caller's thread alone empties this slot in this launch.
                    vectors[i] = unsafe { self.load(source, hint::opaque(slot)) };
                    all &= is_message(vectors[i]);
                    if STOPS_AT_MISSING && !all {
                        break;
                    }
                }
                i += 1;
            }
            if !all && pause > 0 {
                thread::nanosleep(pause);
            }
            all
        });
        let mut i = 0;
        while i < K {
            if let Some((source, slot)) = message(i) {
                // SAFETY: the caller's thread alone empties this slot in this launch.
                unsafe { self.empty(source, hint::opaque(slot)) };
            }
            i += 1;
        }
        vectors
    }

    /// Returns the vector that one rank sent to a slot, if it has arrived: for a wait of one's own
    /// ([`DevComm::wait_until`]), after which the receiver [`empties`](Self::empty) the slot.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive_all`](Self::receive_all), but this peer need not send to
    /// the slot, and another thread may receive from it if the result is not used.
    pub unsafe fn peek<T: Element>(&self, source: usize, slot: u32) -> Option<Vec16<T>> {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_slot(slot);
        // SAFETY: the caller's thread alone empties this slot in this launch.
        let vector = unsafe { self.load(source, slot) };
        is_message(vector).then_some(vector)
    }

    /// Empties a slot.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive`](Self::receive). This thread has read the message.
    pub unsafe fn empty(&self, source: usize, slot: u32) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_slot(slot);
        let slot = self.slot(0, source, slot);
        // SAFETY: the caller's contract: no peer sends to this slot before the launch after next.
        unsafe { mem::store_vec_relaxed(slot, Vec16::<u32>::from_bits([EMPTY; 4]), Scope::Sys) };
    }

    /// Returns what a slot holds.
    ///
    /// # Safety
    ///
    /// The contract is that of [`receive`](Self::receive).
    unsafe fn load<T: Element>(&self, source: usize, slot: u32) -> Vec16<T> {
        let from = self.slot(0, source, slot);
        // SAFETY: the caller's contract; peers store whole words.
        Vec16::from_bits(unsafe { mem::load_vec_relaxed(from, Scope::Sys) }.to_bits())
    }

    /// Waits until `done`. After an abort the thread goes on, or it exits and the host's report
    /// names the slot. The simulator's reports name the first message that is missing: `messages`
    /// are a number, and the source rank and the slot of each, if there is one.
    fn wait(
        &self,
        slot: u32,
        messages: (usize, impl Fn(usize) -> Option<(usize, u32)>),
        done: impl FnMut() -> bool,
    ) {
        #[cfg(target_arch = "nvptx64")]
        let _ = messages;
        let what = || {
            let what = WaitFor { index: slot, ..WaitFor::of(WaitKind::Lamport) };
            #[cfg(not(target_arch = "nvptx64"))]
            let what = self.first_missing((0..messages.0).filter_map(&messages.1), what);
            what
        };
        let outcome = poll_by::<EXITS>(self.slots.comm, Deadline::NEVER, done, what);
        if EXITS {
            finish(Coop::thread(), outcome, CoopCall::new("a wait for a slot"));
        }
    }

    /// Ends the session for this block. Messages may follow, so that no message waits for this: the
    /// next launch begins when they have been received.
    ///
    /// # Safety
    ///
    /// The threads of the coop call this together, one coop of each block and once per launch,
    /// after a barrier of the block's threads that use the session. Each of them has begun it: the
    /// barrier completes their loads of the launch's number, which the last block's call changes.
    pub unsafe fn end(&self, coop: Coop) {
        #[cfg(not(target_arch = "nvptx64"))]
        self.check_end(coop);
        // SAFETY: the caller's contract. Relaxed is enough: the barrier has completed the loads of
        // the launch's number by the block's threads.
        unsafe {
            let state = self.slots.state;
            let ended = state.add(ENDED);
            if coop.thread_rank() == 0 && is_last_block(ended, Order::Relaxed) {
                // To store `self.launch + 1` would take a register from the beginning to here.
                let launches = AtomicU32::from_ptr(state.add(LAUNCHES));
                launches.fetch_add(1, Order::Relaxed, Scope::Gpu);
            }
        }
    }
}
