//! The product of groups of rows, each with a B of its own: the experts of a layer.
//!
//! The kernel reads the groups' rows on the GPU. A group begins at any row, and its tiles begin
//! there too. Rows in no group have no effect, and are not written. Before its first tile, every
//! block counts the tiles of all groups; a group without rows has none.

use super::prelude::*;

/// Computes `C = A x B^T` for each group of rows of A and C, with an epilogue, for Hopper. B has `n
/// x k` elements for each group, one after the other. The epilogue's bias is that of all groups.
///
/// The maps, the grid and the block are as for [`gemm_wgmma`](super::gemm_wgmma::gemm_wgmma()), B's
/// map with the rows of all groups. C's map is used if `n` is a multiple of 8, and C's `address` is
/// used where the map is not. Dependent launch: allowed.
///
/// # Safety
///
/// A, B and C have `m x k`, `groups.count x n x k` and `m x n` elements, and `groups` has arrays of
/// `groups.count`, which is not 0. No row is in two groups. Rows of groups from `m` on are left
/// out. No other kernel writes A, B, the groups or what the epilogue reads, or accesses C, but
/// those before a dependent launch.
#[kernel(arch = "sm_90a", max_threads = 384, cluster = 2, T = [bf16, f16])]
pub unsafe fn gemm_grouped<T: GemmFactor>(
    a: GridConstant<TensorMap>,
    b: GridConstant<TensorMap>,
    c: GridConstant<TensorMap>,
    address: *mut <T as GemmFactor>::Output,
    groups: Groups,
    m: u32,
    n: u32,
    k: u32,
    epilogue: Fused<<T as GemmFactor>::Output>,
) {
    // This is before the groups are counted, which waits for the previous kernels.
    grid::launch_next();
    let (maps, extents) = ([&*a, &*b, &*c], [m, n, k]);
    let mut product =
        Product::<T, _, _>::new(maps, address, extents, [false; 2], epilogue, &groups);
    product.by_map = n.is_multiple_of(8);
    // SAFETY: the kernel's caller passes matrices, groups, grid and block for the product.
    unsafe { product.run() }
}

/// The product has an order of tiles of its own.
impl Hooks for Groups {
    type Registers = IdleRegisters;

    const GROUPS: bool = true;

    fn order(&self, extents: [u32; 2]) -> Order {
        grid::wait_for_previous();
        // SAFETY: the kernel's caller passes the groups; all threads of the block call this, once.
        unsafe { Order::groups(*self, extents) }
    }
}
