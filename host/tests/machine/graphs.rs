//! Tests of graphs: capture, launch, what a capture refuses, and the lifetime of what a graph uses.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devcomm_host::{
    Buffer, CommConfig, DevCommRequirements, DriverError, Error, LaunchConfig, LaunchError,
    ReduceOp, Result, Stream, StreamOrder, group,
};

use crate::kernels::{COUNT, NO_PTX, add_one, launch_store_count, meet};
use crate::support::{
    assert_capturing, assert_closed, assert_ended, assert_in_group, assert_invalid, contents,
    count, filled, log_in, log_of, logged, makes_no_calls, ranks, ranks_on, simulation,
    unchecked_world,
};

#[test]
fn what_is_captured_runs_at_each_launch_and_not_before() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let (a, b) = (comm.window::<f32>(COUNT)?, filled(comm, &[1.0_f32; 2])?);
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(4))?;
        let (graph, log) = logged(rank, || {
            stream.capture(|| -> Result<()> {
                launch_store_count(&stream, LaunchConfig::new(4, 32), (&dev, &a))?;
                group(|_| comm.all_reduce(&b, &b, ReduceOp::Sum, &stream))
            })
        });
        let graph = graph?;
        assert_eq!(log.first().unwrap(), "cuStreamBeginCapture");
        assert_eq!(log[log.len() - 2..], ["cuStreamEndCapture 2 nodes", "cuGraphInstantiate"]);
        assert_eq!((graph.len(), contents(&b)), (2, vec![1.0; 2]));
        for sum in [2.0, 4.0] {
            a.fill_bytes(0)?;
            graph.launch(&stream)?;
            stream.synchronize()?;
            assert_eq!(contents(&b), [sum; 2]);
            assert_eq!(contents(&a)[rank.rank()], COUNT as f32);
        }
        // A graph can be launched on another stream than the captured one.
        let other = rank.stream()?;
        graph.launch(&other)?;
        other.synchronize()?;
        assert_eq!(contents(&b), [8.0; 2]);
        let elsewhere = devcomm_host::Context::new(3)?.stream()?;
        assert_invalid(graph.launch(&elsewhere));
        Ok(())
    });
}

#[test]
fn what_a_graph_cannot_hold_is_refused_while_it_is_captured() {
    ranks(2, |rank| {
        let (comm, stream, event) = (rank.communicator()?, rank.stream()?, rank.context().event()?);
        let (window, b) = (comm.window::<f32>(2)?, comm.mem_alloc::<f32>(2)?);
        let registered = comm.register_buffer(&b)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let graph = stream.capture(|| comm.all_reduce(&b, &b, ReduceOp::Sum, &stream))?;
        let again = stream.capture(|| -> Result<()> {
            comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
            assert_capturing(stream.synchronize());
            assert_capturing(stream.synchronize_within(Duration::ZERO));
            assert_capturing(stream.is_idle());
            assert_capturing(event.synchronize());
            assert_capturing(b.copy_from_host(&[0.0; 2]));
            assert_capturing(b.copy_to_host(&mut [0.0; 2]));
            assert_capturing(b.fill_bytes(0));
            assert_capturing(comm.mem_alloc::<f32>(2));
            assert_capturing(comm.register_window(&b, Default::default()));
            assert_capturing(comm.register_buffer(&b).map(drop));
            assert_capturing(comm.create_dev_comm(DevCommRequirements::new()));
            assert_capturing(window.close());
            assert_capturing(registered.close());
            assert_capturing(dev.close());
            assert_capturing(graph.close());
            assert_capturing(graph.launch(&stream));
            assert_capturing(comm.destroy());
            assert_capturing(comm.finalize());
            assert_capturing(comm.suspend());
            assert_capturing(stream.capture(|| Ok::<_, Error>(())));
            assert_capturing(rank.stream()?.capture(|| Ok::<_, Error>(())));
            Ok(())
        })?;
        assert_eq!(again.len(), 1);
        assert!(window.is_valid() && registered.is_valid() && dev.is_valid() && graph.is_valid());
        assert_in_group(group(|_| stream.capture(|| Ok::<_, Error>(()))));
        stream.synchronize()
    });
}

#[test]
fn a_capture_whose_closure_fails_or_panics_leaves_stream_and_memory_in_order() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(2)?;
        let gone = || {
            // Only the closure owns this buffer.
            let (own, stream) = (comm.mem_alloc::<f32>(2)?, &stream);
            Ok::<_, Error>(move || comm.all_reduce(&own, &own, ReduceOp::Sum, stream))
        };
        let (first, second) = (gone()?, gone()?);
        let (failed, log) = logged(rank, || {
            stream.capture(move || {
                first()?;
                drop(first);
                Err(Error::Driver(DriverError::NoGpu))
            })
        });
        assert!(matches!(failed, Err(Error::Driver(DriverError::NoGpu))));
        let end = ["cuStreamEndCapture 1 nodes", "cuGraphDestroy", "ncclMemFree"];
        assert_eq!(log[2..], end, "{log:?}");
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            stream.capture(move || -> Result<()> {
                second()?;
                panic!("in a capture")
            })
        }));
        assert!(panicked.is_err());
        b.copy_from_host(&[1.0; 2])?;
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&b), [2.0; 2]);
        Ok(())
    });
}

