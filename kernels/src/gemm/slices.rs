//! The division of a tile's terms among blocks that add their sums through the GPU's memory: blocks
//! of a cluster can then share what they load, and any number of blocks can work on a tile.

use cuda_std::atomic::Order;

use super::prelude::*;
use super::shapes::{Shape, WARPGROUP_N};
use super::swapped_tiles::{WARPGROUP_BARRIER, four};

/// The blocks that compute a tile together, each a slice of the terms. The last block to have its
/// sums adds those of all, in the order of the slices, and stores them. No block waits for another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Slices {
    /// How many blocks.
    pub count: u32,
    /// Room for the sums of each block's tile, `M * N` of its [`Shape`], at a multiple of 16 bytes.
    pub sums: *mut f32,
    /// A number for each block, of which a tile's warpgroups use one each: 0 except in a launch.
    pub arrived: *mut u32,
}

impl Slices {
    /// Adds the sums of all slices of a warpgroup's part of a tile if the other blocks have theirs,
    /// or else leaves this block's to the last one. Returns whether they were added. The memory is
    /// as the fields say, and no other kernel uses it. The multiplying warpgroups of the blocks of
    /// all slices call it once for the tile, and no block calls it for two tiles.
    pub(super) unsafe fn add<S: Shape>(self, tile: u32, slice: u32, sums: &mut S::Sums) -> bool {
        let (thread, warpgroups) = (thread::thread_idx_x(), S::N / WARPGROUP_N);
        let warpgroup = thread / 128;
        // A thread has a vector of each eight rows.
        let place = |slice: u32, eight: u32| {
            let group = (tile * self.count + slice) * (S::M / 8) + eight;
            self.sums.wrapping_add(4 * (group * 128 * warpgroups + thread) as usize)
        };
        let barrier = WARPGROUP_BARRIER + warpgroup;
        // SAFETY: the caller guarantees the memory. A thread writes vectors of its own; the last
        // block reads them after all have arrived. One thread, between two barriers of its
        // warpgroup, releases and acquires for it, and writes its shared word.
        unsafe {
            let is_last = shared_array![u32; 2].add(warpgroup as usize);
            for eight in 0..S::M / 8 {
                let vector = Vec16::<f32>::from_bits(four(sums.as_ref(), eight).map(f32::to_bits));
                mem::store_vec(place(slice, eight), vector);
            }
            thread::named_barrier_sync(barrier, 128);
            if thread % 128 == 0 {
                let number = (tile * warpgroups + warpgroup) as usize;
                let arrived = AtomicU32::from_ptr(self.arrived.wrapping_add(number));
                let last = arrived.fetch_add(1, Order::AcqRel, Scope::Gpu) == self.count - 1;
                if last {
                    arrived.store(0, Order::Relaxed, Scope::Gpu); // For the next launch.
                }
                mem::store(is_last, u32::from(last));
            }
            thread::named_barrier_sync(barrier, 128);
            if mem::load(is_last.cast_const()) == 0 {
                return false;
            }
            for slice in 0..self.count {
                for eight in 0..S::M / 8 {
                    let vector = mem::load_vec(place(slice, eight).cast_const()).to_bits();
                    for i in 0..4 {
                        let sum = &mut sums.as_mut()[4 * eight as usize + i];
                        let more = f32::from_bits(vector[i]);
                        *sum = if slice == 0 { more } else { *sum + more };
                    }
                }
            }
        }
        true
    }
}
