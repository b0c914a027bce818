//! The product of 8-bit floats with a scale for each block of 128 terms, on Hopper.
//!
//! Tiles, loads and stores are those of [`gemm_wgmma`](super::gemm_wgmma). The tensor cores sum
//! only 128 terms, of 128 columns: these sums are multiplied by the scales and added in f32 by the
//! threads, while the tensor cores multiply for the other warpgroup. So only 128 terms are added
//! with the low precision of [`wgmma::multiply`] of 8-bit floats.

use cuda_std::tile::store_rows;
use cuda_std::wgmma::Factor;
use devcomm_types::TensorMapDesc;

use super::gemm_wgmma::{STORE_M, WARPGROUP_M};
use super::prelude::*;

/// Terms, and rows of B, that share a scale: the terms of a step, and half of a tile's columns.
pub const BLOCK: u32 = 128;

/// Computes `C = A x B^T` in bf16 of 8-bit floats with scales, and with an epilogue, for Hopper.
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
/// As for [`gemm_wgmma`](super::gemm_wgmma::gemm_wgmma()). The matrices of scales have these
/// elements, and no other kernel writes them, but those before a dependent launch.
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
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { product::<T, _>([&a, &b, &c], unaligned, [m, n, k], scales, epilogue) }
}

/// Computes what [`gemm_blocks()`] does, with any epilogue, as the `product` of
/// [`gemm_wgmma`](super::gemm_wgmma::product) does.
///
/// # Safety
///
/// As for [`gemm_blocks()`], and what the epilogue needs.
pub unsafe fn product<T: GemmFactor, E: Epilogue>(
    maps: [&TensorMap; 3],
    unaligned: *mut E::Output,
    extents: [u32; 3],
    scales: [*const f32; 2],
    epilogue: E,
) {
    const { assert!(size_of::<E::Output>() > 1, "C has elements of 16 or 32 bits") };
    let mut product = Product::<T, E, _>::new(maps, unaligned, extents, [false; 2], epilogue, &());
    product.order = Some(Order::whole([extents[0], extents[1]]));
    // SAFETY: the caller passes the matrices, scales, grid and block that the kernel needs.
    unsafe { Blocks { product, scales }.run() }
}

/// A thread's sums of 128 terms and 128 columns, as [`wgmma::multiply`] leaves them.
type Products = [f32; 64];

/// Computes the products of 64 rows of A, and of 128 rows of B from `row` on, of a block of terms.
/// A whole warpgroup calls this, with tiles as [`wgmma::multiply`] needs them.
unsafe fn multiply_block<T: Factor>(
    products: &mut Products,
    [a, b]: [wgmma::Tile<T>; 2],
    row: u32,
) {
    let b = b.offset_bytes(row * TensorMapDesc::ROW_BYTES);
    // SAFETY: the caller is a warpgroup with tiles for `multiply`. No other code accesses the
    // products between the two operand fences.
    unsafe {
        wgmma::fence_operand(products);
        wgmma::fence();
        for term in Strided::new(0, BLOCK, T::TERMS) {
            wgmma::multiply(products, a.columns_from(term), b.columns_from(term), term > 0);
        }
        wgmma::commit_group();
        wgmma::wait_groups::<0>();
        wgmma::fence_operand(products);
    }
}

/// The product's part of the main loop.
struct Blocks<'a, T, E: Epilogue> {
    product: Product<'a, T, E, ()>,
    scales: [*const f32; 2],
}

/// The state of a thread that multiplies.
struct State {
    rows: Tile,
    scales: Scales,
    /// The scale for the next block of terms, which arrives while this one is multiplied.
    next: f32,
    block: u32,
}

