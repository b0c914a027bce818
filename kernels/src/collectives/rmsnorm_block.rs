//! Addition of the residual and RMSNorm on every GPU since Ampere, by a block for each token.

use core::cell::Cell;

use super::rmsnorm::{Quantised, vector};
use crate::prelude::*;

/// The most threads of a block.
pub const THREADS: u32 = 1024;

/// Vectors of 16 bytes that a thread keeps in registers.
pub const VECTORS: usize = 2;

/// Normalises as [`rmsnorm()`](super::rmsnorm::rmsnorm()) does, without clusters, with a residual.
/// It needs `sm_80`.
///
/// Grid: a block for each token, one-dimensional. Block: a multiple of 32 threads up to
/// [`THREADS`], one-dimensional. A block has a thread for every [`VECTORS`] vectors of 16 bytes of
/// a row.
///
/// # Safety
///
/// `input`, `residual` and the output in use have a row of `hidden` elements for each block, and
/// `weight` has `hidden`, all aligned to 16 bytes. Nothing else accesses them or the scale until
/// the kernel has ended.
#[kernel(
    T = [f32, f16, bf16],
    arch = "sm_80",
    max_threads = 1024,
    requires(hidden.is_multiple_of(Vec16::<T>::LANES as u32))
)]
pub unsafe fn rmsnorm_block<T: Accumulate<Acc = f32>>(
    input: *const T,
    residual: *mut T,
    weight: *const T,
    output: *mut T,
    quantised: Quantised,
    hidden: u32,
    eps: f32,
) {
    let vectors = hidden / Vec16::<T>::LANES as u32;
    let first = thread::block_idx_x() * vectors;
    let mut sums = [T::widen(Vec16::from_bits([0; 4])); VECTORS];
    let squares = Cell::new(0.0);
    for i in 0..VECTORS {
        let in_row = place(i);
        if in_row < vectors {
            let residual = vector(residual.cast_const(), first + in_row);
            // SAFETY: the kernel's caller guarantees the memory: the row has the vector.
            unsafe {
                sums[i] = T::widen(mem::load_vec(vector(input, first + in_row)));
                T::add(&mut sums[i], mem::load_vec(residual));
                mem::store_vec(residual.cast_mut(), T::narrow(sums[i]));
            }
            T::map(&mut sums[i], |x| {
                squares.set(squares.get() + x * x);
                x
            });
        }
    }
    // SAFETY: the whole block is here, in whole warps. The scale can be read.
    let (mean, divisor) =
        unsafe { (block_sum(squares.get()) * math::recip(hidden as f32), quantised.divisor()) };
    let scale = math::rsqrt(mean + eps) * math::recip(divisor);
    for i in 0..VECTORS {
        let in_row = place(i);
        if in_row < vectors {
            let at = (first + in_row) as usize * Vec16::<T>::LANES;
            // SAFETY: the kernel's caller guarantees the memory; the row has the vector.
            unsafe {
                let weight = mem::load_vec(vector(weight, in_row));
                T::zip(&mut sums[i], T::widen(weight), |x, w| x * scale * w);
                let round = |lanes: [f32; 4]| u32::from_le_bytes(lanes.map(to_f8e4m3));
                quantised.store::<T>(output, at, sums[i], round);
            }
        }
    }
}

/// Returns the place in the row of this thread's vector number `i`.
fn place(i: usize) -> u32 {
    i as u32 * thread::block_dim_x() + thread::thread_idx_x()
}

/// Returns the bits of the nearest 8-bit float: ties go to even, and magnitudes above 448 become
/// 448. The instruction for it (`cuda_std::convert::f32_to_f8e4m3x2`) needs `sm_89`.
fn to_f8e4m3(value: f32) -> u8 {
    const NAN: u32 = 0x7f;
    const LARGEST: u32 = 0x7e;
    /// The f32 whose last bit is worth as much as the last bit of a subnormal result.
    const SUBNORMAL: f32 = 16384.0;
    /// Bits of an f32's mantissa that the result lacks.
    const CUT: u32 = 20;
    let bits = value.to_bits();
    let (sign, size) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    let rounded = if size > f32::INFINITY.to_bits() {
        NAN
    } else if size >= 448_f32.to_bits() {
        LARGEST
    } else if size < 0.015625_f32.to_bits() {
        // The addition rounds to the bits of a subnormal result.
        (f32::from_bits(size) + SUBNORMAL).to_bits() - SUBNORMAL.to_bits()
    } else {
        let half = (1 << (CUT - 1)) - 1 + (size >> CUT & 1);
        // The exponents are relative to 127 and 7.
        ((size + half) >> CUT) - ((127 - 7) << 3)
    };
    (sign | rounded) as u8
}

#[cfg(test)]
mod tests;