#[test]
fn a_graph_keeps_what_its_operations_use() {
    let ran = ranks(2, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        let (a, b) = (filled(&comm, &[1.0_f32; 2])?, comm.window::<f32>(2)?);
        let op = comm.pre_mul_sum(3.0_f32)?;
        let graph = stream.capture(|| comm.all_reduce(&a, &b.slice(..)?, &op, &stream))?;
        let view = b.slice(..)?;
        makes_no_calls(rank, || drop((a, b, op, comm)));
        graph.launch(&stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&view), [6.0; 2]);
        drop(view);
        let ((), log) = logged(rank, || drop(graph));
        assert_eq!(log[0], "cuGraphExecDestroy");
        for ended in ["ncclMemFree", "ncclRedOpDestroy 5", "ncclCommWindowDeregister"] {
            assert!(log.iter().any(|line| line == ended), "{ended}: {log:?}");
        }
        Ok(())
    });
    // The communicator ends with the rank's function.
    for rank in 0..2 {
        let log = log_in(&ran.world, rank);
        assert_eq!(log[log.len() - 2..], ["ncclCommDestroy", "cuDevicePrimaryCtxRelease"]);
    }
}

#[test]
fn a_graph_is_closed_with_its_communicator_and_once() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(2)?;
        let capture = || stream.capture(|| comm.all_reduce(&b, &b, ReduceOp::Sum, &stream));
        let (one, other) = (capture()?, capture()?);
        assert!(one.is_valid());
        one.close()?;
        let (done, log) = logged(rank, || one.close());
        assert!(done.is_ok() && log.is_empty());
        assert_closed(one.launch(&stream));
        comm.destroy()?;
        assert!(!other.is_valid());
        assert_closed(other.launch(&stream));
        Ok(())
    });
}

#[test]
fn a_graph_of_an_aborted_communicator_is_not_launched() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(2)?;
        let graph = stream.capture(|| comm.all_reduce(&b, &b, ReduceOp::Sum, &stream))?;
        comm.abort_handle().abort()?;
        makes_no_calls(rank, || assert_ended(graph.launch(&stream), "aborted"));
        Ok(())
    });
}

#[test]
fn a_graph_takes_in_streams_that_wait_for_its_events() {
    ranks(2, |rank| {
        let (comm, stream, side) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let (fork, join) = (rank.context().event()?, rank.context().event_without_timing()?);
        let b = filled(comm, &[1.0_f32; 2])?;
        let graph = stream.capture(|| {
            stream.record(&fork)?;
            side.wait_event(&fork)?;
            comm.all_reduce(&b, &b, ReduceOp::Sum, &side)?;
            side.record(&join)?;
            stream.wait_event(&join)
        })?;
        assert_eq!(graph.len(), 1);
        graph.launch(&stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&b), [2.0; 2]);
        Ok(())
    });
}

#[test]
fn kernels_of_a_suspended_or_revoked_communicator_are_not_launched_by_graphs_either() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let with_dev = || launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window));
        // SAFETY: one thread, and other kernels run before or after it.
        let without = || unsafe { add_one::args(&window).grid(1).block(1).launch(&stream) };
        let launches: [(&str, &dyn Fn() -> Result<()>); 2] =
            [("store_count", &with_dev), ("add_one", &without)];
        let graphs: Vec<_> =
            (launches.iter().map(|(_, launch)| stream.capture(launch))).collect::<Result<_>>()?;
        let are_refused = |state: &str| {
            for ((kernel, launch), graph) in launches.iter().zip(&graphs) {
                let text = launch().unwrap_err().to_string();
                let expected = format!(
                    "kernel `{kernel}` was not launched: the communicator of its arguments is \
                     {state}"
                );
                assert_eq!(text, expected);
                assert!(!graph.is_valid());
                makes_no_calls(rank, || assert_ended(graph.launch(&stream), state));
            }
        };
        comm.suspend()?;
        are_refused("suspended");
        comm.resume()?;
        for ((_, launch), graph) in launches.iter().zip(&graphs) {
            assert!(graph.is_valid());
            graph.launch(&stream)?;
            launch()?;
        }
        stream.synchronize()?;
        assert_eq!(contents(&window)[0], if rank.is_root() { COUNT as f32 + 2.0 } else { 2.0 });
        rank.barrier()?;
        comm.revoke()?;
        are_refused("revoked");
        comm.destroy()
    });
}

