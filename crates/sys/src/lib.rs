//! The C functions that devcomm reaches its machine by: the CUDA driver's and NCCL's, as two
//! tables.
//!
//! There are two machines. On GPUs the tables are filled from the driver's library and from NCCL's;
//! in a simulation the simulator fills them with functions of its own. Nothing above the tables
//! knows which it is.
//!
//! # Safety model
//!
//! The functions have the contracts that NVIDIA documents; this crate only says what they look
//! like.

pub mod driver;
pub mod nccl;
