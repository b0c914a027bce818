//! NCCL's host one-sided operations: a rank puts into a peer's window and signals it; the peer only
//! waits for the signal.
//!
//! ```text
//! cargo xtask run one_sided  # every GPU, at least two
//! torchrun --no-python --nproc-per-node 4 -- ./one_sided
//! ```

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{Buffer, Rank, Signal, WaitSignalDesc, World};
use devcomm_testing::machines::run;

/// Elements that a rank sends to each peer.
const COUNT: usize = 1 << 16;
const ROUNDS: usize = 3;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

fn run_rank(rank: &Rank) -> Result<()> {
    ensure!(rank.n_ranks() >= 2, "there is one GPU, but this takes at least two");
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (me, n) = (rank.rank(), rank.n_ranks());
    ensure!(
        comm.properties()?.host_rma,
        "NCCL offers no one-sided operations between these ranks (hostRmaSupport is false)"
    );

    // A put's source must be in a window too. The target has one slot per source rank.
    let (source, target) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(n * COUNT)?);
    let peers: Vec<usize> = (0..n).filter(|&peer| peer != me).collect();

    for round in 0..ROUNDS {
        source.copy_from_host(&[value(me, round); COUNT])?;

        // Put to this rank's slot in every peer. The offset is in elements.
        for &peer in &peers {
            comm.put_signal(&source, &target, me * COUNT, Signal::to(peer), &stream)?;
        }

        // One wait for one signal of each peer. Later work in this stream sees what the peers put
        // before they signaled.
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

        // A signal without data: this rank has read the peer's slot. Otherwise the next round's
        // puts would race with the copies above.
        for &peer in &peers {
            comm.signal(Signal::to(peer), &stream)?;
        }
        comm.wait_signal(&signals, &stream)?;
    }
    stream.synchronize()?;
    Ok(())
}

/// Returns the element that rank `rank` sends in round `round`.
fn value(rank: usize, round: usize) -> f32 {
    (100 * round + rank) as f32
}
