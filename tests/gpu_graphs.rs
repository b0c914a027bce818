//! Tests of collectives and kernels that are captured to CUDA graphs.

use devcomm::{
    Buffer, CollectivesOptions, CommConfig, DevCommRequirements, Error, KERNELS, Kernels, Rank,
    ReduceOp, Simulation, StateError, Stream, WindowFlags, kernels,
};
use devcomm_testing::machines::{Gpus, on_gpus};
use devcomm_testing::works::require_works;

const COUNT: usize = 1000;
const TIMES: i32 = 100;

/// Replays an all-reduce in place, so that the result tells how many replays have run.
fn replays_an_all_reduce(rank: &Rank) -> Result<(), Error> {
    let (comm, stream, n) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    let memory = comm.mem_alloc::<f64>(COUNT)?;
    let graph = stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream))?;
    assert!(graph.is_valid() && graph.len() >= 1);
    let require = |expected: f64| {
        let mut got = vec![0.0; COUNT];
        memory.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == expected), "{} is not {expected}", got[0]);
        Ok::<_, Error>(())
    };
    memory.copy_from_host(&[1.0; COUNT])?;
    // The capture has not run the all-reduce.
    require(1.0)?;
    for _ in 0..TIMES {
        graph.launch(&stream)?;
    }
    stream.synchronize()?;
    require((n as f64).powi(TIMES))?;

    // The graph runs on another stream, between operations that are not captured.
    let other = rank.stream()?;
    memory.copy_from_host(&[1.0; COUNT])?;
    comm.all_reduce(&memory, &memory, ReduceOp::Sum, &other)?;
    graph.launch(&other)?;
    comm.all_reduce(&memory, &memory, ReduceOp::Sum, &other)?;
    other.synchronize()?;
    require((n as f64).powi(3))?;
    graph.close()?;
    graph.close()?;
    assert!(!graph.is_valid());
    require_works(comm, &stream)
}

#[test]
fn replays_an_all_reduce_on_two_gpus() {
    on_gpus("replays_an_all_reduce_on_two_gpus", 2, replays_an_all_reduce);
}

#[test]
fn replays_an_all_reduce_on_four_gpus() {
    on_gpus("replays_an_all_reduce_on_four_gpus", 4, replays_an_all_reduce);
}

/// Replays a cooperative launch with new inputs each time, and then another graph without a wait
/// between its replays.
fn replays_a_kernel(rank: &Rank) -> Result<(), Error> {
    const BLOCKS: u32 = 4;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (me, n) = (rank.rank(), rank.n_ranks());
    rank.load(&KERNELS)?;
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    let (a, b) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let launch = |send, recv| {
        let sum = kernels::lsa_allreduce::<f32>::args(&dev_comm, send, recv, COUNT);
        sum.grid(BLOCKS).block(128).launch(&stream)
    };
    let there = stream.capture(|| launch(&a, &b))?;
    let value = |rank: usize, round: i32, i: usize| (rank + i) as f32 + round as f32;
    let mut got = vec![0.0; COUNT];
    for round in 0..TIMES {
        a.copy_from_host(&(0..COUNT).map(|i| value(me, round, i)).collect::<Vec<_>>())?;
        there.launch(&stream)?;
        stream.synchronize()?;
        b.copy_to_host(&mut got)?;
        for (i, &x) in got.iter().enumerate() {
            let sum: f32 = (0..n).map(|rank| value(rank, round, i)).sum();
            assert_eq!(x, sum, "round {round}, element {i}");
        }
    }

    const BACK_TO_BACK: i32 = 15;
    let there_and_back = stream.capture(|| launch(&a, &b).and_then(|()| launch(&b, &a)))?;
    a.copy_from_host(&[1.0; COUNT])?;
    for _ in 0..BACK_TO_BACK {
        there_and_back.launch(&stream)?;
    }
    stream.synchronize()?;
    a.copy_to_host(&mut got)?;
    let expected = (n as f32).powi(2 * BACK_TO_BACK);
    assert!(got.iter().all(|&x| x == expected), "{} is not {expected}", got[0]);
    drop((there, there_and_back));
    rank.barrier()
}

