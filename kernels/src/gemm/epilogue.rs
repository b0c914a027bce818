//! Epilogues: what happens to a product's sums before they are rounded and stored.

use super::prelude::*;

/// The step between the sums of a product and C. It is a parameter of the kernel: a user's kernel
/// calls the `product` of [`gemm_wgmma`](super::gemm_wgmma), [`gemm_swapped`](super::gemm_swapped)
/// or [`gemm_mma`](super::gemm_mma) with it. [`Fused`] is that of the shipped kernels.
///
/// ```text
/// /// The positive sums in bf16, each row times a number.
/// #[repr(C)]
/// #[derive(Clone, Copy, KernelParam)]
/// pub struct ScaledRelu { pub rows: *const f32 }
///
/// impl Epilogue for ScaledRelu {
///     type Output = bf16;
///
///     fn apply<F: Fragment>(&self, sums: &mut F) {
///         // SAFETY: the kernel's caller passes a number for each row of C.
///         sums.update_in_c(|sum, row, _| unsafe {
///             sum.max(0.0) * mem::load(self.rows.add(row as usize))
///         });
///     }
/// }
/// ```
pub trait Epilogue: Copy {
    /// The element type of C.
    type Output: Float;

    /// Replaces a thread's sums by what is rounded and stored. It is called once for each element
    /// of C, when the kernels before a dependent launch have ended.
    fn apply<F: Fragment>(&self, sums: &mut F);

    /// Whether [`send_early`](Self::send_early) does anything; only `gemm_swapped` calls it.
    const SENDS_EARLY: bool = false;

    /// Returns the epilogue of a launch. Threads that multiply call it before the first product;
    /// only [`gemm_swapped`](super::gemm_swapped) calls it.
    #[must_use]
    fn begin(self) -> Self {
        self
    }

    /// Sends a thread's sums, if `apply` adds those of other ranks. It is called for all sums of a
    /// tile before `apply` is called for any.
    fn send_early<F: Fragment>(&self, _sums: &mut F) {}

    /// Ends a launch. The block's `threads` that multiply call it after the last tile; only
    /// [`gemm_swapped`](super::gemm_swapped) calls it.
    fn end(&self, _threads: u32) {}

    /// Returns whether `apply` changes nothing. Kernels then skip its code once for each tile: that
    /// is one miss of the instruction cache instead of one for each part.
    fn is_identity(&self) -> bool {
        false
    }
}

/// The epilogue that changes nothing, for C with elements `O`.
#[derive(Clone, Copy, Default)]
pub struct Identity<O>(PhantomData<O>);

impl<O> Identity<O> {
    /// Returns the epilogue.
    #[must_use]
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<O: Float> Epilogue for Identity<O> {
    type Output = O;

    fn apply<F: Fragment>(&self, _sums: &mut F) {}

    fn is_identity(&self) -> bool {
        true
    }
}

/// A thread's sums, of some rows and columns of C. Sums outside C have any values, and are not
/// stored.
pub trait Fragment {
    /// The number of rows.
    const ROWS: u32;
    /// The number of columns.
    const COLUMNS: u32;
    /// Whether columns `2 * j` and `2 * j + 1` are neighbours in C, the first of which is even.
    const PAIRS: bool;

    /// Returns which row of C the `i`-th row is.
    fn row(&self, i: u32) -> u32;
    /// Returns which column of C the `j`-th column is.
    fn column(&self, j: u32) -> u32;
    /// Returns the end of the rows that are stored, and the number of columns of C.
    fn end(&self) -> (u32, u32);
    /// Returns the sum in the `i`-th row and the `j`-th column.
    fn sum(&mut self, i: u32, j: u32) -> &mut f32;

    /// Replaces each sum, also those outside C.
    fn update(&mut self, by: impl Fn(f32) -> f32) {
        for i in 0..Self::ROWS {
            for j in 0..Self::COLUMNS {
                let sum = self.sum(i, j);
                *sum = by(*sum);
            }
        }
    }

