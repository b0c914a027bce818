//! Tests of threads that work for a rank: handles move to them and back, and several threads use a
//! rank's handles at the same time, in many orders.

use std::sync::Mutex;
use std::time::Duration;

use devcomm_host::{
    CommConfig, CommResource, Communicator, Context, DevCommRequirements, Error, LaunchConfig,
    LaunchError, LaunchRefusal, Rank, ReduceOp, Result, ScopeThread, StateError, Stream,
    StreamOrder, World, WorldError,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count, meet};
use crate::support::{
    assert_capturing, assert_ended, contents, count, filled, later, log_in, log_of, pause, ranks,
    ranks_on, simulation,
};

/// A time after which the other threads are blocked.
const A_WHILE: Duration = Duration::from_millis(30);
/// Longer than a communicator takes to be ready.
const READY: Duration = Duration::from_secs(5);

/// Runs `f` on `n` ranks in many orders of all threads.
#[track_caller]
fn in_many_orders(n: usize, f: impl Fn(&Rank) -> Result<()> + Sync) {
    let orders = std::env::var("DEVCOMM_SIM_ORDERS");
    for seed in 0..orders.map_or(12, |orders| orders.parse().unwrap()) {
        ranks_on(simulation().seed(seed), n, &f);
    }
}

fn requirements() -> DevCommRequirements {
    DevCommRequirements::new().lsa_barriers(8)
}

#[test]
fn a_rank_works_on_a_thread_to_which_its_handles_have_moved_and_gets_them_back() {
    ranks(2, |rank| {
        let comm = rank.communicator()?.clone();
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(requirements())?;
        rank.load(&NO_PTX)?;
        let stream = rank.stream()?;
        let work = move || -> Result<_> {
            launch_store_count(&stream, LaunchConfig::new(8, 32), (&dev, &window))?;
            comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
            let made = comm.window::<f32>(8)?;
            stream.fill(&made, 2.0)?;
            let graph = stream.capture(|| stream.fill(&made, 3.0))?;
            stream.synchronize()?;
            Ok((comm, window, dev, stream, made, graph))
        };
        let (comm, window, dev, stream, made, graph) = later(rank, Duration::ZERO, work).join()?;
        // Each rank has noted the count at its own index.
        assert_eq!(contents(&window)[..3], [COUNT as f32, COUNT as f32, 0.0]);
        assert_eq!(contents(&made), [2.0; 8]);
        graph.launch(&stream)?;
        launch_store_count(&stream, LaunchConfig::new(8, 32), (&dev, &made))?;
        stream.synchronize()?;
        assert_eq!(contents(&made)[rank.rank() + 1], 3.0);
        assert_eq!(comm.rank(), rank.rank());
        comm.barrier()
    });
}

#[test]
fn a_thread_of_the_standard_library_can_work_for_a_rank() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?.clone(), rank.stream()?);
        let work = move || -> Result<_> {
            let buffer = filled(&comm, &[1.0_f32; 4])?;
            comm.all_reduce(&buffer, &buffer, ReduceOp::Sum, &stream)?;
            stream.synchronize()?;
            Ok(buffer)
        };
        let buffer = std::thread::spawn(work).join().unwrap()?;
        assert_eq!(contents(&buffer), [2.0; 4]);
        Ok(())
    });
}

