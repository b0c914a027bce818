//! Build-script library: makes PTX of Rust kernels, with NCCL's device code linked in.
//!
//! ```text
//! kernels/*.rs --rustc--> bitcode, with core's and each dependency's
//!     + libnccl_device.bc --LLVM of that rustc--> one PTX module a kernel file (+ JSON sidecar)
//!     --ptxas, when there is one--> cubin, registers, stack, spills
//! ```
//!
//! The toolchain is the one that cargo runs, with its `rust-src`; nothing else has to be installed
//! for kernels that do not call NCCL.
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
//! with each module's name, PTX and sidecar, and the reason when there are none.
//!
//! # Barriers
//!
//! rustc marks no function and no inline assembly `convergent`, so its optimiser may copy a barrier
//! into both branches of a condition, where the threads of a block no longer meet. Kernels are
//! therefore compiled without the passes that do so, every function and every piece of assembly is
//! marked, and only then does LLVM optimise. Device code is always optimised.
//!
//! # Environment
//!
//! | variable | |
//! |---|---|
//! | `DEVCOMM_CUDA_ARCH` | the architecture, `sm_90a` |
//! | `DEVCOMM_BUILD_SKIP=1`, `DOCS_RS` | build no kernels |
//! | `DEVCOMM_REQUIRE_KERNELS=1` | a missing part is an error, not a warning |
//! | `DEVCOMM_DUMP_IR=folder` | each module's LLVM IR before and after optimisation |
//! | `DEVCOMM_NCCL_HOME`, `DEVCOMM_PTXAS` | where they are, see `devcomm-locate` |
//!
//! # Safety model
//!
//! The unsafe code is LLVM's C interface, in one module, behind types that keep its rules. What
//! that code makes LLVM believe of NCCL's bitcode is proved on the bitcode first. LLVM runs in
//! child processes, so that its aborts are errors here.

mod arch;
mod artifact;
mod builder;
mod cache;
mod compile;
mod coop;
mod error;
mod foreign;
mod link;
mod llvm;
mod metadata;
mod package;
mod ptx;
mod ptxas;
mod report;
mod script;
mod signature;
mod split;
mod sysroot;
mod toolchain;
mod worker;

pub use arch::NvvmArch;
pub use artifact::{Artifacts, Kernel, ModuleArtifact, NcclCode, Param, Sidecar};
pub use builder::CudaBuilder;
pub use error::Error;
pub use ptxas::Resources;
pub use report::{Callee, CalleeKind, KernelReport};
pub use signature::{ByValue, Signature, SignatureParam, device_functions};
pub use worker::link_worker;
