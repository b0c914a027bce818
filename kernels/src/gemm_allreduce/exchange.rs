//! The exchange of sums: partial sums to a strip's owner, results to all ranks. The [parent
//! module](super) says why no wait is a deadlock, and when slots and a peer's C may be written.
//!
//! Partial sums are exchanged as [`Partial`]s, in the layout of the tensor cores' results: in
//! *fragments* of 16 rows and 8 columns, of which each lane of a warp has four elements. A vector
//! has a lane's elements of one, two or four neighbouring fragments. So a warp stores 512 bytes at
//! once, without a shuffle. A lane of the owner loads what four lanes stored: all columns of these
//! fragments in two rows.

mod owner;

use super::partial::{Partial, SCALED};
use crate::files::gemm::prelude::*;

/// Rows and columns of a tile.
pub(super) const TILE_ROWS: u32 = 128;
pub(super) const COLUMNS: u32 = 128;
/// Rows of a strip, which 128 threads compute and one rank reduces.
const STRIP_ROWS: u32 = 64;
/// Strips per tile.
pub(super) const STRIPS: u32 = TILE_ROWS / STRIP_ROWS;
/// Words before the flags in their window: the number of blocks that have ended, the epoch of the
/// last launch, and padding to a cache line.
pub(super) const FIRST_FLAG: usize = 32;

/// Rows and columns of a fragment, and fragments of a warp's sums in 16 rows.
const ROWS: u32 = 16;
const WIDTH: u32 = 8;
const FRAGMENTS: usize = 8;
/// Fragments whose elements share scales.
const SCALED_FRAGMENTS: u32 = SCALED / WIDTH;
/// Words of these fragments' scales: a pair for each row and the eighth row after it.
const SCALES: u32 = ROWS / 2;

/// Returns the number of words of a strip's elements, which are before the scales in its slot.
const fn element_words<W: Partial>() -> usize {
    (STRIP_ROWS * COLUMNS) as usize * size_of::<W>() / 4
}

/// Returns the number of words of a strip's slot in the workspace: whole vectors.
pub(super) const fn slot_words<W: Partial>() -> usize {
    let scales = (GROUPS * (COLUMNS / SCALED) * SCALES) as usize;
    element_words::<W>() + if W::HAS_SCALES { scales } else { 0 }
}

/// Groups of 16 rows in a strip: a warp reduces one group at a time.
const GROUPS: u32 = STRIP_ROWS / ROWS;

/// The tiles of an `m x n` matrix.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) m: u32,
    pub(super) n: u32,
}

/// A strip: its number, and the row, which may be beyond C, and column of its first element.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    number: u32,
    row: u32,
    column: u32,
}

impl Tiles {
    fn order(self) -> TileOrder<16> {
        TileOrder { rows: self.m.div_ceil(TILE_ROWS), columns: self.n.div_ceil(COLUMNS) }
    }

    pub(super) fn count(self) -> u32 {
        self.order().count()
    }

    /// Returns the first row and column of tile `number`.
    pub(super) fn origin(self, number: u32) -> (u32, u32) {
        let (row, column) = self.order().position(number);
        (row * TILE_ROWS, column * COLUMNS)
    }

    pub(super) fn strip(self, number: u32) -> Strip {
        let (row, column) = self.origin(number / STRIPS);
        Strip { number, row: row + number % STRIPS * STRIP_ROWS, column }
    }
}

/// Returns two words in shared memory: the number of the next group of rows that a warp takes, and
/// how many of the block's warps have ended [`Exchange::reduce`].
fn words() -> *mut u32 {
    shared_array![u32; 2]
}

/// The communicator, windows and epoch of a launch.
pub(super) struct Exchange<'a, W> {
    comm: &'a DevComm,
    team: Team,
    tiles: Tiles,
    c: Window<bf16>,
    partials: Window<u32>,
    flags: Window<u32>,
    epoch: u32,
    local_only: bool,
    wire: PhantomData<W>,
}

