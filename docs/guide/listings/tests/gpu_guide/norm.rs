//! The first kernel's test.

// ANCHOR: test
use devcomm::{DevCommRequirements, Error, Rank};
use kernels::normalize;
use norm::KERNELS;

#[devcomm::test(ranks = 2)]
fn the_vector_gets_the_length_of_the_scale(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (x, out) = (comm.window::<f32>(50)?, comm.window::<f32>(50)?);
    let sums = comm.window::<f32>(rank.n_ranks())?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    for launch in 1..=3 {
        stream.fill(&x, launch as f32)?;
        normalize::args(&dev, &x, &sums, &out, 2.0).grid(1).block(64).launch(&stream)?;
        let mut scaled = [0.0; 50];
        stream.copy_to_host(&out, &mut scaled)?;
        // The 100 elements of both ranks are equal, and their length is 2.
        assert!(scaled.iter().all(|x| (x - 0.2).abs() < 1e-6), "{scaled:?}");
    }
    Ok(())
}
// ANCHOR_END: test

/// A launch whose window is too short on a rank is an error there that gives the numbers.
#[devcomm::test(ranks = 2)]
fn a_window_that_is_too_short_is_an_error_with_the_numbers(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (x, out) = (comm.window::<f32>(50)?, comm.window::<f32>(50 - rank.rank())?);
    let sums = comm.window::<f32>(rank.n_ranks())?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    let launch = normalize::args(&dev, &x, &sums, &out, 2.0).grid(1).block(64);
    let refused = launch.launch(&stream).unwrap_err().to_string();
    assert!(refused.contains("x.len() <= out.len()") && refused.contains("49"), "{refused}");
    Ok(())
}
