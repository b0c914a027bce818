//! One kernel for each function of `reduce_copy`, and for what threads, blocks and ranks do
//! together, which tests compile to PTX and run in the simulator.
//!
//! # Safety model
//!
//! The contract of each kernel is the same: the windows and pointers have the elements that it
//! reads and room for those that it writes, `count` of each, and parts of a pointer's lie a stride
//! apart.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]
#![allow(clippy::missing_safety_doc, reason = "the contract is the crate's")]

pub mod local;
pub mod lsa;
pub mod multimem;
pub mod nccl;
pub mod together;