#[test]
fn replays_a_kernel_on_two_gpus() {
    on_gpus("replays_a_kernel_on_two_gpus", 2, replays_a_kernel);
}

#[test]
fn replays_a_kernel_on_four_gpus() {
    on_gpus("replays_a_kernel_on_four_gpus", 4, replays_a_kernel);
}

/// Each rank in turn is the last one to launch the graph. Its first all-reduce completes that of
/// all ranks, which have waited for it; in the graph's next one, it waits for them in turn.
#[test]
fn ranks_go_on_in_a_graph_whichever_of_them_comes_last() {
    let gpus = Gpus::new(3);
    gpus.run("ranks_go_on_in_a_graph_whichever_of_them_comes_last", |rank| {
        let (comm, stream, other) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(1)?;
        memory.copy_from_host(&[1.0])?;
        let reduce = || comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream);
        let graph = stream.capture(|| (0..3).try_for_each(|_| reduce()))?;
        for last in 0..rank.n_ranks() {
            if rank.rank() != last {
                graph.launch(&other)?;
            }
            rank.barrier()?;
            if rank.rank() == last {
                graph.launch(&other)?;
            }
            other.synchronize()?;
        }
        let mut sum = [0.0];
        memory.copy_to_host(&mut sum)?;
        assert_eq!(sum, [(rank.n_ranks() as f32).powi(9)]);
        Ok(())
    });
}

#[test]
fn a_graph_takes_in_two_streams_that_events_join() {
    on_gpus("a_graph_takes_in_two_streams_that_events_join", 2, |rank| {
        let (comm, main, side) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let context = rank.context();
        let (fork, join) = (context.event_without_timing()?, context.event_without_timing()?);
        let (a, b) = (comm.mem_alloc::<f64>(COUNT)?, comm.mem_alloc::<f64>(COUNT)?);
        let graph = main.capture(|| {
            main.record(&fork)?;
            side.wait_event(&fork)?;
            comm.all_reduce(&a, &a, ReduceOp::Sum, &main)?;
            comm.all_reduce(&b, &b, ReduceOp::Sum, &side)?;
            side.record(&join)?;
            main.wait_event(&join)?;
            // This one runs after both all-reduces.
            comm.all_reduce(&b, &b, ReduceOp::Sum, &main)
        })?;
        a.copy_from_host(&[1.0; COUNT])?;
        b.copy_from_host(&[1.0; COUNT])?;
        for _ in 0..TIMES {
            graph.launch(&main)?;
        }
        main.synchronize()?;
        for (memory, expected) in [(&a, 2f64.powi(TIMES)), (&b, 4f64.powi(TIMES))] {
            let mut got = vec![0.0; COUNT];
            memory.copy_to_host(&mut got)?;
            assert!(got.iter().all(|&x| x == expected), "{} is not {expected}", got[0]);
        }
        require_works(comm, &side)
    });
}

#[test]
fn what_a_graph_cannot_hold_is_refused_while_one_is_captured() {
    on_gpus("what_a_graph_cannot_hold_is_refused_while_one_is_captured", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (memory, window) = (comm.mem_alloc::<f64>(COUNT)?, comm.window::<f64>(COUNT)?);
        let event = rank.context().event_without_timing()?;
        fn capturing<T: std::fmt::Debug>(result: Result<T, Error>) {
            assert!(
                matches!(result, Err(Error::State(StateError::Capturing { .. }))),
                "{result:?}"
            );
        }
        let graph = stream.capture(|| {
            capturing(comm.mem_alloc::<f64>(COUNT));
            capturing(comm.window::<f64>(COUNT));
            capturing(comm.register_window(&memory, WindowFlags::COLL_SYMMETRIC));
            capturing(comm.register_buffer(&memory));
            capturing(comm.create_dev_comm(DevCommRequirements::new()));
            capturing(window.close());
            capturing(memory.copy_from_host(&[0.0; COUNT]));
            capturing(memory.copy_to_host(&mut [0.0; COUNT]));
            capturing(memory.fill_bytes(0));
            capturing(stream.synchronize());
            capturing(stream.is_idle());
            capturing(event.synchronize());
            capturing(stream.capture(|| Ok::<_, Error>(())));
            capturing(comm.destroy());
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)
        })?;
        // The refused calls had no effect.
        assert!(comm.is_valid() && window.is_valid());
        memory.copy_from_host(&[1.0; COUNT])?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        let mut got = vec![0.0; COUNT];
        memory.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 2.0));
        require_works(comm, &stream)
    });
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    on_gpus("a_failed_capture_leaves_the_stream_usable", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let memory = comm.mem_alloc::<f64>(COUNT)?;
        memory.copy_from_host(&[1.0; COUNT])?;
        let failed = stream.capture(|| {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            comm.all_reduce(&memory, &comm.mem_alloc(COUNT)?, ReduceOp::Sum, &stream)
        });
        assert!(matches!(failed, Err(Error::State(StateError::Capturing { .. }))), "{failed:?}");
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            stream.capture(|| -> Result<(), Error> { panic!("on purpose") })
        }));
        assert!(panicked.is_err());
        require_works(comm, &stream)?;
        // Neither capture has run anything.
        let mut got = vec![0.0; COUNT];
        memory.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 1.0));
        let graph = stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream))?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        memory.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 2.0));
        Ok(())
    });
}