#[test]
fn what_another_thread_closes_or_drops_ends_as_on_the_ranks_own() {
    let ran = ranks(2, |rank| {
        rank.load(&NO_PTX)?;
        for closes in [true, false] {
            let comm = rank.new_communicator(&CommConfig::new())?;
            let (window, dev) = (comm.window::<f32>(COUNT)?, comm.create_dev_comm(requirements())?);
            let (stream, op) = (rank.stream()?, comm.pre_mul_sum(2.0_f32)?);
            let event = rank.context().event()?;
            let pinned = rank.context().pinned::<f32>(COUNT)?;
            let graph = stream.capture(|| comm.all_reduce(&window, &window, &op, &stream))?;
            launch_store_count(&stream, LaunchConfig::new(8, 32), (&dev, &window))?;
            graph.launch(&stream)?;
            stream.copy_to_device_async(&pinned, &window)?;
            stream.record(&event)?;
            let end = move || -> Result<()> {
                if closes {
                    graph.close()?;
                    let all: [&dyn CommResource; 3] = [&op, &dev, &window];
                    all.iter().try_for_each(|resource| resource.close())?;
                    comm.destroy()?;
                    assert!(all.iter().all(|resource| !resource.is_valid()));
                }
                drop((event, pinned, stream));
                Ok(())
            };
            later(rank, Duration::ZERO, end).join()?;
            let log = log_of(rank);
            assert_eq!(count(&log, "cuStreamDestroy"), if closes { 1 } else { 2 }, "{log:#?}");
        }
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_in(&ran.world, gpu);
        for call in [
            "ncclCommWindowDeregister",
            "ncclDevCommDestroy",
            "ncclRedOpDestroy",
            "cuGraphExecDestroy",
            "ncclMemFree",
            "ncclCommDestroy",
        ] {
            assert_eq!(count(&log, call), 2, "{call}: {log:#?}");
        }
    }
}

#[test]
fn an_abort_ends_the_call_in_which_a_handle_on_another_thread_is_blocked() {
    ranks(2, |rank| {
        rank.load(&NO_PTX)?;
        let [host, kernel] = [(); 2].map(|()| rank.new_communicator(&CommConfig::new()));
        let (host, kernel) = (host?, kernel?);
        let (stream, dev) = (rank.stream()?, kernel.create_dev_comm(requirements())?);
        if rank.rank() == 0 {
            let blocked = host.clone();
            let thread = later(rank, Duration::ZERO, move || blocked.window::<f32>(8).map(drop));
            pause(rank, A_WHILE);
            host.abort()?;
            assert_ended(thread.join(), "aborted");

            // SAFETY: the kernel accesses no memory but barriers; rank 1 does not come.
            unsafe { meet::args(&dev, 0).grid(8).block(32).launch(&stream)? };
            let thread = later(rank, Duration::ZERO, move || stream.synchronize());
            pause(rank, A_WHILE);
            kernel.abort()?;
            let ended = thread.join();
            assert!(
                matches!(ended, Err(Error::Launch(LaunchError::KernelAborted { .. }))),
                "{ended:?}"
            );
        } else {
            host.abort()?;
            kernel.abort()?;
        }
        rank.barrier()
    });
}

/// Works with a communicator on which no other thread of the rank makes collective calls.
fn reduce_and_note(context: &Context, comm: &Communicator, value: f32) -> Result<()> {
    let (stream, dev) = (context.stream()?, comm.create_dev_comm(requirements())?);
    for round in [1.0, 2.0] {
        let window = comm.window::<f32>(COUNT)?;
        stream.copy_to_device(&[round * value; COUNT], &window)?;
        comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        launch_store_count(&stream, LaunchConfig::new(2, 32), (&dev, &window))?;
        let mut data = vec![0.0; COUNT];
        stream.copy_to_host(&window, &mut data)?;
        let sum = comm.n_ranks() as f32 * round * value;
        assert_eq!((data[comm.rank()], data[COUNT - 1]), (COUNT as f32, sum));
    }
    Ok(())
}

#[test]
fn threads_with_a_communicator_each_do_not_wait_for_each_other() {
    in_many_orders(2, |rank| {
        rank.load(&NO_PTX)?;
        let comms = [(); 2].map(|()| rank.new_communicator(&CommConfig::new()));
        let [one, other] = comms;
        let (one, other, context) = (one?, other?, rank.context());
        context.scope(|scope| {
            let thread = scope.spawn("other", || reduce_and_note(context, &other, 5.0))?;
            reduce_and_note(context, &one, 1.0)?;
            thread.join()
        })
    });
}

#[test]
fn calls_of_two_threads_on_one_communicator_are_made_one_after_the_other() {
    in_many_orders(2, |rank| {
        let work = || -> Result<()> {
            // The communicator is made once, by the thread that comes first.
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            for round in 0..3 {
                let all = comm.host_all_gather(&[comm.rank() as u32 + 7])?;
                assert_eq!(all, [[7], [8]]);
                let buffer = comm.mem_alloc::<f32>(16)?;
                let registered = comm.register_buffer(&buffer)?;
                let op = comm.pre_mul_sum(round as f32)?;
                stream.fill(&buffer, 1.0)?;
                assert!(comm.is_ready()? && comm.properties()?.rank == comm.rank());
                comm.async_error()?;
                op.close()?;
                registered.close()?;
            }
            stream.synchronize()
        };
        // Both threads make the same collective calls, so their order does not matter.
        rank.context().scope(|scope| {
            let thread = scope.spawn("other", work)?;
            work()?;
            thread.join()
        })
    });
}

// Memory that is freed too early is an error on the simulated machine.
#[test]
fn a_wait_releases_nothing_that_another_thread_has_enqueued_meanwhile() {
    in_many_orders(2, |rank| {
        // The communicator's operations are enqueued after its calls have returned.
        let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
        comm.wait(READY)?;
        let stream = rank.stream()?;
        let total = comm.mem_alloc::<f32>(8)?;
        stream.fill(&total, 1.0)?;
        rank.context().scope(|scope| {
            let thread = scope.spawn("waits", || {
                (0..6).try_for_each(|_| stream.synchronize().and_then(|()| comm.async_error()))
            })?;
            for _ in 0..4 {
                let ones = comm.mem_alloc::<f32>(8)?;
                stream.fill(&ones, 1.0)?;
                comm.all_reduce(&ones, &total, ReduceOp::Sum, &stream)?;
                drop(ones);
                comm.wait(READY)?;
            }
            thread.join()
        })?;
        stream.synchronize()?;
        assert_eq!(contents(&total), [2.0; 8]);
        Ok(())
    });
}

/// Launches until a launch is refused because an argument is closed.
fn launch_until_closed(launch: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 0..12 {
        match launch() {
            Err(Error::Launch(LaunchError::Refused { refusal, .. })) => {
                assert!(matches!(refusal, LaunchRefusal::Closed { .. }), "{refusal}");
                return Ok(());
            }
            launched => launched?,
        }
    }
    Ok(())
}

// The simulated machine fails if the host ends what a kernel uses.
#[test]
fn nothing_is_closed_while_another_thread_launches_a_kernel_with_it() {
    in_many_orders(1, |rank| {
        rank.load(&NO_PTX)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        for closes_window in [true, false] {
            let (window, dev) = (comm.window::<f32>(COUNT)?, comm.create_dev_comm(requirements())?);
            let launch = || launch_store_count(&stream, LaunchConfig::new(2, 32), (&dev, &window));
            rank.context().scope(|scope| {
                let thread = scope.spawn("launches", || launch_until_closed(launch))?;
                launch()?;
                let closed: &dyn CommResource = if closes_window { &window } else { &dev };
                // Two threads may close it.
                let closing = scope.spawn("closes", || closed.close())?;
                closed.close()?;
                assert!(!closed.is_valid());
                closing.join()?;
                thread.join()
            })?;
        }
        Ok(())
    });
}

#[test]
fn an_operator_is_not_closed_while_another_thread_enqueues_a_reduction_with_it() {
    in_many_orders(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (buffer, op) = (filled(comm, &[3.0_f32; 8])?, comm.pre_mul_sum(1.0_f32)?);
        rank.context().scope(|scope| {
            let thread = scope.spawn("reduces", || -> Result<()> {
                for _ in 0..8 {
                    match comm.all_reduce(&buffer, &buffer, &op, &stream) {
                        Err(Error::State(StateError::Closed { what: "the operator", .. })) => break,
                        enqueued => enqueued?,
                    }
                }
                Ok(())
            })?;
            op.close()?;
            thread.join()
        })?;
        stream.synchronize()?;
        assert_eq!(contents(&buffer), [3.0; 8]);
        Ok(())
    });
}

