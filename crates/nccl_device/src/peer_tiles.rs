//! Parts of a matrix that the ranks of the LSA team send to each other and add.
//!
//! Each rank computes a matrix of bf16 of the same shape, and the ranks need the sum of these
//! matrices. A warp sends parts of 16 rows and 64 columns from shared memory, as [`Lamport`]
//! messages; it waits only until the shared memory may be written again. Idle warps add the parts
//! that arrive. [`Owners`] determine which rank adds which part.
//!
//! With two ranks, this rank's own part is stored to memory ([`keep`](PeerTiles::keep)), from which
//! the warp that adds loads it. With more ranks it is sent to this rank too, so that all parts are
//! read in the same way.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for messages of the peers' blocks with its index, which compute the same
//! tiles. These blocks run sooner or later, as the caller launches no more blocks than the GPU has
//! room for. Warps that send wait for nothing outside their block before they have sent all parts,
//! and never for warps that wait for messages. If the owners store the sums to every rank, the
//! blocks of an index wait for each other at a barrier when they begin and when they end: then the
//! launch is cooperative. When they begin, only one warp, which has no other work, waits at it; the
//! other warps wait for that warp before they add.
//!
//! # Why a slot is empty when a peer writes it
//!
//! The receiver empties a slot as soon as it has read it, and the peer writes that slot again two
//! launches later. A rank that begins a launch has received all of the peers' messages of the
//! previous one. So the peers have begun that launch, and have ended the one before it: no rank is
//! two launches ahead. With owners of tiles a rank may receive nothing from some peer: then the
//! barrier at the end of the previous launch shows that the peer has begun it.
//!
//! The guide's chapter about fused kernels has an example.

mod sums;

use crate::prelude::*;
use core::marker::PhantomData;

use cuda_std::atomic::AtomicU32;
use cuda_std::prelude::*;
use cuda_std::shared_array;
use cuda_std::tile::SharedTile;
use devcomm_types::TensorMap;

pub use self::sums::PeerSums;
use crate::peer_owners::{Owners, PART_COLUMNS, PART_ROWS, PeerMatrix};
use crate::{BarrierIndex, Lamport, LamportMemory, LamportSlots};

/// Vectors of a lane that are in flight together.
const IN_FLIGHT: usize = 8;
/// Rows that a warp adds at a time with more than one peer. The rows of two ranks are in flight
/// together.
const ROWS_IN_FLIGHT: usize = 4;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// The maximum number of warps of a block that send parts.
const WARPS: usize = 16;
/// The words of a block in shared memory: one for each warp, and two for the block.
const WORDS: usize = WARPS + 2;

/// Returns the counters of the tiles that each sending warp has stored.
fn stored_counters() -> *mut u32 {
    shared_array![u32; WORDS]
}

/// Returns the counter of a warp that sends. Traps unless `warp` is below [`WARPS`].
#[track_caller]
fn stored_counter(warp: u32) -> *mut u32 {
    assert!(warp < WARPS as u32, "there are {WARPS} warps that send");
    stored_counters().wrapping_add(warp as usize)
}

/// Returns the counter of the threads that have added all their elements.
fn added_counter() -> *mut u32 {
    stored_counters().wrapping_add(WARPS)
}

/// Returns the word that is 1 once the ranks have passed [`PeerTiles::meet`].
fn met_word() -> *mut u32 {
    stored_counters().wrapping_add(WARPS + 1)
}

/// The parts of an `m x n` matrix of bf16 in the `N` ranks of the LSA team. `O` divides the sums
/// among the ranks.
#[derive(Clone, Copy)]
pub struct PeerTiles<'a, O, const N: usize> {
    comm: &'a DevComm,
    memory: &'a LamportMemory,
    product: *const bf16,
    c: *mut bf16,
    c_window: Option<&'a Window<bf16>>,
    m: u32,
    n: u32,
    owners: PhantomData<O>,
}

/// A lane's column of vectors of 16 bytes in a tile whose sums this rank computes.
#[derive(Clone, Copy, Debug)]
pub struct PeerColumn {
    /// The index in C of the vector in the tile's first row.
    first: u32,
    /// The number of the matrix's rows from the tile's first row on. The tile's rows have one
    /// owner, so that C has them, too.
    left: u32,
    /// Whether C has the column.
    is_stored: bool,
    /// Whether the column is sent. A part is sent as a whole, also where C ends within it.
    is_sent: bool,
    /// The slot of the first row's first message.
    slot: u32,
}

