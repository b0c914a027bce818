//! A kernel that prints.

// ANCHOR: print
use cuda_std::prelude::*;
use nccl_device::DevComm;

/// Prints the rank and the number of each block, in the block's first thread.
#[kernel]
pub fn hello(comm: DevComm, x: f32) {
    if thread::thread_idx_x() == 0 {
        let (rank, block) = (comm.rank(), thread::block_idx_x());
        cuda_std::println!("rank {rank} block {block}: x is {x}");
    }
}
// ANCHOR_END: print
