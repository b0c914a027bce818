//! The variables of torchrun and compatible launchers: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
//! MASTER_PORT.

use super::{LauncherVars, MAX_RANKS};
use crate::error::{Error, Result, WorldError};
use crate::machine::variables::{Lookup, number, port, text, unset};

const TOGETHER: &str = "a launcher such as torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, \
                        MASTER_ADDR and MASTER_PORT together";

/// Returns the values of torchrun's variables, if RANK or WORLD_SIZE is set.
pub(super) fn read(var: Lookup<'_>) -> Result<Option<LauncherVars>> {
    let (rank, n_ranks) = match (text(var, "RANK")?, text(var, "WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        (Some(rank), Some(n_ranks)) => (rank, n_ranks),
        (None, Some(_)) => return Err(unset("RANK", "WORLD_SIZE", TOGETHER)),
        (Some(_), None) => return Err(unset("WORLD_SIZE", "RANK", TOGETHER)),
    };
    let n_ranks = number("WORLD_SIZE", n_ranks, 1, MAX_RANKS)?;
    let rank = number("RANK", rank, 0, n_ranks - 1)?;
    let local_rank = match text(var, "LOCAL_RANK")? {
        Some(local_rank) => number("LOCAL_RANK", local_rank, 0, n_ranks - 1)?,
        None if n_ranks == 1 => 0,
        // The rank's GPU is unknown, because ranks may be distributed over hosts in any order.
        None => return Err(unset("LOCAL_RANK", "RANK", TOGETHER)),
    };
    Ok(Some(LauncherVars {
        variable: "RANK",
        rank,
        n_ranks,
        local_rank,
        host: Err(unset("MASTER_ADDR", "RANK", TOGETHER)),
        port: master_port(var),
        // Jobs without an id are told apart by their ports, which the user has chosen.
        job: Ok(text(var, "TORCHELASTIC_RUN_ID")?.unwrap_or_else(|| "none".to_owned())),
    }))
}

/// Returns MASTER_PORT, or the next port when torchrun's agent listens on MASTER_PORT.
fn master_port(var: Lookup<'_>) -> Result<Option<u16>> {
    let Some(master) = port(var, "MASTER_PORT")? else {
        return Err(unset("MASTER_PORT", "RANK", TOGETHER));
    };
    let in_use = text(var, "TORCHELASTIC_USE_AGENT_STORE")?;
    if !in_use.is_some_and(|in_use| in_use.eq_ignore_ascii_case("true")) {
        return Ok(Some(master));
    }
    let next = master.checked_add(1).ok_or_else(|| {
        Error::World(WorldError::Environment {
            variable: "MASTER_PORT",
            value: Some(master.to_string()),
            why: "torchrun uses this port, the highest there is; set DEVCOMM_PORT".to_owned(),
        })
    })?;
    Ok(Some(next))
}
