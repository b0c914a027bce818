//! All-reduce (sum): `kernels/src/lsa_allreduce.rs` against `ncclAllReduce`.

mod gpus;
mod host;
mod simulated;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::Benchmark;
use super::gpus::Gpus;
use super::machine::Job;
use super::row::Case;
use super::simulated::Simulated;
use super::variant::{Described, Variant};
use crate::number::Number;
use crate::options::{Dtype, GridOptions, SizeOptions};

pub use host::ByHost;

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

/// Reductions: the kernel has one.
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
    const VARIANTS: &'static [Described] = &[
        (Variant::Rust, "kernels::lsa_allreduce on symmetric windows"),
        (Variant::Cpp, "its twin in C++ on the same windows"),
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

    fn on_gpus(&self, job: &mut Job<'_, Gpus<'_>>) -> Result<()> {
        gpus::run(self, job)
    }

    fn simulated(&self, job: &mut Job<'_, Simulated>) -> Result<()> {
        simulated::run(self, job)
    }
}

/// Threads of a block, and blocks at most.
const THREADS: u32 = 128;
const MAX_BLOCKS: u32 = 128;

impl AllReduce {
    fn case<T: Number>(&self, count: usize, ranks: usize) -> Case {
        Case {
            size: count * size_of::<T>(),
            count,
            dtype: T::NAME,
            redop: self.op.name(),
            bus: bus(ranks),
            shape: None,
        }
    }
}

/// What each rank of an all-reduce has to send and to receive, in messages.
pub fn bus(ranks: usize) -> f64 {
    2.0 * (ranks - 1) as f64 / ranks as f64
}
