//! Barriers: those of `bench/kernels/src/lsa_barrier.rs`, many in one kernel, against the host's
//! equivalent, a collective of one element.

use super::benchmark::SIMULATED_BLOCKS;
use super::operation::{Operation, calls_of_nccl};
use super::prelude::*;
use crate::cases::workloads::{self, Workload};

/// The help of `--blocks`: the blocks do not depend on a size, unlike those of other benchmarks.
const BLOCKS_HELP: &str =
    "Blocks of a kernel [default: 1, then 16, then 64; 1, then 4 when simulated]";

/// The flags of `barrier`.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("blocks", |arg| arg.help(BLOCKS_HELP)))]
pub struct Barrier {
    #[command(flatten)]
    grid: GridOptions,
}

const THREADS: u32 = 128;

impl Benchmark for Barrier {
    const NAME: &'static str = "barrier";

    fn validate(&self) -> Result<()> {
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        harness.comm.require_single_lsa_team()?;
        let compiled = job.kernels(&crate::base::KERNELS, "lsa_barrier")?;
        let nccl = job.nccl()?;
        job.begin()?;
        let max_blocks = harness.choose(u32::MAX, SIMULATED_BLOCKS);
        let default = || workloads::Barrier::BLOCKS.map(|blocks| blocks.min(max_blocks)).to_vec();
        let mut blocks = self.grid.blocks.map_or_else(default, |blocks| vec![blocks]);
        blocks.dedup();
        for blocks in blocks {
            let threads = self.grid.threads.unwrap_or(THREADS);
            let workload = workloads::Barrier::new(harness, blocks, threads)?;
            let mut contenders = workload.contenders(&compiled)?;
            contenders.extend(calls_of_nccl(job, &nccl, Operation::AllReduce, 1)?);
            job.compare(Case::NONE, &contenders)?;
        }
        Ok(())
    }
}
