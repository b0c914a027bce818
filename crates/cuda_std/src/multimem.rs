//! Loads, stores and reductions at multicast addresses. Such an address stands for one location in
//! the memory of each of several GPUs: its copies. The NVLink switch executes the operations.
//!
//! * [`load_reduce`] combines all copies and returns the result: the sum, minimum or maximum, or
//!   for integers the bitwise AND, OR or XOR.
//! * [`store`] writes every copy.
//! * [`red`] combines each copy with a value, and replaces the copy by the result.
//!
//! An access is of a [`Value`]: one number of 4 or 8 bytes, two or four `f16` or `bf16` (as
//! `[f16; 2]`), two `f32`, or a [`Vec16`], which is 16 bytes of elements. [`load_reduce_vec`] and
//! [`store_vec`] access a `Vec16` by a pointer to its first element. A reduction of a `Vec16` is
//! one instruction for `f16`, `bf16` and `f32`, and two or four for integers and `f64`.
//! [`Sum`](crate::reduce::Sum) adds `f16` and `bf16` in `f32` and rounds once,
//! [`SumInHalf`](crate::reduce::SumInHalf) rounds each addition; PTX does not specify the order of
//! the additions. 8-bit floats, which need sm_100a, are not supported.
//!
//! PTX: `multimem.ld_reduce`, `multimem.st`, `multimem.red`, from sm_90 on. Multicast addresses
//! exist only if the driver supports multicast objects.
//!
//! # Safety model
//!
//! All are `unsafe`: the address is a multicast address, for example from `nccl_device`'s
//! `Window::multimem`, valid in all copies for the access, and aligned to the value's size. A load
//! or store of a multicast address by other instructions is undefined. Functions without an order
//! are not atomic: a barrier must separate them from other threads' accesses to the same elements.
//!
//! # Example
//!
//! ```
//! use cuda_std::multimem;
//! use cuda_std::prelude::*;
//! use cuda_std::reduce::Sum;
//! /// Replaces 16 bytes in every GPU by their sum over all GPUs.
//! ///
//! /// # Safety
//! ///
//! /// `copies` is the multicast address of 16 bytes, aligned to 16, and no other thread accesses
//! /// them.
//! unsafe fn all_reduce(copies: *mut f16) {
//!     // SAFETY: the caller's contract.
//!     unsafe { multimem::store_vec(copies, multimem::load_reduce_vec(Sum, copies)) }
//! }
//! ```

use devcomm_types::Element;
use half::{bf16, f16};

use crate::atomic::{Order, Scope};
use crate::reduce::{Accumulate, ReduceOp};
use crate::vector::Vec16;

/// A type that one call accesses: plain bytes, an array of [`Self::Element`].
///
/// The trait is sealed: it is implemented for the types that the hardware supports.
pub trait Value: Copy + raw::Bytes {
    /// The element type.
    type Element: Accumulate;
}

/// A value that the hardware can reduce by `Op` in a load.
#[diagnostic::on_unimplemented(
    message = "no GPU loads `{Self}` from a multicast address reduced by `{Op}`",
    note = "`Sum` takes numbers of 16 to 64 bits; `Min` and `Max` integers, `f16` and `bf16`; \
            `And`, `Or` and `Xor` integers; `f16` and `bf16` only in pairs (`[f16; 2]`) or vectors"
)]
pub trait LoadReduce<Op>: Value + raw::LoadReduce<Op> {}
impl<V: Value + raw::LoadReduce<Op>, Op> LoadReduce<Op> for V {}

/// A value that the hardware can combine by `Op` with every copy.
#[diagnostic::on_unimplemented(
    message = "no GPU updates `{Self}` at a multicast address by `{Op}`",
    note = "`Sum` takes numbers of 16 to 64 bits; `Min` and `Max` integers, `f16` and `bf16`; \
            `And`, `Or` and `Xor` integers; `f16` and `bf16` only in pairs (`[f16; 2]`) or vectors"
)]
pub trait Red<Op>: Value + raw::Red<Op> {}
impl<V: Value + raw::Red<Op>, Op> Red<Op> for V {}

