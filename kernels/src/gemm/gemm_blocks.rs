//! The product of 8-bit floats with a scale for each block of 128 terms, on Hopper.
//!
//! Tiles, loads and stores are as those of [`gemm_wgmma`](super::gemm_wgmma). The tensor cores sum
//! only 128 terms, of 128 columns: these sums are multiplied by the scales and added in f32 by the
//! threads, while the tensor cores multiply for the other warpgroup. So only 128 terms are added
//! with the few bits of [`wgmma::multiply`] of 8-bit floats.

use core::marker::PhantomData;

use cuda_std::convert::Half;
use cuda_std::prelude::*;
use cuda_std::tile::{Pipeline, PipelineState, SharedTile, TileMemory, TileOrder};
use cuda_std::wgmma::Factor;
use cuda_std::{cluster, grid, math, tma, wgmma};
use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap};

/// Terms, and rows of B, that share a scale.
pub const BLOCK: u32 = 128;
/// Rows of a tile of C.
pub const TILE_M: u32 = 128;
/// Columns of a tile of C.
pub const TILE_N: u32 = 2 * BLOCK;
/// Rows of C that a warp stores at once.
pub const STORE_M: u32 = 16;
/// Columns of C that a warp stores at once.
const STORE_N: u32 = Store::COLUMNS;
/// Stores of a warp per tile.
const SLICES: u32 = TILE_N / STORE_N;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Stages of the pipeline.
const STAGES: u32 = 4;
/// Rows of tiles of C that are computed at the same time, of two blocks each.
const GROUP: u32 = 8;
/// Multiplying warps: two warpgroups.
const MULTIPLYING_WARPS: u32 = 8;
/// Rows of a warpgroup.
const WARPGROUP_M: u32 = 64;

type A<T> = SharedTile<T, TILE_M>;
type B<T> = SharedTile<T, TILE_N>;
type Store = SharedTile<bf16, STORE_M>;
/// A thread's sums of a block of terms and of columns, as [`wgmma::multiply`] leaves them.
type Products = [f32; 64];

/// Tiles have as many bytes for both types.
const STAGE_BYTES: u32 = A::<F8E4M3>::BYTES + B::<F8E4M3>::BYTES;
/// Two tiles for the stores of each warp: while TMA reads one, the warp writes the other.
const STORE_BYTES: u32 = 2 * MULTIPLYING_WARPS * Store::BYTES;
/// Dynamic shared memory in bytes, with what the alignment takes.
pub const SHARED: u32 = STAGES * STAGE_BYTES + STORE_BYTES + TileMemory::PADDING;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;

