//! Reductions over the threads of a warp and of a block by any operator, and sums over a cluster.
//!
//! An operator is a function of two values: `f32::max`, [`reduce::arg_max`](crate::reduce::arg_max)
//! of pairs, [`SoftmaxSum::combine`](crate::reduce::SoftmaxSum::combine). The order of the
//! operations is fixed, so that a sum of floats has the same bits in every thread and run.
//!
//! # Safety model
//!
//! Reductions are `unsafe`, like the shuffles of [`warp`]: all threads of the warp or block must
//! call them together.
//!
//! # Example
//!
//! ```
//! use cuda_std::prelude::*;
//!
//! /// Stores the sum of `count` elements. The grid is one block of whole warps.
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

use crate::mbarrier::{self, MBarrier};
use crate::reduce::Number;
use crate::warp::{self, WarpShuffleValue};
use crate::{arch, cluster, mem, shared_array, thread};

/// The maximum number of warps in a block.
const WARPS: usize = 32;

/// The maximum number of warps in a cluster of a [`ClusterSum`]: 8 blocks, of 16 warps each.
const CLUSTER_WARPS: usize = 8 * 16;

/// A number type that can be summed over threads. Integers wrap around.
pub trait Summand: Number + WarpShuffleValue {
    /// Zero.
    const ZERO: Self;
}

macro_rules! summands {
    ($($type:ident)*) => { $(
        impl Summand for $type {
            const ZERO: Self = 0 as $type;
        }
    )* };
}

summands!(f32 f64 i32 u32 i64 u64);

/// Returns the values of the warp's lanes, combined by `op`, in every lane: `warp_reduce(x,
/// f32::max)`.
///
/// `op` is associative and commutative, in floats up to rounding: the lanes combine the same pairs
/// of values, some in the other order.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn warp_reduce<T: WarpShuffleValue>(mine: T, op: impl Fn(T, T) -> T) -> T {
    // SAFETY: every lane calls this.
    unsafe { segment_reduce::<32, T>(mine, op) }
}

/// Returns the least of the warp's values, in every lane, by one instruction. PTX:
/// `redux.sync.min`.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn warp_min(mine: u32) -> u32 {
    arch::warp_min(mine)
}

/// Does the same as [`warp_reduce`], for each segment of `WIDTH` neighbouring lanes by itself.
/// `WIDTH` is a power of two up to 32.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn segment_reduce<const WIDTH: u32, T: WarpShuffleValue>(
    mine: T,
    op: impl Fn(T, T) -> T,
) -> T {
    const { assert!(WIDTH.is_power_of_two() && WIDTH <= 32, "a power of two up to 32") }
    let (mut all, mut distance) = (mine, WIDTH / 2);
    while distance > 0 {
        // SAFETY: every lane calls this.
        all = op(all, unsafe { warp::shuffle_xor(all, distance) });
        distance /= 2;
    }
    all
}

/// Returns the sum over the warp, in every lane.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn warp_sum<T: Summand>(mine: T) -> T {
    // SAFETY: every lane calls this.
    unsafe { warp_reduce(mine, T::wrapping_add) }
}

/// Returns the sum of the values of this lane and of the lanes below it.
///
/// # Safety
///
/// All 32 lanes call this together.
#[track_caller]
pub unsafe fn warp_prefix_sum<T: Summand>(mine: T) -> T {
    let (mut sum, mut distance) = (mine, 1);
    while distance < warp::WARP_SIZE {
        // SAFETY: all lanes of the caller's warp exchange at this point.
        let lower = unsafe { warp::shuffle_up(sum, distance) };
        sum = sum.wrapping_add(if warp::lane_id() >= distance { lower } else { T::ZERO });
        distance *= 2;
    }
    sum
}

/// Returns the values of the block's threads, combined by `op`, in every thread: `block_reduce(x,
/// f32::NEG_INFINITY, f32::max)`. It uses two block barriers, and shared memory for one `T` per
/// warp, of at most 16 bytes.
///
/// `op` is as for [`warp_reduce`], and `op(identity, x)` is `x`.
///
/// # Safety
///
/// All threads of the block call this together. The block is one-dimensional and has whole warps.
#[track_caller]
pub unsafe fn block_reduce<T: WarpShuffleValue>(mine: T, identity: T, op: impl Fn(T, T) -> T) -> T {
    const { assert!(size_of::<T>() <= 16 && align_of::<T>() <= 16, "at most 16 bytes per warp") }
    let slots: *mut T = match size_of::<T>() {
        0..=4 => shared_array![u32; WARPS].cast(),
        5..=8 => shared_array![u64; WARPS].cast(),
        _ => shared_array![[u64; 2]; WARPS].cast(),
    };
    // SAFETY: all lanes call this. There is one slot per warp, of at most `WARPS`; barriers
    // separate the writes from the reads, and the reads from the next writes.
    unsafe {
        let of_warp = warp_reduce(mine, &op);
        if warp::lane_id() == 0 {
            mem::store(slots.add((thread::thread_idx_x() / warp::WARP_SIZE) as usize), of_warp);
        }
        thread::sync_threads();
        let (lane, warps) = (warp::lane_id(), thread::block_dim_x() / warp::WARP_SIZE);
        let of_warp = if lane < warps { mem::load(slots.add(lane as usize)) } else { identity };
        let all = warp_reduce(of_warp, op);
        thread::sync_threads();
        all
    }
}

