//! The exchange of a product's tiles between ranks, by messages that are their own flags.
//!
//! A warp that multiplies sends what it stores, from the same shared memory by TMA, and waits for
//! nothing but the room there. Three warps that do not multiply take the rows of the block's tiles
//! in turn, and add the peers' to those that are stored. Only of its last tile each multiplying
//! warp adds to its own rows. [`Owners`] says which rank adds to which tile.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for what the peers' blocks with its index send, which compute the same
//! tiles. Warps that multiply wait for nothing outside their block before they have sent all, and
//! do not await the warps that wait for peers. Where the sums are sent too, blocks meet at a
//! barrier behind all of this.
//!
//! # Why a slot is empty when a peer writes it
//!
//! The receiver empties a slot as soon as it has read it, and the peer writes that slot again two
//! launches later. A rank that begins a launch has received all of the peers' messages of the last
//! one, so they have begun that, and have ended the one before: no rank is two launches ahead.
//! Where a rank may have no message of some peer, the barrier says the same.

use core::marker::PhantomData;

use cuda_std::atomic::{AtomicU32, Order as MemoryOrder, Scope};
use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{grid, hint, tma};
use devcomm_types::TensorMap;
use nccl_device::{
    BarrierIndex, Coop, DevComm, Lamport, LamportSlots, MemoryOrder as Visible, Window,
    message_word,
};

use super::owners::{Owners, Problem};
use crate::files::gemm::follow::{Beside, Follow};
use crate::files::gemm::gemm_wgmma::{IDLE_WARPS, MULTIPLYING_WARPS, STORE_M, TILE_M, origin};
use crate::files::gemm::order::{Order, cluster, clusters};

/// The most rows that a warp takes at a time: their loads are in flight together. Their chunks are
/// swizzled in every way.
const MOST_ROWS: usize = 8;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// Nanoseconds between polls: a tile takes 10,000 and more, and the warps that multiply need the
/// power.
pub(super) const PAUSE: u32 = 500;
/// Columns and slots of a tile that is sent.
pub(super) const COLUMNS: u32 = SharedTile::<bf16, STORE_M>::COLUMNS;
pub(super) const SLOTS: u32 = STORE_M * COLUMNS / LANES;

/// In shared memory: how many parts of tiles each multiplying warp has stored, and how many threads
/// have added all that they add.
#[inline(always)]
fn stored() -> *mut u32 {
    shared_array![u32; MULTIPLYING_WARPS as usize + 1]
}

#[inline(always)]
fn ended() -> *mut u32 {
    stored().wrapping_add(MULTIPLYING_WARPS as usize)
}

/// The index of a vector's first element.
#[inline(always)]
fn element(vector: u32) -> usize {
    vector as usize * LANES as usize
}

/// The exchange of `m x n` elements of a product among `N` ranks. There is a slot for each vector
/// of what a rank receives from another one, in the order of the tiles that multiplying warps send.
#[derive(Clone, Copy)]
pub(super) struct Messages<'a, D, const N: usize> {
    pub(super) comm: &'a DevComm,
    pub(super) slots: &'a Window<u32>,
    pub(super) state: *mut u32,
    pub(super) capacity: u32,
    /// This rank's product, and where the sums go: may be the same.
    pub(super) product: *const bf16,
    pub(super) c: *mut bf16,
    /// C in all ranks, if they send the sums to each other.
    pub(super) of_all: Option<&'a Window<bf16>>,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) owners: PhantomData<D>,
}

/// A lane's vectors of a group.
type Vectors = [Vec16<bf16>; MOST_ROWS];

const NOTHING: Vec16<bf16> = Vec16::from_bits([0; 4]);

/// Which they are.
#[derive(Clone, Copy)]
struct Group {
    /// That of the first row, in C, and how many vectors of the product precede C.
    first: u32,
    before: u32,
    /// Vectors from a row to the next.
    stride: u32,
    /// The rows that C has.
    rows: u32,
    /// The slot of the first row's chunk 0, if the group is sent, and the lane's chunk.
    slot: Option<u32>,
    chunk: u32,
    /// The first row's swizzle.
    swizzle: u32,
    /// Whether this rank adds to it.
    is_added: bool,
}

