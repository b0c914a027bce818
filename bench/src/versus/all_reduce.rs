//! All-reduce (sum): `kernels/src/lsa_allreduce.rs` against `ncclAllReduce`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use devcomm::{Buffer, Collectives, KERNELS, Kernel, Kernels, ReduceOp, Window, device, kernels};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::job::Job;
use super::row::Case;
use super::selection::VariantInfo;
use super::{Benchmark, SIMULATED_BLOCKS, SIMULATED_LARGEST};
use crate::contender::{Contender, Variant};
use crate::harness::Harness;
use crate::options::{Dtype, GridOptions, LARGEST, SizeOptions};
use crate::workloads::{self, KernelInfo, Sum};

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
        (Variant::Cpp, "the same kernel in C++ on the same windows"),
        (
            Variant::Nccl,
            "ncclAllReduce on memory of ncclMemAlloc that is not registered, as in nccl-tests",
        ),
        (Variant::NcclSym, "ncclAllReduce on the windows"),
    ];

    fn validate(&self) -> Result<()> {
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        job.harness.comm.require_single_lsa_team()?;
        let compiled = job.kernels(&KERNELS, "lsa_allreduce")?;
        let collectives = Collectives::new(job.harness.comm)?;
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
            if job.selection.has(Variant::RustOps) {
                let (send, recv) = (&workload.send, &workload.recv);
                contenders.push(by_collectives(harness, collectives, send, recv)?);
            }
            if job.selection.has(Variant::Nccl) {
                contenders.push(by_nccl::<T>(harness, count)?);
            }
            if job.selection.has(Variant::NcclSym) {
                contenders.push(by_nccl_sym(harness, &workload.send, &workload.recv)?);
            }
            let case = Case {
                size: count * size_of::<T>(),
                count,
                dtype: T::NAME,
                redop: self.op.name(),
                bus: bus(harness.rank.n_ranks()),
                shape: None,
                l2: None,
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

/// The operation of `devcomm` on windows, with this rank's input.
fn by_collectives<'a, T: Number>(
    harness: &'a Harness<'a>,
    collectives: &'a Collectives,
    send: &Window<T>,
    recv: &Window<T>,
) -> Result<Contender<'a>> {
    let sum = Sum::new(harness, send, recv)?;
    let (send, recv) = (send.device_slice(), recv.device_slice());
    let launch = move |collectives: &Collectives| {
        collectives.all_reduce(&send, &recv, ReduceOp::Sum, &harness.stream)
    };
    let plan = collectives.explain(&launch)?.plan;
    Ok(Contender::new(Variant::RustOps, move || launch(collectives), sum).by_plan(plan))
}

/// NCCL's host call, on memory of `ncclMemAlloc`, with this rank's input.
pub fn by_nccl<'a, T: Number>(harness: &'a Harness<'a>, count: usize) -> Result<Contender<'a>> {
    let (send, recv) = (harness.comm.mem_alloc::<T>(count)?, harness.comm.mem_alloc(count)?);
    by_host(harness, Variant::Nccl, &send, &recv)
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
    Ok(Contender::new(variant, work, sum))
}
