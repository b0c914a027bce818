//! A TCP connection that never blocks. Bytes that arrive are kept until they are a whole frame, and
//! bytes that the socket does not take yet are kept until it does. After [`seal`](Connection::seal)
//! each frame ends with an authentication code, made with the job's token.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::seal::{CODE, Seal};
use super::wire::{HEAD, Kind, bad, header, read_header};
use crate::machine::{check_interrupt, interrupt_interval};
use crate::sys::fork::CloseInChildren;

/// The most bytes that are read at once, so that no connection delays the others.
const CHUNK: usize = 64 << 10;
/// The room for what arrives, enough for most frames.
const USUAL: usize = 1 << 10;
/// The pause after the system could not poll.
const POLL_FAILED: Duration = Duration::from_millis(10);

pub(super) struct Connection {
    _not_in_children: CloseInChildren,
    stream: TcpStream,
    unread: Mutex<Unread>,
    unsent: Mutex<Unsent>,
}

/// The data that has arrived. Frames before byte `start` were returned already.
#[derive(Default)]
struct Unread {
    bytes: Vec<u8>,
    start: usize,
    seal: Option<Seal>,
}

/// The frames that the socket has not taken yet.
#[derive(Default)]
struct Unsent {
    bytes: VecDeque<u8>,
    seal: Option<Seal>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let _not_in_children = CloseInChildren::new(&stream);
        Ok(Self { _not_in_children, stream, unread: Mutex::default(), unsent: Mutex::default() })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Adds authentication codes to the frames that are sent from now on, and checks those of the
    /// frames that are read from now on.
    pub(super) fn seal(&self, sent: Seal, read: Seal) {
        self.unsent.lock().seal = Some(sent);
        self.unread.lock().seal = Some(read);
    }

    /// Returns the address of the other end.
    pub(super) fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Returns whether the peer has not closed the connection.
    pub(super) fn is_open(&self) -> bool {
        match self.stream.peek(&mut [0]) {
            Ok(read) => read > 0,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    /// Returns what to poll: whether something has arrived, and whether what is unsent can be sent.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let unsent = !self.unsent.lock().bytes.is_empty();
        let events = if unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        PollFd::new(&self.stream, events)
    }

    /// Reads what has arrived, at most about [`CHUNK`] bytes of it. Returns whether something had.
    ///
    /// # Errors
    ///
    /// If the connection has ended.
    pub(super) fn read(&self) -> io::Result<bool> {
        let mut unread = self.unread.lock();
        let Unread { bytes, start, .. } = &mut *unread;
        bytes.drain(..std::mem::take(start));
        // Without room the first reads would be of a few bytes each.
        bytes.reserve(USUAL);
        let before = bytes.len();
        // If this ends with an error, `bytes` has what arrived before it. The end of the connection
        // is 0 bytes, and found by the next call if other bytes come before it.
        let arrived = (&self.stream).take(CHUNK as u64).read_to_end(bytes);
        match arrived {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(bytes.len() > before),
        }
    }

    /// Returns the next frame of what was read, if it is complete.
    ///
    /// # Errors
    ///
    /// If the bytes are no frame, its payload is longer than `limit`, or its authentication code is
    /// wrong.
    pub(super) fn next(&self, limit: usize) -> io::Result<Option<(Kind, Vec<u8>)>> {
        let mut unread = self.unread.lock();
        let Unread { bytes, start, seal } = &mut *unread;
        let Some((head, rest)) = bytes[*start..].split_first_chunk() else { return Ok(None) };
        let (kind, length) = read_header(*head, limit)?;
        let code = if seal.is_some() { CODE } else { 0 };
        let Some(rest) = rest.get(..length + code) else { return Ok(None) };
        let (payload, code) = rest.split_at(length);
        if seal.as_mut().is_some_and(|seal| !seal.verify(head, payload, code)) {
            return Err(bad(
                "a frame with a wrong authentication code: it was made or changed by \
                 a process that does not have the job's token",
            ));
        }
        let frame = (kind, payload.to_vec());
        *start += HEAD + rest.len();
        Ok(Some(frame))
    }

    /// Waits for the next frame, until `deadline`. It flushes nothing: what ranks send before they
    /// have joined is short, and was sent at once.
    ///
    /// # Errors
    ///
    /// The errors are those of [`read`](Self::read) and [`next`](Self::next); if the time has
    /// passed; [`ErrorKind::Interrupted`] if this thread's waits are.
    pub(super) fn receive(&self, limit: usize, deadline: Instant) -> io::Result<(Kind, Vec<u8>)> {
        loop {
            if let Some(frame) = self.next(limit)? {
                return Ok(frame);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(ErrorKind::TimedOut, "no answer in time"));
            }
            check_interrupt().map_err(|_| ErrorKind::Interrupted)?;
            poll(&mut [self.poll_fd()], Some(left.min(interrupt_interval())));
            self.read()?;
        }
    }

