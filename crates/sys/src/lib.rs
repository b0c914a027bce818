//! The C functions that devcomm calls: the CUDA driver's and NCCL's, as two function tables.
//!
//! On GPUs the tables are filled from the driver and from libnccl; in a simulation, by the
//! simulator. Code above the tables does not distinguish them.
//!
//! # Safety model
//!
//! The functions have the contracts that NVIDIA documents; this crate only declares them.

pub mod driver;
pub mod nccl;
