//! Connects ranks of different processes: the higher rank connects to the lower one's endpoint and
//! sends the memory that they will share.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::link::Link;
use super::segment::{Segment, SegmentSizes};
use crate::connection::{Connection, Key, LocalRank};
use crate::driver::Device;
use crate::endpoint::{Endpoint, Handle};
use crate::error::{Error, Result};
use crate::log;

/// Longest interval between checks of the deadline and of the missing rank.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of checks whether the missing rank still listens: each fills an entry of its backlog.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// Interval of connection attempts to a rank whose backlog is full.
const RETRY_EVERY: Duration = Duration::from_millis(10);
/// The size of a [`Handshake`]: five words.
const HANDSHAKE_BYTES: usize = 40;

/// The first message of a connecting rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Handshake {
    key: Key,
    rank: usize,
    sizes: SegmentSizes,
}

impl Handshake {
    fn to_bytes(self) -> [u8; HANDSHAKE_BYTES] {
        let SegmentSizes { slots, slot_bytes } = self.sizes;
        let (first, second) = self.key;
        let words = [first, second, self.rank as u64, slots as u64, slot_bytes as u64];
        let mut bytes = [0; HANDSHAKE_BYTES];
        for (to, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; HANDSHAKE_BYTES]) -> Self {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * index..][..8]);
            u64::from_le_bytes(word)
        };
        let sizes = SegmentSizes { slots: word(3) as usize, slot_bytes: word(4) as usize };
        Self { key: (word(0), word(1)), rank: word(2) as usize, sizes }
    }
}

/// Connects to every rank of `handles` in another process; `links` gets the established links, also
/// on error.
pub(crate) fn connect_links(
    endpoint: &Endpoint,
    handles: &[Handle],
    rank: usize,
    me: &Arc<LocalRank>,
    connection: &Connection,
    deadline: Instant,
    links: &mut [Option<Link>],
) -> Result<()> {
    let mine = &endpoint.handle;
    let (key, sizes) = (handles[0].key(), SegmentSizes::of(&endpoint.setup.config));
    let device = &me.staging.stream.device;
    for (other, handle) in handles.iter().enumerate().take(rank) {
        if !handle.same_process(mine) {
            let handshake = Handshake { key, rank, sizes };
            let (segment, socket) =
                connect_to_rank(handshake, other, handle, device, connection, deadline)?;
            let pid = handle.pid();
            links[other] = Some(Link::new(Arc::clone(me), rank, other, pid, segment, socket)?);
        }
    }
    let is_missing = |links: &[Option<Link>], other: usize| {
        other > rank && !handles[other].same_process(mine) && links[other].is_none()
    };
    while let Some(missing) = (0..handles.len()).find(|other| is_missing(links, *other)) {
        wait_for_peer(&endpoint.listener, connection, links, deadline, missing, &handles[missing])?;
        let accepted = endpoint.listener.accept();
        let (socket, _) = accepted
            .map_err(|error| Error::system("accepting a connection of another rank", error))?;
        // Any process can connect to an abstract socket: one that is not a rank is refused.
        let Some((handshake, memory)) = receive_handshake(&socket, deadline) else {
            log::debug(format_args!("rank {rank}: refused a process that is not a rank"));
            continue;
        };
        if handshake.key != key
            || handshake.rank >= handles.len()
            || !is_missing(links, handshake.rank)
        {
            continue;
        }
        let segment = Segment::map(&memory, handshake.sizes, device)?;
        let pid = handles[handshake.rank].pid();
        let link = Link::new(Arc::clone(me), rank, handshake.rank, pid, segment, socket)?;
        links[handshake.rank] = Some(link);
    }
    Ok(())
}

