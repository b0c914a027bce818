//! Build-script library: compiles Rust kernels to PTX, with NCCL's device code linked in.
//!
//! ```text
//! kernels/*.rs --rustc--> bitcode, with core's and each dependency's
//!     + libnccl_device.bc --LLVM of that rustc--> one PTX module per kernel file (+ JSON sidecar)
//!     --ptxas, when there is one--> cubin, registers, stack, spills
//! ```
//!
//! The toolchain is [`TUNED_TOOLCHAIN`] where rustup has it, else the one that cargo runs, with its
//! `rust-src`; kernels that do not call NCCL need nothing else. A build warns of kernels that spill
//! registers or use the stack, see [`CudaBuilder::check_all`].
//!
//! # Example
//!
//! In `build.rs`:
//!
//! ```no_run
//! use cuda_builder::{CudaBuilder, NvvmArch};
//!
//! fn main() -> Result<(), cuda_builder::Error> {
//!     CudaBuilder::new("my-kernels").arch(NvvmArch::Compute90).build()?;
//!     Ok(())
//! }
//! ```
//!
//! and in the crate, `include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs"))`: an expression
//! with name, PTX, sidecar (JSON metadata) and cubin of each module, and the reason if there are
//! none. With the cubin a GPU of that architecture starts at once; without one, or on a newer GPU,
//! the driver compiles the PTX, which takes over a minute for a large matrix product.
//!
//! # Barriers
//!
//! rustc marks no function and no inline assembly `convergent`, so its optimiser may copy a barrier
//! into both branches of a condition, and the threads of a block diverge at it. Kernels are
//! therefore compiled without LLVM passes; the builder marks every function and inline assembly
//! `convergent`, and then runs the passes. Device code is always optimised.
//!
//! # Inlining
//!
//! Every function that a kernel calls is inlined, without an attribute: all but those with
//! `#[inline(never)]` or `#[cold]` and those of Rust's standard library. Recursion is an error that
//! names the cycle, unless one of its functions is `#[inline(never)]`.
//!
//! # Environment
//!
//! | variable | |
//! |---|---|
//! | `DEVCOMM_CUDA_ARCH` | the architecture, such as `sm_90a` |
//! | `DEVCOMM_KERNEL_TOOLCHAIN` | `user` (cargo's toolchain), rustup's name or a folder |
//! | `DEVCOMM_KERNEL_FILES` | names of the kernel files to build, separated by commas; else all |
//! | `DEVCOMM_BUILD_SKIP=1`, `DOCS_RS` | build no kernels |
//! | `DEVCOMM_REQUIRE_KERNELS=1` | a missing component, e.g. NCCL, is an error, not a warning |
//! | `DEVCOMM_PANIC_MESSAGES=1` | as [`CudaBuilder::panic_messages`] |
//! | `DEVCOMM_DUMP_IR=folder` | each module's LLVM IR before and after optimisation |
//! | `DEVCOMM_NCCL_HOME`, `DEVCOMM_PTXAS` | paths of NCCL and `ptxas`, see `devcomm-locate` |
//!
//! # Safety model
//!
//! The unsafe code is LLVM's C interface, in one module, behind types that uphold its rules.
//! The builder marks calls in NCCL's bitcode with attributes that LLVM then relies on: that a call
//! through a cooperative group only reads the group. It adds them only after it has proved on the
//! bitcode at hand that they are true. LLVM runs in child processes, so that an abort of LLVM is an
//! error here.

mod arch;
mod artifact;
mod builder;
mod cache;
mod compile;
mod coop;
mod diagnostics;
mod error;
mod foreign;
mod inline;
mod lines;
mod link;
mod llvm;
mod metadata;
mod modules;
mod names;
mod package;
mod packed;
mod parallel;
mod ptx;
mod ptxas;
mod report;
mod script;
mod signature;
mod split;
mod sysroot;
mod toolchain;
mod traps;
mod worker;

pub use arch::NvvmArch;
pub use artifact::{Artifacts, Kernel, ModuleArtifact, NcclCode, Param, Sidecar};
pub use builder::CudaBuilder;
pub use error::Error;
pub use ptxas::Resources;
pub use report::{Callee, CalleeKind, KernelReport};
pub use signature::{ByValue, Signature, SignatureParam};
pub use toolchain::{KernelCompiler, TUNED_TOOLCHAIN, kernel_compiler};
pub use worker::{device_functions, link_worker};
