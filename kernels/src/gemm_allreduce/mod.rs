//! A matrix product fused with the all-reduce that follows it, in one kernel: a layer of a
//! tensor-parallel model.
//!
//! `C = sum over the ranks of A x B^T`. Each rank has `m x k` elements of A and `n x k` of B (as
//! `nn.Linear` keeps its weights), both row-major: its slice of the dimension that is summed over.
//! Every rank gets all `m x n` elements of C, row-major. Elements are bf16; sums are in f32, also
//! over the ranks. All ranks get the same bits. `m` and `n` are any numbers; `k` is a multiple of
//! 8, so that rows are 16-byte aligned.
//!
//! For Hopper GPUs there are [`gemm_allreduce_swapped`] and the kernels of [`gemm_allreduce_wide`],
//! which exchange products that are rounded. [`gemm_allreduce_mma`](crate::gemm_allreduce_mma()) is
//! for every GPU since Ampere, and sends partial sums as f32, bf16 or e4m3 ([`Partial`]). What
//! follows is about it.
//!
//! C is divided into *tiles* of 128 rows, and each tile into two *strips* of 64, of which rank `s %
//! n_ranks` owns strip `s`. Every rank computes all tiles in ascending order, tile `t` in block `t
//! % blocks`. *Computing* warps store the sums of each strip to its owner's workspace, and set the
//! strip's flag there. *Reducing* warps, and the others when their own work is done, share the
//! strips that the rank owns: a warp takes the next 16 rows, waits for the flags of all ranks, adds
//! the ranks' sums, and stores the result to every rank. At the end a barrier of each block with
//! the same block of all ranks makes these results visible.
//!
//! It cannot deadlock: a warp that reduces waits only for flags, and has nothing left to compute;
//! computing warps wait only for each other, within the block; the barrier comes after both. The
//! launch is cooperative, so that all blocks make progress.
//!
//! Nothing needs a reset: to set a flag is to store the *epoch*, the number of the launch, which
//! its last block increments. A rank that begins the next launch has passed this launch's barriers,
//! so all owners have read what it sent. Peers write a rank's C only after it has sent a strip in
//! the same launch, so they never overwrite C while its stream reads it between two launches. (The
//! epoch wraps: a flag that is not set for 2^32 - 1 launches would look current.)

mod exchange;
pub mod gemm_allreduce_mma;
pub mod gemm_allreduce_swapped;
pub mod gemm_allreduce_wide;
mod partial;
mod quantised;

pub use gemm_allreduce_mma::GemmWorkspace;
pub use partial::Partial;