/// `C = A x B^T` in bf16 of 8-bit floats with scales, for Hopper.
///
/// The scales are row-major matrices: `scale_a` of `ceil(k / 128) x m`, in which element (`t`, `i`)
/// is that of row `i` of A and the 128 columns from `128 * t` on; `scale_b` of `ceil(n / 128) x
/// ceil(k / 128)`, in which element (`j`, `t`) is that of the 128 rows of B from `128 * j` on and
/// the 128 columns from `128 * t` on.
///
/// `a` is a tensor map with tiles of [`TILE_M`] rows, `b` one with tiles of `TILE_N / CLUSTER`, `c`
/// one with tiles of [`STORE_M`], which is used only if `unaligned` is null: C's address otherwise,
/// for `n` that is not a multiple of 8.
///
/// Grid: a multiple of [`CLUSTER`] blocks, at most one per multiprocessor. Block: [`THREADS`]
/// threads, with [`SHARED`] bytes. May be a dependent launch.
///
/// # Safety
///
/// The matrices of the maps are allocated, and have `m x k`, `n x k` and `m x n` elements, those of
/// the scales too. No other kernel writes A, B or the scales, or accesses C.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, T = [F8E4M3, F8E5M2])]
pub unsafe fn gemm_blocks<T: Factor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    unaligned: *mut bf16,
    m: u32,
    n: u32,
    k: u32,
    scale_a: *const f32,
    scale_b: *const f32,
) {
    grid::launch_next();
    let order =
        TileOrder::<GROUP> { rows: m.div_ceil(CLUSTER * TILE_M), columns: n.div_ceil(TILE_N) };
    let blocks = k.div_ceil(BLOCK);
    // SAFETY: only this pipeline uses the words; it is initialised first.
    let shared = unsafe {
        Shared::<T> {
            element: PhantomData,
            memory: TileMemory::dynamic(),
            pipeline: Pipeline::at(shared_array![u64; Pipeline::words(STAGES)], STAGES),
        }
    };
    let warp = thread::thread_idx_x() / warp::WARP_SIZE;
    // SAFETY: the kernel's contract. All threads of the cluster reach its barriers.
    unsafe {
        if thread::thread_idx_x() == 0 {
            // The two warpgroups of each block release a stage.
            shared.pipeline.init(1, CLUSTER * 2);
        }
        cluster::sync_relaxed();
        if warp < MULTIPLYING_WARPS {
            wgmma::raise_registers::<232>();
            grid::wait_for_previous();
            let scales = [scale_a, scale_b];
            multiply(Output { map: &c, unaligned, m, n }, shared, order, blocks, scales);
        } else {
            wgmma::lower_registers::<40>();
            if warp == MULTIPLYING_WARPS && warp::lane_id() == 0 {
                grid::wait_for_previous();
                load(&a, &b, shared, order, blocks);
            }
        }
        // No block ends while the other one still writes to its shared memory.
        cluster::sync();
    }
}

/// The block's shared memory.
#[derive(Clone, Copy)]
struct Shared<T> {
    element: PhantomData<T>,
    memory: TileMemory,
    pipeline: Pipeline,
}

impl<T: Factor> Shared<T> {
    #[inline(always)]
    fn a(self, state: PipelineState) -> A<T> {
        self.memory.tile(state.stage * STAGE_BYTES)
    }

    #[inline(always)]
    fn b(self, state: PipelineState) -> B<T> {
        self.memory.tile(state.stage * STAGE_BYTES + A::<T>::BYTES)
    }

    /// One of a warp's two tiles for stores.
    #[inline(always)]
    fn store(self, warp: u32, which: u32) -> Store {
        self.memory.tile(STAGES * STAGE_BYTES + (2 * warp + which) * Store::BYTES)
    }

    /// Starts the products of a stage's 64 rows of A, and of 128 rows of B from `row` on, which
    /// replace what `products` are.
    ///
    /// # Safety
    ///
    /// A warpgroup calls this; [`wgmma::multiply`] says what else.
    #[inline(always)]
    unsafe fn multiply(products: &mut Products, [a, b]: [wgmma::Tile<T>; 2], row: u32) {
        let b = b.offset_bytes(row * BLOCK);
        // SAFETY: the caller's contract.
        unsafe {
            wgmma::fence();
            let mut term = 0;
            while term < BLOCK {
                wgmma::multiply(products, a.columns_from(term), b.columns_from(term), term > 0);
                term += T::TERMS;
            }
            wgmma::commit_group();
        }
    }
}

/// The row and column of C from which this block computes the tile.
#[inline(always)]
fn origin(order: TileOrder<GROUP>, number: u32) -> (u32, u32) {
    let (row, column) = order.position(number);
    ((CLUSTER * row + cluster::rank()) * TILE_M, column * TILE_N)
}