#[track_callers]
impl<'a, O: Owners, const N: usize> PeerTiles<'a, O, N> {
    /// Rows of a part.
    pub const ROWS: u32 = PART_ROWS;
    /// Columns of a part.
    pub const COLUMNS: u32 = PART_COLUMNS;
    /// Rows that [`PeerSums::add`] adds at a time.
    pub const AT_ONCE: u32 = if N == 2 { IN_FLIGHT } else { ROWS_IN_FLIGHT } as u32;
    /// Nanoseconds between polls. A tile takes 10,000 and more, and polls take power from the warps
    /// that multiply.
    pub const PAUSE: u32 = 500;

    /// Describes the parts of an `m x n` matrix whose sums are stored to C. This rank's own parts
    /// are [kept](Self::keep) there too. A dependent launch may call this before it waits for the
    /// previous kernel.
    ///
    /// # Safety
    ///
    /// `memory` is as [`LamportSlots::new`] and [`LamportSlots::begin`] need it, with at least the
    /// `slots` of `O` for each rank. C has the elements of this rank's sums and begins at a
    /// multiple of 16 bytes, and `n` is a multiple of 8. The ranks' launches have the same grid,
    /// shape and order of tiles. Each part is sent once.
    pub unsafe fn new(
        comm: &'a DevComm,
        memory: &'a LamportMemory,
        c: *mut bf16,
        [m, n]: [u32; 2],
    ) -> Self {
        let (product, c_window, owners) = (c.cast_const(), None, PhantomData);
        Self { comm, memory, product, c, c_window, m, n, owners }
    }

    /// Sets the matrix where this rank's own parts are [kept](Self::keep), instead of C.
    ///
    /// # Safety
    ///
    /// `product` has `m x n` elements and begins at a multiple of 16 bytes. The pointer is not used
    /// with more than two ranks.
    pub unsafe fn kept_in(self, product: *const bf16) -> Self {
        Self { product, ..self }
    }

    /// Sets the window of C, to which the owners store the sums in every rank.
    ///
    /// # Safety
    ///
    /// The window has the elements of C in each rank. Nothing else accesses them between
    /// [`meet`](Self::meet) and the end of the kernel.
    pub unsafe fn stored_in_all(self, window: &'a Window<bf16>) -> Self {
        Self { c_window: Some(window), ..self }
    }

