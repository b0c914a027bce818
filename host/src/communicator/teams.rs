//! Teams: the sets of ranks that NCCL's device API addresses.

use devcomm_types::nccl::Team;

use super::Communicator;
use super::handle::Status;
use crate::error::{DevCommError, Error, Result, ranks};
use crate::sys::nccl::query::TeamKind;

/// Which ranks a CFT team (of ranks with logical endpoints) contains. NCCL: `ncclCftTeamMode_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclCftTeamMode_t")]
pub enum CftTeamMode {
    /// All ranks with logical endpoints. NCCL: `NCCL_CFT_TEAM_FLAT`.
    Flat = 0,
    /// The ranks with this rank's index in every multicast team. NCCL:
    /// `NCCL_CFT_TEAM_HIER_MULTIMEM`.
    HierarchicalMultimem = 1,
    /// The ranks with this rank's index in every LSA team. NCCL: `NCCL_CFT_TEAM_HIER_LSA`.
    HierarchicalLsa = 2,
}

impl Communicator {
    /// Returns the team of all ranks. NCCL: `ncclTeamWorld`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported).
    #[doc(alias = "ncclTeamWorld")]
    pub fn team_world(&self) -> Result<Team> {
        self.team(TeamKind::World)
    }

    /// Returns the team of ranks that this rank reaches by load and store. NCCL: `ncclTeamLsa`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamLsa")]
    pub fn team_lsa(&self) -> Result<Team> {
        self.team(TeamKind::Lsa)
    }

    /// Returns the team of ranks with this one's LSA rank in every LSA team. NCCL: `ncclTeamRail`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamRail")]
    pub fn team_rail(&self) -> Result<Team> {
        self.team(TeamKind::Rail)
    }

    /// Returns the team of ranks that CFT reaches. NCCL: `ncclTeamCft`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamCft")]
    pub fn team_cft(&self, mode: CftTeamMode) -> Result<Team> {
        self.team(TeamKind::Cft(mode as i32))
    }

    /// Returns the team of the CFT multicast group. NCCL: `ncclTeamCftMultimem`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamCftMultimem")]
    pub fn team_cft_multimem(&self) -> Result<Team> {
        self.team(TeamKind::CftMultimem)
    }

    fn team(&self, kind: TeamKind) -> Result<Team> {
        let entered = self.inner.handle.enter(&[Status::Live])?;
        // SAFETY: the communicator is live and locked.
        unsafe { self.inner.handle.nccl().team(entered.comm(), kind) }
    }

    /// Returns the world rank of rank `team_rank` of a team of this communicator. NCCL:
    /// `ncclTeamRankToWorld`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `team_rank` is not below the team's size; otherwise as
    /// [`team_world`](Self::team_world).
    #[doc(alias = "ncclTeamRankToWorld")]
    pub fn rank_to_world(&self, team: Team, team_rank: usize) -> Result<usize> {
        self.translate(team, team_rank).and_then(|(world, _)| self.rank_from(world))
    }

    /// Returns the LSA rank of rank `team_rank` of a team of this communicator. NCCL:
    /// `ncclTeamRankToLsa`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`rank_to_world`](Self::rank_to_world).
    #[doc(alias = "ncclTeamRankToLsa")]
    pub fn rank_to_lsa(&self, team: Team, team_rank: usize) -> Result<usize> {
        self.translate(team, team_rank).and_then(|(_, lsa)| self.rank_from(lsa))
    }

    /// Returns the world rank and the LSA rank of rank `team_rank` of a team.
    fn translate(&self, team: Team, team_rank: usize) -> Result<(i32, i32)> {
        let n = team.n_ranks;
        let rank = i32::try_from(team_rank).ok().filter(|rank| *rank < n).ok_or_else(|| {
            Error::invalid(format!("rank {team_rank} is not in a team of {n} ranks"))
        })?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        // SAFETY: the communicator is live and locked.
        unsafe { self.inner.handle.nccl().translate(entered.comm(), team, rank) }
    }

    /// Fails unless every rank reaches every other by load and store.
    ///
    /// # Errors
    ///
    /// [`DevCommError::SeveralLsaTeams`] names the ranks and hosts of each LSA team; otherwise as
    /// [`properties`](Self::properties).
    pub fn require_single_lsa_team(&self) -> Result<()> {
        let teams = self.properties()?.n_lsa_teams;
        let hosts = self.peers().map_or(&[][..], |peers| peers.hosts());
        match describe_lsa_teams(self.n_ranks(), teams, hosts) {
            None => Ok(()),
            Some(teams) => Err(DevCommError::SeveralLsaTeams { teams }.into()),
        }
    }

    /// Returns a rank that NCCL returned; an error if the communicator does not have it.
    fn rank_from(&self, raw: i32) -> Result<usize> {
        let rank = usize::try_from(raw).ok().filter(|rank| *rank < self.n_ranks());
        rank.ok_or_else(|| Error::invalid(format!("NCCL translated a rank to {raw}")))
    }
}

/// Returns the ranks and hosts of each LSA team, or `None` if there is one. NCCL's LSA teams have
/// one size and consecutive ranks.
fn describe_lsa_teams(n_ranks: usize, n_teams: usize, hosts: &[String]) -> Option<Vec<String>> {
    if n_teams <= 1 {
        return None;
    }
    let size = (n_ranks / n_teams).max(1);
    let all: Vec<usize> = (0..n_ranks).collect();
    let describe = |team: &[usize]| {
        let mut names: Vec<&str> =
            team.iter().filter_map(|&rank| hosts.get(rank).map(String::as_str)).collect();
        names.dedup();
        let on_hosts =
            if names.is_empty() { String::new() } else { format!(" on {}", names.join(", ")) };
        format!("{}{on_hosts}", ranks(team))
    };
    Some(all.chunks(size).map(describe).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cannot_share_memory_are_named_with_their_hosts() {
        let hosts: Vec<String> = ["a", "a", "b", "b"].map(str::to_owned).into();
        assert_eq!(describe_lsa_teams(4, 1, &hosts), None);
        let teams = describe_lsa_teams(4, 2, &hosts).unwrap();
        assert_eq!(teams, ["ranks 0, 1 on a", "ranks 2, 3 on b"]);
        let error = Error::DevComm(DevCommError::SeveralLsaTeams {
            teams: describe_lsa_teams(2, 2, &hosts[1..3]).unwrap(),
        });
        assert!(error.to_string().ends_with("rank 0 on a; rank 1 on b"), "{error}");
    }
}
