//! A product of few rows fused with its all-reduce, at Hopper's speed: the weights B are the first
//! operand of the tensor cores, and the sums are sent to the other ranks from registers.

// ANCHOR: few
use cuda_std::grid;
use cuda_std::prelude::*;
use cuda_std::tile::{EmptyStage, Mainloop, Persistent, RegTile, SharedTile, Turn, Warpgroup};
use cuda_std::tma::{self, GridConstant, TensorMap};
use nccl_device::{DevComm, LamportMemory, PeerRegTiles};

/// Rows and columns of a block's tile of C.
pub const TILE: (u32, u32) = (64, 64);
/// Threads of a block: a warpgroup that multiplies, and another one, two of whose warps load.
pub const THREADS: u32 = 256;
/// The number of the warp that loads A; the other loading warp loads B.
const LOADS_A: u32 = 1;
/// Stages of 16 KiB: 192 KiB are on their way from memory at a time.
const STAGES: u32 = 12;
/// The computing warps, each with 16 columns of C.
const WARPS: u32 = 4;

type A = SharedTile<bf16, { TILE.0 }>;
type B = SharedTile<bf16, { TILE.1 }>;

cuda_std::arena! {
    /// The shared memory of a block: the stages, and the tile of C that is stored.
    pub struct Memory {
        a: [A; STAGES],
        b: [B; STAGES],
        c: [SharedTile<bf16, { TILE.0 }>; 1],
    }
}

/// Returns the number of slots of an `m x n` matrix for each sending rank, if it fits in 32 bits.
#[must_use]
pub fn slots(m: usize, n: usize) -> Option<u32> {
    let tiles = m.div_ceil(TILE.0 as usize).checked_mul(n.div_ceil(TILE.1 as usize))?;
    PeerRegTiles::<2>::slots(tiles.checked_mul(WARPS as usize)?, TILE.0 as usize)
}

/// Computes `C = sum over the N ranks of A x B^T`. The maps have tiles of 64 rows. Loads of B begin
/// before the previous kernel has ended.
///
/// Grid: any, all resident, the same in all ranks. Block: [`THREADS`], with [`Memory::BYTES`].
///
/// # Safety
///
/// The maps are those of `m x k`, `n x k` and `m x n` elements; `peers` is as
/// [`PeerRegTiles::begin`] needs it. No kernel writes B.
#[kernel(arch = "sm_90a", max_threads = 256, N = [2, 4, 8], requires(block.x == THREADS))]
pub unsafe fn product_all_reduce_few<const N: usize>(
    comm: DevComm,
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    peers: LamportMemory,
    m: u32,
    n: u32,
    k: u32,
) {
    let (comm, memory) = (&comm, Memory::dynamic());
    let fused = Fused::<N> { comm, a: &a, b: &b, c: &c, peers, memory, m, n, k };
    // SAFETY: all threads are here, and the caller passes these maps.
    unsafe { fused.run() }
}

struct Fused<'a, const N: usize> {
    comm: &'a DevComm,
    a: &'a TensorMap,
    b: &'a TensorMap,
    c: &'a TensorMap,
    peers: LamportMemory,
    memory: Memory,
    m: u32,
    n: u32,
    k: u32,
}

impl<const N: usize> Fused<'_, N> {
    fn tiles(&self) -> u32 {
        self.m.div_ceil(TILE.0) * self.n.div_ceil(TILE.1)
    }

    /// Returns the first row and column of a tile. Blocks that run together share columns of C.
    fn origin(&self, turn: Turn) -> [u32; 2] {
        let rows = self.m.div_ceil(TILE.0);
        [turn.number % rows * TILE.0, turn.number / rows * TILE.1]
    }
}

// SAFETY: each stage has tiles of its own, and `load` copies the bytes that the barrier expects.
unsafe impl<'a, const N: usize> Mainloop for Fused<'a, N> {
    type Schedule = Persistent<1>;
    type Registers = ();
    /// 64 columns of C, 16 for each warp, and 64 rows.
    type Sums = RegTile<f32, 8>;
    type Source = [u32; 2];
    type State = PeerRegTiles<'a, N>;
    const COMPUTING: u32 = 1;
    const LOADING: u32 = 2;

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<1> {
        Persistent { tiles: self.tiles(), steps: self.k.div_ceil(A::COLUMNS) }
    }

    /// Waits for the previous kernel, except in the first warp: it loads B, which no kernel writes.
    fn wait(&self, loader: u32) {
        if loader == LOADS_A {
            grid::wait_for_previous();
        }
    }

    fn source(&self, _: u32, turn: Turn) -> [u32; 2] {
        self.origin(turn)
    }

    fn load(&self, &[row, column]: &[u32; 2], step: u32, stage: &EmptyStage) {
        let (number, term) = (stage.number(), step * A::COLUMNS);
        if stage.loader() == LOADS_A {
            stage.expect(A::BYTES);
            stage.load(self.memory.a(number), self.a, row, term);
        } else {
            stage.expect(B::BYTES);
            stage.load_once(self.memory.b(number), self.b, column, term);
        }
    }

    fn state(&self, _: &Warpgroup) -> PeerRegTiles<'a, N> {
        grid::wait_for_previous();
        // A number that does not fit in 32 bits is more than any capacity: `begin` traps.
        let used = slots(self.m as usize, self.n as usize).unwrap_or(u32::MAX);
        // SAFETY: the previous kernels have ended; the caller passes slots for these shapes.
        unsafe { PeerRegTiles::begin(self.comm, &self.peers, used) }
    }

    fn compute(
        &self,
        group: &Warpgroup,
        _: &mut PeerRegTiles<'a, N>,
        sums: &mut RegTile<f32, 8>,
        stage: u32,
        first: bool,
    ) {
        group.multiply(sums, self.memory.b(stage), self.memory.a(stage), !first);
    }

    fn finish(
        &self,
        group: &Warpgroup,
        peers: &mut PeerRegTiles<'a, N>,
        turn: Turn,
        sums: &mut RegTile<f32, 8>,
    ) {
        let [row, column] = self.origin(turn);
        let rows_left = self.m - row; // The columns of the sums that C has.
        // SAFETY: each warp of each tile has a number of its own, the same in all ranks.
        unsafe { peers.add(WARPS * turn.number + group.warp(), sums, rows_left) };
        group.store_transposed(sums, self.memory.c(0), self.c, row, column);
    }

    fn end(&self, group: &Warpgroup, peers: &mut PeerRegTiles<'a, N>) {
        if group.thread() == 0 {
            tma::wait_stores::<0>();
            // SAFETY: one thread of the block is here. All threads have called `add`, since
            // `store_transposed` has a barrier.
            unsafe { peers.end() };
        }
    }
}
// ANCHOR_END: few
