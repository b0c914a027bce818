//! The kernels of the guide, compiled, and its pictures. The other listings are the package's
//! program and tests.

pub mod kept;
pub mod pictures;

// ANCHOR: kernels
/// The kernels: PTX with the feature `ptx`, which simulated GPUs do not need.
#[cfg(feature = "ptx")]
pub static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// The kernels: PTX with the feature `ptx`, which simulated GPUs do not need.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: devcomm::KernelSet = devcomm::WITHOUT_PTX;
// ANCHOR_END: kernels
