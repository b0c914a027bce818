//! Connections that are not known to be a rank's yet. Each sends a greeting with its rank and, if
//! the job has a token, proves that it has the token. A connection that does not do so soon is
//! closed. Their number is limited, and so are the failures of each address in a second, so that
//! strangers cannot keep the ranks from joining.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::config::RendezvousConfig;
use super::connection::{Connection, poll};
use super::relay::{Ends, RELAYED};
use super::token::{Challenge, Handshake, Prover, nonce};
use super::wire::{Hello, Kind, MAX_GREETING, PROTOCOL, bad, json, parse};

/// How long a connection may take for its greeting.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The most connections at a time.
const MAX_STRANGERS: usize = 256;
/// The number of connections that are accepted before the data of accepted ones is read.
const MAX_ACCEPTS: usize = 32;
/// The number of failures in one [`PERIOD`] after which the connections of an address are read only
/// in the next period.
const MAX_FAILURES: u32 = 1000;
const PERIOD: Duration = Duration::from_secs(1);
/// The pause after a connection could not be accepted.
const ACCEPT_FAILED: Duration = Duration::from_millis(50);
const NO_TOKEN: &str = "it does not have the job's token (DEVCOMM_JOB_TOKEN)";

struct Stranger {
    from: SocketAddr,
    since: Instant,
    connection: Connection,
    /// The greeting of the rank that it claims to be, and the handshake that must prove it.
    challenged: Option<(Hello, Handshake)>,
}

/// The address of a connection, and its proved greeting or why it was closed.
pub(super) type Greeting = (SocketAddr, io::Result<(Hello, Connection)>);

pub(super) struct Strangers<'a> {
    config: &'a RendezvousConfig,
    /// The strangers in the order in which they came.
    list: Vec<Stranger>,
    /// The failures of each [`network`] in this period.
    failures: HashMap<IpAddr, u32>,
    /// When this period began.
    period: Instant,
    /// When to accept again.
    resume: Instant,
}

impl<'a> Strangers<'a> {
    pub(super) fn new(config: &'a RendezvousConfig) -> Self {
        let (now, list, failures) = (Instant::now(), Vec::new(), HashMap::new());
        Self { config, list, failures, period: now, resume: now }
    }

    /// Waits, at most for `limit`, for greetings and failures, and adds them to `heard`.
    ///
    /// # Errors
    ///
    /// If a connection cannot be accepted; then others are accepted later.
    pub(super) fn wait(
        &mut self,
        listeners: &[TcpListener],
        limit: Duration,
        heard: &mut Vec<Greeting>,
    ) -> io::Result<()> {
        let now = Instant::now();
        if self.period.elapsed() >= PERIOD {
            (self.period, self.failures) = (now, HashMap::new());
        }
        let mut next = now + limit.min(PERIOD);
        let mut fds = Vec::with_capacity(1 + self.list.len());
        if self.resume <= now {
            fds.extend(listeners.iter().map(|one| PollFd::new(one, PollFlags::IN)));
        } else {
            next = next.min(self.resume);
        }
        let accepts = fds.len();
        let (mut polled, failures) = (Vec::new(), &self.failures);
        for (index, stranger) in self.list.iter().enumerate() {
            if failures.get(&network(stranger.from)).is_none_or(|failed| *failed < MAX_FAILURES) {
                polled.push(index);
                fds.push(stranger.connection.poll_fd());
            }
        }
        let ready = poll(&mut fds, Some(next - now));
        let (accept, ready) = ready.split_at(accepts);
        let mut ready: Vec<usize> =
            polled.into_iter().zip(ready).filter(|(_, ready)| **ready).map(|(i, _)| i).collect();
        // The last one comes first, since those that are heard are removed.
        while let Some(index) = ready.pop() {
            self.hear(index, heard);
        }
        self.close_silent(heard);
        let ready = listeners.iter().zip(accept).filter(|(_, ready)| **ready);
        ready.map(|(listener, _)| self.accept(listener, heard)).fold(Ok(()), io::Result::and)
    }

    /// Counts a failure of this address.
    pub(super) fn blame(&mut self, from: SocketAddr) {
        *self.failures.entry(network(from)).or_default() += 1;
    }

