//! Reductions and copies, and both in one call, over the memory of several ranks, by the threads of
//! a coop or grid.
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
//! | [`local_reduce`], [`local_copy`], [`local_reduce_copy`] | strided buffers | strided buffers |
//!
//! They take any [`ReduceOp`](cuda_std::reduce::ReduceOp) (from a multicast address only those that
//! the switch executes, see [`MultimemReduce`]) and all twelve element types. Indices, counts and
//! strides are in elements. Any index and count is allowed, at multicast addresses with conditions
//! for [elements of 8 and 16 bits](#small-elements-at-multicast-addresses). If the addresses of
//! sources and destinations are equal modulo 16, most elements move in 16-byte accesses, several in
//! flight per thread, and the rest at both ends one by one. Otherwise all elements move one by one.
//!
//! [`nccl`] has NCCL's own functions of this kind: sums only, but the same code that C++ kernels
//! call.
//!
//! # Order of sums
//!
//! [`lsa_reduce`] combines in rank order, so that all ranks that reduce the same elements get the
//! same bits. [`lsa_reduce_copy`] begins with this rank's part, so that ranks that reduce different
//! elements at the same time read from different peers: let one rank reduce an element and copy the
//! result to all. For multicast sources the switch chooses the order.
//!
//! # Small elements at multicast addresses
//!
//! The switch accesses whole 32-bit words. An element of 8 or 16 bits that moves by itself is
//! therefore loaded from a multicast address together with the rest of its word, and stored by
//! atomic updates of the word. So the functions with `multimem` in their names also need the
//! following.
//!
//! * The copies have the whole word of the first element and that of the last one: let the length
//!   of a window be a multiple of 4 bytes, an even number of `f16` or `bf16`.
//! * Other threads and ranks access the word's other elements at the same time only by these
//!   functions, and only at multicast addresses. So shares of [`multimem_reduce_copy`] may begin
//!   and end anywhere, also if source and destination are the same range.
//! * The other functions have one side that is not a multicast address. If source and destination
//!   are the same range, address and length of each rank's share are multiples of 16 bytes, so that
//!   no element moves by itself.
//!
//! # Safety model
//!
//! All are `unsafe`, with the same conditions: the ranges are valid and aligned to their elements,
//! the team's ranks can load and store each other's memory, and barriers order conflicting accesses
//! by other threads and ranks. A source and a destination may be the same range, but must not
//! overlap otherwise. Every thread of the coop makes the same call. The threads do not wait for
//! each other, so a barrier (or [`Coop::sync`](crate::Coop::sync), within the coop) is needed
//! between the call and reads of the result.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//! use cuda_std::reduce::Max;
//! use nccl_device::reduce_copy::lsa_reduce_copy;
//! use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};
//!
//! /// All-reduce by maximum, with one block. `count` is a multiple of the number of ranks.
//! #[kernel(T = [f32, bf16])]
//! pub unsafe fn all_max<T: Accumulate>(comm: DevComm, x: Window<T>, count: usize) {
//!     let team = comm.lsa_team();
//!     let mut barrier = comm.lsa_barrier(Coop::cta(), BarrierIndex::this_block());
//!     barrier.sync(MemoryOrder::Acquire);
//!     let share = count / team.n_ranks as usize;
//!     let mine = share * team.rank as usize;
//!     // SAFETY: the window has `count` elements in every rank, and between the barriers one rank
//!     // accesses each of them.
//!     unsafe { lsa_reduce_copy(Coop::cta(), Max, x, mine, x, mine, share, team) };
//!     barrier.sync(MemoryOrder::Release);
//! }
//! # fn main() {}
//! ```

mod buffers;
mod local;
mod lsa;
mod multicast;
mod multimem;
pub mod nccl;
mod pack;
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
