//! The program of the first chapter: a vector, spread over the ranks, scaled to length 1.

// ANCHOR: program
use devcomm::{DevCommRequirements, Error, Rank, World};
use kernels::normalize;
use norm::KERNELS;

/// Elements of a rank.
const COUNT: usize = 1000;

fn main() -> Result<(), Error> {
    World::from_env()?.run(scale_part)?;
    Ok(())
}

/// Scales the vector, and prints this rank's part of the length squared.
fn scale_part(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    comm.require_single_lsa_team()?; // the kernel adds up the sums of its LSA team
    let (x, out) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
    let sums = comm.window::<f32>(rank.n_ranks())?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;

    stream.fill(&x, 1.0 + rank.rank() as f32)?;
    normalize::args(&dev, &x, &sums, &out, 1.0).grid(1).block(128).launch(&stream)?;
    let mut scaled = vec![0.0; COUNT];
    stream.copy_to_host(&out, &mut scaled)?;

    let squares: f32 = scaled.iter().map(|x| x * x).sum();
    println!("rank {}: its part of the length squared is {squares:.3}", rank.rank());
    Ok(())
}
// ANCHOR_END: program
