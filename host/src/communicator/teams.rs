//! Groups of ranks, as NCCL forms them.

use devcomm_types::nccl::Team;

use super::Communicator;
use super::handle::Status;
use crate::sys::nccl::query::TeamKind;
use crate::{Error, Result};

/// Which ranks a CFT (copy fabric) team takes in. NCCL: `ncclCftTeamMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclCftTeamMode_t")]
pub enum CftTeamMode {
    /// All that CFT reaches.
    Flat = 0,
    /// One a multicast group.
    HierarchicalMultimem = 1,
    /// One an LSA team.
    HierarchicalLsa = 2,
}

impl Communicator {
    /// All ranks. NCCL: `ncclTeamWorld`.
    ///
    /// # Errors
    ///
    /// [`Error::CommunicatorEnded`], [`Error::Unsupported`]; so for the other teams.
    #[doc(alias = "ncclTeamWorld")]
    pub fn team_world(&self) -> Result<Team> {
        self.team(TeamKind::World)
    }

    /// The ranks that this one reaches by load and store. NCCL: `ncclTeamLsa`.
    ///
    /// # Errors
    ///
    /// As [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamLsa")]
    pub fn team_lsa(&self) -> Result<Team> {
        self.team(TeamKind::Lsa)
    }

    /// The ranks with this one's place in every LSA team. NCCL: `ncclTeamRail`.
    ///
    /// # Errors
    ///
    /// As [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamRail")]
    pub fn team_rail(&self) -> Result<Team> {
        self.team(TeamKind::Rail)
    }

    /// The ranks that CFT reaches. NCCL: `ncclTeamCft`.
    ///
    /// # Errors
    ///
    /// As [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamCft")]
    pub fn team_cft(&self, mode: CftTeamMode) -> Result<Team> {
        self.team(TeamKind::Cft(mode as i32))
    }

    /// The ranks of the CFT multicast group. NCCL: `ncclTeamCftMultimem`.
    ///
    /// # Errors
    ///
    /// As [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamCftMultimem")]
    pub fn team_cft_multimem(&self) -> Result<Team> {
        self.team(TeamKind::CftMultimem)
    }

    fn team(&self, kind: TeamKind) -> Result<Team> {
        let entered = self.inner.handle.enter(&[Status::Live])?;
        // SAFETY: the communicator is live and entered.
        unsafe { self.inner.handle.nccl().team(entered.comm(), kind) }
    }

    /// The world rank of member `member` of a team of this communicator. NCCL: `ncclTeamRankToWorld`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a member that the team has not; as [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamRankToWorld")]
    pub fn rank_to_world(&self, team: Team, member: usize) -> Result<usize> {
        self.translate(team, member).and_then(|(world, _)| self.rank_from(world))
    }

    /// The LSA rank of member `member` of a team of this communicator. NCCL: `ncclTeamRankToLsa`.
    ///
    /// # Errors
    ///
    /// As [`rank_to_world`](Self::rank_to_world).
    #[doc(alias = "ncclTeamRankToLsa")]
    pub fn rank_to_lsa(&self, team: Team, member: usize) -> Result<usize> {
        self.translate(team, member).and_then(|(_, lsa)| self.rank_from(lsa))
    }

    fn translate(&self, team: Team, member: usize) -> Result<(i32, i32)> {
        let n = team.n_ranks;
        let member = i32::try_from(member).ok().filter(|member| *member < n);
        let member = member
            .ok_or_else(|| Error::invalid(format!("no such member of a team of {n} ranks")))?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        // SAFETY: the communicator is live and entered.
        unsafe { self.inner.handle.nccl().translate(entered.comm(), team, member) }
    }

    fn rank_from(&self, raw: i32) -> Result<usize> {
        let rank = usize::try_from(raw).ok().filter(|rank| *rank < self.n_ranks());
        rank.ok_or_else(|| Error::invalid(format!("NCCL translated a rank to {raw}")))
    }
}
