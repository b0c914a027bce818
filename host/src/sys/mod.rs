//! The host's unsafe code: calls of NCCL, of the CUDA driver and of the operating system.
//!
//! The handle types are not `Copy` and their constructors are private, so that functions that take
//! a handle can be safe: a handle is always live, and functions that destroy it take it by value.

pub(crate) mod banner;
pub(crate) mod cuda;
pub(crate) mod dlpack;
pub(crate) mod fork;
pub(crate) mod nccl;
pub(crate) mod nccl_build;
pub(crate) mod process;
