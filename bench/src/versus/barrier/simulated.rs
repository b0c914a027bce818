//! In the simulator.

use anyhow::Result;
use devcomm::sim::{self, DevCommConfig, LaunchConfig};
use devcomm_bench_kernels::lsa_barrier_checked;

use super::{CASE, CHECKED_ROUNDS, grids, wrong_in};
use crate::options::GridOptions;
use crate::versus::machine::{Job, Way};
use crate::versus::simulated::{MAX_BLOCKS, Simulated};
use crate::versus::variant::Variant;

/// Checks every grid.
pub fn run(options: &GridOptions, job: &mut Job<'_, Simulated>) -> Result<()> {
    let sim = &job.machine.sim;
    for (blocks, threads) in grids(options, sim.ranks(), MAX_BLOCKS)? {
        let dev_comm = DevCommConfig { lsa_barriers: blocks, ..Default::default() };
        let len = blocks as usize * sim.ranks();
        let way = ByKernel {
            machine: job.machine,
            dev_comm: sim.dev_comm(dev_comm)?,
            table: sim.window(len)?,
            wrong: sim.window(len)?,
            config: LaunchConfig::new(blocks, threads),
        };
        job.compare(CASE, &vec![Box::new(way)])?;
    }
    Ok(())
}

struct ByKernel<'a> {
    machine: &'a Simulated,
    dev_comm: sim::DevComm,
    table: sim::Window<u32>,
    wrong: sim::Window<u32>,
    config: LaunchConfig,
}

impl Way for ByKernel<'_> {
    fn variant(&self) -> Variant {
        Variant::Rust
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.config.grid, self.config.block))
    }

    fn enqueue(&self) -> Result<()> {
        let Self { dev_comm, table, wrong, .. } = self;
        let args = |rank| (dev_comm.rank(rank), table.rank(rank), wrong.rank(rank), CHECKED_ROUNDS);
        // SAFETY: both windows have a row of ranks for every block, and a block has a thread for every rank.
        unsafe { self.machine.sim.launch(lsa_barrier_checked, self.config, args)? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        let spoilt = vec![u32::MAX; self.wrong.len()];
        self.machine.each_rank(|rank| {
            self.table.write(rank, &spoilt)?;
            Ok(self.wrong.write(rank, &spoilt)?)
        })
    }

    fn count_wrong(&self) -> Result<usize> {
        let ranks = 0..self.machine.sim.ranks();
        Ok(ranks.map(|rank| wrong_in(&self.wrong.read(rank))).sum())
    }
}
