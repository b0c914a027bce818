//! Tests of the end of a communicator: destroy, finalize, abort, revoke, suspend.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use devcomm::{
    CommConfig, Communicator, DevCommRequirements, Error, KERNELS, LaunchError, LaunchRefusal,
    MemoryStat, Rank, ReduceOp, StateError, Stream, SymmetricBuffer, kernels,
};

use devcomm_testing::machines::{Gpus, give_time, on_gpus};
use devcomm_testing::works::require_works;

/// How long the wait for an aborted or revoked operation may take.
const DEADLINE: Duration = Duration::from_secs(10);

fn require_state<T: std::fmt::Debug>(result: Result<T, Error>, state: &str) {
    match result {
        Err(Error::State(StateError::CommunicatorEnded { how, .. })) => assert_eq!(how, state),
        other => panic!("expected an error of a communicator that is {state}, got {other:?}"),
    }
}

/// Checks that operations on the communicator fail with this state.
fn require_unusable(comm: &Communicator, stream: &Stream, state: &str) -> Result<(), Error> {
    let memory = SymmetricBuffer::<f32>::new(comm.library(), comm.context(), 8)?;
    require_state(comm.all_reduce(&memory, &memory, ReduceOp::Sum, stream), state);
    require_state(comm.register_window(&memory, devcomm::WindowFlags::COLL_SYMMETRIC), state);
    require_state(comm.create_dev_comm(DevCommRequirements::new()), state);
    require_state(comm.pre_mul_sum(1.0f32), state);
    require_state(comm.team_world(), state);
    Ok(())
}

#[test]
fn what_was_made_from_a_communicator_is_closed_with_it() {
    on_gpus("what_was_made_from_a_communicator_is_closed_with_it", 2, |rank| {
        let stream = rank.stream()?;
        rank.load(&KERNELS)?;
        let comm = rank.new_communicator(&CommConfig::new())?;
        let (window, memory) = (comm.window::<f32>(8)?, comm.mem_alloc::<f32>(8)?);
        let registered = comm.register_buffer(&memory)?;
        let op = comm.pre_mul_sum(2.0f32)?;
        let dev_comm = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let graph = stream.capture(|| comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream))?;
        window.copy_from_host(&[3.0; 8])?;
        assert!(window.is_valid() && registered.is_valid() && op.is_valid() && graph.is_valid());

        comm.destroy()?;
        assert!(!comm.is_valid() && comm.as_raw().is_null());
        require_unusable(&comm, &stream, "destroyed")?;
        assert!(!window.is_valid() && !registered.is_valid());
        assert!(!op.is_valid() && !graph.is_valid() && !dev_comm.is_valid());
        assert!(matches!(dev_comm.dev_comm(), Err(Error::State(StateError::Closed { .. }))));
        assert!(matches!(window.device_window(), Err(Error::State(StateError::Closed { .. }))));
        assert!(matches!(graph.launch(&stream), Err(Error::State(StateError::Closed { .. }))));
        let launch = |dev_comm, window| {
            let sum = kernels::lsa_allreduce::<f32>::args(dev_comm, window, window, 8);
            sum.grid(1).block(128).launch(&stream)
        };
        let live = rank.communicator()?;
        let live_dev_comm = live.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let live_window = live.window::<f32>(8)?;
        for refused in [launch(&dev_comm, &live_window), launch(&live_dev_comm, &window)] {
            let refusal = match refused {
                Err(Error::Launch(LaunchError::Refused { refusal, .. })) => refusal,
                other => panic!("expected a refusal, got {other:?}"),
            };
            assert!(
                matches!(
                    refusal,
                    LaunchRefusal::CommunicatorEnded { how: "destroyed" }
                        | LaunchRefusal::Closed { what: "the window" }
                ),
                "{refusal}"
            );
        }
        // The memory can still be copied.
        let mut kept = [0.0; 8];
        window.copy_to_host(&mut kept)?;
        assert_eq!(kept, [3.0; 8]);

        comm.destroy()?;
        comm.abort()?;
        window.close()?;
        dev_comm.close()?;
        op.close()?;
        graph.close()?;
        require_works(live, &stream)
    });
}

#[test]
fn a_finalized_communicator_is_good_for_its_end_and_gives_its_memory_back() {
    let name = "a_finalized_communicator_is_good_for_its_end_and_gives_its_memory_back";
    on_gpus(name, 2, |rank| {
        const BYTES: usize = 256 << 20;
        let stream = rank.stream()?;
        require_works(rank.communicator()?, &stream)?;
        let comm = rank.new_communicator(&CommConfig::new())?;
        let window = comm.window::<u8>(BYTES)?;
        require_works(&comm, &stream)?;
        let (free_before, _) = rank.context().memory_info()?;
        comm.finalize()?;
        require_unusable(&comm, &stream, "finalized")?;
        require_state(comm.finalize(), "finalized");
        comm.destroy()?;
        assert!(!window.is_valid());
        drop(window);
        // Both ranks have unmapped the peer's memory.
        rank.barrier()?;
        let (free_after, _) = rank.context().memory_info()?;
        // The quarter is for what the driver and NCCL keep.
        assert!(free_after >= free_before + BYTES * 3 / 4, "{free_before} to {free_after} B");
        require_works(rank.communicator()?, &stream)
    });
}

