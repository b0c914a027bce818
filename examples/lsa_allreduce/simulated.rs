//! The same kernel on simulated GPUs.

use std::time::Instant;

use anyhow::ensure;
use comfy_table::{CellAlignment, Table, presets};
use devcomm::kernels;
use devcomm::sim::{DevCommConfig, LaunchConfig, Simulator};
use devcomm::{HostKernel, device};
use half::{bf16, f16};

use crate::check::{Number, checksum, count_wrong, inputs};
use crate::options::{Dtype, ODD_COUNTS, Options};

/// GPUs to simulate where there is none.
pub const DEFAULT_RANKS: usize = 4;
const DEFAULT_MAX: usize = 256 << 10;
const DEFAULT_BLOCKS: u32 = 4;

/// Runs every type and size on `ranks` simulated GPUs.
pub fn run(options: &Options, ranks: usize) -> anyhow::Result<()> {
    let blocks = options.blocks.unwrap_or(DEFAULT_BLOCKS);
    let config = LaunchConfig::new(blocks, options.threads);
    println!("{ranks} simulated GPUs, {} blocks of {} threads\n", config.grid, config.block);
    let mut job = Job { options, ranks, config, wrong: 0, table: Table::new() };
    job.table.load_style(presets::NOTHING);
    job.table.set_header(["size", "count", "type", "redop", "simulated in", "#wrong"]);
    let simulated = job.run_types();
    // Also when a later row failed.
    if !job.table.is_empty() {
        for column in job.table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{}\n", job.table);
    }
    simulated?;
    ensure!(job.wrong == 0, "{} elements are wrong", job.wrong);
    println!("PASS, SIMULATED");
    Ok(())
}

struct Job<'a> {
    options: &'a Options,
    ranks: usize,
    config: LaunchConfig,
    wrong: usize,
    table: Table,
}

impl Job<'_> {
    fn run_types(&mut self) -> anyhow::Result<()> {
        if self.options.wants(Dtype::F32) {
            self.run_type::<f32>()?;
        }
        if self.options.wants(Dtype::F16) {
            self.run_type::<f16>()?;
        }
        if self.options.wants(Dtype::Bf16) {
            self.run_type::<bf16>()?;
        }
        Ok(())
    }

    fn run_type<T: Number>(&mut self) -> anyhow::Result<()>
    where
        kernels::lsa_allreduce<T>:
            HostKernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
    {
        let even = self.options.sizes(DEFAULT_MAX).into_iter().map(|size| size / size_of::<T>());
        let odd = ODD_COUNTS.into_iter().filter(|_| self.options.max.is_none());
        for count in even.filter(|&count| count > 0).chain(odd) {
            let started = Instant::now();
            let wrong = self.run_count::<T>(count)?;
            self.table.add_row([
                (count * size_of::<T>()).to_string(),
                count.to_string(),
                T::NAME.to_string(),
                "sum".to_string(),
                format!("{:.1?}", started.elapsed()),
                wrong.to_string(),
            ]);
            self.wrong += wrong;
        }
        Ok(())
    }

    /// One all-reduce of `count` elements; how many results are wrong, over all ranks.
    fn run_count<T: Number>(&self, count: usize) -> anyhow::Result<usize>
    where
        kernels::lsa_allreduce<T>:
            HostKernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
    {
        let sim = Simulator::new(self.ranks)?;
        let (send, recv) = (sim.window::<T>(count)?, sim.window::<T>(count)?);
        let comm = sim.dev_comm(DevCommConfig {
            lsa_barriers: self.config.grid,
            ..DevCommConfig::default()
        })?;
        for rank in 0..self.ranks {
            send.write(rank, &inputs::<T>(self.options.seed, rank, count))?;
        }
        // SAFETY: both windows have `count` elements in every rank, and nothing else uses them.
        unsafe {
            sim.launch(kernels::lsa_allreduce::<T>, self.config, |rank| {
                (comm.rank(rank), send.rank(rank), recv.rank(rank), count)
            })
        }?;
        let results: Vec<Vec<T>> = (0..self.ranks).map(|rank| recv.read(rank)).collect();
        let first = checksum(&results[0]);
        ensure!(
            results.iter().all(|result| checksum(result) == first),
            "the ranks' results differ"
        );
        Ok(results.iter().map(|r| count_wrong(self.options.seed, self.ranks, 1, r)).sum())
    }
}
