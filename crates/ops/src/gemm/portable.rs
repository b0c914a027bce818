//! The portable kernel: for GPUs other than Hopper, and for matrices that TMA cannot address.

use devcomm_host::{DeviceSlice, Kernels, LaunchConfig, Result, Stream};
use devcomm_kernels::{self as kernels, gemm::gemm_mma as sizes};
use half::bf16;

use crate::check::refuse;

/// Enqueues a product: a block for each tile of C.
///
/// # Safety
///
/// The buffers have the elements of the shape, and stay allocated until the product has ended.
pub(super) unsafe fn launch(
    compiled: &Kernels,
    stream: &Stream,
    [a, b, c]: [&DeviceSlice<bf16>; 3],
    [m, n, k]: [u32; 3],
) -> Result<()> {
    let tiles = u64::from(m.div_ceil(sizes::TILE)) * u64::from(n.div_ceil(sizes::TILE));
    // The largest grid.
    let Some(tiles) = u32::try_from(tiles).ok().filter(|tiles| *tiles <= i32::MAX as u32) else {
        return refuse(format!("a product of {m} x {n} elements is too large"));
    };
    let config = LaunchConfig::new(tiles, sizes::THREADS).with_dynamic_shared(sizes::SHARED);
    let product = kernels::gemm_mma::<bf16>::args(a, b, c, m, n, k);
    // SAFETY: the caller's contract.
    unsafe { product.config(config).launch(&compiled.on(stream)) }
}
