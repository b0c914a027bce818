//! The device communicator.

use devcomm_types::kernel::KernelParam;
use devcomm_types::{Team, nccl};

/// A device communicator as a kernel receives it, by value.
///
/// The host makes it (`Communicator::create_dev_comm`) with the resources that the kernel needs, such as barriers.
///
/// NCCL: `ncclDevComm`.
#[doc(alias = "ncclDevComm")]
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct DevComm(nccl::DevComm);

// SAFETY: a transparent wrapper.
unsafe impl KernelParam for DevComm {
    type Abi = nccl::DevComm;
    const IS_DEV_COMM: bool = true;
}

impl DevComm {
    /// This rank in the communicator.
    #[inline(always)]
    pub fn rank(&self) -> i32 {
        self.0.rank
    }

    /// Ranks of the communicator.
    #[inline(always)]
    pub fn n_ranks(&self) -> i32 {
        self.0.n_ranks
    }

    /// All ranks. NCCL: `ncclTeamWorld`.
    #[doc(alias = "ncclTeamWorld")]
    #[inline(always)]
    pub fn world_team(&self) -> Team {
        self.0.world_team()
    }

    /// The ranks within load and store. NCCL: `ncclTeamLsa`.
    #[doc(alias = "ncclTeamLsa")]
    #[inline(always)]
    pub fn lsa_team(&self) -> Team {
        self.0.lsa_team()
    }

    /// The ranks with this rank's place in every LSA team. NCCL: `ncclTeamRail`.
    #[doc(alias = "ncclTeamRail")]
    #[inline(always)]
    pub fn rail_team(&self) -> Team {
        self.0.rail_team()
    }

    /// How many LSA barriers the host reserved; [`BarrierIndex`](crate::BarrierIndex)es are below it.
    #[inline(always)]
    pub fn n_lsa_barriers(&self) -> u32 {
        self.0.lsa_barrier.n_barriers as u32
    }

    /// NCCL's struct, for [`raw`](crate::raw).
    #[inline(always)]
    pub fn as_raw(&self) -> &nccl::DevComm {
        &self.0
    }
}
