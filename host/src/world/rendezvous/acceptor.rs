//! How rank 0, or the first rank that is left after a loss, accepts the other ranks: it listens,
//! identifies what [connects](super::strangers), and waits until all ranks have joined or its
//! timeout has passed.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::config::RendezvousConfig;
use super::connection::Connection;
use super::listen::{Listeners, listen, listen_at, resolve};
use super::probe;
use super::strangers::{Strangers, refuse};
use super::survivors::Members;
use super::wire::{Hello, Kind, Member, MissingRanks, PROTOCOL, Peer, json};
use crate::error::{Error, Result};
use crate::machine::{check_interrupt, interrupt_interval};

/// How often a rank that has joined is sent [`Kind::Waiting`].
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How long missing ranks may take to refuse a connection after a loss. It is short, since no rank
/// joins meanwhile.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// How many missing ranks are asked at a time. Each has a socket for each of its addresses.
const MAX_PROBES: usize = 64;
/// The most notes about refused connections in an error.
const MAX_NOTES: usize = 16;

/// Waits for all other ranks. Returns the members, and the connections to ranks 1, 2, ..., to which
/// [`Kind::Welcome`] was sent.
pub(super) fn wait_for_all(config: &RendezvousConfig) -> Result<(Members, Vec<Connection>)> {
    // The name is this host's own: it must resolve at once, unlike on the other ranks.
    resolve(&config.host, config.port).map_err(|error| config.unresolved(&error))?;
    let cannot_listen = |error| {
        config.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
    };
    let listeners = listen(config).map_err(cannot_listen)?;
    // Opened now, since strangers may use up the descriptors.
    let own = listen_at(&config.host, 0).map_err(cannot_listen)?;
    let mut acceptor = Acceptor::new(config);
    if !acceptor.wait(&listeners, |_| ())? {
        return Err(acceptor.time_out());
    }
    acceptor.welcome(own)
}

/// Does the same as [`wait_for_all`], for those of `members` that are left after the loss of rank
/// `lost`.
pub(super) fn wait_for_survivors(
    config: &RendezvousConfig,
    members: &Members,
    lost: usize,
) -> Result<(Members, Vec<Connection>)> {
    let own = members.listeners.at_any_port().map_err(|error| config.error(error))?;
    let mut acceptor = Acceptor::new(config);
    acceptor.gone[lost] = true;
    acceptor.first = (config.rank > 0).then_some(&members.list[0].address);
    let mut turns = 0;
    // After the timeout, those that have joined go on.
    acceptor.wait(&members.listeners, |acceptor| {
        let missing = acceptor.missing();
        // If there are more missing ranks than one turn asks, the next turn asks others. `max`:
        // none may be missing.
        let first = turns * MAX_PROBES % missing.len().max(1);
        turns += 1;
        let chosen: Vec<usize> = missing
            .iter()
            .cycle()
            .skip(first)
            .take(missing.len().min(MAX_PROBES))
            .copied()
            .collect();
        let address = |&rank: &usize| &members.list[rank].address;
        for index in probe::refusing(chosen.iter().map(address), PROBE_TIMEOUT) {
            acceptor.gone[chosen[index]] = true;
        }
    })?;
    let (left, n_ranks) = (acceptor.left(), config.n_ranks);
    let too_few = if 2 * left < n_ranks {
        Some("fewer than half")
    } else if acceptor.is_other_half() {
        Some("half, without rank 0, whose process has not ended")
    } else {
        None
    };
    if let Some(too_few) = too_few {
        let why = format!("only {left} of {n_ranks} ranks are left, {too_few}");
        acceptor.joined.iter().flatten().for_each(|rank| refuse(&rank.connection, &why));
        return Err(config.error(why));
    }
    acceptor.welcome(own)
}

struct JoinedRank {
    peer: Peer,
    /// The [`Member::address`].
    address: (String, u16),
    connection: Connection,
}

struct Acceptor<'a> {
    config: &'a RendezvousConfig,
    /// The ranks that have joined; the entries up to this process's own rank are never used.
    joined: Vec<Option<JoinedRank>>,
    /// The ranks that are not waited for.
    gone: Vec<bool>,
    /// The address of rank 0, if that is neither this rank nor one that may join.
    first: Option<&'a (String, u16)>,
    /// Notes for errors: refused connections, ranks that disconnected.
    notes: Vec<String>,
}

