//! Hopper's warpgroup-level tensor core operations: asynchronous products of shared-memory tiles.
//!
//! A *warpgroup* is four consecutive warps; the index of the first is a multiple of four. The
//! sequence is [`fence`], the products, [`commit_group`], [`wait_groups`]. Before the wait no
//! thread accesses the sums or writes the tiles; [`fence_operand`] before and after the sequence
//! prevents the compiler from moving accesses to the sums into it.
//!
//! # Safety model
//!
//! The operations are `unsafe`: all 128 threads of the warpgroup make the same call together. A
//! call borrows the sums only while the instruction is issued; the caller must not access them
//! until the wait. In the simulator they are NaN until [`fence_operand`] after the wait. Needs
//! sm_90a, and runs on Hopper only.
//!
//! # Example
//!
//! ```
//! use cuda_std::bf16;
//! use cuda_std::wgmma::{self, Tile};
//! /// Computes `d += a * b` for 64 columns of `a` (64 rows) and `b` (256 rows), which TMA has
//! /// copied to shared memory.
//! ///
//! /// # Safety
//! ///
//! /// The warpgroup calls this together; the tiles have arrived, aligned to 1,024 bytes.
//! unsafe fn product(d: &mut [f32; 128], a: *const u8, b: *const u8) {
//!     let (a, b) = (Tile::<bf16>::at(a), Tile::<bf16>::at(b));
//!     // SAFETY: the caller's contract.
//!     unsafe {
//!         wgmma::fence_operand(d);
//!         wgmma::fence();
//!         for k in [0, 16, 32, 48] {
//!             wgmma::multiply(d, a.columns_from(k), b.columns_from(k), true);
//!         }
//!         wgmma::commit_group();
//!         wgmma::wait_groups::<0>();
//!         wgmma::fence_operand(d);
//!     }
//! }
//! ```

use core::marker::PhantomData;

use crate::arch;
pub use crate::arch::{Factor, Sums};
use crate::mma;

/// The layout of a factor of `T` in shared memory: [`KMajor`] or [`MnMajor`]. PTX ISA:
/// *Asynchronous warpgroup level matrix shared memory layout*.
pub trait Layout<T>: Copy {
    /// The immediate `imm-trans-a` or `imm-trans-b` of the instruction.
    #[doc(hidden)]
    const TRANSPOSED: bool;
}

/// The terms of a sum lie side by side: 128 bytes are of one row of the factor.
#[derive(Clone, Copy, Debug)]
pub struct KMajor;

impl<T: Factor> Layout<T> for KMajor {
    const TRANSPOSED: bool = false;
}

/// The factor is stored transposed: 128 bytes are of one term, elements of 64 rows of the factor
/// side by side. Only factors of 16 bits can be.
///
/// ```compile_fail,E0277
/// # use cuda_std::wgmma::{MnMajor, Tile, multiply};
/// # use devcomm_types::F8E4M3;
/// unsafe fn product(d: &mut [f32; 4], a: Tile<F8E4M3>, b: Tile<F8E4M3, MnMajor>) {
///     unsafe { multiply(d, a, b, true) }
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct MnMajor;

impl<T: mma::Factor> Layout<T> for MnMajor {
    const TRANSPOSED: bool = true;
}

/// A factor of `T` in shared memory. Its rows are those of `a`, and the columns of `b`. In memory
/// there are rows of 128 bytes, 64 elements of 16 bits or 128 of 8, swizzled as in
/// [`TensorMapDesc`](devcomm_types::TensorMapDesc): the factor's rows if it is [`KMajor`], its
/// columns if [`MnMajor`].
#[derive(Clone, Copy)]
pub struct Tile<T, L = KMajor>(pub(crate) arch::TileAddress, PhantomData<(T, L)>);

impl<T: mma::Factor> Tile<T, MnMajor> {
    /// Returns the factor at an address in shared memory. Its first 64 rows are the columns of the
    /// tile there, the next 64 rows those of the tile `next_rows` bytes further, and so on. Address
    /// and `next_rows` are multiples of 1,024. PTX: the *leading dimension byte offset* of the
    /// matrix descriptor.
    #[track_caller]
    pub(crate) fn transposed_at_shared(address: arch::SharedAddress, next_rows: u32) -> Self {
        Self(arch::transposed_tile_address(address, next_rows), PhantomData)
    }
}

impl<T: Factor> Tile<T> {
    #[track_caller]
    pub(crate) fn at_shared(address: arch::SharedAddress) -> Self {
        Self(arch::tile_address(address), PhantomData)
    }

    /// Returns the tile at an address in shared memory, a multiple of 1,024.
    #[track_caller]
    pub fn at(address: *const u8) -> Self {
        Self::at_shared(arch::shared_address(address))
    }