// SAFETY: a stage's loads have the bytes that `expect` announces; `compute` waits for products.
unsafe impl<'a, T: GemmFactor, E: Epilogue> Mainloop for Blocks<'a, T, E> {
    type Schedule = Persistent<CLUSTER>;
    type Registers = IdleRegisters;
    type Sums = Sums;
    type Source = (&'a TensorMap, u32, u32);
    type State = State;

    const CLUSTER: u32 = CLUSTER;
    const STEP: u32 = BLOCK;
    const COMPLETES: bool = true;

    fn stages(&self) -> u32 {
        STAGES
    }

    fn schedule(&self) -> Persistent<CLUSTER> {
        self.product.schedule()
    }

    fn prepare(&self, loader: u32) {
        self.product.prepare(loader);
    }

    fn wait(&self, loader: u32) {
        self.product.wait(loader);
    }

    fn source(&self, loader: u32, work: Turn) -> Self::Source {
        self.product.source(loader, work)
    }

    fn load(&self, source: &Self::Source, term: u32, stage: &EmptyStage) {
        self.product.load(source, term, stage);
    }

    fn state(&self, _: &Warpgroup) -> State {
        // The previous kernels may write the scales, and read C.
        grid::wait_for_previous();
        State { rows: Tile::NONE, scales: Scales::NONE, next: 0.0, block: 0 }
    }

    fn start(&self, group: &Warpgroup, state: &mut State, work: Turn) {
        let &Product { m, n, k, .. } = &self.product;
        let Tile { row, column, .. } = self.product.order().tile(work.number);
        state.rows = Tile { row: row + group.warp() * STORE_M, column, ..Tile::NONE };
        let (rows, columns) = ([state.rows.row, m], [column, n]);
        state.scales = Scales::of(self.scales, warp::lane_id(), rows, columns, k.div_ceil(BLOCK));
        // SAFETY: the kernel's caller passes scales for each block of `k`: for one at least.
        state.next = unsafe { state.scales.load(0) };
        state.block = 0;
    }

    fn compute(&self, group: &Warpgroup, state: &mut State, sums: &mut Sums, stage: u32, _: bool) {
        // The main loop begins with sums of 0, so the first products are added too.
        let product = &self.product;
        let mut products = [0.0; 64];
        // SAFETY: a whole warpgroup computes a stage that has arrived; each block has scales.
        unsafe {
            let factors = state.scales.factors(state.next);
            state.block += 1;
            if state.block < product.k.div_ceil(BLOCK) {
                state.next = state.scales.load(state.block);
            }
            let a = product.a(stage).rows::<WARPGROUP_M>(group.index() * WARPGROUP_M);
            let tiles = [a.factor(), product.b(stage).factor()];
            for half in 0..2 {
                multiply_block(&mut products, tiles, half as u32 * BLOCK);
                for i in 0..products.len() {
                    let sum = &mut sums.blocks_mut()[16 * half + i / 4][i % 4];
                    *sum = math::fma(factors[half][i / 2 % 2], products[i], *sum);
                }
                // This is before the next products, which come into the same registers.
                wgmma::fence_operand(sums);
            }
        }
    }

    fn finish(&self, group: &Warpgroup, state: &mut State, _: Turn, sums: &mut Sums) {
        self.product.apply_epilogue(sums, state.rows);
        store_rows(group, sums, state.rows, &self.product);
    }

    fn end(&self, _: &Warpgroup, _: &mut State) {
        tma::wait_stores::<0>();
    }
}

/// The scales of a thread's sums: of two rows of A and of two blocks of columns of C, which three
/// other lanes need too. Each of the four lanes loads one of them.
struct Scales {
    /// The lane's scale for the first block of terms.
    first: *const f32,
    /// Elements between its scales for two successive blocks of terms.
    stride: u32,
}

impl Scales {
    const NONE: Self = Self { first: core::ptr::null(), stride: 0 };

    /// Returns the scales of a lane's sums. The tile's 16 rows begin at `row` of `m`, its columns
    /// at `column` of `n`, and there are `blocks` blocks of terms.
    fn of(
        [a, b]: [*const f32; 2],
        lane: u32,
        [row, m]: [u32; 2],
        [column, n]: [u32; 2],
        blocks: u32,
    ) -> Self {
        // Elements beyond C are not stored: they use the scales of the last row and block.
        let at = |index: u32, count: u32| if index < count { index } else { count - 1 } as usize;
        let (upper, which) = (row + lane / 4, lane % 4);
        if which < 2 {
            Self { first: a.wrapping_add(at(upper + 8 * which, m)), stride: m }
        } else {
            let block = at(column / BLOCK + which - 2, n.div_ceil(BLOCK));
            Self { first: b.wrapping_add(block * blocks as usize), stride: 1 }
        }
    }

    /// Loads the lane's scale for a block of terms. The matrices have the block, and nothing writes
    /// them.
    unsafe fn load(&self, block: u32) -> f32 {
        // SAFETY: the caller passes a block below the number of blocks, and the matrices have it.
        unsafe { mem::load(self.first.add(block as usize * self.stride as usize)) }
    }

    /// Returns the numbers by which the products are multiplied: for each block of columns, one for
    /// each of the two rows. The lanes of a warp call this together, with what each of them loaded.
    unsafe fn factors(&self, scale: f32) -> [[f32; 2]; 2] {
        // SAFETY: the caller has all lanes of the warp here.
        let lane = |which| unsafe { warp::warp_shuffle_idx(warp::FULL_MASK, scale, which, 4).0 };
        let rows = [lane(0), lane(1)];
        [lane(2), lane(3)].map(|columns| rows.map(|row| row * columns))
    }
}
