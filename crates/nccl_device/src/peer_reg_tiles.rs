//! Sums over the ranks of tiles in registers, without a barrier.

use crate::prelude::*;
use cuda_std::prelude::*;
use cuda_std::tile::RegTile;

use crate::{Lamport, LamportMemory, LamportSlots, message};

/// Elements of a message.
const LANES: usize = Vec16::<bf16>::LANES;
/// Messages that a lane polls at the same time.
const AT_ONCE: usize = 8;

/// The sums over the `N` ranks of the LSA team, which are 2, 4 or 8, of tiles in registers, such as
/// those of a product of few rows. Each lane sends its elements to the same lane of every peer, as
/// [`Lamport`] messages. So all ranks must have the same tiles in the same warps.
///
/// A warp sends all of a tile before it receives any of it, and the same warp of each peer adds the
/// same tiles in the same order. So a rank never waits for a message that a peer sends only after
/// it has received one of a later tile.
///
/// The guide's chapter about fused kernels has an example. For tiles in shared memory, whose sums
/// other warps add, there is [`PeerTiles`](crate::PeerTiles).
#[derive(Clone, Copy)]
pub struct PeerRegTiles<'a, const N: usize> {
    session: Lamport<'a, N, false>,
}

#[track_callers]
impl<'a, const N: usize> PeerRegTiles<'a, N> {
    /// Returns the number of slots of `tiles` tiles of 16 rows and `columns` columns, a multiple of
    /// 16, for each rank that sends, if it fits in 32 bits.
    #[must_use]
    pub fn slots(tiles: usize, columns: usize) -> Option<u32> {
        u32::try_from(tiles.checked_mul(columns / 16)?.checked_mul(32)?).ok()
    }

    /// Begins a launch's exchange of `used` slots. Traps if there are fewer.
    ///
    /// # Safety
    ///
    /// The previous kernels have ended. `memory` is as [`LamportSlots::new`] and
    /// [`LamportSlots::begin`] need it. The ranks' launches have the same grid, and each warp has
    /// the same tiles.
    pub unsafe fn begin(comm: &'a DevComm, memory: &LamportMemory, used: u32) -> Self {
        const { assert!(N == 2 || N == 4 || N == 8, "tiles are added over 2, 4 or 8 ranks") };
        // SAFETY: the caller's slots and state are those of `begin`, and the ranks launch the same.
        let session = unsafe { LamportSlots::new(comm, memory).begin(used) };
        Self { session: session.continue_after_abort() }
    }

    /// Rounds the elements of tile `number` to bf16, sends them to the peers, and replaces them by
    /// the sums of all ranks' rounded elements, added in f32 and in the order of the ranks: all
    /// ranks get the same bits. -0 counts as +0. Only the first `columns` columns are sent, and up
    /// to 15 after them; the sums of the other columns have no meaning.
    ///
    /// If the host aborts the wait, this returns too, and no sum has a meaning: other warps of the
    /// block may wait for this one at barriers that an abort does not end.
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together, once for each number in a launch, with the same
    /// arguments and in the same order in all ranks. Each tile has `s` = [`slots`](Self::slots) of
    /// one tile; this tile's slots, from `number * s` on, are below the capacity.
    pub unsafe fn add<const BLOCKS: usize>(
        &self,
        number: u32,
        tile: &mut RegTile<f32, BLOCKS>,
        columns: u32,
    ) {
        const {
            assert!(BLOCKS.is_multiple_of(2), "a message has two blocks of 8 columns");
            let blocks_at_once = 2 * AT_ONCE / N;
            let is_divided = BLOCKS.is_multiple_of(blocks_at_once);
            assert!(BLOCKS <= blocks_at_once || is_divided, "no equal shares");
        }
        let vectors = BLOCKS / 2;
        let slot = |i: usize| (number * vectors as u32 + i as u32) * 32 + warp::lane_id();
        let is_sent = |i: usize| i < vectors && 16 * (i as u32) < columns;
        let mut i = 0;
        while i < vectors {
            if is_sent(i) {
                let (vector, mut distance) = (rounded(tile, i), 1);
                while distance < N {
                    // SAFETY: the caller's contract: the slot is this lane's.
                    unsafe { self.session.send(distance, slot(i), vector) };
                    distance += 1;
                }
            }
            i += 1;
        }
        let me = self.session.me();
        // Vectors of which the messages of all ranks are polled at the same time.
        let at_once = if AT_ONCE / N < vectors { AT_ONCE / N } else { vectors };
        let mut first = 0;
        while first < vectors {
            // Returns the vector of a message, from `first` on, and the rank that sends it.
            let place = |message: usize| (message / N, message % N);
            let source = |message| {
                let (i, rank) = place(message);
                let is_sent = i < at_once && is_sent(first + i) && rank != me;
                is_sent.then(|| (rank, slot(first + i)))
            };
            let nothing = [Vec16::<bf16>::from_bits([0; 4]); AT_ONCE];
            // SAFETY: the caller's contract: the peers' same lanes send to these slots.
            let theirs = unsafe { self.session.receive_each(nothing, source, 0) };
            let (mut message, mut sum) = (0, [0.0; LANES]);
            while message < AT_ONCE {
                let (i, rank) = place(message);
                if i < at_once {
                    let part = if rank == me { rounded(tile, i) } else { theirs[message] };
                    bf16::add(&mut sum, part);
                    if rank == N - 1 {
                        replace(tile, i, sum);
                        sum = [0.0; LANES];
                    }
                }
                message += 1;
            }
            // The next blocks move to the front, and the first ones return there at the end: an
            // index that is not constant would put the tile in local memory.
            rotate(tile, 2 * at_once);
            first += at_once;
        }
    }

    /// Ends the launch's exchange for this block.
    ///
    /// # Safety
    ///
    /// One thread of each block calls this, once, after a barrier of the threads that add.
    pub unsafe fn end(&self) {
        // SAFETY: the caller is one thread of the block, after a barrier of those that add.
        unsafe { self.session.end(Coop::thread()) };
    }
}

/// Returns a lane's elements of the `i`-th two blocks of columns, as peers receive them.
fn rounded<const BLOCKS: usize>(tile: &RegTile<f32, BLOCKS>, i: usize) -> Vec16<bf16> {
    let [a, b, c, d] = tile.blocks()[2 * i];
    let [e, f, g, h] = tile.blocks()[2 * i + 1];
    message(bf16::narrow([a, b, c, d, e, f, g, h]))
}

fn replace<const BLOCKS: usize>(tile: &mut RegTile<f32, BLOCKS>, i: usize, by: [f32; LANES]) {
    let [a, b, c, d, e, f, g, h] = by;
    tile.blocks_mut()[2 * i] = [a, b, c, d];
    tile.blocks_mut()[2 * i + 1] = [e, f, g, h];
}

/// Moves the blocks of columns to the left, the first ones to the end.
fn rotate<const BLOCKS: usize>(tile: &mut RegTile<f32, BLOCKS>, by: usize) {
    let (old, mut block) = (*tile.blocks(), 0);
    while block < BLOCKS {
        tile.blocks_mut()[block] = old[(block + by) % BLOCKS];
        block += 1;
    }
}
