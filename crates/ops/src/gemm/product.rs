//! A product with what is added to it: scales, a bias, an activation and a residual.

use std::marker::PhantomData;

use devcomm_kernels::gemm::gemm_blocks::BLOCK;

use super::element::{GemmElement, GemmOutput, HalfElement, ScaledElement};
use super::epilogue::{Activation, Added};
use super::matrices::Matrices;
use super::{Gemm, GemmPlan};
use crate::prelude::*;

/// A product of `[m, n, k]` that an operation `G`, [`Gemm`] or
/// [`AllGatherGemm`](crate::AllGatherGemm), began:
/// `C = activation(scale_a * scale_b * (A x B^T) + bias) + residual`, where all but `A x B^T` is
/// optional. All is computed in `f32`, and rounded once. It can be launched several times. C is of
/// [`GemmElement::Output`] or of `f32`, as its buffer, and bias and residual have its type.
#[must_use = "it is launched by `launch`"]
pub struct Product<'g, T, O, G = Gemm> {
    pub(crate) operation: &'g G,
    pub(crate) shape: [usize; 3],
    transposed: [bool; 2],
    scales: Option<[DeviceSlice<f32>; 2]>,
    /// Matrices of scales, of 8-bit floats only.
    block_scales: Option<[DeviceSlice<f32>; 2]>,
    pub(crate) added: Added<O>,
    factors: PhantomData<T>,
}

impl Gemm {
    /// Returns a product of `[m, n, k]`: that of [`launch`](Self::launch), until more is added.
    ///
    /// ```no_run
    /// # use devcomm::{Activation, DeviceSlice, Gemm, Result};
    /// # use half::bf16;
    /// # fn layer(
    /// #     gemm: &Gemm,
    /// #     [x, up, down, bias, hidden, y]: [&DeviceSlice<bf16>; 6],
    /// # ) -> Result<()> {
    /// // Two layers: y = gelu(x * up^T + bias) * down^T + x.
    /// let first = gemm.product([32, 4096, 1024]).bias(bias).activation(Activation::Gelu);
    /// first.launch(x, up, hidden)?;
    /// gemm.product([32, 1024, 4096]).residual(x).launch(hidden, down, y)
    /// # }
    /// ```
    pub fn product<T, O>(&self, shape: [usize; 3]) -> Product<'_, T, O>
    where
        T: GemmElement,
        O: GemmOutput<T>,
    {
        Product::new(self, shape, Added::NOTHING)
    }
}

impl<T: ScaledElement, O: GemmOutput<T>> Product<'_, T, O> {
    /// Multiplies the sums by the scales of A and of B: the first element of each buffer, read when
    /// the product runs.
    pub fn scales<S: Buffer<Element = f32>>(mut self, scales: [&S; 2]) -> Self {
        self.scales = Some(scales.map(Buffer::device_slice));
        self
    }
}

impl<T: ScaledElement> Product<'_, T, T::Output> {
    /// Multiplies the elements of A and B by scales: A has one for 128 columns of a row, B one for
    /// 128 columns of 128 rows. The scales are two row-major matrices, read when the product runs:
    ///
    /// * `a` has `ceil(k / 128) x m` elements: that of A's element (`i`, `t`) is (`t / 128`, `i`).
    ///   So the scales of neighbouring rows are neighbours.
    /// * `b` has `ceil(n / 128) x ceil(k / 128)` elements: that of B's element (`j`, `t`) is
    ///   (`j / 128`, `t / 128`).
    ///
    /// Sums of 128 products are scaled and added in f32. C is of [`GemmElement::Output`].
    ///
    /// These are the scales of DeepSeek-V3 (`weight_scale_inv` for B) and of torch's `_scaled_mm`
    /// for 1 x 128 and 128 x 128. DeepGEMM's `fp8_gemm_nt` pads the rows of `a` to a multiple of 4.
    pub fn block_scales<SA, SB>(mut self, a: &SA, b: &SB) -> Self
    where
        SA: Buffer<Element = f32>,
        SB: Buffer<Element = f32>,
    {
        self.block_scales = Some([a.device_slice(), b.device_slice()]);
        self
    }
}

