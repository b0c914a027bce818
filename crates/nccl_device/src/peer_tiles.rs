//! Parts of a matrix that the ranks of the LSA team send to each other and add.
//!
//! Every rank computes the same matrix of bf16, and its sum over the ranks is wanted. A warp sends
//! parts of 16 rows and 64 columns from shared memory, as [`Lamport`] messages, and waits for
//! nothing but the room there. Warps that have nothing else to do add what arrives. [`Owners`] say
//! which rank adds which part.
//!
//! With two ranks, this rank's own part is stored ([`keep`](PeerTiles::keep)) and loaded by the
//! warp that adds. With more ranks it is sent to this rank too, so that all parts are alike.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for what the peers' blocks with its index send, which compute the same
//! tiles. Warps that send wait for nothing outside their block before they have sent all, and never
//! for warps that await messages. Where the owners store the sums to every rank, the blocks of an
//! index meet at a barrier after all of this, and when they begin: there only one warp, which has
//! done nothing before, waits for the other ranks' blocks, and the others for it before they add.
//!
//! # Why a slot is empty when a peer writes it
//!
//! The receiver empties a slot as soon as it has read it, and the peer writes that slot again two
//! launches later. A rank that begins a launch has received all of the peers' messages of the last
//! one, so they have begun that, and have ended the one before: no rank is two launches ahead.
//! Where a rank may have no message of some peer, the barrier ensures the same.
//!
//! The guide's chapter about fused kernels has an example.

mod sums;

use core::marker::PhantomData;

use cuda_std::atomic::{AtomicU32, Order, Scope};
use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::vector::Vec16;
use cuda_std::{hint, mem, shared_array, thread, warp};
use devcomm_types::TensorMap;

pub use self::sums::PeerSums;
use crate::peer_owners::{Owners, PART_COLUMNS, PART_ROWS, PeerMatrix};
use crate::{BarrierIndex, Coop, DevComm, Lamport, LamportSlots, MemoryOrder, Window};

/// Vectors of a lane that are in flight together.
const IN_FLIGHT: usize = 8;
/// Rows that a warp takes at a time from more than one peer: those of two ranks are in flight
/// together.
const ROWS_IN_FLIGHT: usize = 4;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// The most warps of a block that send parts.
const WARPS: usize = 16;
/// Words of a block in shared memory.
const WORDS: usize = WARPS + 2;

/// How many tiles each sending warp has stored.
fn stored() -> *mut u32 {
    shared_array![u32; WORDS]
}

/// How many threads have added all that they add.
fn ended() -> *mut u32 {
    stored().wrapping_add(WARPS)
}

/// Whether the ranks have met.
fn met() -> *mut u32 {
    stored().wrapping_add(WARPS + 1)
}

/// The parts of an `m x n` matrix of bf16 in the `N` ranks of the LSA team, which `O` shares among
/// them.
#[derive(Clone, Copy)]
pub struct PeerTiles<'a, O, const N: usize> {
    comm: &'a DevComm,
    slots: &'a Window<u32>,
    state: *mut u32,
    capacity: u32,
    product: *const bf16,
    c: *mut bf16,
    in_all: Option<&'a Window<bf16>>,
    m: u32,
    n: u32,
    owners: PhantomData<O>,
}

/// A lane's column of vectors of a tile, whose sums this rank adds.
#[derive(Clone, Copy, Debug)]
pub struct PeerColumn {
    /// The vector of the tile's first row, in C.
    first: u32,
    /// Rows of C from the tile's first one on.
    left: u32,
    /// Whether C has the column, and whether it is sent: parts are sent as a whole.
    is_stored: bool,
    is_sent: bool,
    /// The slot of the first row's first message.
    slot: u32,
}

impl<'a, O: Owners, const N: usize> PeerTiles<'a, O, N> {
    /// Rows of a part.
    pub const ROWS: u32 = PART_ROWS;
    /// Columns of a part.
    pub const COLUMNS: u32 = PART_COLUMNS;
    /// Rows that [`PeerSums::add`] adds at a time.
    pub const AT_ONCE: u32 = if N == 2 { IN_FLIGHT } else { ROWS_IN_FLIGHT } as u32;
    /// Nanoseconds between polls: a tile takes 10,000 and more, and warps that multiply need the
    /// power.
    pub const PAUSE: u32 = 500;

