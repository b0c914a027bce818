//! The exchange of a product's tiles between two ranks, by messages that are their own flags.
//!
//! Three warps that do not multiply take the rows of the block's tiles in turn. Each sends rows as
//! soon as they are stored, and then adds the peer's to those that it sent a tile ago. So the warps
//! that multiply wait neither for the peer nor for NVLink. Only of its last tile each of them sends
//! and adds its own rows. Who sends a row adds to it: so it is sent before the sum replaces it.
//!
//! In a reduce-scatter a block takes turns: a tile of the peer's rows, which it sends, and the same
//! tile of its own rows, to which it adds what has arrived.
//!
//! # Why it cannot deadlock
//!
//! A block waits only for the peer's block with its index, which computes the same tiles. Warps
//! that multiply wait for nothing outside their block before their last tile, and a warp sends the
//! rows that it waits for, and those before, first. So the first wait that did not end would be for
//! rows that the peer's warp is about to send.
//!
//! # Why a slot is empty when the peer writes it
//!
//! The receiver empties a slot as soon as it has read it, and the peer writes that slot again two
//! launches later. A rank that begins a launch has received all of the peer's messages of the last
//! one, so the peer has begun that, and has ended the one before: no rank is two launches ahead.

use cuda_std::atomic::{Order as MemoryOrder, Scope};
use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{grid, hint};
use nccl_device::{Coop, DevComm, Lamport, LamportSlots, Window, message};

use crate::files::gemm::follow::{Beside, Follow};
use crate::files::gemm::gemm_wgmma::{IDLE_WARPS, MULTIPLYING_WARPS, STORE_M, TILE_M, origin};
use crate::files::gemm::order::{Order, cluster, clusters};

/// Rows that a warp takes at a time: their loads are in flight together.
const ROWS: u32 = 8;
/// Groups of so many rows in a tile.
const GROUPS: u32 = TILE_M / ROWS;
/// Groups of a warp between the one that it sends and the one that it adds to: about a tile.
const BEHIND: u32 = GROUPS / IDLE_WARPS;
/// Elements of a message.
const LANES: u32 = Vec16::<bf16>::LANES as u32;

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

/// The exchange of `m x n` elements of a product with the peer. If it `SCATTERS`, each rank gets the
/// sums of its half of the rows only, which C has. There is a slot for each vector of what a rank
/// receives.
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
    rows: u32,
    /// Vectors from a row to the next.
    stride: u32,
    /// Whether this rank sends them, and whether it adds the peer's.
    is_sent: bool,
    is_added: bool,
}

impl Group {
    #[inline(always)]
    fn vector(&self, i: usize) -> Option<u32> {
        ((i as u32) < self.rows).then(|| self.first + i as u32 * self.stride)
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
            slots.begin(self.state, self.rows() * (self.n / LANES))
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

    /// A group of the block's tiles, counted from the first one of its first tile.
    #[inline(always)]
    fn group(&self, order: Order, number: u32) -> Group {
        let (row, column) = origin(order, cluster() + number / GROUPS * clusters());
        let (row, column) = (row + number % GROUPS * ROWS, column / LANES + warp::lane_id());
        let stride = self.n / LANES;
        let left = if column < stride { self.m.saturating_sub(row) } else { 0 };
        let owner = if SCATTERS { row / self.rows() } else { 0 };
        let is_own = owner == self.comm.lsa_team().rank as u32;
        let first = (row - owner * self.rows()).wrapping_mul(stride).wrapping_add(column);
        Group {
            first,
            before: owner * self.rows() * stride,
            rows: left.min(ROWS),
            stride,
            is_sent: !(SCATTERS && is_own),
            is_added: !SCATTERS || is_own,
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
                // A tile takes 10,000 and more: the warps that multiply need the power.
                thread::nanosleep(200);
            }
            is_stored
        });
    }

    /// Sends a group to the peer.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and one warp sends it.
    #[inline(always)]
    unsafe fn send(&self, session: &Lamport<'_, 2>, group: Group, ours: &Vectors) {
        let mut i = 0;
        while i < ours.len() {
            if let Some(vector) = group.vector(i) {
                // SAFETY: the caller's contract.
                unsafe { session.send(1, vector, ours[i]) };
            }
            i += 1;
        }
    }

    /// Adds what the peer sent of a group, and stores the sums.
    ///
    /// # Safety
    ///
    /// The kernel's contract, and one warp calls it.
    #[inline(always)]
    unsafe fn add(&self, session: &Lamport<'_, 2>, group: Group, ours: &Vectors) {
        let peer = self.comm.lsa_team().rank as usize ^ 1;
        // SAFETY: the caller's contract.
        unsafe {
            let theirs: Vectors = session.receive_several(peer, |i| group.vector(i));
            let mut i = 0;
            while i < ours.len() {
                if let Some(vector) = group.vector(i) {
                    // As the peer received it, so that both ranks add the same zeros.
                    let mut sum = bf16::widen(message(ours[i]));
                    bf16::add(&mut sum, theirs[i]);
                    mem::store_vec(self.c.wrapping_add(element(vector)), bf16::narrow(sum));
                }
                i += 1;
            }
        }
    }
}

impl<const SCATTERS: bool> Follow for Messages<'_, SCATTERS> {
    const BESIDE: Beside = if SCATTERS { Beside::SumsOfHalf } else { Beside::Sums };

    #[inline(always)]
    fn order(&self, rows: u32, columns: u32) -> Order {
        match SCATTERS {
            true => Order::halves(rows, columns, self.comm.lsa_team().rank as u32),
            false => Order::whole(rows, columns),
        }
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
            let (mut sent, mut added) = (index, index);
            while added < end {
                if sent < end {
                    self.wait_for(sent);
                    let group = self.group(order, sent);
                    if group.is_sent {
                        self.send(&session, group, &self.load(group));
                    }
                }
                sent += IDLE_WARPS;
                if sent > added + BEHIND * IDLE_WARPS || sent >= end {
                    let group = self.group(order, added);
                    if group.is_added {
                        self.add(&session, group, &self.load(group));
                    }
                    added += IDLE_WARPS;
                }
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
            let groups = [self.group(order, number), self.group(order, number + 1)];
            let ours = [self.load(groups[0]), self.load(groups[1])];
            if groups[0].is_sent {
                self.send(&session, groups[0], &ours[0]);
                self.send(&session, groups[1], &ours[1]);
            }
            self.add(&session, groups[0], &ours[0]);
            self.add(&session, groups[1], &ours[1]);
        }
    }
}
