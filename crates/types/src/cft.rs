//! CFT teams: the ranks that have logical endpoints of the fabric. NCCL reports these teams; this
//! project does not communicate through the endpoints.

use crate::nccl::DevComm;
use crate::team::Team;

/// Which of the ranks with logical endpoints form a team. NCCL: `ncclCftTeamMode_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclCftTeamMode_t")]
pub enum CftTeamMode {
    /// All ranks with logical endpoints. NCCL: `NCCL_CFT_TEAM_FLAT`.
    Flat,
    /// Ranks with this rank's index in each multicast team. NCCL: `NCCL_CFT_TEAM_HIER_MULTIMEM`.
    HierMultimem,
    /// Ranks with this rank's index in each LSA team. NCCL: `NCCL_CFT_TEAM_HIER_LSA`.
    HierLsa,
}

impl DevComm {
    /// Returns the ranks that have logical endpoints, as chosen by `mode`; an empty team without
    /// such a fabric. NCCL: `ncclTeamCft`.
    #[doc(alias = "ncclTeamCft")]
    #[must_use]
    pub const fn cft_team(&self, mode: CftTeamMode) -> Team {
        let flat = Team { n_ranks: self.cft_size, rank: self.cft_rank, stride: 1 };
        match mode {
            CftTeamMode::Flat => flat,
            CftTeamMode::HierMultimem => flat.outer_factor(self.cft_multimem_size),
            CftTeamMode::HierLsa => flat.outer_factor(self.lsa_size),
        }
    }

    /// Returns the ranks that one multicast endpoint reaches. NCCL: `ncclTeamCftMultimem`.
    #[doc(alias = "ncclTeamCftMultimem")]
    #[must_use]
    pub const fn cft_multimem_team(&self) -> Team {
        Team { n_ranks: self.cft_multimem_size, rank: self.cft_multimem_rank, stride: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_teams_of_endpoints_are_flat_or_by_multicast_or_lsa_team() {
        let mut comm = DevComm::zeroed();
        (comm.cft_size, comm.cft_rank) = (16, 13);
        (comm.cft_multimem_size, comm.cft_multimem_rank) = (8, 5);
        comm.lsa_size = 4;
        let team = |n_ranks, rank, stride| Team { n_ranks, rank, stride };
        assert_eq!(comm.cft_team(CftTeamMode::Flat), team(16, 13, 1));
        assert_eq!(comm.cft_team(CftTeamMode::HierMultimem), team(2, 1, 8));
        assert_eq!(comm.cft_team(CftTeamMode::HierLsa), team(4, 3, 4));
        assert_eq!(comm.cft_multimem_team(), team(8, 5, 1));
    }

    #[test]
    fn without_the_fabric_the_teams_are_empty() {
        let comm = DevComm::zeroed();
        for mode in [CftTeamMode::Flat, CftTeamMode::HierMultimem, CftTeamMode::HierLsa] {
            assert_eq!(comm.cft_team(mode).n_ranks, 0);
        }
        assert_eq!(comm.cft_multimem_team().n_ranks, 0);
    }
}
