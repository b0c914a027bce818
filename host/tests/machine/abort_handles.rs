//! Tests of aborts of a communicator from another thread.

use std::time::Duration;

use devcomm_host::{
    CommConfig, Communicator, DevCommRequirements, LaunchConfig, Rank, ReduceOp, Result,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count};
use crate::lifecycle::{assert_refused_as, new_comm};
use crate::support::{assert_closed, assert_ended, count, later, log_of, pause, ranks};

/// The delay of an abort from another thread, in the machine's virtual time.
const SOON: Duration = Duration::from_millis(50);

/// Aborts an operation that waits for the other rank forever.
fn aborted(rank: &Rank) -> Result<Communicator> {
    let (comm, stream) = (new_comm(rank)?, rank.stream()?);
    let b = comm.mem_alloc::<f32>(8)?;
    comm.recv(&b, 1 - rank.rank(), &stream)?;
    let handle = comm.abort_handle();
    let aborter = later(rank, SOON, move || handle.abort().and_then(|()| handle.abort()));
    assert_ended(stream.synchronize(), "aborted");
    aborter.join()?;
    Ok(comm)
}

#[test]
fn an_abort_from_another_thread_ends_a_wait_for_the_stream() {
    ranks(2, |rank| {
        let comm = aborted(rank)?;
        assert!(!comm.is_valid());
        assert_ended(comm.identity(), "aborted");
        comm.destroy()?;
        drop(comm);
        let log = log_of(rank);
        let ends = [count(&log, "ncclCommAbort"), count(&log, "ncclCommDestroy")];
        assert_eq!(ends, [1, 0], "{log:?}");
        Ok(())
    });
}

#[test]
fn an_abort_from_another_thread_ends_waits_for_ranks_on_the_host() {
    ranks(2, |rank| {
        // Rank 0 waits for rank 1, which does not come, in each of them.
        let waits: [fn(&Communicator) -> Result<()>; 5] = [
            |comm| comm.barrier(),
            |comm| comm.window::<f32>(8).map(drop),
            |comm| comm.split(Some(0), 0, &CommConfig::new()).map(drop),
            |comm| comm.create_dev_comm(DevCommRequirements::new()).map(drop),
            |comm| comm.host_all_gather(&[1_u8]).map(drop),
        ];
        for wait in waits {
            let comm = new_comm(rank)?;
            if rank.rank() == 0 {
                let handle = comm.abort_handle();
                let aborter = later(rank, SOON, move || handle.abort());
                assert_ended(wait(&comm), "aborted");
                aborter.join()?;
            } else {
                pause(rank, 2 * SOON);
            }
            // The world's other exchanges go on.
            rank.barrier()?;
            comm.abort()?;
        }
        Ok(())
    });
}

#[test]
fn what_was_made_from_an_aborted_communicator_is_refused_to_kernels() {
    ranks(2, |rank| {
        let (comm, stream) = (new_comm(rank)?, rank.stream()?);
        rank.load(&NO_PTX)?;
        let window = comm.window::<f32>(COUNT)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(8))?;
        let registered = comm.register_buffer(&window)?;
        let graph = stream.capture(|| comm.all_reduce(&window, &window, ReduceOp::Sum, &stream))?;
        comm.abort_handle().abort()?;
        assert!(!window.is_valid() && !dev.is_valid() && !registered.is_valid());
        assert_closed(window.device_window().map(drop));
        let launched = launch_store_count(&stream, LaunchConfig::new(8, 32), (&dev, &window));
        assert_refused_as(launched, "aborted");
        assert_ended(graph.launch(&stream), "aborted");
        comm.abort()?;
        assert!(!graph.is_valid());
        drop((window, registered));
        assert!(log_of(rank).iter().any(|line| line == "ncclMemFree"));
        Ok(())
    });
}
