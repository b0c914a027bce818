//! Parts of a product that the ranks of the LSA team send to each other and add, without a barrier.
//!
//! Every rank computes the same matrix of bf16, and each needs the sum of all. A rank stores its
//! parts of 16 rows and 64 columns to C, and sends each to the peers from shared memory, as
//! [`Lamport`] messages. Warps that have nothing else to do add what arrives to what is stored.
//!
//! # Why it cannot deadlock
//!
//! Who sends waits for no peer. Who adds a part waits for the same part of every peer, and for this
//! rank's, which warps of the same block store that wait for nobody.
//!
//! The guide's chapter about fused kernels has an example.

use cuda_std::atomic::{Order, Scope};
use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{hint, mem, shared_array, thread, warp};

use crate::{Coop, DevComm, Lamport, LamportSlots, Window};

/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// The rows of a swizzle's pattern.
const SWIZZLED: u32 = 8;
/// The most warps of a block that store parts.
const WARPS: u32 = 16;
/// Nanoseconds between polls: warps that multiply need the power.
const PAUSE: u32 = 500;

/// The parts of an `m x n` matrix of bf16 in the `N` ranks of the LSA team.
#[derive(Clone, Copy)]
pub struct PeerTiles<'a, const N: usize> {
    comm: &'a DevComm,
    slots: Window<u32>,
    state: *mut u32,
    capacity: u32,
    c: *mut bf16,
    m: u32,
    n: u32,
}

impl<'a, const N: usize> PeerTiles<'a, N> {
    /// Rows of a part.
    pub const ROWS: u32 = 16;
    /// Columns of a part.
    pub const COLUMNS: u32 = SharedTile::<bf16, 16>::COLUMNS;
    /// Rows that [`PeerSums::add`] adds at a time.
    pub const AT_ONCE: u32 = if N == 2 { 8 } else { 4 };
    const SLOTS: u32 = Self::ROWS * Self::COLUMNS / LANES;

    /// The slots of an `m x n` matrix for each rank that sends, if 32 bits count them.
    #[must_use]
    pub fn slots(m: usize, n: usize) -> Option<u32> {
        let parts = m.div_ceil(Self::ROWS as usize).checked_mul(n.div_ceil(Self::COLUMNS as usize));
        u32::try_from(parts?.checked_mul(Self::SLOTS as usize)?).ok()
    }

    /// The parts of C in this rank. A dependent launch calls it before it waits.
    ///
    /// # Safety
    ///
    /// `slots`, `state` and `capacity` are as [`LamportSlots::new`] and [`LamportSlots::begin`]
    /// need them, with at least [`slots`](Self::slots) for each rank. C has `m x n` elements,
    /// begins at a multiple of 16 bytes, and `n` is a multiple of 8. The ranks' launches have the
    /// same grid, shape and order of tiles. Each part is sent once.
    pub unsafe fn new(
        comm: &'a DevComm,
        slots: Window<u32>,
        state: *mut u32,
        capacity: u32,
        c: *mut bf16,
        [m, n]: [u32; 2],
    ) -> Self {
        Self { comm, slots, state, capacity, c, m, n }
    }

    /// How many tiles each warp has stored.
    fn counters() -> *mut u32 {
        shared_array![u32; WARPS as usize]
    }

    /// Sets the block's counters of [`stored`](Self::stored) to 0. All threads of the block call
    /// it, before any calls another method.
    #[track_caller]
    pub fn prepare(&self) {
        if thread::thread_idx_x() < WARPS {
            // SAFETY: the word is this thread's before the barrier.
            unsafe { mem::store(Self::counters().add(thread::thread_idx_x() as usize), 0) };
        }
        thread::sync_threads();
    }

    /// Says that warp `warp` of the block, below 16, has stored its parts of so many tiles to C,
    /// which TMA has written. One lane calls it.
    #[track_caller]
    pub fn stored(&self, warp: u32, tiles: u32) {
        debug_assert!(warp < WARPS);
        // SAFETY: the word is one of the block's, which only this warp writes.
        unsafe {
            let counter = Self::counters().add((warp % WARPS) as usize);
            mem::store_ordered(counter, tiles, Order::Release, Scope::Cta);
        }
    }

    /// Waits until warp `warp` has [stored](Self::stored) more than so many tiles. All lanes of a
    /// warp call it. The host can abort the wait.
    #[track_caller]
    pub fn wait_stored(&self, warp: u32, tiles: u32) {
        let counter = Self::counters().wrapping_add((warp % WARPS) as usize);
        self.comm.wait_until(Coop::warp(), || {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            let stored = unsafe { mem::load_ordered(counter, Order::Acquire, Scope::Cta) };
            if stored <= tiles {
                thread::nanosleep(PAUSE);
            }
            stored > tiles
        });
    }

    fn slot(&self, row: u32, column: u32) -> u32 {
        let parts = self.n.div_ceil(Self::COLUMNS);
        (row / Self::ROWS * parts + column / Self::COLUMNS) * Self::SLOTS
    }