#[test]
fn a_graph_of_collectives_holds_registrations_that_are_closed() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (window, memory) = (comm.window::<f32>(2)?, filled(comm, &[1.0_f32; 2])?);
        let registered = comm.register_buffer(&memory)?;
        let borrowed = comm.register_borrowed(&memory)?;
        let graph = stream.capture(|| {
            comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)
        })?;
        makes_no_calls(rank, || {
            window.close().unwrap();
            registered.close().unwrap();
            drop(borrowed);
        });
        assert!(!window.is_valid() && !registered.is_valid());
        graph.launch(&stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&memory), [2.0; 2]);
        let ((), log) = logged(rank, || drop(graph));
        let ends = ["ncclCommDeregister", "ncclCommDeregister", "ncclCommWindowDeregister"];
        assert_eq!(log[log.len() - 3..], ends, "{log:?}");
        Ok(())
    });
}

#[test]
fn what_a_graph_of_kernels_holds_ends_before_its_communicator() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let launch = || launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window));
        let graph = stream.capture(launch)?;
        makes_no_calls(rank, || drop(dev));
        let (ended, log) = logged(rank, || comm.destroy());
        ended?;
        assert_eq!(log[..1], ["ncclDevCommDestroy"], "{log:?}");
        assert!(!graph.is_valid());
        Ok(())
    });
}

#[test]
fn work_on_a_stream_that_is_not_captured_runs_while_another_is_captured() {
    let ran: Result<Vec<()>> = unchecked_world(2).run(|rank| {
        let (comm, stream, other) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
        let b = comm.mem_alloc::<f32>(2)?;
        let graph = stream.capture(|| {
            other.fill(&b, 2.0)?;
            if rank.is_root() {
                // SAFETY: the kernel accesses no memory but barriers.
                unsafe { meet::args(&dev, 0).grid(1).block(32).launch(&other)? };
            }
            stream.fill(&b, 3.0)
        })?;
        assert_eq!(graph.len(), 1);
        let waited = other.synchronize_within(Duration::from_millis(30));
        if rank.is_root() {
            let aborted = waited.unwrap_err();
            assert!(matches!(aborted, Error::Launch(LaunchError::KernelAborted { .. })));
        } else {
            waited?;
        }
        assert_eq!(contents(&b), [2.0; 2]);
        // The graph does not have the kernel that was aborted.
        graph.launch(&stream)?;
        stream.synchronize()
    });
    ran.unwrap();
}

#[test]
fn ordered_operations_on_a_stream_that_is_not_captured_are_not_ordered_with_captured_ones() {
    ranks(1, |rank| {
        let (stream, other) = (rank.stream()?, rank.stream()?);
        let (order, b) = (StreamOrder::local(rank.context()), rank.context().alloc::<f32>(2)?);
        let fill = |stream: &Stream, value| {
            let _turn = order.begin(stream)?;
            stream.fill(&b, value)
        };
        let graph = stream.capture(|| fill(&other, 1.0).and_then(|()| fill(&stream, 2.0)))?;
        assert_eq!(contents(&b), [1.0; 2]);
        graph.launch(&stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&b), [2.0; 2]);
        Ok(())
    });
}

/// Another thread drops what a graph may use as soon as the graph is captured.
#[test]
fn what_is_dropped_when_a_capture_ends_is_held_by_its_graph() {
    for seed in 0..4 {
        ranks_on(simulation().seed(seed), 1, |rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            rank.load(&NO_PTX)?;
            let window = Arc::new(comm.window::<f32>(COUNT)?);
            let (begun, context) = (AtomicBool::new(false), rank.context());
            let (theirs, own) = (Arc::clone(&window), window);
            let graph = context.scope(|scope| {
                let (begun, stream) = (&begun, &stream);
                let thread = scope.spawn("drops", move || -> Result<()> {
                    let captures = || context.refuse_capturing("a drop").is_err();
                    while !begun.load(Ordering::Acquire) || captures() {
                        context.memory_info()?;
                    }
                    drop(theirs);
                    Ok(())
                })?;
                let graph = stream.capture(move || {
                    begun.store(true, Ordering::Release);
                    // SAFETY: one thread.
                    unsafe { add_one::args(&*own).grid(1).block(1).launch(stream) }
                });
                thread.join()?;
                graph
            })?;
            assert_eq!(count(&log_of(rank), "ncclCommWindowDeregister"), 0);
            graph.launch(&stream)?;
            stream.synchronize()
        });
    }
}

#[test]
fn what_a_graph_of_kernels_may_use_is_held_when_all_resources_are_closed() {
    ranks(1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = comm.window::<f32>(COUNT)?;
        // SAFETY: one thread.
        let launch = || unsafe { add_one::args(&window).grid(1).block(1).launch(&stream) };
        let graph = stream.capture(launch)?;
        makes_no_calls(rank, || comm.close_all().unwrap());
        assert!(!window.is_valid() && graph.is_valid());
        graph.launch(&stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&window)[0], 1.0);
        let ((), log) = logged(rank, || drop(graph));
        assert_eq!(log.last().unwrap(), "ncclCommWindowDeregister", "{log:?}");
        Ok(())
    });
}
