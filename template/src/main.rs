//! Adds up the ranks of all GPUs. `DEVCOMM_SIMULATE=2 cargo run` simulates two.

use std::process::ExitCode;

use devcomm::{Error, World};

use {{crate_name}}::SumOfRanks;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    // A thread for each GPU, the processes of torchrun or mpirun, or simulated GPUs.
    World::from_env()?.run(|rank| {
        let sums = SumOfRanks::new(rank, &[rank.rank() as f32; 100])?.compute()?;
        if rank.is_root() {
            let (n_ranks, sum) = (rank.n_ranks(), sums[0]);
            println!("{n_ranks} ranks, and the sum of their numbers is {sum}");
        }
        Ok::<_, Error>(())
    })?;
    Ok(())
}
