//! The element types of products, and their launches.

use devcomm_host::{Element, Kernels, LaunchConfig, Result, Stream, TensorMap};
use devcomm_kernels as kernels;
use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::hopper::Matrices;
use crate::check::refuse;

/// An element type of A and B: `bf16`, `f16`, `F8E4M3` or `F8E5M2`.
pub trait GemmElement: Element {
    /// C's element type of [`Gemm::launch`](super::Gemm::launch): the same, or `bf16` for 8-bit
    /// floats.
    type Output: GemmOutput<Self>;
}

/// An element type of C, for A and B of `T`: [`GemmElement::Output`] or `f32`.
pub trait GemmOutput<T>: Element + Launches<T> {}

/// An element type of A and B whose matrices have scales: `F8E4M3` or `F8E5M2`.
pub trait ScaledElement: GemmElement + LaunchesBlocks {}

impl ScaledElement for F8E4M3 {}
impl ScaledElement for F8E5M2 {}

/// The launch of products with scales per block.
pub trait LaunchesBlocks {
    /// Launches `gemm_blocks`; maps and address as those of [`Launches::wide`].
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn blocks(
        compiled: &Kernels,
        stream: &Stream,
        maps: [TensorMap; 3],
        unaligned: u64,
        matrices: Matrices,
        config: LaunchConfig,
    ) -> Result<()>;
}

macro_rules! blocks {
    ($($type:ident)*) => { $(
        impl LaunchesBlocks for $type {
            unsafe fn blocks(
                compiled: &Kernels,
                stream: &Stream,
                [a, b, c]: [TensorMap; 3],
                unaligned: u64,
                Matrices { shape: [m, n, k], scales: [scale_a, scale_b], .. }: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                let product = kernels::gemm_blocks::<$type>::args(
                    a, b, c, unaligned, m, n, k, scale_a, scale_b,
                );
                // SAFETY: the caller's contract.
                unsafe { product.config(config).launch(&compiled.on(stream)) }
            }
        }
    )* };
}

blocks! { F8E4M3 F8E5M2 }

/// The launches of products of `T` in the type.
pub trait Launches<T> {
    /// Launches `gemm_wgmma` with maps of A, B and C, and C's address if its map is not used.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn wide(
        compiled: &Kernels,
        stream: &Stream,
        maps: [TensorMap; 3],
        unaligned: u64,
        matrices: Matrices,
        config: LaunchConfig,
    ) -> Result<()>;

    /// Launches `gemm_mma`, or says what the only kernel of these types needs.
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn portable(
        compiled: &Kernels,
        stream: &Stream,
        matrices: Matrices,
        config: LaunchConfig,
    ) -> Result<()>;
}

macro_rules! elements {
    ($($type:ident in $output:ident by $portable:ident;)*) => { $(
        impl GemmElement for $type {
            type Output = $output;
        }

        impl GemmOutput<$type> for $output {}

        impl Launches<$type> for $output {
            unsafe fn wide(
                compiled: &Kernels,
                stream: &Stream,
                [a, b, c]: [TensorMap; 3],
                unaligned: u64,
                Matrices { shape: [m, n, k], scales, .. }: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                let [scale_a, scale_b] = scales;
                let product = kernels::gemm_wgmma::<$type>::args(
                    a, b, c, unaligned, m, n, k, scale_a, scale_b,
                );
                // SAFETY: the caller's contract.
                unsafe { product.config(config).launch(&compiled.on(stream)) }
            }

            unsafe fn portable(
                compiled: &Kernels,
                stream: &Stream,
                matrices: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                $portable!($type compiled stream matrices config)
            }
        }
    )* };
}

macro_rules! gemm_mma {
    ($type:ident $compiled:ident $stream:ident $matrices:ident $config:ident) => {{
        let Matrices { a, b, c, shape: [m, n, k], .. } = $matrices;
        let product = kernels::gemm_mma::<$type>::args(a, b, c, m, n, k);
        // SAFETY: the caller's contract.
        unsafe { product.config($config).launch(&$compiled.on($stream)) }
    }};
}

macro_rules! no_kernel {
    ($type:ident $compiled:ident $stream:ident $matrices:ident $config:ident) => {{
        let _ = ($compiled, $stream, $config);
        no_kernel::<$type>($matrices)
    }};
}

/// Says what the kernels of 8-bit floats need.
pub(super) fn no_kernel<T: Element>(Matrices { shape: [.., k], .. }: Matrices) -> Result<()> {
    refuse(format!(
        "products of {} need a GPU of the Hopper family, A, B and C at multiples of 16 bytes, \
         and rows of them too: k is {k}, pad it with zeros to a multiple of 16",
        T::NAME,
    ))
}

elements! {
    bf16 in bf16 by gemm_mma;
    f16 in f16 by gemm_mma;
    F8E4M3 in bf16 by no_kernel;
    F8E5M2 in bf16 by no_kernel;
}

/// Products that do not compile: C of another type than there is, and scales of a type without
/// them.
///
/// ```compile_fail,E0271
/// # use devcomm::{DeviceSlice, F8E4M3, Gemm};
/// fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<f32>) {
///     gemm.launch(a, a, c, [1, 1, 16]).unwrap();
/// }
/// ```
///
/// ```compile_fail,E0277
/// # use devcomm::{DeviceSlice, Gemm};
/// # use half::bf16;
/// fn product(gemm: &Gemm, a: &DeviceSlice<bf16>, scale: &DeviceSlice<f32>) {
///     gemm.product([1, 1, 8]).scales([scale; 2]).launch(a, a, a).unwrap();
/// }
/// ```
#[cfg(doctest)]
mod refusals {}
