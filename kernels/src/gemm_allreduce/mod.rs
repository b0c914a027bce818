//! A matrix product fused with the all-reduce that follows it, in one kernel: a layer of a
//! tensor-parallel model.
//!
//! `C = sum over the ranks of A x B^T`. Each rank has `m x k` elements of A and `n x k` of B (as
//! `nn.Linear` keeps its weights), both row-major: its slice of the dimension that is summed over.
//! Every rank gets all `m x n` elements of C, row-major. Elements are bf16; sums are in f32, also
//! over the ranks. All ranks get the same bits.
//!
//! `m` and `n` are any numbers; `k` is a multiple of 8, so that rows are 16-byte aligned.
//!
//! # Kernels
//!
//! [`gemm_allreduce_mma`](crate::gemm_allreduce_mma()) is for every GPU since Ampere, and sends
//! partial sums as f32, bf16 or e4m3 ([`Partial`]).
//!
//! For Hopper GPUs there are [`gemm_allreduce_swapped`] and the kernels of [`gemm_allreduce_wide`],
//! which exchange products that are rounded. Their schedules are those of
//! [`gemm_swapped`](crate::gemm::gemm_swapped) and [`gemm_wgmma`](crate::gemm::gemm_wgmma); what
//! follows is about `gemm_allreduce_mma`.
//!
//! # Schedule
//!
//! C is divided into *tiles* of 128 rows, and each tile into two *strips* of 64. Strip `s` is owned
//! by rank `s % n_ranks`. Every rank computes all tiles in ascending order, tile `t` in block `t %
//! blocks`. A block has two kinds of warps:
//!
//! * **computing** warps load and multiply a tile, store the sums of each strip to its owner's
//!   workspace, and set the strip's flag there;
//! * **reducing** warps: the rank's blocks share the strips that it owns round-robin. In ascending
//!   order a warp takes the next 16 rows of the block's strips, waits for the flags of all ranks,
//!   adds the ranks' sums, and stores the result to every rank. The other warps also reduce when
//!   their own work is done.
//!
//! So the exchange overlaps the product, strip by strip. At the end, a barrier of each block with
//! the same block of all ranks makes the strips that these blocks reduced visible on every rank.
//! All of C is complete when the kernel has ended.
//!
//! # Why it cannot deadlock
//!
//! Computing warps wait only for each other, within the block: every rank computes all its tiles
//! and sets their flags. A warp that reduces waits only for flags, and has nothing left to compute.
//! The final barrier comes after both. So no wait depends on a later one. The hardware guarantees
//! that the warps of a block make progress concurrently; the launch, which is cooperative,
//! guarantees it for the blocks.
//!
//! # Why nothing needs a reset
//!
//! To set a flag is to store the *epoch*, the number of the launch. A word of the workspace holds
//! it, and the last block of a launch increments it. A strip's slot in the workspace is written
//! again only in the next launch. A rank that begins that launch has passed this launch's barriers,
//! so all owners have read what it sent. Peers write a rank's C only after that rank has sent a
//! strip in the same launch, so they never overwrite C while its stream reads it between two
//! launches. A graph can replay launches one after the other. (The epoch wraps: a flag that is not
//! set for 2^32 - 1 launches would look current.)

mod exchange;
pub mod gemm_allreduce_mma;
pub mod gemm_allreduce_swapped;
pub mod gemm_allreduce_wide;
mod partial;
mod quantised;
mod tiles;

pub use gemm_allreduce_mma::GemmWorkspace;
pub use partial::Partial;
