//! Matrix products, from a loop to cuBLASLt's speed, each a step faster than the one before.
//!
//! `docs/gemm.md` explains them. Each computes `C = A x B^T` in bf16, with sums in f32: A has
//! `m x k` elements, B `n x k` and C `m x n`, all row-major. To show the idea and nothing else, `m`
//! and `n` are multiples of [`MULTIPLE_MN`], and `k` of [`MULTIPLE_K`].
//!
//! # Safety model
//!
//! The contract of each kernel is the same: the matrices are allocated and have these elements, no
//! other kernel writes A or B or accesses C, and grid, block and shared memory are as the kernel's
//! documentation says.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![allow(clippy::missing_safety_doc, reason = "the contract is the crate's")]

// A kernel has the name of its file, so the files are modules of an inner module.
#[path = ""]
mod files {
    pub mod step1_loop;
    pub mod step2_shared;
    pub mod step3_registers;
    pub mod step4_mma;
    pub mod step5_wgmma;
    pub mod step6_pipeline;
    pub mod step7_cluster;
    pub mod step8_persistent;
}
mod warpgroup;

/// `m` and `n` are multiples of this.
pub const MULTIPLE_MN: u32 = 256;
/// `k` is a multiple of this.
pub const MULTIPLE_K: u32 = 64;

/// The sizes of each step's blocks and tiles.
pub mod sizes {
    pub use crate::files::*;
}

// On the GPU a kernel is only an entry point, so there is nothing to import.
#[allow(unused_imports)]
pub use files::{
    step1_loop::step1_loop, step2_shared::step2_shared, step3_registers::step3_registers,
    step4_mma::step4_mma, step5_wgmma::step5_wgmma, step6_pipeline::step6_pipeline,
    step7_cluster::step7_cluster, step8_persistent::step8_persistent,
};
