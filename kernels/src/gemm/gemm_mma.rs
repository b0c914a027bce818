//! The product on every GPU since Ampere, for matrices of any size and alignment.
//!
//! A block computes tiles of 128 x 128 elements of C, one after the other. Its four warps have 64 x
//! 64 elements each; together they copy the factors to a pipeline of three stages, which leaves
//! shared memory for a second block on every GPU.

use cuda_std::mma::Factor;

use super::prelude::*;

/// Rows and columns of a tile of C.
pub const TILE: u32 = 128;
const STAGES: u32 = 3;
/// Rows of tiles of C that are computed at the same time.
pub(super) const GROUP: u32 = 16;
/// Rows and columns of a warp.
const WARP_TILE: u32 = 64;
/// Threads per block.
pub const THREADS: u32 = 128;
/// Dynamic shared memory in bytes.
pub const SHARED: u32 = Product::<bf16>::BYTES;

type Product<T, const TA: bool = false, const TB: bool = false> =
    MmaProduct<T, TILE, TILE, STAGES, THREADS, TA, TB>;
/// A warp's sums: 4 x 8 fragments of 16 x 8.
type Sums = [RegTile<f32, 8>; 4];

/// Computes `C = A x B^T`, with an epilogue, on every GPU since Ampere.
///
/// `transposed_a` and `transposed_b` say that A is stored as `k x m`, or B as `k x n`. It is
/// fastest if stored rows of A and B begin at multiples of 16 bytes, and slowest if they have an
/// odd number of elements, or if rows of a transposed matrix do not begin at such multiples.
///
/// Grid: any; a block has work if there is a tile of [`TILE`] x [`TILE`] elements for it. Block:
/// [`THREADS`] threads, with [`SHARED`] bytes.
///
/// # Safety
///
/// `a`, `b` and `c` have `m x k`, `n x k` and `m x n` elements. `m`, `n` and `k` are not 0 and at
/// most 2^31 - 512, and there are fewer than 2^31 tiles. No other kernel writes A, B or what the
/// epilogue reads, or accesses C.
#[kernel(T = [f16, bf16], arch = "sm_80", max_threads = 128)]
pub unsafe fn gemm_mma<T: Factor + Float>(
    a: *const T,
    b: *const T,
    c: *mut T,
    m: u32,
    n: u32,
    k: u32,
    transposed_a: bool,
    transposed_b: bool,
    epilogue: Fused<T>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { product([a, b], c, [m, n, k], [transposed_a, transposed_b], epilogue) }
}

/// Computes what [`gemm_mma()`] does, with C in f32.
///
/// # Safety
///
/// The conditions are those of [`gemm_mma()`].
#[kernel(T = [f16, bf16], arch = "sm_80", max_threads = 128)]
pub unsafe fn gemm_mma_f32<T: Factor>(
    a: *const T,
    b: *const T,
    c: *mut f32,
    m: u32,
    n: u32,
    k: u32,
    transposed_a: bool,
    transposed_b: bool,
    epilogue: Fused<f32>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { product([a, b], c, [m, n, k], [transposed_a, transposed_b], epilogue) }
}

/// Computes what [`gemm_mma()`] does, with any epilogue, in a kernel with its grid and block. The
/// kernel's attribute is `#[kernel(arch = "sm_80", max_threads = 128)]`.
///
/// # Safety
///
/// As for [`gemm_mma()`], and what the epilogue needs.
pub unsafe fn product<T: Factor, E: Epilogue>(
    [a, b]: [*const T; 2],
    c: *mut E::Output,
    [m, n, k]: [u32; 3],
    transposed: [bool; 2],
    epilogue: E,
) {
    let factors = Factors { a, b, m, n, k };
    let alignment = factors.row_alignment(transposed);
    let order = TileOrder::<GROUP> { rows: m.div_ceil(TILE), columns: n.div_ceil(TILE) };
    for tile in thread::blocks_strided(order.count()) {
        let (row, column) = order.position(tile);
        let origin = (row * TILE, column * TILE);
        // SAFETY: the caller passes the matrices; the whole block is here.
        unsafe { factors.tile(c, origin, alignment, transposed, epilogue) };
    }
}

