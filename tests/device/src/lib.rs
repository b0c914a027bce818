//! Tests of the typed device API: kernels of `devcomm-device-test-kernels`, the same in the simulator and on GPUs.
//!
//! A [`Machine`] runs kernels; [`Simulated`] and [`Gpus`] are two. What is tested is written once, in [`cases`], for any machine.
//! `tests/sim_*.rs` runs it with many seeds, `tests/gpu_*.rs` where there are GPUs.

pub mod cases;
mod gpus;
mod machine;
mod simulated;

pub use devcomm_device_test_kernels as kernels;
pub use gpus::{Gpus, Job, on_gpus, on_gpus_with_gin, require_works, with_world};
pub use machine::{Machine, Setup, TestKernel};
pub use simulated::{Ended, Simulated};

/// The kernels for GPUs.
#[cfg(feature = "ptx")]
pub static KERNELS: devcomm::KernelSet = devcomm::include_kernels!();
/// The kernels for GPUs.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: devcomm::KernelSet = devcomm::WITHOUT_PTX;