/// Loads the factors of this cluster's tiles.
///
/// # Safety
///
/// The kernel's contract, and one thread of each block calls it.
#[inline(always)]
unsafe fn load<T: Factor>(
    a: &TensorMap,
    b: &TensorMap,
    shared: Shared<T>,
    order: TileOrder<GROUP>,
    blocks: u32,
) {
    const HALF: u32 = TILE_N / CLUSTER;
    tma::prefetch_map(a);
    tma::prefetch_map(b);
    let half = cluster::rank() * HALF;
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x() / CLUSTER;
    while tile < order.count() {
        let (row, column) = origin(order, tile);
        let mut block = 0;
        while block < blocks {
            shared.pipeline.wait_empty(state);
            let full = shared.pipeline.full(state);
            full.arrive_expect_tx(STAGE_BYTES);
            let b_half = shared.b(state).rows::<HALF>(half);
            // SAFETY: the stage is empty in both blocks, and no thread reads it before it is full.
            unsafe {
                shared.a(state).load(a, row, block * BLOCK, full);
                b_half.load_multicast(b, column + half, block * BLOCK, full, (1 << CLUSTER) - 1);
            }
            state = shared.pipeline.next(state);
            block += 1;
        }
        tile += thread::grid_dim_x() / CLUSTER;
    }
}

/// Computes 64 rows of each of this block's tiles.
///
/// # Safety
///
/// The kernel's contract, and the first [`MULTIPLYING_WARPS`] warps of the block call it.
#[inline(always)]
unsafe fn multiply<T: Factor>(
    c: Output<'_>,
    shared: Shared<T>,
    order: TileOrder<GROUP>,
    blocks: u32,
    scales: [*const f32; 2],
) {
    let thread = thread::thread_idx_x();
    let (warp, lane) = (thread / warp::WARP_SIZE, warp::lane_id());
    let (warpgroup, rank_in_warpgroup) = (thread / 128, thread % 128);
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x() / CLUSTER;
    let mut products = [0.0; 64];
    while tile < order.count() {
        let (row, column) = origin(order, tile);
        let row = row + warp * STORE_M;
        // SAFETY: the caller's contract. No other code accesses the products between the two
        // operand fences.
        unsafe {
            let scales = Scales::of(scales, lane, [row, c.m], [column, c.n], blocks);
            let mut sums = [0.0; 128];
            let mut next = scales.load(0);
            let mut block = 0;
            while block < blocks {
                shared.pipeline.wait_full(state);
                let factors = scales.factors(next);
                // The next scale arrives while this block is multiplied. If it is loaded behind the
                // first products, `ptxas` waits for some of these before it starts the others.
                block += 1;
                if block < blocks {
                    next = scales.load(block);
                }
                let a = shared.a(state).rows::<WARPGROUP_M>(warpgroup * WARPGROUP_M);
                let tiles = [a.factor(), shared.b(state).factor()];
                let mut half = 0;
                while half < 2 {
                    wgmma::fence_operand(&mut products);
                    Shared::multiply(&mut products, tiles, half as u32 * BLOCK);
                    wgmma::wait_groups::<0>();
                    wgmma::fence_operand(&mut products);
                    // One thread for each block of the cluster.
                    if half == 1 && rank_in_warpgroup < CLUSTER {
                        shared.pipeline.empty(state).arrive_in(rank_in_warpgroup);
                    }
                    let mut i = 0;
                    while i < products.len() {
                        let sum = &mut sums[half * products.len() + i];
                        *sum = math::fma(factors[half][i / 2 % 2], products[i], *sum);
                        i += 1;
                    }
                    half += 1;
                }
                state = shared.pipeline.next(state);
            }
            c.store(shared, warp, lane, (row, column), &sums);
        }
        tile += thread::grid_dim_x() / CLUSTER;
    }
    tma::wait_stores::<0>();
}

/// The scales of a thread's sums: of two rows of A and of two blocks of columns of C, which three
/// other lanes need too. Each of the four lanes loads one of them.
struct Scales {
    /// The lane's scale for the first block of terms.
    first: *const f32,
    /// The distance to that for the next one.
    stride: u32,
}

