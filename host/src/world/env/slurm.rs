//! Slurm: the ranks are the tasks that srun starts.
//!
//! A shell inside an allocation has most of Slurm's variables too: the batch script, salloc's
//! shell, and processes that these start without srun. None of these is a rank. Only steps have
//! SLURM_STEP_ID, and the steps that Slurm makes for batch scripts and interactive shells have
//! reserved numbers. `srun --pty` with one task is an interactive shell too.

use std::net::Ipv4Addr;

use super::{LauncherVars, MAX_RANKS, node_list};
use crate::error::{Result, WorldError};
use crate::machine::variables::{Lookup, first, number, port, text, unset};

const TOGETHER: &str = "srun sets SLURM_JOB_ID, SLURM_STEP_ID, SLURM_PROCID, SLURM_LOCALID and \
                        SLURM_STEP_NUM_TASKS together";

/// Steps with higher numbers are not srun's: they are of batch scripts, interactive shells, and
/// external processes. Slurm: `SLURM_MAX_NORMAL_STEP_ID`.
const LAST_NORMAL_STEP: usize = 0xffff_fff0;

/// Returns the values of Slurm's variables, if this process is a task of srun.
pub(super) fn read(var: Lookup<'_>) -> Result<Option<LauncherVars>> {
    let Some((variable, step)) = first(var, &["SLURM_STEP_ID", "SLURM_STEPID"])? else {
        return Ok(None);
    };
    let step = number(variable, step, 0, u32::MAX as usize)?;
    if step > LAST_NORMAL_STEP {
        return Ok(None);
    }
    let Some((n_variable, n_ranks)) = first(var, &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])? else {
        return Err(unset("SLURM_STEP_NUM_TASKS", variable, TOGETHER));
    };
    let n_ranks = number(n_variable, n_ranks, 1, MAX_RANKS)?;
    if n_ranks == 1 && text(var, "SLURM_PTY_PORT")?.is_some() {
        return Ok(None);
    }
    let index = |name: &'static str| match text(var, name)? {
        Some(value) => number(name, value, 0, n_ranks - 1),
        None => Err(unset(name, variable, TOGETHER)),
    };
    let (rank, local_rank) = (index("SLURM_PROCID")?, index("SLURM_LOCALID")?);
    let job = first(var, &["SLURM_JOB_ID", "SLURM_JOBID"])?;
    let job = job.ok_or_else(|| unset("SLURM_JOB_ID", variable, TOGETHER));
    Ok(Some(LauncherVars {
        variable,
        rank,
        n_ranks,
        local_rank,
        host: host(var),
        port: port(var, "MASTER_PORT"),
        job: job.map(|(_, job)| format!("slurm-{job}.{step}")),
    }))
}

/// Returns the first host of the step, where its task 0 runs.
fn host(var: Lookup<'_>) -> Result<String> {
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((variable, list)) = first(var, &lists)? else {
        let why = format!("not set although SLURM_STEP_ID is; {TOGETHER}; or set MASTER_ADDR");
        return Err(WorldError::Environment { variable: lists[0], value: None, why }.into());
    };
    match node_list::first(list.trim()) {
        // A job on one host uses the loopback address.
        Ok((_, true)) => Ok(Ipv4Addr::LOCALHOST.to_string()),
        Ok((host, false)) => Ok(host),
        Err(why) => Err(WorldError::Environment {
            variable,
            value: Some(list.chars().take(200).collect()),
            why: format!("not a list of hosts: {why}; MASTER_ADDR can name the host of rank 0"),
        }
        .into()),
    }
}
