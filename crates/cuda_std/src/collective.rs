//! Sums over the threads of a warp and of a block.
//!
//! The order in which they add is always the same, so that sums of floats are the same in every
//! thread and every run.
//!
//! # Safety model
//!
//! Both are `unsafe`, as the shuffles of [`warp`] are: all threads that take part call
//! them together.
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
//!         // SAFETY: the caller gives `count` elements.
//!         mine += unsafe { mem::load(x.add(i)) };
//!     }
//!     // SAFETY: every thread of the block is here.
//!     let total = unsafe { block_sum(mine) };
//!     if thread::thread_idx_x() == 0 {
//!         // SAFETY: the caller gives one element, and this thread alone writes it.
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

/// A number that threads add up. Integers wrap around.
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
/// All 32 lanes call it together.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn warp_sum<T: Summand>(mine: T) -> T {
    let mut sum = mine;
    let mut distance = warp::WARP_SIZE / 2;
    while distance > 0 {
        // SAFETY: every lane is here.
        sum = sum.wrapping_add(unsafe { warp::shuffle_xor(sum, distance) });
        distance /= 2;
    }
    sum
}

/// The sum over the block, in every thread. Two barriers of the block, and shared memory for a `T`
/// of each warp.
///
/// # Safety
///
/// All threads of the block call it together. The block is one-dimensional, and whole warps.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub unsafe fn block_sum<T: Summand>(mine: T) -> T {
    let of_warps = T::slots();
    // SAFETY: all lanes are here. A slot per warp, of which a block has at most `WARPS`; barriers
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
