//! On GPUs.

use anyhow::Result;
use devcomm::{DevCommRequirements, DevCommResource, Kernels, LaunchConfig, Window};
use devcomm_bench_kernels::{lsa_barrier, lsa_barrier_checked};

use super::{CASE, CHECKED_ROUNDS, ROUNDS, grids, wrong_in};
use crate::header::Header;
use crate::options::GridOptions;
use crate::versus::all_reduce::ByHost;
use crate::versus::gpus::Gpus;
use crate::versus::machine::{Job, Way, Ways};
use crate::versus::variant::Variant;

/// Measures every grid.
pub fn run(options: &GridOptions, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
    let gpus = job.machine;
    gpus.comm.require_single_lsa_team()?;
    let compiled = gpus.kernels(&mut job.choice, &crate::KERNELS, "lsa_barrier")?;
    job.begin(Header::of(gpus.rank)?);
    let ranks = gpus.rank.n_ranks();
    for (blocks, threads) in grids(options, ranks, u32::MAX)? {
        let mut ways: Ways<'_> = Vec::new();
        for (variant, kernels) in &compiled {
            let requirements = DevCommRequirements::new().lsa_barriers(blocks);
            let len = blocks as usize * ranks;
            ways.push(Box::new(ByKernel {
                gpus,
                variant: *variant,
                kernels,
                dev_comm: gpus.comm.create_dev_comm(requirements)?,
                table: gpus.comm.window(len)?,
                wrong: gpus.comm.window(len)?,
                config: LaunchConfig::new(blocks, threads),
            }));
        }
        if job.choice.has(Variant::Nccl) {
            ways.push(Box::new(ByHost::<f32>::unregistered(gpus, 1)?));
        }
        if job.choice.has(Variant::NcclSym) {
            let (send, recv) = (gpus.comm.window(1)?, gpus.comm.window(1)?);
            ways.push(Box::new(ByHost::<f32>::on_windows(gpus, &send, &recv)?));
        }
        job.compare(CASE, &ways)?;
    }
    Ok(())
}

struct ByKernel<'a> {
    gpus: &'a Gpus<'a>,
    variant: Variant,
    kernels: &'a Kernels,
    dev_comm: DevCommResource,
    /// For the check: a row of ranks for every block.
    table: Window<u32>,
    wrong: Window<u32>,
    config: LaunchConfig,
}

impl Way for ByKernel<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        Some((self.config.grid.x, self.config.block.x))
    }

    fn operations(&self) -> u32 {
        ROUNDS
    }

    fn enqueue(&self) -> Result<()> {
        let args = (&self.dev_comm, ROUNDS);
        // SAFETY: every rank launches the same, in one stream, whose work is waited for.
        unsafe { self.kernels.launch(&self.gpus.stream, lsa_barrier, self.config, args)? };
        Ok(())
    }

    fn spoil(&self) -> Result<()> {
        self.table.fill(0xff)?;
        Ok(self.wrong.fill(0xff)?)
    }

    fn enqueue_checked(&self) -> Result<()> {
        let args = (&self.dev_comm, &self.table, &self.wrong, CHECKED_ROUNDS);
        // SAFETY: as `enqueue`; both windows have a row of ranks for every block, and a block has a thread for every rank.
        unsafe { self.kernels.launch(&self.gpus.stream, lsa_barrier_checked, self.config, args)? };
        Ok(())
    }

    fn count_wrong(&self) -> Result<usize> {
        let mut counts = vec![0; self.wrong.len()];
        self.wrong.copy_to_host(&mut counts)?;
        Ok(wrong_in(&counts))
    }
}
