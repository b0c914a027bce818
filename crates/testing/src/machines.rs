//! Machines that programs run on, and what is said of them.

use std::process::ExitCode;

use anyhow::Result;
use devcomm::{Error, Rank, World};

/// Runs a program in every rank of `world`, and prints `PASS`, once, when all of them are right.
pub fn run(world: Result<World, Error>, program: impl Fn(&Rank) -> Result<()> + Sync) -> ExitCode {
    let ran = world.map_err(anyhow::Error::from).and_then(|world| {
        let roots = world.run(|rank| {
            program(rank)?;
            Ok::<_, anyhow::Error>(rank.is_root())
        })?;
        // After all ranks, and in one process.
        match (roots.contains(&true), world.is_simulated()) {
            (false, _) => {}
            (true, false) => println!("PASS"),
            (true, true) => println!("PASS, SIMULATED"),
        }
        Ok(())
    });
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let advice = match error.downcast_ref::<Error>() {
                Some(Error::SeveralLsaTeams { .. }) => {
                    "\nThis program works by load and store alone. `hybrid_allreduce` and \
                     `hybrid_alltoall` also go over the network, between the teams."
                }
                Some(error) if error.is_of_the_machine() => {
                    "\nDEVCOMM_SIMULATE=4 runs it on four simulated GPUs."
                }
                _ => "",
            };
            eprintln!("error: {error:#}{advice}");
            ExitCode::FAILURE
        }
    }
}
