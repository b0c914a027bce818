//! The product of 8-bit floats with a scale for each block of 128 terms, on Hopper.
//!
//! Tiles, loads and stores are those of [`gemm_wgmma`](super::gemm_wgmma). The tensor cores sum
//! only 128 terms, of 128 columns: these sums are multiplied by the scales and added in f32 by the
//! threads, while the tensor cores multiply for the other warpgroup. So only 128 terms are added
//! with the few bits of [`wgmma::multiply`] of 8-bit floats.

use cuda_std::convert::Float;
use cuda_std::prelude::*;
use cuda_std::tile::PipelineState;
use cuda_std::wgmma::Factor;
use cuda_std::{grid, hint, math, tma, wgmma};
use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap, TensorMapDesc};

use super::epilogue::{Epilogue, Fused};
use super::gemm_wgmma::{
    CLUSTER, Done, GemmFactor, Output, Part, SLICES, SLICES_WORDS, STORE_M, Shared, Store, TILE_N,
    WARPGROUP_M, origin, run,
};
use super::order::Order;

/// Terms, and rows of B, that share a scale: the terms of a step, and half of a tile's columns.
pub const BLOCK: u32 = 128;

/// `C = A x B^T` in bf16 of 8-bit floats with scales, and with an epilogue, for Hopper.
///
/// The scales are row-major matrices: `blocks_a` of `ceil(k / 128) x m`, in which element (`t`,
/// `i`) is that of row `i` of A and the 128 columns from `128 * t` on; `blocks_b` of `ceil(n / 128)
/// x ceil(k / 128)`, in which element (`j`, `t`) is that of the 128 rows of B from `128 * j` on and
/// the 128 columns from `128 * t` on.
///
/// The other arguments, the grid and the block are those of [`gemm_wgmma`](super::gemm_wgmma).
///
/// # Safety
///
/// As for [`gemm_wgmma`](super::gemm_wgmma::gemm_wgmma()). The scales have the elements, and no
/// other kernel writes them, but those before a dependent launch.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, T = [F8E4M3, F8E5M2])]
pub unsafe fn gemm_blocks<T: GemmFactor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    unaligned: *mut bf16,
    m: u32,
    n: u32,
    k: u32,
    blocks_a: *const f32,
    blocks_b: *const f32,
    epilogue: Fused<bf16>,
) {
    let scales = [blocks_a, blocks_b];
    // SAFETY: the kernel's contract.
    unsafe { product::<T, _>([&a, &b, &c], unaligned, [m, n, k], scales, epilogue) }
}

/// The body of [`gemm_blocks()`] with any epilogue, as that of
/// [`gemm_wgmma`](super::gemm_wgmma::product).
///
/// # Safety
///
/// As for [`gemm_blocks()`], and what the epilogue needs.
#[inline(always)]
pub unsafe fn product<T: GemmFactor, E: Epilogue>(
    [a, b, c]: [&TensorMap; 3],
    unaligned: *mut E::Output,
    [m, n, k]: [u32; 3],
    scales: [*const f32; 2],
    epilogue: E,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let multiply = |shared, order| {
            let c = Output { map: c, by_map: unaligned.is_null(), address: unaligned, m, n };
            multiply(c, shared, order, k.div_ceil(BLOCK), scales, epilogue);
        };
        run::<T, _>([a, b], [m, n, k], [false; 2], multiply, &());
    }
}

/// A thread's sums of a block of terms and of columns, as [`wgmma::multiply`] leaves them.
type Products = [f32; 64];

/// Computes the products of 64 rows of A, and of 128 rows of B from `row` on, of a block of terms.
///
/// # Safety
///
/// A warpgroup calls this; [`wgmma::multiply`] says what else.
#[inline(always)]
unsafe fn multiply_block<T: Factor>(
    products: &mut Products,
    [a, b]: [wgmma::Tile<T>; 2],
    row: u32,
) {
    let b = b.offset_bytes(row * TensorMapDesc::ROW_BYTES);
    // SAFETY: the caller's contract. No other code accesses the products between the two operand
    // fences.
    unsafe {
        wgmma::fence_operand(products);
        wgmma::fence();
        let mut term = 0;
        while term < BLOCK {
            wgmma::multiply(products, a.columns_from(term), b.columns_from(term), term > 0);
            term += T::TERMS;
        }
        wgmma::commit_group();
        wgmma::wait_groups::<0>();
        wgmma::fence_operand(products);
    }
}

/// Computes 64 rows of each of this block's tiles.
///
/// # Safety
///
/// The kernel's contract, and the multiplying warps of the block call it.
#[inline(always)]
unsafe fn multiply<T: GemmFactor, E: Epilogue>(
    c: Output<'_, E::Output>,
    shared: Shared<T>,
    order: Order,
    blocks: u32,
    scales: [*const f32; 2],
    epilogue: E,
) {
    let thread = thread::thread_idx_x();
    let (warp, lane) = (thread / warp::WARP_SIZE, warp::lane_id());
    let (warpgroup, rank) = (thread / 128, thread % 128);
    let mut state = PipelineState::FIRST;
    let mut tile = thread::block_idx_x() / CLUSTER;
    // The previous kernels may write the scales, and read C.
    grid::wait_for_previous();
    while tile < order.count() {
        let (row, column) = origin(order, tile);
        let done = Done { row: row + warp * STORE_M, column, end: u32::MAX };
        let mut products = [0.0; 64];
        let mut sums = [0.0; 128];
        // SAFETY: the caller's contract.
        unsafe {
            let scales = Scales::of(scales, lane, [done.row, c.m], [column, c.n], blocks);
            let mut next = scales.load(0);
            let mut block = 0;
            while block < blocks {
                shared.pipeline.wait_full(state);
                let factors = scales.factors(next);
                // The next scale arrives while this block is multiplied.
                block += 1;
                if block < blocks {
                    next = scales.load(block);
                }
                let a = shared.a(state).rows::<WARPGROUP_M>(warpgroup * WARPGROUP_M);
                let tiles = [a.factor(), shared.b(state).factor()];
                let mut half = 0;
                while half < 2 {
                    multiply_block(&mut products, tiles, half as u32 * BLOCK);
                    if half == 1 {
                        shared.release(state, rank);
                    }
                    let mut i = 0;
                    while i < products.len() {
                        let sum = &mut sums[half * products.len() + i];
                        *sum = math::fma(factors[half][i / 2 % 2], products[i], *sum);
                        i += 1;
                    }
                    // Before the next products, which come into the same registers.
                    wgmma::fence_operand(&mut sums);
                    half += 1;
                }
                state = shared.pipeline.next(state);
            }
        }
        // Unknown: nothing is computed from them before the loop, where registers are few.
        let (warp, lane) = (hint::opaque(warp), hint::opaque(lane));
        let (row, column) = (done.row + lane / 4, column + lane % 4 * 2);
        epilogue.apply(&mut Part { sums: &mut sums, row, column, end: (c.m, c.n) });
        let mut slice = 0;
        while slice < TILE_N / Store::<E::Output>::COLUMNS {
            let first = (slice / SLICES) as usize * SLICES_WORDS;
            let word = |i| E::Output::word(first + i, |i| sums[i]);
            // SAFETY: the caller's contract.
            unsafe {
                done.write::<T, E::Output>(shared, warp, lane, word);
                done.send(&c, shared, (warp, lane), slice, &());
            }
            slice += SLICES;
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
