//! Windows: memory of each rank that every other rank can read and write, by kernels or by address.
//!
//! ```text
//! cargo xtask run windows  # every GPU of this machine
//! torchrun --no-python --nproc-per-node 4 -- ./windows
//! ```

use std::process::ExitCode;

use anyhow::{Result, ensure};
use devcomm::{
    DevCommRequirements, DeviceSlice, Error, KERNELS, Rank, WindowFlags, World, group, kernels,
};
use devcomm_testing::machines::run;

const COUNT: usize = 1 << 20;
const BLOCKS: u32 = 32;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

fn run_rank(rank: &Rank) -> Result<()> {
    let comm = rank.communicator()?;
    // This program uses load and store only, so all ranks must be in one LSA team.
    comm.require_single_lsa_team()?;
    let (me, n) = (rank.rank(), rank.n_ranks());

    // `comm.window(COUNT)` allocates and registers. A group registers several windows in one
    // exchange between the ranks; they are valid after the group.
    let (send, recv) = (comm.mem_alloc::<f32>(COUNT)?, comm.mem_alloc::<f32>(COUNT)?);
    let (send, recv) = group(|_| {
        let flags = WindowFlags::COLL_SYMMETRIC;
        Ok::<_, Error>((comm.register_window(&send, flags)?, comm.register_window(&recv, flags)?))
    })?;
    ensure!(send.is_valid() && recv.is_valid());
    send.copy_from_host(&vec![me as f32 + 1.0; COUNT])?;

    // Every peer's window memory is mapped on this GPU. A copy waits only for this rank's work, so
    // a barrier precedes the reads, and another follows them, before any rank writes again.
    rank.barrier()?;
    for peer in 0..n {
        let address = send.lsa_pointer(peer, 0)?; // of element 0
        // SAFETY: the peer's window has `COUNT` elements there; no rank writes or closes it before
        // the barrier below.
        let theirs = unsafe { DeviceSlice::<f32>::from_raw_parts(rank.context(), address, COUNT) };
        let mut first = [0.0; 4];
        theirs.copy_to_host(&mut first)?;
        ensure!(first == [peer as f32 + 1.0; 4], "rank {peer}'s window holds {first:?}");
        if rank.is_root() {
            println!("rank {peer}'s window is at {address:#x} here");
        }
    }
    rank.barrier()?;

    // A kernel has windows as arguments: this one sums all ranks' `send` into every rank's `recv`.
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    rank.load(&KERNELS)?;
    let stream = rank.stream()?;
    let sum =
        || kernels::lsa_allreduce::args(&dev_comm, &send, &recv, COUNT).grid(BLOCKS).block(256);
    sum().launch(&stream)?;
    let mut sums = vec![0.0; COUNT];
    stream.copy_to_host(&recv, &mut sums)?;
    let expected = (1..=n).sum::<usize>() as f32;
    ensure!(sums.iter().all(|&sum| sum == expected), "a sum is not {expected}");

    // A launch with a closed window fails; the memory is freed when the window is dropped.
    recv.close()?;
    let refused = sum().launch(&stream);
    match refused {
        Err(error) if rank.is_root() => println!("{error}"),
        Err(_) => {}
        Ok(()) => anyhow::bail!("a launch accepted a closed window"),
    }
    Ok(())
}
