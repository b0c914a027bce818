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

type Product<T, const TA: bool = false, const TB: bool = false> =
    MmaProduct<T, TILE, TILE, STAGES, THREADS, TA, TB>;
/// A warp's sums: 4 x 8 fragments of 16 x 8.
type Sums = [[[f32; 4]; 8]; 4];

/// `C = A x B^T`, for every GPU since Ampere.
///
/// `transposed_a` and `transposed_b` say that A is stored as `k x m`, or B as `k x n`. It is
/// fastest if stored rows of A and B begin at multiples of 16 bytes, and slowest if they have an
/// odd number of elements, or if those of a transposed matrix begin elsewhere.
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
    transposed_a: bool,
    transposed_b: bool,
) {
    let factors = Factors { a, b, m, n, k };
    let transposed = (transposed_a, transposed_b);
    let alignment = matrix(a, m, k, transposed_a).row_alignment();
    // SAFETY: the kernel's contract.
    unsafe {
        match (alignment.min(matrix(b, n, k, transposed_b).row_alignment()), transposed) {
            (16, _) => compute::<T, 16>(factors, transposed, c),
            (4, (false, false)) => compute::<T, 4>(factors, transposed, c),
            _ => compute::<T, 2>(factors, transposed, c),
        }
    }
}

/// Where the factors are, and their extents.
#[derive(Clone, Copy)]
struct Factors<T> {
    a: *const T,
    b: *const T,
    m: u32,
    n: u32,
    k: u32,
}

/// A factor as it is stored.
#[inline(always)]
fn matrix<T>(address: *const T, rows: u32, k: u32, transposed: bool) -> Matrix<T> {
    let (rows, columns) = if transposed { (k, rows) } else { (rows, k) };
    Matrix { address, rows, columns }
}

/// Computes and stores this block's tiles.
///
/// # Safety
///
/// The kernel's contract; rows of the factors are aligned to `ALIGN` bytes, and not transposed if
/// that is 4.
#[inline(always)]
unsafe fn compute<T: Factor + Half, const ALIGN: u32>(
    factors: Factors<T>,
    transposed: (bool, bool),
    c: *mut T,
) {
    let Factors { m, n, .. } = factors;
    let order = TileOrder::<GROUP> { rows: m.div_ceil(TILE), columns: n.div_ceil(TILE) };
    // Not kept in registers meanwhile.
    let part = || {
        let warp = thread::thread_idx_x() / warp::WARP_SIZE;
        (warp / 2 * WARP_TILE, warp % 2 * WARP_TILE)
    };
    let mut tile = thread::block_idx_x();
    while tile < order.count() {
        let (row, column) = order.position(tile);
        let origin = (row * TILE, column * TILE);
        // SAFETY: the caller's contract; all threads of the block are here.
        unsafe {
            let sums = match transposed {
                (false, true) if ALIGN != 4 => factors.sums::<ALIGN, false, true>(origin, part()),
                (true, false) if ALIGN != 4 => factors.sums::<ALIGN, true, false>(origin, part()),
                (true, true) if ALIGN != 4 => factors.sums::<ALIGN, true, true>(origin, part()),
                _ => factors.sums::<ALIGN, false, false>(origin, part()),
            };
            let part = part();
            store(&sums, c, (m, n), (origin.0 + part.0, origin.1 + part.1));
        }
        tile += thread::grid_dim_x();
    }
}

impl<T: Factor> Factors<T> {
    /// This warp's sums of a tile.
    ///
    /// # Safety
    ///
    /// The kernel's contract; [`MmaProduct`] says what the parameters mean.
    #[inline(always)]
    unsafe fn sums<const ALIGN: u32, const TA: bool, const TB: bool>(
        self,
        origin: (u32, u32),
        part: (u32, u32),
    ) -> Sums {
        let (a, b) = (matrix(self.a, self.m, self.k, TA), matrix(self.b, self.n, self.k, TB));
        let product = Product::<T, TA, TB> { a, b, memory: shared::dynamic_shared_mem() };
        // SAFETY: the caller's contract.
        unsafe { product.sums::<ALIGN, 4, 8>(origin, part, thread::sync_threads) }
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
