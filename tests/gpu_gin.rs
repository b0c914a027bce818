//! The kernels for GIN on GPUs: what the examples check, a hundred random shapes in one job.
#![allow(clippy::duplicate_mod, reason = "each example includes what they share")]

#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/gin_alltoall.rs"]
mod gin_alltoall;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/gin_put_signal.rs"]
mod gin_put_signal;
mod gpu;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/hybrid_allreduce.rs"]
mod hybrid_allreduce;
#[allow(dead_code, reason = "a program of its own")]
#[path = "../examples/hybrid_alltoall.rs"]
mod hybrid_alltoall;

use anyhow::Result;
use devcomm::{DevCommRequirements, Error, GinConnectionType, KERNELS, Rank, World};

/// Shapes that are run in one job.
const ITERATIONS: usize = 100;

/// Runs `body` in every rank of 2 and of 4 GPUs, or skips that where there are not as many with GIN.
fn on_gpus_with_gin(name: &str, body: impl Fn(&Rank) -> Result<()> + Sync) {
    for wanted in [2, 4] {
        let name = format!("{name} on {wanted}");
        let world = World::threads(wanted).and_then(|world| {
            world.run(probe)?;
            Ok(world)
        });
        match world {
            Ok(world) => {
                if let Err(error) = world.run(|rank| body(rank)) {
                    panic!("{error:#}");
                }
                println!("GPU-TEST {name}: ran");
            }
            Err(error) => println!("GPU-TEST {name}: skipped ({})", gpu::of_the_machine(error)),
        }
    }
}

/// Does, in little, what every test rests on.
fn probe(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let requirements = DevCommRequirements::new().gin_connection(GinConnectionType::Full);
    rank.communicator()?.create_dev_comm(requirements.gin_signals(1))?;
    rank.communicator()?.window::<u32>(1)?;
    Ok(())
}

macro_rules! tests {
    ($($name:ident: $example:ident;)*) => { $(
        #[test]
        fn $name() {
            let options = $example::gin::Options {
                sim: None,
                team: None,
                iterations: ITERATIONS,
                seed: 7,
                preempt: false,
            };
            on_gpus_with_gin(stringify!($name), |rank| $example::run_rank(rank, &options));
        }
    )* };
}

tests! {
    every_throw_of_a_ping_pong_arrives: gin_put_signal;
    every_message_of_an_all_to_all_arrives: gin_alltoall;
    every_message_of_a_hybrid_all_to_all_arrives: hybrid_alltoall;
    a_hybrid_all_reduce_sums_over_all_teams: hybrid_allreduce;
}