    /// Replaces each sum in C; `by` takes a sum, its row and its column.
    fn update_in_c(&mut self, by: impl Fn(f32, u32, u32) -> f32) {
        let (m, n) = self.end();
        for i in 0..Self::ROWS {
            for j in 0..Self::COLUMNS {
                let (row, column) = (self.row(i), self.column(j));
                if row < m && column < n {
                    let sum = self.sum(i, j);
                    *sum = by(*sum, row, column);
                }
            }
        }
    }
}

/// `activation(scale_a * scale_b * sum + bias) + residual`. A null pointer adds nothing, and a
/// scale that is null is 1.
///
/// The activation is `x * sigmoid(linear * x + cubic * x^3)`, or none if `linear` is 0.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Fused<O> {
    /// The scale of A.
    pub scale_a: *const f32,
    /// The scale of B.
    pub scale_b: *const f32,
    /// A number for each column of C.
    pub bias: *const O,
    /// `m x n` numbers, row-major. It may be C.
    pub residual: *const O,
    /// See [`GELU`] and [`SILU`].
    pub linear: f32,
    /// See [`GELU`] and [`SILU`].
    pub cubic: f32,
}

/// The `linear` and `cubic` of GELU's `tanh` approximation, `x * (1 + tanh(sqrt(2 / pi) * (x +
/// 0.044715 * x^3))) / 2`.
pub const GELU: [f32; 2] = [1.595_769, 0.071_354_814];
/// The `linear` and `cubic` of SiLU, `x * sigmoid(x)`.
pub const SILU: [f32; 2] = [1.0, 0.0];

impl<O: Float> Fused<O> {
    fn scale(&self) -> f32 {
        let scale = |from: *const f32| match from.is_null() {
            true => 1.0,
            // SAFETY: the kernel's caller passes null or a scale that can be read.
            false => unsafe { mem::load(from) },
        };
        scale(self.scale_a) * scale(self.scale_b)
    }

    fn activation(&self, x: f32) -> f32 {
        // Not infinite, as 0 times that is not a number: `cubic` may be 0.
        let square = (x * x).min(f32::MAX);
        x * math::sigmoid(x * math::fma(self.cubic, square, self.linear))
    }

    /// Adds a row of numbers, one for each column of C, to the sums of rows `i` to `end`.
    unsafe fn add<F: Fragment>(sums: &mut F, from: *const O, i: u32, end: u32) {
        let (_, n) = sums.end();
        let add = |sums: &mut F, j, value| {
            for i in i..end {
                *sums.sum(i, j) += value;
            }
        };
        let pairs = n.is_multiple_of(2) && from.addr().is_multiple_of(size_of::<O::Pair>());
        // SAFETY: the caller passes a number for each column; a pair is in C if its first one is.
        unsafe {
            if F::PAIRS && pairs {
                for j in Strided::new(0, F::COLUMNS, 2) {
                    let column = sums.column(j);
                    if column < n {
                        let pair = mem::load(from.wrapping_add(column as usize).cast());
                        let [first, second] = O::unpack(pair);
                        add(sums, j, first);
                        add(sums, j + 1, second);
                    }
                }
            } else {
                for j in 0..F::COLUMNS {
                    let column = sums.column(j);
                    if column < n {
                        add(sums, j, mem::load(from.wrapping_add(column as usize)).to_f32());
                    }
                }
            }
        }
    }
}

impl<O: Float> Epilogue for Fused<O> {
    type Output = O;

    fn is_identity(&self) -> bool {
        let pointers = self.scale_a.addr() | self.scale_b.addr() | self.bias.addr();
        pointers | self.residual.addr() == 0 && self.linear == 0.0
    }

    /// Applies one operation of the formula after the other, so that each is tested for once.
    fn apply<F: Fragment>(&self, sums: &mut F) {
        if !self.scale_a.is_null() || !self.scale_b.is_null() {
            let scale = self.scale();
            sums.update(|sum| scale * sum);
        }
        if !self.bias.is_null() {
            // SAFETY: the kernel's caller passes a bias for each column of C.
            unsafe { Self::add(sums, self.bias, 0, F::ROWS) };
        }
        if self.linear != 0.0 {
            sums.update(|sum| self.activation(sum));
        }
        if !self.residual.is_null() {
            let (m, n) = sums.end();
            for i in 0..F::ROWS {
                let row = sums.row(i);
                if row < m {
                    let from = self.residual.wrapping_add(row as usize * n as usize);
                    // SAFETY: a residual has `m x n` numbers, and the row is below `m`.
                    unsafe { Self::add(sums, from, i, i + 1) };
                }
            }
        }
    }
}
