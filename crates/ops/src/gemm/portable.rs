//! The portable kernel: for GPUs other than Hopper, and for matrices that TMA cannot address.

use devcomm_host::{Kernels, LaunchConfig, Result, Stream};
use devcomm_kernels::gemm::gemm_mma as sizes;

use super::element::{GemmElement, GemmOutput, no_kernel};
use super::hopper::Matrices;
use crate::check::refuse;
use crate::launch::Takes;

/// Enqueues a product: a block for each tile of C.
///
/// # Safety
///
/// The matrices have the elements of the shape, and stay allocated until the product has ended.
pub(super) unsafe fn launch<T: GemmElement, O: GemmOutput<T>>(
    compiled: &Kernels,
    stream: &Stream,
    matrices: Matrices,
) -> Result<()> {
    let Matrices { a, b, c, shape: [m, n, k], transposed: [ta, tb], epilogue } = matrices;
    if !O::HAS_PORTABLE {
        return no_kernel::<T>(matrices);
    }
    let tiles = u64::from(m.div_ceil(sizes::TILE)) * u64::from(n.div_ceil(sizes::TILE));
    // The largest grid.
    let Some(tiles) = u32::try_from(tiles).ok().filter(|tiles| *tiles <= i32::MAX as u32) else {
        return refuse(format!("a product of {m} x {n} elements is too large"));
    };
    let config = LaunchConfig::new(tiles, sizes::THREADS).with_dynamic_shared(sizes::SHARED);
    let args = (a, b, c, m, n, k, ta, tb, epilogue);
    // SAFETY: the caller's contract.
    unsafe { O::Portable::launch(args, config, &compiled.on(stream)) }
}
