//! Messages of floats that are their own flags, within the LSA team.
//!
//! A *slot* is 16 bytes of a rank's memory that is [`EMPTY`] until a peer stores a vector there.
//! The sender replaces a word of the vector that is [`EMPTY`] by 0, which changes at most the sign
//! of a zero; so a slot with no such word has arrived whole, and all its bytes are payload. No
//! barrier or fence is needed, and a message takes one-way latency.
//!
//! Three *banks* of slots take turns: in a launch, one receives messages, and the one of the
//! previous launch is cleared, to be used by the launch after the next one.
//!
//! # What a session requires
//!
//! In every launch each rank sends at least one vector to every peer, and receives every vector
//! that was sent to it: then a peer's message implies that the peer has received all messages of
//! the previous launch.
//!
//! # Example
//!
//! ```
//! use cuda_std::vector::Accumulate;
//! use cuda_std::{grid, prelude::*};
//! use nccl_device::{Coop, DevComm, LamportSlots, Window};
//!
//! /// The sum of a vector for each thread of a block over two ranks.
//! ///
//! /// # Safety
//! ///
//! /// `slots` and `state` are for two ranks and 1,024 slots. `input` and `output` have a vector
//! /// for each thread.
//! #[kernel]
//! pub unsafe fn sum(
//!     comm: DevComm,
//!     slots: Window<u32>,
//!     state: *mut u32,
//!     input: *const f32,
//!     output: *mut f32,
//! ) {
//!     let thread = thread::thread_idx_x();
//!     // SAFETY: the kernel's contract.
//!     unsafe {
//!         let slots = LamportSlots::<2>::new(&comm, slots, 1024);
//!         grid::wait_for_previous();
//!         let mine = mem::load_vec(input.add(4 * thread as usize));
//!         let session = slots.begin(state, thread::block_dim_x());
//!         session.send(1, thread, mine);
//!         if thread < session.to_clear() {
//!             session.clear(thread);
//!         }
//!         let [left, right] = session.receive_all(thread, mine).map(f32::widen);
//!         let sum = [0, 1, 2, 3].map(|i: usize| left[i] + right[i]);
//!         mem::store_vec(output.add(4 * thread as usize), f32::narrow(sum));
//!         thread::sync_threads();
//!         session.end(Coop::cta());
//!     }
//! }
//! # fn main() {}
//! ```

use cuda_std::atomic::Scope;
use cuda_std::vector::Vec16;
use cuda_std::{mem, thread};
use devcomm_types::{Element, WaitFor, WaitKind};

use crate::wait::{Deadline, finish, poll};
use crate::{Coop, DevComm, Epoch, LsaPtr, Window};

/// The value of a word of a slot without a message: -0 in `f32`.
pub const EMPTY: u32 = 0x8000_0000;

/// Banks of slots.
const BANKS: u32 = 3;

/// Words of a slot.
const SLOT: usize = 4;

/// The memory of Lamport messages among the `N` ranks of the LSA team: slots in a window.
#[derive(Clone, Copy)]
pub struct LamportSlots<'a, const N: usize> {
    comm: &'a DevComm,
    /// The slots of this rank and of those after it.
    parts: [LsaPtr<u32>; N],
    /// Slots for a source rank in a bank.
    capacity: u32,
}

impl<'a, const N: usize> LamportSlots<'a, N> {
    /// The words of the window for `capacity` slots for each source rank, all [`EMPTY`] before the
    /// first launch.
    #[must_use]
    pub const fn words(capacity: usize) -> usize {
        BANKS as usize * N * capacity * SLOT
    }

    /// The slots of a window. Reads nothing that a kernel writes: a dependent launch calls it
    /// before it waits.
    ///
    /// # Safety
    ///
    /// The team has `N` ranks, and each rank's part of the window the [`words`](Self::words).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn new(comm: &'a DevComm, window: Window<u32>, capacity: u32) -> Self {
        let team = comm.lsa_team();
        let mut parts = [window.local(); N];
        let mut distance = 1;
        while distance < N {
            parts[distance] = window.lsa(team.rotated(distance as i32));
            distance += 1;
        }
        Self { comm, parts, capacity }
    }

    /// Begins a launch that uses `used` slots for each source rank. Traps if there are fewer.
    ///
    /// # Safety
    ///
    /// `state` points to [`Lamport::STATE`] words of this GPU's memory, 0 before the first launch,
    /// which belong to the window. One launch at a time uses them, all ranks with the same
    /// arguments. All threads of the grid call this, and one coop of each block [`Lamport::end`].
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn begin(self, state: *mut u32, used: u32) -> Lamport<'a, N> {
        assert!(used <= self.capacity, "a launch uses more slots than there are");
        // SAFETY: the caller's contract.
        unsafe {
            let epoch = Epoch::begin(state);
            let bank = epoch.get() % BANKS;
            let cleared = (bank + BANKS - 1) % BANKS;
            let used_in = |bank: u32| state.add(Epoch::WORDS + bank as usize);
            let previous = mem::load(used_in(cleared));
            if thread::index_1d() == 0 {
                mem::store(used_in(bank), used);
            }
            Lamport { slots: self, epoch, bank, cleared, previous }
        }
    }
}

