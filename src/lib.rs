#![doc = include_str!("../README.md")]

mod gemm_allreduce;

pub use devcomm_host::{self as host, *};
pub use devcomm_kernels as kernels;
pub use devcomm_sim as sim;
pub use devcomm_types::{HostKernel, Kernel};
pub use gemm_allreduce::{GemmAllReduce, GemmOutput};
pub use nccl_device as device;

/// The kernels that the calling package's build script compiled with `cuda_builder`, as a [`KernelSet`].
///
/// ```ignore
/// // build.rs: CudaBuilder::new("my-kernels").build()?;
/// static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// ```
#[macro_export]
macro_rules! include_kernels {
    () => {
        $crate::KernelSet::new(include!(concat!(env!("OUT_DIR"), "/kernels/kernels.rs")))
    };
}

/// The kernels of [`kernels`], compiled: what [`Rank::load`] takes.
pub static KERNELS: KernelSet = include_kernels!();
