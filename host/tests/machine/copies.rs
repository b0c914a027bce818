//! Tests of stream-ordered copies and fills: what they wait for, and what is refused.

use std::time::Duration;

use devcomm_host::{
    Buffer, Context, Effect, Error, Fault, Rank, ReduceOp, Result, ScopeThread, StateError,
};

use crate::support::{
    assert_capturing, assert_invalid, contents, filled, log_of, logged, makes_no_calls, pause,
    ranks, ranks_on, simulation, unchecked_world, world,
};

/// Returns the names of the copies, fills and stream waits that `f` calls.
fn memory_calls(rank: &Rank, f: impl FnOnce() -> Result<()>) -> Result<Vec<String>> {
    let machine = rank.simulated_machine().unwrap();
    let names = || {
        let calls = machine.calls().into_iter().filter(|call| call.gpu == Some(rank.device()));
        calls
            .map(|call| call.function.to_owned())
            .filter(|name| ["cuMem", "cuStreamSync"].iter().any(|prefix| name.starts_with(prefix)))
    };
    let before = names().count();
    f()?;
    Ok(names().skip(before).collect())
}

#[test]
fn a_copy_from_or_to_the_host_waits_for_its_own_stream_alone() {
    ranks(2, |rank| {
        let (comm, busy, free) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let (a, b) = (filled(comm, &[1.0_f32; 2])?, comm.mem_alloc::<f32>(2)?);
        if rank.rank() == 0 {
            // Ends when rank 1 sends, which is after the copies.
            comm.recv(&b, 1, &busy)?;
            let mut got = [0.0; 2];
            free.copy_to_device(&[2.0, 3.0], &a)?;
            free.copy_to_host(&a, &mut got)?;
            assert_eq!(got, [2.0, 3.0]);
            assert!(!busy.is_idle()?);
        }
        rank.barrier()?;
        if rank.rank() == 1 {
            comm.send(&a, 0, &busy)?;
            return busy.synchronize();
        }
        let mut got = [0.0; 2];
        busy.copy_to_host(&b, &mut got)?;
        assert_eq!(got, [1.0; 2]);
        Ok(())
    });
}

#[test]
fn copies_on_the_device_and_fills_do_not_wait() {
    let ran: Result<Vec<()>> = unchecked_world(2).run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (filled(comm, &[1.0_f32; 4])?, comm.mem_alloc::<f32>(4)?);
        // Rank 0's operation waits for that of rank 1, which is enqueued later.
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        comm.all_reduce(&a, &a, ReduceOp::Sum, &stream)?;
        let calls = memory_calls(rank, || {
            stream.copy(&a, &b)?;
            stream.fill(&a, 7.0)
        })?;
        assert_eq!(calls, ["cuMemcpyDtoDAsync", "cuMemsetD32Async"]);
        if rank.rank() == 0 {
            assert!(!stream.is_idle()?);
        }
        stream.synchronize()?;
        assert_eq!((contents(&a), contents(&b)), (vec![7.0; 4], vec![2.0; 4]));
        Ok(())
    });
    ran.unwrap();
}

#[test]
fn memory_that_a_stream_has_yet_to_copy_is_not_freed() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (filled(comm, &[1.0_f32; 2])?, comm.mem_alloc::<f32>(2)?);
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        comm.all_reduce(&a, &a, ReduceOp::Sum, &stream)?;
        stream.copy(&a, &b)?;
        drop(a);
        assert!(stream.is_idle()?);
        assert_eq!(log_of(rank).last().unwrap(), "ncclMemFree");
        assert_eq!(contents(&b), [2.0; 2]);
        Ok(())
    });
}