/// The addresses of the factors, and the extents of the product.
#[derive(Clone, Copy)]
pub(super) struct Factors<T> {
    pub(super) a: *const T,
    pub(super) b: *const T,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) k: u32,
}

/// Returns a factor as it is stored.
fn matrix<T>(address: *const T, rows: u32, k: u32, transposed: bool) -> Matrix<T> {
    let (rows, columns) = if transposed { (k, rows) } else { (rows, k) };
    Matrix { address, rows, columns }
}

impl<T: Factor> Factors<T> {
    /// Returns the alignment of both factors' stored rows, in bytes: 16, 4 or 2.
    pub(super) fn row_alignment(&self, [ta, tb]: [bool; 2]) -> u32 {
        let a = matrix(self.a, self.m, self.k, ta).row_alignment();
        a.min(matrix(self.b, self.n, self.k, tb).row_alignment())
    }

    /// Computes a tile of C, and stores it. The kernel's contract holds, and all threads of the
    /// block call this, with the rows' `alignment`.
    pub(super) unsafe fn tile<E: Epilogue>(
        &self,
        c: *mut E::Output,
        origin: (u32, u32),
        alignment: u32,
        transposed: [bool; 2],
        epilogue: E,
    ) {
        let Self { a, b, m, n, k } = *self;
        let warp = thread::thread_idx_x() / warp::WARP_SIZE;
        let in_tile = (warp / 2 * WARP_TILE, warp % 2 * WARP_TILE);
        // Opaque, so that values that only one of the variants needs are not kept in registers
        // during another one.
        let factors = Self { a, b, m: hint::opaque(m), n: hint::opaque(n), k: hint::opaque(k) };
        // SAFETY: the caller has all threads of the block here; the alignment is that of the rows.
        unsafe {
            let mut sums = match (alignment, transposed) {
                (16, [false, false]) => factors.sums::<16, false, false>(origin, in_tile),
                (16, [false, true]) => factors.sums::<16, false, true>(origin, in_tile),
                (16, [true, false]) => factors.sums::<16, true, false>(origin, in_tile),
                (16, [true, true]) => factors.sums::<16, true, true>(origin, in_tile),
                (4, [false, false]) => factors.sums::<4, false, false>(origin, in_tile),
                (_, [false, false]) => factors.sums::<2, false, false>(origin, in_tile),
                (_, [false, true]) => factors.sums::<2, false, true>(origin, in_tile),
                (_, [true, false]) => factors.sums::<2, true, false>(origin, in_tile),
                (_, [true, true]) => factors.sums::<2, true, true>(origin, in_tile),
            };
            let place = (origin.0 + in_tile.0, origin.1 + in_tile.1);
            let mut part = Part::of_warp(&mut sums, place, (m, n));
            epilogue.apply(&mut part);
            part.store(c);
        }
    }

    /// Returns this warp's sums of a tile. The conditions are those of [`tile`](Self::tile);
    /// [`MmaProduct`] says what the parameters mean.
    unsafe fn sums<const ALIGN: u32, const TA: bool, const TB: bool>(
        self,
        origin: (u32, u32),
        part: (u32, u32),
    ) -> Sums {
        let (a, b) = (matrix(self.a, self.m, self.k, TA), matrix(self.b, self.n, self.k, TB));
        let product = Product::<T, TA, TB> { a, b, memory: shared::dynamic_shared_mem() };
        // SAFETY: the caller has all threads of the block here, with matrices of these extents.
        unsafe { product.sums::<ALIGN, 4, 8>(origin, part, thread::sync_threads) }
    }
}