    /// Returns the tile at a byte offset: a multiple of 1,024 for other rows, of 16 for other
    /// columns.
    #[must_use]
    pub fn offset_bytes(self, bytes: u32) -> Self {
        Self(arch::tile_offset_bytes(self.0, bytes), PhantomData)
    }
}

impl<T: Factor, L: Layout<T>> Tile<T, L> {
    /// Returns the factor from column `k` on: a multiple of 16 bytes within a row, or of eight
    /// columns if it is [`MnMajor`].
    #[must_use]
    pub fn columns_from(self, k: u32) -> Self {
        let column = if L::TRANSPOSED { 128 } else { size_of::<T>() as u32 };
        Self(arch::tile_offset_bytes(self.0, k * column), PhantomData)
    }
}

/// Computes `d = a * b`, or `d += a * b` if `accumulate`: 64 x `N` sums in `f32` of products of
/// [`Factor::TERMS`] columns of `a` (64 rows) and of `b` (`N` rows), where `D` is
/// [`RegTile<f32, { N / 8 }>`](crate::tile::RegTile) or `[f32; N / 2]`. Each factor has its own
/// [`Layout`]. PTX: `wgmma.mma_async.sync.aligned.m64nNk16.f32`, or
/// `m64nNk32` for 8-bit factors.
///
/// Hopper adds products of 8-bit factors with fewer bits than `f32` has: relative to the largest of
/// them and the sum so far, about 13 bits after the point. The simulator adds in `f32`.
///
/// In a thread's `d`, elements `4 * j` and `4 * j + 1` are in row `16 * warp + lane / 4`, columns
/// `8 * j + 2 * (lane % 4)` and the next; `4 * j + 2` and `4 * j + 3` are eight rows below them.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this together. The tiles are written, by TMA or before a
/// [`tma::fence_async_shared`](crate::tma::fence_async_shared). A [`fence`] lies between the last
/// access to `d` and this; until [`wait_groups`] only further products access `d`, and no thread
/// writes the tiles.
#[track_caller]
pub unsafe fn multiply<T: Factor, D: Sums, LA: Layout<T>, LB: Layout<T>>(
    d: &mut D,
    a: Tile<T, LA>,
    b: Tile<T, LB>,
    accumulate: bool,
) {
    // SAFETY: the caller's warpgroup calls this together, with tiles in shared memory that no
    // thread writes.
    unsafe { d.wgmma::<T, LA, LB>(a.0, b.0, accumulate) }
}

/// Prevents the compiler from moving accesses to the sums across this call, which [`fence`] and
/// [`wait_groups`] do not. Call it before the first [`fence`], and after the [`wait_groups`] for
/// the last group.
#[track_caller]
pub fn fence_operand<D: Sums>(d: &mut D) {
    d.fence_operand();
}

/// Raises the number of registers of each thread of the warpgroup to `N`, a multiple of 8 from 24
/// to 256; waits until other warpgroups of the block have [lowered](lower_registers) theirs. The
/// block has the registers that the launch gave it: `65536 / max_threads` for each thread, rounded
/// down to a multiple of 8. If its warpgroups ask for more, the wait does not end. PTX:
/// `setmaxnreg.inc`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this together. The kernel has a `max_threads`, and the
/// block's registers suffice.
#[track_caller]
pub unsafe fn raise_registers<const N: u32>() {
    arch::raise_registers::<N>();
}

/// Lowers the number of registers of each thread of the warpgroup to `N`, a multiple of 8 from 24
/// to 256. PTX: `setmaxnreg.dec`.
///
/// # Safety
///
/// The contract is that of [`raise_registers`]; the code that follows needs no more.
#[track_caller]
pub unsafe fn lower_registers<const N: u32>() {
    arch::lower_registers::<N>();
}

/// Orders earlier register accesses before the products that follow. PTX:
/// `wgmma.fence.sync.aligned`. The simulator is stricter than PTX: after a [`fence_operand`] by
/// which a thread gets sums, it requires the fence before the first product of other sums, too.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this together.
#[track_caller]
pub unsafe fn fence() {
    arch::wgmma_fence();
}

/// Commits the products since the last call as a group. PTX: `wgmma.commit_group.sync.aligned`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this together.
#[track_caller]
pub unsafe fn commit_group() {
    arch::wgmma_commit();
}

/// Waits until at most the newest `N` groups are pending. PTX: `wgmma.wait_group.sync.aligned N`.
///
/// # Safety
///
/// The 128 threads of a warpgroup call this together.
#[track_caller]
pub unsafe fn wait_groups<const N: u32>() {
    arch::wgmma_wait::<N>();
}
