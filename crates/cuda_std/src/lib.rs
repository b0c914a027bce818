//! The standard library of GPU kernels, with Rust-CUDA's names.
//!
//! It compiles for two targets. On nvptx64 a function here is one instruction or a few; on the host
//! it acts on the running simulated thread, so that a kernel's body also compiles, lints and runs
//! (in `devcomm-sim`) without a GPU. Only [`arch`] differs between the targets.
//!
//! * [`kernel`]: makes a function an entry point, and on the host a type that a launch names.
//!   [`track_callers`] is for the methods that kernels call.
//! * [`thread`], [`warp`]: indices, barriers, shuffles, votes; [`strided`]: loops divided among
//!   threads.
//! * [`collective`]: reductions over a warp and a block.
//! * [`shared`]: shared memory, static ([`shared_array!`]) and dynamic.
//! * [`mem`], [`vector`], [`multimem`]: loads and stores, also of 16 bytes and at multicast
//!   addresses.
//! * [`view`]: elements by two or three indices, with bounds that simulated runs check.
//! * [`reduce`]: sums and other operators, over elements and vectors.
//! * [`atomic`]: atomics, ordered accesses and fences with a scope.
//! * [`mma`], [`wgmma`]: tensor cores, of a warp and of Hopper's warpgroups; [`async_copy`],
//!   [`tma`], [`mbarrier`]: copies to shared memory for them; [`cluster`]: blocks that reach each
//!   other's shared memory.
//! * [`grid`]: kernels that begin while the previous one still runs.
//! * [`tile`]: shared tiles, pipelines and tile orders, for matrix kernels.
//! * [`math`], [`convert`], [`clock`], [`io`]: arithmetic, narrow floats, clocks, printing.
//!
//! # Safety model
//!
//! Functions that access memory through a pointer, or that all lanes of a mask must call, are
//! `unsafe` and document their contracts. Safe functions access no memory that the caller does not
//! own. As in CUDA, a barrier that some threads of the block never reach hangs the kernel.
//!
//! # Panics
//!
//! A failed check in a kernel traps: the launch ends with an error on the host. With debug
//! assertions it first prints the source location. On the host every function that needs a thread
//! panics outside a simulator.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//!
//! /// Computes `y[i] += a * x[i]`.
//! #[kernel]
//! pub unsafe fn saxpy(a: f32, x: *const f32, y: *mut f32, count: usize) {
//!     let i = thread::index_1d() as usize;
//!     if i < count {
//!         // SAFETY: both have `count` elements, and only this thread accesses element i.
//!         unsafe { mem::store(y.add(i), a.mul_add(mem::load(x.add(i)), mem::load(y.add(i)))) }
//!     }
//! }
//! # fn main() {}
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]
// cuda_builder compiles kernels by the stable compiler with `RUSTC_BOOTSTRAP=1`.
#![cfg_attr(
    target_arch = "nvptx64",
    feature(asm_experimental_arch, core_float_math, f16, repr_simd, stdarch_nvptx),
    allow(internal_features)
)]
#![allow(
    clippy::needless_range_loop,
    reason = "an iterator over an array keeps the array in memory with some compilers"
)]

#[cfg_attr(target_arch = "nvptx64", path = "arch_nvptx/mod.rs")]
#[cfg_attr(not(target_arch = "nvptx64"), path = "arch_host/mod.rs")]
pub mod arch;

pub mod async_copy;
pub mod atomic;
pub mod clock;
pub mod cluster;
pub mod collective;
pub mod convert;
pub mod grid;
pub mod hint;
pub mod io;
pub mod math;
pub mod mbarrier;
pub mod mem;
pub mod mma;
pub mod multimem;
pub mod reduce;
pub mod shared;
pub mod strided;
pub mod thread;
pub mod tile;
pub mod tma;
pub mod vector;
pub mod view;
pub mod warp;
pub mod wgmma;

mod accumulate;

pub use cuda_std_macros::{KernelParam, address_space, kernel, print, println, track_callers};
pub use devcomm_types::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use math::GpuFloat;

/// The items that most kernel files need: `use cuda_std::prelude::*;`.
///
/// Without [`print!`] and [`println!`], which a glob import would make ambiguous with the standard
/// library's: write `cuda_std::println!`.
pub mod prelude {
    pub use crate::collective::{
        ClusterSum, block_reduce, block_sum, warp_min, warp_prefix_sum, warp_reduce, warp_sum,
    };
    pub use crate::math::GpuFloat;
    pub use crate::reduce::ReduceOp;
    pub use crate::strided::Strided;
    pub use crate::vector::{Accumulate, Vec16};
    pub use crate::{F8E4M3, F8E5M2, KernelParam, bf16, f16, kernel, shared_array};
    pub use crate::{atomic, cluster, grid, hint, math, mem, shared, thread, warp};
}

#[cfg(doctest)]
mod tests;

/// Items that the macros' generated code uses.
#[doc(hidden)]
pub mod __private {
    pub use devcomm_types::args::{Arg, ArgInfo, IntoArg, KernelArgs, LaunchArgs};
    pub use devcomm_types::kernel::{
        Body, COPIED, HostKernel, Kernel, KernelParam, MemoryRef, SeenAs, TakeParam, Taken, Unmet,
        range_of, seen,
    };
    pub use devcomm_types::launch::{SafeIf, Unset};
    pub use devcomm_types::{Dim3, HostBody, Launch, Unsafe};
}
