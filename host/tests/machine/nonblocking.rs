//! Tests of communicators that do not block, and of those of other libraries, which may not.

use std::time::Duration;

use devcomm_host::{
    CommConfig, Communicator, DevCommRequirements, Error, LaunchConfig, ReduceOp, StateError,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count};
use crate::support::{calls, contents, count, filled, log_in, ranks};

/// The longest time until a communicator that does not block is ready.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn a_communicator_that_does_not_block_is_waited_for() {
    ranks(2, |rank| {
        let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
        assert!(!comm.is_ready()?);
        comm.wait(LIMIT)?;
        assert!(comm.is_ready()?);
        let (b, stream) = (filled(&comm, &[1.0_f32; 2])?, rank.stream()?);
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        let operator = comm.pre_mul_sum(2.0_f32).map(drop);
        assert!(matches!(operator, Err(Error::State(StateError::InProgress { .. }))));
        match comm.all_reduce(&b, &b, ReduceOp::Sum, &stream) {
            Err(Error::State(StateError::InProgress { operation: "ncclAllReduce", rank: r })) => {
                assert_eq!(r, rank.rank());
            }
            other => panic!("{other:?}"),
        }
        comm.wait(LIMIT)?;
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&b), [4.0; 2]);
        let child = comm.split(Some(0), 0, &CommConfig::new())?.unwrap();
        assert_eq!((child.rank(), child.n_ranks()), (rank.rank(), 2));
        child.destroy()?;
        comm.destroy()
    });
}

#[test]
fn windows_of_a_communicator_that_does_not_block_are_good_for_use() {
    let ran = ranks(2, |rank| {
        let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
        assert!(matches!(comm.window::<f32>(8), Err(Error::State(StateError::InProgress { .. }))));
        comm.wait(LIMIT)?;
        let alone = comm.window::<f32>(8)?;
        let (window, dev, dropped) = devcomm_host::group(|_| {
            let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
            Ok::<_, Error>((comm.window::<f32>(8)?, dev, comm.window::<f32>(8).map(drop)))
        })?;
        dropped?;
        assert!(alone.is_valid() && window.is_valid() && dev.is_valid());
        assert_eq!(window.user_pointer()?, window.device_address());
        assert_eq!(dev.dev_comm()?.lsa_barrier.n_barriers, 1);
        comm.destroy()
    });
    let deregistered = |gpu| count(&log_in(&ran.world, gpu), "ncclCommWindowDeregister");
    assert_eq!([deregistered(0), deregistered(1)], [3; 2]);
}

#[test]
fn a_communicator_that_is_not_ready_is_waited_for_before_its_end() {
    let ran = ranks(2, |rank| {
        let new = || rank.new_communicator(&CommConfig::new().blocking(false));
        let (one, other, kept) = (new()?, new()?, new()?);
        assert!(matches!(one.suspend(), Err(Error::State(StateError::InProgress { .. }))));
        one.destroy()?;
        other.finalize()?;
        other.destroy()?;
        kept.wait(LIMIT)?;
        kept.suspend()?;
        kept.resume()?;
        kept.suspend()?;
        drop(new()?);
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_in(&ran.world, gpu);
        let ends = ["ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"];
        assert_eq!(ends.map(|end| count(&log, end)), [4, 4, 0], "{log:#?}");
    }
}

#[test]
fn what_a_communicator_that_does_not_block_has_made_is_good_while_it_is_busy() {
    ranks(2, |rank| {
        let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
        comm.wait(LIMIT)?;
        rank.load(&NO_PTX)?;
        let (window, stream) = (comm.window::<f32>(COUNT)?, rank.stream()?);
        let create = || comm.create_dev_comm(DevCommRequirements::new());
        let (dev, unused) = (create()?, create()?);
        let busy = || comm.all_reduce(&window, &window, ReduceOp::Sum, &stream);
        busy()?;
        assert!(!comm.is_ready()? && dev.is_valid() && window.is_valid());
        launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window))?;
        stream.synchronize()?;
        busy()?;
        let log = calls(rank, || unused.close())?;
        assert_eq!(log, ["ncclDevCommDestroy"]);
        comm.destroy()
    });
}

#[test]
fn operations_of_a_communicator_of_another_library_are_waited_for_after_its_handle_is_dropped() {
    ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        // SAFETY: `comm` is of this library and GPU, and outlives what is created from it here.
        let from =
            || unsafe { Communicator::from_raw(rank.library(), rank.context(), comm.as_raw()) };
        let b = filled(comm, &[1.0_f32; 2])?;
        from()?.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        assert_eq!(contents(&b), [2.0; 2]);
        // Of one that does not block, the operation may not be in the stream yet.
        let nonblocking = rank.new_communicator(&CommConfig::new().blocking(false))?;
        nonblocking.wait(LIMIT)?;
        // SAFETY: `nonblocking` outlives what is created from it here.
        let foreign = unsafe {
            Communicator::from_raw(rank.library(), rank.context(), nonblocking.as_raw())
        }?;
        foreign.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        drop(foreign);
        assert!(nonblocking.is_ready()?);
        stream.synchronize()?;
        assert_eq!(contents(&b), [4.0; 2]);
        Ok(())
    });
}
