//! All-to-all by a kernel that puts every message over the network (GIN).
//!
//! ```text
//! cargo xtask run gin_alltoall                     # every GPU, or four simulated ones
//! DEVCOMM_SIMULATE=3 cargo xtask run gin_alltoall  # three simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./gin_alltoall
//! ```
//!
//! The kernel is `examples/kernels/src/gin_alltoall.rs`. Without an RDMA card, devcomm's GIN plugin
//! replaces the network. The program checks every element, and that the kernel writes nothing after
//! the messages.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, GinConnectionType, GinLoopback, Rank, World};
use devcomm_examples::{KERNELS, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::messages::{count_wrong, sent};

/// Each block has its own signal. There are fewer GIN contexts, so that some blocks share one.
const BLOCKS: u32 = 8;
const CONTEXTS: u32 = 5;
const THREADS: u32 = 64;
/// Bytes per peer: messages need no alignment.
const COUNTS: [usize; 6] = [1, 7, 64, 1001, 4096, 65_537];

fn main() -> ExitCode {
    // This sets NCCL's environment variables, so it must precede other uses of a GPU or NCCL.
    let world = World::builder().gin_loopback(GinLoopback::unless_rdma()).from_env();
    run(world, all_to_alls)
}

fn all_to_alls(rank: &Rank) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    let requirements = DevCommRequirements::new()
        .gin_connection(GinConnectionType::Full)
        .gin_contexts(CONTEXTS)
        .gin_signals(BLOCKS)
        .world_gin_barriers(BLOCKS);
    let dev_comm = comm.create_dev_comm(requirements)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    for count in COUNTS {
        let len = n_ranks * count + 1; // The last element must stay as it is.
        let (send, recv) = (comm.window::<u8>(len)?, comm.window::<u8>(len)?);
        send.copy_from_host(&sent(count as u64, me, n_ranks, count))?;
        recv.fill_bytes(0xff)?;
        // SAFETY: the windows have `count` elements per rank and live until the ranks' barrier
        // below. The kernel begins with a barrier of all ranks.
        unsafe {
            let exchange = kernels::gin_alltoall::args(&dev_comm, &send, &recv, count);
            exchange.grid(BLOCKS).block(THREADS).launch(&stream)?;
        };

        let mut got = vec![0; len];
        stream.copy_to_host(&recv, &mut got)?;
        let wrong = count_wrong(count as u64, me, n_ranks, count, &got);
        ensure!(wrong == 0, "rank {me}, {count} bytes per pair: {wrong} are wrong");
        rank.barrier()?;
        if rank.is_root() {
            println!("{count:6} bytes per pair: 0 wrong");
        }
    }
    Ok(())
}
