//! Communicators: of all ranks, split by color, shrunk, grown, and non-blocking.
//!
//! ```text
//! cargo xtask run communicators  # every GPU, at least two
//! torchrun --no-python --nproc-per-node 4 -- ./communicators
//! ```

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use devcomm::{CommConfig, Communicator, Rank, ReduceOp, ShrinkMode, Stream, UniqueId, World};
use devcomm_testing::machines::run;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

fn run_rank(rank: &Rank) -> Result<()> {
    ensure!(rank.n_ranks() >= 2, "there is one GPU, but this takes at least two");
    let (comm, stream, config) = (rank.communicator()?, rank.stream()?, CommConfig::new());
    let (me, n) = (rank.rank(), rank.n_ranks());

    // What NCCL can do between these ranks.
    let properties = comm.properties()?;
    if rank.is_root() {
        println!("{n} ranks, NCCL {}, {properties:?}", comm.library().version());
    }
    ensure!(sum_of_ranks(comm, &stream)? == sum(0..n));

    // A split: ranks of one color form a communicator, here the even and the odd ones. Ranks with
    // equal keys keep their order.
    let (parity, key) = (me % 2, 0);
    let half = comm.split(Some(parity as i32), key, &config)?.context("this rank has a color")?;
    ensure!(half.rank() == me / 2);
    ensure!(sum_of_ranks(&half, &stream)? == sum(0..half.n_ranks()));
    // Destroys the communicator, as dropping it does. Collective.
    half.destroy()?;

    // A communicator without the last rank, which does not call `shrink`. After a failed operation,
    // `ShrinkMode::Abort` first aborts the operations in flight.
    let last = n - 1;
    let small = match me == last {
        true => None,
        false => Some(comm.shrink(&[last], ShrinkMode::Idle, &config)?),
    };
    if let Some(small) = &small {
        ensure!(sum_of_ranks(small, &stream)? == sum(0..last));
    }

    // The last rank joins again, by a unique id that rank 0 of the smaller communicator creates.
    let id = match &small {
        Some(small) if me == 0 => Some(small.unique_id()?),
        _ => None,
    };
    let bytes = rank.broadcast(0, id.as_ref().map_or(&[], |id| &id.as_bytes()[..]))?;
    let grown = match &small {
        Some(small) => small.grow(n, id.as_ref(), &config)?,
        None => {
            let id = UniqueId::from_bytes(&bytes).context("rank 0 sends an id")?;
            Communicator::join_grown(rank.library(), rank.context(), &id, last, n, &config)?
        }
    };
    ensure!(sum_of_ranks(&grown, &stream)? == sum(0..n));

    // A non-blocking communicator initializes while this thread does other work.
    let nonblocking = rank.new_communicator(&config.blocking(false))?;
    let mut polls = 0u64;
    while !nonblocking.is_ready()? {
        polls += 1;
        std::thread::yield_now();
    }
    if rank.is_root() {
        println!("polled the non-blocking communicator {polls} times until it was ready");
    }
    ensure!(sum_of_ranks(&nonblocking, &stream)? == sum(0..n));
    Ok(())
}

/// Returns the sum of the rank numbers of `comm`, by an all-reduce.
fn sum_of_ranks(comm: &Communicator, stream: &Stream) -> Result<u64> {
    let memory = comm.mem_alloc::<u64>(1)?;
    memory.copy_from_host(&[comm.rank() as u64])?;
    // In place: source and destination are the same memory.
    comm.all_reduce(&memory, &memory, ReduceOp::Sum, stream)?;
    let mut sum = [0];
    stream.copy_to_host(&memory, &mut sum)?;
    Ok(sum[0])
}

fn sum(ranks: std::ops::Range<usize>) -> u64 {
    ranks.map(|rank| rank as u64).sum()
}