#[test]
fn a_graph_keeps_the_memory_that_its_operations_use() {
    on_gpus("a_graph_keeps_the_memory_that_its_operations_use", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let recv = comm.mem_alloc::<u32>(COUNT)?;
        let graph = {
            let send = comm.mem_alloc::<u32>(COUNT)?;
            send.fill_bytes(1)?;
            stream.capture(|| comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream))?
        };
        // If `send` was freed, one of these allocations gets its memory.
        let others = [comm.mem_alloc::<u32>(COUNT)?, comm.mem_alloc::<u32>(COUNT)?];
        others.iter().try_for_each(|other| other.fill_bytes(0xee))?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        let mut got = vec![0; COUNT];
        recv.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 0x0202_0202));
        require_works(comm, &stream)
    });
}

#[test]
fn a_graph_is_closed_with_its_communicator() {
    on_gpus("a_graph_is_closed_with_its_communicator", 2, |rank| {
        let stream: Stream = rank.stream()?;
        let comm = rank.new_communicator(&CommConfig::new())?;
        let memory = comm.mem_alloc::<f64>(COUNT)?;
        let capture =
            || stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream));
        let (used, unused) = (capture()?, capture()?);
        used.launch(&stream)?;
        comm.destroy()?;
        for graph in [&used, &unused] {
            assert!(!graph.is_valid());
            assert!(matches!(graph.launch(&stream), Err(Error::State(StateError::Closed { .. }))));
            graph.close()?;
        }

        let comm = rank.new_communicator(&CommConfig::new())?;
        let graph = stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream))?;
        graph.launch(&stream)?;
        stream.synchronize()?;
        rank.barrier()?;
        comm.abort()?;
        assert!(!graph.is_valid());
        assert!(graph.launch(&stream).is_err());
        require_works(rank.communicator()?, &stream)
    });
}

/// Returns the value that all elements of `buffer` have.
fn value_of(buffer: &impl Buffer<Element = f32>) -> Result<f32, Error> {
    let buffer = buffer.device_slice();
    let mut got = vec![0.0; buffer.len()];
    buffer.copy_to_host(&mut got)?;
    assert!(got.iter().all(|&x| x == got[0]), "{got:?}");
    Ok(got[0])
}

