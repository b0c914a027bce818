//! The exchange of a product's tiles between two ranks as 8-bit floats with scales.
//!
//! The exchange is that of [`PeerTiles`], but a warp's part of a tile, 16 rows and 256 columns, is
//! rounded to [`F8E4M3`] with a scale for [`SCALED`] elements of a row. The part goes as it lies in
//! shared memory to the peer and to a workspace of this rank: both ranks add the same numbers. A
//! vector has eight columns of two rows that are eight apart; one of the part's four vectors of
//! scales has the exponents of the rows' scales for [`SCALED`] columns, a byte for each.

use nccl_device::{Owners, PeerMatrix, PeerPlace, PeerTiles, message_word};

use super::partial::{Partial, SCALED, add_scaled};
use crate::files::gemm::gemm_wgmma::STORE_M;
use crate::files::gemm::prelude::*;

/// Columns and slots of a tile that is sent: a warp's part has two such tiles.
const COLUMNS: u32 = SharedTile::<F8E4M3, STORE_M>::COLUMNS;
const SLOTS: u32 = SharedTile::<F8E4M3, STORE_M>::BYTES / 16;
/// Vectors of a lane in a part: one for each two rows.
const VECTORS: usize = STORE_M as usize / 2;
/// Pairs of columns of a lane that share scales.
const PAIRS: u32 = SCALED / 8;
/// Lanes of the receiving warp whose columns share scales.
const LANES: u32 = SCALED / 8;

/// Slots of a part before those of its scales.
const PART_SCALES: u32 = STORE_M * TILE_N / 16;
/// All slots of a part.
const PART_SLOTS: u32 = PART_SCALES + TILE_N / SCALED;

/// Returns the first slot of the part with this first row and column.
fn quantised_part(row: u32, column: u32, columns: u32) -> u32 {
    (row / STORE_M * columns.div_ceil(TILE_N) + column / TILE_N) * PART_SLOTS
}

/// The owners of the parts: both ranks add every part.
#[derive(Clone, Copy)]
pub struct QuantisedParts;

impl QuantisedParts {
    /// Returns how many slots an `m x n` matrix has for the sending rank, if 32 bits count them.
    #[must_use]
    pub fn slots(m: usize, n: usize) -> Option<u32> {
        let parts = m.div_ceil(STORE_M as usize).checked_mul(n.div_ceil(TILE_N as usize))?;
        u32::try_from(parts.checked_mul(PART_SLOTS as usize)?).ok()
    }
}

impl Owners for QuantisedParts {
    const ALL: bool = true;

    fn place<const N: usize>(matrix: &PeerMatrix<N>, row: u32, column: u32) -> PeerPlace {
        let slot = quantised_part(row, column, matrix.n) + column / COLUMNS % 2 * SLOTS;
        PeerPlace { owner: matrix.rank(), row, slot }
    }

    fn below<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        matrix.n.div_ceil(TILE_N) * PART_SLOTS
    }

    fn used<const N: usize>(matrix: &PeerMatrix<N>) -> u32 {
        matrix.m.div_ceil(STORE_M) * matrix.n.div_ceil(TILE_N) * PART_SLOTS
    }
}

/// The exchange, which is the epilogue too.
#[derive(Clone, Copy)]
pub(super) struct Quantised<'a> {
    pub(super) peers: PeerTiles<'a, QuantisedParts, 2>,
    /// This rank's parts, in the order of the slots.
    pub(super) own: *mut u32,
    pub(super) c: *mut bf16,
}