    /// Sends a part, as it lies in shared memory, to all peers, if C has it: `row` is a multiple of
    /// 16 and `column` of 64. It belongs to the lane's bulk group.
    ///
    /// # Safety
    ///
    /// One lane calls this, once for each part, after the previous kernels. The words of the tile
    /// are as [`message_word`](crate::message_word) makes them, visible to TMA, and not written
    /// before TMA has read them.
    #[track_caller]
    pub unsafe fn send(&self, row: u32, column: u32, part: SharedTile<bf16, 16>) {
        if row >= self.m || column >= self.n {
            return;
        }
        let slot = self.slot(row, column);
        let mut distance = 1;
        while distance < N {
            // SAFETY: the caller's contract, and that of `new`: the slot is one of those used.
            unsafe {
                let slots = LamportSlots::<N>::new(self.comm, self.slots, self.capacity);
                slots.join(self.state).send_tile(distance, slot, part);
            }
            distance += 1;
        }
    }

    /// The sums of this launch.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    #[track_caller]
    pub unsafe fn sums(&self) -> PeerSums<'a, N> {
        let used = self.m.div_ceil(Self::ROWS) * self.n.div_ceil(Self::COLUMNS) * Self::SLOTS;
        // SAFETY: the contract of `new`.
        let session = unsafe {
            LamportSlots::new(self.comm, self.slots, self.capacity).begin(self.state, used)
        };
        PeerSums { tiles: *self, session }
    }

    /// Ends the launch's exchange for this block.
    ///
    /// # Safety
    ///
    /// One thread of each block calls this, once, after a barrier of the block that follows all
    /// parts that its threads send and add.
    #[track_caller]
    pub unsafe fn end(&self) {
        // SAFETY: the caller's contract.
        unsafe { self.sums().session.end(Coop::thread()) };
    }
}

/// The sums of all ranks' parts in one launch.
#[derive(Clone, Copy)]
pub struct PeerSums<'a, const N: usize> {
    tiles: PeerTiles<'a, N>,
    session: Lamport<'a, N>,
}

impl<const N: usize> PeerSums<'_, N> {
    /// Adds what all peers send of [`AT_ONCE`](PeerTiles::AT_ONCE) rows from `row` on, and of 256
    /// columns from `column` on, to what this rank has stored in C, in f32 and in the order of the
    /// ranks, and stores the rounded sums there: all ranks get the same bits. Rows and columns that
    /// C does not have are left out.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call this, and no other warp adds to these elements in this launch.
    /// `row` is a multiple of the number of rows, `column` of 64. This rank's parts
    /// [are stored](PeerTiles::wait_stored).
    #[track_caller]
    pub unsafe fn add(&self, row: u32, column: u32) {
        let PeerTiles { comm, c, m, n, .. } = self.tiles;
        let first = column + LANES * warp::lane_id();
        // Parts are sent as a whole, also where C ends in them.
        let part_row = row - row % PeerTiles::<N>::ROWS;
        let is_sent = part_row < m && first < n.next_multiple_of(PeerTiles::<N>::COLUMNS);
        if !is_sent {
            return;
        }
        let in_part = row % PeerTiles::<N>::ROWS;
        let chunks = PeerTiles::<N>::COLUMNS / LANES;
        let slots = self.tiles.slot(part_row, first) + chunks * in_part;
        let in_swizzle = if PeerTiles::<N>::AT_ONCE == SWIZZLED { 0 } else { in_part % SWIZZLED };
        let slot = |i: usize| {
            let row = i as u32;
            slots + chunks * row + ((warp::lane_id() % chunks) ^ (in_swizzle + row))
        };
        let place = |i: usize| {
            let row = row + i as u32;
            (row < hint::opaque(m) && first < hint::opaque(n)).then(|| {
                // Opaque: as addresses, they would take registers until the sums are stored.
                c.wrapping_add(hint::opaque(row * (n / LANES) + first / LANES) as usize * 8)
            })
        };
        let me = comm.lsa_team().rank as usize;
        // SAFETY: the caller's contract. TMA has stored what is loaded, past the L1 cache.
        unsafe {
            let mut ours = [Vec16::from_bits([0; 4]); 8];
            let mut i = 0;
            while i < PeerTiles::<N>::AT_ONCE as usize {
                if let Some(from) = place(i) {
                    ours[i] = mem::load_vec_relaxed(from, Scope::Gpu);
                }
                i += 1;
            }
            if N == 2 {
                // The order of two numbers makes no difference.
                let theirs: [Vec16<bf16>; 8] =
                    self.session.receive_several(me ^ 1, |i| Some(slot(i)), PAUSE);
                let mut i = 0;
                while i < PeerTiles::<N>::AT_ONCE as usize {
                    let mut sum = bf16::widen(ours[i]);
                    bf16::add(&mut sum, theirs[i]);
                    if let Some(to) = place(i) {
                        mem::store_vec(to, bf16::narrow(sum));
                    }
                    i += 1;
                }
                return;
            }
            let mut sums = [[0.0; LANES as usize]; 4];
            let (mut rank, ranks) = (0, hint::opaque_usize(N));
            while rank < ranks {
                let parts: [Vec16<bf16>; 4] = if rank == me {
                    [ours[0], ours[1], ours[2], ours[3]]
                } else {
                    self.session.receive_several(rank, |i| Some(slot(i)), PAUSE)
                };
                let mut i = 0;
                while i < 4 {
                    bf16::add(&mut sums[i], parts[i]);
                    i += 1;
                }
                rank += 1;
            }
            let mut i = 0;
            while i < 4 {
                if let Some(to) = place(i) {
                    mem::store_vec(to, bf16::narrow(sums[i]));
                }
                i += 1;
            }
        }
    }
}
