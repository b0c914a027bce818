//! All-reduces in one step and in two.

use devcomm::{DevCommRequirements, Error, Rank};
use kernels::all_reduce::{one_shot, two_shot};
use norm::KERNELS;

#[devcomm::test(ranks = 2)]
fn one_step_and_two_give_the_same_sums(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(3))?;
    // With 1 and 7 elements some blocks have none; 501 do not fill the last vector.
    for count in [1, 7, 64, 501] {
        let [x, one, two] = [comm.window(count)?, comm.window(count)?, comm.window(count)?];
        let mine: Vec<f32> = (0..count).map(|i| (i * (rank.rank() + 1)) as f32).collect();
        stream.copy_to_device(&mine, &x)?;
        one_shot::args(&dev, &x, &one).grid(3).block(32).launch(&stream)?;
        two_shot::args(&dev, &x, &two).grid(3).block(32).launch(&stream)?;
        let sums: Vec<f32> = (0..count).map(|i| (i * (1 + 2)) as f32).collect();
        for out in [&one, &two] {
            let mut found = vec![0.0; count];
            stream.copy_to_host(out, &mut found)?;
            assert_eq!(found, sums);
        }
    }
    Ok(())
}
