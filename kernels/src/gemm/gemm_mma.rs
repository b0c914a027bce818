//! The product on every GPU since Ampere, for matrices of any size and alignment.
//!
//! A block computes tiles of 128 x 128 elements of C, one after the other. Its four warps have 64 x
//! 64 elements each; together they copy the factors to a pipeline of three stages, which leaves
//! shared memory for a second block on every GPU.

use cuda_std::convert::Half;
use cuda_std::mma::Factor;
use cuda_std::prelude::*;
use cuda_std::tile::{Matrix, MmaProduct, TileOrder};

/// Rows and columns of a tile of C.
pub const TILE: u32 = 128;
/// Stages of the pipeline.
const STAGES: u32 = 3;
/// Rows of tiles of C that are computed at the same time.
const GROUP: u32 = 16;
/// Rows and columns of a warp.
const WARP_TILE: u32 = 64;
/// Threads per block.
pub const THREADS: u32 = 128;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = Product::<bf16>::BYTES;

type Product<T> = MmaProduct<T, TILE, TILE, STAGES, THREADS>;
/// A warp's sums: 4 x 8 fragments of 16 x 8.
type Sums = [[[f32; 4]; 8]; 4];

/// `C = A x B^T`, for every GPU since Ampere.
///
/// It is fastest if rows of A and B begin at multiples of 16 bytes, and slowest if `k` is odd.
///
/// Grid: any; a block has work if there is a tile of [`TILE`] x [`TILE`] elements for it. Block:
/// [`THREADS`] threads, with [`SHARED`] bytes.
///
/// # Safety
///
/// `a`, `b` and `c` have `m x k`, `n x k` and `m x n` elements. `m`, `n` and `k` are not 0 and at
/// most 2^31 - 512, and there are fewer than 2^31 tiles. No other kernel writes A or B, or accesses
/// C.
#[kernel(T = [f16, bf16], arch = "sm_80", max_threads = 128)]
pub unsafe fn gemm_mma<T: Factor + Half>(
    a: *const T,
    b: *const T,
    c: *mut T,
    m: u32,
    n: u32,
    k: u32,
) {
    let a = Matrix { address: a, rows: m, columns: k };
    let b = Matrix { address: b, rows: n, columns: k };
    let product = Product { a, b, memory: shared::dynamic_shared_mem() };
    // SAFETY: the kernel's contract.
    unsafe {
        match a.row_alignment().min(b.row_alignment()) {
            16 => compute::<T, 16>(product, c),
            4 => compute::<T, 4>(product, c),
            _ => compute::<T, 2>(product, c),
        }
    }
}

/// Computes and stores this block's tiles.
///
/// # Safety
///
/// The kernel's contract; rows of the factors are aligned to `ALIGN` bytes.
#[inline(always)]
unsafe fn compute<T: Factor + Half, const ALIGN: u32>(product: Product<T>, c: *mut T) {
    let (m, n) = (product.a.rows, product.b.rows);
    let order = TileOrder::<GROUP> { rows: m.div_ceil(TILE), columns: n.div_ceil(TILE) };
    let warp = thread::thread_idx_x() / warp::WARP_SIZE;
    let part = (warp / 2 * WARP_TILE, warp % 2 * WARP_TILE);
    let mut tile = thread::block_idx_x();
    while tile < order.count() {
        let (row, column) = order.position(tile);
        let origin = (row * TILE, column * TILE);
        // SAFETY: the caller's contract; all threads of the block are here.
        unsafe {
            let sums = product.sums::<ALIGN, 4, 8>(origin, part, thread::sync_threads);
            store(&sums, c, (m, n), (origin.0 + part.0, origin.1 + part.1));
        }
        tile += thread::grid_dim_x();
    }
}

/// Stores this warp's sums that are in C, from `row` and `column` on.
///
/// # Safety
///
/// `c` has `m * n` elements, and no other thread accesses these.
#[inline(always)]
unsafe fn store<T: Half>(sums: &Sums, c: *mut T, (m, n): (u32, u32), (row, column): (u32, u32)) {
    let lane = warp::lane_id();
    let (row, column) = (row + lane / 4, column + lane % 4 * 2);
    let aligned = (c.addr() | (2 * n as usize)).is_multiple_of(4);
    let mut i = 0;
    while i < 8 {
        let row = row + 8 * i;
        if row < m {
            let to = c.wrapping_add(row as usize * n as usize).cast::<u16>();
            let mut j = 0;
            while j < 8 {
                let column = column + 8 * j;
                let fragment = sums[(i / 2) as usize][j as usize];
                let first = (i % 2 * 2) as usize;
                let pair = T::pack([fragment[first], fragment[first + 1]]);
                let to = to.wrapping_add(column as usize);
                // SAFETY: the caller's contract. Both columns are in C if one is and `aligned`.
                unsafe {
                    if aligned {
                        if column < n {
                            mem::store(to.cast(), pair);
                        }
                    } else {
                        if column < n {
                            mem::store(to, pair as u16);
                        }
                        if column + 1 < n {
                            mem::store(to.wrapping_add(1), (pair >> 16) as u16);
                        }
                    }
                }
                j += 1;
            }
        }
        i += 1;
    }
}
