//! Step 8: a block computes tile after tile, in an order with more hits in the L2 cache, and TMA
//! stores them. The library has the loops.

use cuda_std::prelude::*;
use cuda_std::tile::{
    EmptyStage, Mainloop, Persistent, RegTile, Registers, SharedTile, TileOrder, Turn, Warpgroup,
};
use cuda_std::tma::{self, GridConstant, TensorMap};
use cuda_std::{cluster, grid};

use crate::warpgroup::ROWS;

/// Rows of C of a block.
pub const TILE_M: u32 = 128;
/// Columns of C of a block.
pub const TILE_N: u32 = 256;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Rows of B that a block loads.
pub const HALF: u32 = TILE_N / CLUSTER;
/// Rows of tiles of C, of two blocks each, that are computed at the same time: the 66 clusters of
/// an H100 then compute a nearly square block of C.
const GROUP: u32 = 8;
/// Rows of C that a warp stores, all that it has of a tile.
pub const STORE_M: u32 = 16;
/// Stages of the pipeline.
const STAGES: u32 = 4;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;

type A = SharedTile<bf16, TILE_M>;
type B = SharedTile<bf16, TILE_N>;
type Part = SharedTile<bf16, STORE_M>;

cuda_std::arena! {
    /// The shared memory of a block, with two parts of each of eight warps' stores.
    pub struct Memory {
        a: [A; STAGES],
        b: [B; STAGES],
        parts: [Part; 16],
    }
}

/// Computes `C = A x B^T`. `a`, `b` and `c` are tensor maps with tiles of [`TILE_M`], [`HALF`] and
/// [`STORE_M`] rows.
///
/// Grid: a multiple of [`CLUSTER`] blocks, at most one per multiprocessor. Block: [`THREADS`]
/// threads, with [`Memory::BYTES`].
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2)]
pub unsafe fn step8_persistent(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
) {
    let order = TileOrder { rows: m / (CLUSTER * TILE_M), columns: n / TILE_N };
    let steps = k / A::COLUMNS;
    let product = Product { a: &a, b: &b, c: &c, order, steps, memory: Memory::dynamic() };
    // SAFETY: all threads of the grid call this, with maps of allocated matrices: the contract.
    unsafe { product.run() }
}

struct Product<'a> {
    a: &'a TensorMap,
    b: &'a TensorMap,
    c: &'a TensorMap,
    order: TileOrder<GROUP>,
    steps: u32,
    memory: Memory,
}

impl Product<'_> {
    /// Returns the first row and column of the block's tile.
    fn origin(&self, turn: Turn) -> (u32, u32) {
        let (row, column) = self.order.position(turn.number);
        ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N)
    }
}

// SAFETY: each stage has its own tiles, and `load` loads the bytes that it lets the stage expect.
unsafe impl Mainloop for Product<'_> {
    type Schedule = Persistent<CLUSTER>;
    type Registers = Registers<232, 40>;
    type Sums = RegTile<f32, 32>;
    type Source = (u32, u32);
    type State = ();
    const CLUSTER: u32 = CLUSTER;

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<CLUSTER> {
        Persistent { tiles: self.order.count(), steps: self.steps }
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

    fn state(&self, _: &Warpgroup) {}

    fn compute(
        &self,
        group: &Warpgroup,
        (): &mut (),
        sums: &mut Self::Sums,
        stage: u32,
        first: bool,
    ) {
        let a = self.memory.a(stage).rows(ROWS * group.index());
        group.multiply(sums, a, self.memory.b(stage), !first);
    }

    /// Stores a warp's 16 rows, 64 columns at a time.
    fn finish(&self, group: &Warpgroup, (): &mut (), turn: Turn, sums: &mut Self::Sums) {
        grid::wait_for_previous(); // The previous kernel may read C.
        let (row, column) = self.origin(turn);
        let row = row + STORE_M * group.warp();
        let mut slice = 0;
        while slice < TILE_N / Part::COLUMNS {
            let part = self.memory.parts(2 * group.warp() + slice % 2);
            if warp::lane_id() == 0 {
                // Only the store of the other part may still read.
                tma::wait_stores_read::<1>();
            }
            // SAFETY: all lanes of the warp call this together, and TMA has read the part.
            unsafe {
                warp::sync();
                sums.store(part, slice * Part::COLUMNS);
            }
            group.store(|| {
                // SAFETY: the part is written, and only this warp writes these elements of C.
                unsafe { part.store(self.c, row, column + slice * Part::COLUMNS) }
            });
            slice += 1;
        }
    }

    fn end(&self, _: &Warpgroup, (): &mut ()) {
        tma::wait_stores::<0>();
    }
}
