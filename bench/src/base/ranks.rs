//! Starts the ranks, and reduces numbers over them.

use anyhow::{Result, bail};
use devcomm::{GinLoopback, Rank, Simulation, World};

use crate::base::options::RankOptions;

/// Runs `body` on this process's ranks: a launcher's ranks, or threads on GPUs or simulated GPUs.
/// With `--processes`, starts the ranks as processes instead.
pub fn run(
    options: &RankOptions,
    simulate: Option<usize>,
    body: impl Fn(&Rank) -> Result<()> + Sync,
) -> Result<()> {
    if [options.gpus, simulate].contains(&Some(0)) {
        bail!("a job has at least one rank");
    }
    if options.gin_loopback && simulate.is_none() {
        // This sets environment variables, so it comes before any thread starts or uses a GPU.
        GinLoopback::new().enable()?;
    }
    if options.processes && !World::is_launched() {
        let ranks = options.gpus.map_or_else(devcomm::visible_gpus, Ok)?;
        return Ok(World::spawn_local(ranks)?);
    }
    let world = match (simulate, options.gpus) {
        (Some(ranks), _) => World::builder().simulate(Simulation::new(ranks)).from_env(),
        (None, Some(ranks)) if !World::is_launched() => World::threads(ranks),
        _ => World::from_env(),
    }?;
    let ranks = world.n_ranks();
    if let Some(gpus) = options.gpus.filter(|gpus| *gpus != ranks) {
        bail!("--ngpus {gpus}, but the launcher started {ranks} ranks");
    }
    world.run(body)?;
    Ok(())
}

/// Returns the elementwise maximum over the ranks, which all pass the same number of elements, none
/// of them negative. *Collective*.
pub fn slowest(rank: &Rank, mine: &[f64]) -> Result<Vec<f64>> {
    let all = rank.all_gather(mine)?;
    let at = |i: usize| all.iter().filter_map(|theirs| theirs.get(i).copied()).fold(0.0, f64::max);
    Ok((0..mine.len()).map(at).collect())
}

/// Returns the sum over the ranks. *Collective*.
pub fn total(rank: &Rank, mine: usize) -> Result<usize> {
    Ok(rank.all_gather(&[mine])?.concat().iter().sum())
}
