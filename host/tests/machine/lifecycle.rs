//! Tests of the end of communicators and of the resources created from them.

use devcomm_host::{
    AbortHandle, Buffer, CommConfig, CommResource, Communicator, Context, DevCommRequirements,
    DeviceSlice, Error, LaunchConfig, LaunchError, LaunchRefusal, MemoryStat, Rank, ReduceOp,
    Result, World,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count};
use crate::support::{
    assert_closed, assert_ended, assert_invalid, calls, count, log_in, logged, makes_no_calls,
    ranks,
};

const _: () = {
    const fn assert_send_and_sync<T: Send + Sync>() {}
    assert_send_and_sync::<AbortHandle>();
};

/// Returns a new communicator, which a test can end: it is not `rank.communicator()`.
pub(crate) fn new_comm(rank: &Rank) -> Result<Communicator> {
    rank.new_communicator(&CommConfig::new())
}

#[test]
fn destroy_closes_what_was_made_the_latest_first_and_does_so_once() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        let op = comm.pre_mul_sum(2.0_f32)?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let graph = stream.capture(|| comm.all_reduce(&window, &window, ReduceOp::Sum, &stream))?;
        let registered = comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
        let log = calls(rank, || comm.destroy())?;
        let closed = [
            "ncclCommDeregister",
            "ncclMemFree",
            "cuGraphExecDestroy",
            "cuGraphDestroy",
            "ncclDevCommDestroy",
            "ncclCommWindowDeregister",
            "ncclRedOpDestroy 5",
            "ncclCommFinalize",
            "ncclCommDestroy",
        ];
        assert_eq!(log, closed);
        assert!(!op.is_valid() && !window.is_valid() && !dev.is_valid() && !graph.is_valid());
        assert!(!registered.is_valid() && !comm.is_valid() && comm.as_raw().is_null());
        let log = calls(rank, || comm.destroy().and_then(|()| comm.abort()))?;
        assert!(log.is_empty(), "{log:?}");
        // Window memory is freed when the last handle is dropped.
        let ((), log) = logged(rank, || drop((window, registered)));
        assert_eq!(log, ["ncclMemFree"]);
        Ok(())
    });
}

#[test]
fn a_registration_lasts_until_it_is_closed_or_its_communicator_ends() {
    let ran = ranks(2, |rank| {
        let comm = new_comm(rank)?;
        let register = || -> Result<()> {
            comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
            // Its memory is that of a window, which is closed here.
            comm.register_buffer(&comm.window::<f32>(8)?)?;
            Ok(())
        };
        let log = calls(rank, register)?;
        let made = ["ncclMemAlloc 32", "ncclCommRegister 32"];
        assert_eq!((&log[..2], &*log[log.len() - 1]), (&made.map(str::to_owned)[..], DEREGISTER));
        assert_eq!(count(&log, "ncclCommDeregister") + count(&log, "ncclMemFree"), 0, "{log:?}");
        let registered = comm.register_buffer(&comm.mem_alloc::<f32>(4)?)?;
        let log = calls(rank, || registered.close())?;
        assert_eq!(log, ["ncclCommDeregister", "ncclMemFree"]);
        drop((comm, registered));
        Ok(())
    });
    let end = ["ncclCommDeregister", "ncclMemFree"];
    ends_with(&ran.world, &[&end[..], &end, &["ncclCommFinalize", "ncclCommDestroy"]].concat());
}

/// What NCCL is called for when a window is closed.
const DEREGISTER: &str = "ncclCommWindowDeregister";

#[test]
fn memory_that_the_program_frees_itself_is_registered_as_long_as_its_guard_lives() {
    ranks(2, |rank| {
        let (comm, memory) = (new_comm(rank)?, rank.communicator()?.mem_alloc::<f32>(8)?);
        // SAFETY: the memory outlives its registration.
        let foreign = unsafe {
            DeviceSlice::<f32>::from_raw_parts(rank.context(), memory.device_address(), 8)
        };
        makes_no_calls(rank, || assert_invalid(comm.register_buffer(&foreign)));
        let registered = comm.register_borrowed(&foreign)?;
        assert!(registered.is_valid() && registered.byte_len() == 32);
        let ((), log) = logged(rank, || drop(registered));
        assert_eq!(log, ["ncclCommDeregister"]);
        // A window of such memory has no owner either.
        let window = comm.register_window(&foreign, Default::default())?;
        assert_invalid(comm.register_buffer(&window));
        drop(comm.register_borrowed(&window)?);
        Ok(())
    });
}

