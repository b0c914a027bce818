//! The launch of products with scales per block.

use devcomm_host::{LaunchConfig, Result};
use devcomm_kernels::gemm::gemm_wgmma as sizes;

use super::Gemm;
use super::element::{ScaledElement, no_kernel};
use super::hopper::{Matrices, map};
use crate::check::refuse;

/// Enqueues a product, with the addresses of the matrices of scales.
///
/// # Safety
///
/// All matrices have the elements of the shape, and stay allocated until the product has ended.
pub(super) unsafe fn launch<T: ScaledElement>(
    Gemm { compiled, stream, hopper, .. }: &Gemm,
    matrices @ Matrices { a, b, c, shape: [m, n, k], .. }: Matrices,
    scales: [u64; 2],
) -> Result<()> {
    if hopper.is_none() || !(a | b | c | u64::from(k)).is_multiple_of(16) {
        return no_kernel::<T>(matrices);
    }
    let pairs = u64::from(m.div_ceil(sizes::CLUSTER * sizes::TILE_M))
        * u64::from(n.div_ceil(sizes::TILE_N));
    let clusters = (stream.context().limits().multiprocessors / sizes::CLUSTER).max(1);
    // The kernel counts tiles in 32 bits.
    if pairs > u64::from(u32::MAX - clusters) {
        return refuse(format!("a product of {m} x {n} elements is too large"));
    }
    let blocks = sizes::CLUSTER * clusters.min(pairs as u32);
    let config = LaunchConfig::new(blocks, sizes::THREADS).with_dynamic_shared(sizes::SHARED);
    let a = map::<T>(stream, a, [m, k, sizes::TILE_M])?;
    let b = map::<T>(stream, b, [n, k, sizes::TILE_N / sizes::CLUSTER])?;
    let (map_of_c, unaligned) = match n.is_multiple_of(8) {
        true => (map::<T::Output>(stream, c, [m, n, sizes::STORE_M])?, 0),
        false => (a, c),
    };
    let config = config.with_dependent();
    // SAFETY: the caller's contract.
    unsafe { T::blocks(compiled, stream, [a, b, map_of_c], unaligned, scales, matrices, config) }
}
