//! Tests of all-reduces by loads from the peers: `Algorithm::Pull`.

use devcomm::{
    Algorithm, Buffer, Collective, CollectivePlan, Collectives, CollectivesOptions, Rank, ReduceOp,
    Result,
};
use devcomm_testing::machines::on_gpus;
use half::{bf16, f16};

use super::{Number, Sent};

/// Returns collectives that use loads wherever they can.
fn by_loads(rank: &Rank) -> Result<Collectives> {
    let collectives = CollectivesOptions::new().build(rank.communicator()?)?;
    let multiprocessors = rank.context().limits().multiprocessors;
    let blocks = if rank.is_simulated() { 2 } else { multiprocessors.min(128) };
    collectives.set_plan(Some(CollectivePlan { algorithm: Algorithm::Pull, blocks, threads: 128 }));
    Ok(collectives)
}

/// Runs sums one after the other without a wait, in and out of place; each has its own memory.
fn sums<T: Number>(rank: &Rank) -> Result<()> {
    let (comm, stream, op) = (rank.communicator()?, rank.stream()?, ReduceOp::Sum);
    let collectives = by_loads(rank)?;
    // The lengths are below and around those of a vector and of a row, or need several rounds of
    // the unrolled loop.
    let counts = match rank.is_simulated() {
        true => &[1, 3, 7, 8, 1025, 1030, 9_001, 40_003][..],
        false => &[1, 7, 1025, 100_003, 1 << 18, 1 << 20, (1 << 20) + 5, 9 << 20],
    };
    let mut all = Vec::new();
    for (launch, &count) in [counts, counts].concat().iter().enumerate() {
        let window = |len| Ok::<_, devcomm::Error>(comm.window::<T>(len)?.device_slice());
        let recv = if launch < counts.len() { Some(window(count + 1)?) } else { None };
        // The slice is shorter than its window.
        let send = comm.window::<T>(count + 9)?.slice(..count)?;
        all.push(Sent::new(rank, launch, send, recv)?);
    }
    // Peers write to the windows from now on.
    rank.barrier()?;
    for sent in &all {
        sent.all_reduce(&collectives, op, Algorithm::Pull, &stream)?;
    }
    stream.synchronize()?;
    all.iter().enumerate().try_for_each(|(launch, sent)| sent.check(rank, launch, op))
}

#[test]
fn sums_by_loads_follow_each_other() {
    for ranks in [2, 4] {
        on_gpus("sums_by_loads_follow_each_other", ranks, |rank| {
            sums::<f32>(rank)?;
            sums::<bf16>(rank)?;
            if ranks == 2 { sums::<f16>(rank) } else { Ok(()) }
        });
    }
}

/// Each sum reads the memory that the previous one wrote, and writes the memory that it read. Only
/// some algorithms' kernels wait for the previous kernel themselves.
#[test]
fn graphs_of_sums_by_every_algorithm_are_replayed() {
    on_gpus("graphs_of_sums_by_every_algorithm_are_replayed", 4, |rank| {
        let (comm, stream, ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
        let collectives = by_loads(rank)?;
        let pull = CollectivePlan { algorithm: Algorithm::Pull, blocks: 2, threads: 128 };
        let (lamport, push) = (Algorithm::Lamport, Algorithm::Push);
        let plans = [pull, CollectivePlan { algorithm: lamport, blocks: 4, threads: 64 }, pull];
        let plans =
            [&plans[..], &[CollectivePlan { algorithm: push, ..pull }, pull, pull]].concat();
        let (a, b) = (comm.window::<f32>(501)?, comm.window::<f32>(501)?);
        let graph = stream.capture(|| {
            plans.iter().enumerate().try_for_each(|(step, plan)| {
                collectives.set_plan(Some(*plan));
                let [from, to] = if step % 2 == 0 { [&a, &b] } else { [&b, &a] };
                let how = collectives.explain(&Collective::all_reduce(from, to, ReduceOp::Sum))?;
                assert_eq!(how.plan.algorithm, plan.algorithm, "{how}");
                collectives.all_reduce(from, to, ReduceOp::Sum, &stream)
            })
        })?;
        for replay in 1..4 {
            stream.fill(&a, (replay * (rank.rank() + 1)) as f32)?;
            graph.launch(&stream)?;
            let mut got = [0.0_f32; 501];
            stream.copy_to_host(&a, &mut got)?;
            stream.synchronize()?;
            let sum = replay * ranks * (ranks + 1) / 2 * ranks.pow(plans.len() as u32 - 1);
            assert_eq!(got, [sum as f32; 501], "replay {replay}");
        }
        Ok(())
    });
}

#[test]
fn only_sums_at_the_start_of_windows_are_loaded() {
    on_gpus("only_sums_at_the_start_of_windows_are_loaded", 2, |rank| {
        let (comm, stream, sum) = (rank.communicator()?, rank.stream()?, ReduceOp::Sum);
        let collectives = by_loads(rank)?;
        let window = comm.window::<f32>(64)?;
        let (first, second) = (window.slice(..32)?, window.slice(32..)?);
        let other = comm.window::<f32>(32)?.device_slice();
        let plain = comm.mem_alloc::<f32>(32)?.device_slice();
        let is_loaded = |call: &Collective<'_>| {
            let plans = collectives.plans(call)?;
            let is_offered = plans.iter().any(|plan| plan.algorithm == Algorithm::Pull);
            let how = collectives.explain(call)?;
            assert_eq!(how.plan.algorithm == Algorithm::Pull, is_offered, "{how}");
            Ok::<_, devcomm::Error>(is_offered)
        };
        for (send, recv, expected) in [
            (&first, &other, true),
            (&first, &first, true),
            (&first, &second, false),
            (&second, &other, false),
            (&plain, &other, false),
            (&other, &plain, false),
        ] {
            assert_eq!(is_loaded(&Collective::all_reduce(send, recv, sum))?, expected);
            // The algorithm that is used instead gives right sums.
            send.copy_from_host(&[1.0 + rank.rank() as f32; 32])?;
            rank.barrier()?;
            collectives.all_reduce(send, recv, sum, &stream)?;
            stream.synchronize()?;
            let mut got = [0.0; 32];
            recv.copy_to_host(&mut got)?;
            assert_eq!(got, [3.0; 32]);
            rank.barrier()?;
        }
        let scaled = comm.pre_mul_sum(0.5_f32)?;
        assert!(!is_loaded(&Collective::all_reduce(&first, &other, &scaled))?);
        for op in [ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Prod] {
            assert!(!is_loaded(&Collective::all_reduce(&first, &other, op))?);
        }
        let integers = comm.window::<i32>(32)?;
        assert!(!is_loaded(&Collective::all_reduce(&integers, &integers, sum))?);
        let halves = comm.window::<f16>(32)?;
        assert!(is_loaded(&Collective::all_reduce(&halves, &halves, sum))?);
        Ok(())
    });
}
