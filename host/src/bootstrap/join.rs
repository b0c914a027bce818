//! How ranks that are processes find each other: rank 0 listens, everyone introduces itself, and when all are there each
//! learns who the others are.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::hub::{Hub, ThreadMember};
use super::tcp::{ClientMember, RootMember, dismiss};
use super::wire::{
    Hello, Kind, MAX_GREETING, MAX_PAYLOAD, MissingRanks, PROTOCOL, Peer, parse, receive, send,
    send_json,
};
use super::{Member, Rendezvous};
use crate::{Error, Result};

/// A connection that says nothing for this long is not a rank's.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// How often a rank knocks at rank 0's door.
const RETRY: Duration = Duration::from_millis(50);
/// How often rank 0 looks out for new connections.
const LOOKOUT: Duration = Duration::from_millis(2);

/// Where and as whom to meet.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub host: String,
    pub port: u16,
    pub job: String,
    pub rank: usize,
    pub n_ranks: usize,
    pub timeout: Duration,
    pub peer: Peer,
}

impl Meeting {
    fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn error(&self, why: impl ToString) -> Error {
        Error::Rendezvous { address: self.address(), why: why.to_string() }
    }

    fn hello(&self) -> Hello {
        let (job, peer) = (self.job.clone(), self.peer.clone());
        Hello { protocol: PROTOCOL, job, rank: self.rank, n_ranks: self.n_ranks, peer }
    }

    /// Meets the other ranks.
    ///
    /// # Errors
    ///
    /// [`Error::RanksMissing`] after the deadline, [`Error::NcclVersionsDiffer`], [`Error::Rendezvous`] when rank 0 does not
    /// let this rank in.
    pub(crate) fn join(&self) -> Result<Rendezvous> {
        let (peers, member): (Vec<Peer>, Arc<dyn Member>) = match (self.rank, self.n_ranks) {
            (_, 1) => {
                let member = ThreadMember::new(Arc::new(Hub::new(1)), 0);
                (vec![self.peer.clone()], Arc::new(member))
            }
            (0, _) => {
                let (peers, streams) = self.host_it(Instant::now())?;
                (peers, Arc::new(RootMember::start(streams).map_err(|error| self.error(error))?))
            }
            _ => {
                let (peers, stream) = self.visit()?;
                let member = ClientMember::start(stream, self.rank, self.n_ranks);
                (peers, Arc::new(member.map_err(|error| self.error(error))?))
            }
        };
        same_version(&peers)?;
        let hosts = peers.into_iter().map(|peer| peer.host).collect();
        Ok(Rendezvous::new(self.rank, hosts, member))
    }

    /// Rank 0: waits for all ranks.
    fn host_it(&self, start: Instant) -> Result<(Vec<Peer>, Vec<TcpStream>)> {
        let listener = self.listen().map_err(|error| {
            self.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
        })?;
        let mut peers: Vec<Option<Peer>> = vec![None; self.n_ranks];
        peers[0] = Some(self.peer.clone());
        let mut streams: Vec<Option<TcpStream>> = (1..self.n_ranks).map(|_| None).collect();
        let mut notes = Vec::new();
        let (sender, greetings) = channel();
        while streams.iter().any(Option::is_none) {
            if start.elapsed() >= self.timeout {
                let missing = (1..self.n_ranks).filter(|&rank| peers[rank].is_none()).collect();
                return Err(self.give_up(missing, &mut streams, notes));
            }
            accept(&listener, &sender).map_err(|error| self.error(error))?;
            self.let_in(&greetings, &mut peers, &mut streams, &mut notes);
            std::thread::sleep(LOOKOUT);
        }
        let peers: Vec<Peer> = peers.into_iter().flatten().collect();
        let mut greeted = Vec::new();
        for mut stream in streams.into_iter().flatten() {
            // A rank that died meanwhile is noticed by the reader of its connection.
            let _ = send_json(&mut stream, Kind::Welcome, &peers);
            greeted.push(stream);
        }
        Ok((peers, greeted))
    }

    /// Looks at everyone who has introduced themselves since the last time.
    fn let_in(
        &self,
        greetings: &Receiver<Greeting>,
        peers: &mut [Option<Peer>],
        streams: &mut [Option<TcpStream>],
        notes: &mut Vec<String>,
    ) {
        while let Ok((from, greeting)) = greetings.try_recv() {
            let (hello, mut stream) = match greeting {
                Ok(greeting) => greeting,
                Err(error) => {
                    notes.push(format!("a connection from {from} was not a rank's: {error}"));
                    continue;
                }
            };
            match self.objection(&hello, streams) {
                None => {
                    peers[hello.rank] = Some(hello.peer);
                    streams[hello.rank - 1] = Some(stream);
                }
                Some(why) => {
                    tracing::warn!("refused a connection from {from}: {why}");
                    let _ = send(&mut stream, Kind::Refused, why.as_bytes());
                    notes.push(format!("{from} was refused: {why}"));
                }
            }
        }
    }

    /// Why this rank is not let in, if so.
    fn objection(&self, hello: &Hello, streams: &[Option<TcpStream>]) -> Option<String> {
        let Hello { protocol, job, rank, n_ranks, .. } = hello;
        if *protocol != PROTOCOL {
            Some(format!(
                "it speaks version {protocol} of the rendezvous, rank 0 version {PROTOCOL}"
            ))
        } else if *job != self.job {
            Some("it belongs to another job (TORCHELASTIC_RUN_ID or DEVCOMM_JOB_ID differs)".into())
        } else if *n_ranks != self.n_ranks {
            Some(format!("it says WORLD_SIZE={n_ranks}, rank 0 says WORLD_SIZE={}", self.n_ranks))
        } else if *rank == 0 || *rank >= self.n_ranks {
            Some(format!(
                "rank {rank} is not one of the ranks 1..{} that are expected",
                self.n_ranks
            ))
        } else if streams[rank - 1].as_ref().is_some_and(is_open) {
            Some(format!("there is a rank {rank} already"))
        } else {
            None
        }
    }