    /// Reads what a stranger has said.
    fn hear(&mut self, index: usize, heard: &mut Vec<Greeting>) {
        let stranger = &mut self.list[index];
        match stranger.read_greeting(self.config) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                let Stranger { from, connection, .. } = self.list.remove(index);
                heard.push((from, Ok((hello, connection))));
            }
            Err(error) => self.close(index, error, heard),
        }
    }

    fn close(&mut self, index: usize, error: io::Error, heard: &mut Vec<Greeting>) {
        heard.push((self.list.remove(index).from, Err(error)));
    }

    fn close_silent(&mut self, heard: &mut Vec<Greeting>) {
        while self.list.first().is_some_and(|oldest| oldest.since.elapsed() >= TIMEOUT) {
            self.close(0, silent(), heard);
        }
    }

    /// Accepts pending connections.
    fn accept(&mut self, listener: &TcpListener, heard: &mut Vec<Greeting>) -> io::Result<()> {
        for _ in 0..MAX_ACCEPTS {
            let accepted = listener.accept().and_then(|(stream, from)| {
                Ok(Stranger {
                    from,
                    since: Instant::now(),
                    connection: Connection::new(stream)?,
                    challenged: None,
                })
            });
            match accepted {
                Ok(stranger) => self.list.push(stranger),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The peer has closed the connection already.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                // There may be too many open files.
                Err(error) if !self.make_room(heard) => {
                    self.resume = Instant::now() + ACCEPT_FAILED;
                    return Err(error);
                }
                Err(error) => tracing::warn!("a connection could not be accepted: {error}"),
            }
            if self.list.len() > MAX_STRANGERS {
                self.make_room(heard);
            }
        }
        Ok(())
    }

    /// Closes a connection of the network that has most: the oldest one that has said nothing, or
    /// the oldest. False if there is none.
    fn make_room(&mut self, heard: &mut Vec<Greeting>) -> bool {
        let mut numbers = HashMap::<IpAddr, usize>::new();
        for stranger in &self.list {
            *numbers.entry(network(stranger.from)).or_default() += 1;
        }
        let Some((&most, _)) = numbers.iter().max_by_key(|(_, number)| **number) else {
            return false;
        };
        let of_most = |stranger: &Stranger| network(stranger.from) == most;
        let said_nothing = |stranger: &Stranger| of_most(stranger) && stranger.challenged.is_none();
        let oldest = self.list.iter().position(said_nothing);
        if let Some(index) = oldest.or_else(|| self.list.iter().position(of_most)) {
            self.close(index, silent(), heard);
        }
        true
    }
}

impl Stranger {
    /// Reads from the connection. Returns its greeting once that is complete and proved.
    fn read_greeting(&mut self, config: &RendezvousConfig) -> io::Result<Option<Hello>> {
        self.connection.read()?;
        while let Some((kind, payload)) = self.connection.next(MAX_GREETING)? {
            if let Some((hello, handshake)) = self.challenged.take() {
                if kind != Kind::Proof || !handshake.verify(Prover::Other, &payload) {
                    return Err(self.refused(NO_TOKEN));
                }
                self.connection.seal(handshake.seal(Prover::Root), handshake.seal(Prover::Other));
                if Ends::of_root(self.connection.stream())?.are_relayed(&hello.ends) {
                    // If this fails, the rank finds its connection closed.
                    let _ = self.connection.send(Kind::Relayed, &[]);
                    return Err(bad(RELAYED));
                }
                return Ok(Some(hello));
            }
            if kind != Kind::Hello {
                return Err(bad(format!("its first message was {kind:?}")));
            }
            let hello: Hello = parse(&payload)?;
            let token = match (&config.token, hello.nonce) {
                // Other jobs and versions need no proof: the acceptor refuses them for that reason.
                _ if hello.job != config.job || hello.protocol != PROTOCOL => {
                    return Ok(Some(hello));
                }
                (None, None) => return Ok(Some(hello)),
                (None, Some(_)) => {
                    return Err(self.refused("it has a token for the job, rank 0 has none"));
                }
                (Some(_), None) => return Err(self.refused(NO_TOKEN)),
                (Some(token), Some(_)) => token,
            };
            let nonce = nonce()?;
            let handshake = token.handshake(&payload, &nonce);
            let proof = handshake.proof(Prover::Root);
            self.connection.send(Kind::Challenge, &[&json(&Challenge { nonce, proof })])?;
            self.challenged = Some((hello, handshake));
        }
        Ok(None)
    }

    fn refused(&self, why: &str) -> io::Error {
        refuse(&self.connection, why);
        bad(why)
    }
}

/// Tells the other end why it is refused.
pub(super) fn refuse(connection: &Connection, why: &str) {
    // If this fails, the rank finds its connection closed.
    let _ = connection.send(Kind::Refused, &[why.as_bytes()]);
}

fn silent() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "it did not say who it is")
}

/// Returns what counts as one address: for IPv6 the /64 prefix, within which a host chooses its
/// own.
fn network(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX))),
        ip => ip,
    }
}
