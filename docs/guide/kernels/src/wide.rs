//! A product fused with its all-reduce at Hopper's speed: the parts of a tile are sent while the
//! next tile is multiplied, and idle warps add what the peers send.

// ANCHOR: wide
use core::ops::Range;

use cuda_std::prelude::*;
use cuda_std::tile::{
    EmptyStage, IdleWarp, LastRows, Mainloop, Persistent, RegTile, Registers, SharedTile,
    StoresRows, TileOrder, Turn, Warpgroup,
};
use cuda_std::tma::{self, GridConstant, TensorMap};
use cuda_std::{cluster, grid};
use nccl_device::{DevComm, Everyone, LamportMemory, PeerTiles, message_word};

/// Rows and columns of a block's tile of C.
pub const TILE: (u32, u32) = (128, 256);
/// Rows of C that a warp stores at once.
pub const STORE_M: u32 = 16;
/// Blocks of a cluster, whose tiles are consecutive in a column of tiles.
pub const CLUSTER: u32 = 2;
/// Rows of B that a block loads for both blocks of its cluster.
pub const HALF: u32 = TILE.1 / CLUSTER;
/// Threads of a block: two warpgroups that multiply, and one whose first warp loads.
pub const THREADS: u32 = 384;
/// Warps that neither multiply nor load.
const IDLE_WARPS: u32 = 3;
/// Stages of 48 KiB: with the parts they fill the shared memory.
const STAGES: u32 = 4;

type A = SharedTile<bf16, { TILE.0 }>;
type B = SharedTile<bf16, { TILE.1 }>;
type Part = SharedTile<bf16, STORE_M>;

cuda_std::arena! {
    /// The shared memory of a block: the stages, and two parts for each of eight warps.
    pub struct Memory {
        a: [A; STAGES],
        b: [B; STAGES],
        parts: [Part; 16],
    }
}

/// Computes `C = sum over the N ranks of A x B^T`. The maps have tiles of 128 rows of A, [`HALF`]
/// of B and [`STORE_M`] of C; `to` is the address of C.
///
/// Grid: whole clusters, all resident, the same in all ranks. Block: [`THREADS`], with
/// [`Memory::BYTES`].
///
/// # Safety
///
/// The maps are those of `m x k`, `n x k` and `m x n` elements; the other arguments are as
/// [`PeerTiles::new`] needs them. While it runs, no other kernel writes A or B or accesses C.
#[kernel(
    arch = "sm_90a",
    max_threads = 384,
    cluster = 2,
    N = [2, 4, 8],
    requires(block.x == THREADS)
)]
pub unsafe fn product_all_reduce_wide<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    to: *mut bf16,
    memory: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    // SAFETY: the caller passes these maps and slots; the main loop ends with a barrier.
    unsafe {
        let peers = Peers::new(&comm, &memory, to, [m, n]);
        peers.prepare();
        Fused::<N> { a: &a, b: &b, c: &c, peers, memory: Memory::dynamic(), m, n, k }.run();
        peers.end(0); // The number matters only if owners store to all ranks.
    }
}

/// The parts that the ranks send, of which every rank adds all.
type Peers<'a, const N: usize> = PeerTiles<'a, Everyone, N>;

struct Fused<'a, const N: usize> {
    a: &'a TensorMap,
    b: &'a TensorMap,
    c: &'a TensorMap,
    peers: Peers<'a, N>,
    memory: Memory,
    m: u32,
    n: u32,
    k: u32,
}

impl<const N: usize> Fused<'_, N> {
    /// Returns the first row and column of this block's tile.
    fn origin(&self, turn: Turn) -> (u32, u32) {
        let rows = self.m.div_ceil(CLUSTER * TILE.0);
        // In groups of 8 rows the 66 clusters of an H100 compute a nearly square block of C.
        let order = TileOrder::<8> { rows, columns: self.n.div_ceil(TILE.1) };
        let (row, column) = order.position(turn.number);
        ((CLUSTER * row + cluster::rank()) * TILE.0, column * TILE.1)
    }

    /// Adds the peers' parts to `rows` of a tile, which `warps` warps divide: each takes every
    /// `warps`-th group of rows. The block has computed `before` tiles before this one.
    fn add(&self, (row, column): (u32, u32), rows: Range<u32>, warps: u32, before: u32) {
        let Some(lanes_column) = self.peers.column(row, column) else { return };
        // SAFETY: the callers have waited for the previous kernels. One warp adds each row, after
        // the wait for this rank's part of it.
        unsafe {
            let sums = self.peers.sums();
            let mut first = rows.start;
            while first < rows.end {
                self.peers.wait_stored(first / STORE_M, before);
                sums.add(lanes_column, first);
                first += warps * Peers::<N>::AT_ONCE;
            }
        }
    }
}

