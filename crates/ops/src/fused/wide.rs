//! The preparation of fused kernels whose tiles are messages.

use devcomm_kernels::gemm::gemm_wgmma::CLUSTER;

use super::{Base, Fusion};
use crate::gemm::wide_grid;
use crate::prelude::*;

/// Kernels whose tiles are messages, and the memory of these.
pub(crate) struct ExchangeKernels {
    pub(crate) compiled: Kernels,
    pub(crate) dev_comm: DevCommResource,
    pub(crate) memory: LamportMemory,
    /// The fewest blocks or clusters of each kernel that are resident on any rank's GPU, and the
    /// least dynamic shared memory of a block: so all ranks have the same grid.
    pub(crate) resident: Vec<[u32; 2]>,
}

impl ExchangeKernels {
    /// Prepares the kernels of a plan with slots for the largest product, unless that is too large.
    /// They are for these numbers of ranks, which `which` describes; for any number without them.
    /// `load` returns the kernels and what is resident. If `has_barriers`, each block of the first
    /// kernel has an LSA barrier. *Collective*.
    pub(crate) fn new<F: Fusion>(
        base: &Base<F>,
        name: &str,
        (ranks, which): (&[usize], &str),
        slots: impl FnOnce([usize; 2]) -> Option<u32>,
        load: impl FnOnce() -> Result<(Kernels, Vec<[u32; 2]>)>,
        has_barriers: bool,
    ) -> Result<Self> {
        let (comm, [m, n]) = (&base.comm, base.most);
        let own = || {
            if !ranks.is_empty() && !ranks.contains(&comm.n_ranks()) {
                let own = comm.n_ranks();
                return refuse(format!("the plan `{name}` is for {which}, not {own}"));
            }
            comm.require_single_lsa_team()?;
            let (compiled, resident) = load()?;
            let Some(capacity) = slots(base.most) else {
                return refuse(format!("a product of {m} x {n} elements is too large"));
            };
            Ok(((compiled, capacity), resident))
        };
        let name = format!("{}: the plan {name}", F::NAME);
        comm.together(&name, || {
            let call = comm.collective(&name).option("m", m).option("n", n);
            let ((compiled, capacity), all) = call.exchange(own())?;
            // All ranks have the same kernels. A rank's numbers are blocks and shared memory.
            let least = |[a, b]: [u32; 2], [c, d]: &[u32; 2]| [a.min(*c), b.min(*d)];
            let of_kernel = |i: usize| all.iter().map(|own| &own[i]).fold([u32::MAX; 2], least);
            let resident: Vec<_> = (0..all[0].len()).map(of_kernel).collect();
            let memory = LamportMemory::allocate(comm, capacity)?;
            let barriers = if has_barriers { resident[0][0] } else { 0 };
            let requirements = DevCommRequirements::new().lsa_barriers(barriers);
            Ok(Self { compiled, dev_comm: comm.create_dev_comm(requirements)?, memory, resident })
        })
    }

    /// Returns the shape of a launch whose clusters compute a pair of `gemm_wgmma`'s tiles at a
    /// time.
    pub(crate) fn wide_config(&self, pairs: u64) -> LaunchConfig {
        wide_grid(self.resident[0][0] / CLUSTER, pairs)
    }
}
