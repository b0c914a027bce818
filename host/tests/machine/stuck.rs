//! Tests of a GPU that does not become idle in time, and of what is possible once it does.

use std::time::Duration;

use devcomm_host::{CommConfig, Error, ReduceOp, Result, StateError};

use crate::support::{contents, count, log_of, logged, unchecked_world, world};

#[test]
fn a_missed_deadline_ends_the_waits_on_that_gpu() {
    let missed = world(2).run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(1)?;
        comm.recv(&b, 1 - rank.rank(), &stream)?;
        let event = rank.context().event()?;
        stream.record(&event)?;
        let limit = Duration::from_millis(30);
        let missed = stream.synchronize_within(limit).unwrap_err();
        assert!(
            matches!(missed, Error::State(StateError::DeadlinePassed { waited }) if waited >= limit)
        );
        // From now on nothing waits for this GPU, and memory that it may access is not freed.
        let clock = || rank.simulated_machine().unwrap().now();
        let start = clock();
        let waits =
            [stream.synchronize(), event.synchronize(), b.copy_from_host(&[0.0]), comm.destroy()];
        for again in waits {
            assert!(
                matches!(again, Err(Error::State(StateError::DeadlinePassed { .. }))),
                "{again:?}"
            );
        }
        drop(b);
        assert!(clock() - start < Duration::from_millis(500));
        assert_eq!(count(&log_of(rank), "ncclMemFree"), 0);
        Err::<(), _>(missed)
    });
    assert!(matches!(missed, Err(Error::State(StateError::DeadlinePassed { .. }))), "{missed:?}");
}

#[test]
fn a_gpu_that_was_stuck_is_used_again_once_its_operation_is_aborted() {
    // The communicator is aborted by its rank's thread, or through a handle.
    for by_handle in [false, true] {
        let recovered: Result<Vec<()>> = unchecked_world(2).run(|rank| {
            let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
            let b = comm.mem_alloc::<f32>(1)?;
            let limit = Duration::from_millis(30);
            if rank.is_root() {
                // Rank 1 does not send.
                comm.recv(&b, 1, &stream)?;
                let missed = stream.synchronize_within(limit).unwrap_err();
                let text = missed.to_string();
                assert!(text.starts_with("the GPU has not finished after 30 ms"), "{text}");
                let again = b.copy_from_host(&[0.0]).unwrap_err();
                assert_eq!(again.to_string(), text);
            }
            if by_handle {
                comm.abort_handle().abort()?;
            }
            comm.abort()?;
            rank.barrier()?;
            // The stream that was stuck works again, and so do calls that wait for all streams.
            let again = rank.new_communicator(&CommConfig::new())?;
            let b = again.mem_alloc::<f32>(1)?;
            b.copy_from_host(&[1.0])?;
            again.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
            stream.synchronize()?;
            assert_eq!(contents(&b), [2.0]);
            let ((), log) = logged(rank, || drop(b));
            assert_eq!(log, ["ncclMemFree"]);
            drop(stream);
            again.destroy()
        });
        recovered.unwrap();
    }
}

#[test]
fn a_stream_that_was_dropped_while_its_gpu_was_stuck_is_waited_for() {
    let ran: Result<Vec<()>> = unchecked_world(2).run(|rank| {
        let context = rank.context().clone();
        let (comm, other) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        if rank.is_root() {
            let stream = rank.stream()?;
            let b = comm.mem_alloc::<f32>(1)?;
            comm.recv(&b, 1, &stream)?;
            stream.synchronize_within(Duration::from_millis(30)).unwrap_err();
            drop(stream);
            let text = b.copy_from_host(&[0.0]).unwrap_err().to_string();
            assert!(text.starts_with("the GPU has not finished after 30 ms"), "{text}");
            comm.abort()?;
            b.copy_from_host(&[0.0])?;
        }
        other.synchronize()?;
        context.memory_info().map(drop)
    });
    ran.unwrap();
}