/// A session of a launch.
pub struct Lamport<'a, const N: usize> {
    slots: LamportSlots<'a, N>,
    epoch: Epoch,
    /// The bank that receives, and the one that is cleared.
    bank: u32,
    cleared: u32,
    /// How many slots the previous launch has used.
    previous: u32,
}

impl<const N: usize> Lamport<'_, N> {
    /// The words of a session's state: those of an [`Epoch`], and for each bank the number of slots
    /// that were used.
    pub const STATE: usize = Epoch::WORDS + BANKS as usize;

    /// This rank.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn me(&self) -> usize {
        self.slots.comm.lsa_team().rank as usize
    }

    /// The address of the slot of source rank `source` in one of the parts.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot(&self, part: usize, bank: u32, source: usize, slot: u32) -> *mut u32 {
        let index = (bank as usize * N + source) * self.slots.capacity as usize + slot as usize;
        self.slots.parts[part].as_ptr().wrapping_add(SLOT * index)
    }

    /// Sends a vector to a slot of the rank that is `distance` after this one, modulo `N`. If all
    /// ranks begin with 1, they send to different ranks.
    ///
    /// # Safety
    ///
    /// `distance` is from 1 to `N - 1`. `slot` is below the number of slots that the launch uses,
    /// and no other thread sends to it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn send<T: Element>(&self, distance: usize, slot: u32, vector: Vec16<T>) {
        let full = vector.to_bits().map(|word| if word == EMPTY { 0 } else { word });
        let to = self.slot(distance, self.bank, self.me(), slot);
        // SAFETY: the caller's contract.
        unsafe { mem::store_vec_relaxed(to, Vec16::from_bits(full), Scope::Sys) };
    }

    /// The slots of each source rank that this launch has to [clear](Self::clear).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn to_clear(&self) -> u32 {
        self.previous
    }

    /// Clears a slot of all source ranks, below [`to_clear`](Self::to_clear).
    ///
    /// # Safety
    ///
    /// The slot is below that number, and no other thread of this launch clears it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn clear(&self, slot: u32) {
        let me = self.me();
        let mut source = 0;
        while source < N {
            if source != me {
                let slot = self.slot(0, self.cleared, source, slot);
                // SAFETY: the caller's contract: no peer sends to this bank before it has received
                // messages of the next launch.
                unsafe { mem::store_vec(slot, Vec16::from_bits([EMPTY; 4])) };
            }
            source += 1;
        }
    }

    /// Waits for the vectors that all ranks sent to a slot, and returns them in the order of the
    /// ranks, with `mine` for this one.
    ///
    /// # Safety
    ///
    /// The slot is below the number of slots that the launch uses, and each peer sends to it.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn receive_all<T: Element>(&self, slot: u32, mine: Vec16<T>) -> [Vec16<T>; N] {
        let me = self.me();
        let mut vectors = [mine; N];
        self.wait(slot, || {
            let mut all = true;
            let mut rank = 0;
            while rank < N {
                if rank != me {
                    // SAFETY: the caller's contract.
                    let (vector, has_arrived) = unsafe { self.poll(rank, slot) };
                    all &= has_arrived;
                    vectors[rank] = vector;
                }
                rank += 1;
            }
            all
        });
        vectors
    }

    /// Waits for the vector that one rank sent to a slot.
    ///
    /// # Safety
    ///
    /// As [`receive_all`](Self::receive_all), for this peer only.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn receive<T: Element>(&self, source: usize, slot: u32) -> Vec16<T> {
        let mut vector = Vec16::from_bits([EMPTY; 4]);
        self.wait(slot, || {
            // SAFETY: the caller's contract.
            let (now, has_arrived) = unsafe { self.poll(source, slot) };
            vector = now;
            has_arrived
        });
        vector
    }

    /// What a slot holds, and whether that is a message.
    ///
    /// # Safety
    ///
    /// The contract of [`receive`](Self::receive).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    unsafe fn poll<T: Element>(&self, source: usize, slot: u32) -> (Vec16<T>, bool) {
        let from = self.slot(0, self.bank, source, slot);
        // SAFETY: the caller's contract; peers store whole words.
        let bits = unsafe { mem::load_vec_relaxed(from, Scope::Sys) }.to_bits();
        let [a, b, c, d] = bits;
        let has_arrived = a != EMPTY && b != EMPTY && c != EMPTY && d != EMPTY;
        (Vec16::from_bits(bits), has_arrived)
    }

    /// Waits for messages in a slot.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn wait(&self, slot: u32, done: impl FnMut() -> bool) {
        let what = || WaitFor {
            kind: WaitKind::Lamport,
            index: slot,
            context: 0,
            peer: -1,
            wanted: 0,
            seen: 0,
        };
        let outcome = poll(self.slots.comm, Deadline::NEVER, done, what);
        finish(Coop::thread(), outcome);
    }

    /// Ends the session for this block, after its last message.
    ///
    /// # Safety
    ///
    /// The threads of the coop call this together, one coop of each block and once per launch,
    /// after a barrier of all threads of the block that have sent, received or cleared.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn end(&self, coop: Coop) {
        // SAFETY: the caller's contract.
        unsafe { self.epoch.end(coop) };
    }
}
