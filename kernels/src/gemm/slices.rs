//! The division of a tile's terms into slices, one for each of several clusters of blocks. They add
//! their sums through the GPU's global memory, which blocks of different clusters share. The blocks
//! of one cluster are then free to compute neighbouring tiles, and share what they load; and more
//! blocks can work on a tile than a cluster may have.

use cuda_std::atomic::Order;
use cuda_std::tile::{Scheduler, Work};

use super::prelude::*;
use super::shapes::{Shape, WARPGROUP_N};
use super::swapped_stores::{WARPGROUP_BARRIER, four};

/// The slices of a tile's terms, and the memory through which the blocks that compute them add
/// their sums. Of the blocks of a tile, the last one to have its sums adds the sums of all blocks,
/// in the order of the slices, and stores them. No block waits for another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, KernelParam)]
pub struct Slices {
    /// The number of slices, and so of blocks that compute a tile together.
    pub count: u32,
    /// Room for the sums of each slice of each tile, `M * N` of the kernel's [`Shape`], at a
    /// multiple of 16 bytes.
    pub sums: *mut f32,
    /// Counters of the slices whose sums are stored, one for each multiplying warpgroup of each
    /// tile: warpgroup `w` of tile `t` has index `t * (N / 64) + w`, with `N` of the kernel's
    /// [`Shape`]. The host allocates one for each resident block, which is enough, since a tile has
    /// at least as many blocks as warpgroups. All are 0 before and after a launch.
    pub arrived: *mut u32,
}

impl Slices {
    /// Stores the sums of a slice of a warpgroup's part of a tile. If those of all other slices are
    /// stored already, it also replaces `sums` by the sums of all slices, and returns true.
    ///
    /// The memory is as the fields say, and no other kernel uses it. The multiplying warpgroups of
    /// the blocks of all slices call this once for the tile, and no block calls it for two tiles.
    pub(super) unsafe fn add<S: Shape>(self, tile: u32, slice: u32, sums: &mut S::Sums) -> bool {
        let (thread, warpgroups) = (thread::thread_idx_x(), S::N / WARPGROUP_N);
        let warpgroup = thread / 128;
        // A thread has a vector of four sums of each group of eight rows.
        let place = |slice: u32, eight: u32| {
            let group = (tile * self.count + slice) * (S::M / 8) + eight;
            self.sums.wrapping_add(4 * (group * 128 * warpgroups + thread) as usize)
        };
        let barrier = WARPGROUP_BARRIER + warpgroup;
        // SAFETY: the caller guarantees the memory. A thread writes vectors of its own; the last
        // block reads them after all blocks have arrived. One thread of a warpgroup, between two
        // barriers of the warpgroup, releases and acquires for it, and writes its shared word.
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

/// The tiles of a [`Schedule`], or slices of their terms.
#[derive(Clone, Copy)]
pub(super) struct SlicedSchedule {
    pub(super) schedule: Schedule,
    pub(super) slices: Option<Slices>,
}

impl Scheduler for SlicedSchedule {
    type Work = Work;

    fn first(&self) -> Option<Work> {
        self.schedule.first()
    }

    fn next(&self, work: Work) -> Option<Work> {
        self.schedule.next(work)
    }

    fn steps(&self, work: Work) -> (u32, u32) {
        let Some(Slices { count, .. }) = self.slices else { return self.schedule.steps(work) };
        let first = |slice| slice * self.schedule.steps / count;
        let slice = work.tile % count;
        (first(slice), first(slice + 1))
    }
}
