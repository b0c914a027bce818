//! Tests of several threads that work for one rank.

use devcomm::{
    CommConfig, Communicator, DevCommRequirements, Error, KERNELS, Rank, ReduceOp, kernels,
};
use devcomm_testing::machines::on_gpus;

const COUNT: usize = 1000;
const BLOCKS: u32 = 2;

/// Sums `value` over the ranks by a kernel, repeatedly, and returns the last sum.
fn reduce(comm: &Communicator, value: f32) -> Result<f32, Error> {
    let stream = comm.context().stream()?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    let (send, recv) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    for _ in 0..5 {
        stream.fill(&send, value)?;
        let sum = kernels::lsa_allreduce::<f32>::args(&dev, &send, &recv, COUNT);
        sum.grid(BLOCKS).block(128).launch(&stream)?;
        comm.all_reduce(&recv, &send, ReduceOp::Max, &stream)?;
    }
    let mut sums = vec![0.0; COUNT];
    stream.copy_to_host(&send, &mut sums)?;
    Ok(sums[COUNT - 1])
}

fn two_threads_work_for_a_rank(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let one = rank.new_communicator(&CommConfig::new())?;
    let other = rank.new_communicator(&CommConfig::new())?;
    let sums = rank.context().scope(|scope| {
        // The communicator moves to the thread, which drops it.
        let thread = scope.spawn("other", move || reduce(&other, 10.0))?;
        Ok::<_, Error>([reduce(&one, 1.0)?, thread.join()?])
    })?;
    let n = rank.n_ranks() as f32;
    assert_eq!(sums, [n, 10.0 * n]);
    Ok(())
}

#[test]
fn two_threads_work_for_a_rank_on_two_gpus() {
    on_gpus("two_threads_work_for_a_rank_on_two_gpus", 2, two_threads_work_for_a_rank);
}
