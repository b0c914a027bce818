//! The device communicator.

use devcomm_types::Team;
use devcomm_types::kernel::KernelParam;
use devcomm_types::nccl::{self, MultimemHandle};

/// A device communicator as a kernel receives it, by value.
///
/// The host creates it (`Communicator::create_dev_comm`) with the resources that the kernel needs,
/// such as barriers.
///
/// NCCL: `ncclDevComm`.
#[doc(alias = "ncclDevComm")]
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct DevComm(nccl::DevComm);

// SAFETY: the type is a transparent wrapper of its `Abi`.
unsafe impl KernelParam for DevComm {
    type Abi = nccl::DevComm;
    const IS_DEV_COMM: bool = true;
}

impl DevComm {
    /// Returns this rank's number in the communicator.
    pub const fn rank(&self) -> i32 {
        self.0.rank
    }

    /// Returns the number of ranks in the communicator.
    pub const fn n_ranks(&self) -> i32 {
        self.0.n_ranks
    }

    /// Returns all ranks. NCCL: `ncclTeamWorld`.
    #[doc(alias = "ncclTeamWorld")]
    pub const fn world_team(&self) -> Team {
        self.0.world_team()
    }

    /// Returns the ranks whose memory this GPU can load and store. NCCL: `ncclTeamLsa`.
    #[doc(alias = "ncclTeamLsa")]
    pub const fn lsa_team(&self) -> Team {
        self.0.lsa_team()
    }

    /// Returns the ranks with the same LSA rank in every LSA team. NCCL: `ncclTeamRail`.
    #[doc(alias = "ncclTeamRail")]
    pub const fn rail_team(&self) -> Team {
        self.0.rail_team()
    }

    /// Returns the index of this rank's [`lsa_team`](Self::lsa_team). LSA teams are numbered in the
    /// order of their ranks.
    pub const fn lsa_team_index(&self) -> i32 {
        self.rail_team().rank
    }

    /// Returns whether rank `peer` of `team` is in the LSA team, so that this GPU can load and
    /// store by the pointers of [`Window::peer`](crate::Window::peer) and
    /// [`ResourceBuffer::peer`](crate::ResourceBuffer::peer).
    ///
    /// NCCL: `ncclDevCommCanGetPeerPointer`, of a world rank, in 2.32.6, where peer pointers may
    /// reach more ranks. In 2.32.3, which this crate links, they reach the LSA team.
    #[doc(alias = "ncclDevCommCanGetPeerPointer")]
    #[must_use]
    pub const fn has_peer_pointer(&self, team: Team, peer: i32) -> bool {
        self.lsa_team().contains(team, peer)
    }

    /// Returns the number of LSA barriers that the host reserved, and so the bound of a
    /// [`BarrierIndex`](crate::BarrierIndex).
    pub const fn n_lsa_barriers(&self) -> u32 {
        self.0.lsa_barrier.n_barriers as u32
    }

    /// Returns the multicast mapping of the LSA team; `None` if the host did not request
    /// `lsa_multimem`.
    pub fn lsa_multimem(&self) -> Option<MultimemHandle> {
        (!self.0.lsa_multimem.base.is_null()).then_some(self.0.lsa_multimem)
    }

    /// Returns the number of GIN contexts: at least the number that the host requested, unless the
    /// network provides fewer.
    pub const fn n_gin_contexts(&self) -> u32 {
        self.0.gin_context_count
    }

    /// Returns the distance in ranks between peers that the GIN contexts connect. It is 1 with FULL
    /// connections, and never 0, as callers divide by it. (The field `gin_connection_stride` is
    /// that of the communicator, which may connect more ranks.)
    pub(crate) fn gin_stride(&self) -> i32 {
        (self.0.gin_context_stride as i32).max(1)
    }

    /// Returns NCCL's struct, for [`raw`](crate::raw).
    pub const fn as_raw(&self) -> &nccl::DevComm {
        &self.0
    }
}
