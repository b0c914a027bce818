//! Reducing, copying, and both, over the memory of many ranks, by the threads of a coop.
//!
//! | | from | to |
//! |---|---|---|
//! | [`lsa_reduce`] | every rank of a team | a pointer |
//! | [`lsa_copy`] | a pointer | every rank of a team |
//! | [`lsa_reduce_copy`] | every rank of a team | every rank of a team |
//! | [`lsa_reduce_multimem_copy`] | every rank of a team | a multicast address |
//! | [`multimem_reduce`] | a multicast address | a pointer |
//! | [`multimem_copy`] | a pointer | a multicast address |
//! | [`multimem_reduce_copy`] | a multicast address | a multicast address |
//! | [`multimem_reduce_lsa_copy`] | a multicast address | every rank of a team |
//! | [`local_reduce`], [`local_copy`], [`local_reduce_copy`] | strided parts | strided parts |
//!
//! They take any [`ReduceOp`](cuda_std::reduce::ReduceOp) (over multicast addresses what the switch
//! can: sum, minimum, maximum) and all twelve element types. Indices, counts and distances are in
//! elements. Any index and count is right; where source and destination lie alike in their 16
//! bytes, whole vectors move by one access of 16 bytes, several in flight in a thread, and what is
//! left at both ends element by element. Where they do not, everything does.
//!
//! [`nccl`] has NCCL's own functions of these kinds: sums only, but the very code that C++ kernels
//! call.
//!
//! # Order of sums
//!
//! [`lsa_reduce`] combines in the order of the ranks, so that all ranks which reduce the same
//! elements get the same bits. [`lsa_reduce_copy`] begins with this rank's own part, so that ranks
//! which reduce different elements at one time read from different peers: let one rank reduce an
//! element and all receive it. Over multicast addresses the switch decides.
//!
//! # Safety model
//!
//! All are `unsafe`, for the same reasons: the ranges lie within the windows or behind the
//! pointers, they are aligned to their elements, the team is within load and store, and nobody else
//! touches them in a way that conflicts until a barrier is between. Sources and destinations may be
//! the same ranges, element for element, and may not overlap otherwise. Every thread of the coop
//! makes the same call; none waits for another, so that a barrier (or
//! [`Coop::sync`](crate::Coop::sync), for this GPU's own threads) belongs between the call and
//! whoever reads the result.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use cuda_std::reduce::Max;
//! use nccl_device::reduce_copy::lsa_reduce_copy;
//! use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};
//!
//! /// All-reduce by maximum, with one block. `count` is a multiple of the ranks.
//! #[kernel(T = [f32, bf16])]
//! pub unsafe fn all_max<T: Accumulate>(comm: DevComm, x: Window<T>, count: usize) {
//!     let team = comm.lsa_team();
//!     let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
//!     barrier.sync(MemoryOrder::Acquire);
//!     let share = count / team.n_ranks as usize;
//!     let mine = share * team.rank as usize;
//!     // SAFETY: the window has `count` elements in every rank, and each is touched by one rank
//!     // between the barriers.
//!     unsafe { lsa_reduce_copy(Coop::cta(), Max, x, mine, x, mine, share, team) };
//!     barrier.sync(MemoryOrder::Release);
//! }
//! # fn main() {}
//! ```

mod local;
mod lsa;
mod multimem;
pub mod nccl;
mod pack;
mod parts;
mod pass;
mod sink;
mod source;
mod threads;
mod vector;

pub use local::{local_copy, local_reduce, local_reduce_copy};
pub use lsa::{lsa_copy, lsa_reduce, lsa_reduce_copy};
pub use multimem::{
    MultimemReduce, lsa_reduce_multimem_copy, multimem_copy, multimem_reduce, multimem_reduce_copy,
    multimem_reduce_lsa_copy,
};
pub use threads::Threads;
