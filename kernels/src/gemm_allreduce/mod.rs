//! A matrix product fused with the all-reduce that follows it, in one kernel: a layer of a
//! tensor-parallel model.
//!
//! `C = sum over the ranks of A x B^T`. Each rank has `m x k` elements of A and `n x k` of B (as
//! `nn.Linear` keeps its weights), both row-major: its slice of the dimension that is summed over.
//! Every rank gets all `m x n` elements of C, row-major. Elements are bf16; products are summed in
//! f32, over the ranks too, and rounded once. All ranks get the same bits.
//!
//! Any `m` and `n`; `k` is a multiple of 8, so that rows begin on 16 bytes.
//!
//! # Forms
//!
//! Two kernels over the same exchange: [`gemm_allreduce_wgmma`] with Hopper's tensor cores and TMA,
//! and [`gemm_allreduce_mma`] for every GPU. [`GemmForm`] has the sizes that a launch of each
//! needs.
//!
//! # Schedule
//!
//! C is cut into *tiles* of 128 rows, and those into two *strips* of 64. Strip `s` is owned by rank
//! `s % n_ranks`. Every rank computes all tiles, from first to last, tile `t` in block `t %
//! blocks`. A block has three kinds of warps:
//!
//! * those that **compute**: they multiply a tile, store its sums to the workspace of each strip's
//!   owner, and set a flag there for each strip;
//! * one that **loads** tiles of A and B into shared memory for them (in the portable form they do
//!   that themselves);
//! * those that **reduce**: the strips that the rank owns are dealt to its blocks round-robin. Of
//!   the block's, from first to last, a warp takes the next 16 rows, waits for the flags of all
//!   ranks, adds up, and stores the result to every rank. The warps above join in when their own
//!   work is done.
//!
//! So the exchange overlaps the product, strip by strip. At the end is a barrier of a block with
//! the same block of the other ranks: after it the strips that those have reduced are visible on
//! every rank. All of C is complete when the kernel has ended.
//!
//! # Why it ends
//!
//! Warps that compute wait for those that load, and the other way round, within the block, and for
//! nobody else: each tile of each rank is computed in the end, and its flags are set. Who reduces
//! waits for flags only, and has nothing left to compute or to load. The barrier at the end comes
//! after both. So no wait depends on a later one. That a block's three kinds make progress
//! concurrently is the hardware's guarantee, and that all blocks of all ranks do is the launch's,
//! which is cooperative.
//!
//! # Why nothing has to be reset
//!
//! A flag is set by storing the number of the launch, its *epoch*, which a word of the workspace
//! counts and the last block of a launch moves on. A strip's place in the workspace is written
//! again in the next launch only. A rank that begins it has passed the barriers of this one, so all
//! owners have read what it sent. And a rank's C is written in a launch only after it has sent
//! something in it, so what its stream reads of C between two launches is never overwritten.
//! Launches can be replayed by a graph, one after the other. (A flag that is not set for 2^32 - 1
//! launches would be taken for a new one then.)

mod exchange;
mod form;
pub(crate) mod gemm_allreduce_mma;
pub(crate) mod gemm_allreduce_wgmma;
mod tiles;

pub use form::{GemmForm, GemmWorkspace};
