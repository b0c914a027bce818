//! Matrix products, `C = A x B^T`: A has `m x k` elements, B `n x k` (as `nn.Linear` keeps its
//! weights), C `m x n`, all row-major. [`gemm_wgmma`] and [`gemm_mma`] also take factors of 16 bits
//! that are stored transposed, A as `k x m` and B as `k x n`. Sums are in f32; an [`epilogue`] adds
//! to them, and they are rounded once. Elements are bf16 or f16; [`gemm_wgmma`] also has 8-bit
//! floats, and [`gemm_blocks`] has 8-bit floats with scales per block. [`gemm_wgmma`] and
//! [`gemm_mma`] can also have C in f32.
//!
//! [`gemm_wgmma`], for few rows [`gemm_swapped`], for few columns [`gemm_unswapped`], and
//! [`gemm_blocks`] are for Hopper and rows that begin at multiples of 16 bytes; [`gemm_mma`] is for
//! every GPU since Ampere and any rows. [`gemm_grouped`], [`gemm_grouped_swapped`] and
//! [`gemm_grouped_mma`] compute products of groups of rows, by the tiles of [`gemm_wgmma`],
//! [`gemm_swapped`] and [`gemm_mma`].

pub mod epilogue;
pub(crate) mod factors;
pub mod gemm_blocks;
pub mod gemm_grouped;
pub mod gemm_grouped_mma;
pub mod gemm_grouped_swapped;
pub mod gemm_mma;
pub mod gemm_swapped;
pub mod gemm_unswapped;
pub mod gemm_wgmma;
pub mod groups;
pub(crate) mod hooks;
pub(crate) mod order;
pub(crate) mod part;
pub mod shapes;
pub mod slices;
mod stores;
mod swapped_loop;
mod swapped_stores;
mod swapped_tiles;
mod wide_tiles;

/// The names that many files use.
pub(crate) mod prelude {
    pub(super) use cuda_std::convert::{Float, Half};
    pub(super) use cuda_std::mbarrier::MBarrier;
    pub(crate) use cuda_std::tile::Mainloop;
    pub(super) use cuda_std::tile::{EmptyStage, IdleWarp, Persistent, TileMemory, Turn};
    pub(super) use cuda_std::tile::{LastRows, RegisterSplit, Registers, Schedule, StoresRows};
    pub(crate) use cuda_std::tile::{Matrix, MmaProduct};
    pub(super) use cuda_std::wgmma;

    pub(crate) use super::epilogue::{Epilogue, Fragment, Fused, Identity};
    pub(super) use super::factors::{GemmFactor, Sums};
    pub(crate) use super::gemm_wgmma::Product;
    pub(super) use super::groups::{Group, GroupTiles, Groups};
    pub(crate) use super::hooks::{AddingRegisters, CopyingRegisters, Hooks, IdleRegisters, Store};
    pub(crate) use super::order::{Order, Tile, cluster, clusters};
    pub(crate) use super::part::Part;
    pub(super) use super::slices::Slices;
    pub(crate) use super::wide_tiles::{CLUSTER, CLUSTER_M, IDLE_WARPS, MULTIPLYING_WARPS};
    pub(crate) use super::wide_tiles::{STAGES, TILE_M, TILE_N};
    pub(crate) use crate::prelude::*;
}
