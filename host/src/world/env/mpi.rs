//! The launchers of MPI: those of Open MPI and MVAPICH2, and those that set PMI's variables (MPICH,
//! Intel MPI, PALS).
//!
//! The launchers tell a process its rank, but not the host of rank 0. That is known only if all
//! ranks are on one host.
//!
//! Some launchers give their jobs no id. The ids of others are unique only among the jobs of one
//! launcher, or of one user. So for ranks of one host, the process that started them is a part of
//! the job's id; a job of several hosts whose launcher gives no id needs DEVCOMM_JOB_ID. The number
//! of a batch job is no id, since several launchers may run in it at the same time.

use std::net::Ipv4Addr;

use super::starter::starter;
use super::{LauncherVars, MAX_RANKS, slurm};
use crate::error::{Error, Result, WorldError};
use crate::machine::variables::{Lookup, first, number, port, text, unset};

/// The names of a launcher's variables. Where there are several, the first that is set is used.
pub(super) struct Names {
    rank: &'static str,
    n_ranks: &'static str,
    local_rank: &'static [&'static str],
    n_local: &'static [&'static str],
    /// Variables that identify the job.
    job: &'static [&'static str],
    /// Which variables the launcher sets together, for errors.
    together: &'static str,
}

pub(super) const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    n_ranks: "OMPI_COMM_WORLD_SIZE",
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    n_local: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    together: "Open MPI's mpirun sets OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK together",
};

pub(super) const MVAPICH2: Names = Names {
    rank: "MV2_COMM_WORLD_RANK",
    n_ranks: "MV2_COMM_WORLD_SIZE",
    local_rank: &["MV2_COMM_WORLD_LOCAL_RANK"],
    n_local: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    job: &[],
    together: "MVAPICH2's launcher sets MV2_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK together",
};

pub(super) const PMI: Names = Names {
    rank: "PMI_RANK",
    n_ranks: "PMI_SIZE",
    local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"],
    n_local: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"],
    job: &["PMI_JOBID", "PALS_APID", "I_MPI_HYDRA_UUID"],
    together: "mpiexec of MPICH and Intel MPI sets PMI_RANK, PMI_SIZE and MPI_LOCALRANKID together",
};

/// Returns the values of this launcher's variables, if its rank or size is set.
pub(super) fn read(var: Lookup<'_>, names: &Names) -> Result<Option<LauncherVars>> {
    let (rank, n_ranks) = match (text(var, names.rank)?, text(var, names.n_ranks)?) {
        (None, None) => return Ok(None),
        (Some(rank), Some(n_ranks)) => (rank, n_ranks),
        (None, Some(_)) => return Err(unset(names.rank, names.n_ranks, names.together)),
        (Some(_), None) => return Err(unset(names.n_ranks, names.rank, names.together)),
    };
    let n_ranks = number(names.n_ranks, n_ranks, 1, MAX_RANKS)?;
    let text_of_rank = rank.clone();
    let rank = number(names.rank, rank, 0, n_ranks - 1)?;
    let n_local = match first(var, names.n_local)? {
        Some((variable, n_local)) => Some(number(variable, n_local, 1, n_ranks)?),
        None => None,
    };
    let local_rank = match first(var, names.local_rank)? {
        Some((variable, local_rank)) => {
            number(variable, local_rank, 0, n_local.unwrap_or(n_ranks) - 1)?
        }
        None if n_ranks == 1 => 0,
        None => return Err(unset(names.local_rank[0], names.rank, names.together)),
    };
    let given = first(var, names.job)?.map(|(variable, job)| format!("{variable}={job}"));
    let on_this_host = n_local == Some(n_ranks);
    let host = match on_this_host {
        true => Ok(Ipv4Addr::LOCALHOST.to_string()),
        false => Err(other_hosts(names, n_ranks, n_local, given.is_some())),
    };
    let starter = on_this_host.then(|| starter(names.rank, &text_of_rank)).flatten();
    let job = match (given, starter) {
        (None, None) => Err(no_job_id(names, on_this_host)),
        (given, starter) => Ok(given.into_iter().chain(starter).collect::<Vec<_>>().join(" of ")),
    };
    let (variable, port) = (names.rank, port(var, "MASTER_PORT"));
    Ok(Some(LauncherVars { variable, rank, n_ranks, local_rank, host, port, job }))
}

/// Returns the error of a job over several hosts whose launcher does not name the host of rank 0.
fn other_hosts(names: &Names, n_ranks: usize, n_local: Option<usize>, has_id: bool) -> Error {
    let why = format!(
        "not set, and not all of the {n_ranks} ranks are known to be on this host ({}{}); set \
         MASTER_ADDR to the host of rank 0, {}for all ranks alike",
        names.n_local[0],
        n_local.map_or_else(|| " is not set".to_owned(), |n_local| format!("={n_local}")),
        if has_id { "" } else { "and DEVCOMM_JOB_ID to what no other job has, " },
    );
    WorldError::Environment { variable: "MASTER_ADDR", value: None, why }.into()
}

fn no_job_id(names: &Names, on_this_host: bool) -> Error {
    let why = match on_this_host {
        true => "and the process that started this rank cannot be seen (is this a container?)",
        false => "and the ranks are not all known to be on this host",
    };
    let why = format!(
        "not set; the launcher that set {} gives this job no id, {why}: set it to what no other \
         job has, for all ranks alike",
        names.rank
    );
    WorldError::Environment { variable: "DEVCOMM_JOB_ID", value: None, why }.into()
}

/// Does the same as [`read`] of [`PMI`]. But srun's MPI plugins set PMI's variables too: then
/// Slurm's variables are used, which also name the hosts.
pub(super) fn pmi(var: Lookup<'_>) -> Result<Option<LauncherVars>> {
    let Some(rank) = text(var, PMI.rank)? else { return read(var, &PMI) };
    let n_ranks = text(var, PMI.n_ranks)?;
    match slurm::read(var) {
        Ok(Some(step))
            if rank == step.rank.to_string() && n_ranks == Some(step.n_ranks.to_string()) =>
        {
            Ok(Some(step))
        }
        _ => read(var, &PMI),
    }
}