/// Drops what the operations of a graph use, and then replays the graph: a buffer and the
/// `Collectives` that reduces it, and the windows and the device communicator of a kernel.
///
/// The arguments of a captured kernel are bytes, which do not tell what they refer to. So a graph
/// with kernels keeps all memory of its context that existed at the end of the capture, until it is
/// dropped: also `large`, which nothing uses.
fn keeps_what_its_kernels_use(rank: &Rank) -> Result<(), Error> {
    /// The elements of `large`: enough to be seen in the GPU's free memory.
    const LARGE: usize = 1 << 20;
    let (comm, stream, n) = (rank.communicator()?, rank.stream()?, rank.n_ranks() as f32);
    rank.load(&KERNELS)?;
    let collectives = CollectivesOptions::new().lamport_bytes(4096).build(comm)?;
    let (buffer, result) = (rank.context().alloc::<f32>(64)?, rank.context().alloc::<f32>(64)?);
    let (window, sums) = (comm.window::<f32>(64)?, comm.window::<f32>(64)?);
    let large = rank.context().alloc::<f32>(LARGE)?;
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    let graph = stream.capture(|| {
        stream.fill(&buffer, 1.0)?;
        collectives.all_reduce(&buffer, &buffer, ReduceOp::Sum, &stream)?;
        stream.copy(&buffer, &window.slice(..)?)?;
        let sum = kernels::lsa_allreduce::<f32>::args(&dev_comm, &window, &sums, 64);
        sum.grid(1).block(64).launch(&stream)?;
        stream.copy(&sums.slice(..)?, &result)
    })?;
    graph.launch(&stream)?;
    assert_eq!(value_of(&result)?, n * n);

    // If the memory of `buffer` was freed, a victim gets it, and the replay writes to the victim.
    let address = buffer.device_address();
    drop((buffer, window, sums, large, dev_comm, collectives));
    let victims: Vec<_> =
        (0..8).map(|_| rank.context().alloc::<f32>(64)).collect::<Result<_, _>>()?;
    for victim in &victims {
        assert_ne!(victim.device_address(), address);
        stream.fill(victim, 7.0)?;
    }
    stream.fill(&result, 0.0)?;
    graph.launch(&stream)?;
    assert_eq!(value_of(&result)?, n * n);
    for victim in &victims {
        assert_eq!(value_of(victim)?, 7.0);
    }

    // On a GPU other processes allocate and free memory too, so only a simulated one is asked.
    let (held, _) = rank.context().memory_info()?;
    drop(graph);
    assert!(!rank.is_simulated() || rank.context().memory_info()?.0 >= held + 4 * LARGE);
    require_works(comm, &stream)
}

#[test]
fn a_graph_keeps_what_its_kernels_use_until_it_is_dropped() {
    on_gpus("a_graph_keeps_what_its_kernels_use", 2, keeps_what_its_kernels_use);
}

/// Drops the modules of a kernel that was launched and may not have run yet, and that a graph
/// contains.
fn outlive_their_modules(rank: &Rank) -> Result<(), Error> {
    let (comm, stream, n) = (rank.communicator()?, rank.stream()?, rank.n_ranks() as f32);
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    let (window, sums) = (comm.window::<f32>(64)?, comm.window::<f32>(64)?);
    stream.fill(&window.slice(..)?, 2.0)?;
    let modules = Kernels::load(rank.context(), &KERNELS)?;
    let launch = || {
        let sum = kernels::lsa_allreduce::<f32>::args(&dev_comm, &window, &sums, 64);
        sum.grid(1).block(64).launch(&modules.on(&stream))
    };
    let graph = stream.capture(launch)?;
    launch()?;
    drop(modules);
    assert_eq!(value_of(&sums.slice(..)?)?, 2.0 * n);
    // If the old modules were unloaded, these are loaded in their place.
    let _other = Kernels::load(rank.context(), &KERNELS)?;
    for _ in 0..2 {
        stream.fill(&sums.slice(..)?, 0.0)?;
        graph.launch(&stream)?;
        assert_eq!(value_of(&sums.slice(..)?)?, 2.0 * n);
    }
    drop(graph);
    require_works(comm, &stream)
}

#[test]
fn kernels_that_were_launched_or_captured_outlive_their_dropped_modules() {
    on_gpus("kernels_outlive_their_dropped_modules", 2, outlive_their_modules);
}

/// Drops memory that was allocated after the capture, which the graph does not keep.
fn frees_what_is_newer(rank: &Rank) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = CollectivesOptions::new().lamport_bytes(4096).build(comm)?;
    let buffer = rank.context().alloc::<f32>(64)?;
    let reduce = || collectives.all_reduce(&buffer, &buffer, ReduceOp::Sum, &stream);
    let graph = stream.capture(reduce)?;
    let (free, _) = rank.context().memory_info()?;
    drop(rank.context().alloc::<f32>(1 << 20)?);
    // On a GPU other processes may allocate meanwhile.
    assert!(!rank.is_simulated() || rank.context().memory_info()?.0 == free);
    graph.launch(&stream)?;
    stream.synchronize()
}