#[test]
fn all_resources_of_a_communicator_are_closed_at_once_and_it_goes_on() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        let (op, window) = (comm.pre_mul_sum(2.0_f32)?, comm.window::<f32>(8)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let registered = comm.register_buffer(&comm.mem_alloc::<f32>(8)?)?;
        let all: [&dyn CommResource; 4] = [&op, &window, &dev, &registered];
        assert!(all.iter().all(|resource| resource.is_valid()));
        let log = calls(rank, || comm.close_all())?;
        let closed = [
            "ncclCommDeregister",
            "ncclMemFree",
            "ncclDevCommDestroy",
            DEREGISTER,
            "ncclRedOpDestroy 5",
        ];
        assert_eq!(log, closed);
        assert!(!all.iter().any(|resource| resource.is_valid()));
        makes_no_calls(rank, || {
            all.iter().for_each(|resource| resource.close().unwrap());
            comm.close_all().unwrap();
        });
        comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        stream.synchronize()
    });
}

#[test]
fn calls_on_an_ended_communicator_say_so() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        let (b, config) = (comm.mem_alloc::<f32>(1)?, CommConfig::new());
        comm.destroy()?;
        if !rank.is_root() {
            return Ok(());
        }
        // The other rank makes none of these calls.
        makes_no_calls(rank, || {
            let gone = "destroyed";
            assert_ended(comm.barrier(), gone);
            assert_ended(comm.host_all_gather(&[1_u8]), gone);
            assert_ended(comm.window::<f32>(1), gone);
            assert_ended(comm.mem_alloc::<f32>(1), gone);
            assert_ended(comm.collective("a call").agree(Ok(((), 1_u8))), gone);
            assert_ended(comm.pre_mul_sum_from(&b), gone);
            assert_ended(comm.memory_stat(MemoryStat::Suspended), gone);
            assert_ended(comm.all_reduce(&b, &b, ReduceOp::Sum, &stream), gone);
            assert_ended(comm.send(&b, 0, &stream), gone);
            assert_ended(comm.register_window(&b, Default::default()), gone);
            assert_ended(comm.register_buffer(&b), gone);
            assert_ended(comm.pre_mul_sum(1.0_f32), gone);
            assert_ended(comm.create_dev_comm(DevCommRequirements::new()), gone);
            assert_ended(comm.split(Some(0), 0, &config), gone);
            assert_ended(comm.shrink(&[1 - rank.rank()], Default::default(), &config), gone);
            assert_ended(comm.unique_id(), gone);
            assert_ended(comm.properties(), gone);
            assert_ended(comm.identity(), gone);
            assert_ended(comm.async_error(), gone);
            assert_ended(comm.team_world(), gone);
            assert_ended(comm.finalize(), gone);
            assert_ended(comm.revoke(), gone);
            assert_ended(comm.suspend(), gone);
            assert_ended(comm.resume(), gone);
        });
        Ok(())
    });
}

#[test]
fn what_is_closed_is_closed_once_and_is_not_valid() {
    ranks(2, |rank| {
        let comm = rank.communicator()?;
        let (window, dev) =
            (comm.window::<f32>(8)?, comm.create_dev_comm(DevCommRequirements::new())?);
        let registered = comm.register_buffer(&window)?;
        assert!(window.is_valid() && dev.is_valid() && registered.is_valid());
        let close = || -> Result<()> {
            registered.close()?;
            dev.close()?;
            window.close()
        };
        let log = calls(rank, || close().and_then(|()| close()))?;
        assert_eq!(log, ["ncclCommDeregister", "ncclDevCommDestroy", "ncclCommWindowDeregister"]);
        assert!(!window.is_valid() && !dev.is_valid() && !registered.is_valid());
        assert_closed(window.device_window().map(drop));
        assert_closed(window.user_pointer());
        assert_closed(dev.dev_comm().map(drop));
        assert_closed(registered.handle());
        // The memory can still be copied.
        window.copy_from_host(&[1.0; 8])
    });
}

fn assert_refused(result: Result<()>, which: &str) {
    match result {
        Err(Error::Launch(LaunchError::Refused {
            refusal: LaunchRefusal::Closed { what },
            ..
        })) if what == which => {}
        other => panic!("{other:?}"),
    }
}

