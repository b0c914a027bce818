//! Rank 0's side of the meeting: it listens, looks at who comes, and waits until all are there or
//! the time is up.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::join::Meeting;
use super::wire::{
    Hello, Kind, MAX_GREETING, MissingRanks, PROTOCOL, Peer, bad, parse, receive, send, send_json,
};
use crate::error::{Error, Result};
use crate::sys::process::inherited_listener;

/// A connection that says nothing for this long is not a rank's.
const GREETING_PATIENCE: Duration = Duration::from_secs(5);
/// A port that is taken for this long stays taken.
const BUSY_PATIENCE: Duration = Duration::from_secs(3);
/// How often those who are there hear that others are awaited.
const PULSE: Duration = Duration::from_secs(1);
/// How often rank 0 looks out for new connections.
const LOOKOUT: Duration = Duration::from_millis(2);
/// More than this about strangers helps nobody.
const MOST_NOTES: usize = 16;

/// Waits for all other ranks. Returns who everyone is, and the connections of ranks 1, 2, ...,
/// welcomed.
pub(super) fn wait_for_all(meeting: &Meeting) -> Result<(Vec<Peer>, Vec<TcpStream>)> {
    let start = Instant::now();
    let listener = listen(meeting).map_err(|error| {
        meeting.error(format!("cannot listen there: {error}; DEVCOMM_PORT names another port"))
    })?;
    let guests = (1..meeting.n_ranks).map(|_| None).collect();
    let mut acceptor = Acceptor { meeting, guests, notes: Vec::new() };
    let (sender, greetings) = channel();
    let mut pulse = start;
    loop {
        accept(&listener, &sender).map_err(|error| meeting.error(error))?;
        acceptor.let_in(&greetings);
        if acceptor.missing().is_empty() {
            // One may have gone while the last ones came.
            acceptor.look_after_guests();
            if acceptor.missing().is_empty() {
                return Ok(acceptor.welcome());
            }
        }
        if start.elapsed() >= meeting.timeout {
            return Err(acceptor.give_up());
        }
        if pulse.elapsed() >= PULSE {
            pulse = Instant::now();
            acceptor.look_after_guests();
        }
        std::thread::sleep(LOOKOUT);
    }
}

struct Guest {
    peer: Peer,
    stream: TcpStream,
}

struct Acceptor<'a> {
    meeting: &'a Meeting,
    /// Rank `i` is at `i - 1`.
    guests: Vec<Option<Guest>>,
    /// What happened here besides.
    notes: Vec<String>,
}

impl Acceptor<'_> {
    fn missing(&self) -> Vec<usize> {
        let ranks = (1..).zip(&self.guests);
        ranks.filter(|(_, guest)| guest.is_none()).map(|(rank, _)| rank).collect()
    }

    fn note(&mut self, note: String) {
        if self.notes.len() < MOST_NOTES {
            self.notes.push(note);
        }
    }

    /// Looks at everyone who has introduced themselves since the last time.
    fn let_in(&mut self, greetings: &Receiver<Greeting>) {
        while let Ok((from, greeting)) = greetings.try_recv() {
            let (hello, mut stream) = match greeting {
                Ok(greeting) => greeting,
                Err(error) => {
                    self.note(format!("a connection from {from} was not a rank's: {error}"));
                    continue;
                }
            };
            if let Some(why) = self.objection(&hello) {
                tracing::warn!("refused a connection from {from}: {why}");
                let _ = send(&mut stream, Kind::Refused, why.as_bytes());
                self.note(format!("{from} was refused: {why}"));
            } else if send(&mut stream, Kind::Waiting, &[]).is_ok() {
                self.guests[hello.rank - 1] = Some(Guest { peer: hello.peer, stream });
            }
        }
    }

    /// Why this rank is not let in, if so.
    fn objection(&self, hello: &Hello) -> Option<String> {
        let Meeting { job: own_job, n_ranks: own_n, .. } = self.meeting;
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
        } else if self.guests[rank - 1].as_ref().is_some_and(|guest| is_open(&guest.stream)) {
            Some(format!("there is a rank {rank} already"))
        } else {
            None
        }
    }

    /// Tells those who are there that others are awaited, and notices who has gone again. They may
    /// come back.
    fn look_after_guests(&mut self) {
        for index in 0..self.guests.len() {
            let Some(guest) = &mut self.guests[index] else { continue };
            if !is_open(&guest.stream) || send(&mut guest.stream, Kind::Waiting, &[]).is_err() {
                self.guests[index] = None;
                self.note(format!("rank {} came and went away again", index + 1));
            }
        }
    }

    fn welcome(self) -> (Vec<Peer>, Vec<TcpStream>) {
        let (others, mut streams): (Vec<Peer>, Vec<TcpStream>) =
            self.guests.into_iter().flatten().map(|guest| (guest.peer, guest.stream)).unzip();
        let peers: Vec<Peer> = std::iter::once(self.meeting.peer.clone()).chain(others).collect();
        for stream in &mut streams {
            // A rank that died meanwhile is noticed by the reader of its connection.
            let _ = send_json(stream, Kind::Welcome, &peers);
        }
        (peers, streams)
    }

    /// Tells everyone who is there who is not.
    fn give_up(mut self) -> Error {
        self.look_after_guests();
        let waited_ms = u64::try_from(self.meeting.timeout.as_millis()).unwrap_or(u64::MAX);
        let news = MissingRanks { missing: self.missing(), waited_ms, notes: self.notes };
        for guest in self.guests.iter_mut().flatten() {
            // Who does not take it will notice the closed connection.
            let _ = send_json(&mut guest.stream, Kind::Missing, &news);
        }
        self.meeting.missing(news)
    }
}

fn listen(meeting: &Meeting) -> io::Result<TcpListener> {
    let inherited = meeting.listener.map(|descriptor| inherited_listener(descriptor, meeting.port));
    let listener = match inherited {
        Some(Ok(listener)) => listener,
        // Whatever stood between may have closed it, or this is a child of the process it was meant
        // for.
        Some(Err(error)) => {
            tracing::debug!("no socket was handed down: {error}");
            bind(&meeting.host, meeting.port)?
        }
        None => bind(&meeting.host, meeting.port)?,
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Listens at the port, which may be just about to get free: a launcher may have tried it, or a job
/// may be ending there.
fn bind(host: &str, port: u16) -> io::Result<TcpListener> {
    let start = Instant::now();
    loop {
        match try_bind(host, port) {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < BUSY_PATIENCE =>
            {
                std::thread::sleep(LOOKOUT);
            }
            done => return done,
        }
    }
}

fn try_bind(host: &str, port: u16) -> io::Result<TcpListener> {
    // A job of one machine is not offered to the network. That the host's own name leads to a
    // loopback address, as on Debian, does not make it one.
    let literal = host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if literal || host == "localhost" {
        return TcpListener::bind((host, port));
    }
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
}

/// Someone at the door: from where, and what they said.
type Greeting = (SocketAddr, io::Result<(Hello, TcpStream)>);

/// Takes the connections that wait. Each is heard by a thread of its own, so that one that says
/// nothing keeps nobody waiting.
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
