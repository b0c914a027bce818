//! Tests that ranks which call different collectives all get an error, and none starts.

use devcomm::{Buffer, CommConfig, Communicator, Error, ReduceOp, WorldError, group};

use devcomm_testing::machines::{Gpus, on_gpus};
use devcomm_testing::works::require_works;

/// Checks that ranks 0 and 1 were told that they call these.
fn differ(result: Result<(), Error>, first: &str, second: &str) {
    match result {
        Err(Error::World(WorldError::CallsDiffer { calls })) => assert_eq!(calls, [first, second]),
        other => panic!("expected {first:?} and {second:?}, got {other:?}"),
    }
}

#[test]
fn every_difference_is_an_error_on_all_ranks_and_nothing_starts() {
    let name = "every_difference_is_an_error_on_all_ranks_and_nothing_starts";
    on_gpus(name, 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(8)?;
        let uneven = memory.slice(..4 + 2 * rank.rank())?;
        let (sum, source) = (ReduceOp::Sum, Some(memory.device_slice()));
        let all_reduce = |op| comm.all_reduce(&memory, &memory, op, &stream);

        const SUM: &str = "ncclAllReduce of 8 elements Float32, Sum";
        let counts = comm.all_reduce(&uneven, &uneven, sum, &stream);
        let [first, second] = [4, 6].map(|n| format!("ncclAllReduce of {n} elements Float32, Sum"));
        differ(counts, &first, &second);

        let operators = all_reduce([sum, ReduceOp::Max][rank.rank()]);
        differ(operators, SUM, "ncclAllReduce of 8 elements Float32, Max");

        let roots = comm.broadcast(source, &memory, rank.rank(), &stream);
        let [first, second] =
            [0, 1].map(|root| format!("ncclBroadcast of 8 elements Float32, root {root}"));
        differ(roots, &first, &second);

        let integers = comm.mem_alloc::<i32>(8)?;
        let types = match rank.is_root() {
            true => all_reduce(sum),
            false => comm.all_reduce(&integers, &integers, sum, &stream),
        };
        differ(types, SUM, "ncclAllReduce of 8 elements Int32, Sum");

        let functions = if rank.is_root() { all_reduce(sum) } else { comm.barrier() };
        differ(functions, SUM, "barrier");

        let grouped = group(|_| {
            comm.all_reduce(&memory, &memory, sum, &stream)?;
            all_reduce([sum, ReduceOp::Min][rank.rank()])
        });
        differ(grouped, SUM, "ncclAllReduce of 8 elements Float32, Min");

        require_works(comm, &stream)
    });
}

#[test]
fn a_group_may_name_communicators_in_any_order() {
    on_gpus("a_group_may_name_communicators_in_any_order", 2, |rank| {
        let comms = [rank.communicator()?.clone(), rank.new_communicator(&CommConfig::new())?];
        let setup = |comm: Communicator| {
            let memory = comm.mem_alloc::<f32>(8)?;
            memory.copy_from_host(&[1.0; 8])?;
            Ok::<_, Error>((comm, memory, rank.stream()?))
        };
        let mut setups = comms.into_iter().map(setup).collect::<Result<Vec<_>, _>>()?;
        setups.rotate_left(rank.rank());
        group(|_| {
            let mut setups = setups.iter();
            setups.try_for_each(|(comm, a, stream)| comm.all_reduce(a, a, ReduceOp::Sum, stream))
        })?;
        for (_, memory, stream) in &setups {
            stream.synchronize()?;
            let mut sums = [0.0; 8];
            memory.copy_to_host(&mut sums)?;
            assert_eq!(sums, [2.0; 8]);
        }
        rank.barrier()
    });
}

#[test]
fn captured_collectives_are_not_compared() {
    on_gpus("captured_collectives_are_not_compared", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(8)?;
        // NCCL connects the ranks in their first all-reduce, in which each waits for the others.
        comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        memory.copy_from_host(&[1.0; 8])?;
        // The ranks capture one after the other, which an exchange of calls would not allow.
        let captured =
            || stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream));
        let graph = if rank.is_root() { Some(captured()?) } else { None };
        rank.barrier()?;
        let graph = graph.map_or_else(captured, Ok)?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        let mut sums = [0.0; 8];
        memory.copy_to_host(&mut sums)?;
        assert_eq!(sums, [2.0; 8]);
        graph.close()
    });
}

#[test]
fn sends_and_receives_are_not_compared() {
    on_gpus("sends_and_receives_are_not_compared", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(8)?;
        memory.copy_from_host(&[rank.rank() as f32; 8])?;
        let exchange = || match rank.is_root() {
            true => comm.send(&memory, 1, &stream),
            false => comm.recv(&memory, 0, &stream),
        };
        // NCCL connects the ranks in their first exchange, in which each waits for the other.
        exchange()?;
        // Rank 1 comes to the barrier first, which an exchange of calls would take for another one.
        if rank.is_root() {
            exchange()?;
        }
        rank.barrier()?;
        if !rank.is_root() {
            exchange()?;
        }
        stream.synchronize()?;
        let mut got = [1.0; 8];
        memory.copy_to_host(&mut got)?;
        assert_eq!(got, [0.0; 8]);
        Ok(())
    });
}

#[test]
fn an_unchecked_world_compares_nothing() {
    Gpus::new(2).unchecked().run("an_unchecked_world_compares_nothing", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(8)?;
        // NCCL connects the ranks in their first all-reduce, in which each waits for the others.
        comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        // Rank 1 comes to the barrier first, which an exchange would take for another call.
        if rank.is_root() {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        }
        rank.barrier()?;
        if !rank.is_root() {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        }
        stream.synchronize()
    });
}
