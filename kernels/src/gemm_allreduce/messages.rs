//! The exchange of a product's tiles between ranks, by messages that are their own flags.
//!
//! A warp that multiplies sends what it stores, from the same shared memory by TMA, and waits for
//! nothing but the room there. Three warps that do not multiply take the rows of the block's tiles
//! in turn, and add what the ranks computed. Of two ranks they load this rank's part, which is
//! stored; one of several ranks sends its part to itself too, so that all parts are alike. Only of
//! its last tile each multiplying warp adds to its own rows. [`Owners`] says which rank adds to
//! which tile.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for what the peers' blocks with its index send, which compute the same
//! tiles. Warps that multiply wait for nothing outside their block before they have sent all, and
//! never for warps that await the peers' messages. Where the sums are sent too, the blocks of an
//! index meet at a barrier behind all of this, and when they begin: there only one warp, which has
//! done nothing before, waits for the other ranks' blocks, and the others for it before they add.
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
use crate::files::gemm::follow::{Adding, Follow};
use crate::files::gemm::gemm_wgmma::{IDLE_WARPS, MULTIPLYING_WARPS, STORE_M, TILE_M, origin};
use crate::files::gemm::order::{Order, cluster, clusters};

/// Vectors of a lane that are in flight together.
const AT_ONCE: usize = 8;
/// Rows that a warp takes at a time of several peers: those of two ranks are in flight together.
const OF_SEVERAL: usize = 4;
/// Rows of a part whose chunks are swizzled in different ways.
const SWIZZLED: u32 = 8;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// Nanoseconds between polls: a tile takes 10,000 and more, and the warps that multiply need the
/// power.
pub(super) const PAUSE: u32 = 500;
/// Columns and slots of a tile that is sent.
pub(super) const COLUMNS: u32 = SharedTile::<bf16, STORE_M>::COLUMNS;
pub(super) const SLOTS: u32 = STORE_M * COLUMNS / LANES;

/// Words of a block in shared memory.
const WORDS: usize = MULTIPLYING_WARPS as usize + 2;

/// How many parts of tiles each multiplying warp has stored.
fn stored() -> *mut u32 {
    shared_array![u32; WORDS]
}

/// How many threads have added all that they add.
fn ended() -> *mut u32 {
    stored().wrapping_add(WORDS - 2)
}

/// Whether the ranks have met.
fn met() -> *mut u32 {
    stored().wrapping_add(WORDS - 1)
}

/// The index of a vector's first element.
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
    /// This rank's product, which is kept if there are two ranks, and where the sums go: may be the
    /// same.
    pub(super) product: *const bf16,
    pub(super) c: *mut bf16,
    /// C in all ranks, if they send the sums to each other.
    pub(super) of_all: Option<&'a Window<bf16>>,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) owners: PhantomData<D>,
}

/// Vectors of a lane that are in flight together.
type Vectors = [Vec16<bf16>; AT_ONCE];

const NOTHING: Vec16<bf16> = Vec16::from_bits([0; 4]);

/// A lane's column of vectors of a block's tile.
#[derive(Clone, Copy)]
struct Column {
    /// The vector of the tile's first row, in C.
    first: u32,
    /// Rows of C from the tile's first one on.
    left: u32,
    /// Whether C has the column, and whether it is sent: parts are sent as a whole.
    is_stored: bool,
    is_sent: bool,
    /// The slot of the first row's chunk 0.
    slot: u32,
}

impl Column {
    /// Whether a row is sent.
    fn is_sent(&self, row: u32) -> bool {
        self.is_sent && row - row % STORE_M < self.left
    }
}

/// Rows of a part that are added together.
#[derive(Clone, Copy)]
struct Rows {
    column: Column,
    first: u32,
    /// Vectors from a row to the next, and slots from a part to the one below.
    stride: u32,
    below: u32,
    /// Vectors of the product that precede C.
    before: u32,
}

impl Rows {
    /// The vector of one of them, if C has it.
    fn vector(&self, i: usize) -> Option<u32> {
        let row = self.first + i as u32;
        let is_stored = self.column.is_stored && row < self.column.left;
        is_stored.then(|| self.column.first + row * self.stride)
    }

    /// Its slot.
    fn slot(&self, i: usize) -> u32 {
        let (i, in_part, chunks) = (i as u32, self.first % STORE_M, COLUMNS / LANES);
        let part = self.column.slot + self.first / STORE_M * self.below;
        let chunk = (warp::lane_id() % chunks) ^ (in_part % SWIZZLED + i);
        part + chunks * (in_part + i) + chunk
    }
}

