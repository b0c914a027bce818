#![doc = include_str!("../README.md")]
#![allow(clippy::test_attr_in_doctest, reason = "the doc of `test` shows one")]

/// ```
/// use devcomm::{Error, Rank};
///
/// #[devcomm::test(ranks = 4)]
/// fn every_rank_meets_the_others(rank: &Rank) -> Result<(), Error> {
///     rank.barrier()
/// }
/// ```
pub use cuda_std_macros::test;
pub use devcomm_host::{self as host, *};
pub use devcomm_kernels as kernels;
pub use devcomm_ops::{
    Activation, Algorithm, AllGatherGemm, AllGatherGemmPlan, Collective, CollectiveKind,
    CollectivePlan, Collectives, CollectivesOptions, ExpertParallel, ExpertParallelMemory,
    ExpertParallelOptions, Explanation, FusedGemm, GatheredProduct, Gemm, GemmAllReduce,
    GemmAllReducePlan, GemmElement, GemmOptions, GemmOutput, GemmPlan, GemmReduceScatter,
    GemmReduceScatterPlan, GroupedGemm, HalfElement, KERNELS, LamportMemory, ParseNameError, Parts,
    Product, Returning, RowGroups, ScaledElement, Sent, Tiling, Tokens, WITHOUT_PTX, Wire,
};
pub use devcomm_sim as sim;
pub use devcomm_types::{HostKernel, Kernel, Safe, Unsafe};
pub use nccl_device as device;

/// The [`KernelSet`] of the kernels that the calling package's build script compiled with
/// `cuda_builder`.
///
/// ```ignore
/// // build.rs: CudaBuilder::new("my-kernels").build()?;
/// static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// ```
#[macro_export]
macro_rules! include_kernels {
    () => {
        // SAFETY: the build script compiled them from the package's kernels.
        unsafe { $crate::KernelSet::new(include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs"))) }
    };
}

/// The listings of the guide to simulated GPUs.
#[cfg(doctest)]
#[doc = include_str!("../docs/simulator.md")]
mod simulator {}
