//! NCCL's team functions. For an invalid communicator they return an empty team.

use std::cell::Cell;
use std::ffi::c_int;

use devcomm_sys::nccl::RawComm;
use devcomm_types::Team;

use super::call::call_ungrouped;

/// The teams of a rank.
#[derive(Clone, Copy)]
pub(super) struct Teams {
    pub(super) world: Team,
    lsa_size: c_int,
}

impl Teams {
    pub(super) fn new(rank: usize, n_ranks: usize, lsa_size: usize) -> Self {
        let world = Team { n_ranks: n_ranks as c_int, rank: rank as c_int, stride: 1 };
        Self { world, lsa_size: lsa_size as c_int }
    }

    pub(super) fn lsa(self) -> Team {
        self.world.inner_factor(self.lsa_size)
    }

    pub(super) fn rail(self) -> Team {
        self.world.outer_factor(self.lsa_size)
    }
}

fn teams_of(name: &'static str, comm: RawComm) -> Option<Teams> {
    let teams = Cell::new(None);
    call_ungrouped(name, comm, |cx| {
        let rank_comm = cx.ready(comm)?;
        let (shared, rank) = rank_comm.joined()?;
        teams.set(Some(Teams::new(rank, shared.n_ranks(), shared.lsa_size())));
        Ok(())
    });
    teams.get()
}

const EMPTY: Team = Team { n_ranks: 0, rank: 0, stride: 0 };

pub(super) unsafe extern "C" fn world(comm: RawComm) -> Team {
    teams_of("ncclTeamWorld", comm).map_or(EMPTY, |teams| teams.world)
}

pub(super) unsafe extern "C" fn lsa(comm: RawComm) -> Team {
    teams_of("ncclTeamLsa", comm).map_or(EMPTY, Teams::lsa)
}

pub(super) unsafe extern "C" fn rail(comm: RawComm) -> Team {
    teams_of("ncclTeamRail", comm).map_or(EMPTY, Teams::rail)
}

/// Returns a team of this rank alone: the simulator has no logical endpoints of a fabric (CFT).
pub(super) unsafe extern "C" fn cft(comm: RawComm, _mode: c_int) -> Team {
    let alone = Team { n_ranks: 1, rank: 0, stride: 1 };
    teams_of("ncclTeamCft", comm).map_or(EMPTY, |_| alone)
}

pub(super) unsafe extern "C" fn cft_multimem(comm: RawComm) -> Team {
    let alone = Team { n_ranks: 1, rank: 0, stride: 1 };
    teams_of("ncclTeamCftMultimem", comm).map_or(EMPTY, |_| alone)
}

/// Returns -1 for an invalid communicator.
pub(super) unsafe extern "C" fn to_world(comm: RawComm, team: Team, rank: c_int) -> c_int {
    let teams = teams_of("ncclTeamRankToWorld", comm);
    teams.map_or(-1, |teams| team.to_world(teams.world.rank, rank))
}

pub(super) unsafe extern "C" fn to_lsa(comm: RawComm, team: Team, rank: c_int) -> c_int {
    let teams = teams_of("ncclTeamRankToLsa", comm);
    teams.map_or(-1, |teams| team.to_lsa(teams.lsa().rank, rank))
}
