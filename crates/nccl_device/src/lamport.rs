//! Messages of floats that are their own flags, within the LSA team.
//!
//! A *slot* is 16 bytes of a rank's memory that is [`EMPTY`] until a peer stores a vector there. The
//! sender replaces a word of the vector that is [`EMPTY`] by 0, which changes at most the sign of a
//! zero; so a slot with no such word has arrived whole, and all its bytes are payload. No barrier or
//! fence is needed, and a message takes one-way latency.
//!
//! Three *banks* of slots take turns: in a launch, one receives messages, and the one of the
//! previous launch is cleared, to be used by the launch after the next one.
//!
//! # What a session requires
//!
//! In every launch each rank sends at least one vector to every peer, and receives every vector that
//! was sent to it: then a peer's message implies that the peer has received all messages of the
//! previous launch.
//!
//! # Example
//!
//! ```
//! use cuda_std::vector::Accumulate;
//! use cuda_std::{grid, prelude::*};
//! use nccl_device::{Coop, DevComm, Lamport, Window};
//!
//! /// The sum of a vector for each thread of a block over two ranks.
//! ///
//! /// # Safety
//! ///
//! /// `slots` has the words of two ranks and a slot for each thread. `input` and `output` have a
//! /// vector for each thread.
//! #[kernel]
//! pub unsafe fn sum(comm: DevComm, slots: Window<u32>, input: *const f32, output: *mut f32) {
//!     grid::wait_for_previous();
//!     let thread = thread::thread_idx_x();
//!     // SAFETY: the kernel's contract.
//!     unsafe {
//!         let session = Lamport::<2>::begin(&comm, slots, thread::block_dim_x(), 1024);
//!         let at = 4 * thread as usize;
//!         let mine = mem::load_vec(input.add(at));
//!         session.send(1, thread, mine);
//!         if thread < session.to_clear() {
//!             session.clear(thread);
//!         }
//!         let [left, right] = session.receive_all(thread, mine).map(f32::widen);
//!         let sum = [0, 1, 2, 3].map(|i: usize| left[i] + right[i]);
//!         mem::store_vec(output.add(at), f32::narrow(sum));
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

/// Words behind the slots: those of the epoch, and the number of slots that were used in each bank.
const HEADER: usize = Epoch::WORDS + BANKS as usize;

/// A session of a launch among the `N` ranks of the LSA team.
pub struct Lamport<'a, const N: usize> {
    comm: &'a DevComm,
    epoch: Epoch,
    /// The slots of this rank and of those after it.
    parts: [LsaPtr<u32>; N],
    /// The bank that receives, and the one that is cleared.
    bank: u32,
    cleared: u32,
    /// Slots for a source rank in a bank.
    slots: u32,
    /// How many of them the previous launch has used.
    previous: u32,
}

impl<'a, const N: usize> Lamport<'a, N> {
    /// The words of the window for this many ranks and slots for each source rank. All but the last
    /// [`HEADER_WORDS`](Self::HEADER_WORDS), which are 0, are [`EMPTY`] before the first launch.
    #[must_use]
    pub const fn words(ranks: usize, slots: usize) -> usize {
        BANKS as usize * ranks * slots * SLOT + HEADER
    }

    /// The last words of the window, which are no slots.
    pub const HEADER_WORDS: usize = HEADER;

    /// Begins a launch that uses `used` of `slots` slots for each source rank.
    ///
    /// # Safety
    ///
    /// The team has `N` ranks. `window` has [`words`](Self::words) of them and `slots`, as described
    /// there, and is used by one launch at a time, with the same arguments in every rank. All threads
    /// of the grid call this, after [`grid::wait_for_previous`](cuda_std::grid::wait_for_previous) in
    /// a dependent launch; one coop of each block calls [`end`](Self::end).
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn begin(comm: &'a DevComm, window: Window<u32>, used: u32, slots: u32) -> Self {
        assert!(used <= slots, "a launch uses more slots than there are");
        let team = comm.lsa_team();
        let mut parts = [window.local(); N];
        let mut distance = 1;
        while distance < N {
            parts[distance] = window.lsa(team.rotated(distance as i32));
            distance += 1;
        }
        // SAFETY: the caller's contract: the words exist, and the next launch follows this one.
        unsafe {
            let header = window.local().as_ptr().add(Self::words(N, slots as usize) - HEADER);
            let epoch = Epoch::begin(header);
            let bank = epoch.get() % BANKS;
            let cleared = (bank + BANKS - 1) % BANKS;
            let used_in = |bank: u32| header.add(Epoch::WORDS + bank as usize);
            let previous = mem::load(used_in(cleared));
            if thread::index_1d() == 0 {
                mem::store(used_in(bank), used);
            }
            Self { comm, epoch, parts, bank, cleared, slots, previous }
        }
    }

    /// This rank.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn me(&self) -> usize {
        self.comm.lsa_team().rank as usize
    }

    /// The address of the slot of source rank `source` in one of the parts.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn slot(&self, part: usize, bank: u32, source: usize, slot: u32) -> *mut u32 {
        let index = (bank as usize * N + source) * self.slots as usize + slot as usize;
        self.parts[part].as_ptr().wrapping_add(SLOT * index)
    }

    /// Sends a vector to a slot of the rank that is `distance` after this one, modulo `N`. If all
    /// ranks begin with 1, they send to different ranks.
    ///
    /// # Safety
    ///
    /// `distance` is from 1 to `N - 1`. `slot` is below the number of slots that the launch uses, and
    /// no other thread sends to it.
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
        let done = || {
            let mut all = true;
            let mut rank = 0;
            while rank < N {
                if rank != me {
                    let from = self.slot(0, self.bank, rank, slot);
                    // SAFETY: the caller's contract; peers store whole words.
                    let vector = unsafe { mem::load_vec_relaxed(from, Scope::Sys) };
                    let [a, b, c, d] = vector.to_bits();
                    all &= a != EMPTY && b != EMPTY && c != EMPTY && d != EMPTY;
                    vectors[rank] = Vec16::from_bits([a, b, c, d]);
                }
                rank += 1;
            }
            all
        };
        let what = || WaitFor {
            kind: WaitKind::Lamport,
            index: slot,
            context: 0,
            peer: -1,
            wanted: 0,
            seen: 0,
        };
        let outcome = poll(self.comm, Deadline::NEVER, done, what);
        finish(Coop::thread(), outcome);
        vectors
    }

    /// Ends the session for this block, after its last message.
    ///
    /// # Safety
    ///
    /// The threads of the coop call this together, one coop of each block and once per launch, after
    /// a barrier of all threads of the block that have sent, received or cleared.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn end(&self, coop: Coop) {
        // SAFETY: the caller's contract.
        unsafe { self.epoch.end(coop) };
    }
}
