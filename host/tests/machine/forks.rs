//! Tests of processes that fork.

use devcomm_host::{
    CommConfig, DevCommRequirements, Error, LaunchConfig, Rank, ReduceOp, Result, StateError, World,
};

use crate::kernels::{COUNT, NO_PTX, launch_store_count};
use crate::support::ranks;

/// Forks a child, and checks that `f` returns true there. A child that hangs is ended.
fn in_child(f: impl FnOnce() -> bool) {
    // SAFETY: the child has one thread, which calls `f`, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: both have no requirements.
        unsafe {
            libc::alarm(60);
            libc::_exit(i32::from(!f()))
        }
    }
    let mut status = 0;
    // SAFETY: a child of this process that was not waited for.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
}

fn is_refused<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::State(StateError::Forked)))
}

/// Checks that a forked child is refused all calls that wait for the GPU, other ranks or threads.
fn check_that_all_are_refused(rank: &Rank) -> Result<()> {
    let (comm, stream, event) = (rank.communicator()?, rank.stream()?, rank.context().event()?);
    let other = rank.new_communicator(&CommConfig::new())?;
    let window = comm.window::<f32>(COUNT)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    let launch = || launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window));
    launch()?;
    in_child(move || {
        let refused = [
            is_refused(rank.barrier()),
            is_refused(rank.new_communicator(&CommConfig::new())),
            is_refused(rank.stream()),
            is_refused(comm.barrier()),
            is_refused(comm.window::<f32>(8)),
            is_refused(comm.mem_alloc::<f32>(8)),
            is_refused(comm.split(Some(0), 0, &CommConfig::new())),
            is_refused(comm.all_reduce(&window, &window, ReduceOp::Sum, &stream)),
            is_refused(other.destroy()),
            is_refused(launch_store_count(&stream, LaunchConfig::new(1, 32), (&dev, &window))),
            is_refused(stream.record(&event)),
            is_refused(stream.synchronize()),
            is_refused(event.synchronize()),
            is_refused(window.copy_from_host(&[1.0; COUNT])),
            is_refused(window.copy_to_host(&mut [0.0; COUNT])),
        ];
        drop((window, dev, event, stream, other, comm));
        refused.into_iter().all(|refused| refused)
    });
    Ok(())
}

#[test]
fn a_forked_child_that_uses_its_parents_world_gets_an_error_and_the_parent_goes_on() {
    ranks(2, |rank| {
        rank.load(&NO_PTX)?;
        let comm = rank.communicator()?;
        check_that_all_are_refused(rank)?;
        let b = comm.mem_alloc::<f32>(1)?;
        let stream = rank.stream()?;
        comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
        stream.synchronize()
    });
}

#[test]
fn a_forked_child_of_a_thread_that_has_run_a_world_runs_one_of_its_own() {
    // In a process without other tests, whose threads may hold locks as it forks.
    const ALONE: &str = "DEVCOMM_TEST_FORKS";
    const NAME: &str = "forks::a_forked_child_of_a_thread_that_has_run_a_world_runs_one_of_its_own";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let ran = alone.args(["--exact", NAME]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let world = World::simulated(2).unwrap();
    let ranks = || world.run(|rank| Ok::<_, Error>(rank.rank()));
    assert_eq!(ranks().unwrap(), [0, 1]);
    in_child(|| {
        let own = World::simulated(2).and_then(|own| own.run(|rank| Ok(rank.rank())));
        is_refused(ranks()) && own.is_ok_and(|ranks| ranks == [0, 1])
    });
    assert_eq!(ranks().unwrap(), [0, 1]);
}
