//! How rank 0 gathers the others: it listens, checks who connects, and waits until all have joined
//! or the time is up.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::join::RendezvousConfig;
use super::wire::{
    Hello, Kind, MAX_GREETING, MissingRanks, PROTOCOL, Peer, bad, parse, receive, send, send_json,
};
use crate::error::{Error, Result};
use crate::sys::process::inherited_listener;

/// A connection that sends nothing for this long is not a rank's.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to retry while the port is in use.
const BIND_TIMEOUT: Duration = Duration::from_secs(3);
/// How often the ranks that have joined are told that others are awaited.
const PING_INTERVAL: Duration = Duration::from_secs(1);
/// How often rank 0 looks for new connections.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How many notes about refused connections an error carries.
const MAX_NOTES: usize = 16;

/// Waits for all other ranks. Returns the peers of all ranks, and the connections of ranks 1, 2,
/// ..., which were sent the welcome.
pub(super) fn wait_for_all(config: &RendezvousConfig) -> Result<(Vec<Peer>, Vec<TcpStream>)> {
    let start = Instant::now();
    let listener = listen(config).map_err(|error| {
        config.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
    })?;
    let joined = (1..config.n_ranks).map(|_| None).collect();
    let mut acceptor = Acceptor { config, joined, notes: Vec::new() };
    let (sender, greetings) = channel();
    let mut pulse = start;
    loop {
        accept(&listener, &sender).map_err(|error| config.error(error))?;
        acceptor.take_greetings(&greetings);
        if acceptor.missing().is_empty() {
            // One may have left while the last ones joined.
            acceptor.ping_joined();
            if acceptor.missing().is_empty() {
                return Ok(acceptor.welcome());
            }
        }
        if start.elapsed() >= config.timeout {
            return Err(acceptor.give_up());
        }
        if pulse.elapsed() >= PING_INTERVAL {
            pulse = Instant::now();
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
    /// Rank `i` is at `i - 1`.
    joined: Vec<Option<JoinedRank>>,
    /// What else happened: refused connections, ranks that left again.
    notes: Vec<String>,
}

impl Acceptor<'_> {
    fn missing(&self) -> Vec<usize> {
        let ranks = (1..).zip(&self.joined);
        ranks.filter(|(_, rank)| rank.is_none()).map(|(rank, _)| rank).collect()
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.push(note);
        }
    }

    /// Handles the greetings that have arrived since the last call.
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
                let _ = send(&mut stream, Kind::Refused, why.as_bytes());
                self.note(format!("{from} was refused: {why}"));
            } else if send(&mut stream, Kind::Waiting, &[]).is_ok() {
                self.joined[hello.rank - 1] = Some(JoinedRank { peer: hello.peer, stream });
            }
        }
    }

    /// Why this rank is refused, if it is.
    fn refusal(&self, hello: &Hello) -> Option<String> {
        let RendezvousConfig { job: own_job, n_ranks: own_n, .. } = self.config;
        let Hello { protocol, job, rank, n_ranks, .. } = hello;
        if *protocol != PROTOCOL {
            Some(format!(
                "it speaks version {protocol} of the rendezvous, rank 0 version {PROTOCOL}"
            ))
        } else if job != own_job {
            Some(
                "it belongs to another job (the launcher's id of it or DEVCOMM_JOB_ID differs)"
                    .into(),
            )
        } else if n_ranks != own_n {
            Some(format!("it was started as one of {n_ranks} ranks, rank 0 as one of {own_n}"))
        } else if *rank == 0 || *rank >= *own_n {
            Some(format!("rank {rank} is not one of the ranks 1..{own_n} that are expected"))
        } else if self.joined[rank - 1].as_ref().is_some_and(|rank| is_open(&rank.stream)) {
            Some(format!("there is a rank {rank} already"))
        } else {
            None
        }
    }

    /// Tells the ranks that have joined that others are awaited, and drops those that have left.
    /// They may join again.
    fn ping_joined(&mut self) {
        for index in 0..self.joined.len() {
            let Some(rank) = &mut self.joined[index] else { continue };
            if !is_open(&rank.stream) || send(&mut rank.stream, Kind::Waiting, &[]).is_err() {
                self.joined[index] = None;
                self.note(format!("rank {} came and went away again", index + 1));
            }
        }
    }

    fn welcome(self) -> (Vec<Peer>, Vec<TcpStream>) {
        let (others, mut streams): (Vec<Peer>, Vec<TcpStream>) =
            self.joined.into_iter().flatten().map(|rank| (rank.peer, rank.stream)).unzip();
        let peers: Vec<Peer> = std::iter::once(self.config.peer.clone()).chain(others).collect();
        for stream in &mut streams {
            // A rank that died meanwhile is noticed by the reader of its connection.
            let _ = send_json(stream, Kind::Welcome, &peers);
        }
        (peers, streams)
    }

    /// Tells the ranks that have joined which are missing.
    fn give_up(mut self) -> Error {
        self.ping_joined();
        let waited_ms = u64::try_from(self.config.timeout.as_millis()).unwrap_or(u64::MAX);
        let news = MissingRanks { missing: self.missing(), waited_ms, notes: self.notes };
        for rank in self.joined.iter_mut().flatten() {
            // A rank that does not get it sees the connection close.
            let _ = send_json(&mut rank.stream, Kind::Missing, &news);
        }
        self.config.missing(news)
    }
}

fn listen(config: &RendezvousConfig) -> io::Result<TcpListener> {
    let inherited = config.listener.map(|descriptor| inherited_listener(descriptor, config.port));
    let listener = match inherited {
        Some(Ok(listener)) => listener,
        // A process in between may have closed it, or this is a child of the process it was meant
        // for.
        Some(Err(error)) => {
            tracing::debug!("no socket was handed down: {error}");
            bind(&config.host, config.port)?
        }
        None => bind(&config.host, config.port)?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Listens at the port. It may be about to become free: a launcher may have tried it, or a job may
/// be ending there.
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
    // A job on one host is not exposed to the network. That the host's own name leads to a
    // loopback address, as on Debian, does not make it one.
    let literal = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if literal || host == "localhost" {
        return TcpListener::bind((host, port));
    }
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// A new connection: from where, and what it sent first.
type Greeting = (SocketAddr, io::Result<(Hello, TcpStream)>);

/// Accepts the connections that wait. A thread each reads their greetings, so that one that sends
/// nothing holds up no other.
fn accept(listener: &TcpListener, sender: &Sender<Greeting>) -> io::Result<()> {
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            // The other end closed before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        let sender = sender.clone();
        std::thread::Builder::new().name("devcomm-greeting".to_owned()).spawn(move || {
            // Nobody receives any more once all ranks have joined.
            let _ = sender.send((from, read_greeting(stream)));
        })?;
    }
}

fn read_greeting(mut stream: TcpStream) -> io::Result<(Hello, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
    stream.set_write_timeout(Some(GREETING_TIMEOUT))?;
    let (kind, payload) = receive(&mut stream, MAX_GREETING)?;
    if kind != Kind::Hello {
        return Err(bad(format!("it began with {kind:?}")));
    }
    Ok((parse(&payload)?, stream))
}

/// Whether the other end is still there.
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
