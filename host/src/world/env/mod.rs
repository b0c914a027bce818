//! The environment variables of launchers: which one started this process, and as which rank.
//!
//! Launchers are tried from the innermost to the outermost, since each may have been started by a
//! later one: RANK and WORLD_SIZE ([`torchrun`]), MPI's launchers ([`mpi`]), a step of Slurm
//! ([`slurm`]). If only some variables of a launcher are set, that is an error and the next one is
//! not tried: the process is a rank, but it is unknown which.
//!
//! MASTER_ADDR and MASTER_PORT are the address of rank 0, for every launcher. They are optional for
//! MPI's launchers and Slurm: rank 0 is on this host if all ranks are, or on the first host of
//! Slurm's list, and its port is derived from the id of the job.
//!
//! The id of a job is DEVCOMM_JOB_ID, or consists of the launcher's variables or process, and of
//! this user's number: no two jobs of a host have the same id.

mod mpi;
mod node_list;
mod slurm;
mod starter;
mod torchrun;

use std::fs::File;
use std::io::Read;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use tracing_subscriber::filter::Targets;

use super::rendezvous::Token;
use crate::error::{Result, WorldError};
use crate::machine::variables::{deadline, number, port, text, timeout};

pub(crate) use crate::machine::variables::Lookup;

/// A process that a launcher has started as one rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launched {
    /// The variable by which the launcher was recognized.
    pub variable: &'static str,
    pub rank: usize,
    pub n_ranks: usize,
    /// The rank's number on its host, by which it chooses its GPU.
    pub local_rank: usize,
    /// The host and the port at which rank 0 waits for the others.
    pub host: String,
    pub port: u16,
    /// The id of the job.
    pub job: String,
    /// How long rank 0 waits for the others to join, and they for rank 0.
    pub timeout: Duration,
    /// How long a call may wait for the other ranks.
    pub deadline: Option<Duration>,
    /// The job's secret.
    pub token: Option<Token>,
    /// The file descriptor of a socket that already listens on `port`; for rank 0 only.
    pub listener: Option<i32>,
}

/// The values of one launcher's variables. Errors in `host`, `port` and `job` are ignored if other
/// variables provide the address of rank 0 and the id of the job.
struct LauncherVars {
    variable: &'static str,
    rank: usize,
    n_ranks: usize,
    local_rank: usize,
    host: Result<String>,
    /// `None`: derived from the job's id.
    port: Result<Option<u16>>,
    /// A text that distinguishes the job from this user's other jobs.
    job: Result<String>,
}

/// The variable with the file descriptor that [`LocalJob`](super::LocalJob) passes to rank 0.
pub(crate) const LISTENER: &str = "DEVCOMM_LISTENER";

/// The variable with the job's token, and the one with the name of a file that has it.
pub(crate) const TOKEN: &str = "DEVCOMM_JOB_TOKEN";
const TOKEN_FILE: &str = "DEVCOMM_JOB_TOKEN_FILE";

/// The most bytes of a job's id, which is a part of a rank's greeting.
const MAX_JOB_ID: usize = 1024;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// More ranks than any cluster has, so that a mistyped WORLD_SIZE does not use up the memory.
const MAX_RANKS: usize = 1 << 20;
/// Ports that are derived from job ids: above those of services, below the ephemeral ports (from
/// 32768).
const PORTS: std::ops::Range<u16> = 20_001..32_768;