pub(crate) fn assert_refused_as(result: Result<()>, state: &str) {
    match result {
        Err(Error::Launch(LaunchError::Refused {
            refusal: LaunchRefusal::CommunicatorEnded { how },
            ..
        })) if how == state => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_launch_with_what_is_closed_is_refused() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = || comm.window::<f32>(COUNT);
        let dev = || comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8));
        let (closed_window, closed_dev, window, dev) = (window()?, dev()?, window()?, dev()?);
        closed_window.close()?;
        closed_dev.close()?;
        let launch = |of| launch_store_count(&stream, LaunchConfig::new(8, 32), of);
        assert_refused(launch((&dev, &closed_window)), "the window");
        assert_refused(launch((&closed_dev, &window)), "the device communicator");
        launch((&dev, &window))?;
        comm.destroy()?;
        assert_refused_as(launch((&dev, &window)), "destroyed");
        Ok(())
    });
}

#[test]
fn what_was_made_from_a_communicator_keeps_it() {
    let ran = ranks(2, |rank| {
        let comm = new_comm(rank)?;
        let window = comm.window::<f32>(8)?;
        let slice = window.slice(1..3)?;
        makes_no_calls(rank, || drop((comm, window)));
        let ((), log) = logged(rank, || drop(slice));
        assert_eq!(log, ["ncclCommWindowDeregister", "ncclMemFree"]);
        Ok(())
    });
    ends_with(&ran.world, &["ncclCommFinalize", "ncclCommDestroy"]);
}

/// Checks the last calls of both ranks, before that of the context's end: a communicator that was
/// dropped ends with the rank's function.
fn ends_with(world: &World, calls: &[&str]) {
    for rank in 0..2 {
        let mut log = log_in(world, rank);
        assert_eq!(log.pop().unwrap(), "cuDevicePrimaryCtxRelease");
        assert_eq!(log[log.len() - calls.len()..], *calls);
    }
}

#[test]
fn clones_are_one_communicator() {
    ranks(2, |rank| {
        let comm = new_comm(rank)?;
        let clone = comm.clone();
        let ((), log) = logged(rank, || drop(comm));
        assert!(log.is_empty() && clone.is_valid(), "{log:?}");
        let other = clone.clone();
        clone.destroy()?;
        assert!(!other.is_valid());
        assert_ended(other.identity(), "destroyed");
        Ok(())
    });
}

#[test]
fn a_finalized_communicator_closes_what_was_made_and_is_not_finalized_twice() {
    ranks(2, |rank| {
        let comm = new_comm(rank)?;
        let (window, op) = (comm.window::<f32>(8)?, comm.pre_mul_sum(2.0_f32)?);
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let log = calls(rank, || comm.finalize())?;
        let closed = ["ncclDevCommDestroy", "ncclRedOpDestroy 5", "ncclCommWindowDeregister"];
        assert_eq!((&log[..3], &*log[3]), (&closed.map(str::to_owned)[..], "ncclCommFinalize"));
        assert_ended(comm.finalize(), "finalized");
        assert_ended(comm.window::<f32>(8), "finalized");
        let log = calls(rank, || comm.destroy())?;
        assert_eq!(log, ["ncclCommDestroy"]);
        drop((window, op, dev));
        Ok(())
    });
}

#[test]
fn a_suspended_communicator_waits_for_its_resume_and_is_resumed_for_its_end() {
    let ran = ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        let window = comm.window::<f32>(8)?;
        assert_ended(comm.resume(), "live");
        comm.suspend()?;
        assert_eq!(comm.memory_stat(MemoryStat::Suspended)?, 1);
        assert_ended(comm.all_reduce(&window, &window, ReduceOp::Sum, &stream), "suspended");
        assert_ended(comm.split(Some(0), 0, &CommConfig::new()), "suspended");
        assert_ended(window.device_window().map(drop), "suspended");
        assert_ended(window.close(), "suspended");
        comm.resume()?;
        assert!(window.is_valid());
        assert_eq!(comm.memory_stat(MemoryStat::Suspended)?, 0);
        comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        comm.suspend()?;
        let log = calls(rank, || comm.destroy())?;
        let end =
            ["ncclCommResume", "ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"];
        assert_eq!(log, end);
        let comm = new_comm(rank)?;
        comm.suspend()?;
        makes_no_calls(rank, || drop(comm));
        Ok(())
    });
    ends_with(&ran.world, &["ncclCommResume", "ncclCommFinalize", "ncclCommDestroy"]);
}