/// Traits that `arch_nvptx` and `arch_host` implement, for the same values.
#[doc(hidden)]
#[allow(
    clippy::missing_safety_doc,
    reason = "every function: the address is a multicast address, valid and aligned to the size"
)]
pub mod raw {
    use crate::atomic::{Order, Scope};

    /// Order and scope of an atomic access. `None` is a weak access, PTX's term for one that is not
    /// atomic.
    pub type Strength = Option<(Order, Scope)>;

    pub trait Bytes: Copy {
        unsafe fn store(address: *mut Self, value: Self, strength: Strength);
    }

    pub trait LoadReduce<Op>: Copy {
        unsafe fn load_reduce(op: Op, address: *const Self, strength: Strength) -> Self;
    }

    pub trait Red<Op>: Copy {
        unsafe fn red(op: Op, address: *mut Self, value: Self, order: Order, scope: Scope);
    }
}

/// All values, with their elements and the kind of access: `word` (4 bytes), `long` (8 bytes),
/// `pair` and `quad` (two and four 32-bit registers by one instruction).
macro_rules! values {
    ($callback:ident) => {
        $callback! {
            u32: u32 word; i32: i32 word; f32: f32 word; [f16; 2]: f16 word; [bf16; 2]: bf16 word;
            u64: u64 long; i64: i64 long; f64: f64 long;
            [f32; 2]: f32 pair; [f16; 4]: f16 pair; [bf16; 4]: bf16 pair;
            Vec16<u32>: u32 quad; Vec16<i32>: i32 quad; Vec16<u64>: u64 quad; Vec16<i64>: i64 quad;
            Vec16<f32>: f32 quad; Vec16<f64>: f64 quad; Vec16<f16>: f16 quad;
            Vec16<bf16>: bf16 quad;
        }
    };
}

