//! What the kernels of large products, whose tiles are messages, have in common.

use devcomm_host::{DevCommRequirements, DevCommResource, Kernels, LaunchConfig, Result};
use devcomm_kernels::gemm::gemm_wgmma::CLUSTER;

use super::{Base, Fusion};
use crate::check::refuse;
use crate::gemm::wide_grid;
use crate::lamport::LamportMemory;

/// A kernel with tiles of `gemm_wgmma` for this number of ranks, and the memory of its messages.
pub(crate) struct WideKernel {
    pub(crate) compiled: Kernels,
    pub(crate) dev_comm: DevCommResource,
    pub(crate) memory: LamportMemory,
    blocks: u32,
}

impl WideKernel {
    /// Prepares a kernel for these numbers of ranks, and their text, with slots for the largest
    /// product, unless that is too large. `load` returns the kernels and the blocks that are
    /// resident. If `has_barriers`, each block has one. *Collective*.
    pub(crate) fn new<F: Fusion>(
        on: &Base<F>,
        plan: F::Plan,
        (ranks, which): (&[usize], &str),
        slots: impl FnOnce([usize; 2]) -> Option<u32>,
        load: impl FnOnce() -> Result<(Kernels, u32)>,
        has_barriers: bool,
    ) -> Result<Self> {
        let (comm, [m, n]) = (&on.comm, on.most);
        let own = || {
            if !ranks.contains(&comm.n_ranks()) {
                let own = comm.n_ranks();
                return refuse(format!("the plan `{plan}` is for {which}, not {own}"));
            }
            comm.require_single_lsa_team()?;
            let (compiled, blocks) = load()?;
            let Some(capacity) = slots(on.most) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            Ok(((compiled, capacity), blocks))
        };
        let name = format!("{}: the plan {plan}", F::NAME);
        comm.together(&name, || {
            let call = comm.collective(&name).option("m", m).option("n", n);
            let ((compiled, capacity), blocks) = call.agree(own())?;
            // The same grid in all ranks.
            let blocks = blocks.into_iter().min().unwrap_or(0);
            let memory = LamportMemory::new(comm, capacity)?;
            let barriers = if has_barriers { blocks } else { 0 };
            let requirements = DevCommRequirements::new().lsa_barriers(barriers);
            Ok(Self { compiled, dev_comm: comm.create_dev_comm(requirements)?, memory, blocks })
        })
    }

    /// A launch for so many pairs of tiles, of which a cluster computes one at a time.
    pub(crate) fn config(&self, pairs: u64) -> LaunchConfig {
        wide_grid(self.blocks / CLUSTER, pairs)
    }
}
