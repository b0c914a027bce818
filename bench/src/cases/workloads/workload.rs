//! The interface of all workloads.

use anyhow::Result;
use devcomm::Kernels;

use crate::contenders::{Contender, Variant};

/// A kernel that several compilers have compiled, with its memory.
pub trait Workload {
    /// Returns a contender for one compiler's kernel.
    fn contender<'a>(&'a self, variant: Variant, kernels: &'a Kernels) -> Result<Contender<'a>>;

    /// Returns a contender for each compiler's kernel.
    fn contenders<'a>(&'a self, compiled: &'a [(Variant, Kernels)]) -> Result<Vec<Contender<'a>>> {
        compiled.iter().map(|(variant, kernels)| self.contender(*variant, kernels)).collect()
    }
}
