//! Tests of groups: operations take effect at the group's end, all of them or none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use devcomm_host::{
    Buffer, CommConfig, Communicator, Context, DevCommRequirements, DriverError, Effect, Error,
    NcclError, Rank, ReduceOp, Result, StateError, WindowFlags, group, simulate,
};

use crate::kernels::{NO_PTX, add_one};
use crate::support::{
    assert_closed, assert_in_group, calls, contents, filled, inject, logged, ranks, world,
};

fn none() -> Vec<String> {
    Vec::new()
}

#[test]
fn operations_take_effect_at_the_end_of_their_group() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 3])?;
        let log = calls(rank, || {
            group(|open| {
                let log = calls(rank, || comm.all_reduce(&b, &b, ReduceOp::Sum, &stream))?;
                assert_eq!((log, open.len()), (none(), 1));
                Ok(())
            })
        })?;
        assert_eq!(log, ["ncclGroupStart", "ncclAllReduce 3 type 7 op 0", "ncclGroupEnd"]);
        assert_eq!(contents(&b), [2.0; 3]);
        let (done, log) = logged(rank, || group(|_| Ok::<_, Error>(7)));
        assert_eq!((done?, log), (7, none()));
        Ok(())
    });
}

#[test]
fn work_on_a_stream_with_deferred_operations_is_refused_inside_their_group() {
    ranks(2, |rank| {
        let (comm, stream, other) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let (a, b) = (filled(comm, &[1.0_f32; 3])?, filled(comm, &[5.0_f32; 3])?);
        let window = comm.window::<f32>(1)?;
        rank.load(&NO_PTX)?;
        // SAFETY: the kernel is launched with one thread.
        let launch = |on| unsafe { add_one::args(&window).grid(1).block(1).launch(on) };
        let event = rank.context().event()?;
        other.record(&event)?;
        let graph = stream.capture(|| stream.fill(&b, 2.0))?;
        let mut host = [0.0; 3];
        group(|_| {
            comm.all_reduce(&a, &a, ReduceOp::Sum, &stream)?;
            let refused = [
                stream.copy(&a, &b),
                stream.fill(&b, 3.0),
                stream.copy_to_host(&a, &mut host),
                stream.copy_to_device(&[4.0; 3], &b),
                a.copy_to_host(&mut host),
                b.copy_from_host(&[4.0; 3]),
                b.fill_bytes(0),
                graph.launch(&stream),
                stream.record(&event),
                stream.wait_event(&event),
                stream.synchronize(),
                stream.synchronize_within(Duration::from_secs(1)),
                stream.is_idle().map(drop),
                launch(&stream),
            ];
            for (i, refused) in refused.into_iter().enumerate() {
                assert!(
                    matches!(refused, Err(Error::State(StateError::BeforeDeferred { .. }))),
                    "call {i}: {refused:?}"
                );
            }
            // Another stream has no deferred operations.
            other.fill(&b, 7.0)?;
            launch(&other)?;
            other.record(&event)?;
            other.synchronize()
        })?;
        // Nothing of what was refused has happened.
        assert_eq!((contents(&a), contents(&b)), (vec![2.0; 3], vec![7.0; 3]));
        assert_eq!(contents(&window), [1.0]);
        Ok(())
    });
}

#[test]
fn sends_and_receives_of_a_group_whose_buffers_overlap_are_refused() {
    ranks(2, |rank| {
        let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
        let memory = filled(comm, &[1.0 + me as f32; 20])?;
        let exchange = |[sent, received]: [usize; 2], peer: usize| {
            group(|_| {
                comm.send(&memory.slice(sent..sent + 4)?, peer, &stream)?;
                comm.recv(&memory.slice(received..received + 4)?, peer, &stream)
            })
        };
        for [sent, received] in [[0, 0], [0, 3], [3, 0]] {
            let refused = exchange([sent, received], 1 - me).unwrap_err().to_string();
            assert!(refused.contains("in one group overlap"), "{refused}");
            assert!(
                refused.contains(&format!("ncclRecv of 4 elements Float32, from rank {}", 1 - me))
            );
        }
        let twice = group(|_| {
            comm.recv(&memory.slice(..4)?, 1 - me, &stream)?;
            comm.recv(&memory.slice(3..7)?, 1 - me, &stream)
        });
        assert!(twice.unwrap_err().to_string().contains("in one group overlap"));
        assert!(exchange([0, 1], me).is_err());
        assert_eq!(contents(&memory), [1.0 + me as f32; 20]);
        // Memory is sent twice, and a rank receives from itself what it sends.
        exchange([0, 0], me)?;
        group(|_| {
            for (sent, received) in [(0, 6), (0, 10), (2, 14)] {
                comm.send(&memory.slice(sent..sent + 4)?, 1 - me, &stream)?;
                comm.recv(&memory.slice(received..received + 4)?, 1 - me, &stream)?;
            }
            Ok::<_, Error>(())
        })?;
        stream.synchronize()?;
        assert_eq!(contents(&memory)[6..18], [2.0 - me as f32; 12]);
        // A broadcast, which the root also receives, in place.
        for root in 0..2 {
            group(|_| {
                for peer in (0..2).filter(|_| me == root) {
                    comm.send(&memory.slice(..4)?, peer, &stream)?;
                }
                let first = if me == root { 0 } else { 6 };
                comm.recv(&memory.slice(first..first + 4)?, root, &stream)
            })?;
        }
        stream.synchronize()
    });
}

