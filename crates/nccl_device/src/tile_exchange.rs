//! Tiles that ranks push to each other while they compute, without a barrier and without a reset.
//!
//! Every rank has an *inbox*, a window, where peers store tiles, and a flag for each of them. The
//! sender sets the flag to the number of the launch, its [`Epoch`], once the tile is there. The
//! inbox has two *banks*, which take turns: what a launch receives is in one, and the next launch
//! overwrites the other.
//!
//! # What an exchange requires
//!
//! In every launch each rank waits for a tile of each peer, and pushes nothing before the previous
//! kernel of its stream has ended. Then a rank that begins a launch has tiles of each peer's last
//! launch, so the one before that has ended in the peer, and nothing reads the bank any more. A
//! grid whose blocks wait for tiles that other blocks push is launched cooperatively.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::{Coop, DevComm, TileExchange, Window};
//!
//! /// The sum of four numbers of each rank. One block, of a warp.
//! ///
//! /// # Safety
//! ///
//! /// `inbox` has 8 numbers for each rank, and `flags` a word. `state` points to two words of this
//! /// GPU's memory. The words were 0 before the first launch. `mine` and `sum` have four numbers,
//! /// and begin at a multiple of 16 bytes.
//! #[kernel]
//! pub unsafe fn sum_numbers(
//!     comm: DevComm,
//!     inbox: Window<f32>,
//!     flags: Window<u32>,
//!     state: *mut u32,
//!     mine: *const f32,
//!     sum: *mut f32,
//! ) {
//!     let (team, warp) = (comm.lsa_team(), Coop::warp());
//!     // SAFETY: the kernel's contract. Tile `r` is that of rank `r`.
//!     unsafe {
//!         let exchange = TileExchange::begin(&comm, inbox, flags, state);
//!         for peer in team.all_from_self() {
//!             exchange.push(warp, peer, team.rank as u32, 4 * team.rank as usize, mine, 4);
//!         }
//!         let mut sums = [0.0; 4];
//!         for rank in 0..team.n_ranks as usize {
//!             exchange.wait_for(warp, rank as u32);
//!             let theirs = exchange.load_vec(4 * rank).to_bits().map(f32::from_bits);
//!             sums = [0, 1, 2, 3].map(|i: usize| sums[i] + theirs[i]);
//!         }
//!         if warp.thread_rank() == 0 {
//!             mem::store_vec(sum, Vec16::from_bits(sums.map(f32::to_bits)));
//!         }
//!         exchange.end(warp);
//!     }
//! }
//! # fn main() {}
//! ```

use crate::prelude::*;
use cuda_std::tma;

use crate::{Epoch, Flag};

/// Vectors of 16 bytes that a thread has in flight.
const UNROLL: usize = 8;

/// An exchange of tiles in one launch, within the LSA team.
pub struct TileExchange<'a, T> {
    comm: &'a DevComm,
    inbox: Window<T>,
    flags: Window<u32>,
    epoch: Epoch,
}

#[track_callers]
impl<'a, T: Element> TileExchange<'a, T> {
    /// The number of words of an exchange's state.
    pub const STATE: usize = Epoch::WORDS;

    /// Begins a launch. Both banks have the same length, half of the inbox's.
    ///
    /// # Safety
    ///
    /// Each rank's part of `inbox` and each bank begin at a multiple of 16 bytes. `flags` has a
    /// word for each tile that a rank receives, and `state` points to [`STATE`](Self::STATE) words
    /// of this GPU's memory, all 0 before the first launch. The windows have the same lengths in
    /// every rank, and only exchanges with this state use them: one launch at a time, after the
    /// previous one has ended. All blocks of a launch [`end`](Self::end) the exchange.
    pub unsafe fn begin(
        comm: &'a DevComm,
        inbox: Window<T>,
        flags: Window<u32>,
        state: *mut u32,
    ) -> Self {
        // SAFETY: the caller passes words that only this exchange uses.
        Self { comm, inbox, flags, epoch: unsafe { Epoch::begin(state) } }
    }

    /// Returns the bank of this launch, 0 or 1: the first or the second half of the inbox.
    pub fn bank(&self) -> u32 {
        self.epoch.get() % 2
    }

    /// Returns the element `at` of a rank's bank.
    fn element(&self, peer: i32, at: usize) -> *mut T {
        let bank = self.bank() as usize * (self.inbox.len() / 2);
        self.inbox.lsa(peer).as_ptr().wrapping_add(bank + at)
    }

