//! Every other rank's side of the meeting: it knocks at rank 0's door until it is let in, told why
//! not, or the time is up.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::join::Meeting;
use super::wire::{Kind, MAX_PAYLOAD, Peer, parse, receive, send_json};
use crate::error::{Error, Result, WorldError};

/// How often a rank knocks.
const RETRY: Duration = Duration::from_millis(50);
/// The first few things that went wrong tell enough.
const MOST_NOTES: usize = 4;
/// Having got through to rank 0 in the last moment, a rank hears it out.
const ANSWER: Duration = Duration::from_secs(1);
/// Rank 0 speaks every second while it waits. Silent for this long it is gone, or its host is.
const SILENCE: Duration = Duration::from_secs(15);

/// Meets rank 0 and, through it, all others. Returns who they are and the connection to rank 0.
pub(super) fn join(meeting: &Meeting) -> Result<(Vec<Peer>, TcpStream)> {
    let start = Instant::now();
    let mut notes: Vec<String> = Vec::new();
    loop {
        let left = meeting.timeout.saturating_sub(start.elapsed());
        let last = match knock(meeting, left) {
            Ok(joined) => return Ok(joined),
            Err(JoinError::Away(error)) => return Err(error),
            Err(JoinError::Retry(error)) => error.to_string(),
        };
        if !notes.contains(&last) && notes.len() < MOST_NOTES {
            notes.push(last);
        }
        if start.elapsed() + RETRY >= meeting.timeout {
            notes.push("or rank 0 waited, gave up and left before this rank came".to_owned());
            return Err(WorldError::RanksMissing {
                missing: vec![0],
                address: meeting.address(),
                waited: start.elapsed(),
                notes,
            }
            .into());
        }
        std::thread::sleep(RETRY);
    }
}

fn knock(meeting: &Meeting, left: Duration) -> Result<(Vec<Peer>, TcpStream), JoinError> {
    let mut stream = connect(&meeting.host, meeting.port, left)?;
    send_json(&mut stream, Kind::Hello, &meeting.hello())?;
    // The connection may be made before rank 0 has started: its socket can be there before it.
    stream.set_read_timeout(Some(left.max(ANSWER)))?;
    loop {
        let (kind, payload) = receive(&mut stream, MAX_PAYLOAD)?;
        let away = |why: String| Err(JoinError::Away(meeting.error(why)));
        return match kind {
            Kind::Waiting => {
                // From here on it is rank 0's time that counts, and its verdict.
                stream.set_read_timeout(Some(SILENCE))?;
                continue;
            }
            Kind::Welcome => {
                let peers: Vec<Peer> = parse(&payload)?;
                if peers.len() != meeting.n_ranks {
                    let (welcomed, n_ranks) = (peers.len(), meeting.n_ranks);
                    return away(format!("it welcomed {welcomed} ranks, not {n_ranks}"));
                }
                Ok((peers, stream))
            }
            Kind::Missing => Err(JoinError::Away(meeting.missing(parse(&payload)?))),
            Kind::Refused => {
                away(format!("rank 0 refused this rank: {}", String::from_utf8_lossy(&payload)))
            }
            other => away(format!("rank 0 answered with {other:?}")),
        };
    }
}

/// Why knocking did not help.
enum JoinError {
    Away(Error),
    Retry(io::Error),
}

impl From<io::Error> for JoinError {
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