impl<'a> Acceptor<'a> {
    fn new(config: &'a RendezvousConfig) -> Self {
        let joined = (0..config.n_ranks).map(|_| None).collect();
        let (gone, first, notes) = (vec![false; config.n_ranks], None, Vec::new());
        Self { config, joined, gone, first, notes }
    }

    /// Returns the number of ranks that are here.
    fn left(&self) -> usize {
        1 + self.joined.iter().flatten().count()
    }

    /// Returns whether half of the ranks are here, and the other half may go on with rank 0, whose
    /// process has not ended as far as its host says.
    fn is_other_half(&self) -> bool {
        let runs = |first| probe::refusing([first].into_iter(), PROBE_TIMEOUT).is_empty();
        2 * self.left() == self.config.n_ranks && self.first.is_some_and(runs)
    }

    /// Waits until no rank is missing and this is not the [other half](Self::is_other_half); every
    /// [`PING_INTERVAL`] calls `check`, which may find that missing ranks are gone. Returns false
    /// after the timeout.
    fn wait(&mut self, listeners: &Listeners, mut check: impl FnMut(&mut Self)) -> Result<bool> {
        let listeners = listeners.as_slice();
        let nonblocking = listeners.iter().try_for_each(|one| one.set_nonblocking(true));
        nonblocking.map_err(|error| self.config.error(error))?;
        let (start, mut pinged) = (Instant::now(), None::<Instant>);
        let mut strangers = Strangers::new(self.config);
        loop {
            if pinged.is_none_or(|pinged| pinged.elapsed() >= PING_INTERVAL) {
                pinged = Some(Instant::now());
                self.ping_joined();
                check(self);
            }
            if self.missing().is_empty() && !self.is_other_half() {
                // A rank may have disconnected while the last ones joined.
                self.remove_disconnected(|_| true);
                if self.missing().is_empty() {
                    return Ok(true);
                }
            }
            let left = self.config.timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            check_interrupt()?;
            let limit = left.min(PING_INTERVAL).min(interrupt_interval());
            let mut heard = Vec::new();
            if let Err(error) = strangers.wait(listeners, limit, &mut heard) {
                // There may be too many open files, some of which may be closed later.
                self.note(format!("a connection could not be accepted: {error}"));
            }
            for (from, result) in heard {
                let joined = result.map(|(hello, connection)| self.join(from, hello, connection));
                if let Err(error) = &joined {
                    self.note(format!("a connection from {} was not a rank's: {error}", from.ip()));
                }
                if !joined.unwrap_or(false) {
                    strangers.blame(from);
                }
            }
        }
    }

    /// Returns the ranks that have not joined and are waited for.
    fn missing(&self) -> Vec<usize> {
        self.others().filter(|rank| self.is_missing(*rank)).collect()
    }

    fn others(&self) -> Range<usize> {
        self.config.rank + 1..self.config.n_ranks
    }

