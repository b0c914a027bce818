//! Operations for applications, built on devcomm's kernels: each checks its arguments before it
//! launches a kernel. [`KERNELS`] are the compiled kernels.
//!
//! # Example
//!
//! ```
//! use devcomm::{Collectives, Error, ReduceOp, World};
//!
//! World::simulated(2)?.run(|rank| {
//!     let (comm, stream) = (rank.communicator()?, rank.stream()?);
//!     let collectives = Collectives::new(comm)?;
//!     let x = comm.window::<f32>(100)?;
//!     stream.fill(&x, 1.5)?;
//!     collectives.all_reduce(&x, &x, ReduceOp::Sum, &stream)?;
//!     let mut sums = [0.0; 100];
//!     stream.copy_to_host(&x, &mut sums)?;
//!     assert_eq!(sums, [3.0; 100]);
//!     Ok::<_, Error>(())
//! })?;
//! # Ok::<_, Error>(())
//! ```

mod agree;
mod allgather_gemm;
mod check;
mod collectives;
mod decisions;
mod expert_parallel;
mod extents;
mod fused;
mod gemm;
mod gemm_allreduce;
mod gemm_reduce_scatter;
mod lamport;
mod launch;
mod plan;
mod prelude;
mod timing;
mod tuned;

use devcomm_host::KernelSet;
pub use devcomm_host::WITHOUT_PTX;

pub use self::allgather_gemm::{AllGatherGemm, AllGatherGemmPlan, GatheredProduct};
pub use self::collectives::{
    Algorithm, Collective, CollectiveKind, CollectivePlan, Collectives, CollectivesOptions, Parts,
};
pub use self::expert_parallel::{
    ExpertParallel, ExpertParallelMemory, ExpertParallelOptions, Returning, Sent, Tokens,
};
pub use self::fused::FusedGemm;
pub use self::gemm::{
    Activation, Gemm, GemmElement, GemmOutput, GemmPlan, GroupedGemm, HalfElement, Product,
    RowGroups, ScaledElement, Tiling,
};
pub use self::gemm_allreduce::{GemmAllReduce, GemmAllReducePlan, GemmOptions, Wire};
pub use self::gemm_reduce_scatter::{GemmReduceScatter, GemmReduceScatterPlan};
pub use self::lamport::LamportMemory;
pub use self::plan::{Explanation, ParseNameError};

/// The kernels of `devcomm_kernels`, to pass to [`Rank::load`](devcomm_host::Rank::load). The set
/// contains their machine code, which GPUs need, if the feature `ptx` or `kernels-bin` is on.
pub static KERNELS: KernelSet = COMPILED;

#[cfg(feature = "ptx")]
const COMPILED: KernelSet =
    // SAFETY: the build script compiled them from `devcomm_kernels`.
    unsafe { KernelSet::new(include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs"))) };
#[cfg(all(feature = "kernels-bin", not(feature = "ptx")))]
const COMPILED: KernelSet =
    // SAFETY: `cargo xtask kernels-bin` compiled them from the `devcomm_kernels` of this version.
    unsafe { KernelSet::new(devcomm_kernels_bin::kernels()) };
#[cfg(not(any(feature = "ptx", feature = "kernels-bin")))]
const COMPILED: KernelSet = WITHOUT_PTX;
