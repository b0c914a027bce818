//! The options, and what the ranks agree on before they allocate: the grid, the workspace, and
//! whether all GPUs are of Hopper's kind.

use std::num::NonZeroU32;

use devcomm_kernels::gemm_allreduce::gemm_allreduce_mma::{SHARED, THREADS, workspace};

use super::strips::Strips;
use super::wide::Wide;
use super::wire::{Wire, by_wire};
use super::{AllReduce, GemmAllReduce};
use crate::fused::*;
use crate::prelude::*;

/// The options of a [`GemmAllReduce`], the same on every rank.
///
/// ```no_run
/// # use devcomm::{Communicator, GemmOptions, Result, Stream, Wire};
/// # fn f(comm: &Communicator, stream: &Stream) -> Result<()> {
/// let gemm = GemmOptions::new().wire(Wire::F32).build(comm, stream, 1000, 4096)?;
/// # Ok(()) }
/// ```
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
    /// which leaves multiprocessors to other kernels. Other plans fill the GPU. Default: the number
    /// that can be resident on every rank's GPU.
    pub const fn max_blocks(mut self, blocks: NonZeroU32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Selects the type in which partial sums travel. Default: [`Wire::Bf16`]. In other types the
    /// plan is [`Strips`](crate::GemmAllReducePlan::Strips), but in [`Wire::E4m3`] on two Hopper
    /// GPUs it is [`Wide`](crate::GemmAllReducePlan::Wide) for shapes that fill the GPU.
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
        GemmAllReduce::create(comm, || {
            let own = || {
                comm.require_single_lsa_team()?;
                check_most::<AllReduce>(comm, stream, [m, n])?;
                let compiled = Kernels::load(comm.context(), &KERNELS.only(FILES))?;
                let resident = by_wire!(self.wire, W => {
                    type Strips = kernels::gemm_allreduce_mma<W>;
                    compiled.resident_blocks::<Strips>(THREADS, SHARED)?
                });
                let blocks = self.max_blocks.map_or(resident, |most| resident.min(most.get()));
                // The plans of a table are for GPUs of one name.
                let gpu = hash(comm.context().device_name()?);
                Ok((compiled, [gpu, is_hopper(comm).into(), blocks.into()]))
            };
            let (compiled, all) = self.call(comm, m, n).agree(own())?;
            let blocks = all.iter().map(|[.., blocks]| *blocks as u32).min().unwrap_or(0);
            let Self { wire, .. } = self;
            let are_hopper = all.iter().all(|[_, is_hopper, _]| *is_hopper == 1);
            let exchanges = are_hopper && wire != Wire::F32 && comm.n_ranks() >= 2;
            let exchanges_by_default = exchanges && all.iter().all(|own| *own == all[0]);
            let workspace = by_wire!(wire, W => workspace::<W>(m, n, comm.n_ranks()));
            let Some(workspace) = workspace else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            let strips = Strips { compiled, wire, blocks, workspace, memory: OnceCell::new() };
            let (wide, swapped) = (Wide { wire, prepared: OnceCell::new() }, OnceCell::new());
            let fusion = AllReduce { exchanges, exchanges_by_default, strips, wide, swapped };
            // Each type has its own plans.
            let base = Base::new(comm, stream, [m, n], &format!("{}-{wire}", AllReduce::NAME))?;
            fusion.prepare_defaults(&base)?;
            Ok(FusedGemm { base, fusion })
        })
    }

    /// Returns the collective call with the options, which it compares between the ranks.
    fn call(self, comm: &Communicator, m: usize, n: usize) -> CollectiveCall<'_> {
        // Destructured, so that a new option cannot be forgotten here.
        let Self { max_blocks, wire } = self;
        let call = comm.collective(NAME).option("m", m).option("n", n);
        call.option("max_blocks", or_default(max_blocks)).option("wire", wire)
    }
}

const NAME: &str = "GemmAllReduce::new";

const FILES: &[&str] = &[kernels::gemm_allreduce_mma::<bf16>::FILE];
