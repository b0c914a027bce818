//! How ranks other than 0 join: a rank tries to connect to rank 0 until it is accepted, it is
//! refused, or its timeout has passed.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::config::RendezvousConfig;
use super::connection::Connection;
use super::listen::{listen_at_any_port, resolve};
use super::relay::{Ends, RELAYED};
use super::survivors::Members;
use super::token::{Challenge, Prover, Token};
use super::wire::{Kind, MAX_GREETING, MAX_PAYLOAD, bad, json, parse};
use crate::error::{Error, Result, StateError, WorldError};
use crate::machine::check_interrupt;

/// The pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// The most distinct failures that an error lists.
const MAX_NOTES: usize = 4;
/// A rank that connected just before its timeout still waits this long for rank 0's answer.
const MIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The time after which a rank tries again: rank 0 may not run yet, and another process that
/// listens in its place may never answer.
const MAX_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Rank 0 sends a message every second while it waits. Without one for this long, its process or
/// its host is considered dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(15);

/// The time after which a host that never had an address is an error: names of hosts that have just
/// been started may be known a little later than the ranks.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of failed attempts to connect after which a rank's host counts as unreachable.
const MAX_UNREACHABLE: usize = 2;

const NO_TOKEN: &str = "what listens there does not have the job's token (DEVCOMM_JOB_TOKEN)";

/// Joins the rendezvous of rank 0. Returns the members and the connection to rank 0.
pub(super) fn join(config: &RendezvousConfig) -> Result<(Members, Connection)> {
    let start = Instant::now();
    let mut notes: Vec<String> = Vec::new();
    let mut resolved = false;
    loop {
        check_interrupt()?;
        let left = config.timeout.saturating_sub(start.elapsed());
        let last = match try_join(config, left) {
            Ok(joined) if joined.0.list.len() == config.n_ranks => return Ok(joined),
            Ok((members, _)) => {
                let (welcomed, n_ranks) = (members.list.len(), config.n_ranks);
                return Err(config.error(format!("rank 0 has {welcomed} ranks, not {n_ranks}")));
            }
            Err(JoinError::Fatal(error)) => return Err(error),
            Err(JoinError::Unresolved(error))
                if !resolved && start.elapsed() >= RESOLVE_TIMEOUT.min(config.timeout) =>
            {
                return Err(config.unresolved(&error));
            }
            Err(JoinError::Unresolved(error)) => error.to_string(),
            Err(JoinError::Unconnected(error) | JoinError::Retry(error)) => {
                resolved = true;
                error.to_string()
            }
        };
        if !notes.contains(&last) && notes.len() < MAX_NOTES {
            notes.push(last);
        }
        if start.elapsed() + RETRY >= config.timeout {
            notes.push("rank 0 may have timed out before this rank connected".to_owned());
            return Err(WorldError::RanksMissing {
                missing: vec![0],
                address: config.address(),
                waited: start.elapsed(),
                notes,
            }
            .into());
        }
        std::thread::sleep(RETRY);
    }
}

