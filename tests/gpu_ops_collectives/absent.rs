//! Tests that a deadline ends every collective whose peer is absent, by every plan.

use std::time::Duration;

use devcomm::{
    Algorithm, Buffer, Collective, CollectivePlan, Collectives, CollectivesOptions, CommConfig,
    Communicator, Error, LaunchError, Rank, ReduceOp, Result, Simulation, Stream, Window,
};
use devcomm_testing::machines::Gpus;
use half::bf16;

/// Elements of the buffers.
const LEN: usize = 1 << 16;

/// An operation of `Collectives`.
#[derive(Clone, Copy, Debug)]
enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
    /// All-reduce with RMSNorm of rows of this number of elements.
    RmsNorm(usize),
}
use Operation::{AllGather, AllReduce, AllToAll, ReduceScatter, RmsNorm};

/// An operation of a number of elements, or rows of RMSNorm, with its communicator.
struct Call {
    operation: Operation,
    collectives: Collectives,
    count: usize,
    windows: [Window<bf16>; 3],
}

impl Call {
    fn new(comm: &Communicator, operation: Operation, count: usize) -> Result<Self> {
        let windows = [comm.window(LEN)?, comm.window(LEN)?, comm.window(LEN)?];
        // Alone on the GPU, clusters of RMSNorm have room on small simulated GPUs.
        let options = CollectivesOptions::new().concurrent(1).lamport_bytes(128 << 10);
        Ok(Self { operation, collectives: options.build(comm)?, count, windows })
    }

    /// Enqueues the operation; without a stream, returns the plans that can do it.
    fn run(&self, ranks: usize, stream: Option<&Stream>) -> Result<Vec<CollectivePlan>> {
        let Self { operation, collectives, count, windows: [x, y, z] } = self;
        macro_rules! call {
            ($name:ident($($argument:expr),*)) => {
                match stream {
                    Some(stream) => collectives.$name($($argument,)* stream).map(|()| Vec::new()),
                    None => collectives.plans(&Collective::$name($($argument),*)),
                }
            };
        }
        let (one, all) = (x.slice(..*count)?, x.slice(..ranks * count)?);
        let (to_one, to_all) = (y.slice(..*count)?, y.slice(..ranks * count)?);
        match *operation {
            AllReduce => call!(all_reduce(&one, &to_one, ReduceOp::Sum)),
            ReduceScatter => call!(reduce_scatter(&all, &to_one, ReduceOp::Sum)),
            AllGather => call!(all_gather(&one, &to_all)),
            AllToAll => call!(all_to_all(&all, &to_all)),
            RmsNorm(hidden) => {
                let [rows, residual] = [x, y].map(|window| window.slice(..count * hidden));
                let (rows, residual, weight) = (rows?, residual?, z.slice(..hidden)?);
                let Some(stream) = stream else {
                    let call = Collective::all_reduce_rmsnorm(&rows, &residual, &weight, &rows);
                    return collectives.plans(&call);
                };
                collectives.all_reduce_rmsnorm(&rows, &residual, &weight, &rows, 0.1, stream)?;
                Ok(Vec::new())
            }
        }
    }
}

/// Runs an operation on rank 0, by the default plan or by one of those that can do it, and checks
/// that it ends. The other ranks come later, when rank 0 has dropped the object: what they store
/// there must not be freed. NCCL's kernels are left out, as only the end of their communicator ends
/// them. Returns the number of plans.
fn ends(rank: &Rank, (operation, count): (Operation, usize), plan: Option<usize>) -> Result<usize> {
    let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
    let call = Call::new(&comm, operation, count)?;
    let plans = call.run(rank.n_ranks(), None)?;
    if matches!(operation, RmsNorm(_)) && count == 1 {
        assert_eq!(plans[0].algorithm, Algorithm::Lamport, "one row is normalised by one kernel");
    }
    let plan = plan.map(|plan| plans[plan]);
    call.collectives.set_plan(plan);
    let run = |call: Call, limit: u64| {
        call.run(rank.n_ranks(), Some(&stream))?;
        Ok::<_, Error>(stream.synchronize_within(Duration::from_millis(limit)))
    };
    let is_aborted =
        |ended: &Result<()>| matches!(ended, Err(Error::Launch(LaunchError::KernelAborted { .. })));
    let is_nccls = plan.is_some_and(|plan| plan.algorithm == Algorithm::Nccl);
    rank.barrier()?;
    if is_nccls {
        return Ok(plans.len());
    }
    if rank.rank() == 0 {
        let ended = run(call, 30)?;
        assert!(is_aborted(&ended), "{operation:?} of {count} by {plan:?}: {ended:?}");
        rank.barrier()?;
    } else {
        rank.barrier()?;
        let ended = run(call, 50)?;
        assert!(ended.is_ok() || is_aborted(&ended), "{operation:?} by {plan:?}, late: {ended:?}");
    }
    rank.barrier()?;
    Ok(plans.len())
}

/// Rows of RMSNorm leave lanes of their cluster without a vector, which wait for the others.
#[test]
fn collectives_whose_peer_is_absent_end_at_a_deadline_by_every_plan() {
    for ranks in [2, 4] {
        let gpus = Gpus::from(Simulation::new(ranks).multiprocessors(4)).unchecked();
        gpus.run("collectives_whose_peer_is_absent_end_at_a_deadline_by_every_plan", |rank| {
            for operation in [AllReduce, ReduceScatter, AllGather, AllToAll] {
                for count in [64, 8192] {
                    for plan in 0..ends(rank, (operation, count), None)? {
                        ends(rank, (operation, count), Some(plan))?;
                    }
                }
            }
            for (hidden, rows) in [(2880, 1), (2880, 11), (2056, 3), (8192, 7), (64, 70)] {
                ends(rank, (RmsNorm(hidden), rows), None)?;
            }
            Ok(())
        });
    }
}
