//! The product of few rows of A and many of B on Hopper.
//!
//! With few rows of A, reading B takes most of the time. So the factors change places: rows of B
//! are the 64 rows of a `wgmma`, those of A its columns, and a tile of C is as tall as A. Two warps
//! load, one each factor, so that the loads of B begin before the previous kernel has ended; one or
//! two warpgroups multiply. Tiles of the last round are split over the blocks of a cluster, which
//! add their sums through distributed shared memory. Blocks of a cluster that compute neighbouring
//! tiles may load the rows that they share once, each a part for all.

use cuda_std::wgmma::Factor;

use super::prelude::*;
pub use super::shapes::*;
use super::swapped_loop::Product;
use super::swapped_stores::Target;
use super::swapped_tiles::Block;

/// Computes `C = A x B^T` in bf16 or f16, with an epilogue, for few rows of A, on Hopper.
///
/// `a` is a tensor map with tiles of [`Shape::M`] / [`Cluster::across`] rows, `b` of [`Shape::N`] /
/// [`Cluster::down`], `c` of [`STORE_M`].
///
/// Grid: clusters of 1, 2, 4 or 8 blocks, all resident. Block: [`Shape::THREADS`] threads, with
/// dynamic shared memory for the stages ([`Shape::STAGE`] each), the stores ([`Shape::STORE`]), the
/// sums of split tiles ([`Shape::received`] with [`Division::sums`]) and [`TileMemory::PADDING`].
/// Dependent launch: allowed.
///
/// # Safety
///
/// The matrices of the maps are allocated, and have `m x k`, `n x k` and `m x n` elements. No other
/// kernel writes A, B or what the epilogue reads, or accesses C, but those before a dependent
/// launch, for A and B as far as [`Division::constant_a`] and [`Division::constant_b`] say.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M8N64, M16N64, M32N64, M64N64, M96N64, M112N64, M128N64, M256N64, M8N128, M16N128, M32N128,
    M48N128, M64N128, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128, M176N128,
    M192N128, M208N128, M224N128, M256N128
])]
pub unsafe fn gemm_swapped<T: Half + Factor, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    epilogue: Fused<T>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { product::<T, S, _>([&a, &b, &c], [m, n, k], division, epilogue) }
}

/// Computes what [`gemm_swapped()`] does, with the terms divided among clusters. Taller tiles leave
/// it too few registers.
///
/// # Safety
///
/// As for [`gemm_swapped()`]. The memory of the slices is as [`Slices`] says.
#[kernel(arch = "sm_90a", max_threads = 384, T = [bf16, f16], S = [
    M96N64, M112N64, M80N128, M96N128, M112N128, M128N128, M144N128, M160N128
])]
pub unsafe fn gemm_swapped_sliced<T: Half + Factor, S: Shape>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    m: u32,
    n: u32,
    k: u32,
    division: Division,
    slices: Slices,
    epilogue: Fused<T>,
) {
    // SAFETY: the caller of the kernel passes what the body needs: their conditions are the same.
    unsafe { compute::<T, S, _, _>([&a, &b], &*c, [m, n, k], division, Some(slices), epilogue) }
}

/// Computes what [`gemm_swapped()`] does, with any epilogue, in a kernel with its grid and block.
/// The kernel's attribute is `#[kernel(arch = "sm_90a", max_threads = 384)]`.
///
/// # Safety
///
/// As for [`gemm_swapped()`], and what the epilogue needs.
pub unsafe fn product<T: Factor, S: Shape, E: Epilogue<Output: Half>>(
    [a, b, c]: [&TensorMap; 3],
    shape: [u32; 3],
    division: Division,
    epilogue: E,
) {
    // SAFETY: the caller passes what the body needs: the conditions are the same.
    unsafe { compute::<T, S, E, _>([a, b], c, shape, division, None, epilogue) }
}

/// Computes what [`product()`] does, with any target, and perhaps with slices. The conditions are
/// those of [`gemm_swapped()`], and what the epilogue needs.
pub(super) unsafe fn compute<T: Factor, S: Shape, E: Epilogue<Output: Half>, C: Target>(
    [a, b]: [&TensorMap; 2],
    target: C,
    [m, n, k]: [u32; 3],
    division: Division,
    slices: Option<Slices>,
    epilogue: E,
) {
    let division = match S::SHARES {
        true => division,
        false => Division { across: 1, down: 1, ..division },
    };
    let Division { across, down, .. } = division;
    let splits = quotient(cluster::size(), across * down);
    let place = quotient(cluster::rank(), splits);
    let (row, column) = (quotient(place, across), remainder(place, across));
    let rows = quotient(m.div_ceil(S::M) + down - 1, down);
    let columns = quotient(n.div_ceil(S::N) + across - 1, across);
    // SAFETY: the caller guarantees the matrices. Only this block's barriers use the words.
    unsafe {
        let block = Block::<T, S, E> {
            memory: TileMemory::dynamic(),
            received: MBarrier::at(shared_array![u64; 1]),
            drained: MBarrier::at(shared_array![u64; 1]),
            schedule: Schedule {
                tiles: rows * columns * slices.map_or(1, |slices| slices.count),
                whole: division.whole,
                steps: k.div_ceil(S::K),
                cluster: quotient(thread::block_idx_x(), cluster::size()),
                clusters: quotient(thread::grid_dim_x(), cluster::size()),
                rank: remainder(cluster::rank(), splits),
                splits,
            },
            first_split: place * splits,
            rows,
            end: (m, n),
            row,
            column,
            division,
            slices,
            epilogue,
            is_plain: epilogue.is_identity(),
            shape: PhantomData,
        };
        Product { block, maps: [b, a], target }.run();
    }
}
