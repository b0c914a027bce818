//! All-reduce: `devcomm::Collectives` and, for sums, `kernels/src/lsa_allreduce.rs` against
//! `ncclAllReduce`.

use std::collections::BTreeMap;

use devcomm::{Element, F8E4M3, F8E5M2, KERNELS, kernels};
use half::{bf16, f16};

use super::benchmark::{Options, SIMULATED_BLOCKS, SIMULATED_LARGEST};
use super::collectives::{Flags, for_types};
use super::operation::Operation;
use super::prelude::*;
use crate::base::options::LARGEST;
use crate::cases::workloads::{self, KernelInfo, Workload};
use crate::contenders::{PeerOptions, PeerWork};

/// The flags of `all-reduce`.
#[derive(Args, Clone, Debug)]
pub struct AllReduce {
    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    grid: GridOptions,
}

impl Benchmark for AllReduce {
    const NAME: &'static str = "all-reduce";
    const NCCL_TESTS: Option<&'static str> = Some("all_reduce_perf");

    fn validate(&self) -> Result<()> {
        self.flags.validate()?;
        self.grid.validate()
    }

    fn peers(&self) -> Option<&PeerOptions> {
        Some(&self.flags.peers)
    }

    fn work(&self, options: &Options, _: usize) -> Result<PeerWork> {
        let largest = if options.simulate.is_some() { SIMULATED_LARGEST } else { LARGEST };
        let mut counts = BTreeMap::new();
        for_types!(self.flags.dtype, T in [f32, f16, bf16] => {
            counts.insert(T::NAME, self.flags.sizes.counts(largest, size_of::<T>())?);
        });
        Ok(PeerWork::Counts(counts))
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        job.harness.comm.require_single_lsa_team()?;
        let (harness, compiled) = (job.harness, job.kernels(&KERNELS, "lsa_allreduce")?);
        let (means, operation) = (self.flags.means(job)?, Operation::AllReduce);
        job.begin()?;
        let max_blocks = harness.choose(128, SIMULATED_BLOCKS);
        let info = KernelInfo { threads: 128, max_blocks, rounds_partial_sums: false };
        for_types!(self.flags.dtype, T in [f32, f16, bf16] => {
            let workload = |count| -> Result<Box<dyn Workload>> {
                type All<'a> = workloads::AllReduce<'a, T, kernels::lsa_allreduce<T>>;
                Ok(Box::new(All::new(harness, &self.grid, info, count)?))
            };
            let by_kernels = self.flags.sums().then_some((&workload as _, &compiled[..]));
            self.flags.run_type::<T>(job, operation, &means, by_kernels)?;
        });
        for_types!(self.flags.dtype, T in [F8E4M3, F8E5M2, i32] => {
            self.flags.run_type::<T>(job, operation, &means, None)?;
        });
        Ok(())
    }
}
