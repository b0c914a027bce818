//! LSA barriers back to back.

use anyhow::{Result, ensure};
use devcomm::{DevCommRequirements, DevCommResource, Kernels, LaunchConfig, Stream, Window};
use devcomm_bench_kernels::{lsa_barrier, lsa_barrier_checked};

use super::Job;
use super::measure::Case;
use super::row::Label;

/// Barriers in a launch, so many that the launch does not count.
const ROUNDS: u32 = 1000;
const CHECKED_ROUNDS: u32 = 100;
/// Blocks, each with a barrier of its own.
const BLOCKS: [u32; 3] = [1, 16, 64];
const THREADS: [u32; 2] = [128, 512];

struct Barrier {
    dev_comm: DevCommResource,
    /// For the check: a row of ranks for every block.
    table: Window<u32>,
    wrong: Window<u32>,
    config: LaunchConfig,
}

/// Measures the pair.
pub fn run(job: &mut Job<'_>) -> Result<()> {
    let options = &job.options.grid;
    let blocks = options.blocks.map_or(BLOCKS.to_vec(), |blocks| vec![blocks]);
    let threads = options.threads.map_or(THREADS.to_vec(), |threads| vec![threads]);
    let ranks = job.rank.n_ranks();
    for threads in threads {
        ensure!(
            threads as usize >= ranks,
            "{threads} threads a block, but a barrier of {ranks} ranks is checked by as many"
        );
        for &blocks in &blocks {
            let len = blocks as usize * ranks;
            let case = Barrier {
                dev_comm: job
                    .comm
                    .create_dev_comm(DevCommRequirements::new().lsa_barriers(blocks))?,
                table: job.comm.window(len)?,
                wrong: job.comm.window(len)?,
                config: LaunchConfig::new(blocks, threads),
            };
            job.row(&case)?;
        }
    }
    Ok(())
}

impl Case for Barrier {
    fn label(&self) -> Label {
        let (blocks, threads) = (self.config.grid.x, self.config.block.x);
        Label { kernel: "lsa_barrier", dtype: "-", bytes: 0, blocks, threads }
    }

    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32> {
        Ok(kernels.info(lsa_barrier)?.registers)
    }

    fn launch(&self, kernels: &Kernels, stream: &Stream) -> devcomm::Result<()> {
        // SAFETY: every rank launches the same, in one stream; the case outlives the launches, whose batches are waited for.
        unsafe { kernels.launch(stream, lsa_barrier, self.config, (&self.dev_comm, ROUNDS)) }
    }

    fn operations(&self) -> u32 {
        ROUNDS
    }

    fn count_wrong(&self, job: &Job<'_>, kernels: &Kernels) -> Result<usize> {
        self.table.fill(0xff)?;
        self.wrong.fill(0xff)?;
        // No rank's message may come before the other's fill.
        job.rank.barrier()?;
        let args = (&self.dev_comm, &self.table, &self.wrong, CHECKED_ROUNDS);
        // SAFETY: as `launch`; both windows have a row of ranks for every block, and a block has a thread for every rank.
        unsafe { kernels.launch(&job.stream, lsa_barrier_checked, self.config, args)? };
        job.finish_batch()?;
        let mut wrong = vec![0; self.wrong.len()];
        self.wrong.copy_to_host(&mut wrong)?;
        // An element that was not written counts as one.
        Ok(wrong.iter().map(|&count| count.min(CHECKED_ROUNDS) as usize).sum())
    }
}
