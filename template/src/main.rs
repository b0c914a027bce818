//! Adds up the ranks of all GPUs. `DEVCOMM_SIMULATE=2 cargo run` simulates two.

use devcomm::{Error, World};
use {{crate_name}}::sum_over_ranks;

fn main() -> Result<(), Error> {
    // A thread for each GPU, the processes of torchrun or mpirun, or simulated GPUs.
    World::from_env()?.run(|rank| {
        let sums = sum_over_ranks(rank, &[rank.rank() as f32; 100])?;
        if rank.is_root() {
            println!("{} ranks, and the sum of their numbers is {}", rank.n_ranks(), sums[0]);
        }
        Ok::<_, Error>(())
    })?;
    Ok(())
}
