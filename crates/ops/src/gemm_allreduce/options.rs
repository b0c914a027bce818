//! The options.

use std::num::NonZeroU32;

use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::workspace;

use super::strips::Strips;
use super::wide::Wide;
use super::wire::{Wire, by_wire};
use super::{AllReduce, GemmAllReduce};
use crate::fused::*;
use crate::prelude::*;

/// The options of a [`GemmAllReduce`], the same on every rank.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing before `build`"]
pub struct GemmOptions {
    max_blocks: Option<NonZeroU32>,
    wire: Wire,
}

impl GemmOptions {
    /// Returns the default options.
    pub const fn new() -> Self {
        Self { max_blocks: None, wire: Wire::Bf16 }
    }

    /// Launches at most `blocks` blocks by the plan [`Strips`](crate::GemmAllReducePlan::Strips),
    /// which leaves multiprocessors to other kernels. Default: as many as are resident everywhere.
    pub const fn max_blocks(mut self, blocks: NonZeroU32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Selects the type in which partial sums travel. Default: [`Wire::Bf16`].
    pub const fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Creates the operation, as [`GemmAllReduce::new`] does.
    pub fn build(
        self,
        comm: &Communicator,
        stream: &Stream,
        m: usize,
        n: usize,
    ) -> Result<GemmAllReduce> {
        // Destructured, so that a new option cannot be forgotten here.
        let Self { max_blocks, wire } = self;
        let options = [("max_blocks", or_default(max_blocks)), ("wire", wire.to_string())];
        // Each type has its own plans.
        let kept = format!("{}-{wire}", AllReduce::NAME);
        GemmAllReduce::create(comm, stream, [m, n], (&kept, &options), |[can, are_alike]| {
            let Some(workspace) = by_wire!(wire, W => workspace::<W>(m, n, comm.n_ranks())) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let exchanges = can && wire != Wire::F32 && comm.n_ranks() >= 2;
            Ok(AllReduce {
                exchanges,
                exchanges_by_default: exchanges && are_alike,
                strips: Strips { wire, max_blocks, workspace, prepared: OnceCell::new() },
                wide: Wide { wire, prepared: OnceCell::new() },
                swapped: OnceCell::new(),
            })
        })
    }
}