impl<T: HalfElement, O: GemmOutput<T>> Product<'_, T, O> {
    /// Takes A stored transposed: as `k x m` elements, row-major. On Hopper such a product is by
    /// `wgmma` and TMA if `m` is a multiple of 8. It has no kernel for few rows of C.
    pub fn transposed_a(mut self) -> Self {
        self.transposed[0] = true;
        self
    }

    /// Takes B stored transposed: as `k x n` elements, row-major. What
    /// [`transposed_a`](Self::transposed_a) says of `m` holds for `n`.
    pub fn transposed_b(mut self) -> Self {
        self.transposed[1] = true;
        self
    }
}

impl<'g, T: GemmElement, O: GemmOutput<T>, G> Product<'g, T, O, G> {
    pub(crate) fn new(operation: &'g G, shape: [usize; 3], added: Added<O>) -> Self {
        let (transposed, scales, block_scales) = ([false; 2], None, None);
        Self { operation, shape, transposed, scales, block_scales, added, factors: PhantomData }
    }

    /// Adds the first `n` elements of `bias` to each row.
    pub fn bias<D: Buffer<Element = O>>(mut self, bias: &D) -> Self {
        self.added.bias = Some(bias.device_slice());
        self
    }

    /// Replaces each element, after scales and bias, by a function of it.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.added.activation = Some(activation);
        self
    }

    /// Adds the first `m * n` elements of `residual`, row-major, after the activation. It may be C:
    /// the product is then added to C.
    pub fn residual<R: Buffer<Element = O>>(mut self, residual: &R) -> Self {
        self.added.residual = Some(residual.device_slice());
        self
    }
}

impl<T: GemmElement, O: GemmOutput<T>> Product<'_, T, O> {
    /// Enqueues the product: reads `m * k` elements of `a` and `n * k` of `b`, and writes the first
    /// `m * n` elements of `c`, which overlaps none of the other buffers, except that it may begin
    /// where the residual does. Only work on this stream may access `c` until the product has
    /// ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a shape without elements, for buffers that are too short, of
    /// another context or overlap C, and for 8-bit floats on another GPU or with other rows than
    /// they need; errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C) -> Result<()>
    where
        A: Buffer<Element = T>,
        B: Buffer<Element = T>,
        C: Buffer<Element = O>,
    {
        let (gemm, extents) = (self.operation, Extents::new(self.shape)?);
        let [m, n, k] = self.shape;
        let slices = (&a.device_slice(), &b.device_slice(), &c.device_slice());
        let (context, rows) = (gemm.stream.context(), [m, n, m]);
        let mut matrices = Matrices::checked(context, extents, slices, rows, &self.added)?;
        matrices.transposed = self.transposed();
        let scales = |name, scales: &DeviceSlice<f32>, rows, columns| {
            address_apart(context, name, scales, [rows, columns], ("C", slices.2, m * n))
        };
        if let Some([a, b]) = &self.scales {
            matrices.epilogue.scale_a = scales("the scale of A", a, 1, 1)?;
            matrices.epilogue.scale_b = scales("the scale of B", b, 1, 1)?;
        }
        if let Some([a, b]) = &self.block_scales {
            let [n, k] = [n, k].map(|extent| extent.div_ceil(BLOCK as usize));
            let a = scales("the matrix of A's scales", a, k, m)?;
            matrices.block_scales = [a, scales("the matrix of B's scales", b, n, k)?];
        }
        // SAFETY: `checked` and `address` have checked the buffers' lengths; memory that is dropped
        // is freed after the work of the streams, and after the graphs.
        unsafe { gemm.enqueue::<T, O>(extents, matrices) }
    }

    /// Returns which factors are transposed. A single row or column is stored the same way.
    fn transposed(&self) -> [bool; 2] {
        let ([a, b], [m, n, k]) = (self.transposed, self.shape);
        [a && m > 1 && k > 1, b && n > 1 && k > 1]
    }

    /// Returns how the product is computed, if the buffers are aligned to 16 bytes. Errors are
    /// those of [`Gemm::plan`], and for a product with scales per block, which has only one kernel.
    pub fn plan(&self) -> Result<GemmPlan> {
        refuse_if!(self.block_scales.is_some(), "a product with scales per block has no plans");
        Ok(self.operation.prepare::<T, O>(Extents::new(self.shape)?, self.transposed())?.0)
    }
}

impl<T, O, G> std::fmt::Debug for Product<'_, T, O, G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [m, n, k] = self.shape;
        write!(f, "Product({m} x {n} x {k})")
    }
}
