//! Tests of streams and events: when they are destroyed, and the order of their work.

use std::time::Duration;

use devcomm_host::{Context, Rank, ReduceOp, Result, Signal, Stream, WaitSignalDesc};

use crate::support::{
    assert_invalid, contents, filled, log_of, logged, makes_no_calls, pause, ranks,
    unchecked_world, world,
};

#[test]
fn a_stream_of_another_part_of_the_program_is_not_destroyed() {
    ranks(2, |rank| {
        let (comm, theirs) = (rank.communicator()?, rank.stream()?);
        // SAFETY: `theirs` outlives `foreign`.
        let foreign = unsafe { Stream::from_raw(rank.context(), theirs.as_raw()) };
        assert_eq!(foreign.as_raw(), theirs.as_raw());
        let b = filled(comm, &[1.0_f32; 2])?;
        comm.all_reduce(&b, &b, ReduceOp::Sum, &foreign)?;
        makes_no_calls(rank, || drop(foreign));
        // Dropping `foreign` has waited for the work.
        assert!(theirs.is_idle()?);
        assert_eq!(contents(&b), [2.0; 2]);
        let ((), log) = logged(rank, || drop(theirs));
        assert_eq!(log, ["cuStreamDestroy"]);
        Ok(())
    });
}

#[test]
fn clones_of_a_stream_are_one_and_the_last_one_waits_for_its_work() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(2)?;
        let event = rank.context().event()?;
        let clone = stream.clone();
        let ((), log) = logged(rank, || drop(clone));
        assert!(log.is_empty());
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.record(&event)?;
        drop(stream);
        assert!(event.is_reached()?);
        Ok(())
    });
}

#[test]
fn operations_without_a_stream_go_to_the_default_stream_and_are_not_waited_for() {
    let ran: Result<Vec<()>> = unchecked_world(2).run(|rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let (a, b) = (filled(comm, &[me as f32 + 1.0; 2])?, comm.mem_alloc::<f32>(2)?);
        let (from, to) = (comm.window::<f32>(2)?, comm.window::<f32>(2)?);
        from.copy_from_host(&[me as f32 + 5.0; 2])?;
        let enqueue = || {
            comm.all_reduce(&a, &a, ReduceOp::Sum, None)?;
            if me == 0 {
                comm.send(&a, 1, None)?;
            } else {
                comm.recv(&b, 0, None)?;
            }
            comm.put_signal(&from, &to, 0, Signal::to(1 - me), None)?;
            comm.signal(Signal::to(1 - me), None)?;
            comm.wait_signal(&[WaitSignalDesc::from(1 - me).count(2)], None)
        };
        // Rank 1 begins after the barrier, which rank 0 would not reach if it waited.
        if me == 0 {
            enqueue()?;
            assert!(!rank.default_stream().is_idle()?);
        }
        rank.barrier()?;
        if me == 1 {
            enqueue()?;
        }
        rank.default_stream().synchronize()?;
        assert_eq!((contents(&a), contents(&to)), (vec![3.0; 2], vec![6.0 - me as f32; 2]));
        assert_eq!(contents(&b), [3.0 * me as f32; 2]);
        Ok(())
    });
    ran.unwrap();
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    ranks(2, |rank| {
        let (comm, first, second) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let (event, after) = (rank.context().event()?, rank.context().event_without_timing()?);
        assert!(event.is_reached()?, "one that was never recorded");
        let b = comm.mem_alloc::<f32>(2)?;
        if rank.rank() == 0 {
            // Ends when rank 1 sends.
            comm.recv(&b, 1, &first)?;
            first.record(&event)?;
            second.wait_event(&event)?;
            second.record(&after)?;
            pause(rank, Duration::from_millis(20));
            assert!(!event.is_reached()? && !after.is_reached()? && !second.is_idle()?);
        }
        rank.barrier()?;
        if rank.rank() == 1 {
            comm.send(&b, 0, &first)?;
        }
        after.synchronize()?;
        assert!(event.is_reached()?);
        second.synchronize()?;
        assert!(second.is_idle()?);
        first.synchronize()
    });
}

#[test]
fn an_event_that_is_recorded_again_is_that_of_its_last_record() {
    ranks(2, |rank| {
        let (comm, busy, idle, waits) =
            (rank.communicator()?, rank.stream()?, rank.stream()?, rank.stream()?);
        let (event, after) = (rank.context().event()?, rank.context().event()?);
        let b = comm.mem_alloc::<f32>(2)?;
        if rank.rank() == 0 {
            // Ends when rank 1 sends.
            comm.recv(&b, 1, &busy)?;
            busy.record(&event)?;
            waits.wait_event(&event)?;
            waits.record(&after)?;
            idle.record(&event)?;
            // The last record is reached; the wait is for the one before.
            event.synchronize()?;
            assert!(event.is_reached()? && !after.is_reached()?);
        }
        rank.barrier()?;
        if rank.rank() == 1 {
            comm.send(&b, 0, &busy)?;
        }
        busy.synchronize()?;
        after.synchronize()?;
        assert!(event.is_reached()?);
        event.synchronize()
    });
}

#[test]
fn events_of_another_context_are_refused() {
    ranks(1, |rank| {
        let (stream, other) = (rank.stream()?, Context::new(1)?);
        let event = other.event()?;
        assert_invalid(stream.record(&event));
        assert_invalid(stream.wait_event(&event));
        Ok(())
    });
}

#[test]
fn time_between_events_needs_both_to_be_reached() {
    let failing = |rank: &Rank| -> Result<()> {
        let (stream, context) = (rank.stream()?, rank.context());
        let (start, stop) = (context.event()?, context.event()?);
        stream.record(&start)?;
        let text = stop.elapsed_ms(&start).unwrap_err().to_string();
        assert!(text.contains("cuEventElapsedTime failed"), "{text}");
        stream.record(&stop)?;
        stop.synchronize()?;
        assert!(stop.elapsed_ms(&start)? >= 0.0);
        Ok(())
    };
    world(1).run(failing).unwrap();
}

#[test]
fn memory_is_freed_when_every_stream_that_is_known_is_idle() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (b, event) = (comm.mem_alloc::<f32>(2)?, rank.context().event()?);
        // Rank 0's operation waits for that of rank 1, which is enqueued later.
        pause(rank, Duration::from_millis(30 * rank.rank() as u64));
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.record(&event)?;
        drop(b);
        assert!(event.is_reached()?);
        assert_eq!(log_of(rank).last().unwrap(), "ncclMemFree");
        Ok(())
    });
}
