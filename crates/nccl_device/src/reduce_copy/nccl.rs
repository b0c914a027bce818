//! NCCL's own reduce-copy functions, generic over the element type: the code that C++ kernels call,
//! for sums only.
//!
//! The function is selected and inlined at compile time. Indices, counts and strides are in
//! elements.
//!
//! # Safety model
//!
//! It is that of the [parent module](super); each function lists NCCL's additional conditions.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use nccl_device::reduce_copy::nccl::{self, NcclElement};
//! use nccl_device::{Coop, DevComm, Window};
//!
//! /// Sums `count` elements of every rank into `out`, after a barrier of the ranks.
//! #[kernel(T = [f32, bf16])]
//! pub unsafe fn sum_to_local<T: NcclElement>(
//!     comm: DevComm,
//!     x: Window<T>,
//!     out: *mut T,
//!     count: usize,
//! ) {
//!     // SAFETY: the window and `out` have `count` elements, and one block is launched.
//!     unsafe { nccl::lsa_reduce_sum(Coop::cta(), x, 0, out, count, comm.lsa_team()) };
//! }
//! # fn main() {}
//! ```

use crate::prelude::*;
use core::ffi::c_void;

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::raw::{self, CoopAny};

/// Defines a trait of element types, with hidden functions that pass their arguments to NCCL's
/// functions for the type, whose names follow in the same order.
macro_rules! element_functions {
    (
        $(#[$meta:meta])*
        trait $trait:ident: $super:ident $functions:tt
        $($type:ident: $($raw:ident)*;)*
    ) => {
        element_functions!(@trait [$(#[$meta])*] $trait $super $functions);
        $(element_functions!(@impl $trait $type $functions $($raw)*);)*
    };
    (
        @trait [$($meta:tt)*] $trait:ident $super:ident
        { $(fn $name:ident($($arg:ident: $arg_type:ty),*);)* }
    ) => {
        $($meta)*
        #[allow(clippy::missing_safety_doc, reason = "every function: NCCL's contract")]
        #[allow(clippy::too_many_arguments, reason = "NCCL's functions")]
        pub trait $trait: $super {
            $(
                #[doc(hidden)]
                #[track_caller]
                unsafe fn $name($($arg: $arg_type),*);
            )*
        }
    };
    (
        @impl $trait:ident $type:ident
        { $(fn $name:ident($($arg:ident: $arg_type:ty),*);)* } $($raw:ident)*
    ) => {
        impl $trait for $type {
            $(
                unsafe fn $name($($arg: $arg_type),*) {
                    // SAFETY: the caller's windows and buffers have `count` elements, and all
                    // threads of the coop call this.
                    unsafe { raw::$raw($($arg),*) }
                }
            )*
        }
    };
}

element_functions! {
    /// An element type of NCCL's load/store functions: all twelve types. Only this crate implements
    /// the trait, whose functions are hidden.
    trait NcclElement: Element {
        fn lsa_reduce_sum(coop: *const CoopAny, src: *mut c_void, src_offset: usize,
            dst: *mut Self, count: usize, team: *const Team);
        fn lsa_copy(coop: *const CoopAny, src: *mut Self, dst: *mut c_void, dst_offset: usize,
            count: usize, team: *const Team);
        fn lsa_reduce_sum_copy(coop: *const CoopAny, src: *mut c_void, src_offset: usize,
            dst: *mut c_void, dst_offset: usize, count: usize, team: *const Team);
        fn local_reduce_sum_copy(coop: *const CoopAny, n_src: i32, src: *mut Self,
            src_stride: usize, n_dst: i32, dst: *mut Self, dst_stride: usize, count: usize);
    }
    i8: ncclLsaReduceSum_I8 ncclLsaCopy_I8 ncclLsaReduceSumCopy_I8 ncclLocalReduceSumCopy_I8;
    u8: ncclLsaReduceSum_U8 ncclLsaCopy_U8 ncclLsaReduceSumCopy_U8 ncclLocalReduceSumCopy_U8;
    i32: ncclLsaReduceSum_I32 ncclLsaCopy_I32 ncclLsaReduceSumCopy_I32 ncclLocalReduceSumCopy_I32;
    u32: ncclLsaReduceSum_U32 ncclLsaCopy_U32 ncclLsaReduceSumCopy_U32 ncclLocalReduceSumCopy_U32;
    i64: ncclLsaReduceSum_I64 ncclLsaCopy_I64 ncclLsaReduceSumCopy_I64 ncclLocalReduceSumCopy_I64;
    u64: ncclLsaReduceSum_U64 ncclLsaCopy_U64 ncclLsaReduceSumCopy_U64 ncclLocalReduceSumCopy_U64;
    f16: ncclLsaReduceSum_F16 ncclLsaCopy_F16 ncclLsaReduceSumCopy_F16 ncclLocalReduceSumCopy_F16;
    f32: ncclLsaReduceSum_F32 ncclLsaCopy_F32 ncclLsaReduceSumCopy_F32 ncclLocalReduceSumCopy_F32;
    f64: ncclLsaReduceSum_F64 ncclLsaCopy_F64 ncclLsaReduceSumCopy_F64 ncclLocalReduceSumCopy_F64;
    bf16: ncclLsaReduceSum_BF16 ncclLsaCopy_BF16 ncclLsaReduceSumCopy_BF16
        ncclLocalReduceSumCopy_BF16;
    F8E4M3: ncclLsaReduceSum_F8E4M3 ncclLsaCopy_F8E4M3 ncclLsaReduceSumCopy_F8E4M3
        ncclLocalReduceSumCopy_F8E4M3;
    F8E5M2: ncclLsaReduceSum_F8E5M2 ncclLsaCopy_F8E5M2 ncclLsaReduceSumCopy_F8E5M2
        ncclLocalReduceSumCopy_F8E5M2;
}

element_functions! {
    /// An element type of NCCL's multicast functions: numbers of 16 to 64 bits. (NCCL's headers
    /// also sum 8-bit floats, for sm_100a; its bitcode, which these call, traps on every GPU.)
    trait NcclMultimemElement: NcclElement {
        fn multimem_reduce_sum(coop: *const CoopAny, src: *mut Self, dst: *mut Self, count: usize);
        fn multimem_copy(coop: *const CoopAny, src: *mut Self, dst: *mut Self, count: usize);
        fn multimem_reduce_sum_copy(
            coop: *const CoopAny, src: *mut Self, dst: *mut Self, count: usize);
    }
    i32: ncclMultimemReduceSum_I32 ncclMultimemCopy_I32 ncclMultimemReduceSumCopy_I32;
    u32: ncclMultimemReduceSum_U32 ncclMultimemCopy_U32 ncclMultimemReduceSumCopy_U32;
    i64: ncclMultimemReduceSum_I64 ncclMultimemCopy_I64 ncclMultimemReduceSumCopy_I64;
    u64: ncclMultimemReduceSum_U64 ncclMultimemCopy_U64 ncclMultimemReduceSumCopy_U64;
    f16: ncclMultimemReduceSum_F16 ncclMultimemCopy_F16 ncclMultimemReduceSumCopy_F16;
    f32: ncclMultimemReduceSum_F32 ncclMultimemCopy_F32 ncclMultimemReduceSumCopy_F32;
    f64: ncclMultimemReduceSum_F64 ncclMultimemCopy_F64 ncclMultimemReduceSumCopy_F64;
    bf16: ncclMultimemReduceSum_BF16 ncclMultimemCopy_BF16 ncclMultimemReduceSumCopy_BF16;
}

/// Computes `dst[i] = sum over the ranks of team of src[src_index + i]`, for `i < count`. NCCL:
/// `ncclLsaReduceSum`.
///
/// # Safety
///
/// The contract is that of [`lsa_reduce`](super::lsa_reduce).
#[doc(alias = "ncclLsaReduceSum")]
#[track_caller]
pub unsafe fn lsa_reduce_sum<T: NcclElement>(
    coop: Coop,
    src: Window<T>,
    src_index: usize,
    dst: *mut T,
    count: usize,
    team: Team,
) {
    let offset = src_index * size_of::<T>();
    // SAFETY: the caller's windows and buffers have `count` elements, and all threads of the coop
    // call this.
    unsafe { T::lsa_reduce_sum(&coop.as_raw(), src.as_raw(), offset, dst, count, &team) }
}

/// Computes `dst[dst_index + i] = src[i]` in every rank of `team`, for `i < count`. NCCL:
/// `ncclLsaCopy`.
///
/// # Safety
///
/// The contract is that of [`lsa_copy`](super::lsa_copy).
#[doc(alias = "ncclLsaCopy")]
#[track_caller]
pub unsafe fn lsa_copy<T: NcclElement>(
    coop: Coop,
    src: *const T,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let offset = dst_index * size_of::<T>();
    // SAFETY: the caller's contract; NCCL reads the source only.
    unsafe { T::lsa_copy(&coop.as_raw(), src.cast_mut(), dst.as_raw(), offset, count, &team) }
}

/// Computes `dst[dst_index + i] = sum over the ranks of team of src[src_index + i]` in every rank
/// of `team`, for `i < count`. NCCL: `ncclLsaReduceSumCopy`.
///
/// # Safety
///
/// The contract is that of [`lsa_reduce_copy`](super::lsa_reduce_copy).
#[doc(alias = "ncclLsaReduceSumCopy")]
#[track_caller]
pub unsafe fn lsa_reduce_sum_copy<T: NcclElement>(
    coop: Coop,
    src: Window<T>,
    src_index: usize,
    dst: Window<T>,
    dst_index: usize,
    count: usize,
    team: Team,
) {
    let (from, to) = (src_index * size_of::<T>(), dst_index * size_of::<T>());
    // SAFETY: the caller's windows and buffers have `count` elements, and all threads of the coop
    // call this.
    unsafe {
        T::lsa_reduce_sum_copy(&coop.as_raw(), src.as_raw(), from, dst.as_raw(), to, count, &team);
    }
}

/// Computes `dst[k * dst_stride + i] = sum over j < n_src of src[j * src_stride + i]` for every `k
/// < n_dst`, for `i < count`. NCCL: `ncclLocalReduceSumCopy`.
///
/// # Safety
///
/// The contract is that of [`local_reduce_copy`](super::local_reduce_copy).
#[doc(alias = "ncclLocalReduceSumCopy")]
#[expect(clippy::too_many_arguments, reason = "two sets of buffers, of three arguments each")]
#[track_caller]
pub unsafe fn local_reduce_sum_copy<T: NcclElement>(
    coop: Coop,
    n_src: usize,
    src: *const T,
    src_stride: usize,
    n_dst: usize,
    dst: *mut T,
    dst_stride: usize,
    count: usize,
) {
    let (coop, src) = (coop.as_raw(), src.cast_mut());
    let (n_src, n_dst) = (n_src as i32, n_dst as i32);
    // SAFETY: the caller's contract; NCCL reads the sources only.
    unsafe {
        T::local_reduce_sum_copy(&coop, n_src, src, src_stride, n_dst, dst, dst_stride, count);
    }
}

/// Computes `dst[i] = sum over the copies of src[i]`, for `i < count`. NCCL:
/// `ncclMultimemReduceSum`.
///
/// # Safety
///
/// The contract is that of [`multimem_reduce`](super::multimem_reduce). For `f16` and `bf16`, `src`
/// is aligned to 4 bytes and `count` is even: NCCL traps otherwise.
#[doc(alias = "ncclMultimemReduceSum")]
#[track_caller]
pub unsafe fn multimem_reduce_sum<T: NcclMultimemElement>(
    coop: Coop,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the caller's contract; NCCL reads the source only.
    unsafe { T::multimem_reduce_sum(&coop.as_raw(), src.cast_mut(), dst, count) }
}

/// Stores `src[i]` to every copy of `dst[i]`, for `i < count`. NCCL: `ncclMultimemCopy`.
///
/// # Safety
///
/// The contract is that of [`multimem_copy`](super::multimem_copy). For `f16` and `bf16`, `dst` is
/// aligned to 4 bytes and `count` is even: NCCL traps otherwise.
#[doc(alias = "ncclMultimemCopy")]
#[track_caller]
pub unsafe fn multimem_copy<T: NcclMultimemElement>(
    coop: Coop,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the caller's contract; NCCL reads the source only.
    unsafe { T::multimem_copy(&coop.as_raw(), src.cast_mut(), dst, count) }
}

/// Stores `sum over the copies of src[i]` to every copy of `dst[i]`, for `i < count`. NCCL:
/// `ncclMultimemReduceSumCopy`.
///
/// # Safety
///
/// The contract is that of [`multimem_reduce_copy`](super::multimem_reduce_copy). For `f16` and
/// `bf16`, `src` and `dst` are aligned to 4 bytes and `count` is even: NCCL traps otherwise.
#[doc(alias = "ncclMultimemReduceSumCopy")]
#[track_caller]
pub unsafe fn multimem_reduce_sum_copy<T: NcclMultimemElement>(
    coop: Coop,
    src: *const T,
    dst: *mut T,
    count: usize,
) {
    // SAFETY: the caller's contract; NCCL reads the source only.
    unsafe { T::multimem_reduce_sum_copy(&coop.as_raw(), src.cast_mut(), dst, count) }
}
