//! All-reduce (sum): `kernels/src/lsa_allreduce.rs` against `ncclAllReduce`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use devcomm::{Element, F8E4M3, F8E5M2, KERNELS, Kernel, Kernels, device, kernels};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::benchmark::{Benchmark, Options, SIMULATED_BLOCKS, SIMULATED_LARGEST};
use super::collectives::{Flags, Operation, Workload, for_types};
use super::job::Job;
use crate::base::options::{GridOptions, LARGEST};
use crate::cases::workloads::{self, KernelInfo};
use crate::contenders::all_reduce_perf;
use crate::contenders::contender::{Contender, Variant};
use crate::contenders::foreign::Foreign;
use crate::contenders::selection::{Selection, VariantInfo};
use crate::contenders::torch::{self, TorchOptions, Work};

/// The flags of `all-reduce`.
#[derive(Args, Clone, Debug)]
pub struct AllReduce {
    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    grid: GridOptions,

    #[command(flatten)]
    torch: TorchOptions,

    /// Also run the all-reduces of nccl-tests' own kernels (-D 1 and 2, f32 and f16), by this
    /// program of nccl-tests, on the same number of GPUs, before the others
    #[arg(long, value_name = "PROGRAM", num_args = 0..=1)]
    #[arg(default_missing_value = "all_reduce_perf")]
    all_reduce_perf: Option<PathBuf>,
}

impl Benchmark for AllReduce {
    const NAME: &'static str = "all-reduce";
    const VARIANTS: &'static [VariantInfo] = &[
        (Variant::Rust, "kernels::lsa_allreduce on symmetric windows"),
        (Variant::RustOps, "devcomm::Collectives::all_reduce on the windows"),
        (Variant::RustOpsPlain, "the same on memory of ncclMemAlloc that is not registered"),
        (Variant::Cpp, "the same kernel in C++ on the same windows"),
        (
            Variant::Nccl,
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, as in nccl-tests",
        ),
        (Variant::NcclSym, "ncclAllReduce on the windows"),
        (
            Variant::TorchOneShot,
            "torch.ops.symm_mem.one_shot_all_reduce, timed in a run of its own before the others",
        ),
        (Variant::TorchTwoShot, "torch.ops.symm_mem.two_shot_all_reduce_, the same, in place"),
        (
            Variant::NcclTestsLsa,
            "all_reduce_perf -D 1 of nccl-tests, by the host's clock, in a run before the others",
        ),
        (Variant::NcclTestsLsaVector, "all_reduce_perf -D 2, the same"),
    ];

    const NCCL_TESTS: Option<&'static str> = Some("all_reduce_perf");

    fn validate(&self) -> Result<()> {
        self.flags.sizes.validate()?;
        self.grid.validate()
    }

    fn foreign(&self, options: &Options, selection: &Selection) -> Result<Vec<Foreign>> {
        let Options { simulate, run, .. } = options;
        if self.torch.python().is_none() && self.all_reduce_perf.is_none() {
            return Ok(Vec::new());
        }
        let (gpus, patience) = options.for_others()?;
        let largest = if simulate.is_some() { SIMULATED_LARGEST } else { LARGEST };
        let mut results = Vec::new();
        if let Some(python) = self.torch.python() {
            let types = [(f32::NAME, 4), (bf16::NAME, 2)];
            let counts = types.into_iter().filter(|(name, _)| self.flags.dtype.includes(name));
            let counts =
                counts.map(|(name, bytes)| Ok((name, self.flags.sizes.counts(largest, bytes)?)));
            let work = Work::Counts(counts.collect::<Result<_>>()?);
            let measurement = torch::Measurement::new(work, &torch::ALL_REDUCES, selection, run)?;
            results.extend(measurement.run(python, gpus, patience)?);
        }
        if let Some(program) = &self.all_reduce_perf {
            let variants = all_reduce_perf::VARIANTS.into_iter();
            let variants: Vec<_> = variants.filter(|(of, _)| selection.has(*of)).collect();
            let none = "--all-reduce-perf, but --variants names none of nccl-tests'";
            ensure!(!variants.is_empty(), none);
            let types = all_reduce_perf::TYPES.into_iter();
            let types: Vec<_> =
                types.filter(|(name, ..)| self.flags.dtype.includes(name)).collect();
            let none = "--all-reduce-perf: nccl-tests' kernels add f32 and f16, not bf16";
            ensure!(!types.is_empty(), none);
            let sizes = &self.flags.sizes;
            let measurement = all_reduce_perf::Measurement { program, gpus, sizes, largest, run };
            for dtype in types {
                for variant in &variants {
                    results.extend(measurement.run(*variant, dtype, patience)?);
                }
            }
        }
        Ok(results)
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        self.torch.select(&mut job.selection, &torch::ALL_REDUCES)?;
        if self.all_reduce_perf.is_none() {
            for (variant, _) in all_reduce_perf::VARIANTS {
                job.selection.omit(variant, "--all-reduce-perf [PROGRAM] runs it")?;
            }
        }
        job.harness.comm.require_single_lsa_team()?;
        let (harness, compiled) = (job.harness, job.kernels(&KERNELS, "lsa_allreduce")?);
        let (means, operation) = (self.flags.means(job)?, Operation::AllReduce);
        job.begin()?;
        let max_blocks = harness.choose(128, SIMULATED_BLOCKS);
        let info = KernelInfo { threads: 128, max_blocks, rounds_partial_sums: false };
        for_types!(self.flags.dtype, T in [f32, f16, bf16] => {
            let by_kernels = |count| -> Result<Option<Box<dyn Workload>>> {
                type All<'a> = workloads::AllReduce<'a, T, kernels::lsa_allreduce<T>>;
                let workload = All::new(harness, &self.grid, info, count)?;
                Ok(self.flags.sums().then(|| Box::new(ByKernels(workload, &compiled)) as _))
            };
            self.flags.run_type::<T>(job, operation, &means, &by_kernels)?;
        });
        for_types!(self.flags.dtype, T in [F8E4M3, F8E5M2, i32] => {
            self.flags.run_type::<T>(job, operation, &means, &|_| Ok(None))?;
        });
        Ok(())
    }
}

/// An all-reduce by each compiler's kernel.
struct ByKernels<'a, T: Number, K>(workloads::AllReduce<'a, T, K>, &'a [(Variant, Kernels)]);

impl<T, K> Workload for ByKernels<'_, T, K>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    fn contenders(&self) -> Result<Vec<Contender<'_>>> {
        self.0.with(self.1)
    }
}

/// The bus bandwidth of an all-reduce over its algorithm bandwidth, as nccl-tests defines them.
pub fn bus(ranks: usize) -> f64 {
    2.0 * (ranks - 1) as f64 / ranks as f64
}
