//! All-reduce (sum): `kernels/src/lsa_allreduce.rs` against `ncclAllReduce`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use devcomm::{
    Buffer, Collectives, DeviceSlice, Element, KERNELS, Kernel, Kernels, ReduceOp, Window, device,
    kernels,
};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::benchmark::{Benchmark, Options, SIMULATED_BLOCKS, SIMULATED_LARGEST};
use super::job::Job;
use crate::base::options::{Dtype, GridOptions, LARGEST, SizeOptions};
use crate::cases::workloads::{self, KernelInfo, Sum};
use crate::contenders::all_reduce_perf;
use crate::contenders::contender::{Contender, Variant};
use crate::contenders::foreign::Foreign;
use crate::contenders::selection::{Selection, VariantInfo};
use crate::contenders::torch::{self, TorchOptions, Work};
use crate::harness::Harness;
use crate::report::row::Case;

/// The flags of `all-reduce`.
#[derive(Args, Clone, Debug)]
pub struct AllReduce {
    #[command(flatten)]
    sizes: SizeOptions,

    #[command(flatten)]
    grid: GridOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    dtype: Dtype,

    /// Reduction
    #[arg(short = 'o', long = "op", value_enum, default_value = "sum")]
    op: Op,

    #[command(flatten)]
    torch: TorchOptions,

    /// Also run the all-reduces of nccl-tests' own kernels (-D 1 and 2, f32 and f16), by this
    /// program of nccl-tests, on the same number of GPUs, before the others
    #[arg(long, value_name = "PROGRAM", num_args = 0..=1)]
    #[arg(default_missing_value = "all_reduce_perf")]
    all_reduce_perf: Option<PathBuf>,
}

/// The reductions that the kernel supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    #[value(alias = "all")]
    Sum,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
        }
    }
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
        self.sizes.validate()?;
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
            let counts = types.into_iter().filter(|(name, _)| self.dtype.includes(name));
            let counts = counts.map(|(name, bytes)| Ok((name, self.sizes.counts(largest, bytes)?)));
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
            let types: Vec<_> = types.filter(|(name, ..)| self.dtype.includes(name)).collect();
            let none = "--all-reduce-perf: nccl-tests' kernels add f32 and f16, not bf16";
            ensure!(!types.is_empty(), none);
            let sizes = &self.sizes;
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
        let compiled = job.kernels(&KERNELS, "lsa_allreduce")?;
        let collectives = job.harness.collectives().build(job.harness.comm)?;
        job.begin()?;
        self.run_type::<f32, kernels::lsa_allreduce<f32>>(job, &compiled, &collectives)?;
        self.run_type::<f16, kernels::lsa_allreduce<f16>>(job, &compiled, &collectives)?;
        self.run_type::<bf16, kernels::lsa_allreduce<bf16>>(job, &compiled, &collectives)
    }
}

impl AllReduce {
    fn run_type<T, K>(
        &self,
        job: &mut Job<'_>,
        compiled: &[(Variant, Kernels)],
        collectives: &Collectives,
    ) -> Result<()>
    where
        T: Number,
        K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
    {
        if !self.dtype.includes(T::NAME) {
            return Ok(());
        }
        let harness = job.harness;
        let max_blocks = harness.choose(128, SIMULATED_BLOCKS);
        let info = KernelInfo { threads: 128, max_blocks, rounds_partial_sums: false };
        let largest = harness.choose(LARGEST, SIMULATED_LARGEST);
        for count in self.sizes.counts(largest, size_of::<T>())? {
            let workload = workloads::AllReduce::<T, K>::new(harness, &self.grid, info, count)?;
            let mut contenders = workload.with(compiled)?;
            for &in_place in job.places() {
                let recv = &workload.recv;
                let send = if in_place { recv } else { &workload.send };
                if job.selection.has(Variant::RustOps) {
                    let variant = Variant::RustOps;
                    contenders.push(by_collectives(harness, variant, collectives, send, recv)?);
                }
                if job.selection.has(Variant::RustOpsPlain) {
                    let (send, recv) = plain::<T>(harness, count, in_place)?;
                    let variant = Variant::RustOpsPlain;
                    contenders.push(by_collectives(harness, variant, collectives, &send, &recv)?);
                }
                if job.selection.has(Variant::Nccl) {
                    contenders.push(by_nccl::<T>(harness, count, in_place)?);
                }
                if job.selection.has(Variant::NcclSym) {
                    contenders.push(by_nccl_sym(harness, send, recv)?);
                }
            }
            let case = Case {
                size: count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: self.op.name(),
                bus: bus(harness.rank.n_ranks()),
                ..Case::NONE
            };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
}

/// The bus bandwidth of an all-reduce over its algorithm bandwidth, as nccl-tests defines them.
pub fn bus(ranks: usize) -> f64 {
    2.0 * (ranks - 1) as f64 / ranks as f64
}

/// The operation of `devcomm`, with this rank's input.
fn by_collectives<'a, B>(
    harness: &'a Harness<'a>,
    variant: Variant,
    collectives: &'a Collectives,
    send: &B,
    recv: &B,
) -> Result<Contender<'a>>
where
    B: Buffer<Element: Number>,
{
    let sum = Sum::new(harness, send, recv)?;
    let (send, recv) = (send.device_slice(), recv.device_slice());
    let launch = move |collectives: &Collectives| {
        collectives.all_reduce(&send, &recv, ReduceOp::Sum, &harness.stream)
    };
    let plan = collectives.explain(&launch)?.plan;
    let in_place = sum.is_in_place();
    let contender = Contender::new(variant, move || launch(collectives), sum);
    Ok(contender.in_place(in_place).by_plan(plan))
}

/// NCCL's host call, on memory of `ncclMemAlloc`, with this rank's input.
pub fn by_nccl<'a, T: Number>(
    harness: &'a Harness<'a>,
    count: usize,
    in_place: bool,
) -> Result<Contender<'a>> {
    let (send, recv) = plain::<T>(harness, count, in_place)?;
    by_host(harness, Variant::Nccl, &send, &recv)
}

/// Memory of `ncclMemAlloc` to send and to receive in, the same in place.
fn plain<T: Number>(
    harness: &Harness<'_>,
    count: usize,
    in_place: bool,
) -> Result<(DeviceSlice<T>, DeviceSlice<T>)> {
    let recv = harness.comm.mem_alloc(count)?.device_slice();
    let send = match in_place {
        true => recv.clone(),
        false => harness.comm.mem_alloc(count)?.device_slice(),
    };
    Ok((send, recv))
}

/// NCCL's host call, on windows, with this rank's input.
pub fn by_nccl_sym<'a, T: Number>(
    harness: &'a Harness<'a>,
    send: &Window<T>,
    recv: &Window<T>,
) -> Result<Contender<'a>> {
    by_host(harness, Variant::NcclSym, send, recv)
}

fn by_host<'a, B>(
    harness: &'a Harness<'a>,
    variant: Variant,
    send: &B,
    recv: &B,
) -> Result<Contender<'a>>
where
    B: Buffer<Element: Number>,
{
    let sum = Sum::new(harness, send, recv)?;
    let (send, recv) = (send.device_slice(), recv.device_slice());
    let work = move || harness.comm.all_reduce(&send, &recv, ReduceOp::Sum, &harness.stream);
    let in_place = sum.is_in_place();
    Ok(Contender::new(variant, work, sum).in_place(in_place))
}