impl<const N: usize> StoresRows for Fused<'_, N> {
    type Element = bf16;
    type Place = (u32, u32);
    const REPORTS: bool = true;

    fn part(&self, group: &Warpgroup, which: u32) -> Part {
        self.memory.parts(2 * group.warp() + which)
    }

    fn encode(&self, word: u32) -> u32 {
        message_word(word)
    }

    /// Stores two parts to C, and sends them to the peers in a second bulk group, so that a wait
    /// for the stores does not wait for the messages.
    fn store(&self, group: &Warpgroup, (row, column): (u32, u32), first: u32) {
        let numbered = |i| (column + (first + i) * Part::COLUMNS, self.part(group, i));
        // SAFETY: each part is stored and sent once, after the previous kernels have ended.
        group.store(|| unsafe {
            for (column, part) in (0..2).map(numbered) {
                self.peers.keep(self.c, row, column, part);
            }
            tma::commit_stores();
            for (column, part) in (0..2).map(numbered) {
                self.peers.send(row, column, part);
            }
        });
    }

    fn stored(&self, warp: u32, tiles: u32) {
        self.peers.stored(warp, tiles);
    }
}

// SAFETY: each stage has tiles of its own, and `load` copies the bytes that the barrier expects.
unsafe impl<const N: usize> Mainloop for Fused<'_, N> {
    type Schedule = Persistent<CLUSTER>;
    /// 2 * 192 + 120 = 3 * 168, which a launch gives three warpgroups. Idle warps need 120 to add.
    type Registers = Registers<192, 120>;
    type Sums = RegTile<f32, 32>;
    type Source = (u32, u32);
    type State = LastRows<bf16, (u32, u32), 32>;
    const CLUSTER: u32 = CLUSTER;
    const INTERLUDES: u32 = 3;

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<CLUSTER> {
        let tiles = self.m.div_ceil(CLUSTER * TILE.0) * self.n.div_ceil(TILE.1);
        Persistent { tiles, steps: self.k.div_ceil(A::COLUMNS) }
    }

    fn source(&self, _: u32, turn: Turn) -> (u32, u32) {
        self.origin(turn)
    }

    fn load(&self, &(row, column): &(u32, u32), step: u32, stage: &EmptyStage) {
        let (number, term, half) = (stage.number(), step * A::COLUMNS, HALF * cluster::rank());
        stage.expect(A::BYTES + B::BYTES);
        stage.load(self.memory.a(number), self.a, row, term);
        let b = self.memory.b(number).rows::<HALF>(half);
        stage.load_multicast(b, self.b, column + half, term, 0b11); // To both blocks.
    }

    fn state(&self, _: &Warpgroup) -> Self::State {
        LastRows::none((0, 0)) // No tile has this place yet.
    }

    fn compute(
        &self,
        group: &Warpgroup,
        _: &mut Self::State,
        sums: &mut Self::Sums,
        stage: u32,
        first: bool,
    ) {
        let a = self.memory.a(stage).rows(64 * group.index()); // 64 for each warpgroup
        group.multiply(sums, a, self.memory.b(stage), !first);
    }

    /// Places the interludes in the next tile, so that each waits little: the left half of the
    /// rows is sent at once, the right half when TMA has read the left one, and then C is complete.
    fn pause(&self, index: u32) -> u32 {
        // All blocks send at once, so that half a tile takes TMA 24 steps; to store it takes 4.
        let left_is_sent = (self.k / A::COLUMNS / 2).min(24) + 1;
        [1, left_is_sent, left_is_sent + 4][index as usize]
    }

    fn interlude(&self, group: &Warpgroup, last: &mut Self::State, index: u32, turn: Turn) {
        last.interlude(group, index, self, || {
            let (row, column) = self.origin(turn);
            (row + STORE_M * group.warp(), column)
        });
    }

    fn finish(&self, group: &Warpgroup, last: &mut Self::State, turn: Turn, sums: &mut Self::Sums) {
        if turn.before == 0 {
            grid::wait_for_previous(); // The previous kernel may read C.
        }
        last.round(group, sums, turn.before, self);
    }

    /// Adds the peers' parts to this warp's own rows of the last tile.
    fn end(&self, group: &Warpgroup, last: &mut Self::State) {
        last.end(group, self);
        if let Some(before) = last.tiles().checked_sub(1) {
            let ((row, column), own, warps) = (last.place(), STORE_M * group.warp(), 1);
            self.add((row - own, column), own..own + STORE_M, warps, before);
        }
    }

    /// Adds the peers' parts to all tiles but the last.
    fn idle(&self, warp: &IdleWarp) {
        grid::wait_for_previous();
        let schedule = self.schedule();
        for next in 1..schedule.turns() {
            let before = next - 1;
            let tile = self.origin(schedule.turn(before));
            let first = warp.index() * Peers::<N>::AT_ONCE;
            self.add(tile, first..TILE.0, IDLE_WARPS, before);
        }
    }
}
// ANCHOR_END: wide
