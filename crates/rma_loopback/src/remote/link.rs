//! A link between two ranks in different processes.

use std::io::{ErrorKind, Read};
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{SendFlags, send};

use super::incoming::Incoming;
use super::outgoing::{Outgoing, RemoteOp};
use super::segment::Segment;
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::log;

/// Tag of the last message: this rank has closed.
const CLOSED: u8 = b'L';
/// Tag of the last message: this rank has failed, followed by the error's text.
const FAILED: u8 = b'F';
/// Maximum bytes of the error's text.
const TEXT_BYTES: usize = 1000;

/// This rank's side of a link.
pub(crate) struct Link {
    /// The other rank.
    rank: usize,
    /// The other rank's process.
    pid: u64,
    me: Arc<LocalRank>,
    segment: ManuallyDrop<Segment>,
    /// Index of the outgoing direction: 0 at the lower of the two ranks, 1 at the higher.
    out: usize,
    socket: UnixStream,
    state: Mutex<State>,
}

struct State {
    outgoing: Outgoing,
    incoming: Incoming,
    /// Whether the last message was sent.
    sent_last: bool,
    /// Whether the other rank has closed without an error.
    peer_closed: bool,
}

impl Link {
    /// Returns the link of `me`, rank `my_rank`, to `rank`, in process `pid`.
    pub(crate) fn new(
        me: Arc<LocalRank>,
        my_rank: usize,
        rank: usize,
        pid: u64,
        segment: Segment,
        socket: UnixStream,
    ) -> Result<Self> {
        socket
            .set_nonblocking(true)
            .map_err(|error| Error::system("preparing a socket to another process", error))?;
        let state = State {
            outgoing: Outgoing::new(),
            incoming: Incoming::default(),
            sent_last: false,
            peer_closed: false,
        };
        let segment = ManuallyDrop::new(segment);
        let out = usize::from(my_rank > rank);
        Ok(Self { rank, pid, me, segment, out, socket, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts an operation; returns its sequence number.
    pub(crate) fn submit(&self, op: RemoteOp) -> Result<u64> {
        let mut state = self.state();
        if state.peer_closed {
            return Err(Error::Remote(format!("rank {} has closed its connection", self.rank)));
        }
        let sequence = state.outgoing.submit(op);
        state.outgoing.progress(self.segment.ring(self.out), &self.me)?;
        Ok(sequence)
    }

    pub(crate) fn done(&self, sequence: u64) -> bool {
        self.state().outgoing.done(sequence)
    }

    /// Returns the sequence number of the last operation.
    pub(crate) fn accepted(&self) -> u64 {
        self.state().outgoing.accepted()
    }

    /// Drops pending operations.
    pub(crate) fn cancel(&self) {
        self.state().outgoing.cancel();
    }

    /// Makes progress in both directions.
    pub(crate) fn progress(&self) -> Result<()> {
        let mut state = self.state();
        state.incoming.progress(self.segment.ring(1 - self.out), &self.me)?;
        state.outgoing.progress(self.segment.ring(self.out), &self.me)
    }

    /// Returns whether all requests that the other rank has published are executed.
    pub(crate) fn is_settled(&self) -> bool {
        self.state().incoming.is_settled(self.segment.ring(1 - self.out))
    }

    /// Checks the other rank for failure.
    pub(crate) fn check(&self) -> Result<()> {
        let mut state = self.state();
        if !state.peer_closed {
            let mut message = [0; TEXT_BYTES];
            // One read has the whole message, which one call has sent.
            match (&self.socket).read(&mut message) {
                Ok(length) => match message[..length].split_first() {
                    Some((&CLOSED, _)) => {
                        log::debug(format_args!("rank {} has closed", self.rank));
                        state.peer_closed = true;
                    }
                    Some((_, text)) => {
                        let text = String::from_utf8_lossy(text);
                        return Err(Error::Remote(format!("rank {} failed: {text}", self.rank)));
                    }
                    None => return Err(self.disconnected()),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(self.disconnected()),
            }
        }
        // The ring has all acknowledgements that the other rank wrote before it closed.
        state.outgoing.progress(self.segment.ring(self.out), &self.me)?;
        if state.peer_closed && state.outgoing.waits_for_owner(self.segment.ring(self.out)) {
            return Err(Error::Remote(format!(
                "rank {} has closed its connection before it executed all requests of this rank",
                self.rank
            )));
        }
        Ok(())
    }

    fn disconnected(&self) -> Error {
        Error::Remote(format!(
            "rank {}, of process {}, closed its connection unexpectedly: most likely its process \
             has ended",
            self.rank, self.pid
        ))
    }

    fn send_last(&self, message: &[u8]) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.sent_last, true) {
            // Fails only if the other rank has ended: one message fits into the socket's buffer.
            // Without `MSG_NOSIGNAL`, SIGPIPE would kill a program that is not in Rust.
            let _ = send(&self.socket, message, SendFlags::NOSIGNAL);
        }
    }

    /// Tells the other rank that this one has closed.
    pub(crate) fn send_closed(&self) {
        self.send_last(&[CLOSED]);
    }

    /// Tells the other rank that this one has failed.
    pub(crate) fn send_failure(&self, error: &Error) {
        let mut message = vec![FAILED];
        message.extend(error.to_string().bytes().take(TEXT_BYTES - 1));
        self.send_last(&message);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // If the copies from and to the slots may not have ended, the segment stays mapped.
        if self.me.inbound.ends() && self.me.staging.stream.ends() {
            // SAFETY: the segment is dropped here only, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.segment) };
        }
    }
}
