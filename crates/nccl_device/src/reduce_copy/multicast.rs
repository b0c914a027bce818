//! Accesses of elements at multicast addresses: an address stands for one element of each rank's
//! part of a window, its copies, which the NVLink switch combines or stores to.

use core::mem::transmute_copy;

use cuda_std::multimem;
use cuda_std::reduce::{And, Or};
use half::{bf16, f16};

use crate::prelude::*;

/// An element type that the switch can reduce by `Op`: `Sum` takes all types except 8-bit ones;
/// `Min` and `Max` take integers, `f16` and `bf16`; [`And`], [`Or`] and
/// [`Xor`](cuda_std::reduce::Xor) take integers.
#[diagnostic::on_unimplemented(
    message = "no switch reduces elements of `{Self}` by `{Op}`",
    note = "`Sum` takes numbers of 16 to 64 bits; `Min` and `Max` integers of 32 and 64 bits, \
            `f16` and `bf16`; `And`, `Or` and `Xor` integers of 32 and 64 bits"
)]
pub trait MultimemReduce<Op>: Accumulate {
    /// Returns the copies of one element, reduced by `op`.
    ///
    /// # Safety
    ///
    /// `from` is a multicast address, valid in all copies and aligned to the element. The copies
    /// have the whole 32-bit word of an element of 16 bits; other threads change the word only by
    /// `store_one` at the same time.
    #[doc(hidden)]
    unsafe fn load(op: Op, from: *const Self) -> Self;

    /// Returns the copies of 16 bytes of elements, reduced by `op`.
    ///
    /// # Safety
    ///
    /// `from` is a multicast address, valid in all copies and aligned to 16 bytes.
    #[doc(hidden)]
    unsafe fn load_vec(op: Op, from: *const Self) -> Vec16<Self>;
}

macro_rules! words {
    ($($type:ident)*) => { $(
        impl<Op: ReduceOp<$type>> MultimemReduce<Op> for $type
        where
            $type: multimem::LoadReduce<Op>,
            Vec16<$type>: multimem::LoadReduce<Op>,
        {
            #[track_caller]
            unsafe fn load(op: Op, from: *const Self) -> Self {
                // SAFETY: the caller's multicast address is valid for reads and aligned.
                unsafe { multimem::load_reduce(op, from) }
            }

            #[track_caller]
            unsafe fn load_vec(op: Op, from: *const Self) -> Vec16<Self> {
                // SAFETY: the caller's multicast address is valid for reads and aligned.
                unsafe { multimem::load_reduce_vec(op, from) }
            }
        }
    )* };
}

words!(i32 u32 i64 u64 f32 f64);

macro_rules! halves {
    ($($type:ident)*) => { $(
        impl<Op: ReduceOp<$type>> MultimemReduce<Op> for $type
        where
            [$type; 2]: multimem::LoadReduce<Op> + multimem::Value<Element = $type>,
            Vec16<$type>: multimem::LoadReduce<Op>,
        {
            #[track_caller]
            unsafe fn load(op: Op, from: *const Self) -> Self {
                let second = from.addr() % 4 / 2;
                let both = from.wrapping_sub(second).cast::<[$type; 2]>();
                let (order, scope) = (Order::Relaxed, Scope::Sys);
                // The load is atomic, as another thread may `store_one` to the other half, whose
                // sum is not used.
                // SAFETY: the caller's contract, by which the copies have the whole word.
                let both = unsafe { multimem::load_reduce_ordered(op, both, order, scope) };
                if second == 0 { both[0] } else { both[1] }
            }

            #[track_caller]
            unsafe fn load_vec(op: Op, from: *const Self) -> Vec16<Self> {
                // SAFETY: the caller's multicast address is valid for reads and aligned.
                unsafe { multimem::load_reduce_vec(op, from) }
            }
        }
    )* };
}

halves!(f16 bf16);

/// Stores one element to all copies. For an element below 32 bits, atomic reductions clear and then
/// set its bits in its 32-bit word: other elements of the word may be written concurrently.
///
/// # Safety
///
/// `to` is a multicast address, valid in all copies and aligned to the element. The copies have the
/// whole 32-bit word of an element below 32 bits, and other threads access the word only by this
/// function and [`MultimemReduce::load`] at the same time.
#[track_caller]
pub(super) unsafe fn store_one<T: Element>(to: *mut T, value: T) {
    // SAFETY: an element is plain old data of its size; the rest is the caller's contract.
    unsafe {
        let bits = match size_of::<T>() {
            8 => return multimem::store(to.cast::<u64>(), transmute_copy(&value)),
            4 => return multimem::store(to.cast::<u32>(), transmute_copy(&value)),
            2 => u32::from(transmute_copy::<T, u16>(&value)),
            _ => u32::from(transmute_copy::<T, u8>(&value)),
        };
        let at = to.addr() % 4;
        let word = to.wrapping_byte_sub(at).cast::<u32>();
        let mask = u32::MAX >> (32 - 8 * size_of::<T>()) << (8 * at);
        multimem::red(And, word, !mask, Order::Relaxed, Scope::Sys);
        multimem::red(Or, word, bits << (8 * at), Order::Relaxed, Scope::Sys);
    }
}
