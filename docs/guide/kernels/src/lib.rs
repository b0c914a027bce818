//! The kernels of the guide (`docs/guide`), a file for each chapter. The chapters include them, and
//! `docs/guide/listings` launches them.
//!
//! # Safety model
//!
//! Grids, blocks and lengths are as each kernel's documentation says, and nothing else accesses
//! what a kernel writes while it runs. The kernels of [`mistakes`] are wrong on purpose.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![allow(clippy::missing_safety_doc, reason = "the contract is the crate's")]

pub mod all_reduce;
pub mod debugging;
pub mod gin;
pub mod mistakes;
pub mod numbers;
pub mod sum_of_all;
pub mod teams;
// ANCHOR: norm
mod norm;

pub use norm::normalize;
// ANCHOR_END: norm
pub mod blocks;
pub mod message;
pub mod softmax;
// ANCHOR: fused
/// Steps 1 to 3.
pub mod products;

/// Steps 4 and 5.
pub mod exchange;
// ANCHOR_END: fused
pub mod few;
pub mod wide;
