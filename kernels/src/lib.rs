//! The kernels of devcomm, one file each.
//!
//! Each compiles for nvptx64, where it is linked with NCCL's device code, and for the host, where
//! the same function runs in the simulator and leaves a launch item of its name.
//!
//! # Safety model
//!
//! A kernel is an `unsafe fn`: its documentation says what the launch owes it (window lengths, who
//! else uses the windows).
#![cfg_attr(target_arch = "nvptx64", no_std)]

mod share;

// A kernel has the name of its file, so the files are one module further down.
#[path = "."]
mod files {
    pub mod gemm_allreduce;
    pub mod gin_alltoall;
    pub mod gin_put_signal;
    pub mod hybrid_allreduce;
    pub mod hybrid_alltoall;
    pub mod ll_alltoall;
    pub mod lsa_allreduce;
    pub mod rmsnorm_allreduce;
}

// On the GPU a kernel is an entry point, with no name to import.
#[allow(unused_imports)]
pub use files::{
    gemm_allreduce::*, gin_alltoall::*, gin_put_signal::*, hybrid_allreduce::*, hybrid_alltoall::*,
    ll_alltoall::*, lsa_allreduce::*, rmsnorm_allreduce::*,
};
