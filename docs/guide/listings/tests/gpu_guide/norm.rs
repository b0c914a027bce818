//! The first kernel's tests.

use devcomm::LlA2a;
use kernels::blocks::normalize_by_blocks;
use kernels::message::normalize_by_message;

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
        // All elements of all ranks differ, so that a wrong index gives a wrong result.
        let part = |rank: usize| (1..=50).map(move |i| (launch * (50 * rank + i)) as f32);
        let mine: Vec<f32> = part(rank.rank()).collect();
        stream.copy_to_device(&mine, &x)?;
        normalize::args(&dev, &x, &sums, &out, 2.0).grid(1).block(64).launch(&stream)?;
        let mut scaled = [0.0; 50];
        stream.copy_to_host(&out, &mut scaled)?;
        let squares: f32 = (0..rank.n_ranks()).flat_map(part).map(|x| x * x).sum();
        for (scaled, x) in scaled.into_iter().zip(mine) {
            // The results are below 1; the orders of the sums, and so their roundings, differ.
            assert!((scaled - 2.0 * x / squares.sqrt()).abs() < 1e-6, "{scaled} of {x}");
        }
    }
    Ok(())
}
// ANCHOR_END: test

// ANCHOR: blocks
#[devcomm::test(ranks = 2)]
fn many_blocks_get_the_same_length(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (x, out) = (comm.window::<f32>(300)?, comm.window::<f32>(300)?);
    let blocks = 3;
    let sums = comm.window::<f32>(rank.n_ranks() * blocks as usize)?;
    let word = comm.mem_alloc::<u32>(1)?;
    word.fill_bytes(0)?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?;
    for launch in 1..=2 {
        let part = |rank: usize| (1..=300).map(move |i| (launch * (300 * rank + i)) as f32);
        let mine: Vec<f32> = part(rank.rank()).collect();
        stream.copy_to_device(&mine, &x)?;
        let args = normalize_by_blocks::args(&dev, &x, &sums, &out, &word, 1.0);
        // SAFETY: the word was 0, which each launch leaves, and no other kernel uses it.
        unsafe { args.grid(blocks).block(64).launch(&stream)? };
        let mut scaled = [0.0; 300];
        stream.copy_to_host(&out, &mut scaled)?;
        let squares: f32 = (0..rank.n_ranks()).flat_map(part).map(|x| x * x).sum();
        for (scaled, x) in scaled.into_iter().zip(mine) {
            assert!((scaled - x / squares.sqrt()).abs() < 1e-6, "{scaled} of {x}");
        }
    }
    Ok(())
}
// ANCHOR_END: blocks

// ANCHOR: message
#[devcomm::test(ranks = 2)]
fn a_message_brings_the_sum_of_each_rank(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let mut requirements = DevCommRequirements::new();
    let max_elements = rank.n_ranks() as u32;
    let exchange = requirements.add(LlA2a { blocks: 1, max_elements, element_size: 4 });
    let dev = comm.create_dev_comm(requirements)?;
    let exchange = dev.resource(exchange)?;
    let x = comm.mem_alloc::<f32>(50)?;
    for launch in 1..=3 {
        let part = |rank: usize| (1..=50).map(move |i| (launch * (50 * rank + i)) as f32);
        let mine: Vec<f32> = part(rank.rank()).collect();
        stream.copy_to_device(&mine, &x)?;
        let args = normalize_by_message::args(&dev, exchange, &x, 50, 2.0);
        // SAFETY: the memory is for one block and an element per rank, and x has 50 elements.
        unsafe { args.grid(1).block(64).launch(&stream)? };
        let mut scaled = [0.0; 50];
        stream.copy_to_host(&x, &mut scaled)?;
        let squares: f32 = (0..rank.n_ranks()).flat_map(part).map(|x| x * x).sum();
        for (scaled, x) in scaled.into_iter().zip(mine) {
            assert!((scaled - 2.0 * x / squares.sqrt()).abs() < 1e-6, "{scaled} of {x}");
        }
    }
    Ok(())
}
// ANCHOR_END: message

/// A window that is too short on one rank makes the launch an error on every rank.
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

/// Two blocks would both write the sums.
#[devcomm::test(ranks = 2)]
fn a_grid_of_two_blocks_is_refused(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [x, sums, out] = [(); 3].map(|()| comm.window::<f32>(50));
    let (x, sums, out) = (x?, sums?, out?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    let launch = normalize::args(&dev, &x, &sums, &out, 2.0).grid(2).block(64);
    let refused = launch.launch(&stream).unwrap_err().to_string();
    assert!(refused.contains("`grid.count() == 1`, but these are 2 and 1"), "{refused}");
    Ok(())
}
