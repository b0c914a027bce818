//! Sums over the threads of a warp and of a block.
//!
//! The order of the additions is fixed, so that a sum of floats has the same bits in every thread
//! and run.
//!
//! # Safety model
//!
//! [`warp_sum`] and [`block_sum`] are `unsafe`, like the shuffles of [`warp`]: all threads of the
//! warp or block must call them together.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//!
//! /// The sum of `count` elements, by one block of whole warps.
//! #[kernel]
//! pub unsafe fn sum(x: *const f32, out: *mut f32, count: usize) {
//!     let mut mine = 0.0;
//!     for i in thread::grid_strided(count) {
//!         // SAFETY: `x` has `count` elements.
//!         mine += unsafe { mem::load(x.add(i)) };
//!     }
//!     // SAFETY: every thread of the block calls this.
//!     let total = unsafe { block_sum(mine) };
//!     if thread::thread_idx_x() == 0 {
//!         // SAFETY: `out` has one element, and only this thread writes it.
//!         unsafe { mem::store(out, total) };
//!     }
//! }
//! # fn main() {}
//! ```

use crate::reduce::Number;
use crate::warp::{self, WarpShuffleValue};
use crate::{mem, shared_array, thread};

/// The maximum number of warps in a block.
const WARPS: usize = 32;

/// A number type that can be summed over threads. Integers wrap around.
pub trait Summand: Number + WarpShuffleValue {
    /// Zero.
    const ZERO: Self;
    /// Shared memory of the block, for one value per warp.
    #[doc(hidden)]
    fn slots() -> *mut Self;
}

macro_rules! summands {
    ($($type:ident)*) => { $(
        impl Summand for $type {
            const ZERO: Self = 0 as $type;

            #[cfg_attr(target_arch = "nvptx64", inline(always))]
            fn slots() -> *mut Self {
                shared_array![$type; WARPS]
            }
        }
    )* };
}

summands!(f32 f64 i32 u32 i64 u64);

/// The sum over the warp, in every lane.
///
/// # Safety
///
/// All 32 lanes call this together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn warp_sum<T: Summand>(mine: T) -> T {
    let mut sum = mine;
    let mut distance = warp::WARP_SIZE / 2;
    while distance > 0 {
        // SAFETY: every lane calls this.
        sum = sum.wrapping_add(unsafe { warp::shuffle_xor(sum, distance) });
        distance /= 2;
    }
    sum
}

/// The sum over the block, in every thread. It uses two block barriers, and shared memory for one
/// `T` per warp.
///
/// # Safety
///
/// All threads of the block call this together. The block is one-dimensional and has whole warps.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn block_sum<T: Summand>(mine: T) -> T {
    let of_warps = T::slots();
    // SAFETY: all lanes call this. There is one slot per warp, of at most `WARPS`; barriers
    // separate the writes from the reads, and the reads from the next writes.
    unsafe {
        let sum = warp_sum(mine);
        if warp::lane_id() == 0 {
            mem::store(of_warps.add((thread::thread_idx_x() / warp::WARP_SIZE) as usize), sum);
        }
        thread::sync_threads();
        let warps = (thread::block_dim_x() / warp::WARP_SIZE) as usize;
        let mut total = T::ZERO;
        let mut i = 0;
        while i < warps {
            total = total.wrapping_add(mem::load(of_warps.add(i)));
            i += 1;
        }
        thread::sync_threads();
        total
    }
}