    /// Sends a frame, whose payload consists of several slices. Returns whether all of it was sent;
    /// otherwise [`flush`](Self::flush) sends the rest.
    ///
    /// # Errors
    ///
    /// If the connection has ended.
    pub(super) fn send(&self, kind: Kind, payload: &[&[u8]]) -> io::Result<bool> {
        let head = header(kind, payload.iter().map(|piece| piece.len()).sum())?;
        let mut unsent = self.unsent.lock();
        let Unsent { bytes, seal } = &mut *unsent;
        bytes.extend(head);
        payload.iter().for_each(|piece| bytes.extend(*piece));
        bytes.extend(seal.iter_mut().flat_map(|seal| seal.code(&head, payload)));
        self.write(bytes)?;
        Ok(bytes.is_empty())
    }

    /// Sends what is unsent, as far as possible. Returns whether that was all.
    ///
    /// # Errors
    ///
    /// If the connection has ended.
    pub(super) fn flush(&self) -> io::Result<bool> {
        let mut unsent = self.unsent.lock();
        self.write(&mut unsent.bytes)?;
        Ok(unsent.bytes.is_empty())
    }

    fn write(&self, unsent: &mut VecDeque<u8>) -> io::Result<()> {
        while !unsent.is_empty() {
            match (&self.stream).write(unsent.as_slices().0) {
                Ok(sent) => drop(unsent.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => {
                    *unsent = VecDeque::new();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    pub(super) fn shutdown(&self, how: Shutdown) {
        // An error means that the connection has ended.
        let _ = self.stream.shutdown(how);
    }
}

/// Wakes a thread that polls.
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake(&self) {
        // Fails only if it is awake already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Lets the thread sleep again.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::IN)
    }
}

/// Waits until one of `fds` is ready, at most for `limit`. Returns which ones are, or all if the
/// system cannot tell: the sockets do not block.
pub(super) fn poll(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> Vec<bool> {
    // A limit that is too long for the system is none.
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match rustix::event::poll(fds, limit.as_ref()) {
        Ok(_) => fds.iter().map(|fd| !fd.revents().is_empty()).collect(),
        Err(Errno::INTR) => vec![false; fds.len()],
        Err(error) => {
            tracing::warn!("connections cannot be polled: {error}");
            std::thread::sleep(POLL_FAILED);
            vec![true; fds.len()]
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::world::rendezvous::wire::MAX_GREETING;

    /// Returns a connection, and its other end.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Connection::new(listener.accept().unwrap().0).unwrap(), peer)
    }

    fn far_deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn frames_arrive_as_they_were_sent_however_they_are_cut() {
        let ((from, mut there), (to, mut here)) = (pair(), pair());
        assert!(from.send(Kind::Contribute, &[b"ab", b"", b"c"]).unwrap());
        assert!(from.send(Kind::Finished, &[]).unwrap());
        let mut bytes = [0; 2 * HEAD + 3];
        there.read_exact(&mut bytes).unwrap();
        for _ in 0..2 {
            for piece in bytes.chunks(4) {
                here.write_all(piece).unwrap();
                assert!(to.next(16).is_ok());
            }
        }
        for _ in 0..2 {
            assert_eq!(to.receive(3, far_deadline()).unwrap(), (Kind::Contribute, b"abc".to_vec()));
            assert_eq!(to.receive(3, far_deadline()).unwrap(), (Kind::Finished, Vec::new()));
        }
        let late = to.receive(3, Instant::now()).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
        drop(here);
        let ended = to.receive(3, far_deadline()).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn bytes_that_are_no_frame_or_too_long_are_an_error() {
        let starts =
            [&b"GET / HTTP/1.1\r\n"[..], &[0xd1, 255, 255, 255, 255], &[0xd1, 1, 16, 0, 0]];
        for bytes in starts {
            let (connection, mut peer) = pair();
            peer.write_all(bytes).unwrap();
            let error = connection.receive(MAX_GREETING, far_deadline()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }

    /// Returns the two ends of a sealed connection, and the frames that they have sent each other.
    fn sealed() -> ([(Connection, TcpStream); 2], [Vec<u8>; 2]) {
        let (root, rank) = (Seal::new(&[1; 32]), Seal::new(&[2; 32]));
        let mut ends = [pair(), pair()];
        ends[0].0.seal(root.clone(), rank.clone());
        ends[1].0.seal(rank, root);
        let frames = ends.each_mut().map(|(connection, wire)| {
            connection.send(Kind::Contribute, &[b"ab", b"c"]).unwrap();
            let mut frame = vec![0; HEAD + 3 + CODE];
            wire.read_exact(&mut frame).unwrap();
            frame
        });
        (ends, frames)
    }

    #[test]
    fn a_frame_that_is_changed_repeated_left_out_or_turned_around_is_refused() {
        type Relay = fn(&[u8], &[u8]) -> Vec<u8>;
        let honest: Relay = |frame, _| frame.to_vec();
        let lies: [Relay; 5] = [
            |frame, _| [&frame[..HEAD], b"abd", &frame[HEAD + 3..]].concat(),
            |frame, _| [&[Kind::Failed as u8], &frame[1..]].concat(),
            |frame, _| {
                [&[frame[0], 2, 0, 0, 0], &frame[HEAD..HEAD + 2], &frame[HEAD + 3..]].concat()
            },
            |_, own| own.to_vec(),
            |frame, _| [frame, frame].concat(),
        ];
        for (index, lie) in [honest].iter().chain(&lies).enumerate() {
            let ([_, (to, mut wire)], [frame, own]) = sealed();
            wire.write_all(&lie(&frame, &own)).unwrap();
            let mut read = to.receive(16, far_deadline());
            if index == lies.len() {
                // The first frame is as it was sent; the second one repeats it.
                read = read.and_then(|_| to.receive(16, far_deadline()));
            }
            assert_eq!(read.is_ok(), index == 0, "{index}: {read:?}");
            assert!(
                read.is_ok_and(|frame| frame == (Kind::Contribute, b"abc".to_vec())) || index > 0
            );
        }
        // The first frame is left out.
        let ([(from, mut there), (to, mut here)], _) = sealed();
        from.send(Kind::Finished, &[]).unwrap();
        let mut second = [0; HEAD + CODE];
        there.read_exact(&mut second).unwrap();
        here.write_all(&second).unwrap();
        let error = to.receive(16, far_deadline()).unwrap_err();
        assert!(error.to_string().contains("a wrong authentication code"), "{error}");
    }

    #[test]
    fn what_a_peer_does_not_take_yet_is_sent_later() {
        let (connection, peer) = pair();
        let payload = vec![7; 32 << 20];
        assert!(!connection.send(Kind::Gathered, &[&payload]).unwrap());
        let peer = Connection::new(peer).unwrap();
        let frame = loop {
            connection.flush().unwrap();
            if let Some(frame) = peer.next(payload.len()).unwrap() {
                break frame;
            }
            poll(&mut [peer.poll_fd(), connection.poll_fd()], Some(Duration::from_secs(60)));
            peer.read().unwrap();
        };
        assert!(frame == (Kind::Gathered, payload));
        assert!(connection.flush().unwrap());
    }
}
