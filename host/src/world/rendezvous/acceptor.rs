//! How rank 0, or the first rank that is left after a loss, accepts the other ranks: it listens,
//! checks each connection, and waits until all ranks have joined or its timeout has passed.

use std::collections::VecDeque;
use std::io;
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs,
};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::connect::connect;
use super::join::RendezvousConfig;
use super::survivors::Members;
use super::token::{Challenge, Prover, nonce};
use super::wire::{
    Hello, Kind, MAX_GREETING, Member, MissingRanks, PROTOCOL, Peer, bad, parse, receive, send,
    send_json,
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
/// How long a rank that is missing after a loss may take to accept a connection, or to refuse it.
const PROBE_TIMEOUT: Duration = Duration::from_millis(200);
/// The most connections that have not been heard yet.
const MAX_STRANGERS: usize = 256;
const NO_TOKEN: &str = "it does not have the job's token (DEVCOMM_JOB_TOKEN)";
/// The most notes about refused connections in an error.
const MAX_NOTES: usize = 16;

/// Waits for all other ranks. Returns the members, and the connections to ranks 1, 2, ..., to which
/// [`Kind::Welcome`] was sent.
pub(super) fn wait_for_all(config: &RendezvousConfig) -> Result<(Members, Vec<TcpStream>)> {
    let cannot_listen = |error| {
        config.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
    };
    let listener = listen(config).map_err(cannot_listen)?;
    let mut acceptor = Acceptor::new(config);
    if !acceptor.wait(&listener, |_| ()) {
        return Err(acceptor.time_out());
    }
    let own = try_bind(&config.host, 0).map_err(cannot_listen)?;
    acceptor.welcome(own)
}

/// As [`wait_for_all`], for those of `members` that are left after the loss of rank `lost`.
pub(super) fn wait_for_survivors(
    config: &RendezvousConfig,
    members: &Members,
    lost: usize,
) -> Result<(Members, Vec<TcpStream>)> {
    members.listener.set_nonblocking(true).map_err(|error| config.error(error))?;
    let mut acceptor = Acceptor::new(config);
    acceptor.gone[lost] = true;
    acceptor.wait(&members.listener, |acceptor| {
        for rank in acceptor.missing() {
            let (host, port) = &members.list[rank].address;
            let connected = connect(host, *port, PROBE_TIMEOUT);
            acceptor.gone[rank] =
                connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        }
    });
    let left = 1 + acceptor.joined.iter().flatten().count();
    if 2 * left < config.n_ranks {
        let why = format!("only {left} of {} ranks are left, fewer than half", config.n_ranks);
        acceptor.joined.iter_mut().flatten().for_each(|rank| refuse(&mut rank.stream, &why));
        return Err(config.error(why));
    }
    let address = members.listener.local_addr().map(|address| address.ip());
    let own = address.and_then(|address| TcpListener::bind((address, 0)));
    acceptor.welcome(own.map_err(|error| config.error(error))?)
}

struct JoinedRank {
    peer: Peer,
    address: (String, u16),
    stream: TcpStream,
}

struct Acceptor<'a> {
    config: &'a RendezvousConfig,
    /// By rank; those up to this process's own are never used.
    joined: Vec<Option<JoinedRank>>,
    /// Those that are not waited for, by rank.
    gone: Vec<bool>,
    /// Notes for errors: refused connections, ranks that disconnected.
    notes: Vec<String>,
}

impl<'a> Acceptor<'a> {
    fn new(config: &'a RendezvousConfig) -> Self {
        let joined = (0..config.n_ranks).map(|_| None).collect();
        Self { config, joined, gone: vec![false; config.n_ranks], notes: Vec::new() }
    }

    /// Waits until no rank is missing; calls `check` at intervals. False after the timeout.
    fn wait(&mut self, listener: &TcpListener, check: impl Fn(&mut Self)) -> bool {
        let (start, mut checked) = (Instant::now(), None::<Instant>);
        let (sender, greetings) = channel();
        let mut strangers = VecDeque::new();
        loop {
            if let Err(error) = accept(listener, self.config, &sender, &mut strangers) {
                // Such as too many open files: later ones may be closed.
                self.note(format!("a connection could not be accepted: {error}"));
            }
            self.take_greetings(&greetings);
            if self.missing().is_empty() {
                // A rank may have disconnected while the last ones joined.
                self.ping_joined();
                if self.missing().is_empty() {
                    return true;
                }
            }
            if start.elapsed() >= self.config.timeout {
                return false;
            }
            if checked.is_none_or(|checked| checked.elapsed() >= PING_INTERVAL) {
                checked = Some(Instant::now());
                self.ping_joined();
                check(self);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn missing(&self) -> Vec<usize> {
        let others = self.config.rank + 1..self.config.n_ranks;
        others.filter(|rank| self.joined[*rank].is_none() && !self.gone[*rank]).collect()
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
                let address = (self.host_of(&stream), hello.port);
                self.joined[hello.rank] = Some(JoinedRank { peer: hello.peer, address, stream });
            }
        }
    }

    /// The host at which others reach the rank at the other end.
    fn host_of(&self, stream: &TcpStream) -> String {
        match stream.peer_addr().map(|address| address.ip()) {
            Ok(ip) if !ip.is_loopback() => ip.to_string(),
            // This host, which other hosts know by another name.
            _ => self.config.host.clone(),
        }
    }

    /// Why this rank is refused, if it is.
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
            let joined = self.joined[*rank].as_mut().filter(|joined| is_open(&joined.stream))?;
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
                self.note(format!("rank {index} connected and disconnected again"));
            }
        }
    }

    /// Tells the ranks that have joined who they are. This one listens at `own` from now on.
    fn welcome(self, own: TcpListener) -> Result<(Members, Vec<TcpStream>)> {
        let config = self.config;
        let port = own.local_addr().map_err(|error| config.error(error))?.port();
        let (peer, address) = (config.peer.clone(), (config.host.clone(), port));
        let mut list = vec![Member { rank: config.rank, peer, address }];
        let mut streams = Vec::new();
        for (rank, joined) in self.joined.into_iter().enumerate() {
            let Some(JoinedRank { peer, address, stream }) = joined else { continue };
            list.push(Member { rank, peer, address });
            streams.push(stream);
        }
        for stream in &mut streams {
            // If a rank died meanwhile, the thread that reads its connection reports it.
            let _ = send_json(stream, Kind::Welcome, &list);
        }
        Ok((Members::new(config, list, own)?, streams))
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

/// Listens at any port of this address of this host, or of the host of rank 0 if that is this one.
pub(super) fn listen_beside(host: &str, address: IpAddr) -> io::Result<TcpListener> {
    if address.is_loopback() { try_bind(host, 0) } else { TcpListener::bind((address, 0)) }
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