#[test]
fn nested_groups_are_one() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(3)?;
        let sum = || comm.all_reduce(&b, &b, ReduceOp::Sum, &stream);
        let log = calls(rank, || {
            group(|_| {
                group(|_| sum())?;
                group(|open| {
                    assert_eq!(open.len(), 1);
                    group(|_| sum())
                })?;
                sum()
            })
        })?;
        assert_eq!(log.len(), 5, "{log:?}");
        assert_eq!(log.iter().filter(|line| line.starts_with("ncclGroup")).count(), 2);
        stream.synchronize()
    });
}

#[test]
fn a_group_whose_closure_fails_or_panics_makes_nothing() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = comm.mem_alloc::<f32>(3)?;
        let sum = || comm.all_reduce(&b, &b, ReduceOp::Sum, &stream);
        let ((), log) = logged(rank, || {
            let failed: Result<()> = group(|_| {
                sum()?;
                // There is no rank 9.
                comm.send(&b, 9, &stream)
            });
            assert!(matches!(failed, Err(Error::InvalidInput { .. })));
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                group(|_| -> Result<()> {
                    sum()?;
                    panic!("in a group")
                })
            }));
            assert!(panicked.is_err());
        });
        assert_eq!(log, none());
        // No group is left open.
        let log = calls(rank, sum)?;
        assert_eq!(log, ["ncclAllReduce 3 type 7 op 0"]);
        stream.synchronize()
    });
}

#[test]
fn an_inner_group_that_fails_and_is_ignored_drops_only_its_own() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (b, c) = (comm.mem_alloc::<f32>(3)?, comm.mem_alloc::<f32>(5)?);
        let log = calls(rank, || {
            group(|_| {
                comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
                let inner: Result<()> = group(|_| {
                    comm.all_reduce(&c, &c, ReduceOp::Sum, &stream)?;
                    drop(comm.register_window(&c, WindowFlags::COLL_SYMMETRIC)?);
                    comm.send(&c, 9, &stream)
                });
                assert!(inner.is_err());
                comm.all_reduce(&b, &b, ReduceOp::Max, &stream)
            })
        })?;
        let kept = ["ncclAllReduce 3 type 7 op 0", "ncclAllReduce 3 type 7 op 2"];
        assert_eq!(log[1..log.len() - 1], kept);
        stream.synchronize()
    });
}

#[test]
fn windows_of_a_group_are_good_for_use_after_it() {
    ranks(2, |rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let (windows, log) = logged(rank, || {
            group(|_| {
                let windows = [comm.window::<f32>(10)?, comm.window::<f32>(20)?];
                for window in &windows {
                    assert!(!window.is_valid());
                    assert_in_group(window.device_window().map(drop));
                    assert_in_group(window.lsa_pointer(0, 0));
                }
                Ok::<_, Error>(windows)
            })
        });
        let windows = windows?;
        let registered = ["ncclCommWindowRegister 40 flags 1", "ncclCommWindowRegister 80 flags 1"];
        assert_eq!(log[3..5], registered, "{log:?}");
        for window in &windows {
            assert!(window.is_valid());
            assert_eq!(window.lsa_pointer(me, 1)? - window.lsa_pointer(me, 0)?, 4);
            assert_eq!(window.user_pointer()?, window.device_address());
        }
        Ok(())
    });
}

