//! The kernels that only benchmarks have.

use devcomm::KernelSet;

/// The kernels of `devcomm-bench-kernels` for GPUs.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet = devcomm::include_kernels!();
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = devcomm::WITHOUT_PTX;
