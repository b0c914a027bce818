//! Tests of aborts while a thread is about to make a call, and of recorded waits, on a simulated
//! machine.

use devcomm_sim::Simulation;

use super::*;
use crate::communicator::{CommConfig, Library};
use crate::device::Context;
use crate::machine::{Machine, Wakes};
use crate::sys::nccl::DEV_COMM_VERSION;
use crate::sys::nccl::call::Out;

/// Returns the return codes of all calls of a function so far.
fn codes(machine: &Machine, function: &str) -> Vec<Option<i32>> {
    let calls = machine.simulated().unwrap().calls();
    calls.iter().filter(|call| call.function == function).map(|call| call.code).collect()
}

/// Returns a communicator of one rank, on a machine that this thread has entered.
fn single_rank(machine: &Machine, config: &CommConfig) -> Communicator {
    machine.simulated().unwrap().record_calls();
    let library = Library::open_on(machine, None, DEV_COMM_VERSION).unwrap();
    let context = Context::on(machine, 0).unwrap();
    let id = library.unique_id().unwrap();
    Communicator::init_rank(&library, &context, &id, 0, 1, config).unwrap()
}

#[test]
fn a_communicator_is_not_freed_between_the_check_and_the_call_of_a_thread() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    let comm = single_rank(&machine, &CommConfig::new());
    let (handle, start) = (comm.handle(), machine.now());
    let entered = handle.enter(&[Status::Live]).unwrap();
    // The abort returns, and so do running calls, but the communicator is still allocated.
    let late = comm.abort_handle().abort().unwrap_err();
    assert!(matches!(late, Error::State(StateError::DeadlinePassed { .. })), "{late}");
    assert!(machine.since(start) >= ABORT_LIMIT);
    assert_eq!(codes(&machine, "ncclCommRevoke"), [Some(0)]);
    assert!(codes(&machine, "ncclCommAbort").is_empty());
    let late = entered.perform(calls::comm_count(entered.comm(), Out::new(0))).unwrap_err();
    assert!(matches!(late, Error::State(StateError::CommunicatorEnded { .. })), "{late}");
    assert_eq!(codes(&machine, "ncclCommCount"), [Some(0)]);
    drop(entered);
    let freed = || Ok(codes(&machine, "ncclCommAbort") == [Some(0)]);
    machine.poll(Wakes::Anything, Some(ABORT_LIMIT), freed).unwrap();
    comm.destroy().unwrap();
    assert!(codes(&machine, "ncclCommDestroy").is_empty());
}

#[test]
fn a_thread_that_waits_for_an_abort_which_cannot_start_aborts_itself() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    let comm = single_rank(&machine, &CommConfig::new());
    let (handle, waits) = (comm.handle(), comm.abort_handle());
    assert!(handle.begin_abort());
    let waiter = machine.spawn("waiter", move || waits.abort()).unwrap();
    let time = machine.poll(Wakes::Anything, Some(ABORT_LIMIT / 2), || Ok(false));
    assert!(matches!(time, Err(Error::State(StateError::DeadlinePassed { .. }))), "{time:?}");
    assert!(codes(&machine, "ncclCommAbort").is_empty());
    // This is what `start_abort` does when the system has no more threads.
    handle.aborting().change(|aborting| *aborting = Aborting::No);
    waiter.wait(None, || Ok(())).unwrap().unwrap();
    assert_eq!(codes(&machine, "ncclCommAbort"), [Some(0)]);
}

#[test]
fn a_wait_for_a_communicator_that_does_not_block_is_recorded() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    let comm = single_rank(&machine, &CommConfig::new().blocking(false));
    let waits = || comm.context().recorder().to_string().matches("communicator is ready").count();
    comm.wait(ABORT_LIMIT).unwrap();
    assert_eq!(waits(), 1);
    comm.revoke().unwrap();
    assert_eq!(waits(), 2);
}

#[test]
fn every_abort_waits_until_the_communicator_is_freed() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    let comm = single_rank(&machine, &CommConfig::new());
    let call = comm.handle().enter(&[Status::Live]).unwrap();
    let abort = || {
        let (handle, machine) = (comm.abort_handle(), machine.clone());
        let work = move || handle.abort().map(|()| codes(&machine, "ncclCommAbort"));
        comm.context().machine().spawn("aborts", work).unwrap()
    };
    let aborts = [abort(), abort()];
    machine.sleep(ABORT_LIMIT / 2);
    drop(call);
    for abort in aborts {
        assert_eq!(abort.wait(None, || Ok(())).unwrap().unwrap(), [Some(0)]);
    }
}

#[test]
fn an_abort_revokes_a_communicator_of_another_library_once() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    for is_revoked in [false, true] {
        let owner = single_rank(&machine, &CommConfig::new());
        let before = codes(&machine, "ncclCommRevoke").len();
        // SAFETY: `owner` is of this library and GPU, and outlives what is created from it.
        let foreign =
            unsafe { Communicator::from_raw(owner.library(), owner.context(), owner.as_raw()) };
        let foreign = foreign.unwrap();
        let call = match is_revoked {
            true => foreign.revoke().map(|()| None).unwrap(),
            // It is stopped.
            false => Some(foreign.handle().enter(&[Status::Live]).unwrap()),
        };
        let aborted = foreign.abort_handle().abort();
        assert_eq!(aborted.is_ok(), is_revoked, "{aborted:?}");
        drop(call);
        foreign.abort_handle().abort().unwrap();
        assert_eq!(codes(&machine, "ncclCommRevoke")[before..], [Some(0)]);
        owner.abort_handle().abort().unwrap();
    }
}

#[test]
fn an_interrupted_call_says_so_after_the_abort_of_its_communicator() {
    let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
    let _entered = machine.enter_if_outside();
    let comm = single_rank(&machine, &CommConfig::new());
    let call = comm.handle().enter(&[Status::Live]).unwrap();
    start_abort(comm.handle()).unwrap();
    let interrupted = call.or_aborted(Err::<(), _>(StateError::Interrupted.into())).unwrap_err();
    assert!(matches!(interrupted, Error::State(StateError::Interrupted)), "{interrupted}");
}
