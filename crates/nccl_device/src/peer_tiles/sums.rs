//! The sums of the parts that the ranks send to each other.

use crate::prelude::*;
use cuda_std::prelude::*;

use super::{IN_FLIGHT, LANES, PeerColumn, PeerTiles, ROWS_IN_FLIGHT};
use crate::Lamport;
use crate::peer_owners::{Owners, PART_COLUMNS, PART_ROWS, PeerMatrix};

/// The rows of a swizzle's pattern.
const SWIZZLED: u32 = 8;

/// Returns the index of a vector's first element.
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
    /// The number of vectors from a row to the next.
    stride: u32,
    /// The number of slots from a part to the part below.
    below: u32,
    /// The number of vectors of the product before the first row of this rank's C.
    before: u32,
}

impl Rows {
    /// Returns the index in C of the vector in row `i`, if C has that row.
    fn vector(&self, i: usize) -> Option<u32> {
        let row = self.first + i as u32;
        let is_stored = self.column.is_stored && row < self.column.left;
        is_stored.then(|| self.column.first + row * self.stride)
    }

    /// Returns the slot of the vector in row `i`. All rows are in one part and in one pattern of
    /// the swizzle, since `first` is a multiple of their number.
    fn slot(&self, i: usize) -> u32 {
        let (i, in_part, chunks) = (i as u32, self.first % PART_ROWS, PART_COLUMNS / LANES);
        let part = self.column.slot + self.first / PART_ROWS * self.below;
        let chunk = (warp::lane_id() % chunks) ^ (in_part % SWIZZLED + i);
        part + chunks * (in_part + i) + chunk
    }

    /// Stores the sum of row `i` to `c`, if C has the row.
    ///
    /// # Safety
    ///
    /// Only this thread stores the vector.
    unsafe fn store(self, c: *mut bf16, i: usize, sum: Vec16<bf16>) {
        if let Some(vector) = self.vector(i) {
            // SAFETY: C has the vector, and the caller ensures that only this thread stores it.
            unsafe { mem::store_vec(c.wrapping_add(element(vector)), sum) };
        }
    }
}

#[track_callers]
impl<'a, O: Owners, const N: usize> PeerSums<'a, O, N> {
    pub(super) fn new(tiles: PeerTiles<'a, O, N>, session: Lamport<'a, N>) -> Self {
        Self { tiles, session }
    }

    /// Adds the ranks' parts of [`AT_ONCE`](PeerTiles::AT_ONCE) rows of a column, from the tile's
    /// row `row` on, in f32 and in the order of the ranks, and stores the rounded sums, so that all
    /// ranks get the same bits. Rows and columns outside C are not stored.
    ///
    /// # Safety
    ///
    /// All lanes of a warp call this, and no other warp adds these elements in this launch. `row`
    /// is a multiple of the number of rows. This rank's parts [are stored](PeerTiles::wait_stored),
    /// and the ranks [have met](PeerTiles::meet).
    pub unsafe fn add(&self, column: PeerColumn, row: u32) {
        // A part that is partly outside C is sent as a whole, so all its slots are to be emptied.
        if !column.is_sent || row - row % PART_ROWS >= column.left {
            return;
        }
        // `n` is opaque: values that are the same for all rows would take registers.
        let matrix = PeerMatrix { n: hint::opaque(self.tiles.n), ..self.tiles.matrix() };
        let (stride, below) = (matrix.n / LANES, O::below(&matrix));
        let before = O::first_row(&matrix) * stride;
        let rows = Rows { column, first: row, stride, below, before };
        // SAFETY: the caller's warp alone adds these rows, and the ranks' parts may be read.
        unsafe {
            if N == 2 {
                self.add_two(rows);
            } else {
                self.add_several(rows);
            }
        }
    }

    /// Adds rows with one peer. The order of two numbers does not change their sum.
    ///
    /// # Safety
    ///
    /// The contract is that of [`add`](Self::add).
    unsafe fn add_two(&self, mut rows: Rows) {
        let product = self.tiles.product;
        let mut ours = [NOTHING; IN_FLIGHT];
        let (mut i, peer) = (0, self.tiles.matrix().rank() as usize ^ 1);
        // SAFETY: the caller's warp alone adds these rows. The loads bypass the L1 cache, as TMA
        // has stored the parts.
        unsafe {
            while i < IN_FLIGHT {
                if let Some(vector) = rows.vector(i) {
                    // The index is opaque, or its address would take registers until the store.
                    let from = element(hint::opaque(rows.before + vector));
                    let from = product.wrapping_add(from);
                    ours[i] = mem::load_vec_relaxed(from, Scope::Gpu);
                }
                i += 1;
            }
            let pause = PeerTiles::<O, N>::PAUSE;
            let theirs: Vectors = self.session.receive_several(peer, |i| Some(rows.slot(i)), pause);
            // `left` is opaque, or the comparisons with it would take registers until here.
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

    /// Adds rows with several peers. This rank's part is in its own slots.
    ///
    /// # Safety
    ///
    /// The contract is that of [`add`](Self::add).
    unsafe fn add_several(&self, rows: Rows) {
        const RANKS: usize = IN_FLIGHT / ROWS_IN_FLIGHT;
        const { assert!(N.is_multiple_of(RANKS)) };
        // All owners add in the order of the ranks. The loop is not unrolled.
        let mut sums = [[0.0; LANES as usize]; ROWS_IN_FLIGHT];
        let (mut rank, ranks) = (0, hint::opaque_usize(N));
        while rank < ranks {
            let slot = |at| Some((rank + at / ROWS_IN_FLIGHT, rows.slot(at % ROWS_IN_FLIGHT)));
            let pause = PeerTiles::<O, N>::PAUSE;
            // SAFETY: the caller's warp alone receives the messages of these rows.
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
                // SAFETY: the caller's warp alone adds these rows; each rank's C has the same rows.
                unsafe { rows.store(c, i, sums[i]) };
                i += 1;
            }
        });
    }

    /// Calls `store` with each C to which this rank stores the sums.
    fn for_each_c(&self, store: impl Fn(*mut bf16)) {
        match self.tiles.c_window {
            None => store(self.tiles.c),
            Some(window) => {
                for rank in self.tiles.comm.lsa_team().all_from_self() {
                    store(window.lsa(rank).as_ptr());
                }
            }
        }
    }
}