impl Scales {
    /// Those of a lane's sums of a tile, whose 16 rows begin at `row` of `m`, and whose columns at
    /// `column` of `n`, of `blocks` of terms.
    #[inline(always)]
    fn of(
        [a, b]: [*const f32; 2],
        lane: u32,
        [row, m]: [u32; 2],
        [column, n]: [u32; 2],
        blocks: u32,
    ) -> Self {
        // What lies behind C is not stored: it has the scales of the last row and block.
        let at = |index: u32, count: u32| if index < count { index } else { count - 1 } as usize;
        let (upper, which) = (row + lane / 4, lane % 4);
        if which < 2 {
            Self { first: a.wrapping_add(at(upper + 8 * which, m)), stride: m }
        } else {
            let block = at(column / BLOCK + which - 2, n.div_ceil(BLOCK));
            Self { first: b.wrapping_add(block * blocks as usize), stride: 1 }
        }
    }

    /// The lane's scale for a block of terms.
    ///
    /// # Safety
    ///
    /// The matrices have the block, and nothing writes them.
    #[inline(always)]
    unsafe fn load(&self, block: u32) -> f32 {
        // SAFETY: the caller's contract.
        unsafe { mem::load(self.first.add(block as usize * self.stride as usize)) }
    }

    /// By what the products are multiplied: for each block of columns, those of each row.
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together, with what each of them loaded.
    #[inline(always)]
    unsafe fn factors(&self, scale: f32) -> [[f32; 2]; 2] {
        // SAFETY: the caller's contract.
        let of = |which| unsafe { warp::warp_shuffle_idx(warp::FULL_MASK, scale, which, 4).0 };
        let rows = [of(0), of(1)];
        [of(2), of(3)].map(|columns| rows.map(|row| row * columns))
    }
}

/// Where the sums go.
struct Output<'a> {
    map: &'a TensorMap,
    unaligned: *mut bf16,
    m: u32,
    n: u32,
}

impl Output<'_> {
    /// Stores a warp's part of a tile: 16 rows and 256 columns from these on.
    ///
    /// # Safety
    ///
    /// The lanes of a warp call this together.
    #[inline(always)]
    unsafe fn store<T: Factor>(
        &self,
        shared: Shared<T>,
        warp: u32,
        lane: u32,
        (row, column): (u32, u32),
        sums: &[f32; 128],
    ) {
        let mut slice = 0;
        while slice < SLICES {
            let (to, column) = (shared.store(warp, slice % 2), column + slice * STORE_N);
            let pair = |i| bf16::pack([sums[2 * i], sums[2 * i + 1]]);
            // SAFETY: the caller's contract. TMA has read the tile before the warp writes it again.
            unsafe {
                if lane == 0 {
                    tma::wait_stores_read::<1>();
                }
                warp::sync();
                to.store_words(lane, |i| pair(16 * slice as usize + i));
                tma::fence_async_shared();
                warp::sync();
                if !self.unaligned.is_null() {
                    self.store_elements(lane, row, column, to);
                } else if lane == 0 {
                    to.store(self.map, row, column);
                    tma::commit_stores();
                }
            }
            slice += 1;
        }
    }

    /// Stores a warp's tile, element by element.
    ///
    /// # Safety
    ///
    /// `unaligned` is C's address. The lanes of a warp call this together, and write the tile again
    /// after a barrier.
    #[inline(always)]
    unsafe fn store_elements(&self, lane: u32, row: u32, column: u32, tile: Store) {
        let mut i = 0;
        while i < STORE_M * STORE_N / warp::WARP_SIZE {
            let (r, in_tile) = (i / 2, warp::WARP_SIZE * (i % 2) + lane);
            let (row, column) = (row + r, column + in_tile);
            if row < self.m && column < self.n {
                let at = row as usize * self.n as usize + column as usize;
                // SAFETY: the element lies in C.
                unsafe { mem::store(self.unaligned.cast::<u16>().add(at), tile.bits(r, in_tile)) };
            }
            i += 1;
        }
    }
}
