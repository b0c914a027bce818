//! The exchange of a product's tiles between two ranks, by messages that are their own flags.
//!
//! A warp that multiplies sends what it stores, from the same shared memory by TMA, and waits for
//! nothing but the room there. Three warps that do not multiply take the rows of the block's tiles
//! in turn, and add the peer's to those that are stored. Only of its last tile each multiplying
//! warp adds to its own rows.
//!
//! In a reduce-scatter a block takes turns: a tile of the peer's rows, which it sends, and the same
//! tile of its own rows, to which it adds what has arrived.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for what the peer's block with its index sends, which computes the same
//! tiles. Warps that multiply wait for nothing outside their block before they have sent all, and
//! do not await the warps that wait for the peer.
//!
//! # Why a slot is empty when the peer writes it
//!
//! The receiver empties a slot as soon as it has read it, and the peer writes that slot again two
//! launches later. A rank that begins a launch has received all of the peer's messages of the last
//! one, so the peer has begun that, and has ended the one before: no rank is two launches ahead.

use cuda_std::atomic::{Order as MemoryOrder, Scope};
use cuda_std::prelude::*;
use cuda_std::tile::SharedTile;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{grid, hint, tma};
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window, message_word};

use crate::files::gemm::follow::{Beside, Follow};
use crate::files::gemm::gemm_wgmma::{IDLE_WARPS, MULTIPLYING_WARPS, STORE_M, TILE_M, origin};
use crate::files::gemm::order::{Order, cluster, clusters};

/// Rows that a warp takes at a time: their loads are in flight together. Their chunks are swizzled
/// in every way.
const ROWS: u32 = 8;
/// Groups of so many rows in a tile.
const GROUPS: u32 = TILE_M / ROWS;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;
/// Nanoseconds between polls: a tile takes 10,000 and more, and the warps that multiply need the
/// power.
const PAUSE: u32 = 500;
/// Columns and slots of a tile that is sent.
const COLUMNS: u32 = SharedTile::<bf16, STORE_M>::COLUMNS;
const SLOTS: u32 = STORE_M * COLUMNS / LANES;

/// In shared memory: how many parts of tiles each multiplying warp has stored.
#[inline(always)]
fn stored() -> *mut u32 {
    shared_array![u32; MULTIPLYING_WARPS as usize]
}

/// The index of a vector's first element.
#[inline(always)]
fn element(vector: u32) -> usize {
    vector as usize * LANES as usize
}

/// The slots that a product of `m x n` elements uses, whole tiles, if 32 bits count them.
#[must_use]
pub(super) const fn slots(m: usize, n: usize) -> Option<u32> {
    let tiles = m.div_ceil(STORE_M as usize).checked_mul(n.div_ceil(COLUMNS as usize));
    let Some(slots) = (match tiles {
        Some(tiles) => tiles.checked_mul(SLOTS as usize),
        None => None,
    }) else {
        return None;
    };
    if slots <= u32::MAX as usize { Some(slots as u32) } else { None }
}

/// The exchange of `m x n` elements of a product with the peer. If it `SCATTERS`, each rank gets
/// the sums of its half of the rows only, which C has. There is a slot for each vector of what a
/// rank receives, in the order of the tiles that multiplying warps send.
#[derive(Clone, Copy)]
pub(super) struct Messages<'a, const SCATTERS: bool> {
    pub(super) comm: &'a DevComm,
    pub(super) slots: &'a Window<u32>,
    pub(super) state: *mut u32,
    pub(super) capacity: u32,
    /// This rank's product, and where the sums go: may be the same.
    pub(super) product: *const bf16,
    pub(super) c: *mut bf16,
    pub(super) m: u32,
    pub(super) n: u32,
}

/// A lane's vectors of a group.
type Vectors = [Vec16<bf16>; ROWS as usize];

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
    /// Whether this rank adds to it.
    is_added: bool,
}

impl Group {
    #[inline(always)]
    fn vector(&self, i: usize) -> Option<u32> {
        ((i as u32) < self.rows).then(|| self.first + i as u32 * self.stride)
    }

    #[inline(always)]
    fn slot(&self, i: usize) -> Option<u32> {
        let i = i as u32;
        self.slot.map(|first| first + COLUMNS / LANES * i + (self.chunk ^ i))
    }
}

