//! Addition of the residual and RMSNorm, by one block for each token.

use core::cell::Cell;

use cuda_std::prelude::*;
use cuda_std::strided::Strided;
use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{convert, grid, math};
use devcomm_types::F8E4M3;
use half::{bf16, f16};

/// For each token `t < tokens`: `sum = residual[t] + input[t]`; `residual[t]` becomes the sum,
/// rounded, and `output[t]` `sum * weight / sqrt(mean(sum^2) + eps)`.
///
/// A row has `hidden` elements. f16 and bf16 are computed in f32, and each result is rounded once.
/// `output` may be `input`. Without a `residual` (null) the sum is the input.
///
/// With [`Quantised`] results, `output` is not used.
///
/// Grid: any; a block computes one row at a time. Block: a multiple of 32 threads, one-dimensional,
/// at least half as many as a row has vectors of 16 bytes. May be a dependent launch.
///
/// # Safety
///
/// `input`, `residual` and the output in use have `tokens * hidden` elements, and `weight` has
/// `hidden`, all aligned to 16 bytes. Nothing else accesses them or the scale until the kernel has
/// ended.
#[kernel(T = [f32, f16, bf16], requires(hidden.is_multiple_of(Vec16::<T>::LANES as u32)))]
pub unsafe fn rmsnorm<T: Accumulate<Acc = f32>>(
    input: *const T,
    residual: *mut T,
    weight: *const T,
    output: *mut T,
    quantised: Quantised,
    tokens: u32,
    hidden: u32,
    eps: f32,
) {
    let rows = Rows { input, residual, weight, output, quantised, tokens, hidden, eps };
    grid::launch_next();
    grid::wait_for_previous();
    for row in rows.of_this_block() {
        // SAFETY: the kernel's contract.
        unsafe {
            let mine = rows.load(row);
            rows.normalise(row, |v, _| T::widen(mine[v]));
        }
    }
}

/// Vectors of a row for each thread, at most: they stay in registers.
pub const ROW_VECTORS: usize = 2;

/// Results that are quantised: divided by a scale, rounded to the nearest, ties to even, and
/// saturated at 448 of either sign.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Quantised {
    /// Gets the results; null if they are not quantised.
    pub output: *mut F8E4M3,
    /// One number.
    pub scale: *const f32,
}

impl Quantised {
    /// The factor of the results.
    ///
    /// # Safety
    ///
    /// The scale can be read, unless there is no output.
    #[inline(always)]
    unsafe fn factor(self) -> f32 {
        // SAFETY: the caller's contract.
        if self.output.is_null() { 1.0 } else { 1.0 / unsafe { mem::load(self.scale) } }
    }
}

/// Rows to normalise.
#[derive(Clone, Copy)]
pub(crate) struct Rows<T> {
    pub(crate) input: *const T,
    pub(crate) residual: *mut T,
    pub(crate) weight: *const T,
    pub(crate) output: *mut T,
    pub(crate) quantised: Quantised,
    pub(crate) tokens: u32,
    /// Elements of a row.
    pub(crate) hidden: u32,
    pub(crate) eps: f32,
}

impl<T: Accumulate<Acc = f32>> Rows<T> {
    /// Vectors of a row.
    #[inline(always)]
    pub(crate) fn vectors(&self) -> u32 {
        self.hidden / Vec16::<T>::LANES as u32
    }

    /// The rows of this block.
    #[inline(always)]
    pub(crate) fn of_this_block(&self) -> impl Iterator<Item = u32> {
        let (first, step) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
        Strided::new(first, self.tokens as usize, step).map(|row| row as u32)
    }

    /// The index of this thread's `v`-th vector of a row, if it has one.
    #[inline(always)]
    pub(crate) fn place(&self, row: u32, v: usize) -> Option<u32> {
        let own = thread::thread_idx_x() + v as u32 * thread::block_dim_x();
        (own < self.vectors()).then(|| row * self.vectors() + own)
    }

    /// Loads a vector of the input.
    ///
    /// # Safety
    ///
    /// As for [`rmsnorm`](fn@rmsnorm); the input has the vector.
    #[inline(always)]
    pub(crate) unsafe fn load_vector(&self, at: u32) -> Vec16<T> {
        // SAFETY: the caller's contract.
        unsafe { mem::load_vec(vector(self.input, at)) }
    }