/// Returns whether a call was made, and not refused because another thread captures.
fn unless_capturing(result: Result<()>) -> Result<bool> {
    match result {
        Err(Error::State(StateError::Capturing { .. })) => Ok(false),
        result => result.map(|()| true),
    }
}

#[test]
fn a_graph_holds_nothing_that_another_thread_enqueues() {
    let (mut made, mut refused) = (0, 0);
    let counts = Mutex::new((&mut made, &mut refused));
    in_many_orders(1, |rank| {
        let (comm, stream, own) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let captured = comm.mem_alloc::<f32>(8)?;
        let (other, third) = (comm.mem_alloc::<f32>(8)?, comm.mem_alloc::<f32>(8)?);
        rank.context().scope(|scope| {
            let thread = scope.spawn("enqueues", || -> Result<()> {
                for (target, buffer) in [(&own, &other), (&stream, &third)].repeat(6) {
                    let made = unless_capturing(target.fill(buffer, 3.0))?;
                    unless_capturing(own.synchronize())?;
                    // The other thread may go on, also after a call that was refused.
                    rank.context().memory_info()?;
                    let mut counts = counts.lock().unwrap();
                    *(if made { &mut *counts.0 } else { &mut *counts.1 }) += 1;
                }
                Ok(())
            })?;
            for value in [1.0, 2.0, 3.0] {
                let graph = stream.capture(|| stream.fill(&captured, value))?;
                assert_eq!(graph.len(), 1);
                graph.launch(&stream)?;
                stream.synchronize()?;
            }
            thread.join()
        })?;
        assert_eq!(contents(&captured), [3.0; 8]);
        assert!([&other, &third].iter().all(|buffer| {
            let contents = contents(*buffer);
            contents == [3.0; 8] || contents == [0.0; 8]
        }));
        Ok(())
    });
    assert!(made > 0 && refused > 0, "{made} were made, {refused} refused");
}