#[test]
fn copies_that_make_no_sense_are_refused_and_change_nothing() {
    ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let a = filled(comm, &[1.0_f32, 2.0, 3.0, 4.0])?;
        let other = Context::new(3)?.stream()?;
        makes_no_calls(rank, || {
            let short = stream.copy_to_device(&[0.0; 3], &a).unwrap_err().to_string();
            assert_eq!(short, "lengths must match: a copy of 3 elements to memory of 4");
            assert_invalid(stream.copy_to_host(&a, &mut [0.0; 5]));
            let part = |range| a.slice(range).unwrap();
            assert_invalid(stream.copy(&part(0..3), &a));
            let overlap = stream.copy(&part(0..3), &part(1..4)).unwrap_err().to_string();
            assert!(overlap.starts_with("a copy of 3 elements of f32 from 0x"), "{overlap}");
            assert_invalid(other.copy_to_device(&[0.0; 4], &a));
            assert_invalid(other.copy_to_host(&a, &mut [0.0; 4]));
            assert_invalid(other.copy(&part(0..2), &part(2..4)));
            assert_invalid(other.fill(&a, 0.0));
        });
        stream.copy(&a.slice(..2)?, &a.slice(2..)?)?;
        stream.synchronize()?;
        assert_eq!(contents(&a), [1.0, 2.0, 1.0, 2.0]);
        // Empty copies and fills succeed.
        stream.copy(&a.slice(..0)?, &a.slice(2..2)?)?;
        stream.fill(&a.slice(4..)?, 9.0)?;
        stream.copy_to_device(&[], &a.slice(..0)?)
    });
}

#[test]
fn the_default_stream_is_one_and_is_neither_captured_nor_destroyed() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.default_stream());
        assert!(stream.as_raw().is_null());
        let b = filled(comm, &[1.0_f32; 2])?;
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        // Another handle is the same stream, with the same pending work.
        rank.context().default_stream().synchronize()?;
        assert_eq!(contents(&b), [2.0; 2]);
        assert_invalid(stream.capture(|| Ok::<_, Error>(())).map(drop));
        let ((), log) = logged(rank, || drop(stream));
        assert!(log.is_empty(), "{log:?}");
        let (own, event) = (rank.stream()?, rank.context().event()?);
        rank.default_stream().fill(&b, 3.0)?;
        rank.default_stream().record(&event)?;
        own.wait_event(&event)?;
        let mut got = [0.0; 2];
        own.copy_to_host(&b, &mut got)?;
        assert_eq!(got, [3.0; 2]);
        let graph = own.capture(|| {
            assert_capturing(rank.default_stream().copy_to_host(&b, &mut [0.0; 2]));
            own.fill(&b, 4.0)
        })?;
        graph.launch(&rank.default_stream())?;
        rank.default_stream().copy_to_host(&b, &mut got)?;
        assert_eq!(got, [4.0; 2]);
        Ok(())
    });
}

#[test]
fn copies_of_pinned_memory_do_not_wait_and_the_memory_does() {
    let ran: Result<Vec<()>> = unchecked_world(2).run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, context) = (comm.mem_alloc::<f32>(4)?, rank.context());
        let (mut input, mut sum) = (context.pinned::<f32>(4)?, context.pinned::<f32>(4)?);
        assert_eq!((input.as_slice()?, sum.len()), (&[0.0; 4][..], 4));
        input.as_mut_slice()?.fill(1.5);
        // Rank 0's operation waits for that of rank 1, which is enqueued later.
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        let calls = memory_calls(rank, || {
            stream.copy_to_device_async(&input, &a)?;
            comm.all_reduce(&a, &a, ReduceOp::Sum, &stream)?;
            stream.copy_to_host_async(&a, &mut sum)
        })?;
        assert_eq!(calls, ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"]);
        if rank.rank() == 0 {
            assert!(!stream.is_idle()?);
        }
        assert_eq!(sum.as_slice()?, [3.0; 4]);
        // Access to pinned memory waits for its copies.
        input.as_mut_slice()?.fill(7.0);
        stream.copy_to_device_async(&input, &a)?;
        input.as_mut_slice()?.fill(8.0);
        assert_eq!(contents(&a), [7.0; 4]);
        Ok(())
    });
    ran.unwrap();
}

#[test]
fn pinned_memory_is_freed_after_its_copies() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, mut pinned) = (filled(comm, &[1.0_f32; 2])?, rank.context().pinned(2)?);
        pause(rank, Duration::from_millis(20 * rank.rank() as u64));
        comm.all_reduce(&a, &a, ReduceOp::Sum, &stream)?;
        stream.copy_to_host_async(&a, &mut pinned)?;
        drop(pinned);
        assert!(stream.is_idle()?);
        assert_eq!(log_of(rank).last().unwrap(), "cuMemFreeHost");
        Ok(())
    });
}

