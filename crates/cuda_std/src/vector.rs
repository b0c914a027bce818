//! Vectors of 16 bytes: the most that one thread loads or stores by one instruction before sm_100.
//!
//! [`Vec16`] is the value that [`crate::mem::load_vec`] and [`crate::mem::store_vec`] move.
//! [`Accumulate`] reduces such vectors in a wider type and rounds once at the end.
//!
//! # Safety model
//!
//! Everything here is safe: a `Vec16` is plain bytes, and every bit pattern is a valid [`Element`].
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! let vector = Vec16::from_fn(|i| f16::from_f32(i as f32));
//! let mut sum = Accumulate::widen(vector);
//! Accumulate::add(&mut sum, vector);
//! let sum = <f16 as Accumulate>::narrow(sum);
//! assert_eq!(sum.lane(7), f16::from_f32(14.0));
//! ```

use core::fmt;
use core::marker::PhantomData;
use core::mem::transmute_copy;

use devcomm_types::Element;

pub use crate::accumulate::Accumulate;

/// 16 bytes of elements `T`, in memory order.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Vec16<T> {
    bits: [u32; 4],
    element: PhantomData<T>,
}

impl<T> Vec16<T> {
    /// Returns the vector of these 16 bytes, given as 32-bit words.
    pub const fn from_bits(bits: [u32; 4]) -> Self {
        Self { bits, element: PhantomData }
    }

    /// Returns the 16 bytes, as 32-bit words.
    pub const fn to_bits(self) -> [u32; 4] {
        self.bits
    }
}

impl<T: Element> Vec16<T> {
    /// The number of elements in a vector.
    pub const LANES: usize = 16 / size_of::<T>();

    /// Returns the vector of `f(0)`, `f(1)`, ..
    pub fn from_fn(mut f: impl FnMut(usize) -> T) -> Self {
        let mut bits = 0;
        let mut i = 0;
        while i < Self::LANES {
            bits |= u128::from(to_low_bits(f(i))) << (8 * size_of::<T>() * i);
            i += 1;
        }
        Self::from_bits([
            bits as u32,
            (bits >> 32) as u32,
            (bits >> 64) as u32,
            (bits >> 96) as u32,
        ])
    }

    /// Returns the vector with `value` in every lane.
    pub fn splat(value: T) -> Self {
        Self::from_fn(|_| value)
    }

    /// Returns the element `i`.
    ///
    /// # Panics
    ///
    /// When `i` is not below [`Self::LANES`].
    #[track_caller]
    pub fn lane(self, i: usize) -> T {
        assert!(i < Self::LANES, "the vector has fewer lanes");
        let [a, b, c, d] = self.bits.map(u128::from);
        let bits = a | b << 32 | c << 64 | d << 96;
        from_low_bits((bits >> (8 * size_of::<T>() * i)) as u64)
    }
}

/// Returns an element's bits, zero-extended.
fn to_low_bits<T: Element>(element: T) -> u64 {
    // SAFETY: an `Element` is plain old data, so its bits are an integer of its size.
    unsafe {
        match size_of::<T>() {
            1 => transmute_copy::<T, u8>(&element).into(),
            2 => transmute_copy::<T, u16>(&element).into(),
            4 => transmute_copy::<T, u32>(&element).into(),
            _ => transmute_copy::<T, u64>(&element),
        }
    }
}

/// Returns the element whose bits are the low bits of `bits`.
fn from_low_bits<T: Element>(bits: u64) -> T {
    // SAFETY: every bit pattern of an `Element` is valid.
    unsafe {
        match size_of::<T>() {
            1 => transmute_copy(&(bits as u8)),
            2 => transmute_copy(&(bits as u16)),
            4 => transmute_copy(&(bits as u32)),
            _ => transmute_copy(&bits),
        }
    }
}

impl<T: Element + PartialEq> PartialEq for Vec16<T> {
    fn eq(&self, other: &Self) -> bool {
        (0..Self::LANES).all(|i| self.lane(i) == other.lane(i))
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Vec16<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries((0..Self::LANES).map(|i| self.lane(i))).finish()
    }
}