impl<'a, W: Partial> Exchange<'a, W> {
    /// Vectors of a lane in a row of fragments.
    const VECTORS: u32 = COLUMNS / WIDTH / W::FRAGMENTS as u32;
    const SLOT: usize = slot_words::<W>();

    /// Begins a launch. Every thread of the block calls it, then the block's barrier. A single rank
    /// exchanges nothing. The windows are as in the kernel's contract.
    pub(super) unsafe fn new(
        comm: &'a DevComm,
        tiles: Tiles,
        c: Window<bf16>,
        partials: Window<u32>,
        flags: Window<u32>,
    ) -> Self {
        // SAFETY: the caller passes a window of flags that begins with the epoch's words.
        let epoch = unsafe { Epoch::begin(flags.local().as_ptr()) }.get();
        if thread::thread_idx_x() == 0 {
            // SAFETY: no other thread uses the words before the barrier.
            unsafe {
                mem::store(words(), 0);
                mem::store(words().add(1), 0);
            }
        }
        let (team, wire) = (comm.lsa_team(), PhantomData);
        let local_only = team.n_ranks == 1;
        Self { comm, team, tiles, c, partials, flags, epoch, local_only, wire }
    }

    fn owner(&self, strip: Strip) -> i32 {
        (strip.number % self.team.n_ranks as u32) as i32
    }

    /// Returns the slot of `source`'s sums of a strip, in the owner's workspace.
    fn slot(&self, strip: Strip, source: i32) -> usize {
        let n_ranks = self.team.n_ranks as usize;
        let of_source = ((self.tiles.count() * STRIPS) as usize).div_ceil(n_ranks);
        source as usize * of_source + strip.number as usize / n_ranks
    }

