//! Tests of what stays registered for the other ranks after an abort has ended kernels that waited
//! for them.

use std::time::Duration;

use devcomm_host::{
    CommConfig, Communicator, DevCommRequirements, DevCommResource, Effect, Error, LaunchError,
    Rank, Result, Stream,
};

use crate::kernels::{NO_PTX, meet};
use crate::support::{count, inject, later, log_in, log_of, ranks, world};

/// The delay of an event that a rank waits for.
const A_WHILE: Duration = Duration::from_millis(30);

/// Launches a kernel that waits at another barrier than that of the other rank, forever.
fn waiting(rank: &Rank, comm: &Communicator, stream: &Stream) -> Result<DevCommResource> {
    rank.load(&NO_PTX)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    // SAFETY: the kernel accesses no memory but barriers, and the host ends its wait.
    unsafe { meet::args(&dev, rank.rank() as u32).grid(1).block(32).launch(stream) }?;
    Ok(dev)
}

#[track_caller]
fn assert_aborted(result: Result<()>) {
    assert!(matches!(result, Err(Error::Launch(LaunchError::KernelAborted { .. }))), "{result:?}");
}

#[test]
fn a_window_stays_registered_when_kernels_are_aborted_while_its_end_waits_for_them() {
    let ran = ranks(2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (window, dev) = (comm.window::<f32>(8)?, waiting(rank, comm, &stream)?);
        let handle = dev.abort_handle();
        let watchdog = later(rank, A_WHILE, move || handle.abort());
        window.close()?;
        watchdog.join();
        assert_eq!(count(&log_of(rank), "ncclCommWindowDeregister"), 0);
        assert_aborted(stream.synchronize());
        Ok(())
    });
    for gpu in 0..2 {
        let log = log_in(&ran.world, gpu);
        assert_eq!(count(&log, "ncclCommWindowDeregister"), 1, "{log:?}");
    }
}

#[test]
fn a_communicator_whose_registrations_cannot_be_ended_is_aborted() {
    let world = world(2);
    let ended: Result<Vec<()>> = world.run(|rank| {
        let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
        let (window, dev) = (comm.window::<f32>(8)?, waiting(rank, &comm, &stream)?);
        dev.abort();
        assert_aborted(stream.synchronize());
        drop((window, dev));
        rank.barrier()?;
        inject(&world, "ncclDevCommDestroy", rank.device(), Effect::Fail(3));
        let failed = comm.destroy().unwrap_err();
        assert!(failed.to_string().contains("ncclDevCommDestroy"), "{failed}");
        let ends = ["ncclCommDestroy", "ncclCommAbort"];
        assert_eq!(ends.map(|end| count(&log_of(rank), end)), [0, 1]);
        Ok(())
    });
    ended.unwrap();
}