impl<D: Owners, const N: usize> Messages<'_, D, N> {
    /// Rows that a warp takes at a time.
    const ROWS: u32 = if N == 2 { AT_ONCE } else { OF_SEVERAL } as u32;

    /// Prepares the block's shared memory. All threads of the block call it first.
    pub(super) fn prepare(&self) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                let mut word = 0;
                while word < WORDS {
                    mem::store(stored().add(word), 0);
                    word += 1;
                }
            }
        }
        thread::sync_threads();
    }

    fn problem(&self) -> Problem<N> {
        Problem { team: self.comm.lsa_team(), m: self.m, n: self.n }
    }

    /// The session of this launch.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the previous kernels have ended.
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
    fn thread_ends(&self) {
        if D::RETURNS {
            // SAFETY: the word is one of the block's.
            let ended = unsafe { AtomicU32::from_ptr(ended()) };
            ended.fetch_add(1, MemoryOrder::Relaxed, Scope::Cta);
        }
    }

    /// The tiles of this block.
    pub(super) fn tiles(order: Order) -> u32 {
        order.count().saturating_sub(cluster()).div_ceil(clusters())
    }

    fn is_own(&self, owner: u32) -> bool {
        owner == self.problem().rank()
    }

    /// This lane's column of a tile of the block, if this rank adds to the tile.
    fn column(&self, order: Order, tile: u32) -> Option<Column> {
        let problem = self.problem();
        let (row, column) = origin(order, cluster() + tile * clusters());
        let (stride, index) = (self.n / LANES, column / LANES + warp::lane_id());
        let place = D::place(&problem, row, index * LANES);
        let column = Column {
            first: place.row * stride + index,
            left: self.m.saturating_sub(row),
            is_stored: index < stride,
            is_sent: index * LANES < self.n.next_multiple_of(COLUMNS),
            slot: place.slot,
        };
        self.is_own(place.owner).then_some(column)
    }

    /// Waits until a multiplying warp has stored its part of a tile.
    pub(super) fn wait_for_part(&self, tile: u32, warp: u32) {
        self.wait_for_word(stored().wrapping_add(warp as usize), tile);
    }

    /// If sums are sent, waits until all ranks have begun this launch: what precedes it in their
    /// streams has ended, so that their C may be stored to. All warps that add call it before they
    /// do, one of them as the `first`.
    fn meet(&self, first: bool) {
        if !D::RETURNS {
            return;
        }
        if !first {
            return self.wait_for_word(met(), 0);
        }
        self.comm.lsa_barrier(Coop::warp(), BarrierIndex::this_block()).sync(Visible::AcqRel);
        if warp::lane_id() == 0 {
            // SAFETY: the word is one of the block's, and this thread's to write.
            unsafe { mem::store_ordered(met(), 1, MemoryOrder::Release, Scope::Cta) };
        }
    }

    /// Waits until a word of the block is more than this.
    fn wait_for_word(&self, word: *const u32, than: u32) {
        self.comm.wait_until(Coop::warp(), || {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            let is_more =
                unsafe { mem::load_ordered(word, MemoryOrder::Acquire, Scope::Cta) > than };
            if !is_more {
                thread::nanosleep(PAUSE);
            }
            is_more
        });
    }

    /// Adds the ranks' parts of [`ROWS`](Self::ROWS) rows of a column, and stores the sums.
    ///
    /// # Safety
    ///
    /// The kernel's contract. The rows are sent, and only this warp adds to them; of two ranks this
    /// one has stored its part.
    unsafe fn add(&self, session: &Lamport<'_, N>, column: Column, first: u32) {
        // Opaque: what is the same for all rows would take registers.
        let problem = Problem { n: hint::opaque(self.n), ..self.problem() };
        let (stride, below) = (problem.n / LANES, D::below(&problem));
        let before = D::first_row(&problem) * stride;
        let rows = Rows { column, first, stride, below, before };
        // SAFETY: the caller's contract.
        unsafe {
            if N == 2 {
                self.add_two(session, rows);
            } else {
                self.add_several(session, rows);
            }
        }
    }

    /// [`add`](Self::add) with one peer.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn add_two(&self, session: &Lamport<'_, N>, mut rows: Rows) {
        let mut ours = [NOTHING; AT_ONCE];
        let (mut i, peer) = (0, self.problem().rank() as usize ^ 1);
        // SAFETY: the caller's contract. TMA has stored what is loaded, past the L1 cache.
        unsafe {
            while i < AT_ONCE {
                if let Some(vector) = rows.vector(i) {
                    // Opaque: as addresses, they would take registers until the sums are stored.
                    let from = element(hint::opaque(rows.before + vector));
                    let from = self.product.wrapping_add(from);
                    ours[i] = mem::load_vec_relaxed(from, Scope::Gpu);
                }
                i += 1;
            }
            let theirs: Vectors = session.receive_several(peer, |i| Some(rows.slot(i)), PAUSE);
            // Opaque: which ones C has would take registers until here.
            rows.column.left = hint::opaque(rows.column.left);
            i = 0;
            while i < AT_ONCE {
                let mut sum = bf16::widen(ours[i]);
                bf16::add(&mut sum, theirs[i]);
                Self::store(self.c, rows, i, bf16::narrow(sum));
                i += 1;
            }
        }
    }

    /// [`add`](Self::add) with several peers. This rank's part is in its own slots.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn add_several(&self, session: &Lamport<'_, N>, rows: Rows) {
        const { assert!(N.is_multiple_of(AT_ONCE / OF_SEVERAL)) };
        // In the order of the ranks, whoever adds; not unrolled.
        let mut sums = [[0.0; LANES as usize]; OF_SEVERAL];
        let (mut rank, ranks) = (0, hint::opaque_usize(N));
        while rank < ranks {
            let slot = |at| Some((rank + at / OF_SEVERAL, rows.slot(at % OF_SEVERAL)));
            // SAFETY: the caller's contract.
            let parts: Vectors = unsafe { session.receive_each([NOTHING; AT_ONCE], slot, PAUSE) };
            let mut at = 0;
            while at < AT_ONCE {
                bf16::add(&mut sums[at % OF_SEVERAL], parts[at]);
                at += 1;
            }
            rank += AT_ONCE / OF_SEVERAL;
        }
        let sums = sums.map(bf16::narrow);
        let store = |c: *mut bf16| {
            let mut i = 0;
            while i < OF_SEVERAL {
                // SAFETY: the caller's contract; C is as this rank's.
                unsafe { Self::store(c, rows, i, sums[i]) };
                i += 1;
            }
        };
        match self.of_all {
            None => store(self.c),
            Some(c) => {
                for rank in self.comm.lsa_team().all_from_self() {
                    store(c.lsa(rank).as_ptr());
                }
            }
        }
    }

    /// Stores the sum of one of the rows to a C that has it.
    ///
    /// # Safety
    ///
    /// Only this thread stores it.
    unsafe fn store(c: *mut bf16, rows: Rows, i: usize, sum: Vec16<bf16>) {
        if let Some(vector) = rows.vector(i) {
            // SAFETY: the caller's contract.
            unsafe { mem::store_vec(c.wrapping_add(element(vector)), sum) };
        }
    }
}