impl<const SCATTERS: bool> Messages<'_, SCATTERS> {
    /// Prepares the block's shared memory. All threads of the block call it first.
    #[inline(always)]
    pub(super) fn prepare(&self) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                let mut warp = 0;
                while warp < MULTIPLYING_WARPS {
                    mem::store(stored().add(warp as usize), 0);
                    warp += 1;
                }
            }
        }
        thread::sync_threads();
    }

    /// The session of this launch.
    ///
    /// # Safety
    ///
    /// The kernel's contract; the previous kernels have ended.
    #[inline(always)]
    unsafe fn session(&self) -> Lamport<'_, 2> {
        // SAFETY: the caller's contract.
        unsafe {
            let slots = LamportSlots::new(self.comm, *self.slots, self.capacity);
            slots.begin(self.state, self.slot(self.rows().next_multiple_of(STORE_M), 0))
        }
    }

    /// Ends the session.
    ///
    /// # Safety
    ///
    /// The kernel's contract. All threads of the block call it behind the product, which ends with
    /// a barrier.
    #[inline(always)]
    pub(super) unsafe fn end(&self) {
        if thread::thread_idx_x() == 0 {
            // SAFETY: the caller's contract.
            unsafe { self.session().end(Coop::thread()) };
        }
    }

    /// Rows of C.
    #[inline(always)]
    fn rows(&self) -> u32 {
        if SCATTERS { self.m / 2 } else { self.m }
    }

    /// The tiles of this block.
    #[inline(always)]
    fn tiles(order: Order) -> u32 {
        order.count().saturating_sub(cluster()).div_ceil(clusters())
    }

    /// The slot of a tile that is sent, at a row and a column of C.
    #[inline(always)]
    fn slot(&self, row: u32, column: u32) -> u32 {
        (row / STORE_M * self.n.div_ceil(COLUMNS) + column / COLUMNS) * SLOTS
    }

    /// The rank whose rows these are, and the row in its C.
    #[inline(always)]
    fn owner(&self, row: u32) -> (u32, u32) {
        let owner = if SCATTERS { row / self.rows() } else { 0 };
        (owner, row - owner * self.rows())
    }

    #[inline(always)]
    fn is_own(&self, owner: u32) -> bool {
        !SCATTERS || owner == self.comm.lsa_team().rank as u32
    }

    /// A group of the block's tiles, counted from the first one of its first tile.
    #[inline(always)]
    fn group(&self, order: Order, number: u32) -> Group {
        let (row, column) = origin(order, cluster() + number / GROUPS * clusters());
        let row = row + number % GROUPS * ROWS;
        let (stride, column) = (self.n / LANES, column / LANES + warp::lane_id());
        // Tiles are sent as a whole.
        let is_sent =
            row - row % STORE_M < self.m && column * LANES < self.n.next_multiple_of(COLUMNS);
        let left = self.m.saturating_sub(row);
        let (owner, row) = self.owner(row);
        let slot = self.slot(row, column * LANES) + row % STORE_M * (COLUMNS / LANES);
        Group {
            first: row.wrapping_mul(stride).wrapping_add(column),
            before: owner * self.rows() * stride,
            stride,
            rows: if column < stride { left.min(ROWS) } else { 0 },
            slot: is_sent.then_some(slot),
            chunk: column % (COLUMNS / LANES),
            is_added: self.is_own(owner),
        }
    }

    /// This rank's part of the sums.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and the group was stored.
    #[inline(always)]
    unsafe fn load(&self, group: Group) -> Vectors {
        let mut vectors = [Vec16::from_bits([0; 4]); ROWS as usize];
        let mut i = 0;
        while i < vectors.len() {
            if let Some(vector) = group.vector(i) {
                // Opaque: as addresses, they would take registers from here to the sums' stores.
                let from = element(hint::opaque(group.before + vector));
                // SAFETY: the caller's contract. TMA has stored it, past the L1 cache.
                vectors[i] =
                    unsafe { mem::load_vec_relaxed(self.product.wrapping_add(from), Scope::Gpu) };
            }
            i += 1;
        }
        vectors
    }

    /// Waits until a multiplying warp has stored a group.
    #[inline(always)]
    fn wait_for(&self, number: u32) {
        let (tile, warp) = (number / GROUPS, number % GROUPS * ROWS / STORE_M);
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

    /// Adds what the peer sent of a group, and stores the sums.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and one warp calls it.
    #[inline(always)]
    unsafe fn add(&self, session: &Lamport<'_, 2>, group: Group) {
        let peer = self.comm.lsa_team().rank as usize ^ 1;
        // SAFETY: the caller's contract.
        unsafe {
            let ours = self.load(group);
            let theirs: Vectors = session.receive_several(peer, |i| group.slot(i), PAUSE);
            let mut i = 0;
            while i < ours.len() {
                if let Some(vector) = group.vector(i) {
                    let mut sum = bf16::widen(ours[i]);
                    bf16::add(&mut sum, theirs[i]);
                    mem::store_vec(self.c.wrapping_add(element(vector)), bf16::narrow(sum));
                }
                i += 1;
            }
        }
    }
}

impl<const SCATTERS: bool> Follow for Messages<'_, SCATTERS> {
    const BESIDE: Beside = Beside::Sums;

    #[inline(always)]
    fn order(&self, rows: u32, columns: u32) -> Order {
        match SCATTERS {
            true => Order::halves(rows, columns, self.comm.lsa_team().rank as u32),
            false => Order::whole(rows, columns),
        }
    }

    /// As the peer receives it, so that both ranks add the same zeros.
    #[inline(always)]
    fn word(&self, word: u32) -> u32 {
        message_word(word)
    }

    #[inline(always)]
    fn keeps(&self, row: u32) -> bool {
        self.is_own(self.owner(row).0)
    }

    #[inline(always)]
    unsafe fn send<O>(&self, row: u32, column: u32, tile: SharedTile<O, STORE_M>) {
        let (owner, row_of_owner) = self.owner(row);
        if !(SCATTERS && self.is_own(owner)) && row < self.m && column < self.n {
            // SAFETY: the caller's contract. The launches before this one have ended.
            unsafe {
                let slots = LamportSlots::<2>::new(self.comm, *self.slots, self.capacity);
                slots.join(self.state).send_tile(1, self.slot(row_of_owner, column), tile);
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
        let end = Self::tiles(order).saturating_sub(1) * GROUPS;
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
    }

    #[inline(always)]
    unsafe fn last(&self, order: Order, warp: u32) {
        let Some(last) = Self::tiles(order).checked_sub(1) else { return };
        let number = last * GROUPS + warp * (STORE_M / ROWS);
        // SAFETY: the caller's contract. The groups are this warp's.
        unsafe {
            warp::sync();
            let session = self.session();
            self.add(&session, self.group(order, number));
            self.add(&session, self.group(order, number + 1));
        }
    }
}
