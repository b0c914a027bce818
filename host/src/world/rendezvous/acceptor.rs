//! How rank 0 accepts the other ranks: it listens, checks each connection, and waits until all
//! ranks have joined or its timeout has passed.

use std::collections::VecDeque;
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::join::RendezvousConfig;
use super::token::{Challenge, Prover, nonce};
use super::wire::{
    Hello, Kind, MAX_GREETING, MissingRanks, PROTOCOL, Peer, bad, parse, receive, send, send_json,
};
use crate::error::{Error, Result};
use crate::sys::process::inherited_listener;

/// How long a new connection may take to send its first message.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to retry while the port is in use.
const BIND_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a rank that has joined is sent [`Kind::Waiting`].
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How often rank 0 polls for new connections.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// The most connections that have not been heard yet.
const MAX_STRANGERS: usize = 256;
const NO_TOKEN: &str = "it does not have the job's token (DEVCOMM_JOB_TOKEN)";
/// The most notes about refused connections in an error.
const MAX_NOTES: usize = 16;

/// Waits for all other ranks. Returns the peers of all ranks, and the connections of ranks 1, 2,
/// ..., to which [`Kind::Welcome`] was sent.
pub(super) fn wait_for_all(config: &RendezvousConfig) -> Result<(Vec<Peer>, Vec<TcpStream>)> {
    let start = Instant::now();
    let listener = listen(config).map_err(|error| {
        config.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
    })?;
    let joined = (1..config.n_ranks).map(|_| None).collect();
    let mut acceptor = Acceptor { config, joined, notes: Vec::new() };
    let (sender, greetings) = channel();
    let mut strangers = VecDeque::new();
    let mut pinged = start;
    loop {
        if let Err(error) = accept(&listener, config, &sender, &mut strangers) {
            // Such as too many open files: later ones may be closed.
            acceptor.note(format!("a connection could not be accepted: {error}"));
        }
        acceptor.take_greetings(&greetings);
        if acceptor.missing().is_empty() {
            // A rank may have disconnected while the last ones joined.
            acceptor.ping_joined();
            if acceptor.missing().is_empty() {
                return Ok(acceptor.welcome());
            }
        }
        if start.elapsed() >= config.timeout {
            return Err(acceptor.time_out());
        }
        if pinged.elapsed() >= PING_INTERVAL {
            pinged = Instant::now();
            acceptor.ping_joined();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

struct JoinedRank {
    peer: Peer,
    stream: TcpStream,
}

struct Acceptor<'a> {
    config: &'a RendezvousConfig,
    /// Rank `i` has index `i - 1`.
    joined: Vec<Option<JoinedRank>>,
    /// Notes for errors: refused connections, ranks that disconnected.
    notes: Vec<String>,
}

impl Acceptor<'_> {
    fn missing(&self) -> Vec<usize> {
        let ranks = (1..).zip(&self.joined);
        ranks.filter(|(_, rank)| rank.is_none()).map(|(rank, _)| rank).collect()
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Handles the first messages that have arrived since the last call.
    fn take_greetings(&mut self, greetings: &Receiver<Greeting>) {
        while let Ok((from, greeting)) = greetings.try_recv() {
            let (hello, mut stream) = match greeting {
                Ok(greeting) => greeting,
                Err(error) => {
                    self.note(format!("a connection from {from} was not a rank's: {error}"));
                    continue;
                }
            };
            if let Some(why) = self.refusal(&hello) {
                tracing::warn!("refused a connection from {from}: {why}");
                refuse(&mut stream, &why);
                self.note(format!("{from} was refused: {why}"));
            } else if send(&mut stream, Kind::Waiting, &[]).is_ok() {
                self.joined[hello.rank - 1] = Some(JoinedRank { peer: hello.peer, stream });
            }
        }
    }

    /// Why this rank is refused, if it is.
    fn refusal(&mut self, hello: &Hello) -> Option<String> {
        let RendezvousConfig { job: own_job, n_ranks: expected, .. } = self.config;
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
        } else if *rank == 0 || *rank >= *expected {
            Some(format!("rank {rank} is not one of the ranks 1 to {}", expected - 1))
        } else {
            let joined = self.joined[rank - 1].as_mut().filter(|joined| is_open(&joined.stream))?;
            if hello.nonce.is_none() {
                return Some(format!("rank {rank} has joined already"));
            }
            // The new one has the token; the other end of the old one may be gone.
            refuse(&mut joined.stream, &format!("another process has joined as rank {rank}"));
            None
        }
    }

    /// Sends [`Kind::Waiting`] to the ranks that have joined, and removes those that have
    /// disconnected. They may join again.
    fn ping_joined(&mut self) {
        for index in 0..self.joined.len() {
            let Some(rank) = &mut self.joined[index] else { continue };
            if !is_open(&rank.stream) || send(&mut rank.stream, Kind::Waiting, &[]).is_err() {
                self.joined[index] = None;
                self.note(format!("rank {} connected and disconnected again", index + 1));
            }
        }
    }

    fn welcome(self) -> (Vec<Peer>, Vec<TcpStream>) {
        let (others, mut streams): (Vec<Peer>, Vec<TcpStream>) =
            self.joined.into_iter().flatten().map(|rank| (rank.peer, rank.stream)).unzip();
        let peers: Vec<Peer> = std::iter::once(self.config.peer.clone()).chain(others).collect();
        for stream in &mut streams {
            // If a rank died meanwhile, the thread that reads its connection reports it.
            let _ = send_json(stream, Kind::Welcome, &peers);
        }
        (peers, streams)
    }

    /// Tells the ranks that have joined which ranks are missing, and returns the error.
    fn time_out(mut self) -> Error {
        self.ping_joined();
        let waited_ms = u64::try_from(self.config.timeout.as_millis()).unwrap_or(u64::MAX);
        let missing = MissingRanks { missing: self.missing(), waited_ms, notes: self.notes };
        for rank in self.joined.iter_mut().flatten() {
            // If this fails, the rank finds its connection closed.
            let _ = send_json(&mut rank.stream, Kind::Missing, &missing);
        }
        self.config.missing(missing)
    }
}

fn listen(config: &RendezvousConfig) -> io::Result<TcpListener> {
    let inherited = config.listener.map(|descriptor| inherited_listener(descriptor, config.port));
    let listener = match inherited {
        Some(Ok(listener)) => listener,
        // A wrapper process may have closed the socket, or this process is a child of rank 0 that
        // has inherited the variable.
        Some(Err(error)) => {
            tracing::debug!("no socket was inherited: {error}");
            bind(&config.host, config.port)?
        }
        None => bind(&config.host, config.port)?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Listens on the port. Retries while it is in use, since a launcher may be testing it, or an
/// ending job may still use it.
fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let start = Instant::now();
    loop {
        match try_bind(host, port) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < BIND_TIMEOUT =>
            {
                std::thread::sleep(POLL_INTERVAL);
            }
            done => return done,
        }
    }
}

fn try_bind(host: &str, port: u16) -> io::Result<TcpListener> {
    // A job on one host listens on the loopback address only. Other names do not imply one host,
    // even if they resolve to a loopback address, as a host's own name does on Debian.
    let literal = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if literal || host == "localhost" {
        return TcpListener::bind((host, port));
    }
    // The address that the other ranks connect to, if it is one of this host's.
    let addresses = (host, port).to_socket_addrs().into_iter().flatten();
    for address in addresses.filter(|address| !address.ip().is_loopback()) {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
            bound => return bound,
        }
    }
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

fn refuse(stream: &mut TcpStream, why: &str) {
    // If this fails, the rank finds its connection closed.
    let _ = send(stream, Kind::Refused, why.as_bytes());
}

/// A new connection: its address, and its first message.
type Greeting = (SocketAddr, io::Result<(Hello, TcpStream)>);

/// Accepts all pending connections. One thread per connection reads the first message, so that a
/// connection that sends nothing does not delay others; of too many `strangers`, which have not
/// been heard yet, the oldest are closed.
fn accept(
    listener: &TcpListener,
    config: &RendezvousConfig,
    sender: &Sender<Greeting>,
    strangers: &mut VecDeque<(TcpStream, Arc<()>)>,
) -> io::Result<()> {
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            // The peer has closed the connection already.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        // The other reference is the thread's.
        strangers.retain(|(_, reading)| Arc::strong_count(reading) > 1);
        if strangers.len() >= MAX_STRANGERS
            && let Some((oldest, _)) = strangers.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let (sender, config, reading) = (sender.clone(), config.clone(), Arc::new(()));
        strangers.push_back((stream.try_clone()?, Arc::clone(&reading)));
        std::thread::Builder::new().name("devcomm-greeting".to_owned()).spawn(move || {
            // Fails if all ranks have joined meanwhile, which is fine.
            let _ = sender.send((from, read_greeting(stream, &config)));
            drop(reading);
        })?;
    }
}