    fn is_missing(&self, rank: usize) -> bool {
        self.joined[rank].is_none() && !self.gone[rank]
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Lets a rank join that has sent its greeting. Returns false if the rank is refused.
    fn join(&mut self, from: SocketAddr, hello: Hello, connection: Connection) -> bool {
        if let Some(why) = self.refusal(&hello) {
            tracing::warn!("refused a connection from {from}: {why}");
            refuse(&connection, &why);
            self.note(format!("{from} was refused: {why}"));
            return false;
        }
        // The last rank is welcomed at once.
        let waits = self.others().any(|rank| rank != hello.rank && self.is_missing(rank));
        if !waits || connection.send(Kind::Waiting, &[]).is_ok() {
            let host = host_of(connection.peer().ok(), &self.config.host);
            let address = (host, hello.port);
            self.joined[hello.rank] = Some(JoinedRank { peer: hello.peer, address, connection });
        }
        true
    }

    /// Returns why this rank is refused, if it is.
    fn refusal(&mut self, hello: &Hello) -> Option<String> {
        let RendezvousConfig { job: own_job, rank: own, n_ranks: expected, .. } = self.config;
        let Hello { protocol, job, rank, n_ranks, .. } = hello;
        if *protocol != PROTOCOL {
            Some(format!(
                "it uses version {protocol} of the protocol, rank 0 uses version {PROTOCOL}"
            ))
        } else if job != own_job {
            Some(
                "it belongs to another job (the launcher's job id or DEVCOMM_JOB_ID differs)"
                    .into(),
            )
        } else if n_ranks != expected {
            Some(format!("it was started as one of {n_ranks} ranks, rank 0 as one of {expected}"))
        } else if rank <= own || rank >= expected {
            Some(format!("rank {rank} is not one of the ranks {} to {}", own + 1, expected - 1))
        } else if self.gone[*rank] {
            Some(format!("rank {rank} counts as lost"))
        } else {
            let joined =
                self.joined[*rank].as_ref().filter(|joined| joined.connection.is_open())?;
            if hello.nonce.is_none() {
                return Some(format!("rank {rank} has joined already"));
            }
            // The new connection has the token; the other end of the old one may be gone.
            refuse(&joined.connection, &format!("another process has joined as rank {rank}"));
            None
        }
    }

    /// Sends [`Kind::Waiting`] to the ranks that have joined, and removes those that have
    /// disconnected.
    fn ping_joined(&mut self) {
        self.remove_disconnected(|connection| connection.send(Kind::Waiting, &[]).is_ok());
    }

    /// Removes the ranks that have disconnected, or whose connection fails in `check`. They may
    /// join again.
    fn remove_disconnected(&mut self, check: impl Fn(&Connection) -> bool) {
        let is_gone = |rank: &JoinedRank| !rank.connection.is_open() || !check(&rank.connection);
        for index in 0..self.joined.len() {
            if self.joined[index].as_ref().is_some_and(is_gone) {
                self.joined[index] = None;
                self.note(format!("rank {index} connected and disconnected again"));
            }
        }
    }

    /// Tells the joined ranks their numbers. This rank listens at `own` from now on.
    fn welcome(self, own: Listeners) -> Result<(Members, Vec<Connection>)> {
        let config = self.config;
        let port = own.port().map_err(|error| config.error(error))?;
        let (peer, address) = (config.peer.clone(), (config.host.clone(), port));
        let mut list = vec![Member { rank: config.rank, peer, address }];
        let mut connections = Vec::new();
        for (rank, joined) in self.joined.into_iter().enumerate() {
            let Some(JoinedRank { peer, address, connection }) = joined else { continue };
            list.push(Member { rank, peer, address });
            connections.push(connection);
        }
        let welcome = json(&list);
        for connection in &connections {
            // If a rank died meanwhile, its connection is found closed later.
            let _ = connection.send(Kind::Welcome, &[&welcome]);
        }
        Ok((Members::new(config, list, own)?, connections))
    }

    /// Tells the ranks that have joined which ranks are missing, and returns the error.
    fn time_out(mut self) -> Error {
        self.ping_joined();
        let waited_ms = u64::try_from(self.config.timeout.as_millis()).unwrap_or(u64::MAX);
        let missing = MissingRanks { missing: self.missing(), waited_ms, notes: self.notes };
        let payload = json(&missing);
        for rank in self.joined.iter().flatten() {
            // If this fails, the rank finds its connection closed.
            let _ = rank.connection.send(Kind::Missing, &[&payload]);
        }
        self.config.missing(missing)
    }
}

/// Returns the host at which others reach the rank at this address, if they reach rank 0 at `root`.
fn host_of(rank: Option<SocketAddr>, root: &str) -> String {
    match rank.map(|address| address.ip().to_canonical()) {
        // Its interface is the one by which a rank reaches rank 0; the number is this host's.
        Some(IpAddr::V6(ip)) if ip.is_unicast_link_local() => match root.split_once('%') {
            Some((_, interface)) => format!("{ip}%{interface}"),
            None => ip.to_string(),
        },
        Some(ip) if !ip.is_loopback() => ip.to_string(),
        // This host, which other hosts know by another name.
        _ => root.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_reach_a_rank_at_its_address_and_one_of_this_host_by_the_hosts_name() {
        let host = |rank: &str, root| host_of(Some(rank.parse().unwrap()), root);
        assert_eq!(host("192.0.2.1:7", "node0"), "192.0.2.1");
        assert_eq!(host("[::ffff:192.0.2.1]:7", "node0"), "192.0.2.1");
        assert_eq!(host("127.0.0.1:7", "node0"), "node0");
        assert_eq!(host("[::1]:7", "node0"), "node0");
        assert_eq!(host("[fe80::7%3]:7", "fe80::1%eth0"), "fe80::7%eth0");
        assert_eq!(host_of(None, "node0"), "node0");
    }
}