#[test]
fn a_window_whose_group_fails_is_closed() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let mut made = None;
        let failed: Result<()> = group(|_| {
            made =
                Some((comm.window::<f32>(10)?, comm.register_buffer(&comm.mem_alloc::<f32>(3)?)?));
            Err(Error::Driver(DriverError::NoGpu))
        });
        assert!(failed.is_err());
        let (window, buffer) = made.unwrap();
        assert_closed(window.device_window().map(drop));
        assert_closed(buffer.handle());
        assert!(!window.is_valid() && !buffer.is_valid());
        window.close()
    });
}

#[test]
fn a_device_communicator_can_be_made_in_a_group() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let requirements = || DevCommRequirements::new().lsa_barriers(8);
        let (dev, window) = group(|_| {
            let made = (comm.create_dev_comm(requirements())?, comm.window::<f32>(8)?);
            assert_in_group(made.0.dev_comm().map(drop));
            assert!(!made.0.is_valid());
            Ok::<_, Error>(made)
        })?;
        assert!(dev.is_valid() && window.is_valid());
        assert_eq!(dev.dev_comm()?.rank, rank.rank() as i32);
        Ok(())
    });
}

#[test]
fn what_is_dropped_inside_a_group_lasts_until_its_end() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let result = comm.mem_alloc::<f32>(1)?;
        let (send, op) = (filled(comm, &[2.0_f32])?, comm.pre_mul_sum(3.0_f32)?);
        let log = calls(rank, || {
            group(|_| {
                comm.all_reduce(&send, &result, &op, &stream)?;
                drop((send, op));
                Ok::<_, Error>(())
            })
        })?;
        let at = |call: &str| log.iter().position(|line| line.starts_with(call)).unwrap();
        assert!(at("ncclGroupEnd") < at("ncclMemFree"), "{log:?}");
        assert!(at("ncclGroupEnd") < at("ncclRedOpDestroy"), "{log:?}");
        assert_eq!(contents(&result), [12.0]);
        Ok(())
    });
}

#[test]
fn what_was_made_and_dropped_inside_a_group_is_closed_after_it() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let log = calls(rank, || {
            group(|_| {
                drop(comm.window::<f32>(10)?);
                drop(comm.register_borrowed(&comm.mem_alloc::<f32>(3)?)?);
                comm.create_dev_comm(DevCommRequirements::new()).map(drop)
            })
        })?;
        let at = |call: &str| log.iter().position(|line| line.starts_with(call)).unwrap();
        let end = at("ncclGroupEnd");
        for closed in ["ncclCommWindowDeregister", "ncclCommDeregister", "ncclDevCommDestroy"] {
            assert!(end < at(closed), "{log:?}");
        }
        assert!(at("ncclCommWindowDeregister") < at("ncclMemFree"), "{log:?}");
        Ok(())
    });
}

#[test]
fn nothing_is_closed_inside_a_group_that_may_use_it() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (window, buffer) = (comm.window::<f32>(1)?, comm.mem_alloc::<f32>(1)?);
        let (op, registered) = (comm.pre_mul_sum(3.0_f32)?, comm.register_buffer(&buffer)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        group(|_| {
            comm.all_reduce(&window, &window, &op, &stream)?;
            assert_in_group(op.close());
            assert_in_group(window.close());
            assert_in_group(registered.close());
            assert_in_group(dev.close());
            assert_in_group(comm.destroy());
            assert_in_group(comm.abort());
            Ok::<_, Error>(())
        })?;
        assert!(op.is_valid() && window.is_valid() && dev.is_valid() && registered.is_valid());
        stream.synchronize()
    });
}

#[test]
fn a_simulation_makes_nothing() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 3])?;
        let (estimate, log) = logged(rank, || {
            simulate(|_| {
                comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
                comm.all_reduce(&b, &b, ReduceOp::Max, &stream)
            })
        });
        // A simulated machine does not estimate times.
        assert_eq!(estimate?.time, 0.0);
        assert_eq!(log.last().unwrap(), "ncclGroupSimulateEnd");
        assert_eq!(contents(&b), [1.0; 3]);
        assert_in_group(group(|_| simulate(|_| Ok::<_, Error>(()))));
        assert_in_group(simulate(|_| comm.window::<f32>(3).map(drop)));
        Ok(())
    });
}

