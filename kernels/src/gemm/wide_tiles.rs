//! The tiles of [`gemm_wgmma`](super::gemm_wgmma), and their places in shared memory.

use super::prelude::*;

/// Rows of a tile of C.
pub const TILE_M: u32 = 128;
/// Columns of a tile of C.
pub const TILE_N: u32 = 256;
/// Rows of C that a warp stores at once.
pub const STORE_M: u32 = 16;
/// Blocks per cluster.
pub const CLUSTER: u32 = 2;
/// Rows of a cluster's tile.
pub const CLUSTER_M: u32 = CLUSTER * TILE_M;
/// Stages of the pipeline.
pub const STAGES: u32 = 4;
/// Multiplying warps: two warpgroups.
pub(crate) const MULTIPLYING_WARPS: u32 = 8;
/// Warps that neither load nor multiply.
pub(crate) const IDLE_WARPS: u32 = 3;
pub(super) const WARPGROUP_M: u32 = 64;
/// Terms, and rows of A or B, that one load of a transposed factor has.
pub const TRANSPOSED: u32 = 64;

/// Bytes of the tiles of A and B of a stage, which are the same for every type.
pub(super) const A_BYTES: u32 = SharedTile::<bf16, TILE_M>::BYTES;
pub(super) const STAGE_BYTES: u32 = A_BYTES + SharedTile::<bf16, TILE_N>::BYTES;
/// The number of parts of a warp's rows in shared memory.
pub(super) const PARTS: u32 = 2;
/// Bytes of the parts of all warps, after the stages in shared memory.
pub(super) const STORE_BYTES: u32 = PARTS * MULTIPLYING_WARPS * SharedTile::<bf16, STORE_M>::BYTES;
/// Dynamic shared memory in bytes, with padding for the alignment.
pub const SHARED: u32 = STAGES * STAGE_BYTES + STORE_BYTES + TileMemory::PADDING;
/// Threads per block: two warpgroups that multiply, one that loads.
pub const THREADS: u32 = 384;
