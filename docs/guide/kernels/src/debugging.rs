//! Printing.

// ANCHOR: print
use cuda_std::prelude::*;
use nccl_device::DevComm;

/// The first thread of each block says who it is.
#[kernel]
pub fn hello(comm: DevComm, x: f32) {
    if thread::thread_idx_x() == 0 {
        let (rank, block) = (comm.rank(), thread::block_idx_x());
        cuda_std::println!("rank {rank} block {block}: x is {x}");
    }
}
// ANCHOR_END: print