/// Returns this process as a launcher has started it; `None` without a launcher.
///
/// # Errors
///
/// [`WorldError::Environment`] names a variable that is missing or invalid.
pub(crate) fn launched(var: Lookup<'_>) -> Result<Option<Launched>> {
    let Some(vars) = read(var)? else { return Ok(None) };
    let LauncherVars { variable, rank, n_ranks, local_rank, .. } = vars;
    // A rank alone does not meet others: it needs no address, and what is filled in is not used.
    let is_single = n_ranks == 1;
    let host = match text(var, "MASTER_ADDR")? {
        Some(host) => without_brackets(host),
        None if is_single => Ipv4Addr::LOCALHOST.to_string(),
        None => vars.host?,
    };
    let job = match text(var, "DEVCOMM_JOB_ID")? {
        Some(job) => job,
        None if is_single => String::new(),
        None => format!("{} of user {}", vars.job?, rustix::process::getuid().as_raw()),
    };
    if job.len() > MAX_JOB_ID {
        let why = format!("the job id has {} bytes, at most {MAX_JOB_ID} are allowed", job.len());
        return Err(WorldError::Environment { variable: "DEVCOMM_JOB_ID", value: None, why }.into());
    }
    let port = match port(var, "DEVCOMM_PORT")? {
        Some(port) => port,
        None if is_single => PORTS.start,
        None => vars.port?.unwrap_or_else(|| port_of(&job)),
    };
    let listener = match text(var, LISTENER)? {
        // A descriptor after the three standard streams, within an `i32`.
        Some(listener) if rank == 0 => Some(number(LISTENER, listener, 3, 1 << 30)? as i32),
        _ => None,
    };
    let timeout = timeout(var)?.unwrap_or(DEFAULT_TIMEOUT);
    let deadline = deadline(var)?;
    Ok(Some(Launched {
        variable,
        rank,
        n_ranks,
        local_rank,
        host,
        port,
        job,
        timeout,
        deadline,
        token: token(var)?,
        listener,
    }))
}

fn read(var: Lookup<'_>) -> Result<Option<LauncherVars>> {
    if let Some(vars) = torchrun::read(var)? {
        return Ok(Some(vars));
    }
    for names in [&mpi::OPEN_MPI, &mpi::MVAPICH2] {
        if let Some(vars) = mpi::read(var, names)? {
            return Ok(Some(vars));
        }
    }
    if let Some(vars) = mpi::pmi(var)? {
        return Ok(Some(vars));
    }
    slurm::read(var)
}

/// Returns an IPv6 address without the brackets that it has before a port.
fn without_brackets(host: String) -> String {
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    inner.map(str::to_owned).unwrap_or(host)
}

/// Returns the port that is derived from a job's id, by an FNV-1a hash.
fn port_of(job: &str) -> u16 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
    // The low half alone depends too little on the first bytes.
    PORTS.start + ((hash ^ (hash >> 32)) % PORTS.len() as u64) as u16
}

/// Returns what DEVCOMM_LOG asks to log.
pub(crate) fn log_filter(var: Lookup<'_>) -> Result<Option<Targets>> {
    let variable = "DEVCOMM_LOG";
    let Some(value) = text(var, variable)? else { return Ok(None) };
    value.parse().map(Some).map_err(|error| {
        let why = format!("neither a level, such as debug, nor levels of targets: {error}");
        WorldError::Environment { variable, value: Some(value), why }.into()
    })
}

/// Returns the job's token, itself or in a file that only its owner can read. A variable that is
/// set and empty, as by a command that failed, does not mean a job without a token.
fn token(var: Lookup<'_>) -> Result<Option<Token>> {
    if var(TOKEN).is_some() {
        let token = text(var, TOKEN)?.unwrap_or_default();
        let refused = |why| WorldError::Environment { variable: TOKEN, value: None, why };
        return Ok(Some(Token::new(&token).map_err(refused)?));
    }
    if var(TOKEN_FILE).is_none() {
        return Ok(None);
    }
    let path = text(var, TOKEN_FILE)?.unwrap_or_default();
    let refused = |why: String| {
        let (variable, value) = (TOKEN_FILE, Some(path.clone()));
        WorldError::Environment { variable, value, why }
    };
    let read = |path: &String| {
        let mut file = File::open(path)?;
        let (mode, mut token) = (file.metadata()?.mode(), String::new());
        file.read_to_string(&mut token)?;
        Ok::<_, std::io::Error>((mode, token))
    };
    let (mode, token) = read(&path).map_err(|error| refused(error.to_string()))?;
    if mode & 0o077 != 0 {
        let mode = mode & 0o777;
        return Err(refused(format!("others may use it (mode {mode:o}): chmod 600 it")).into());
    }
    Ok(Some(Token::new(&token).map_err(refused)?))
}

#[cfg(test)]
mod tests;
