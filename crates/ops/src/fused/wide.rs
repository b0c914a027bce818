//! What fused products have whose ranks send each other tiles of sums, as Lamport messages.

use devcomm_kernels::gemm::gemm_wgmma::CLUSTER;

use super::{Base, Fusion};
use crate::gemm::wide_grid;
use crate::prelude::*;

/// Kernels that send tiles of sums to peers, as Lamport messages, and the memory of the messages.
pub(crate) struct ExchangeKernels {
    pub(crate) compiled: Kernels,
    pub(crate) dev_comm: DevCommResource,
    pub(crate) memory: LamportMemory,
    /// What fits on every rank's GPU: all ranks have the same numbers, and so the same grid.
    ///
    /// For a `wide` plan there is one pair: the number of blocks that are resident at the same
    /// time, and a number that is not used. For `swapped` plans, whose tiles have few rows, there
    /// are four pairs, for clusters of 1, 2, 4 and 8 blocks in this order: the number of such
    /// clusters that are resident at the same time, and the bytes of dynamic shared memory that a
    /// block has.
    pub(crate) resident: Vec<[u32; 2]>,
}

impl ExchangeKernels {
    /// Allocates the memory of messages with a capacity in slots; `capacity` is `None`, which is an
    /// error, if the largest product needs too many. With `has_barriers`, there is an LSA barrier
    /// for each of the blocks that are resident (the first number of `resident`). *Collective*.
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

    /// Returns the shape of a launch of a `wide` plan, for so many pairs of `gemm_wgmma`'s tiles:
    /// each cluster computes one pair at a time.
    pub(crate) fn wide_config(&self, pairs: u64) -> LaunchConfig {
        wide_grid(self.resident[0][0] / CLUSTER, pairs)
    }
}