    /// The parts of an `m x n` matrix, whose sums go to C, which is also where this rank
    /// [keeps](Self::keep) its own parts. A dependent launch calls it before it waits.
    ///
    /// # Safety
    ///
    /// `slots`, `state` and `capacity` are as [`LamportSlots::new`] and [`LamportSlots::begin`]
    /// need them, with at least the `slots` of `O` for each rank. C has the elements of this rank's
    /// sums, begins at a multiple of 16 bytes, and `n` is a multiple of 8. The ranks' launches have
    /// the same grid, shape and order of tiles. Each part is sent once.
    pub unsafe fn new(
        comm: &'a DevComm,
        slots: &'a Window<u32>,
        state: *mut u32,
        capacity: u32,
        c: *mut bf16,
        [m, n]: [u32; 2],
    ) -> Self {
        let (product, in_all, owners) = (c.cast_const(), None, PhantomData);
        Self { comm, slots, state, capacity, product, c, in_all, m, n, owners }
    }

    /// This rank's own parts are kept in another matrix than C.
    ///
    /// # Safety
    ///
    /// `product` has `m x n` elements and begins at a multiple of 16 bytes. The pointer is not used
    /// with more than two ranks.
    pub unsafe fn kept_in(self, product: *const bf16) -> Self {
        Self { product, ..self }
    }

    /// The owners store the sums to this window in every rank, where C is.
    ///
    /// # Safety
    ///
    /// It has the elements of C in each rank. Nothing accesses them from the ranks'
    /// [meeting](Self::meet) on until the kernel has ended.
    pub unsafe fn stored_in_all(self, window: &'a Window<bf16>) -> Self {
        Self { in_all: Some(window), ..self }
    }

