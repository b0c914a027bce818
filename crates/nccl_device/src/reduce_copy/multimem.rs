//! Reductions and copies over multicast addresses. Such an address stands for one element of each
//! rank's part of a window: its copies. The NVLink switch combines the copies, or stores to all.
//!
//! Addresses come from [`Window::multimem`](crate::Window::multimem), plus an index in elements.

use crate::prelude::*;
use core::mem::transmute_copy;

use cuda_std::multimem;
use cuda_std::reduce::{And, Or};
use half::{bf16, f16};

use super::buffers::{Buffers, misalignment};
use super::pack::Pack;
use super::pass::Plan;
use super::sink::{Each, Many, One, Sink};
use super::source::{Copied, Reduced, ReducedMany, Source};
use super::threads::Threads;

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
    /// `from` is a multicast address, valid in all copies and aligned to the element.
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
                // SAFETY: the caller's contract. The other half of the 32-bit word, whose sum is
                // not used, is mapped too: GPU memory is mapped in pages of multiples of 4 bytes.
                let both = unsafe { multimem::load_reduce(op, both) };
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
/// `to` is a multicast address, valid in all copies and aligned to the element.
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

/// A multicast address whose copies the switch reduces.
#[derive(Clone, Copy)]
struct Multicast<T, Op> {
    op: Op,
    from: *const T,
}

impl<T: MultimemReduce<Op>, Op: ReduceOp<T>> Source<T> for Multicast<T, Op> {
    type Loaded<P: Pack<T>> = P::Value;

    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.from))
    }

    unsafe fn rows<P: Pack<T>, const U: usize>(
        &self,
        at: usize,
        row: usize,
        live: impl Fn(usize) -> bool,
    ) -> [P::Value; U] {
        let mut values = [P::zero(); U];
        for (u, value) in values.iter_mut().enumerate() {
            if live(u) {
                // SAFETY: the caller passes rows that the buffers have, aligned for the pack.
                *value =
                    unsafe { P::load_multicast(self.op, self.from.wrapping_add(at + u * row)) };
            }
        }
        values
    }

    fn finish<P: Pack<T>>(&self, loaded: P::Value) -> P::Value {
        loaded
    }
}

/// A multicast address: stores go to all copies.
#[derive(Clone, Copy)]
struct ToMulticast<T>(*mut T);

impl<T: Accumulate> Sink<T> for ToMulticast<T> {
    fn misalignment(&self) -> Option<usize> {
        Some(misalignment(self.0))
    }

    unsafe fn store<P: Pack<T>>(&self, at: usize, value: P::Value) {
        // SAFETY: the caller passes an index of a pack that the buffer has, aligned for it.
        unsafe { P::store_multicast(self.0.wrapping_add(at), value) }
    }
}

/// Computes `dst[i] = op over the copies of src[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSum`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is a multicast address, aligned to the
/// element, that has `count` elements in each copy, which are not written at the same time; `dst`
/// is valid for `count` writes, aligned, and not accessed by other threads.
#[doc(alias = "ncclMultimemReduceSum")]
#[track_caller]
pub unsafe fn multimem_reduce<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_reduce")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Multicast { op, from: src }, One(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Stores `src[i]` to every copy of `dst[i]`, for `i < count`.
///
/// NCCL: `ncclMultimemCopy`, which takes no `i8` or `u8`, and no odd counts of `f16` and `bf16`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` is valid for `count` reads, aligned, and
/// not written at the same time; `dst` is a multicast address, aligned to the element, that has
/// `count` elements in each copy, which other threads do not access.
#[doc(alias = "ncclMultimemCopy")]
#[track_caller]
pub unsafe fn multimem_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_copy")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Copied(src), ToMulticast(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Stores `op over the copies of src[i]` to every copy of `dst[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSumCopy`.
///
/// # Safety
///
/// Every thread of `threads` makes the same call. `src` and `dst` are multicast addresses, aligned
/// to the element, that have `count` elements in each copy. Other threads do not write the elements
/// of `src` or access those of `dst` at the same time.
#[doc(alias = "ncclMultimemReduceSumCopy")]
#[track_caller]
pub unsafe fn multimem_reduce_copy<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    let call = CoopCall::new("multimem_reduce_copy")
        .arg("source", src.addr() as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) = (Multicast { op, from: src }, ToMulticast(dst));
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe { Plan::new(threads, &from, &to, count).all::<T, 8>(from, to) }
}