    /// Returns the flag that `source` sets in the owner's workspace after its sums of a strip.
    fn flag(&self, strip: Strip, source: i32) -> Flag<'a> {
        // SAFETY: the flag is in the window, after the epoch's words, and is used only as a flag.
        unsafe { Flag::new(self.comm, self.flags, FIRST_FLAG + self.slot(strip, source)) }
    }

    /// Returns the word in a slot at which a lane's vector begins, of the fragments with first row
    /// `16 * i` and first column `8 * j`.
    fn vector(i: u32, j: u32, lane: u32) -> usize {
        let number = i * Self::VECTORS + j / W::FRAGMENTS as u32;
        ((number * warp::WARP_SIZE + lane) * 4) as usize
    }

    /// Returns the word in a slot with the scales of the `row`-th row of these fragments, and of
    /// the eighth row after it.
    fn scales(i: u32, j: u32, row: u32) -> usize {
        let number = i * (COLUMNS / SCALED) + j / SCALED_FRAGMENTS;
        element_words::<W>() + (number * SCALES + row) as usize
    }

    /// Stores a warp's sums of a strip, from row `16 * i` and column `8 * j` of the strip on: to
    /// the owner's workspace, or to C if there is a single rank. A whole warp calls it; no other
    /// warp stores these elements.
    pub(super) unsafe fn send(
        &self,
        strip: Strip,
        (i, j): (u32, u32),
        sums: &mut [RegTile<f32, FRAGMENTS>; 2],
    ) {
        let (row, column) = (strip.row + ROWS * i, strip.column + WIDTH * j);
        let Tiles { m, n } = self.tiles;
        // SAFETY: only this whole warp stores these elements, in C or in this rank's slot.
        unsafe {
            if self.local_only {
                return Part::of_warp(sums, (row, column), (m, n)).store(self.c.local().as_ptr());
            }
            let slot = self.slot(strip, self.team.rank) * Self::SLOT;
            let slot = self.partials.lsa(self.owner(strip)).as_ptr().wrapping_add(slot);
            if row < m {
                Self::send_rows(slot, i, j, n.saturating_sub(column), &sums[0]);
            }
            if row + ROWS < m {
                Self::send_rows(slot, i + 1, j, n.saturating_sub(column), &sums[1]);
            }
        }
    }

    /// Stores 16 rows of a warp's sums to a slot, in C's columns, as [`send`](Self::send) does.
    unsafe fn send_rows(
        slot: *mut u32,
        i: u32,
        j: u32,
        columns: u32,
        sums: &RegTile<f32, FRAGMENTS>,
    ) {
        let lane = warp::lane_id();
        // The number of fragments that share scales, or of those in a vector.
        let block = if W::HAS_SCALES { SCALED_FRAGMENTS as usize } else { W::FRAGMENTS };
        for first in Strided::new(0, FRAGMENTS as u32, block as u32) {
            let (j, mut scales) = (j + first, [Scale::ONE; 2]);
            let fragment = |x: usize| sums.blocks()[first as usize + x];
            if first * WIDTH >= columns {
                break;
            }
            // SAFETY: the caller's warp, with all lanes here, alone stores to its part of the slot.
            unsafe {
                if W::HAS_SCALES {
                    scales = Self::scales_of(fragment);
                    if lane.is_multiple_of(4) {
                        let to = slot.add(Self::scales(i, j, lane / 4));
                        mem::store(to, Scale::pack(scales));
                    }
                }
                let [top, bottom] = scales.map(Scale::inverse);
                for x in Strided::new(0, block, W::FRAGMENTS) {
                    let vector = W::pack(|f| {
                        let [a, b, c, d] = fragment(x + f);
                        [a * top, b * top, c * bottom, d * bottom]
                    });
                    let to = Self::vector(i, j + x as u32, lane);
                    mem::store_vec(slot.add(to).cast(), vector);
                }
            }
        }
    }

    /// Returns the scales of the lane's two rows, of fragments that share them. A whole warp calls
    /// it.
    unsafe fn scales_of(fragment: impl Fn(usize) -> [f32; 4]) -> [Scale; 2] {
        let mut largest = [0_f32; 2];
        for x in 0..SCALED_FRAGMENTS as usize {
            let [a, b, c, d] = fragment(x).map(f32::abs);
            largest = [largest[0].max(a).max(b), largest[1].max(c).max(d)];
        }
        // SAFETY: the caller has all lanes of the warp here.
        largest.map(|mine| Scale::of(unsafe { segment_reduce::<4, _>(mine, f32::max) }))
    }

    /// Sets the flag of this rank's sums of a strip. The 128 threads that stored the sums call it
    /// together; `barrier` is a named barrier for them, and `rank` the thread's index among them.
    /// The sums are stored, and the flag is set once per launch.
    pub(super) unsafe fn announce(&self, strip: Strip, barrier: u32, rank: u32) {
        if self.local_only || strip.row >= self.tiles.m {
            return;
        }
        thread::named_barrier_sync(barrier, 128);
        if rank == 0 {
            // The release covers the stores of all 128 threads, which precede the barrier.
            let flag = self.flag(strip, self.team.rank);
            flag.post(Coop::thread(), self.owner(strip), self.epoch);
        }
    }

    /// Ends a launch. On return, the strips that this block of each rank reduced are visible in
    /// every rank. The last block ends the epoch. Every thread of the block calls it.
    ///
    /// A block exits here if one of its warps exited because the host aborted its wait. It must not
    /// arrive at the peers' barrier: they would take its strips of C for complete. It is called
    /// once per launch, after [`reduce`](Self::reduce).
    pub(super) unsafe fn finish(&self) {
        if self.local_only {
            return;
        }
        thread::sync_threads();
        // SAFETY: no thread changes the word any more.
        let warps_done = unsafe { mem::load(words().add(1)) };
        if warps_done * warp::WARP_SIZE != thread::block_dim_x() {
            thread::exit();
        }
        self.comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block()).sync(MemoryOrder::AcqRel);
        // SAFETY: this is called once per launch. (A result kept since `new` takes registers.)
        unsafe { Epoch::begin(self.flags.local().as_ptr()).end(Coop::cta()) };
    }
}

#[cfg(test)]
mod tests;