#[test]
fn a_revoked_communicator_is_good_for_a_split_and_its_end() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        let window = comm.window::<f32>(8)?;
        comm.recv(&window, 1 - rank.rank(), &stream)?;
        comm.revoke()?;
        assert_ended(comm.all_reduce(&window, &window, ReduceOp::Sum, &stream), "revoked");
        assert_ended(comm.finalize(), "revoked");
        stream.synchronize()?;
        let child = comm.split(Some(0), 0, &CommConfig::new())?.unwrap();
        child.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        let log = calls(rank, || comm.destroy())?;
        assert_eq!(log, ["ncclCommWindowDeregister", "ncclCommDestroy"]);
        child.destroy()
    });
}

#[test]
fn a_communicator_of_another_part_of_the_program_is_not_ended() {
    ranks(2, |rank| {
        let (comm, stream, context) = (new_comm(rank)?, rank.stream()?, rank.context());
        // SAFETY: `comm` is of this library and GPU, and outlives what is created from it here.
        let from = |context, raw| unsafe { Communicator::from_raw(rank.library(), context, raw) };
        let foreign = from(context, comm.as_raw())?;
        assert_eq!((foreign.rank(), foreign.n_ranks()), (rank.rank(), 2));
        assert_invalid(foreign.barrier());
        let window = foreign.window::<f32>(8)?;
        foreign.all_reduce(&window, &window, ReduceOp::Sum, &stream)?;
        let log = calls(rank, || foreign.destroy())?;
        assert_eq!(log, ["ncclCommWindowDeregister"]);
        makes_no_calls(rank, || drop(from(context, comm.as_raw())));
        assert_invalid(from(context, std::ptr::null_mut()));
        assert_invalid(from(&Context::new(3)?, comm.as_raw()));
        comm.identity().map(drop)
    });
}

#[test]
fn an_abort_of_a_communicator_of_another_library_only_stops_it() {
    let ran = ranks(2, |rank| {
        let (owner, stream, context) = (new_comm(rank)?, rank.stream()?, rank.context());
        // SAFETY: `owner` is of this library and GPU, and outlives what is created from it here.
        let comm = unsafe { Communicator::from_raw(rank.library(), context, owner.as_raw()) }?;
        let memory = comm.mem_alloc::<f32>(8)?;
        if rank.rank() == 0 {
            // Rank 1 never joins.
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        }
        let log = calls(rank, || comm.abort())?;
        assert_eq!(count(&log, "ncclCommRevoke"), 1, "{log:?}");
        assert!(!comm.is_valid());
        drop((comm, memory));
        // The owner frees it.
        owner.abort()
    });
    for gpu in 0..2 {
        assert_eq!(count(&log_in(&ran.world, gpu), "ncclCommAbort"), 1);
    }
}

#[test]
fn communicators_of_one_thread_end_one_by_one() {
    let ran = ranks(1, |rank| {
        let (library, contexts) = (rank.library(), [rank.context().clone(), Context::new(1)?]);
        let comms = Communicator::init_all(library, &contexts)?;
        comms[0].destroy()?;
        assert!(!comms[0].is_valid() && comms[1].is_valid());
        assert_eq!(comms[1].identity()?, (1, 2, 1));
        drop(comms);
        let twice = [contexts[0].clone(), contexts[0].clone()];
        assert_invalid(Communicator::init_all(library, &twice));
        assert_invalid(Communicator::init_all(library, &[]));
        Ok(())
    });
    for gpu in 0..2 {
        assert_eq!(count(&log_in(&ran.world, gpu), "ncclCommDestroy"), 1);
    }
}

#[test]
fn settings_reach_nccl() {
    ranks(2, |rank| {
        let config = CommConfig::new().min_ctas(2).max_ctas(4).net_name("Socket").comm_name("mine");
        let (comm, log) = logged(rank, || rank.new_communicator(&config));
        let shown = "config min_ctas 2 max_ctas 4 net Socket name mine";
        assert_eq!(log, [format!("ncclCommInitRankScalable {} of 2 {shown}", rank.rank())]);
        let config = CommConfig::new().max_ctas(3);
        let (child, log) = logged(rank, || comm?.split(Some(7), 1, &config));
        child?;
        assert!(log[0].starts_with("ncclCommSplit color 7 key 1 config max_ctas 3"), "{log:?}");
        assert_invalid(rank.new_communicator(&CommConfig::new().min_ctas(4).max_ctas(2)));
        Ok(())
    });
}