    fn give_up(
        &self,
        missing: Vec<usize>,
        streams: &mut [Option<TcpStream>],
        notes: Vec<String>,
    ) -> Error {
        let waited_ms = u64::try_from(self.timeout.as_millis()).unwrap_or(u64::MAX);
        let news = MissingRanks { missing, waited_ms, notes };
        dismiss(streams, Kind::Missing, &news);
        self.missing(news)
    }

    fn missing(&self, news: MissingRanks) -> Error {
        let MissingRanks { missing, waited_ms, notes } = news;
        let waited = Duration::from_millis(waited_ms);
        Error::RanksMissing { missing, address: self.address(), waited, notes }
    }

    fn listen(&self) -> io::Result<TcpListener> {
        // A job of one machine is not offered to the network. That the host's own name leads to a
        // loopback address, as on Debian, does not make it one.
        let literal = self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
        let listener = if literal || self.host == "localhost" {
            TcpListener::bind((self.host.as_str(), self.port))
        } else {
            TcpListener::bind((Ipv6Addr::UNSPECIFIED, self.port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, self.port)))
        }?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Any other rank: knocks until it is let in, or told why not, or the time is up.
    fn visit(&self) -> Result<(Vec<Peer>, TcpStream)> {
        let start = Instant::now();
        loop {
            let left = self.timeout.saturating_sub(start.elapsed());
            match self.knock(left) {
                Ok(joined) => return Ok(joined),
                Err(Turned::Away(error)) => return Err(error),
                Err(Turned::Retry(_)) if left > RETRY => std::thread::sleep(RETRY),
                Err(Turned::Retry(last)) => {
                    return Err(Error::RanksMissing {
                        missing: vec![0],
                        address: self.address(),
                        waited: self.timeout,
                        notes: vec![last.to_string()],
                    });
                }
            }
        }
    }

    fn knock(&self, left: Duration) -> Result<(Vec<Peer>, TcpStream), Turned> {
        let mut stream = connect(&self.host, self.port, left)?;
        send_json(&mut stream, Kind::Hello, &self.hello())?;
        // Rank 0 waits for the others first, and reports those missing a moment after the deadline.
        stream.set_read_timeout(Some(left + GREETING_PATIENCE))?;
        let (kind, payload) = receive(&mut stream, MAX_PAYLOAD)?;
        match kind {
            Kind::Welcome => {
                let peers: Vec<Peer> = parse(&payload)?;
                if peers.len() != self.n_ranks {
                    let why = format!("it welcomed {} ranks, not {}", peers.len(), self.n_ranks);
                    return Err(Turned::Away(self.error(why)));
                }
                Ok((peers, stream))
            }
            Kind::Refused => {
                let why =
                    format!("rank 0 refused this rank: {}", String::from_utf8_lossy(&payload));
                Err(Turned::Away(self.error(why)))
            }
            Kind::Missing => Err(Turned::Away(self.missing(parse(&payload)?))),
            other => Err(Turned::Away(self.error(format!("rank 0 answered with {other:?}")))),
        }
    }
}

/// Why knocking did not help.
enum Turned {
    Away(Error),
    Retry(io::Error),
}

impl From<io::Error> for Turned {
    fn from(error: io::Error) -> Self {
        Self::Retry(error)
    }
}

fn connect(host: &str, port: u16, left: Duration) -> io::Result<TcpStream> {
    // One silent address must not use up all the time.
    let patience = left.clamp(Duration::from_millis(100), Duration::from_secs(2));
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, patience) {
            // Knocking at a free port of this machine, the system may connect a socket with itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Someone at the door: from where, and what they said.
type Greeting = (SocketAddr, io::Result<(Hello, TcpStream)>);

/// Takes the connections that wait. Each is heard by a thread of its own, so that one that says nothing keeps nobody waiting.
fn accept(listener: &TcpListener, sender: &Sender<Greeting>) -> io::Result<()> {
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            // The caller hung up before it was answered.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        let sender = sender.clone();
        std::thread::Builder::new().name("devcomm-greeting".to_owned()).spawn(move || {
            // Nobody listens any more when all ranks are there.
            let _ = sender.send((from, hear(stream)));
        })?;
    }
}

fn hear(mut stream: TcpStream) -> io::Result<(Hello, TcpStream)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(GREETING_PATIENCE))?;
    stream.set_write_timeout(Some(GREETING_PATIENCE))?;
    let (kind, payload) = receive(&mut stream, MAX_GREETING)?;
    if kind != Kind::Hello {
        return Err(super::wire::bad(format!("it began with {kind:?}")));
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

/// Every rank makes this comparison with the same list, so every rank gets the same error.
fn same_version(peers: &[Peer]) -> Result<()> {
    let Some(first) = peers.first() else { return Ok(()) };
    match peers.iter().position(|peer| peer.nccl != first.nccl) {
        None => Ok(()),
        Some(other) => Err(Error::NcclVersionsDiffer {
            first: (0, first.version()),
            second: (other, peers[other].version()),
        }),
    }
}