    /// Loads this thread's vectors of a row of the input.
    ///
    /// # Safety
    ///
    /// As for [`rmsnorm`](fn@rmsnorm).
    #[inline(always)]
    pub(crate) unsafe fn load(&self, row: u32) -> [Vec16<T>; ROW_VECTORS] {
        let mut loaded = [Vec16::from_bits([0; 4]); ROW_VECTORS];
        let mut v = 0;
        while v < ROW_VECTORS {
            if let Some(at) = self.place(row, v) {
                // SAFETY: the caller's contract.
                loaded[v] = unsafe { self.load_vector(at) };
            }
            v += 1;
        }
        loaded
    }

    /// Adds the residual to a row, normalises and stores it. `load` returns the `v`-th vector of
    /// this thread, whose index is its second argument.
    ///
    /// # Safety
    ///
    /// As for [`rmsnorm`](fn@rmsnorm), and all threads of the block call this.
    #[inline(always)]
    pub(crate) unsafe fn normalise(&self, row: u32, load: impl Fn(usize, u32) -> T::Wide) {
        // SAFETY: the caller's contract. Loaded before `load` waits.
        let factor = unsafe { self.quantised.factor() };
        let mut sums = [T::widen(Vec16::from_bits([0; 4])); ROW_VECTORS];
        let mut weights = [Vec16::<T>::from_bits([0; 4]); ROW_VECTORS];
        let squares = Cell::new(0.0);
        let mut v = 0;
        while v < ROW_VECTORS {
            if let Some(at) = self.place(row, v) {
                let place = vector(self.residual.cast_const(), at);
                let has_residual = !self.residual.is_null();
                let weight = vector(self.weight, at - row * self.vectors());
                // SAFETY: the caller's contract. These are loaded first: `load` may wait.
                unsafe {
                    weights[v] = mem::load_vec(weight);
                    let residual = has_residual.then(|| mem::load_vec(place));
                    sums[v] = load(v, at);
                    if let Some(residual) = residual {
                        T::add(&mut sums[v], residual);
                        mem::store_vec(place.cast_mut(), T::narrow(sums[v]));
                    }
                }
                T::map(&mut sums[v], |x| {
                    squares.set(squares.get() + x * x);
                    x
                });
            }
            v += 1;
        }
        // SAFETY: all threads of the block are here, and they are whole warps.
        let mean = unsafe { block_sum(squares.get()) } / self.hidden as f32;
        let scale = math::rsqrt(mean + self.eps) * factor;
        let mut v = 0;
        while v < ROW_VECTORS {
            if let Some(at) = self.place(row, v) {
                let first = at as usize * Vec16::<T>::LANES;
                let quantised = self.quantised.output;
                T::zip(&mut sums[v], T::widen(weights[v]), |x, w| x * scale * w);
                // SAFETY: the caller's contract.
                unsafe {
                    if quantised.is_null() {
                        mem::store_vec(self.output.wrapping_add(first), T::narrow(sums[v]));
                    } else {
                        store_quantised(quantised.wrapping_add(first), sums[v].as_ref());
                    }
                }
            }
            v += 1;
        }
    }
}

/// The address of a vector.
#[inline(always)]
fn vector<T: Accumulate>(elements: *const T, index: u32) -> *const T {
    elements.wrapping_add(index as usize * Vec16::<T>::LANES)
}

/// Stores lanes as 8-bit floats, four at once.
///
/// # Safety
///
/// `output` is aligned to 4 bytes and has an element for each lane, of which there are a multiple
/// of 4, and nothing else accesses them.
#[inline(always)]
unsafe fn store_quantised(output: *mut F8E4M3, lanes: &[f32]) {
    let mut i = 0;
    while i < lanes.len() {
        let [low, high] = [[lanes[i], lanes[i + 1]], [lanes[i + 2], lanes[i + 3]]]
            .map(|pair| u32::from(convert::f32_to_f8e4m3x2(pair)));
        // SAFETY: the caller's contract.
        unsafe { mem::store(output.wrapping_add(i).cast(), low | high << 16) };
        i += 4;
    }
}