/// Reduces `src[src_index + i]` over the ranks of `team` by `op`, and stores the result to every
/// copy of `dst[i]`, for `i < count`.
///
/// NCCL, in C++ and for sums only: `ncclLsaReduceSumMultimemCopy`.
///
/// # Safety
///
/// The contract is that of [`lsa_reduce`](super::lsa_reduce) for `src`, and of [`multimem_copy`]
/// for `dst`.
#[doc(alias = "ncclLsaReduceSumMultimemCopy")]
#[track_caller]
pub unsafe fn lsa_reduce_multimem_copy<T: Accumulate>(
    threads: impl Into<Threads>,
    op: impl ReduceOp<T>,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("lsa_reduce_multimem_copy")
        .arg("source's window", src.as_raw().addr() as u64)
        .arg("source's index", src_index as u64)
        .arg("destination", dst.addr() as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let from = Buffers::of_team_starting_at_self(src, src_index, team);
    let (many, to) = (ReducedMany { op, from }, ToMulticast(dst));
    let plan = Plan::new(threads, &many, &to, count);
    // The number of vectors in flight is chosen as in the module `lsa`.
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            2 => plan.vectors::<T, 4>(Reduced::<T, _, 2>::of(op, from), to),
            4 => plan.vectors::<T, 2>(Reduced::<T, _, 4>::of(op, from), to),
            8 => plan.vectors::<T, 1>(Reduced::<T, _, 8>::of(op, from), to),
            _ => plan.vectors::<T, 2>(many, to),
        }
        plan.elements(many, to);
    }
}

/// Computes `dst[dst_index + i] = op over the copies of src[i]` in every rank of `team`, for `i <
/// count`.
///
/// NCCL, in C++ and for sums only: `ncclMultimemReduceSumLsaCopy`.
///
/// # Safety
///
/// The contract is that of [`multimem_reduce`] for `src`, and of [`lsa_copy`](super::lsa_copy) for
/// `dst`.
#[doc(alias = "ncclMultimemReduceSumLsaCopy")]
#[track_caller]
pub unsafe fn multimem_reduce_lsa_copy<T: MultimemReduce<Op>, Op: ReduceOp<T>>(
    threads: impl Into<Threads>,
    op: Op,
    src: *const T,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let call = CoopCall::new("multimem_reduce_lsa_copy")
        .arg("source", src.addr() as u64)
        .arg("destination's window", dst.as_raw().addr() as u64)
        .arg("destination's index", dst_index as u64)
        .arg("count", count as u64)
        .arg("ranks", team.n_ranks as u64);
    let threads: Threads = threads.into().call(call);
    let (from, to) =
        (Multicast { op, from: src }, Buffers::of_team_starting_at_self(dst, dst_index, team));
    let plan = Plan::new(threads, &from, &Many(to), count);
    // SAFETY: the caller's buffers have `count` elements, and the threads share them out by `Plan`.
    unsafe {
        match team.n_ranks {
            2 => plan.vectors::<T, 8>(from, Each::<T, 2>::of(to)),
            4 => plan.vectors::<T, 8>(from, Each::<T, 4>::of(to)),
            8 => plan.vectors::<T, 6>(from, Each::<T, 8>::of(to)),
            _ => plan.vectors::<T, 8>(from, Many(to)),
        }
        plan.elements(from, Many(to));
    }
}
