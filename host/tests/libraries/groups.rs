//! Tests of what NCCL answers at the end of a group.

use devcomm_host::{Error, ReduceOp, World, simulate};

use crate::support::tests;

tests! {
    the_estimate_of_a_group_is_nccls in ["WORLD_SIZE" = "1", "RANK" = "0"],
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