#[test]
fn copies_of_pinned_memory_that_make_no_sense_are_refused() {
    ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, other) = (comm.mem_alloc::<f32>(2)?, Context::new(3)?);
        let (mut short, mut foreign) = (rank.context().pinned(1)?, other.pinned(2)?);
        assert_invalid(rank.context().pinned::<f32>(0));
        assert_invalid(rank.context().pinned::<f64>(usize::MAX));
        assert_invalid(stream.copy_to_device_async(&short, &a));
        assert_invalid(stream.copy_to_host_async(&a, &mut short));
        assert_invalid(stream.copy_to_device_async(&foreign, &a));
        assert_invalid(stream.copy_to_host_async(&a, &mut foreign));
        let graph = stream.capture(|| {
            assert_capturing(stream.copy_to_host_async(&a.slice(..1)?, &mut short));
            assert_capturing(rank.context().pinned::<f32>(1));
            stream.fill(&a, 1.0)
        })?;
        assert_eq!(graph.len(), 1);
        Ok(())
    });
}

#[test]
fn pinned_memory_whose_copy_may_still_run_is_neither_read_nor_freed() {
    let world = world(1);
    let ran: Result<Vec<()>> = world.run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, mut pinned) = (filled(comm, &[1.0_f32; 2])?, rank.context().pinned(2)?);
        let (mut short, mut other) = (rank.context().pinned(1)?, rank.context().pinned(2)?);
        // Without its event, a copy is waited for at once.
        fail_next(rank, "cuEventRecord");
        stream.copy_to_host_async(&a, &mut other).unwrap_err();
        assert_eq!(other.as_slice()?, [1.0; 2]);
        // The copy is enqueued, and the driver then tells neither its end nor the stream's.
        fail_next(rank, "cuEventRecord");
        fail_next(rank, "cuStreamSynchronize");
        let failed = stream.copy_to_host_async(&a, &mut pinned).unwrap_err();
        assert!(failed.to_string().contains("cuEventRecord"), "{failed}");
        stream.copy_to_host_async(&a.slice(..1)?, &mut short)?;
        assert_eq!(short.as_slice()?, [1.0]);
        for refused in [pinned.as_slice().map(drop), pinned.as_mut_slice().map(drop)] {
            assert!(matches!(refused, Err(Error::State(StateError::UnknownCopy))), "{refused:?}");
        }
        let ((), log) = logged(rank, || drop(pinned));
        assert!(log.is_empty(), "{log:?}");
        let ((), log) = logged(rank, || drop(short));
        assert_eq!(log, ["cuMemFreeHost"]);
        Ok(())
    });
    ran.unwrap();
}

/// Makes the next call of a driver function fail.
fn fail_next(rank: &Rank, function: &'static str) {
    let fault = Fault { function, gpu: None, nth: Some(0), effect: Effect::Fail(1) };
    rank.simulated_machine().unwrap().inject(fault);
}

#[test]
fn a_copy_of_pinned_memory_that_a_capture_refuses_is_not_made() {
    for seed in 0..4 {
        ranks_on(simulation().seed(seed), 1, |rank| {
            let (comm, stream, other) = (rank.communicator()?, rank.stream()?, rank.stream()?);
            let (a, pinned) = (comm.mem_alloc::<f32>(4)?, rank.context().pinned::<f32>(4)?);
            let mut made = 0;
            let (captured, calls) = rank.context().scope(|scope| {
                let thread = scope.spawn("captures", || {
                    (0..10).try_for_each(|_| other.capture(|| other.fill(&a, 1.0)).map(drop))
                });
                let calls = memory_calls(rank, || {
                    for _ in 0..20 {
                        match stream.copy_to_device_async(&pinned, &a) {
                            Ok(()) => made += 1,
                            refused => assert_capturing(refused),
                        }
                    }
                    Ok(())
                });
                (thread.and_then(ScopeThread::join), calls)
            });
            captured?;
            let calls = calls?;
            let copies = calls.iter().filter(|call| *call == "cuMemcpyHtoDAsync").count();
            assert_eq!(copies, made, "{calls:?}");
            Ok(())
        });
    }
}
