//! All-to-all of short messages by NCCL's low-latency (LL) protocol.
//!
//! ```text
//! cargo xtask run ll_alltoall                     # every GPU, or four simulated ones
//! DEVCOMM_SIMULATE=3 cargo xtask run ll_alltoall  # three simulated GPUs
//! torchrun --no-python --nproc-per-node 4 -- ./ll_alltoall
//! ```
//!
//! The kernel is `examples/kernels/src/ll_alltoall.rs`. Each store carries data and a flag, so it
//! needs neither barrier nor fence. Every element is checked.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, LlA2a, Rank, World};
use devcomm_examples::{KERNELS, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::messages::{count_wrong, sent};

/// The largest number of blocks of a launch.
const BLOCKS: u32 = 16;
const THREADS: u32 = 256;
/// Maximum number of 8-byte words that a block sends to each peer before it waits.
const CHUNK: u32 = 256;
/// The numbers of elements that are sent to each peer: powers of two, and odd numbers, which do not
/// fill the last word.
const COUNTS: [usize; 10] = [1, 2, 3, 8, 31, 128, 512, 1023, 2048, 8192];

fn main() -> ExitCode {
    run(World::from_env(), all_to_alls)
}

fn all_to_alls(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    let (me, n_ranks) = (rank.rank(), rank.n_ranks());
    // The message slots are a resource of the device communicator; `exchange` is its handle.
    let mut requirements = DevCommRequirements::new();
    let key = requirements.add(LlA2a {
        blocks: BLOCKS,
        max_elements: CHUNK * n_ranks as u32,
        element_size: 8,
    });
    let dev_comm = comm.create_dev_comm(requirements)?;
    let exchange = dev_comm.resource(key)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;

    for count in COUNTS {
        let len = count * n_ranks;
        let (send, recv) = (comm.window::<f32>(len)?, comm.window::<f32>(len)?);
        send.copy_from_host(&sent(count as u64, me, n_ranks, count))?;
        recv.fill_bytes(0xff)?;
        // A message between two ranks is sent in words of 8 bytes, two f32 each. There are as many
        // blocks as give each thread one word, or at most `BLOCKS`.
        let words = (count.div_ceil(2) * n_ranks) as u32;
        let blocks = words.div_ceil(THREADS).clamp(1, BLOCKS);
        // SAFETY: the windows have `count` elements for every rank and live until the stream is
        // idle below; `exchange` is this device communicator's, and every rank passes the same.
        unsafe {
            let all = kernels::ll_alltoall::args(&dev_comm, exchange, &send, &recv, count);
            all.grid(blocks).block(THREADS).launch(&stream)?;
        }

        let mut got = vec![0.0; len];
        stream.copy_to_host(&recv, &mut got)?;
        let wrong = count_wrong(count as u64, me, n_ranks, count, &got);
        ensure!(wrong == 0, "rank {me}, {count} elements per pair: {wrong} are wrong");
        rank.barrier()?;
        if rank.is_root() {
            let bytes = count * size_of::<f32>();
            println!("{bytes:6} bytes per pair, {blocks:2} blocks: 0 wrong");
        }
    }
    Ok(())
}
