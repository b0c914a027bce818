//! The examples' own kernels, which devcomm does not ship. Their source is in `kernels/src`, one
//! file each.

use devcomm::KernelSet;
pub use devcomm_example_kernels as kernels;

/// The compiled kernels: PTX with the feature `ptx`, which simulated GPUs do not need.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet = devcomm::include_kernels!();
/// The compiled kernels: PTX with the feature `ptx`, which simulated GPUs do not need.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = devcomm::WITHOUT_PTX;