#[test]
fn communicators_are_neither_made_nor_ended_inside_a_group() {
    ranks(2, |rank| {
        let (comm, config) = (rank.communicator()?, CommConfig::new());
        let (library, context) = (rank.library(), rank.context());
        let id = library.unique_id()?;
        let ((), log) = logged(rank, || {
            let _ = group(|_| {
                let contexts = std::slice::from_ref(context);
                assert_in_group(Communicator::init_rank(library, context, &id, 0, 1, &config));
                assert_in_group(Communicator::init_all(library, contexts));
                assert_in_group(Communicator::join_grown(library, context, &id, 2, 3, &config));
                assert_in_group(comm.split(Some(0), 0, &config));
                assert_in_group(comm.shrink(&[1 - rank.rank()], Default::default(), &config));
                assert_in_group(comm.grow(3, Some(&id), &config));
                assert_in_group(comm.finalize());
                assert_in_group(comm.revoke());
                assert_in_group(comm.suspend());
                assert_in_group(comm.destroy());
                assert_in_group(comm.abort());
                assert_in_group(rank.stream()?.capture(|| Ok::<_, Error>(())).map(drop));
                Ok::<_, Error>(())
            });
        });
        assert!(!log.iter().any(|line| line.starts_with("nccl")), "{log:?}");
        Ok(())
    });
}

#[test]
fn communicators_of_two_gpus_on_one_thread_work_in_one_group() {
    ranks(1, |rank| {
        let contexts = [Context::new(1)?, Context::new(2)?];
        let comms = Communicator::init_all(rank.library(), &contexts)?;
        let streams = [contexts[0].stream()?, contexts[1].stream()?];
        let windows =
            group(|_| comms.iter().map(|comm| comm.window::<f32>(2)).collect::<Result<Vec<_>>>())?;
        for (rank, window) in windows.iter().enumerate() {
            window.copy_from_host(&[rank as f32 + 1.0; 2])?;
        }
        group(|_| {
            let mut gpus = comms.iter().zip(&windows).zip(&streams);
            gpus.try_for_each(|((comm, w), stream)| comm.all_reduce(w, w, ReduceOp::Sum, stream))
        })?;
        assert!(windows.iter().all(|window| contents(window) == [3.0; 2]));
        Ok(())
    });
}

#[test]
fn a_group_that_nccl_refuses_makes_nothing_and_says_which_call() {
    let world = world(2);
    inject(&world, "ncclBroadcast", None, Effect::Fail(2));
    let refused = |rank: &Rank| -> Result<()> {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 3])?;
        let mut window = None;
        let failed = group(|_| {
            comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
            window = Some(comm.window::<f32>(3)?);
            comm.broadcast(Some(b.device_slice()), &b, 0, &stream)
        });
        match failed {
            Err(Error::Nccl(NcclError::Failed {
                operation: "ncclBroadcast",
                rank: Some(r),
                ..
            })) => {
                assert_eq!(r, rank.rank());
            }
            other => panic!("{other:?}"),
        }
        assert!(!window.unwrap().is_valid());
        assert_eq!(contents(&b), [1.0; 3]);
        Ok(())
    };
    world.run(refused).unwrap();
}

/// NCCL's group does not know of a registration that failed.
#[test]
fn a_group_with_a_call_that_fails_at_once_starts_nothing() {
    let world = world(2);
    inject(&world, "ncclCommRegister", None, Effect::Fail(1));
    let ran: Result<Vec<()>> = world.run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let b = filled(comm, &[1.0_f32; 3])?;
        let failed = group(|_| {
            comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
            comm.register_buffer(&b).map(drop)
        });
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("ncclCommRegister"), "{text}");
        stream.synchronize()?;
        assert_eq!(contents(&b), [1.0; 3]);
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        assert_eq!(contents(&b), [2.0; 3]);
        Ok(())
    });
    ran.unwrap();
}

#[test]
fn a_registration_in_a_group_that_fails_later_is_ended() {
    let world = world(2);
    let ran: Result<Vec<()>> = world.run(|rank| {
        let comm = rank.new_communicator(&CommConfig::new())?;
        let b = comm.mem_alloc::<f32>(3)?;
        inject(&world, "ncclAllReduce", rank.device(), Effect::Fail(1));
        let mut registered = None;
        let failed = group(|_| {
            registered = Some(comm.register_buffer(&b)?);
            comm.all_reduce(&b, &b, ReduceOp::Sum, &rank.stream()?)
        });
        assert!(failed.is_err());
        drop(b);
        let log = calls(rank, || registered.unwrap().close())?;
        assert_eq!(log, ["ncclCommDeregister", "ncclMemFree"]);
        Ok(())
    });
    ran.unwrap();
}
