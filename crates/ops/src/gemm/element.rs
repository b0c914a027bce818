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

/// An element type of A and B that may be stored transposed: `bf16` or `f16`. Hopper's tensor cores
/// take 8-bit floats only with the terms of a sum side by side.
#[diagnostic::on_unimplemented(
    message = "products of `{Self}` have no transposed A or B",
    note = "tensor cores transpose 16-bit floats only: store A as `m x k` and B as `n x k`"
)]
pub trait TransposableElement: GemmElement {}

impl TransposableElement for bf16 {}
impl TransposableElement for f16 {}

impl ScaledElement for F8E4M3 {}
impl ScaledElement for F8E5M2 {}

/// The launch of products with scales per block.
pub trait LaunchesBlocks {
    /// Launches `gemm_blocks` with the addresses of the scales; what else is as in
    /// [`Launches::wide`].
    ///
    /// # Safety
    ///
    /// The kernel's contract.
    unsafe fn blocks(
        compiled: &Kernels,
        stream: &Stream,
        maps: [TensorMap; 3],
        unaligned: u64,
        scales: [u64; 2],
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
                [blocks_a, blocks_b]: [u64; 2],
                Matrices { shape: [m, n, k], epilogue, .. }: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                let product = kernels::gemm_blocks::<$type>::args(
                    a, b, c, unaligned, m, n, k, blocks_a, blocks_b, epilogue,
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
    ($($type:ident in $output:ident by $wide:ident, $portable:tt;)*) => { $(
        impl GemmOutput<$type> for $output {}

        impl Launches<$type> for $output {
            unsafe fn wide(
                compiled: &Kernels,
                stream: &Stream,
                [a, b, c]: [TensorMap; 3],
                unaligned: u64,
                Matrices { shape: [m, n, k], transposed: [ta, tb], epilogue, .. }: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                let product =
                    kernels::$wide::<$type>::args(a, b, c, unaligned, m, n, k, ta, tb, epilogue);
                // SAFETY: the caller's contract.
                unsafe { product.config(config).launch(&compiled.on(stream)) }
            }

            unsafe fn portable(
                compiled: &Kernels,
                stream: &Stream,
                matrices: Matrices,
                config: LaunchConfig,
            ) -> Result<()> {
                portable!($type $portable compiled stream matrices config)
            }
        }
    )* };
}

macro_rules! portable {
    ($type:ident none $compiled:ident $stream:ident $matrices:ident $config:ident) => {{
        let _ = ($compiled, $stream, $config);
        no_kernel::<$type>($matrices)
    }};
    ($type:ident $kernel:ident $compiled:ident $stream:ident $matrices:ident $config:ident) => {{
        let Matrices { a, b, c, shape: [m, n, k], transposed: [ta, tb], epilogue } = $matrices;
        let product = kernels::$kernel::<$type>::args(a, b, c, m, n, k, ta, tb, epilogue);
        // SAFETY: the caller's contract.
        unsafe { product.config($config).launch(&$compiled.on($stream)) }
    }};
}

impl GemmElement for bf16 {
    type Output = Self;
}

impl GemmElement for f16 {
    type Output = Self;
}

impl GemmElement for F8E4M3 {
    type Output = bf16;
}

impl GemmElement for F8E5M2 {
    type Output = bf16;
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
    bf16 in bf16 by gemm_wgmma, gemm_mma;
    bf16 in f32 by gemm_wgmma_f32, gemm_mma_f32;
    f16 in f16 by gemm_wgmma, gemm_mma;
    f16 in f32 by gemm_wgmma_f32, gemm_mma_f32;
    F8E4M3 in bf16 by gemm_wgmma, none;
    F8E4M3 in f32 by gemm_wgmma_f32, none;
    F8E5M2 in bf16 by gemm_wgmma, none;
    F8E5M2 in f32 by gemm_wgmma_f32, none;
}

/// Products that do not compile: C of another type than there is, scales of a type without them,
/// and transposed 8-bit floats.
///
/// ```compile_fail,E0271
/// # use devcomm::{DeviceSlice, F8E4M3, Gemm};
/// fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<f32>) {
///     gemm.launch(a, a, c, [1, 1, 16]).unwrap();
/// }
/// ```
///
/// ```compile_fail,E0277
/// # use devcomm::{DeviceSlice, F8E4M3, Gemm};
/// # use half::f16;
/// fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<f16>) {
///     gemm.product([1, 1, 16]).launch(a, a, c).unwrap();
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
///
/// ```compile_fail,E0277
/// # use devcomm::{DeviceSlice, F8E4M3, Gemm};
/// # use half::bf16;
/// fn product(gemm: &Gemm, a: &DeviceSlice<F8E4M3>, c: &DeviceSlice<bf16>) {
///     gemm.product([16; 3]).transposed_a().launch(a, a, c).unwrap();
/// }
/// ```
#[cfg(doctest)]
mod refusals {}
