//! How the ranks come to be, and what they tell each other.

use anyhow::{Result, bail};
use devcomm::{GinLoopback, Rank, World};

use crate::options::RankOptions;

/// Runs `body` on this process's ranks: those that a launcher started, threads, or processes that are started here.
pub fn run(options: &RankOptions, body: impl Fn(&Rank) -> Result<()> + Sync) -> Result<()> {
    if options.gpus == Some(0) {
        bail!("there is at least one rank");
    }
    if options.gin_loopback {
        // Before anything touches a GPU or starts a thread.
        GinLoopback::new().enable()?;
    }
    if World::is_launched() {
        // Started by a launcher, or below.
        let world = World::from_env()?;
        let ranks = world.n_ranks();
        if let Some(gpus) = options.gpus
            && gpus != ranks
        {
            bail!("--ngpus {gpus}, but the launcher started {ranks} ranks (WORLD_SIZE)");
        }
        world.run(body)?;
        return Ok(());
    }
    let ranks = match options.gpus {
        Some(gpus) => gpus,
        None => devcomm::visible_gpus()?,
    };
    if options.processes {
        return Ok(World::spawn_local(ranks)?);
    }
    World::threads(ranks)?.run(body)?;
    Ok(())
}

/// Every rank's numbers, in order of ranks. *Collective*.
pub fn gather(rank: &Rank, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
    let number = |bytes: &[u8]| f64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
    let all = rank.all_gather(&bytes)?;
    Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(number).collect()).collect())
}

/// The largest of every rank's number at each place. *Collective*.
pub fn slowest(rank: &Rank, mine: &[f64]) -> Result<Vec<f64>> {
    let all = gather(rank, mine)?;
    let at = |i: usize| all.iter().filter_map(|row| row.get(i)).copied().fold(0.0, f64::max);
    Ok((0..mine.len()).map(at).collect())
}

/// The sum of every rank's number. *Collective*.
pub fn total(rank: &Rank, mine: usize) -> Result<usize> {
    let all = rank.all_gather(&(mine as u64).to_le_bytes())?;
    let number =
        |bytes: &Vec<u8>| bytes.as_slice().try_into().map(u64::from_le_bytes).unwrap_or(0) as usize;
    Ok(all.iter().map(number).sum())
}
