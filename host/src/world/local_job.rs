//! Local jobs: ranks that are started as processes of this host, and waited for.

use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::env::{LISTENER, TOKEN};
use super::rendezvous::Token;
use super::signals::Signals;
use crate::error::{Error, Result, WorldError};
use crate::sys::process::{die_with_parent, send_if_handled, spawn_with_listener};

/// The pause between polls of the processes.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The time that the other ranks have, after one has failed, to report it and exit.
const GRACE: Duration = Duration::from_secs(3);
/// The time, after [`GRACE`], in which the ranks that still run print their last operations before
/// they are killed.
const PRINT_TIME: Duration = Duration::from_millis(500);

/// Several processes of one program on this host, each one rank.
///
/// They get torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT), from which [`World::from_env`](crate::World::from_env) makes them one world.
/// Standard output and error are this process's; standard input goes to rank 0.
///
/// Rank 0 inherits a socket that listens already, so that no other process can take its port. The
/// socket listens on the loopback address only, and a random token (DEVCOMM_JOB_TOKEN) keeps other
/// users of the host from connecting as a rank.
///
/// ```no_run
/// # fn main() -> devcomm_host::Result<()> {
/// use devcomm_host::LocalJob;
/// LocalJob::new(4)?.env("NCCL_NVLS_ENABLE", "0").run()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LocalJob {
    n_ranks: usize,
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    /// Whether the other ranks go on when a rank fails.
    survives: bool,
}

impl LocalJob {
    /// Returns `n_ranks` processes of this program, with this process's arguments.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for 0 ranks; [`WorldError::SpawnFailed`] when this program's file
    /// cannot be found.
    pub fn new(n_ranks: usize) -> Result<Self> {
        if n_ranks == 0 {
            return Err(Error::invalid("a job of 0 ranks"));
        }
        let program = std::env::current_exe().map_err(|error| {
            Error::World(WorldError::SpawnFailed { rank: 0, why: error.to_string() })
        })?;
        let args = std::env::args_os().skip(1).collect();
        Ok(Self { n_ranks, program, args, env: Vec::new(), survives: false })
    }