/// Does the same as [`join`], for the ranks that are left after a loss. `None` if the rank that
/// would be rank 0 does not let this one join: its process has ended, its host does not answer, or
/// an attempt fails once `patience` is over, as with a rank that is stopped and sends nothing.
pub(super) fn join_survivors(
    config: &RendezvousConfig,
    patience: Duration,
) -> Result<Option<(Members, Connection)>> {
    let (start, mut unreachable) = (Instant::now(), 0);
    loop {
        check_interrupt()?;
        let left = patience.saturating_sub(start.elapsed());
        match try_join(config, left) {
            Ok(joined) => return Ok(Some(joined)),
            Err(JoinError::Fatal(error)) => return Err(error),
            Err(JoinError::Unconnected(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                return Ok(None);
            }
            Err(JoinError::Unconnected(_)) => unreachable += 1,
            Err(_) => {}
        }
        if unreachable == MAX_UNREACHABLE || start.elapsed() + RETRY >= patience {
            return Ok(None);
        }
        std::thread::sleep(RETRY);
    }
}

fn try_join(config: &RendezvousConfig, left: Duration) -> Result<(Members, Connection), JoinError> {
    let addresses = resolve(&config.host, config.port).map_err(JoinError::Unresolved)?;
    let stream = connect(&addresses, left).map_err(JoinError::Unconnected)?;
    let connection = Connection::new(stream)?;
    let listeners = listen_at_any_port(&config.host, connection.stream().local_addr()?)?;
    let hello = config.hello(Ends::of_rank(connection.stream())?, listeners.port()?)?;
    let hello = json(&hello);
    connection.send(Kind::Hello, &[&hello])?;
    // Rank 0 may not run yet: it may inherit a socket that already accepts connections.
    let mut deadline = Instant::now() + left.clamp(MIN_ANSWER_TIMEOUT, MAX_ANSWER_TIMEOUT);
    if let Some(token) = &config.token {
        prove(&connection, &hello, token, deadline)?;
    }
    loop {
        let (kind, payload) = connection.receive(MAX_PAYLOAD, deadline)?;
        let fatal = |why: String| Err(JoinError::Fatal(config.error(why)));
        return match kind {
            Kind::Waiting => {
                // From here on only rank 0's timeout counts.
                deadline = Instant::now() + SILENCE_TIMEOUT;
                continue;
            }
            Kind::Welcome => {
                let members = Members::new(config, parse(&payload)?, listeners);
                members.map(|members| (members, connection)).map_err(JoinError::Fatal)
            }
            Kind::Missing => Err(JoinError::Fatal(config.missing(parse(&payload)?))),
            Kind::Refused => fatal(refused(&payload)),
            Kind::Relayed => Err(bad(RELAYED).into()),
            other => fatal(format!("rank 0 answered with {other:?}")),
        };
    }
}

/// Proves to the other end, and checks there, that both have the token. Until then nothing is
/// believed: all errors lead to another attempt, since it may not be rank 0 that answers.
fn prove(
    connection: &Connection,
    hello: &[u8],
    token: &Token,
    deadline: Instant,
) -> io::Result<()> {
    match connection.receive(MAX_GREETING, deadline)? {
        (Kind::Challenge, payload) => {
            let Challenge { nonce, proof } = parse(&payload)?;
            let handshake = token.handshake(hello, &nonce);
            if !handshake.verify(Prover::Root, &proof) {
                return Err(bad(NO_TOKEN));
            }
            connection.send(Kind::Proof, &[&handshake.proof(Prover::Other)])?;
            connection.seal(handshake.seal(Prover::Other), handshake.seal(Prover::Root));
            Ok(())
        }
        (Kind::Refused, payload) => Err(bad(format!("{NO_TOKEN}: {}", refused(&payload)))),
        _ => Err(bad(NO_TOKEN)),
    }
}

fn refused(why: &[u8]) -> String {
    format!("rank 0 refused this rank: {}", String::from_utf8_lossy(why))
}

/// Why an attempt to join failed.
enum JoinError {
    /// Another attempt would not help: rank 0 refuses this rank, its time has passed without all
    /// ranks, or their NCCLs differ; or this rank was interrupted.
    Fatal(Error),
    /// The host has no address.
    Unresolved(io::Error),
    /// There is no connection.
    Unconnected(io::Error),
    /// The connection failed, or it may not be rank 0 that answered.
    Retry(io::Error),
}

impl From<io::Error> for JoinError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::Interrupted => Self::Fatal(StateError::Interrupted.into()),
            _ => Self::Retry(error),
        }
    }
}

fn connect(addresses: &[SocketAddr], left: Duration) -> io::Result<TcpStream> {
    // An address that does not answer must not use up the whole timeout.
    let timeout = left.clamp(Duration::from_millis(100), Duration::from_secs(2));
    let mut last = ErrorKind::NotFound.into();
    for address in addresses {
        match TcpStream::connect_timeout(address, timeout) {
            // On a free port of this host, the system may connect a socket to itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