/// All operations: the value, its kind of access (as in `values`; `words` and `longs`: 16 bytes by
/// several instructions), and the PTX suffixes of `ld_reduce` and `red`.
macro_rules! operations {
    ($callback:ident) => {
        $callback! {
            Sum u32: word "add.u32", "add.u32"; Sum Vec16<u32>: words "add.u32", "add.u32";
            Sum i32: word "add.s32", "add.s32"; Sum Vec16<i32>: words "add.s32", "add.s32";
            Sum u64: long "add.u64", "add.u64"; Sum Vec16<u64>: longs "add.u64", "add.u64";
            Sum i64: long "add.u64", "add.u64"; Sum Vec16<i64>: longs "add.u64", "add.u64";
            Sum f64: long "add.f64", "add.f64"; Sum Vec16<f64>: longs "add.f64", "add.f64";
            Sum f32: word "add.f32", "add.f32";
            Sum [f32; 2]: pair "add.v2.f32", "add.v2.f32";
            Sum Vec16<f32>: quad "add.v4.f32", "add.v4.f32";
            Sum [f16; 2]: word "add.acc::f32.f16x2", "add.f16x2";
            Sum [f16; 4]: pair "add.acc::f32.v2.f16x2", "add.v2.f16x2";
            Sum Vec16<f16>: quad "add.acc::f32.v4.f16x2", "add.v4.f16x2";
            Sum [bf16; 2]: word "add.acc::f32.bf16x2", "add.bf16x2";
            Sum [bf16; 4]: pair "add.acc::f32.v2.bf16x2", "add.v2.bf16x2";
            Sum Vec16<bf16>: quad "add.acc::f32.v4.bf16x2", "add.v4.bf16x2";
            SumInHalf [f16; 2]: word "add.f16x2", "add.f16x2";
            SumInHalf [f16; 4]: pair "add.v2.f16x2", "add.v2.f16x2";
            SumInHalf Vec16<f16>: quad "add.v4.f16x2", "add.v4.f16x2";
            SumInHalf [bf16; 2]: word "add.bf16x2", "add.bf16x2";
            SumInHalf [bf16; 4]: pair "add.v2.bf16x2", "add.v2.bf16x2";
            SumInHalf Vec16<bf16>: quad "add.v4.bf16x2", "add.v4.bf16x2";

            Min u32: word "min.u32", "min.u32"; Min Vec16<u32>: words "min.u32", "min.u32";
            Min i32: word "min.s32", "min.s32"; Min Vec16<i32>: words "min.s32", "min.s32";
            Min u64: long "min.u64", "min.u64"; Min Vec16<u64>: longs "min.u64", "min.u64";
            Min i64: long "min.s64", "min.s64"; Min Vec16<i64>: longs "min.s64", "min.s64";
            Min [f16; 2]: word "min.f16x2", "min.f16x2";
            Min [f16; 4]: pair "min.v2.f16x2", "min.v2.f16x2";
            Min Vec16<f16>: quad "min.v4.f16x2", "min.v4.f16x2";
            Min [bf16; 2]: word "min.bf16x2", "min.bf16x2";
            Min [bf16; 4]: pair "min.v2.bf16x2", "min.v2.bf16x2";
            Min Vec16<bf16>: quad "min.v4.bf16x2", "min.v4.bf16x2";

            Max u32: word "max.u32", "max.u32"; Max Vec16<u32>: words "max.u32", "max.u32";
            Max i32: word "max.s32", "max.s32"; Max Vec16<i32>: words "max.s32", "max.s32";
            Max u64: long "max.u64", "max.u64"; Max Vec16<u64>: longs "max.u64", "max.u64";
            Max i64: long "max.s64", "max.s64"; Max Vec16<i64>: longs "max.s64", "max.s64";
            Max [f16; 2]: word "max.f16x2", "max.f16x2";
            Max [f16; 4]: pair "max.v2.f16x2", "max.v2.f16x2";
            Max Vec16<f16>: quad "max.v4.f16x2", "max.v4.f16x2";
            Max [bf16; 2]: word "max.bf16x2", "max.bf16x2";
            Max [bf16; 4]: pair "max.v2.bf16x2", "max.v2.bf16x2";
            Max Vec16<bf16>: quad "max.v4.bf16x2", "max.v4.bf16x2";

            And u32: word "and.b32", "and.b32"; And Vec16<u32>: words "and.b32", "and.b32";
            And i32: word "and.b32", "and.b32"; And Vec16<i32>: words "and.b32", "and.b32";
            And u64: long "and.b64", "and.b64"; And Vec16<u64>: longs "and.b64", "and.b64";
            And i64: long "and.b64", "and.b64"; And Vec16<i64>: longs "and.b64", "and.b64";
            Or u32: word "or.b32", "or.b32"; Or Vec16<u32>: words "or.b32", "or.b32";
            Or i32: word "or.b32", "or.b32"; Or Vec16<i32>: words "or.b32", "or.b32";
            Or u64: long "or.b64", "or.b64"; Or Vec16<u64>: longs "or.b64", "or.b64";
            Or i64: long "or.b64", "or.b64"; Or Vec16<i64>: longs "or.b64", "or.b64";
            Xor u32: word "xor.b32", "xor.b32"; Xor Vec16<u32>: words "xor.b32", "xor.b32";
            Xor i32: word "xor.b32", "xor.b32"; Xor Vec16<i32>: words "xor.b32", "xor.b32";
            Xor u64: long "xor.b64", "xor.b64"; Xor Vec16<u64>: longs "xor.b64", "xor.b64";
            Xor i64: long "xor.b64", "xor.b64"; Xor Vec16<i64>: longs "xor.b64", "xor.b64";
        }
    };
}

pub(crate) use {operations, values};

macro_rules! elements {
    ($($value:ty: $element:ident $kind:ident;)*) => { $(
        impl Value for $value {
            type Element = $element;
        }
    )* };
}
values!(elements);

/// Loads the reduction of all copies. PTX: `multimem.ld_reduce.weak`.
///
/// # Safety
///
/// `address` is a multicast address, aligned to the value's size and valid in all copies; the
/// elements are not written at the same time.
#[track_caller]
pub unsafe fn load_reduce<Op, V: LoadReduce<Op>>(op: Op, address: *const V) -> V
where
    Op: ReduceOp<V::Element>,
{
    // SAFETY: the caller passes a multicast address whose copies are valid for reads and aligned.
    unsafe { raw::LoadReduce::load_reduce(op, address, None) }
}

