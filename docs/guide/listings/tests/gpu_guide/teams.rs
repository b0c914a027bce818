//! Windows and barriers.

use devcomm::{DevCommRequirements, Error, Rank};
use kernels::teams::{gather, pass_on};
use norm::KERNELS;

// ANCHOR: gather
#[devcomm::test(ranks = 2)]
fn every_rank_has_all_parts(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (x, all) = (comm.window::<f32>(3)?, comm.window::<f32>(3 * rank.n_ranks())?);
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    for launch in 0..2 {
        let first = (100 * launch + 3 * rank.rank()) as f32;
        stream.copy_to_device(&[first, first + 1.0, first + 2.0], &x)?;
        gather::args(&dev, &x, &all).grid(2).block(32).launch(&stream)?;
        let mut gathered = [0.0; 6];
        stream.copy_to_host(&all, &mut gathered)?;
        assert_eq!(gathered, [0, 1, 2, 3, 4, 5].map(|i| (100 * launch + i) as f32));
    }
    Ok(())
}
// ANCHOR_END: gather

#[devcomm::test(ranks = 2)]
fn what_the_previous_rank_has_passed_on_is_added(rank: &Rank) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let [x, inbox, out] = [comm.window::<f32>(70)?, comm.window(70)?, comm.window(70)?];
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    for launch in 0..3 {
        let (mine, previous) = (rank.rank() + launch, (1 - rank.rank()) + launch);
        stream.fill(&x, mine as f32)?;
        pass_on::args(&dev, &x, &inbox, &out).grid(2).block(32).launch(&stream)?;
        let mut sums = [0.0; 70];
        stream.copy_to_host(&out, &mut sums)?;
        assert_eq!(sums, [(10 * mine + previous) as f32; 70]);
    }
    Ok(())
}