impl Group {
    #[inline(always)]
    fn vector(&self, i: usize) -> Option<u32> {
        ((i as u32) < self.rows).then(|| self.first + i as u32 * self.stride)
    }

    /// The slot of one of `rows` rows.
    #[inline(always)]
    fn slot(&self, i: usize, rows: u32) -> Option<u32> {
        let i = i as u32;
        let first = self.slot.filter(|_| i < rows);
        first.map(|first| first + COLUMNS / LANES * i + (self.chunk ^ (self.swizzle + i)))
    }
}

impl<D: Owners, const N: usize> Messages<'_, D, N> {
    /// Rows that a warp takes at a time: of several peers as many as it has vectors of in flight.
    const ROWS: u32 = (MOST_ROWS / if N == 2 { 1 } else { N }) as u32;
    /// Groups of so many rows in a tile.
    const GROUPS: u32 = TILE_M / Self::ROWS;

    /// Prepares the block's shared memory. All threads of the block call it first.
    #[inline(always)]
    pub(super) fn prepare(&self) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                let mut word = 0;
                while word <= MULTIPLYING_WARPS {
                    mem::store(stored().add(word as usize), 0);
                    word += 1;
                }
            }
        }
        thread::sync_threads();
    }

    #[inline(always)]
    fn problem(&self) -> Problem<N> {
        Problem { team: self.comm.lsa_team(), m: self.m, n: self.n }
    }

    /// The session of this launch.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the previous kernels have ended.
    #[inline(always)]
    pub(super) unsafe fn session(&self) -> Lamport<'_, N> {
        // SAFETY: the caller's contract.
        unsafe {
            let slots = LamportSlots::new(self.comm, *self.slots, self.capacity);
            slots.begin(self.state, D::used(&self.problem()))
        }
    }

    /// Ends the session. If sums are sent, all of C is there on return; a block of which a warp has
    /// exited because the host aborted its wait exits here, as the peers would take its sums for
    /// complete.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All threads of the block call it behind the product, which ends with
    /// a barrier.
    #[inline(always)]
    pub(super) unsafe fn end(&self) {
        if D::RETURNS {
            // SAFETY: no thread changes the word any more.
            if unsafe { mem::load(ended()) } != (MULTIPLYING_WARPS + IDLE_WARPS) * warp::WARP_SIZE {
                thread::exit();
            }
            self.comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(Visible::AcqRel);
        }
        if thread::thread_idx_x() == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.session().end(Coop::thread()) };
        }
    }

    /// A thread has added all that it adds.
    #[inline(always)]
    fn thread_ends(&self) {
        if D::RETURNS {
            // SAFETY: the word is one of the block's.
            let ended = unsafe { AtomicU32::from_ptr(ended()) };
            ended.fetch_add(1, MemoryOrder::Relaxed, Scope::Cta);
        }
    }

    /// The tiles of this block.
    #[inline(always)]
    pub(super) fn tiles(order: Order) -> u32 {
        order.count().saturating_sub(cluster()).div_ceil(clusters())
    }

    #[inline(always)]
    fn is_own(&self, owner: u32) -> bool {
        owner == self.problem().rank()
    }

    /// A group of the block's tiles, counted from the first one of its first tile.
    #[inline(always)]
    fn group(&self, order: Order, number: u32) -> Group {
        let (row, column) = origin(order, cluster() + number / Self::GROUPS * clusters());
        let row = row + number % Self::GROUPS * Self::ROWS;
        let (stride, column) = (self.n / LANES, column / LANES + warp::lane_id());
        // Tiles are sent as a whole.
        let is_sent =
            row - row % STORE_M < self.m && column * LANES < self.n.next_multiple_of(COLUMNS);
        let left = self.m.saturating_sub(row);
        let place = D::place(&self.problem(), row, column * LANES);
        let slot = place.slot + row % STORE_M * (COLUMNS / LANES);
        Group {
            first: place.row.wrapping_mul(stride).wrapping_add(column),
            before: (row - place.row) * stride,
            stride,
            rows: if column < stride { left.min(Self::ROWS) } else { 0 },
            slot: is_sent.then_some(slot),
            chunk: column % (COLUMNS / LANES),
            swizzle: row % MOST_ROWS as u32,
            is_added: self.is_own(place.owner),
        }
    }

    /// Waits until a multiplying warp has stored a group.
    #[inline(always)]
    fn wait_for(&self, number: u32) {
        let (tile, warp) = (number / Self::GROUPS, number % Self::GROUPS * Self::ROWS / STORE_M);
        self.wait_for_part(tile, warp);
    }

    /// Waits until a multiplying warp has stored its part of a tile.
    #[inline(always)]
    pub(super) fn wait_for_part(&self, tile: u32, warp: u32) {
        self.comm.wait_until(Coop::warp(), || {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            let is_stored = unsafe {
                let stored = stored().add(warp as usize);
                mem::load_ordered(stored, MemoryOrder::Acquire, Scope::Cta) > tile
            };
            if !is_stored {
                thread::nanosleep(PAUSE);
            }
            is_stored
        });
    }

    /// Loads this rank's part of a row of a group, if C has the row.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and the group was stored.
    #[inline(always)]
    unsafe fn load(&self, group: Group, row: usize) -> Option<Vec16<bf16>> {
        let vector = group.vector(row)?;
        // Opaque: as addresses, they would take registers from here to the sums' stores.
        let from = self.product.wrapping_add(element(hint::opaque(group.before + vector)));
        // SAFETY: the caller's contract. TMA has stored it, past the L1 cache.
        Some(unsafe { mem::load_vec_relaxed(from, Scope::Gpu) })
    }

    /// Adds the ranks' parts of a group, and stores the sums.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and the group was stored. One warp calls it.
    #[inline(always)]
    unsafe fn add(&self, session: &Lamport<'_, N>, group: Group) {
        let own = self.problem().rank() as usize;
        if N == 2 {
            // SAFETY: the caller's contract.
            return unsafe { self.add_two(session, own ^ 1, group) };
        }
        // The vectors of all ranks, of which each has so many rows.
        let rows = Self::ROWS as usize;
        let mut parts = [NOTHING; MOST_ROWS];
        let mut at = 0;
        while at < MOST_ROWS {
            if at / rows == own {
                // SAFETY: the caller's contract.
                parts[at] = unsafe { self.load(group, at % rows) }.unwrap_or(NOTHING);
            }
            at += 1;
        }
        let sent = |at| {
            let slot = if at / rows == own { None } else { group.slot(at % rows, Self::ROWS) };
            slot.map(|slot| (at / rows, slot))
        };
        // SAFETY: the caller's contract.
        let parts = unsafe { session.receive_each(parts, sent, PAUSE) };
        // In the order of the ranks, whoever adds.
        let mut sums = [NOTHING; MOST_ROWS];
        let mut row = 0;
        while row < rows {
            let (mut sum, mut rank) = ([0.0; LANES as usize], 0);
            while rank < N {
                bf16::add(&mut sum, parts[rank * rows + row]);
                rank += 1;
            }
            sums[row] = bf16::narrow(sum);
            row += 1;
        }
        // SAFETY: the caller's contract.
        unsafe {
            match self.of_all {
                None => Self::store(self.c, group, &sums),
                Some(c) => {
                    for rank in self.comm.lsa_team().all_from_self() {
                        Self::store(c.lsa(rank).as_ptr(), group, &sums);
                    }
                }
            }
        }
    }

    /// As [`add`](Self::add), with one peer.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    unsafe fn add_two(&self, session: &Lamport<'_, N>, peer: usize, group: Group) {
        let mut ours = [NOTHING; MOST_ROWS];
        let mut i = 0;
        // SAFETY: the caller's contract.
        unsafe {
            while i < MOST_ROWS {
                ours[i] = self.load(group, i).unwrap_or(NOTHING);
                i += 1;
            }
            let theirs: Vectors =
                session.receive_several(peer, |i| group.slot(i, Self::ROWS), PAUSE);
            i = 0;
            while i < MOST_ROWS {
                if let Some(vector) = group.vector(i) {
                    let mut sum = bf16::widen(ours[i]);
                    bf16::add(&mut sum, theirs[i]);
                    mem::store_vec(self.c.wrapping_add(element(vector)), bf16::narrow(sum));
                }
                i += 1;
            }
        }
    }

    /// Stores the sums of a group to a C.
    ///
    /// # Safety
    ///
    /// C is as this rank's, and only this warp stores the group.
    #[inline(always)]
    unsafe fn store(c: *mut bf16, group: Group, sums: &Vectors) {
        let mut i = 0;
        while i < Self::ROWS as usize {
            if let Some(vector) = group.vector(i) {
                // SAFETY: the caller's contract.
                unsafe { mem::store_vec(c.wrapping_add(element(vector)), sums[i]) };
            }
            i += 1;
        }
    }
}