impl<D: Owners, const N: usize> Follow for Messages<'_, D, N> {
    type Registers = Adding;

    const SENDS: bool = true;
    const REPORTS: bool = N == 2;

    fn order(&self, rows: u32, columns: u32) -> Order {
        D::order(&self.problem(), rows, columns)
    }

    /// As the peers receive it, so that all ranks add the same zeros.
    fn word(&self, word: u32) -> u32 {
        message_word(word)
    }

    #[track_caller]
    unsafe fn keep<O>(&self, c: &TensorMap, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        // Of several ranks the own part is sent, too.
        if N == 2 && self.is_own(D::place(&self.problem(), row, column).owner) {
            // SAFETY: the caller's contract.
            unsafe { tile.store(c, row, column) };
        }
    }

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

    fn stored(&self, warp: u32, tiles: u32) {
        // SAFETY: the word is one of the block's, and this thread's to write.
        unsafe {
            let stored = stored().add(warp as usize);
            mem::store_ordered(stored, tiles, MemoryOrder::Release, Scope::Cta);
        }
    }

    unsafe fn beside(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        self.meet(index == 0);
        let mut tile = 0;
        let step = IDLE_WARPS * Self::ROWS;
        let mut first = index * Self::ROWS;
        // SAFETY: the caller's contract. The rows are this warp's.
        unsafe {
            let session = self.session();
            // Opaque: the number of tiles less one would take a register.
            while hint::opaque(tile) + 1 < Self::tiles(order) {
                if let Some(column) = self.column(order, tile) {
                    let mut row = first;
                    while row < TILE_M {
                        if N == 2 {
                            self.wait_for_part(tile, row / STORE_M);
                        }
                        if column.is_sent(row) {
                            self.add(&session, column, row);
                        }
                        row += step;
                    }
                    // The warps take turns with the rows of all tiles.
                    first = row - TILE_M;
                }
                tile += 1;
            }
        }
        self.thread_ends();
    }

    unsafe fn last(&self, order: Order, warp: u32) {
        let last = Self::tiles(order).checked_sub(1);
        if let Some(column) = last.and_then(|last| self.column(order, last)) {
            let mut row = warp * STORE_M;
            // Not unrolled, which would take more registers.
            let end = hint::opaque(row + STORE_M);
            // SAFETY: the caller's contract. The rows are this warp's.
            unsafe {
                warp::sync();
                self.meet(false);
                let session = self.session();
                while row < end && column.is_sent(row) {
                    self.add(&session, column, row);
                    row += Self::ROWS;
                }
            }
        }
        self.thread_ends();
    }
}
