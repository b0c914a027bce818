//! The sums of the ranks' parts.

use cuda_std::atomic::Scope;
use cuda_std::prelude::*;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{hint, mem, warp};

use super::{IN_FLIGHT, LANES, PeerColumn, PeerTiles, ROWS_IN_FLIGHT};
use crate::Lamport;
use crate::peer_owners::{Owners, PART_COLUMNS, PART_ROWS, PeerMatrix};

/// The rows of a swizzle's pattern.
const SWIZZLED: u32 = 8;

/// The index of a vector's first element.
fn element(vector: u32) -> usize {
    vector as usize * LANES as usize
}

/// The sums of all ranks' parts in one launch.
#[derive(Clone, Copy)]
pub struct PeerSums<'a, O, const N: usize> {
    tiles: PeerTiles<'a, O, N>,
    session: Lamport<'a, N>,
}

/// Vectors of a lane that are in flight together.
type Vectors = [Vec16<bf16>; IN_FLIGHT];

const NOTHING: Vec16<bf16> = Vec16::from_bits([0; 4]);

/// Rows of a tile that are added together.
#[derive(Clone, Copy)]
struct Rows {
    column: PeerColumn,
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
        let (i, in_part, chunks) = (i as u32, self.first % PART_ROWS, PART_COLUMNS / LANES);
        let part = self.column.slot + self.first / PART_ROWS * self.below;
        let chunk = (warp::lane_id() % chunks) ^ (in_part % SWIZZLED + i);
        part + chunks * (in_part + i) + chunk
    }

    /// Stores the sum of one of them to a C that has it.
    ///
    /// # Safety
    ///
    /// Only this thread stores it.
    unsafe fn store(self, c: *mut bf16, i: usize, sum: Vec16<bf16>) {
        if let Some(vector) = self.vector(i) {
            // SAFETY: the caller's contract.
            unsafe { mem::store_vec(c.wrapping_add(element(vector)), sum) };
        }
    }
}

impl<'a, O: Owners, const N: usize> PeerSums<'a, O, N> {
    pub(super) fn new(tiles: PeerTiles<'a, O, N>, session: Lamport<'a, N>) -> Self {
        Self { tiles, session }
    }

    /// Adds the ranks' parts of [`AT_ONCE`](PeerTiles::AT_ONCE) rows of a column, from the tile's
    /// row `row` on, in f32 and in the order of the ranks, and stores the rounded sums: all ranks
    /// get the same bits. Rows and columns that C does not have are left out.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call this, and no other warp adds these elements in this launch. `row`
    /// is a multiple of the number of rows. This rank's parts
    /// [are stored](PeerTiles::wait_stored), and the ranks [have met](PeerTiles::meet).
    #[track_caller]
    pub unsafe fn add(&self, column: PeerColumn, row: u32) {
        // Parts are sent as a whole, also where C ends in them.
        if !column.is_sent || row - row % PART_ROWS >= column.left {
            return;
        }
        // Opaque: what is the same for all rows would take registers.
        let matrix = PeerMatrix { n: hint::opaque(self.tiles.n), ..self.tiles.matrix() };
        let (stride, below) = (matrix.n / LANES, O::below(&matrix));
        let before = O::first_row(&matrix) * stride;
        let rows = Rows { column, first: row, stride, below, before };
        // SAFETY: the caller's contract.
        unsafe {
            if N == 2 {
                self.add_two(rows);
            } else {
                self.add_several(rows);
            }
        }
    }

    /// [`add`](Self::add) with one peer, in any order: that of two numbers makes no difference.
    ///
    /// # Safety
    ///
    /// The contract of [`add`](Self::add).
    #[track_caller]
    unsafe fn add_two(&self, mut rows: Rows) {
        let product = self.tiles.product;
        let mut ours = [NOTHING; IN_FLIGHT];
        let (mut i, peer) = (0, self.tiles.matrix().rank() as usize ^ 1);
        // SAFETY: the caller's contract. TMA has stored what is loaded, past the L1 cache.
        unsafe {
            while i < IN_FLIGHT {
                if let Some(vector) = rows.vector(i) {
                    // Opaque: as addresses, they would take registers until the sums are stored.
                    let from = element(hint::opaque(rows.before + vector));
                    let from = product.wrapping_add(from);
                    ours[i] = mem::load_vec_relaxed(from, Scope::Gpu);
                }
                i += 1;
            }
            let pause = PeerTiles::<O, N>::PAUSE;
            let theirs: Vectors = self.session.receive_several(peer, |i| Some(rows.slot(i)), pause);
            // Opaque: which ones C has would take registers until here.
            rows.column.left = hint::opaque(rows.column.left);
            i = 0;
            while i < IN_FLIGHT {
                let mut sum = bf16::widen(ours[i]);
                bf16::add(&mut sum, theirs[i]);
                let sum = bf16::narrow(sum);
                self.for_each_c(|c| rows.store(c, i, sum));
                i += 1;
            }
        }
    }

    /// [`add`](Self::add) with several peers. This rank's part is in its own slots.
    ///
    /// # Safety
    ///
    /// The contract of [`add`](Self::add).
    #[track_caller]
    unsafe fn add_several(&self, rows: Rows) {
        const RANKS: usize = IN_FLIGHT / ROWS_IN_FLIGHT;
        const { assert!(N.is_multiple_of(RANKS)) };
        // In the order of the ranks, whoever adds; not unrolled.
        let mut sums = [[0.0; LANES as usize]; ROWS_IN_FLIGHT];
        let (mut rank, ranks) = (0, hint::opaque_usize(N));
        while rank < ranks {
            let slot = |at| Some((rank + at / ROWS_IN_FLIGHT, rows.slot(at % ROWS_IN_FLIGHT)));
            let pause = PeerTiles::<O, N>::PAUSE;
            // SAFETY: the caller's contract.
            let parts: Vectors =
                unsafe { self.session.receive_each([NOTHING; IN_FLIGHT], slot, pause) };
            let mut at = 0;
            while at < IN_FLIGHT {
                bf16::add(&mut sums[at % ROWS_IN_FLIGHT], parts[at]);
                at += 1;
            }
            rank += RANKS;
        }
        let sums = sums.map(bf16::narrow);
        self.for_each_c(|c| {
            let mut i = 0;
            while i < ROWS_IN_FLIGHT {
                // SAFETY: the caller's contract; each rank's C has the same rows.
                unsafe { rows.store(c, i, sums[i]) };
                i += 1;
            }
        });
    }

    /// Calls `store` with each C that the sums are stored to.
    fn for_each_c(&self, store: impl Fn(*mut bf16)) {
        match self.tiles.in_all {
            None => store(self.tiles.c),
            Some(window) => {
                for rank in self.tiles.comm.lsa_team().all_from_self() {
                    store(window.lsa(rank).as_ptr());
                }
            }
        }
    }
}
