//! One-sided operations: a rank writes into another one's window and signals that it did; the other
//! only waits.
//!
//! ```text
//! cargo xtask run one_sided  # every GPU, at least two
//! torchrun --no-python --nproc-per-node 4 -- ./one_sided
//! ```

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{Buffer, Rank, Signal, WaitSignalDesc, World};
use devcomm_testing::machines::run;

/// Elements that a rank sends to each other one.
const COUNT: usize = 1 << 16;
const ROUNDS: usize = 3;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

fn run_rank(rank: &Rank) -> Result<()> {
    ensure!(rank.n_ranks() >= 2, "there is one GPU, but this takes at least two");
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (own, n) = (rank.rank(), rank.n_ranks());
    ensure!(
        comm.properties()?.host_rma,
        "NCCL offers no one-sided operations between these ranks (hostRmaSupport is false)"
    );

    // What is put must itself be in a window. A place for each rank, so that nobody writes another
    // one's.
    let (source, target) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(n * COUNT)?);
    let peers: Vec<usize> = (0..n).filter(|&peer| peer != own).collect();

    for round in 0..ROUNDS {
        source.copy_from_host(&[value(own, round); COUNT])?;

        // Put to every other rank, at this rank's place there. The offset counts elements.
        for &peer in &peers {
            comm.put_signal(&source, &target, own * COUNT, Signal::to(peer), &stream)?;
        }

        // One wait for one signal of each. Work that comes later in this stream sees what they put
        // before it.
        let signals: Vec<_> = peers.iter().map(|&peer| WaitSignalDesc::from(peer)).collect();
        comm.wait_signal(&signals, &stream)?;
        stream.synchronize()?;

        let mut received = vec![0.0; COUNT];
        for &peer in &peers {
            target.slice(peer * COUNT..(peer + 1) * COUNT)?.copy_to_host(&mut received)?;
            let expected = value(peer, round);
            let wrong = received.iter().filter(|&&x| x != expected).count();
            ensure!(wrong == 0, "round {round}: {wrong} elements from rank {peer} are wrong");
        }
        if rank.is_root() {
            println!("round {round}: {} x {COUNT} elements arrived", peers.len());
        }

        // A signal alone: "I have read it, you may write again." Without it the next round would
        // race with the copies above.
        for &peer in &peers {
            comm.signal(Signal::to(peer), &stream)?;
        }
        comm.wait_signal(&signals, &stream)?;
    }
    stream.synchronize()?;
    Ok(())
}

/// What rank `rank` sends in round `round`.
fn value(rank: usize, round: usize) -> f32 {
    (100 * round + rank) as f32
}
