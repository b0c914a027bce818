//! The kernels of the example programs, one file each, as in `devcomm-kernels`: they compile for
//! nvptx64 and for the simulator.
//!
//! # Safety model
//!
//! The kernels are `unsafe fn`s, whose documentation states the contract of a launch: what else may
//! access the windows, and which arguments are equal on all ranks.
#![cfg_attr(target_arch = "nvptx64", no_std)]

// Kernels have the names of their files; this module keeps the two kinds of names apart.
#[path = ""]
mod files {
    pub mod gin_alltoall;
    pub mod hybrid_allreduce;
    pub mod hybrid_alltoall;
    pub mod ll_alltoall;
    pub mod rmsnorm_allreduce;
}

pub use files::{
    gin_alltoall::*, hybrid_allreduce::*, hybrid_alltoall::*, ll_alltoall::*, rmsnorm_allreduce::*,
};