/// Returns the sum over the block, in every thread: a [`block_reduce`].
///
/// # Safety
///
/// The contract is that of [`block_reduce`].
#[track_caller]
pub unsafe fn block_sum<T: Summand>(mine: T) -> T {
    // SAFETY: all threads of the caller's block call this together.
    unsafe { block_reduce(mine, T::ZERO, T::wrapping_add) }
}

/// Sums over the blocks of a cluster, in every thread of it. The blocks send each other their sums,
/// and wait for nothing else: no fence waits for what the threads have stored in global memory.
/// Needs sm_90.
pub struct ClusterSum {
    /// The number of earlier sums. Two banks take turns, each of which has a phase in every second
    /// sum: so bit 0 is the bank, and bit 1 the parity of its phase.
    calls: u32,
}

impl ClusterSum {
    /// Reserves shared memory: 4 KiB. It uses a barrier of the cluster, if this has several blocks.
    ///
    /// # Safety
    ///
    /// All threads of the cluster call this together, once. Its blocks are one-dimensional, of up
    /// to 16 whole warps.
    #[track_caller]
    pub unsafe fn new() -> Self {
        // SAFETY: the other blocks use these barriers after the barrier of the cluster.
        unsafe {
            if cluster::size() > 1 {
                if thread::thread_idx_x() == 0 {
                    Self::full().init(1);
                    Self::full().after(1).init(1);
                    mbarrier::fence_init();
                }
                cluster::sync_relaxed();
            }
            Self { calls: 0 }
        }
    }

    /// Returns two banks of slots, which calls use in turn: a slot for the sums of each warp of the
    /// cluster.
    fn slots() -> *mut [f32; 4] {
        shared_array![[f32; 4]; 2 * CLUSTER_WARPS]
    }

    /// Returns the barrier whose phase ends when the first bank has all sums. That of the second
    /// bank follows it.
    fn full() -> MBarrier {
        // SAFETY: nothing else uses the words; `new` initializes them.
        unsafe { MBarrier::at(shared_array![u64; 2]) }
    }

    /// Returns the sums over the cluster of up to four numbers, in every thread of it.
    ///
    /// # Safety
    ///
    /// All threads of the cluster call this together.
    #[track_caller]
    pub unsafe fn sum<const N: usize>(&mut self, mine: [f32; N]) -> [f32; N] {
        const { assert!(N <= 4, "up to four numbers have room in a message") };
        let (lane, blocks) = (warp::lane_id(), cluster::size());
        if blocks == 1 {
            // A block that was launched without a cluster cannot send to itself.
            // SAFETY: the caller's contract.
            return mine.map(|mine| unsafe { block_sum(mine) });
        }
        let warps = thread::block_dim_x() / warp::WARP_SIZE;
        let bank = self.calls % 2;
        let slots = Self::slots().wrapping_add(bank as usize * CLUSTER_WARPS);
        let full = Self::full().after(bank);
        // SAFETY: all threads call this. There is a slot per warp. A slot is written again two
        // calls later, after a wait in the call between. That wait ends when every warp has sent
        // its sums of that call; a warp sends them only after it has read the slots of the call
        // before.
        unsafe {
            let mut sent = [0; 4];
            let mut i = 0;
            while i < N {
                sent[i] = warp_sum(mine[i]).to_bits();
                i += 1;
            }
            if thread::thread_idx_x() == 0 {
                // Each warp of the cluster sends a slot of 16 bytes to this block.
                full.arrive_expect_tx(16 * blocks * warps);
            }
            // Each lane sends to the block of its number; there are fewer blocks than lanes.
            if lane < blocks {
                let slot = (cluster::rank() * warps + warp::warp_id()) as usize;
                let to = arch::shared_address(slots.add(slot));
                arch::send_shared(to, lane, sent, full.address());
            }
            full.wait(self.calls / 2 % 2);
            self.calls += 1;
            let (mut sums, mut slot) = ([0.0; N], lane);
            while slot < blocks * warps {
                let of_warp = mem::load(slots.add(slot as usize));
                let mut i = 0;
                while i < N {
                    sums[i] += of_warp[i];
                    i += 1;
                }
                slot += warp::WARP_SIZE;
            }
            let mut i = 0;
            while i < N {
                sums[i] = warp_sum(sums[i]);
                i += 1;
            }
            sums
        }
    }
}