#[test]
fn what_is_made_after_a_capture_is_freed_at_once() {
    on_gpus("what_is_made_after_a_capture_is_freed_at_once", 2, frees_what_is_newer);
}

/// Closes a window that a graph uses, replays the graph, and then destroys the communicator of
/// both, which closes the graph.
fn outlives_a_closed_window(rank: &Rank) -> Result<(), Error> {
    let (stream, n) = (rank.stream()?, rank.n_ranks() as f32);
    rank.load(&KERNELS)?;
    let comm = rank.communicator()?.split(Some(0), 0, &CommConfig::new())?.unwrap();
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    let (a, b) = (comm.window::<f32>(64)?, comm.window::<f32>(64)?);
    let launch = || {
        let sum = kernels::lsa_allreduce::<f32>::args(&dev_comm, &a, &b, 64);
        sum.grid(1).block(64).launch(&stream)
    };
    let graph = stream.capture(launch)?;
    stream.fill(&a.slice(..)?, 2.0)?;
    stream.synchronize()?;
    rank.barrier()?;
    a.close()?;
    assert!(!a.is_valid() && launch().is_err());
    graph.launch(&stream)?;
    assert_eq!(value_of(&b.slice(..)?)?, 2.0 * n);
    rank.barrier()?;
    comm.destroy()?;
    assert!(!graph.is_valid());
    let refused = graph.launch(&stream).unwrap_err();
    assert!(matches!(refused, Error::State(StateError::CommunicatorEnded { .. })), "{refused}");
    require_works(rank.communicator()?, &stream)
}

#[test]
fn a_graph_can_be_launched_after_its_window_is_closed_but_not_after_its_communicator() {
    let name = "a_graph_can_be_launched_after_its_window_is_closed";
    on_gpus(name, 2, outlives_a_closed_window);
}

/// Enqueues six operations on a first stream, captures one on a second, and enqueues six more on a
/// third.
fn keeps_the_order_of_others(rank: &Rank) -> Result<(), Error> {
    const COUNT: usize = 3000;
    let (comm, n) = (rank.communicator()?, rank.n_ranks() as f32);
    let [first, second, third] = [rank.stream()?, rank.stream()?, rank.stream()?];
    let ops = CollectivesOptions::new().lamport_bytes(16 << 10).build(comm)?;
    let [a, b, c] = [COUNT, 8, COUNT].map(|count| rank.context().alloc::<f32>(count));
    let [a, b, c] = [a?, b?, c?];
    first.fill(&a, 1.0)?;
    third.fill(&c, 1.0)?;
    second.fill(&b, 1.0)?;
    for _ in 0..6 {
        ops.all_reduce(&a, &a, ReduceOp::Sum, &first)?;
    }
    let graph = second.capture(|| ops.all_reduce(&b, &b, ReduceOp::Sum, &second))?;
    for _ in 0..6 {
        ops.all_reduce(&c, &c, ReduceOp::Sum, &third)?;
    }
    // After each replay comes a call on another stream.
    graph.launch(&second)?;
    ops.all_reduce(&a, &a, ReduceOp::Sum, &first)?;
    graph.launch(&third)?;
    ops.all_reduce(&c, &c, ReduceOp::Sum, &second)?;
    [&first, &second, &third].into_iter().try_for_each(Stream::synchronize)?;
    assert_eq!([value_of(&a)?, value_of(&b)?, value_of(&c)?], [n.powi(7), n.powi(2), n.powi(7)]);
    Ok(())
}

#[test]
fn operations_of_one_object_are_ordered_around_captures_and_replays_on_any_stream() {
    for seed in 0..6 {
        let simulation = Simulation::new(2).multiprocessors(2).seed(seed);
        let gpus = Gpus::from(simulation);
        gpus.run("operations_are_ordered_around_captures", keeps_the_order_of_others);
    }
}
