//! Compares the kernel with a sum on the host.

use devcomm::{Error, Rank};

use {{crate_name}}::SumOfRanks;

/// Returns distinct inputs whose sums are exact.
fn input(rank: usize) -> Vec<f32> {
    (0..1000).map(|i| (1000 * rank + i) as f32).collect()
}

/// The test runs on simulated GPUs in several schedules, with races detected; with the feature
/// `ptx` and four GPUs, on those.
#[devcomm::test(ranks = 4)]
fn every_rank_gets_the_sum_of_all(rank: &Rank) -> Result<(), Error> {
    let sum = SumOfRanks::new(rank, &input(rank.rank()))?;
    let inputs: Vec<Vec<f32>> = (0..rank.n_ranks()).map(input).collect();
    // A second launch finds what the first one has left in memory.
    for launch in 0..2 {
        for (i, sum) in sum.compute()?.into_iter().enumerate() {
            let expected = inputs.iter().map(|input| input[i]).sum::<f32>();
            assert_eq!(sum, expected, "launch {launch}, element {i} on rank {}", rank.rank());
        }
    }
    Ok(())
}