impl Quantised<'_> {
    /// Returns where this rank's workspace has the vector of a slot.
    fn own_vector(&self, slot: u32) -> *mut u32 {
        self.own.wrapping_add(4 * slot as usize)
    }

    /// Returns the first slot of a tile, if there is a part of C in it.
    fn tile(&self, row: u32, column: u32) -> Option<u32> {
        let matrix = self.peers.matrix();
        let place = QuantisedParts::place(&matrix, row, column);
        (row < matrix.m && column < matrix.n).then_some(place.slot)
    }

    /// Adds both ranks' parts of a tile from `row` and `column` on. The kernel's contract holds,
    /// and one warp calls it, after this rank's part was stored in `own`.
    unsafe fn add(&self, session: &Lamport<'_, 2>, row: u32, column: u32) {
        let matrix = self.peers.matrix();
        if row >= matrix.m {
            return;
        }
        let peer = matrix.rank() as usize ^ 1;
        let lane = warp::lane_id();
        // A lane has eight columns, which are a fragment's.
        let tile = self.tile(row, column + lane / 16 * COLUMNS);
        let (chunk, below) = (lane % 16 / 2, lane % 2 * (SLOTS / 2));
        let vector = |i: usize| {
            let i = i as u32;
            // A tile's rows of eight vectors are swizzled, as in shared memory.
            tile.map(|first| first + below + 8 * i + (chunk ^ i))
        };
        let scales = quantised_part(row, column, matrix.n) + PART_SCALES + lane / LANES;
        let column = column + 8 * lane;
        // SAFETY: TMA and this block have stored this rank's part, as the caller guarantees.
        unsafe {
            let load = |slot| mem::load_vec_relaxed(self.own_vector(slot).cast(), Scope::Gpu);
            let mut ours = [Vec16::<F8E4M3>::from_bits([0; 4]); VECTORS];
            for i in 0..VECTORS {
                if let Some(slot) = vector(i) {
                    ours[i] = load(slot);
                }
            }
            let our_scales = load(scales).to_bits();
            // The last vector that is received has the scales.
            let is_first = lane.is_multiple_of(LANES);
            let slot = |i| if i < VECTORS { vector(i) } else { is_first.then_some(scales) };
            let pause = PeerTiles::<QuantisedParts, 2>::PAUSE;
            let theirs: [Vec16<F8E4M3>; VECTORS + 1] = session.receive_several(peer, slot, pause);
            let first = lane / LANES * LANES;
            let their_scales = theirs[VECTORS].to_bits().map(|word| warp::shuffle_idx(word, first));
            // The arrays are written out, as a loop of this length would not be unrolled.
            let [a, b, c, d, e, f, g, h] = ours;
            let [s, t, u, v, w, x, y, z, _] = theirs;
            let halves = [[[a, b, c, d], [s, t, u, v]], [[e, f, g, h], [w, x, y, z]]];
            let scales = [0, 1].map(|half| {
                [our_scales, their_scales].map(|scales| [scales[half], scales[2 + half]])
            });
            self.store(row, column, halves[0], scales[0]);
            self.store(row + 4, column, halves[1], scales[1]);
        }
    }

    /// Adds four vectors of both ranks, this one's first, and stores the sums, for which the order
    /// does not matter. A word has the exponents of the scales of their upper or lower rows. Only
    /// this thread stores these elements of C.
    unsafe fn store(
        &self,
        row: u32,
        column: u32,
        vectors: [[Vec16<F8E4M3>; 4]; 2],
        scales: [[u32; 2]; 2],
    ) {
        let PeerMatrix { m, n, .. } = self.peers.matrix();
        for i in 0..4 {
            let mut sums = [[0.0; 8]; 2];
            for rank in 0..2 {
                let scale = |word: u32| Scale { exponent: word >> (8 * i) & 0xff }.value();
                let (scales, elements) =
                    (scales[rank].map(scale), F8E4M3::unpack(vectors[rank][i]));
                for lane in 0..4 {
                    add_scaled(sums.each_mut(), lane, elements[lane], scales);
                }
            }
            for half in 0..2 {
                let row = row + i as u32 + 8 * half as u32;
                if row < m && column < n {
                    let to = self.c.wrapping_add(row as usize * n as usize + column as usize);
                    // SAFETY: only this thread stores the elements; rows are aligned to 16 bytes.
                    unsafe { mem::store_vec(to, bf16::narrow(sums[half])) };
                }
            }
        }
    }
}