    /// Returns the device communicator.
    pub fn comm(&self) -> &'a DevComm {
        self.comm
    }

    /// Returns the team and the shape of the matrix.
    pub fn matrix(&self) -> PeerMatrix<N> {
        PeerMatrix { team: self.comm.lsa_team(), m: self.m, n: self.n }
    }

    /// Initialises the words of the block in shared memory. All threads of the block call this
    /// before any thread calls another method that uses the words.
    pub fn prepare(&self) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                let mut word = 0;
                while word < WORDS {
                    mem::store(stored_counters().add(word), 0);
                    word += 1;
                }
            }
        }
        thread::sync_threads();
    }

    /// Begins the messages of this launch. Traps if there are fewer slots than it uses.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    pub unsafe fn begin(&self) -> Lamport<'a, N> {
        // SAFETY: the previous kernels have ended, and the caller of `new` passed these slots.
        unsafe { LamportSlots::new(self.comm, self.memory).begin(O::used(&self.matrix())) }
    }

    /// Returns the messages of a launch that other threads [begin](Self::begin).
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    pub unsafe fn join(&self) -> Lamport<'a, N> {
        // SAFETY: the previous kernels have ended, and the caller of `new` passed these slots.
        unsafe { LamportSlots::new(self.comm, self.memory).join() }
    }

    fn is_own(&self, owner: u32) -> bool {
        owner == self.matrix().rank()
    }

    /// Stores a part that this rank adds from shared memory to the matrix of its own parts, with
    /// two ranks; with more, [`send`](Self::send) does it. `map` is the map of that matrix, with
    /// tiles of 16 rows. The store belongs to the lane's bulk group.
    ///
    /// # Safety
    ///
    /// One lane calls this, and the contract of [`SharedTile::store`] holds.
    pub unsafe fn keep<T>(&self, map: &TensorMap, row: u32, column: u32, part: SharedTile<T, 16>) {
        if N == 2 && self.is_own(O::place(&self.matrix(), row, column).owner) {
            // SAFETY: the caller keeps the tile until the store has read it.
            unsafe { part.store(map, row, column) };
        }
    }

    /// Sends a part from shared memory to the ranks that add it, if it lies in the matrix. `row` is
    /// a multiple of 16 and `column` of 64. The copy belongs to the lane's bulk group.
    ///
    /// # Safety
    ///
    /// One lane calls this, once for each part, after the previous kernels. The words of the tile
    /// are as [`message_word`](crate::message_word) makes them, visible to TMA, and not written
    /// before TMA has read them.
    pub unsafe fn send<T>(&self, row: u32, column: u32, part: SharedTile<T, 16>) {
        let matrix = self.matrix();
        let place = O::place(&matrix, row, column);
        let ranks = matrix.ranks();
        // With more than two ranks, the rank's own part is sent to itself too.
        let (first, end) = if O::ALL {
            // The loop is not unrolled for many ranks: their addresses would take registers.
            (u32::from(N == 2), if N > 4 { hint::opaque(ranks) } else { ranks })
        } else if N == 2 {
            (1, 1 + u32::from(!self.is_own(place.owner)))
        } else {
            let after = place.owner + ranks - matrix.rank();
            let distance = if after < ranks { after } else { after - ranks };
            (distance, distance + 1)
        };
        if row < self.m && column < self.n {
            // SAFETY: the caller keeps the tile until TMA has read it; the launch uses the slot.
            unsafe {
                let (session, mut distance) = (self.join(), first);
                while distance < end {
                    session.send_tile(distance as usize, place.slot, part);
                    distance += 1;
                }
            }
        }
    }

    /// Signals that warp `warp` of the block, below 16, has stored the parts that it
    /// [keeps](Self::keep) of its first `tiles` tiles in this launch. One lane calls it, after the
    /// wait for the end of these stores; messages may still be on their way.
    pub fn stored(&self, warp: u32, tiles: u32) {
        // SAFETY: the word is one of the block's, which only this warp writes.
        unsafe { mem::store_ordered(stored_counter(warp), tiles, Order::Release, Scope::Cta) };
    }

    /// Waits until warp `warp` has [stored](Self::stored) more than `tiles` tiles, if parts are
    /// kept. All lanes of a warp call it. The host can abort the wait.
    pub fn wait_stored(&self, warp: u32, tiles: u32) {
        if N == 2 {
            self.wait_for_word(stored_counter(warp), tiles);
        }
    }

    /// Waits until all ranks have begun this launch, if the owners store to all ranks. Then the
    /// work before the launch in their streams has ended, and their C may be stored to. Each warp
    /// that adds calls this first; exactly one of them passes `first = true`.
    pub fn meet(&self, first: bool) {
        if !O::BROADCASTS {
            return;
        }
        if !first {
            return self.wait_for_word(met_word(), 0);
        }
        self.comm.lsa_barrier(Coop::warp(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
        if warp::lane_id() == 0 {
            // SAFETY: the word is one of the block's, and this thread's to write.
            unsafe { mem::store_ordered(met_word(), 1, Order::Release, Scope::Cta) };
        }
    }

    /// Waits until a word of the block is more than `value`.
    fn wait_for_word(&self, word: *const u32, value: u32) {
        self.comm.wait_until(Coop::warp(), || {
            // SAFETY: the word is one of the block's, and written by ordered stores.
            let is_more = unsafe { mem::load_ordered(word, Order::Acquire, Scope::Cta) > value };
            if !is_more {
                thread::nanosleep(Self::PAUSE);
            }
            is_more
        });
    }

    /// Signals that the calling thread has added all its elements, before the barrier that precedes
    /// [`end`](Self::end).
    pub fn added(&self) {
        if O::BROADCASTS {
            // SAFETY: the word is one of the block's.
            let added = unsafe { AtomicU32::from_ptr(added_counter()) };
            added.fetch_add(1, Order::Relaxed, Scope::Cta);
        }
    }

    /// Returns the lane's column of the tile whose 256 columns begin at `column` and whose rows,
    /// all of one owner, begin at `row`; `None` if another rank adds the tile.
    pub fn column(&self, row: u32, column: u32) -> Option<PeerColumn> {
        // `n` is opaque: values that are the same for all tiles would take registers.
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

    /// Begins the sums of this launch.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended.
    pub unsafe fn sums(&self) -> PeerSums<'a, O, N> {
        // SAFETY: the caller ensures that the previous kernels have ended.
        PeerSums::new(*self, unsafe { self.begin() })
    }

    /// Ends the launch's exchange for this block. If the owners store to all ranks, C is complete
    /// on return; a block with a warp that has exited because the host aborted its wait exits here,
    /// so that the peers do not take its sums for complete.
    ///
    /// # Safety
    ///
    /// All threads of the block call this, once, after a barrier of the block that follows all
    /// parts that its threads send and add. If the owners store to all ranks, `threads` is the
    /// number of threads that have called [`added`](Self::added).
    pub unsafe fn end(&self, threads: u32) {
        if O::BROADCASTS {
            // SAFETY: no thread changes the word any more.
            if unsafe { mem::load(added_counter()) } != threads {
                thread::exit();
            }
            self.comm
                .lsa_barrier(Coop::cta(), BarrierIndex::this_block())
                .sync(MemoryOrder::AcqRel);
        }
        if thread::thread_idx_x() == 0 {
            // SAFETY: all accesses of the block's threads to the messages precede the barrier.
            unsafe { self.join().end(Coop::thread()) };
        }
    }
}
