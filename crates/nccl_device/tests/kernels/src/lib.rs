//! Kernels that tests compile to PTX and run in the simulator: one per function of `reduce_copy`,
//! and kernels with flags, barriers, sums and views.
//!
//! # Safety model
//!
//! All kernels have the same contract: the windows and pointers have the `count` elements that the
//! kernel reads or writes from each index, and for strided buffers, `count` from each multiple of
//! the stride.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]
#![allow(clippy::missing_safety_doc, reason = "the crate's documentation has the contract")]

pub mod local;
pub mod lsa;
pub mod multimem;
pub mod nccl;
pub mod numbers;
pub mod together;
