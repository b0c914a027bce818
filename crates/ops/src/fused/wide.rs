//! Fused kernels whose tiles are messages.

use devcomm_kernels::gemm::gemm_wgmma::CLUSTER;

use super::{Base, Fusion};
use crate::gemm::wide_grid;
use crate::prelude::*;

/// Kernels whose tiles are messages, and the memory of these.
pub(crate) struct ExchangeKernels {
    pub(crate) compiled: Kernels,
    pub(crate) dev_comm: DevCommResource,
    pub(crate) memory: LamportMemory,
    /// The fewest blocks or clusters that are resident on any rank's GPU, for tiles of few rows of
    /// each number of blocks in a cluster, and the least dynamic shared memory of a block.
    pub(crate) resident: Vec<[u32; 2]>,
}

impl ExchangeKernels {
    /// Allocates the memory of messages with this capacity, which is `None` for too large a product.
    /// If `has_barriers`, each block has an LSA barrier. *Collective*.
    pub(crate) fn new<F: Fusion>(
        Base { comm, most: [m, n], .. }: &Base<F>,
        (compiled, resident): (Kernels, Vec<[u32; 2]>),
        capacity: Option<u32>,
        has_barriers: bool,
    ) -> Result<Self> {
        let Some(capacity) = capacity else {
            return refuse(format!("a product of {m} x {n} elements is too large"));
        };
        let memory = LamportMemory::allocate(comm, capacity)?;
        let barriers = if has_barriers { resident[0][0] } else { 0 };
        let requirements = DevCommRequirements::new().lsa_barriers(barriers);
        Ok(Self { compiled, dev_comm: comm.create_dev_comm(requirements)?, memory, resident })
    }

    /// Returns the shape of a launch whose clusters compute pairs of `gemm_wgmma`'s tiles.
    pub(crate) fn wide_config(&self, pairs: u64) -> LaunchConfig {
        wide_grid(self.resident[0][0] / CLUSTER, pairs)
    }
}
