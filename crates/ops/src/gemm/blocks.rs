//! The launch of products with scales per block.

use devcomm_host::Result;

use super::Gemm;
use super::element::{ScaledElement, no_kernel};
use super::hopper::{Matrices, wide_config, wide_maps};
use crate::launch::Takes;

/// Enqueues a product, with the addresses of the matrices of scales.
///
/// # Safety
///
/// All matrices have the elements of the shape, and stay allocated until the product has ended.
pub(super) unsafe fn launch<T: ScaledElement>(
    Gemm { compiled, stream, hopper, .. }: &Gemm,
    matrices: Matrices,
    [of_a, of_b]: [u64; 2],
) -> Result<()> {
    let Matrices { a, b, c, shape: shape @ [m, n, k], epilogue, .. } = matrices;
    let possible = hopper.is_some() && (a | b | c | u64::from(k)).is_multiple_of(16);
    let config = if possible { wide_config(compiled, shape)? } else { None };
    let Some(config) = config else { return no_kernel::<T>(matrices) };
    let ([a, b, c], unaligned) = wide_maps::<T, T::Output>(stream, matrices)?;
    let args = (a, b, c, unaligned, m, n, k, of_a, of_b, epilogue);
    // SAFETY: the caller's contract.
    unsafe { T::Blocks::launch(args, config, &compiled.on(stream)) }
}