/// Reads the first message; if this rank has a token, both prove that they have it.
fn read_greeting(
    mut stream: TcpStream,
    config: &RendezvousConfig,
) -> io::Result<(Hello, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
    stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
    let (kind, payload) = receive(&mut stream, MAX_GREETING)?;
    if kind != Kind::Hello {
        return Err(bad(format!("its first message was {kind:?}")));
    }
    let hello: Hello = parse(&payload)?;
    // Other jobs and versions are refused for what they are.
    if hello.job == config.job
        && hello.protocol == PROTOCOL
        && let Err(error) = prove(&mut stream, config, &hello)
    {
        refuse(&mut stream, &error.to_string());
        return Err(error);
    }
    Ok((hello, stream))
}

fn prove(stream: &mut TcpStream, config: &RendezvousConfig, hello: &Hello) -> io::Result<()> {
    let token = match (&config.token, hello.nonce) {
        (None, None) => return Ok(()),
        (None, Some(_)) => return Err(bad("it has a token for the job, rank 0 has none")),
        (Some(_), None) => return Err(bad(NO_TOKEN)),
        (Some(token), Some(_)) => token,
    };
    let nonce = nonce()?;
    let proof = token.proof(Prover::Root, hello, &nonce);
    send_json(stream, Kind::Challenge, &Challenge { nonce, proof })?;
    match receive(stream, MAX_GREETING)? {
        (Kind::Proof, proof) if token.verify(Prover::Other, hello, &nonce, &proof) => Ok(()),
        _ => Err(bad(NO_TOKEN)),
    }
}

/// Whether the peer has not closed the connection.
fn is_open(stream: &TcpStream) -> bool {
    if stream.set_nonblocking(true).is_err() {
        return false;
    }
    let open = match stream.peek(&mut [0]) {
        Ok(read) => read > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).is_ok() && open
}