impl<D: Owners, const N: usize> Follow for Messages<'_, D, N> {
    const BESIDE: Beside = if N == 2 { Beside::Sums } else { Beside::SumsOfSeveral };

    #[inline(always)]
    fn order(&self, rows: u32, columns: u32) -> Order {
        D::order(&self.problem(), rows, columns)
    }

    /// As the peers receive it, so that all ranks add the same zeros.
    #[inline(always)]
    fn word(&self, word: u32) -> u32 {
        message_word(word)
    }

    #[inline(always)]
    #[track_caller]
    unsafe fn keep<O>(&self, c: &TensorMap, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        if self.is_own(D::place(&self.problem(), row, column).owner) {
            // SAFETY: the caller's contract.
            unsafe { tile.store(c, row, column) };
        }
    }

    #[inline(always)]
    unsafe fn send<O>(&self, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        let problem = self.problem();
        let place = D::place(&problem, row, column);
        if let Some(distance) = D::receiver(&problem, place)
            && row < self.m
            && column < self.n
        {
            // SAFETY: the caller's contract. The launches before this one have ended.
            unsafe {
                let slots = LamportSlots::<N>::new(self.comm, *self.slots, self.capacity);
                slots.join(self.state).send_tile(distance, place.slot, tile);
            }
        }
        tma::commit_stores();
    }

    #[inline(always)]
    fn stored(&self, warp: u32, tiles: u32) {
        // SAFETY: the word is one of the block's, and this thread's to write.
        unsafe {
            let stored = stored().add(warp as usize);
            mem::store_ordered(stored, tiles, MemoryOrder::Release, Scope::Cta);
        }
    }

    #[inline(always)]
    unsafe fn beside(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        let end = Self::tiles(order).saturating_sub(1) * Self::GROUPS;
        // SAFETY: the caller's contract. The groups are this warp's.
        unsafe {
            let session = self.session();
            let mut number = index;
            while number < end {
                let group = self.group(order, number);
                if group.is_added {
                    self.wait_for(number);
                    self.add(&session, group);
                }
                number += IDLE_WARPS;
            }
        }
        self.thread_ends();
    }

    #[inline(always)]
    unsafe fn last(&self, order: Order, warp: u32) {
        if let Some(last) = Self::tiles(order).checked_sub(1) {
            let number = last * Self::GROUPS + warp * (STORE_M / Self::ROWS);
            // SAFETY: the caller's contract. The groups are this warp's.
            unsafe {
                warp::sync();
                let session = self.session();
                if N == 2 {
                    // All ranks' last tiles are their own.
                    self.add(&session, self.group(order, number));
                    self.add(&session, self.group(order, number + 1));
                    return self.thread_ends();
                }
                // Not unrolled, which would take more registers.
                let end = hint::opaque(number + STORE_M / Self::ROWS);
                let mut number = number;
                while number < end {
                    let group = self.group(order, number);
                    if group.is_added {
                        self.add(&session, group);
                    }
                    number += 1;
                }
            }
        }
        self.thread_ends();
    }
}
