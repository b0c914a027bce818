//! Warp-level tensor core operations (`mma.sync`): products of small matrices in registers.
//!
//! The operands are *fragments*: each lane holds certain elements of the matrix, as PTX defines.
//! Below, `row` stands for `lane / 4` and `pair` for `2 * (lane % 4)`.
//!
//! # Safety model
//!
//! Every function is `unsafe`, as an operation of the whole warp: all 32 lanes make the same call
//! together. Functions that read shared memory also need valid addresses.
//!
//! # Example
//!
//! ```
//! use cuda_std::{bf16, mma};
//! /// Computes `d += a * b` for a 16 x 16 tile `a` and an 8 x 16 tile `b` (its columns as rows) in
//! /// shared memory, with rows of 32 bytes.
//! ///
//! /// # Safety
//! ///
//! /// All 32 lanes call this together; both tiles have been written.
//! unsafe fn tile(d: &mut [f32; 4], a: *const bf16, b: *const bf16) {
//!     let lane = cuda_std::warp::lane_id() as usize;
//!     // SAFETY: the caller's contract; each lane passes the address of one row of 8 elements.
//!     unsafe {
//!         let a = mma::load_matrices(a.add(lane % 16 * 16 + lane / 16 * 8));
//!         let b = mma::load_matrices(b.add(lane % 8 * 16 + lane / 8 % 2 * 8));
//!         mma::m16n8k16::<bf16>(d, a, [b[0], b[1]]);
//!     }
//! }
//! ```

use half::{bf16, f16};

use crate::arch;

/// An element type of the factors: `bf16` or `f16`.
pub trait Factor: arch::Factor {}

impl Factor for bf16 {}
impl Factor for f16 {}

/// Computes `d += a * b`: 16 x 8 sums in `f32` of products of a 16 x 16 and a 16 x 8 matrix of
/// `bf16` or `f16`. PTX: `mma.sync.aligned.m16n8k16.row.col.f32`. Needs sm_80.
///
/// * `d`: rows `row` (elements 0, 1) and `row + 8` (2, 3), columns `pair` and `pair + 1`.
/// * `a`, two elements per word: row `row`, `row + 8`, `row`, `row + 8`; columns from `pair` (words
///   0, 1) and from `pair + 8` (2, 3).
/// * `b`, two elements per word, the first in the low half: column `row`; rows from `pair` and from
///   `pair + 8`.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn m16n8k16<T: Factor>(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    // SAFETY: all lanes of the warp call this together: the caller's duty.
    unsafe { arch::mma_m16n8k16::<T>(d, a, b) }
}

/// Loads four 8 x 8 matrices of 16-bit elements from shared memory, as fragments: word `i` of a
/// lane is row `row` of matrix `i`, elements `pair` and `pair + 1`. Lane `8 * i + r` passes the
/// address of row `r` of matrix `i`. PTX: `ldmatrix.sync.aligned.m8n8.x4.shared.b16`.
///
/// # Safety
///
/// All 32 lanes call this together. `row` lies in shared memory, is aligned to 16 bytes and valid
/// for reads of 16.
#[doc(alias = "ldmatrix")]
#[track_caller]
pub unsafe fn load_matrices<T: Factor>(row: *const T) -> [u32; 4] {
    // SAFETY: each lane passes the address of a row in shared memory: the caller's duty.
    unsafe { arch::load_matrices::<false>(arch::shared_address(row)) }
}

/// Does the same as [`load_matrices`], transposed: word `i` of a lane is column `row` of matrix
/// `i`, the elements in rows `pair` and `pair + 1`. PTX:
/// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`.
///
/// # Safety
///
/// The contract is that of [`load_matrices`].
#[doc(alias = "ldmatrix")]
#[track_caller]
pub unsafe fn load_matrices_transposed<T: Factor>(row: *const T) -> [u32; 4] {
    // SAFETY: each lane passes the address of a row in shared memory: the caller's duty.
    unsafe { arch::load_matrices::<true>(arch::shared_address(row)) }
}

/// Stores four 8 x 8 matrices of 16-bit elements to shared memory, the reverse of
/// [`load_matrices`]. PTX: `stmatrix.sync.aligned.m8n8.x4.shared.b16`. Needs sm_90.
///
/// # Safety
///
/// All 32 lanes call this together. `row` lies in shared memory, is aligned to 16 bytes and valid
/// for writes of 16.
#[doc(alias = "stmatrix")]
#[track_caller]
pub unsafe fn store_matrices(row: *mut u8, words: [u32; 4]) {
    // SAFETY: each lane passes the address of a row in shared memory that the warp may write.
    unsafe { arch::store_matrices(arch::shared_address(row), words) }
}

/// Stores `N` 8 x 8 matrices of 16-bit elements to shared memory, transposed; `N` is 2 or 4.
///
/// Word `i` of a lane is row `row` of matrix `i`, elements `pair` and `pair + 1`, as in
/// [`load_matrices`]. They become element `row` of the rows `pair` and `pair + 1` in memory. Lane
/// `8 * i + r` passes the address of row `r` in memory of matrix `i`; with `N` 2 the addresses of
/// lanes 16 to 31 are not used. PTX: `stmatrix.sync.aligned.m8n8.x4.trans.shared.b16`, or `x2`.
/// Needs sm_90.
///
/// # Safety
///
/// The contract is that of [`store_matrices`], for the lanes whose addresses are used.
#[doc(alias = "stmatrix")]
#[track_caller]
pub unsafe fn store_matrices_transposed<const N: usize>(row: *mut u8, words: [u32; N]) {
    const { assert!(N == 2 || N == 4, "two or four matrices") }
    // SAFETY: each lane passes the address of a row in shared memory that the warp may write.
    unsafe { arch::store_matrices_transposed(arch::shared_address(row), words) }
}
