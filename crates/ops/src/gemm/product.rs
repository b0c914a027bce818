//! A product with everything that one can add to it.

use std::marker::PhantomData;

use devcomm_host::{Buffer, DeviceSlice, Result};

use super::Gemm;
use super::element::{GemmElement, GemmOutput, ScaledElement};
use super::hopper::Matrices;
use crate::check::{check_extents, check_len, require_context};

/// A product of `[m, n, k]` that [`Gemm::product`] began: `C = A x B^T`, with what is done to the
/// sums before they are rounded and stored. It can be launched several times.
///
/// C is of [`GemmElement::Output`] or of `f32`; its buffer decides.
#[must_use = "it is launched by `launch`"]
pub struct Product<'g, T, O> {
    gemm: &'g Gemm,
    shape: [usize; 3],
    scales: Option<[DeviceSlice<f32>; 2]>,
    types: PhantomData<(T, O)>,
}

impl Gemm {
    /// A product of `[m, n, k]`, as [`launch`](Self::launch) computes it until more is added.
    ///
    /// ```no_run
    /// # use devcomm::{DeviceSlice, F8E4M3, Gemm, Result};
    /// # use half::bf16;
    /// # fn product(
    /// #     gemm: &Gemm,
    /// #     [a, b]: [&DeviceSlice<F8E4M3>; 2],
    /// #     [scale_a, scale_b]: [&DeviceSlice<f32>; 2],
    /// #     c: &DeviceSlice<bf16>,
    /// # ) -> Result<()> {
    /// gemm.product([128, 4096, 1024]).scales([scale_a, scale_b]).launch(a, b, c)
    /// # }
    /// ```
    pub fn product<T, O>(&self, shape: [usize; 3]) -> Product<'_, T, O>
    where
        T: GemmElement,
        O: GemmOutput<T>,
    {
        Product { gemm: self, shape, scales: None, types: PhantomData }
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

impl<T: GemmElement, O: GemmOutput<T>> Product<'_, T, O> {
    /// Enqueues the product: reads `m * k` elements of `a` and `n * k` of `b`, and writes the first
    /// `m * n` elements of `c`, which overlaps none of the other buffers. Only work on this stream
    /// may access `c` until the product has ended.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) for a shape without elements, for
    /// buffers that are too short or of another context, and for 8-bit floats on another GPU or
    /// with other rows than they need;
    /// [`StateError::Capturing`](devcomm_host::StateError::Capturing) during a stream capture (use
    /// [`launch_capturable`](Self::launch_capturable)); errors of the launch.
    pub fn launch<A, B, C>(&self, a: &A, b: &B, c: &C) -> Result<()>
    where
        A: Buffer<Element = T>,
        B: Buffer<Element = T>,
        C: Buffer<Element = O>,
    {
        self.gemm.stream.context().refuse_capturing("a product is launched")?;
        // SAFETY: no capture is active.
        unsafe { self.launch_capturable(a, b, c) }
    }

    /// As [`launch`](Self::launch), but also allowed during a stream capture.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch), except
    /// [`StateError::Capturing`](devcomm_host::StateError::Capturing).
    ///
    /// # Safety
    ///
    /// In a capture: the buffers, also those added to the product, and the [`Gemm`] are not dropped
    /// while the graph can be launched.
    pub unsafe fn launch_capturable<A, B, C>(&self, a: &A, b: &B, c: &C) -> Result<()>
    where
        A: Buffer<Element = T>,
        B: Buffer<Element = T>,
        C: Buffer<Element = O>,
    {
        let shape = check_extents(self.shape)?;
        let [m, n, k] = self.shape;
        let a = self.address("A", &a.device_slice(), m, k)?;
        let b = self.address("B", &b.device_slice(), n, k)?;
        let c = self.address("C", &c.device_slice(), m, n)?;
        let mut scales = [0; 2];
        if let Some([of_a, of_b]) = &self.scales {
            scales = [
                self.address("the scale of A", of_a, 1, 1)?,
                self.address("the scale of B", of_b, 1, 1)?,
            ];
        }
        // SAFETY: the buffers have the elements; dropping one waits for the stream, and the caller
        // ensures what a graph needs.
        unsafe { self.gemm.enqueue::<T, O>(Matrices { a, b, c, shape, scales }) }
    }

    /// The address of a buffer of the `Gemm`'s context with enough elements.
    fn address<E>(
        &self,
        name: &str,
        slice: &DeviceSlice<E>,
        rows: usize,
        columns: usize,
    ) -> Result<u64> {
        require_context(name, slice.context(), self.gemm.stream.context())?;
        check_len(name, slice.len(), rows, columns)?;
        Ok(slice.device_address())
    }
}

impl<T, O> std::fmt::Debug for Product<'_, T, O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [m, n, k] = self.shape;
        write!(f, "Product({m} x {n} x {k})")
    }
}
