//! Tests of threads of the operating system that use one rank's handles at the same time.

use std::sync::Barrier;

use devcomm_host::{Error, ReduceOp, Result, World, group};

use crate::support::tests;

tests! {
    threads_of_the_system_take_turns_on_a_communicator in ["WORLD_SIZE" = "1", "RANK" = "0"],
}

const THREADS: usize = 4;

// The stub NCCL ends the process when two threads call it with one communicator.
fn threads_of_the_system_take_turns_on_a_communicator() {
    let ran: Result<Vec<()>, Error> = World::from_env().unwrap().run(|rank| {
        let (start, shared) = (Barrier::new(THREADS), rank.stream()?);
        let work = || -> Result<()> {
            start.wait();
            let (comm, own) = (rank.communicator()?, rank.stream()?);
            for _ in 0..100 {
                let (one, other) = (comm.window::<f32>(1024)?, comm.mem_alloc::<f32>(1024)?);
                comm.all_reduce(&one, &other, ReduceOp::Sum, &shared)?;
                group(|_| {
                    comm.all_reduce(&other, &one, ReduceOp::Sum, &own)?;
                    comm.all_reduce(&other, &other, ReduceOp::Max, &shared)
                })?;
                own.synchronize()?;
                one.close()?;
                assert!(!one.is_valid() && comm.is_ready()?);
                comm.barrier()?;
            }
            shared.synchronize()
        };
        std::thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| scope.spawn(work));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    });
    ran.unwrap();
}
