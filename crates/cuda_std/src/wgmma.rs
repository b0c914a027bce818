//! Hopper's tensor cores: four warps multiply tiles in shared memory, asynchronously.
//!
//! A *warpgroup* is four warps, the first a multiple of four. [`fence`] comes first, then the
//! products, [`commit_group`], and in the end [`wait_groups`], before which nobody touches the sums
//! or writes the tiles: [`fence_operand`] at both ends keeps the compiler from it.
//!
//! # Safety model
//!
//! The operations are the whole warpgroup's and `unsafe` for that: all 128 threads make the same
//! call together. The sums are borrowed only while an instruction is issued; that they rest until
//! the wait is the caller's. In the simulator a product happens at once, so a missing fence or wait
//! passes there. Needs sm_90a, and runs on Hopper only.
//!
//! # Example
//!
//! ```
//! use cuda_std::wgmma::{self, Tile};
//! /// `d += a * b` for 64 columns of `a` (64 rows) and `b` (256 rows), as TMA puts them into
//! /// shared memory.
//! ///
//! /// # Safety
//! ///
//! /// The warpgroup calls it together; the tiles are there, aligned to 1,024 bytes.
//! unsafe fn product(d: &mut [f32; 128], a: *const u8, b: *const u8) {
//!     let (a, b) = (Tile::at(a), Tile::at(b));
//!     // SAFETY: the caller's.
//!     unsafe {
//!         wgmma::fence_operand(d);
//!         wgmma::fence();
//!         for k in [0, 16, 32, 48] {
//!             wgmma::m64n256k16_bf16(d, a.columns_from(k), b.columns_from(k));
//!         }
//!         wgmma::commit_group();
//!         wgmma::wait_groups::<0>();
//!         wgmma::fence_operand(d);
//!     }
//! }
//! ```

use crate::arch;

/// A tile of 16-bit elements in shared memory, as tensor cores read it: rows of 64 elements (128
/// bytes), swizzled as [`TensorMapDesc`](devcomm_types::TensorMapDesc) says. The second factor's
/// columns are its rows.
#[derive(Clone, Copy)]
pub struct Tile(pub(crate) arch::TileAddress);

impl Tile {
    /// The tile at an address in shared memory, a multiple of 1,024.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn at(address: *const u8) -> Self {
        Self(arch::tile_address(address))
    }

    /// The tile from column `k` on, a multiple of 8 below 64.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub fn columns_from(self, k: u32) -> Self {
        Self(arch::tile_offset_bytes(self.0, 2 * k))
    }

    /// The tile that many bytes further, a multiple of 1,024.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[must_use]
    pub fn offset_bytes(self, bytes: u32) -> Self {
        Self(arch::tile_offset_bytes(self.0, bytes))
    }
}

/// `d += a * b`: 64 x 256 sums in `f32` of products of 16 columns of `a` (64 rows) and of `b` (256
/// rows). PTX: `wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16`.
///
/// `d` of a thread: elements `4 * j` and the one after are row `16 * warp + lane / 4`, columns `8 *
/// j + 2 * (lane % 4)` and the one after; the two behind them are the same eight rows further on.
///
/// # Safety
///
/// The 128 threads of a warpgroup call it together. The tiles are there, and were written by the
/// TMA. A [`fence`] lies between the last access to `d` and this; until [`wait_groups`]
/// nobody touches `d` (but by a further product) or writes the tiles.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn m64n256k16_bf16(d: &mut [f32; 128], a: Tile, b: Tile) {
    // SAFETY: the caller's.
    unsafe { arch::wgmma_m64n256k16_bf16(d, a.0, b.0) }
}

/// Holds the sums where they are: the compiler moves nothing that it does with them across this, as
/// it otherwise may across an instruction that does not name them. Before the first [`fence`], and
/// behind the [`wait_groups`] that ends the last group.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub fn fence_operand(d: &mut [f32; 128]) {
    arch::wgmma_fence_operand(d);
}

/// Orders earlier accesses to registers before the products that follow. PTX:
/// `wgmma.fence.sync.aligned`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call it together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn fence() {
    arch::wgmma_fence();
}

/// Ends the group of the products so far. PTX: `wgmma.commit_group.sync.aligned`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call it together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn commit_group() {
    arch::wgmma_commit();
}

/// Waits until at most the newest `N` groups are under way. PTX: `wgmma.wait_group.sync.aligned N`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call it together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn wait_groups<const N: u32>() {
    arch::wgmma_wait::<N>();
}