    fn flag(&self, tile: u32) -> Flag<'_> {
        // SAFETY: `begin`'s caller passes flags, and the methods' callers one that exists.
        unsafe { Flag::new(self.comm, self.flags, tile as usize) }
    }

    /// Stores `len` elements to rank `peer`'s bank, from element `at` on, and sets the flag `tile`
    /// there. All threads of the coop call it.
    ///
    /// # Safety
    ///
    /// `from` has the elements, in this GPU's memory. The bank has them too. In both they begin at
    /// a multiple of 16 bytes, and they are whole vectors of 16 bytes. The flag exists, and nothing
    /// else sets it in this launch. Until it is set nothing else accesses these elements.
    pub unsafe fn push(
        &self,
        coop: Coop,
        peer: i32,
        tile: u32,
        at: usize,
        from: *const T,
        len: usize,
    ) {
        let (count, threads) = (len / Vec16::<T>::LANES, coop.size() as usize);
        let into = self.element(peer, at);
        let offset = |vector: usize| vector * Vec16::<T>::LANES;
        let mut first = coop.thread_rank() as usize;
        while first < count {
            let mut vectors = [Vec16::from_bits([0; 4]); UNROLL];
            let mut i = 0;
            while i < UNROLL {
                let vector = first + i * threads;
                if vector < count {
                    // SAFETY: the vector is below `count`, and the caller's `from` has so many.
                    vectors[i] = unsafe { mem::load_vec(from.wrapping_add(offset(vector))) };
                }
                i += 1;
            }
            let mut i = 0;
            while i < UNROLL {
                let vector = first + i * threads;
                if vector < count {
                    // SAFETY: the peer's bank has this vector, and the peer does not read it yet.
                    unsafe { mem::store_vec(into.wrapping_add(offset(vector)), vectors[i]) };
                }
                i += 1;
            }
            first += UNROLL * threads;
        }
        self.flag(tile).post(coop, peer, self.epoch.get());
    }

    /// Does the same as [`push`](Self::push), from shared memory, to each of `peers`: by bulk
    /// copies, for which one thread waits. Needs sm_90. PTX:
    /// `cp.async.bulk.global.shared::cta.bulk_group`.
    ///
    /// # Safety
    ///
    /// The contract is that of [`push`](Self::push); `from` lies in shared memory. It is written
    /// before a [`fence_async_shared`](tma::fence_async_shared) of the writing threads and a
    /// barrier with this thread, and not again before the call returns.
    pub unsafe fn push_shared(
        &self,
        peers: impl Iterator<Item = i32> + Clone,
        tile: u32,
        at: usize,
        from: *const T,
        len: usize,
    ) {
        for peer in peers.clone() {
            let (into, bytes) = (self.element(peer, at), (len * size_of::<T>()) as u32);
            // SAFETY: the caller's tile has these bytes, and the peers do not read the bank yet.
            unsafe { tma::store_bulk(into.cast(), from.cast(), bytes) };
        }
        tma::commit_stores();
        tma::wait_stores::<0>();
        // The stores have ended, so that this thread's release covers them.
        for peer in peers {
            self.flag(tile).post(Coop::thread(), peer, self.epoch.get());
        }
    }

    /// Returns whether a tile has arrived in this rank's bank. Then the calling thread sees it.
    ///
    /// # Safety
    ///
    /// The flag `tile` exists.
    pub unsafe fn has_arrived(&self, tile: u32) -> bool {
        self.flag(tile).is_at_least(self.epoch.get())
    }

    /// Waits until a tile has arrived in this rank's bank. Then all threads of the coop see it.
    ///
    /// # Safety
    ///
    /// The flag `tile` exists.
    pub unsafe fn wait_for(&self, coop: Coop, tile: u32) {
        self.flag(tile).wait_at_least(coop, self.epoch.get());
    }

    /// Loads 16 bytes of this rank's bank, from element `at` on.
    ///
    /// # Safety
    ///
    /// The bytes are in a tile that has arrived, as this thread knows, and begin at a multiple of
    /// 16.
    pub unsafe fn load_vec(&self, at: usize) -> Vec16<T> {
        // SAFETY: the caller passes an element of a tile that has arrived.
        unsafe { mem::load_vec(self.element(self.comm.lsa_team().rank, at)) }
    }

    /// Ends the exchange for this block.
    ///
    /// # Safety
    ///
    /// One coop of each block calls it, once per launch, when no thread of the block uses the
    /// exchange any more.
    pub unsafe fn end(&self, coop: Coop) {
        // SAFETY: the caller's coop has ended its work with this epoch.
        unsafe { self.epoch.end(coop) };
    }
}
