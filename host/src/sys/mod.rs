//! Everything unsafe that the host does: NCCL's C ABI, the CUDA driver, the operating system.
//!
//! The handles here are not `Copy` and their constructors are private, so that the functions around
//! them can be safe: a handle in hand is a live one, and closing it takes it by value.

pub(crate) mod banner;
pub(crate) mod cuda;
pub(crate) mod nccl;
pub(crate) mod nccl_build;
pub(crate) mod process;
