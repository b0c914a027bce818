//! Addition of the residual and RMSNorm, by a cluster of blocks for each token.

use core::cell::Cell;

use cuda_std::convert;

use crate::prelude::*;

/// Adds the residuals and normalises: for each token `t < tokens`, `sum = residual[t] + input[t]`;
/// `residual[t]` becomes the sum, rounded, and `output[t]` becomes `sum * weight / sqrt(mean(sum^2)
/// + eps)`.
///
/// A row has `hidden` elements. f16 and bf16 are computed in f32, and each result is rounded once.
/// `output` may be `input`. Without a `residual` (null) the sum is the input.
///
/// With [`Quantised`] results, `output` is not used.
///
/// Grid: a cluster of 1, 2, 4 or 8 blocks for each token. Block: a multiple of 32 threads up to
/// 256, one-dimensional. A cluster has at least as many threads as a row has vectors of 16 bytes.
/// Dependent launch: allowed.
///
/// # Safety
///
/// `input`, `residual` and the output in use have `tokens * hidden` elements, and `weight` has
/// `hidden`, all aligned to 16 bytes. Nothing else accesses them or the scale until the kernel has
/// ended.
#[kernel(
    T = [f32, f16, bf16],
    max_threads = 256,
    requires(hidden.is_multiple_of(Vec16::<T>::LANES as u32))
)]
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
    // SAFETY: the kernel's caller guarantees the rows, and all threads of the cluster are here.
    unsafe {
        let (place, mut cluster) = (rows.first(), ClusterSum::new());
        grid::launch_next();
        grid::wait_for_previous();
        let load = |[at]: [u32; 1]| [T::widen(rows.load(at))];
        rows.normalise::<1, true>([place], &mut cluster, load);
    }
}

/// Results that are quantised: divided by a scale, rounded to the nearest, ties to even, and
/// saturated at 448 of either sign.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Quantised {
    /// The results; null if they are not quantised.
    pub output: *mut F8E4M3,
    /// The number by which the results are divided.
    pub scale: *const f32,
}

impl Quantised {
    /// Returns the number by which the results are divided: 1 if they are not quantised. The scale
    /// can be read, unless there is no output.
    pub(super) unsafe fn divisor(self) -> f32 {
        // SAFETY: the scale can be read, as the caller guarantees.
        if self.output.is_null() { 1.0 } else { unsafe { mem::load(self.scale) } }
    }

    /// Stores a vector of results, from index `at` on, in `output`; quantised ones in their output
    /// instead, where `round` rounds four to 8-bit floats. Nothing else accesses the elements.
    pub(super) unsafe fn store<T: Accumulate<Acc = f32>>(
        self,
        output: *mut T,
        at: usize,
        results: T::Wide,
        round: impl Fn([f32; 4]) -> u32,
    ) {
        let lanes = results.as_ref();
        // SAFETY: the output in use has the elements, as the caller guarantees.
        unsafe {
            if self.output.is_null() {
                return mem::store_vec(output.wrapping_add(at), T::narrow(results));
            }
            for i in Strided::new(0, lanes.len(), 4) {
                let word = round([lanes[i], lanes[i + 1], lanes[i + 2], lanes[i + 3]]);
                mem::store(self.output.wrapping_add(at + i).cast(), word);
            }
        }
    }
}

/// The place of a thread's vector: its row, and its index among the row's vectors.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: u32,
    in_row: u32,
}

