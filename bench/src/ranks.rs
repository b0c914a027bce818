//! How the ranks come to be, and what they tell each other.

use anyhow::{Result, bail};
use devcomm::{GinLoopback, Rank, Simulation, World};

use crate::options::RankOptions;

/// Runs `body` on this process's ranks: those that a launcher started, threads on GPUs or on
/// simulated ones, or processes that are started here.
pub fn run(
    options: &RankOptions,
    simulate: Option<usize>,
    body: impl Fn(&Rank) -> Result<()> + Sync,
) -> Result<()> {
    if [options.gpus, simulate].contains(&Some(0)) {
        bail!("there is at least one rank");
    }
    if options.gin_loopback && simulate.is_none() {
        // Before anything touches a GPU or starts a thread.
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
        bail!("--ngpus {gpus}, but the launcher started {ranks} ranks (WORLD_SIZE)");
    }
    world.run(body)?;
    Ok(())
}

/// The largest of every rank's number at each place. *Collective*.
pub fn slowest(rank: &Rank, mine: &[f64]) -> Result<Vec<f64>> {
    let all = rank.all_gather(mine)?;
    let at = |i: usize| all.iter().filter_map(|theirs| theirs.get(i).copied()).fold(0.0, f64::max);
    Ok((0..mine.len()).map(at).collect())
}

/// The sum of every rank's number. *Collective*.
pub fn total(rank: &Rank, mine: usize) -> Result<usize> {
    Ok(rank.all_gather(&[mine])?.concat().iter().sum())
}