#[test]
fn a_stream_whose_last_handles_two_threads_drop_is_waited_for_and_destroyed_once() {
    in_many_orders(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffer = comm.mem_alloc::<f32>(8)?;
        let slice = buffer.clone();
        let drop_after_fill = |stream: Stream, value| -> Result<()> { stream.fill(&slice, value) };
        let clone = stream.clone();
        rank.context().scope(|scope| {
            let thread = scope.spawn("drops", move || drop_after_fill(clone, 1.0))?;
            stream.fill(&buffer, 1.0)?;
            drop((stream, buffer));
            thread.join()
        })?;
        assert_eq!(count(&log_of(rank), "cuStreamDestroy"), 1);
        assert_eq!(contents(&slice), [1.0; 8]);
        Ok(())
    });
}

#[test]
fn a_deadlock_of_a_thread_in_a_scope_is_found() {
    let ran: Result<Vec<()>> = World::simulated(2).unwrap().run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let buffer = comm.mem_alloc::<f32>(8)?;
        if rank.rank() == 0 {
            return rank.context().scope(|scope| {
                let thread = scope.spawn("receives", || {
                    comm.recv(&buffer, 1, &stream)?;
                    stream.synchronize()
                })?;
                thread.join()
            });
        }
        Ok(())
    });
    let error = ran.unwrap_err().to_string();
    assert!(error.contains("deadlock"), "{error}");
}

#[test]
fn a_panic_of_a_thread_in_a_scope_is_the_ranks() {
    let ran: Result<Vec<()>> = World::simulated(1).unwrap().run(|rank| {
        rank.context().scope(|scope| {
            let thread = scope.spawn("panics", || panic!("in a thread of a rank"))?;
            thread.join()
        })
    });
    match ran {
        Err(Error::World(WorldError::RankPanicked { rank: 0, message })) => {
            assert_eq!(message, "in a thread of a rank");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn threads_that_end_clones_of_a_communicator_end_it_once() {
    in_many_orders(2, |rank| {
        let before = log_of(rank).len();
        for finalizes in [false, true] {
            let comm = rank.new_communicator(&CommConfig::new())?;
            let _window = comm.window::<f32>(8)?;
            let clone = comm.clone();
            let other = later(rank, Duration::ZERO, move || match finalizes {
                false => clone.destroy(),
                true => match clone.finalize() {
                    Err(Error::State(StateError::CommunicatorEnded { .. })) => Ok(()),
                    finalized => finalized,
                },
            });
            comm.destroy()?;
            other.join()?;
        }
        let log = &log_of(rank)[before..];
        let ends = ["ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"];
        assert_eq!(ends.map(|end| count(log, end)), [2, 2, 0], "{log:#?}");
        Ok(())
    });
}

#[test]
fn an_operation_on_a_stream_that_another_thread_captures_is_refused() {
    ranks(1, |rank| {
        let (context, stream, other) = (rank.context(), rank.stream()?, rank.stream()?);
        let (order, buffer) = (StreamOrder::local(context), context.alloc::<f32>(8)?);
        let turn = order.begin(&other)?;
        other.fill(&buffer, 1.0)?;
        drop(turn);
        let graph = stream.capture(|| {
            let refused = || assert_capturing(order.begin(&stream).map(drop));
            context.scope(|scope| scope.spawn("another", refused).map(ScopeThread::join))?;
            stream.fill(&buffer, 2.0)
        })?;
        assert_eq!(graph.len(), 1);
        Ok(())
    });
}
