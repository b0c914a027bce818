//! Workloads: kernels with their memory, for the comparisons with NCCL and with C++.

mod all_reduce;
mod barrier;
mod ll_exchange;
mod put;

use anyhow::Result;
use devcomm::Kernels;

use crate::contenders::{Contender, Variant};

pub use all_reduce::{AllReduce, KernelInfo};
pub use barrier::Barrier;
pub use ll_exchange::LlExchange;
pub use put::{Message, Put, gin_requirements};

/// A kernel that several compilers have compiled, with its memory.
pub trait Workload {
    /// Returns a contender for one compiler's kernel.
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>>;

    /// Returns a contender for each compiler's kernel.
    fn with<'a>(&'a self, compiled: &'a [(Variant, Kernels)]) -> Result<Vec<Contender<'a>>> {
        compiled.iter().map(|(variant, kernels)| self.contender(*variant, kernels)).collect()
    }
}