/// Rank 0 waits for an operation without rank 1, whose thread aborts rank 0's communicator.
#[test]
fn an_abort_from_another_thread_ends_the_wait() {
    let (name, handle) = ("an_abort_from_another_thread_ends_the_wait", Mutex::new(None));
    let body = |rank: &Rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        require_works(&comm, &stream)?;
        let memory = comm.mem_alloc::<f32>(1 << 16)?;
        if rank.is_root() {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            *handle.lock().unwrap() = Some(comm.abort_handle());
            rank.barrier()?;
            let started = Instant::now();
            require_state(stream.synchronize(), "aborted");
            let waited = started.elapsed();
            assert!(rank.is_simulated() || waited >= Duration::from_millis(200), "{waited:?}");
            assert!(waited < DEADLINE, "{waited:?}");
        } else {
            rank.barrier()?;
            give_time(rank, Duration::from_millis(300));
            handle.lock().unwrap().take().unwrap().abort()?;
        }
        rank.barrier()?;
        comm.abort()?;
        comm.abort()?;
        assert!(!comm.is_valid());
        require_unusable(&comm, &stream, "aborted")?;
        comm.destroy()?;
        // The GPU and the world still work.
        stream.synchronize()?;
        memory.copy_from_host(&[1.0; 8])?;
        require_works(rank.communicator()?, &stream)
    };
    Gpus::new(2).unchecked().with_threads(name, |world| drop(world.run(body).unwrap()));
}

/// Rank 1 never joins. Rank 0's wait ends at its deadline, and both ranks continue with a new
/// communicator.
#[test]
fn a_new_communicator_works_after_a_missed_deadline() {
    let name = "a_new_communicator_works_after_a_missed_deadline";
    Gpus::new(2).unchecked().run(name, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        require_works(&comm, &stream)?;
        let memory = comm.mem_alloc::<f32>(1 << 16)?;
        if rank.is_root() {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            let missed = stream.synchronize_within(Duration::from_millis(200));
            assert!(
                matches!(missed, Err(Error::State(StateError::DeadlinePassed { .. }))),
                "{missed:?}"
            );
        }
        comm.abort()?;
        let fresh = rank.new_communicator(&CommConfig::new())?;
        require_works(&fresh, &stream)?;
        memory.copy_from_host(&[2.0; 8])?;
        let mut copied = [0.0; 8];
        memory.copy_to_host(&mut copied)?;
        assert_eq!(copied, [2.0; 8]);
        fresh.destroy()?;
        comm.destroy()?;
        stream.synchronize()?;
        require_works(rank.communicator()?, &stream)
    });
}

#[test]
fn a_revoked_communicator_can_be_split_and_destroyed() {
    Gpus::new(2).unchecked().run("a_revoked_communicator_can_be_split_and_destroyed", |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        require_works(&comm, &stream)?;
        let memory = comm.mem_alloc::<f32>(1 << 16)?;
        if rank.is_root() {
            // Rank 1 never joins.
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            give_time(rank, Duration::from_millis(100));
            assert!(!stream.is_idle()?);
        }
        comm.revoke()?;
        let stopped = stream.synchronize_within(DEADLINE);
        assert!(
            !matches!(stopped, Err(Error::State(StateError::DeadlinePassed { .. }))),
            "{stopped:?}"
        );
        require_unusable(&comm, &stream, "revoked")?;
        let child = comm.split(Some(0), 0, &CommConfig::new())?.unwrap();
        require_works(&child, &stream)?;
        child.destroy()?;
        comm.destroy()?;
        require_works(rank.communicator()?, &stream)
    });
}

fn suspends_and_resumes(rank: &Rank) -> Result<(), Error> {
    let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
    require_works(&comm, &stream)?;
    let (free_before, _) = rank.context().memory_info()?;
    assert_eq!(comm.memory_stat(MemoryStat::Suspended)?, 0);
    require_state(comm.resume(), "live");

    comm.suspend()?;
    assert!(comm.is_valid());
    assert_eq!(comm.memory_stat(MemoryStat::Suspended)?, 1);
    require_unusable(&comm, &stream, "suspended")?;
    require_state(comm.suspend(), "suspended");
    rank.barrier()?;
    let (free_suspended, _) = rank.context().memory_info()?;
    assert!(free_suspended >= free_before, "{free_before} to {free_suspended} B");

    rank.barrier()?;
    comm.resume()?;
    assert_eq!(comm.memory_stat(MemoryStat::Suspended)?, 0);
    require_works(&comm, &stream)?;
    // A suspended communicator can be destroyed.
    comm.suspend()?;
    comm.destroy()
}

#[test]
fn suspends_and_resumes_on_two_gpus() {
    on_gpus("suspends_and_resumes_on_two_gpus", 2, suspends_and_resumes);
}

#[test]
fn suspends_and_resumes_on_four_gpus() {
    on_gpus("suspends_and_resumes_on_four_gpus", 4, suspends_and_resumes);
}