/// Connects to a lower rank, and sends the shared memory.
fn connect_to_rank(
    handshake: Handshake,
    other: usize,
    handle: &Handle,
    device: &Device,
    connection: &Connection,
    deadline: Instant,
) -> Result<(Segment, UnixStream)> {
    let failed = |error: &dyn std::fmt::Display| {
        Error::Remote(format!(
            "rank {} cannot connect to rank {other}, of process {}: {error}; it may have ended, or \
             be in another network namespace of this host, which this plugin does not support",
            handshake.rank,
            handle.pid()
        ))
    };
    let socket = loop {
        match handle.try_connect() {
            Ok(socket) => break socket,
            Err(Errno::AGAIN | Errno::INTR) => wait_to_retry(other, handle, connection, deadline)?,
            Err(error) => return Err(failed(&error)),
        }
    };
    // The name of a rank that has ended is free, and everybody on this host can read it.
    if !is_of_this_user(&socket) {
        return Err(failed(&"another user listens in its place"));
    }
    socket.set_nonblocking(false).map_err(|error| failed(&error))?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    socket.set_write_timeout(Some(left)).map_err(|error| failed(&error))?;
    let memory = handshake.sizes.create()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [std::os::fd::AsFd::as_fd(&memory)];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let bytes = handshake.to_bytes();
    let sent = sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    match sent {
        Ok(HANDSHAKE_BYTES) => {}
        Ok(_) => return Err(failed(&"the connection was closed early")),
        Err(error) => return Err(failed(&error)),
    }
    Ok((Segment::map(&memory, handshake.sizes, device)?, socket))
}

/// Waits before the next attempt, since the backlog of rank `other` is full.
fn wait_to_retry(
    other: usize,
    handle: &Handle,
    connection: &Connection,
    deadline: Instant,
) -> Result<()> {
    if let Some(fault) = connection.fault() {
        return Err(fault.clone());
    }
    if Instant::now() > deadline {
        return Err(Error::Timeout(format!(
            "rank {other}, of process {}, did not accept a connection in time \
            (DEVCOMM_GIN_TIMEOUT)",
            handle.pid()
        )));
    }
    std::thread::sleep(RETRY_EVERY);
    Ok(())
}

/// Returns whether the process at the other end is one of this user.
fn is_of_this_user(socket: &UnixStream) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Receives a handshake, if the peer is one of this user's ranks.
fn receive_handshake(socket: &UnixStream, deadline: Instant) -> Option<(Handshake, OwnedFd)> {
    if !is_of_this_user(socket) {
        return None;
    }
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    // A rank sends its handshake as soon as it is connected.
    socket.set_read_timeout(Some(left.min(Duration::from_secs(2)))).ok()?;
    let mut bytes = [0; HANDSHAKE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).ok()?;
    let memory = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })?;
    (received.bytes == HANDSHAKE_BYTES).then(|| (Handshake::from_bytes(&bytes), memory))
}

/// Waits for an incoming connection. `missing`, with `handle`, is a rank that has not connected.
fn wait_for_peer(
    listener: &UnixListener,
    connection: &Connection,
    links: &[Option<Link>],
    deadline: Instant,
    missing: usize,
    handle: &Handle,
) -> Result<()> {
    let mut probe_at = Instant::now();
    loop {
        if let Some(fault) = connection.fault() {
            return Err(fault.clone());
        }
        links.iter().flatten().try_for_each(Link::check)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::Timeout(format!(
                "rank {missing}, of process {}, did not connect in time (DEVCOMM_GIN_TIMEOUT)",
                handle.pid()
            )));
        }
        let pause = Timespec { tv_sec: 0, tv_nsec: left.min(PAUSE).subsec_nanos().into() };
        let has_incoming = |pause: &Timespec| {
            let mut sources = [PollFd::new(listener, PollFlags::IN)];
            match poll(&mut sources, Some(pause)) {
                Ok(ready) => Ok(ready > 0),
                Err(Errno::INTR) => Ok(false),
                Err(error) => Err(Error::system("waiting for a connection of another rank", error)),
            }
        };
        if has_incoming(&pause)? {
            return Ok(());
        }
        if Instant::now() < probe_at {
            continue;
        }
        probe_at = Instant::now() + PROBE_EVERY;
        // The rank may have connected after the poll above, and then ended: so poll again.
        if handle.is_gone() && !has_incoming(&Timespec { tv_sec: 0, tv_nsec: 0 })? {
            return Err(Error::Remote(format!(
                "rank {missing}, of process {}, ended or failed before it connected",
                handle.pid()
            )));
        }
    }
}
