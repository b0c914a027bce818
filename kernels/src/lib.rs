//! The kernels of devcomm, one file each.
//!
//! Each compiles for nvptx64, where it is linked with NCCL's device code, and for the host, where
//! the same function runs in the simulator. On the host, a type with the kernel's name launches it.
//!
//! # Safety model
//!
//! A kernel that is a safe function writes only to the windows in its arguments, and its launch
//! checks them. The others are `unsafe fn`s, whose documentation states the contract of a launch
//! (what else may access the windows, which arguments are equal on all ranks). The documentation of
//! an unsafe function inside the crate states what its caller guarantees.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![allow(
    clippy::needless_range_loop,
    reason = "an iterator over an array keeps the array in memory with some compilers"
)]

mod scale;

/// The names that many files use.
mod prelude {
    pub(crate) use core::marker::PhantomData;

    pub(crate) use cuda_std::atomic::{AtomicU32, Scope};
    pub(crate) use cuda_std::collective::segment_reduce;
    pub(crate) use cuda_std::prelude::*;
    pub(crate) use cuda_std::tile::{RegTile, SharedTile, TileOrder, Warpgroup};
    pub(crate) use cuda_std::{tma, track_callers};
    pub(crate) use devcomm_types::{F8E4M3, F8E5M2, GridConstant, TensorMap};
    pub(crate) use nccl_device::gin::GinBackend;
    pub(crate) use nccl_device::{
        ANY_RANKS, BarrierIndex, Coop, DevComm, Element, Epoch, Flag, Flags, Lamport,
        LamportMemory, LamportSlots, LsaPtr, MemoryOrder, Team, Window, message,
    };

    pub(crate) use crate::scale::Scale;
}

// Kernels have the names of their files; this module keeps the two kinds of names apart.
#[path = ""]
mod files {
    pub mod allgather_gemm;
    pub mod collectives;
    pub mod expert_parallel;
    pub mod gemm;
    pub mod gemm_allreduce;
    pub mod gin_put_signal;
    pub mod lsa_allreduce;
}

pub use files::collectives::lamport_allreduce::{lamport_allreduce, lamport_allreduce_two};
pub use files::collectives::{
    lamport_allreduce_any::lamport_allreduce_any, lamport_exchange::lamport_exchange,
    lamport_exchange_v::lamport_exchange_v, lamport_reduce_scatter::lamport_reduce_scatter,
    lamport_rmsnorm::lamport_rmsnorm, pull_reduce_scatter::pull_reduce_scatter,
    push_allreduce::push_allreduce, push_exchange::push_exchange, push_exchange_v::push_exchange_v,
    rmsnorm::rmsnorm, rmsnorm_block::rmsnorm_block,
};
pub use files::expert_parallel::{
    ep_combine::ep_combine, ep_combine_counted::ep_combine_counted,
    ep_combine_hybrid::ep_combine_hybrid, ep_dispatch::ep_dispatch,
    ep_dispatch_counted::ep_dispatch_counted, ep_dispatch_hybrid::ep_dispatch_hybrid,
    ep_expand::ep_expand, ep_layout::ep_layout,
};
pub use files::gemm::gemm_mma::{gemm_mma, gemm_mma_f32};
pub use files::gemm::gemm_swapped::{gemm_swapped, gemm_swapped_sliced};
pub use files::gemm::gemm_unswapped::{gemm_unswapped, gemm_unswapped_sliced};
pub use files::gemm::gemm_wgmma::{gemm_wgmma, gemm_wgmma_f32};
pub use files::gemm::{
    gemm_blocks::gemm_blocks, gemm_grouped::gemm_grouped, gemm_grouped_mma::gemm_grouped_mma,
    gemm_grouped_swapped::gemm_grouped_swapped,
};
pub use files::gemm_allreduce::gemm_allreduce_wide::{
    gemm_allreduce_two_shot, gemm_allreduce_wide, gemm_allreduce_wide_f8, gemm_reduce_scatter_wide,
};
pub use files::gemm_allreduce::{
    gemm_allreduce_mma::gemm_allreduce_mma, gemm_allreduce_swapped::gemm_allreduce_swapped,
};
pub use files::{allgather_gemm::*, gin_put_signal::*, lsa_allreduce::*};
pub use files::{collectives, expert_parallel, gemm, gemm_allreduce};
