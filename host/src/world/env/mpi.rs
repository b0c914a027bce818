//! The launchers of MPI: those of Open MPI and MVAPICH2, and those that set PMI's variables (MPICH,
//! Intel MPI, PALS).
//!
//! They tell a process its rank, but not the host of rank 0. That is known only if all ranks are on
//! one host.

use super::{LauncherVars, MAX_RANKS, slurm};
use crate::error::{Result, WorldError};
use crate::machine::variables::{Lookup, first, number, port, text, unset};

/// The names of a launcher's variables. Of several alternatives, the first that is set is used.
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
    job: &["PMI_JOBID", "PALS_APID"],
    together: "mpiexec of MPICH and Intel MPI sets PMI_RANK, PMI_SIZE and MPI_LOCALRANKID together",
};

/// Variables with the batch system's job number, for launchers that set no job id.
const BATCH_JOB: &[&str] = &["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"];

/// The values of this launcher's variables, if its rank or size is set.
pub(super) fn read(var: Lookup<'_>, names: &Names) -> Result<Option<LauncherVars>> {
    let (rank, n_ranks) = match (text(var, names.rank)?, text(var, names.n_ranks)?) {
        (None, None) => return Ok(None),
        (Some(rank), Some(n_ranks)) => (rank, n_ranks),
        (None, Some(_)) => return Err(unset(names.rank, names.n_ranks, names.together)),
        (Some(_), None) => return Err(unset(names.n_ranks, names.rank, names.together)),
    };
    let n_ranks = number(names.n_ranks, n_ranks, 1, MAX_RANKS)?;
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
    let host = if n_local == Some(n_ranks) {
        Ok("localhost".to_owned())
    } else {
        Err(WorldError::Environment {
            variable: "MASTER_ADDR",
            value: None,
            why: format!(
                "not set, and not all of the {n_ranks} ranks are known to be on this host ({}{}); \
                 set MASTER_ADDR to the host of rank 0, for all ranks alike",
                names.n_local[0],
                n_local.map_or_else(|| " is not set".to_owned(), |n_local| format!("={n_local}")),
            ),
        }
        .into())
    };
    let job = first(var, names.job)?.or(first(var, BATCH_JOB)?);
    let job = job.map(|(variable, job)| format!("{variable}={job}"));
    let (variable, port) = (names.rank, port(var, "MASTER_PORT"));
    Ok(Some(LauncherVars { variable, rank, n_ranks, local_rank, host, port, job }))
}

/// As [`read`] of [`PMI`]. But srun's MPI plugins set PMI's variables too: then Slurm's variables
/// are used, which also name the hosts.
pub(super) fn pmi(var: Lookup<'_>) -> Result<Option<LauncherVars>> {
    let Some((_, rank)) = first(var, &[PMI.rank])? else { return read(var, &PMI) };
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