    /// Starts another program.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = program.into();
        self
    }

    /// Passes other arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
        self
    }

    /// Sets an environment variable of every rank.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Lets the other ranks go on when one fails, for [`Rank::shrink`](crate::Rank::shrink). The
    /// job has succeeded if one of them has.
    #[must_use]
    pub fn survive(mut self) -> Self {
        self.survives = true;
        self
    }

    /// Starts all ranks and waits for them. When a rank fails, the others have a few seconds to
    /// end. Those that still run are then asked for their last operations, and killed half a second
    /// later. If the ranks are to [survive](Self::survive), they are neither asked nor killed.
    ///
    /// SIGINT, SIGTERM and SIGHUP end all ranks; SIGUSR1 makes those that have a handler for it
    /// print their last operations. The processes do not outlive the calling thread, however it
    /// ends.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankFailed`] names the rank that failed first and how it ended,
    /// [`WorldError::SpawnFailed`] a rank that could not be started, and
    /// [`WorldError::Interrupted`] the signal that ended the job. [`Error::InvalidInput`] means
    /// that the system refused a handler for one of the signals: then no rank was started.
    pub fn run(self) -> Result<()> {
        let signals = Signals::watch()?;
        let mut ranks = Ranks::start(&self)?;
        let (mut failure, mut are_asked) = (None, false);
        loop {
            if let Some(signal) = signals.seen() {
                // Dropping `ranks` kills the processes.
                return Err(WorldError::Interrupted { signal }.into());
            }
            if signals.is_asked() {
                ranks.ask();
            }
            let failed = ranks.poll_exits()?;
            if failure.is_none() {
                failure = failed.map(|failed| (failed, Instant::now()));
            }
            if ranks.all_ended() {
                failure.take_if(|_| self.survives && ranks.one_succeeded);
                return failure.map_or(Ok(()), |((rank, how), _)| {
                    Err(WorldError::RankFailed { rank, how }.into())
                });
            }
            let since = failure.as_ref().filter(|_| !self.survives).map(|(_, since)| since);
            if since.is_some_and(|since| since.elapsed() > GRACE + PRINT_TIME) {
                ranks.kill();
            } else if since.is_some_and(|since| since.elapsed() > GRACE) && !are_asked {
                ranks.ask();
                are_asked = true;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn command(&self, rank: usize, port: u16, job: &str, token: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        // Variables of a launcher of this process must not affect its ranks.
        for outer in
            ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "DEVCOMM_PORT", LISTENER]
        {
            command.env_remove(outer);
        }
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", self.n_ranks.to_string())
            .env("LOCAL_WORLD_SIZE", self.n_ranks.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", port.to_string())
            .env("DEVCOMM_JOB_ID", job)
            .env(TOKEN, token)
            .envs(self.env.iter().map(|(name, value)| (name, value)));
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        die_with_parent(&mut command);
        command
    }
}

/// The processes of the ranks; those that still run are killed on drop.
pub(super) struct Ranks {
    /// The processes by rank; `None` once one has ended.
    pub(super) running: Vec<Option<Child>>,
    one_succeeded: bool,
}

impl Ranks {
    pub(super) fn start(job: &LocalJob) -> Result<Self> {
        let failed = |rank, error: std::io::Error| {
            Error::World(WorldError::SpawnFailed { rank, why: error.to_string() })
        };
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| failed(0, error))?;
        let port = listener.local_addr().map_err(|error| failed(0, error))?.port();
        let id = job_id();
        let token = Token::random().map_err(|error| failed(0, error))?;
        let running = Vec::with_capacity(job.n_ranks);
        let mut ranks = Self { running, one_succeeded: false };
        let mut root = job.command(0, port, &id, &token);
        root.env(LISTENER, listener.as_raw_fd().to_string());
        let root = spawn_with_listener(root, &listener).map_err(|error| failed(0, error))?;
        ranks.running.push(Some(root));
        // Now only rank 0 has the socket, and connections are refused when rank 0 has ended.
        drop(listener);
        for rank in 1..job.n_ranks {
            let child = job
                .command(rank, port, &id, &token)
                .spawn()
                .map_err(|error| failed(rank, error))?;
            ranks.running.push(Some(child));
        }
        Ok(ranks)
    }

    /// Reaps the processes that have ended. Returns a rank that failed: preferably one killed by a
    /// signal, because that may have made other ranks exit with errors.
    fn poll_exits(&mut self) -> Result<Option<(usize, String)>> {
        let mut failed: Option<(usize, ExitStatus)> = None;
        for (rank, slot) in self.running.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            let ended = child.try_wait();
            let ended = ended.map_err(|error| {
                Error::World(WorldError::RankFailed {
                    rank,
                    how: format!("an unknown status: {error}"),
                })
            })?;
            let Some(status) = ended else { continue };
            *slot = None;
            self.one_succeeded |= status.success();
            let by_signal = |status: &ExitStatus| status.signal().is_some();
            let worse = failed.is_none_or(|(_, first)| !by_signal(&first) && by_signal(&status));
            if !status.success() && worse {
                failed = Some((rank, status));
            }
        }
        Ok(failed.map(|(rank, status)| (rank, describe_exit(status))))
    }

    fn all_ended(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    /// Asks the ranks for their last operations, by SIGUSR1, which would end those without a
    /// handler.
    fn ask(&self) {
        for child in self.running.iter().flatten() {
            send_if_handled(child, signal_hook::consts::SIGUSR1);
        }
    }

    fn kill(&mut self) {
        for child in self.running.iter_mut().flatten() {
            // An error means that the process has just ended.
            let _ = child.kill();
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
        for child in self.running.iter_mut().flatten() {
            let _ = child.wait();
        }
    }
}

/// Returns a unique id that cannot be guessed, from hashes of no data: `RandomState` takes its keys
/// from the system's random numbers.
fn job_id() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("local-{:016x}{:016x}", random(), random())
}

fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => match signal_hook::low_level::signal_name(signal) {
            Some(name) => format!("signal {signal} ({name})"),
            None => format!("signal {signal}"),
        },
        (None, None) => status.to_string(),
    }
}
