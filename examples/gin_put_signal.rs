//! Ping-pong over the network between two kernels, with the time of a round trip.
//!
//! ```text
//! cargo xtask run gin_put_signal                     # every GPU, or four simulated ones
//! DEVCOMM_SIMULATE=2 cargo xtask run gin_put_signal  # two simulated GPUs
//! torchrun --no-python --nproc-per-node 2 -- ./gin_put_signal
//! ```
//!
//! The kernel is `kernels/src/gin_put_signal.rs`. Each even rank puts bytes to the next odd rank,
//! which puts them back. Every byte of every round is checked. `devcomm-bench put` compares the
//! times with those of NCCL's host API.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, GinConnectionType, GinLoopback, KERNELS, Rank, World, kernels};
use devcomm_testing::machines::run;
use devcomm_testing::messages::datum;

/// One warp is enough to put.
const WARP: u32 = 32;
/// Message sizes in bytes.
const SIZES: [usize; 5] = [1, 8, 1 << 10, 64 << 10, 1 << 20];
/// Rounds per size, an odd number: the median of their times is printed. Simulated GPUs are slow.
const ROUNDS: usize = 101;
const SIMULATED_ROUNDS: usize = 5;

fn main() -> ExitCode {
    // This sets NCCL's environment variables, so it must precede other uses of a GPU or NCCL.
    let world = World::builder().gin_loopback(GinLoopback::unless_rdma()).from_env();
    run(world, ping_pong)
}

fn ping_pong(rank: &Rank) -> Result<()> {
    let (comm, me, n_ranks) = (rank.communicator()?, rank.rank(), rank.n_ranks());
    ensure!(n_ranks >= 2, "there is one GPU, but ping-pong takes two");
    let requirements =
        DevCommRequirements::new().gin_connection(GinConnectionType::Full).gin_signals(1);
    let dev_comm = comm.create_dev_comm(requirements)?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let nanos = comm.mem_alloc::<u64>(ROUNDS)?;
    let rounds = if rank.is_simulated() { SIMULATED_ROUNDS } else { ROUNDS };
    for bytes in SIZES {
        let len = bytes * rounds;
        let even_rank = me & !1;
        let message: Vec<u8> = (0..len).map(|i| datum(bytes as u64, even_rank, i)).collect();
        let (send, recv) = (comm.window::<u8>(len)?, comm.window::<u8>(len)?);
        send.copy_from_host(&message)?;
        recv.fill_bytes(0xff)?;
        rank.barrier()?;
        // SAFETY: the windows and `nanos` have room for every round, in every rank, and nothing
        // else uses them until the barrier below, when the kernel has ended in every rank.
        unsafe {
            let ping_pong = kernels::gin_put_signal::args(
                &dev_comm,
                &send,
                &recv,
                bytes,
                rounds as u32,
                &nanos,
            );
            ping_pong.grid(1).block(WARP).launch(&stream)?;
        }
        stream.synchronize()?;
        rank.barrier()?;

        // Both ranks of a pair have the even rank's message. A last even rank has no partner.
        let has_partner = me ^ 1 < n_ranks;
        let mut got = vec![0; len];
        stream.copy_to_host(&recv, &mut got)?;
        ensure!(!has_partner || got == message, "rank {me}: a message of {bytes} bytes is wrong");
        let mut times = vec![0; rounds];
        nanos.copy_to_host(&mut times)?;
        times.sort_unstable();
        match (rank.is_root(), rank.is_simulated()) {
            (true, true) => println!("{bytes:8} bytes: 0 wrong"),
            (true, false) => {
                let micros = times[rounds / 2] as f64 / 1e3;
                println!("{bytes:8} bytes: 0 wrong, {micros:.2} us per round trip");
            }
            _ => {}
        }
    }
    Ok(())
}