/// Divides the sums by their scales, and stores the scales to the peer and to the workspace.
impl Epilogue for Quantised<'_> {
    type Output = F8E4M3;

    fn apply<F: Fragment>(&self, sums: &mut F) {
        let lane = warp::lane_id();
        // The scales of the lane's two rows, for the columns whose scales the lane sends.
        let mut mine = [0; 2];
        for block in 0..F::COLUMNS / (2 * PAIRS) {
            for row in 0..2 {
                let mut largest = 0_f32;
                for j in 0..2 * PAIRS {
                    largest = largest.max(sums.sum(row, 2 * PAIRS * block + j).abs());
                }
                // SAFETY: all lanes of the warp call this together.
                let scale = Scale::of(unsafe { segment_reduce::<4, _>(largest, f32::max) });
                let inverse = scale.inverse();
                for j in 0..2 * PAIRS {
                    *sums.sum(row, 2 * PAIRS * block + j) *= inverse;
                }
                if lane % 4 == block {
                    mine[row as usize] = scale.exponent;
                }
            }
        }
        // A word has the scales of four rows.
        let [top, bottom] = mine.map(|scale| {
            let mut word = scale << (lane / 4 % 4 * 8);
            // SAFETY: all lanes of the warp call this together.
            unsafe {
                word |= warp::shuffle_xor(word, 4);
                word |= warp::shuffle_xor(word, 8);
                [word, warp::shuffle_xor(word, 16)]
            }
        });
        let vector = Vec16::<F8E4M3>::from_bits([top[0], top[1], bottom[0], bottom[1]]);
        let (row, column) = (sums.row(0) - lane / 4, sums.column(0) - lane % 4 * 2);
        let matrix = self.peers.matrix();
        if lane < 4 && row < matrix.m {
            let slot = quantised_part(row, column, matrix.n) + PART_SCALES + lane;
            // SAFETY: the kernel's caller guarantees the slots, of which this one is this lane's.
            unsafe {
                mem::store_vec(self.own_vector(slot).cast(), vector);
                self.peers.join().send(1, slot, vector);
            }
        }
    }
}

impl Hooks for Quantised<'_> {
    type Registers = AddingRegisters;

    const SENDS: bool = true;
    const REPORTS: bool = true;

    /// Returns the word as the peer receives it.
    fn encode(&self, word: u32) -> u32 {
        message_word(word)
    }

    unsafe fn store_part<O>(&self, _: &TensorMap, row: u32, column: u32, tile: Store<O>) {
        if let Some(slot) = self.tile(row, column) {
            // SAFETY: one lane is here, with a tile after a fence; the slot is this warp's.
            unsafe { tile.store_bulk(self.own_vector(slot)) };
        }
    }

    unsafe fn send_part<O>(&self, row: u32, column: u32, tile: Store<O>) {
        // SAFETY: one lane is here, with a tile after a fence; the peer's slots are this warp's.
        unsafe { self.peers.send(row, column, tile) };
    }

    fn on_stored(&self, warp: u32, tiles: u32) {
        self.peers.stored(warp, tiles);
    }

    unsafe fn run_idle_warp(&self, order: Order, index: u32) {
        grid::wait_for_previous();
        // SAFETY: the caller has all lanes of the warp here. The parts are this warp's.
        unsafe {
            let session = self.peers.begin();
            let end = order.turns().saturating_sub(1); // `drain` adds the last tile.
            let mut part = index;
            for tile in 0..end {
                let Tile { row, column, .. } = order.turn(tile);
                while part < MULTIPLYING_WARPS {
                    self.peers.wait_stored(part, tile);
                    self.add(&session, row + part * STORE_M, column);
                    part += IDLE_WARPS;
                }
                // The warps take turns with the parts of all tiles.
                part -= MULTIPLYING_WARPS;
            }
        }
    }

    unsafe fn drain(&self, order: Order, warp: u32) {
        if let Some(last) = order.turns().checked_sub(1) {
            let Tile { row, column, .. } = order.turn(last);
            // SAFETY: the caller has all lanes of the warp here. The part is this warp's.
            unsafe {
                warp::sync();
                self.add(&self.peers.begin(), row + warp * STORE_M, column);
            }
        }
    }
}

#[cfg(test)]
mod tests;
