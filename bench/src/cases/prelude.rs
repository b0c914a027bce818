//! The items that most benchmarks use.

pub use anyhow::{Context as _, Result, ensure};
pub use clap::Args;

pub use super::benchmark::Benchmark;
pub use super::job::Job;
pub use crate::base::options::{GridOptions, SizeOptions};
pub use crate::contenders::{Contender, Outcome, Variant};
pub use crate::harness::{Harness, Nccl};
pub use crate::report::row::{Case, L2};
