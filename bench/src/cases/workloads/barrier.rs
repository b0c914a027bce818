//! LSA barriers, one after the other.

use devcomm::{DevCommRequirements, DevCommResource, Kernels, LaunchConfig, Window};
use devcomm_bench_kernels::{lsa_barrier, lsa_barrier_checked};
use devcomm_testing::simulated::read;

use super::workload::Workload;
use crate::cases::prelude::*;

/// Barriers per timed launch (enough to hide the launch), and per checked launch.
const ROUNDS: u32 = 1000;
const CHECKED_ROUNDS: u32 = 100;

/// The barrier kernels, with their grid and memory.
pub struct Barrier<'a> {
    harness: &'a Harness<'a>,
    dev_comm: DevCommResource,
    /// The last round that each rank wrote in the checked kernel: an element per block and rank.
    table: Window<u32>,
    /// The number of rounds in which the checked kernel read another one: likewise.
    wrong: Window<u32>,
    config: LaunchConfig,
}

impl<'a> Barrier<'a> {
    /// Default numbers of blocks, each with its own barrier.
    pub const BLOCKS: [u32; 3] = [1, 16, 64];

    /// Allocates the memory. *Collective*.
    pub fn new(harness: &'a Harness<'a>, blocks: u32, threads: u32) -> Result<Self> {
        let (comm, ranks) = (harness.comm, harness.rank.n_ranks());
        ensure!(
            threads as usize >= ranks,
            "{threads} threads per block, but the check of a barrier needs {ranks}"
        );
        let len = blocks as usize * ranks;
        Ok(Self {
            harness,
            dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
            table: comm.window(len)?,
            wrong: comm.window(len)?,
            config: LaunchConfig::new(blocks, threads),
        })
    }
}

impl Workload for Barrier<'_> {
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>> {
        let Self { harness: Harness { stream, .. }, dev_comm, table, wrong, config } = self;
        let checked = move || {
            let checked = lsa_barrier_checked::args(dev_comm, table, wrong, CHECKED_ROUNDS);
            // SAFETY: both windows have an element for each block and rank, and a block has a
            // thread for each rank; every rank launches the same, on one stream, which is
            // synchronised.
            unsafe { checked.config(*config).launch(&kernels.on(stream)) }
        };
        let timed = move || {
            let barriers = lsa_barrier::args(dev_comm, ROUNDS).config(*config);
            // SAFETY: every rank launches the same, on one stream, which is synchronised.
            unsafe { barriers.launch(&kernels.on(stream)) }
        };
        let contender = Contender::new(variant, checked, self).timed(ROUNDS, timed);
        Ok(contender.by_kernel(*config, kernels.info::<lsa_barrier>()?))
    }
}

impl Outcome for Barrier<'_> {
    fn poison(&self) -> Result<()> {
        self.table.fill_bytes(0xff)?;
        Ok(self.wrong.fill_bytes(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // An unwritten count is u32::MAX: all rounds are wrong.
        Ok(read(&self.wrong)?.into_iter().map(|count| count.min(CHECKED_ROUNDS) as usize).sum())
    }
}