/// The kernel's arrays, with a row for each token.
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
    pub(crate) fn vectors(&self) -> u32 {
        self.hidden / Vec16::<T>::LANES as u32
    }

    /// Returns the place in the first row of this thread's cluster.
    pub(crate) fn first(&self) -> Place {
        // A cluster has 1, 2, 4 or 8 blocks.
        let row = thread::block_idx_x() >> cluster::size().trailing_zeros();
        let in_row = cluster::rank() * thread::block_dim_x() + thread::thread_idx_x();
        Place { row, in_row }
    }

    /// Returns the place in the row that the cluster has `rows` rows after this one.
    pub(crate) fn after(&self, Place { row, in_row }: Place, rows: u32) -> Place {
        let clusters = thread::grid_dim_x() >> cluster::size().trailing_zeros();
        Place { row: row + rows * clusters, in_row }
    }

    pub(crate) fn index(&self, place: Place) -> u32 {
        place.row * self.vectors() + place.in_row
    }

    /// Returns whether there is a vector at this place.
    pub(crate) fn has(&self, place: Place) -> bool {
        place.row < self.tokens && place.in_row < self.vectors()
    }

    /// Loads a vector of the input. The conditions are those of [`rmsnorm`](fn@rmsnorm); the input
    /// has the vector.
    pub(crate) unsafe fn load(&self, at: u32) -> Vec16<T> {
        // SAFETY: the input has the vector, as the caller guarantees.
        unsafe { mem::load_vec(vector(self.input, at)) }
    }

    /// Adds the residuals, normalises and stores `R` rows. `load` returns the vectors at `places`,
    /// one in each row, unless rows have no vector for this thread. The weights and the scale are
    /// loaded before it if `EARLY`, or else while the cluster adds up: `load` may wait, and they
    /// take registers. The conditions are those of [`rmsnorm`](fn@rmsnorm). The rows exist, and all
    /// threads of the cluster call this.
    pub(crate) unsafe fn normalise<const R: usize, const EARLY: bool>(
        &self,
        places: [Place; R],
        cluster: &mut ClusterSum,
        load: impl FnOnce([u32; R]) -> [T::Wide; R],
    ) {
        let mut divisor = 1.0;
        let mut sums = [T::widen(Vec16::from_bits([0; 4])); R];
        let mut weight = Vec16::<T>::from_bits([0; 4]);
        let squares = [const { Cell::new(0.0) }; R];
        let (has_vectors, in_row) = (self.has(places[0]), places[0].in_row);
        let at = places.map(|place| self.index(place));
        if has_vectors {
            let has_residual = !self.residual.is_null();
            // SAFETY: the kernel's caller guarantees the memory. `load` may wait, so the residuals
            // are loaded before it.
            unsafe {
                let residuals = at.map(|at| {
                    has_residual.then(|| mem::load_vec(vector(self.residual.cast_const(), at)))
                });
                let weights = vector(self.weight, in_row);
                if EARLY {
                    (weight, divisor) = (mem::load_vec(weights), self.quantised.divisor());
                }
                sums = load(at);
                for r in 0..R {
                    if let Some(residual) = residuals[r] {
                        T::add(&mut sums[r], residual);
                        let to = vector(self.residual.cast_const(), at[r]).cast_mut();
                        mem::store_vec(to, T::narrow(sums[r]));
                    }
                    T::map(&mut sums[r], |x| {
                        squares[r].set(squares[r].get() + x * x);
                        x
                    });
                }
                if !EARLY {
                    weight = mem::load_vec(weights);
                }
            }
        }
        // SAFETY: the cluster's threads are here, in whole warps; the scale can be read.
        let totals = unsafe {
            let totals = cluster.sum(squares.map(Cell::into_inner));
            if !EARLY {
                divisor = self.quantised.divisor();
            }
            totals
        };
        if !has_vectors {
            return;
        }
        for r in 0..R {
            let mean = totals[r] * math::recip(self.hidden as f32);
            let scale = math::rsqrt(mean + self.eps) * math::recip(divisor);
            let first = at[r] as usize * Vec16::<T>::LANES;
            T::zip(&mut sums[r], T::widen(weight), |x, w| x * scale * w);
            let round = |[a, b, c, d]: [f32; 4]| {
                let [low, high] = [[a, b], [c, d]].map(convert::f32_to_f8e4m3x2).map(u32::from);
                low | high << 16
            };
            // SAFETY: the kernel's caller guarantees the rows, and this thread has the vector.
            unsafe { self.quantised.store::<T>(self.output, first, sums[r], round) };
        }
    }
}

pub(super) fn vector<T: Accumulate>(elements: *const T, index: u32) -> *const T {
    elements.wrapping_add(index as usize * Vec16::<T>::LANES)
}
