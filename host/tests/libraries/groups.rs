//! Tests of what NCCL answers at the end of a group.

use devcomm_host::{
    Error, Kernels, LaunchConfig, RawArg, ReduceOp, StateError, Stream, World, group, simulate,
};
use devcomm_types::DevComm;

use crate::support::{FakeDevComm, SIDECAR, set, tests};

tests! {
    the_estimate_of_a_group_is_nccls in ["WORLD_SIZE" = "1", "RANK" = "0"],
    a_launch_by_name_before_the_operations_of_a_group_is_refused
        in ["WORLD_SIZE" = "1", "RANK" = "0"],
}

fn the_estimate_of_a_group_is_nccls() {
    let ran: Result<Vec<()>, Error> = World::from_env().unwrap().run(|rank| {
        let comm = rank.communicator()?;
        let memory = comm.mem_alloc::<f32>(8)?;
        // The stub estimates half of the number of operations so far: 3, and then 6.
        for estimate in [1.5, 3.0] {
            let made = simulate(|_| {
                (0..3).try_for_each(|_| comm.all_reduce(&memory, &memory, ReduceOp::Sum, None))
            })?;
            assert_eq!(made.time, estimate);
        }
        Ok(())
    });
    ran.unwrap();
}

fn a_launch_by_name_before_the_operations_of_a_group_is_refused() {
    let ran: Result<Vec<()>, Error> = World::from_env().unwrap().run(|rank| {
        let (comm, stream, other) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let (memory, dev) = (comm.mem_alloc::<f32>(8)?, FakeDevComm::new(1, &[]));
        let kernels = Kernels::load(rank.context(), &set("fill", ".version 8.6", SIDECAR, None))?;
        let args = || [RawArg::new::<DevComm, _>(&dev), RawArg::new(7_usize)];
        let launch = |on: &Stream| {
            // SAFETY: the stub driver runs no kernel.
            unsafe { kernels.on(on).launch_by_name("fill", LaunchConfig::new(1, 64), &args()) }
        };
        group(|_| {
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            let refused = launch(&stream);
            assert!(
                matches!(refused, Err(Error::State(StateError::BeforeDeferred { .. }))),
                "{refused:?}"
            );
            launch(&other)
        })?;
        launch(&stream)?;
        stream.synchronize()
    });
    ran.unwrap();
}