    /// The communicator.
    pub fn comm(&self) -> &'a DevComm {
        self.comm
    }

    /// The matrix.
    pub fn matrix(&self) -> PeerMatrix<N> {
        PeerMatrix { team: self.comm.lsa_team(), m: self.m, n: self.n }
    }

    /// Prepares the words of the block in shared memory. All threads of the block call it, before
    /// any calls another method that uses them.
    #[track_caller]
    pub fn prepare(&self) {
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

    /// The messages of this launch. Traps if there are fewer slots than it uses.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    #[track_caller]
    pub unsafe fn begin(&self) -> Lamport<'a, N> {
        // SAFETY: the caller's contract, and that of `new`.
        unsafe {
            let slots = LamportSlots::new(self.comm, *self.slots, self.capacity);
            slots.begin(self.state, O::used(&self.matrix()))
        }
    }

    /// The messages of a launch that other threads [begin](Self::begin).
    ///
    /// # Safety
    ///
    /// The contract of [`begin`](Self::begin).
    #[track_caller]
    pub unsafe fn join(&self) -> Lamport<'a, N> {
        // SAFETY: the caller's contract, and that of `new`.
        unsafe { LamportSlots::new(self.comm, *self.slots, self.capacity).join(self.state) }
    }

    fn is_own(&self, owner: u32) -> bool {
        owner == self.matrix().rank()
    }

    /// Stores a part from shared memory to where this rank keeps its own, if it loads the part from
    /// there when it adds: with two ranks. `map` is that of the matrix, with tiles of 16 rows. It
    /// belongs to the lane's bulk group.
    ///
    /// # Safety
    ///
    /// As [`SharedTile::store`]; one lane calls this.
    #[track_caller]
    pub unsafe fn keep<T>(&self, map: &TensorMap, row: u32, column: u32, part: SharedTile<T, 16>) {
        if N == 2 && self.is_own(O::place(&self.matrix(), row, column).owner) {
            // SAFETY: the caller's contract.
            unsafe { part.store(map, row, column) };
        }
    }

    /// Sends a part, as it lies in shared memory, to the ranks that add it, if C has it: `row` is a
    /// multiple of 16 and `column` of 64. It belongs to the lane's bulk group.
    ///
    /// # Safety
    ///
    /// One lane calls this, once for each part, after the previous kernels. The words of the tile
    /// are as [`message_word`](crate::message_word) makes them, visible to TMA, and not written
    /// before TMA has read them.
    #[track_caller]
    pub unsafe fn send<T>(&self, row: u32, column: u32, part: SharedTile<T, 16>) {
        let matrix = self.matrix();
        let place = O::place(&matrix, row, column);
        let ranks = matrix.ranks();
        // The rank's own part is sent, too, if there are more than two ranks.
        let (first, end) = if O::ALL {
            // Not unrolled for many ranks, whose addresses would take registers.
            (u32::from(N == 2), if N > 4 { hint::opaque(ranks) } else { ranks })
        } else if N == 2 {
            (1, 1 + u32::from(!self.is_own(place.owner)))
        } else {
            let after = place.owner + ranks - matrix.rank();
            let distance = if after < ranks { after } else { after - ranks };
            (distance, distance + 1)
        };
        if row < self.m && column < self.n {
            // SAFETY: the caller's contract, and that of `new`: the slot is one of those used.
            unsafe {
                let (session, mut distance) = (self.join(), first);
                while distance < end {
                    session.send_tile(distance as usize, place.slot, part);
                    distance += 1;
                }
            }
        }
    }

    /// Says that warp `warp` of the block, below 16, has sent its parts of so many tiles, and that
    /// those it [keeps](Self::keep) are stored. One lane calls it.
    #[track_caller]
    pub fn stored(&self, warp: u32, tiles: u32) {
        debug_assert!(warp < WARPS as u32);
        // SAFETY: the word is one of the block's, which only this warp writes.
        unsafe {
            let stored = stored().add(warp as usize);
            mem::store_ordered(stored, tiles, Order::Release, Scope::Cta);
        }
    }

    /// Waits until warp `warp` has [stored](Self::stored) more than so many tiles, if parts are
    /// kept. All lanes of a warp call it. The host can abort the wait.
    #[track_caller]
    pub fn wait_stored(&self, warp: u32, tiles: u32) {
        if N == 2 {
            self.wait_for_word(stored().wrapping_add(warp as usize), tiles);
        }
    }

    /// Waits until all ranks have begun this launch, if the owners store to all: what precedes it
    /// in their streams has ended, so that their C may be stored to. All warps that add call it
    /// before they do, one of them as the `first`.
    #[track_caller]
    pub fn meet(&self, first: bool) {
        if !O::BROADCASTS {
            return;
        }
        if !first {
            return self.wait_for_word(met(), 0);
        }
        self.comm.lsa_barrier(Coop::warp(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
        if warp::lane_id() == 0 {
            // SAFETY: the word is one of the block's, and this thread's to write.
            unsafe { mem::store_ordered(met(), 1, Order::Release, Scope::Cta) };
        }
    }

    /// Waits until a word of the block is more than this.
    #[track_caller]
    fn wait_for_word(&self, word: *const u32, than: u32) {
        self.comm.wait_until(Coop::warp(), || {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            let is_more = unsafe { mem::load_ordered(word, Order::Acquire, Scope::Cta) > than };
            if !is_more {
                thread::nanosleep(Self::PAUSE);
            }
            is_more
        });
    }

    /// Says that the calling thread has added all that it adds.
    #[track_caller]
    pub fn added(&self) {
        if O::BROADCASTS {
            // SAFETY: the word is one of the block's.
            let ended = unsafe { AtomicU32::from_ptr(ended()) };
            ended.fetch_add(1, Order::Relaxed, Scope::Cta);
        }
    }

    /// The lane's column of a tile, of the 256 columns from `column` on and of rows from `row` on;
    /// `None` if another rank adds the tile.
    pub fn column(&self, row: u32, column: u32) -> Option<PeerColumn> {
        // Opaque: what is the same for all tiles would take registers.
        let matrix = PeerMatrix { n: hint::opaque(self.n), ..self.matrix() };
        let (stride, index) = (matrix.n / LANES, column / LANES + warp::lane_id());
        let place = O::place(&matrix, row, index * LANES);
        let column = PeerColumn {
            first: place.row * stride + index,
            left: self.m.saturating_sub(row),
            is_stored: index < stride,
            is_sent: index * LANES < matrix.n.next_multiple_of(PART_COLUMNS),
            slot: place.slot,
        };
        self.is_own(place.owner).then_some(column)
    }

    /// The sums of this launch.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    #[track_caller]
    pub unsafe fn sums(&self) -> PeerSums<'a, O, N> {
        // SAFETY: the caller's contract.
        PeerSums::new(*self, unsafe { self.begin() })
    }

    /// Ends the launch's exchange for this block. If the owners store to all, all of C is there on
    /// return, and a block of which a warp has exited because the host aborted its wait exits here,
    /// as the peers would take its sums for complete.
    ///
    /// # Safety
    ///
    /// All threads of the block call this, once, after a barrier of the block that follows all
    /// parts that its threads send and add. So many `threads` have said that they have
    /// [added](Self::added) all, if the owners store to all.
    #[track_caller]
    pub unsafe fn end(&self, threads: u32) {
        if O::BROADCASTS {
            // SAFETY: no thread changes the word any more.
            if unsafe { mem::load(ended()) } != threads {
                thread::exit();
            }
            self.comm
                .lsa_barrier(Coop::cta(), BarrierIndex::this_block())
                .sync(MemoryOrder::AcqRel);
        }
        if thread::thread_idx_x() == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.join().end(Coop::thread()) };
        }
    }
}
