//! Checks that communicators work, also after a test has provoked failures.

use devcomm::{Communicator, DevCommRequirements, Error, KERNELS, Rank, ReduceOp, Stream, kernels};

const COUNT: usize = 1000;

/// Checks that NCCL's collectives work: an all-reduce over the communicator gives the right sums.
///
/// # Errors
///
/// The errors are those of the host API.
///
/// # Panics
///
/// If a sum is wrong.
pub fn require_works(comm: &Communicator, stream: &Stream) -> Result<(), Error> {
    let (send, recv) = (comm.mem_alloc::<u32>(COUNT)?, comm.mem_alloc::<u32>(COUNT)?);
    let multiples = |factor: usize| (0..COUNT).map(|i| (i * factor) as u32).collect::<Vec<_>>();
    send.copy_from_host(&multiples(comm.rank() + 1))?;
    comm.all_reduce(&send, &recv, ReduceOp::Sum, stream)?;
    stream.synchronize()?;
    let mut sums = vec![0; COUNT];
    recv.copy_to_host(&mut sums)?;
    assert_eq!(sums, multiples((1..=comm.n_ranks()).sum()), "{comm:?}");
    Ok(())
}

/// Checks that kernels on a communicator work: an all-reduce by load and store gives the right
/// sums.
///
/// # Errors
///
/// The errors are those of the host API.
///
/// # Panics
///
/// If a sum is wrong.
pub fn require_kernels_work(
    rank: &Rank,
    comm: &Communicator,
    stream: &Stream,
) -> Result<(), Error> {
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    rank.load(&KERNELS)?;
    let multiples = |factor: usize| (0..COUNT).map(|i| (i * factor) as f32).collect::<Vec<_>>();
    send.copy_from_host(&multiples(comm.rank() + 1))?;
    let sum = kernels::lsa_allreduce::args(&dev_comm, &send, &recv, COUNT);
    // SAFETY: both windows have `COUNT` elements in every rank. (The launch cannot check that for a
    // communicator without a world.)
    unsafe { sum.grid(2).block(128).into_unsafe().launch(stream)? };
    stream.synchronize()?;
    let mut sums = vec![0.0; COUNT];
    recv.copy_to_host(&mut sums)?;
    assert_eq!(sums, multiples((1..=comm.n_ranks()).sum()), "{comm:?}");
    Ok(())
}
