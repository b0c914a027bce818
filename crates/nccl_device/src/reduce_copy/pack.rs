//! The size of an access, 16 bytes or one element, as a type parameter of reduce-copy.

use core::mem::zeroed;

use cuda_std::vector::{Accumulate, Vec16};
use cuda_std::{mem, multimem};

use super::multicast::{MultimemReduce, store_one};

/// A size of access to elements `T`.
pub(super) trait Pack<T: Accumulate> {
    /// Elements per access.
    const LEN: usize;
    /// The type that one access loads or stores.
    type Value: Copy;
    /// A value as accumulators, the type that reductions compute in.
    type Wide: Copy;

    fn zero() -> Self::Value;
    /// Loads the elements from `from` on.
    ///
    /// # Safety
    ///
    /// `from` is valid for the access and aligned for it.
    #[track_caller]
    unsafe fn load(from: *const T) -> Self::Value;
    /// Stores the elements from `to` on.
    ///
    /// # Safety
    ///
    /// `to` is valid for the access and aligned for it.
    #[track_caller]
    unsafe fn store(to: *mut T, value: Self::Value);
    /// Loads and reduces the copies at a multicast address.
    ///
    /// # Safety
    ///
    /// `from` is a multicast address, valid in all copies and aligned for the access.
    #[track_caller]
    unsafe fn load_multicast<Op>(op: Op, from: *const T) -> Self::Value
    where
        T: MultimemReduce<Op>;
    /// Stores to all copies at a multicast address.
    ///
    /// # Safety
    ///
    /// `to` is a multicast address, valid in all copies and aligned for the access.
    #[track_caller]
    unsafe fn store_multicast(to: *mut T, value: Self::Value);
    /// Converts each element to its accumulator.
    fn widen(value: Self::Value) -> Self::Wide;
    /// Rounds each accumulator to an element.
    fn narrow(wide: Self::Wide) -> Self::Value;
    /// Replaces each accumulator `a` by `f(a)`.
    fn map(wide: &mut Self::Wide, f: impl Fn(T::Acc) -> T::Acc);
    /// Replaces each accumulator `a` by `f(a, b)`, with `b` at the same place in `other`.
    fn zip(wide: &mut Self::Wide, other: Self::Wide, f: impl Fn(T::Acc, T::Acc) -> T::Acc);
}

/// Accesses of 16 bytes.
pub(super) struct Vectors;

impl<T: Accumulate> Pack<T> for Vectors {
    const LEN: usize = Vec16::<T>::LANES;
    type Value = Vec16<T>;
    type Wide = T::Wide;

    fn zero() -> Vec16<T> {
        Vec16::from_bits([0; 4])
    }

    unsafe fn load(from: *const T) -> Vec16<T> {
        // SAFETY: the caller passes an address of a pack that is valid for reads and aligned.
        unsafe { mem::load_vec(from) }
    }

    unsafe fn store(to: *mut T, value: Vec16<T>) {
        // SAFETY: the caller passes an address of a pack that is valid for writes and aligned.
        unsafe { mem::store_vec(to, value) }
    }

    unsafe fn load_multicast<Op>(op: Op, from: *const T) -> Vec16<T>
    where
        T: MultimemReduce<Op>,
    {
        // SAFETY: the caller passes an address of a pack that is valid for reads and aligned.
        unsafe { T::load_vec(op, from) }
    }

    unsafe fn store_multicast(to: *mut T, value: Vec16<T>) {
        // SAFETY: the caller passes an address of a pack that is valid for writes and aligned.
        unsafe { multimem::store_vec(to, value) }
    }

    fn widen(value: Vec16<T>) -> T::Wide {
        T::widen(value)
    }

    fn narrow(wide: T::Wide) -> Vec16<T> {
        T::narrow(wide)
    }

    fn map(wide: &mut T::Wide, f: impl Fn(T::Acc) -> T::Acc) {
        T::map(wide, f);
    }

    fn zip(wide: &mut T::Wide, other: T::Wide, f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
        T::zip(wide, other, f);
    }
}

/// Accesses of one element.
pub(super) struct Elements;

impl<T: Accumulate> Pack<T> for Elements {
    const LEN: usize = 1;
    type Value = T;
    type Wide = T::Acc;

    fn zero() -> T {
        // SAFETY: every bit pattern is a value of `T`, by the contract of `Element`.
        unsafe { zeroed() }
    }

    unsafe fn load(from: *const T) -> T {
        // SAFETY: the caller passes an address of a pack that is valid for reads and aligned.
        unsafe { mem::load(from) }
    }

    unsafe fn store(to: *mut T, value: T) {
        // SAFETY: the caller passes an address of a pack that is valid for writes and aligned.
        unsafe { mem::store(to, value) }
    }

    unsafe fn load_multicast<Op>(op: Op, from: *const T) -> T
    where
        T: MultimemReduce<Op>,
    {
        // SAFETY: the caller passes an address of a pack that is valid for reads and aligned.
        unsafe { <T as MultimemReduce<Op>>::load(op, from) }
    }

    unsafe fn store_multicast(to: *mut T, value: T) {
        // SAFETY: the caller passes an address of a pack that is valid for writes and aligned.
        unsafe { store_one(to, value) }
    }

    fn widen(value: T) -> T::Acc {
        value.to_acc()
    }

    fn narrow(wide: T::Acc) -> T {
        T::from_acc(wide)
    }

    fn map(wide: &mut T::Acc, f: impl Fn(T::Acc) -> T::Acc) {
        *wide = f(*wide);
    }

    fn zip(wide: &mut T::Acc, other: T::Acc, f: impl Fn(T::Acc, T::Acc) -> T::Acc) {
        *wide = f(*wide, other);
    }
}
