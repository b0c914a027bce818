//! What the GPU tests share. Each file of them is one program, and includes this.
#![allow(dead_code, reason = "each program uses a part of it")]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use devcomm::{
    Communicator, DevCommRequirements, Error, KERNELS, LaunchConfig, Rank, ReduceOp, Stream, World,
    kernels,
};

/// Runs `body` with a world of `wanted` GPUs, one thread a rank, or skips the test where such a world cannot run the kernels.
/// Prints which, for `cargo xtask test`.
pub fn with_gpus(name: &str, wanted: usize, body: impl FnOnce(World)) {
    match world_of(wanted) {
        Ok(world) => {
            body(world);
            println!("GPU-TEST {name}: ran");
        }
        Err(reason) => println!("GPU-TEST {name}: skipped ({reason})"),
    }
}

/// As [`with_gpus`], with `body` on every rank.
pub fn on_gpus(name: &str, wanted: usize, body: impl Fn(&Rank) -> Result<(), Error> + Sync) {
    with_gpus(name, wanted, |world| {
        if let Err(error) = world.run(body) {
            panic!("{error}");
        }
    });
}

/// Checks that a communicator works: an all-reduce over all its ranks gives the right sums.
pub fn require_works(comm: &Communicator, stream: &Stream) -> Result<(), Error> {
    const COUNT: usize = 1000;
    let (send, recv) = (comm.mem_alloc::<u32>(COUNT)?, comm.mem_alloc::<u32>(COUNT)?);
    let multiples = |of: usize| (0..COUNT).map(|i| (i * of) as u32).collect::<Vec<_>>();
    send.copy_from_host(&multiples(comm.rank() + 1))?;
    comm.all_reduce(&send, &recv, ReduceOp::Sum, stream)?;
    stream.synchronize()?;
    let mut sums = vec![0; COUNT];
    recv.copy_to_host(&mut sums)?;
    assert_eq!(sums, multiples((1..=comm.n_ranks()).sum()), "{comm:?}");
    Ok(())
}

/// Checks that kernels of a communicator's ranks reach each other: an all-reduce by load and store gives the right sums.
pub fn require_kernels_work(
    rank: &Rank,
    comm: &Communicator,
    stream: &Stream,
) -> Result<(), Error> {
    const COUNT: usize = 1000;
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    let compiled = rank.load(&KERNELS)?;
    let multiples = |of: usize| (0..COUNT).map(|i| (i * of) as f32).collect::<Vec<_>>();
    send.copy_from_host(&multiples(comm.rank() + 1))?;
    let args = (&dev_comm, &send, &recv, COUNT);
    let kernel = kernels::lsa_allreduce::<f32>;
    // SAFETY: both windows have `COUNT` elements in every rank, every rank does the same, and the kernel ends with a
    // barrier.
    unsafe { compiled.launch(stream, kernel, LaunchConfig::new(2, 128), args)? };
    stream.synchronize()?;
    let mut sums = vec![0.0; COUNT];
    recv.copy_to_host(&mut sums)?;
    assert_eq!(sums, multiples((1..=comm.n_ranks()).sum()), "{comm:?}");
    Ok(())
}

/// A world of `wanted` GPUs, or why there is none here that runs the kernels. An error that the machine is not to blame for
/// is a panic.
pub fn world_of(wanted: usize) -> Result<World, String> {
    static KNOWN: Mutex<Option<HashMap<usize, Option<String>>>> = Mutex::new(None);
    let world = World::threads(wanted).map_err(of_the_machine)?;
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = known
        .get_or_insert_default()
        .entry(wanted)
        .or_insert_with(|| world.run(probe).map_err(of_the_machine).err());
    missing.clone().map_or(Ok(world), Err)
}

/// Does, in little, what every test rests on: kernels that the GPU takes, and memory that all ranks reach by load and store.
fn probe(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    comm.window::<u32>(1)?;
    Ok(())
}

/// The reason to skip: what is wrong with the machine, not with devcomm. Only for errors of a probe; a test that fails so
/// after its probe has failed.
pub fn of_the_machine(error: Error) -> String {
    assert!(error.is_of_the_machine(), "{error}");
    error.to_string()
}
