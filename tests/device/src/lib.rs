//! Tests of the typed device API: kernels of `devcomm-device-test-kernels`, on simulated GPUs and
//! on real ones.
//!
//! What is tested is in [`cases`], for the ranks of any [`TestWorld`]; `tests/gpu_device` runs it.

pub mod cases;
mod job;
mod world;

pub use devcomm_device_test_kernels as kernels;
pub use job::{Job, Setup, TestKernel, require_works};
pub use world::{TestWorld, gpus, in_worlds};

/// The kernels for GPUs.
#[cfg(feature = "ptx")]
pub static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// The kernels for GPUs.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: devcomm::KernelSet = devcomm::WITHOUT_PTX;
