//! The C functions that devcomm calls: the CUDA driver's and NCCL's, as two function tables.
//!
//! On GPUs the tables hold the functions of the driver and of libnccl; in a simulation, those of
//! the simulator. Callers do not distinguish them.
//!
//! # Safety model
//!
//! The functions have the contracts that NVIDIA documents; this crate only declares them.

pub mod driver;
pub mod nccl;
