#![doc = include_str!("../README.md")]

pub use devcomm_host::{self as host, *};
pub use devcomm_kernels as kernels;
pub use devcomm_ops::{GemmAllReduce, GemmOutput};
pub use devcomm_sim as sim;
pub use devcomm_types::{HostKernel, Kernel};
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

/// What [`include_kernels!`] is replaced by in a package whose feature `ptx` is off: simulated GPUs
/// run kernels without PTX, so only a build for GPUs has to compile it.
pub const WITHOUT_PTX: KernelSet = KernelSet::new((
    &[],
    Some("the program was built without PTX: build it with `--features ptx` to run on GPUs"),
));

/// The kernels of [`kernels`] for GPUs: what [`Rank::load`] takes. Compiled with the feature `ptx`.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet = include_kernels!();
/// The kernels of [`kernels`] for GPUs: what [`Rank::load`] takes. Compiled with the feature `ptx`.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = WITHOUT_PTX;