/// Does the same as [`load_reduce`], of 16 bytes of elements.
///
/// # Safety
///
/// The contract is that of [`load_reduce`]; `address` is aligned to 16 bytes.
#[track_caller]
pub unsafe fn load_reduce_vec<Op, T: Element>(op: Op, address: *const T) -> Vec16<T>
where
    Vec16<T>: LoadReduce<Op>,
    Op: ReduceOp<<Vec16<T> as Value>::Element>,
{
    // SAFETY: the caller passes a multicast address whose copies are valid for reads and aligned.
    unsafe { load_reduce(op, address.cast()) }
}

/// Does the same as [`load_reduce`], with an order and a scope; other threads may write the
/// elements at the same time by ordered accesses. PTX:
/// `multimem.ld_reduce.{relaxed,acquire}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is neither relaxed nor acquire.
///
/// # Safety
///
/// `address` is a multicast address, aligned to the value's size and valid in all copies;
/// concurrent writes to it are only atomic or ordered accesses of the same size.
#[track_caller]
pub unsafe fn load_reduce_ordered<Op, V: LoadReduce<Op>>(
    op: Op,
    address: *const V,
    order: Order,
    scope: Scope,
) -> V
where
    Op: ReduceOp<V::Element>,
{
    assert!(
        matches!(order, Order::Relaxed | Order::Acquire),
        "the order of a multicast load must be relaxed or acquire"
    );
    // SAFETY: the caller passes a multicast address whose copies are valid for reads and aligned.
    unsafe { raw::LoadReduce::load_reduce(op, address, Some((order, scope))) }
}

/// Stores to every copy. PTX: `multimem.st.weak`.
///
/// # Safety
///
/// `address` is a multicast address, aligned to the value's size and valid in all copies; the
/// elements are not read or written at the same time.
#[track_caller]
pub unsafe fn store<V: Value>(address: *mut V, value: V) {
    // SAFETY: the caller passes a multicast address whose copies are valid for writes and aligned.
    unsafe { raw::Bytes::store(address, value, None) }
}

/// Does the same as [`store`], of 16 bytes of elements.
///
/// # Safety
///
/// The contract is that of [`store`]; `address` is aligned to 16 bytes.
#[track_caller]
pub unsafe fn store_vec<T: Element>(address: *mut T, value: Vec16<T>) {
    // The instruction moves bytes, so that element types without arithmetic can be stored too.
    // SAFETY: the caller's contract.
    unsafe { store(address.cast(), Vec16::<u32>::from_bits(value.to_bits())) }
}

/// Does the same as [`store`], with an order and a scope; other threads may access the elements at
/// the same time by ordered accesses. PTX: `multimem.st.{relaxed,release}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is neither relaxed nor release.
///
/// # Safety
///
/// `address` is a multicast address, aligned to the value's size and valid in all copies;
/// concurrent accesses to it are only atomic or ordered accesses of the same size.
#[track_caller]
pub unsafe fn store_ordered<V: Value>(address: *mut V, value: V, order: Order, scope: Scope) {
    assert!(
        matches!(order, Order::Relaxed | Order::Release),
        "the order of a multicast store must be relaxed or release"
    );
    // SAFETY: the caller passes a multicast address whose copies are valid for writes and aligned.
    unsafe { raw::Bytes::store(address, value, Some((order, scope))) }
}

/// Combines each copy's elements with those of `value`, atomically per element, without returning
/// the old values. `f16` and `bf16` are rounded at each update.
/// PTX: `multimem.red.{relaxed,release}.{cta,gpu,sys}`.
///
/// # Panics
///
/// When `order` is neither relaxed nor release.
///
/// # Safety
///
/// `address` is a multicast address, aligned to the value's size and valid in all copies;
/// concurrent accesses to it are only atomic or ordered accesses.
#[track_caller]
pub unsafe fn red<Op, V: Red<Op>>(op: Op, address: *mut V, value: V, order: Order, scope: Scope)
where
    Op: ReduceOp<V::Element>,
{
    assert!(
        matches!(order, Order::Relaxed | Order::Release),
        "the order of a multicast update must be relaxed or release"
    );
    // SAFETY: the caller passes a multicast address whose copies are valid for writes and aligned.
    unsafe { raw::Red::red(op, address, value, order, scope) }
}
