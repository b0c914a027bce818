//! Tests of the typed device API: kernels of `devcomm-device-test-kernels`, on simulated GPUs and
//! on real ones.
//!
//! The test cases are in [`cases`], for any [`TestWorld`]; `tests/gpu_device` runs them.

pub mod cases;
mod job;
mod world;

pub use devcomm_device_test_kernels as kernels;
pub use job::{Job, Setup, TestKernel, assert_kernels_run};
pub use world::{TestWorld, gpus, in_worlds};

/// The compiled kernels.
#[cfg(feature = "ptx")]
pub static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// The compiled kernels.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: devcomm::KernelSet = devcomm::WITHOUT_PTX;
