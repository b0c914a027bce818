//! A link between two ranks in different processes.

use std::io::{ErrorKind, Read};
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{SendFlags, send};

use super::incoming::Incoming;
use super::outgoing::{Job, Outgoing};
use super::segment::Segment;
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::log;

/// Tag of the last message: this rank leaves.
const LEAVES: u8 = b'L';
/// Tag of the last message: this rank has failed, followed by the error's text.
const FAILED: u8 = b'F';
/// Maximum bytes of the error's text.
const TEXT_BYTES: usize = 1000;

/// This rank's side of a link.
pub(crate) struct Link {
    /// The other rank.
    rank: usize,
    /// Its process.
    pid: u64,
    me: Arc<LocalRank>,
    segment: ManuallyDrop<Segment>,
    /// Index of the outgoing direction.
    out: usize,
    socket: UnixStream,
    state: Mutex<State>,
}

struct State {
    outgoing: Outgoing,
    incoming: Incoming,
    /// Whether the last message was sent.
    told: bool,
    /// Whether the other rank has left without an error.
    left: bool,
}

impl Link {
    /// The link of `me`, rank `my_rank`, to `rank`, in process `pid`.
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
            told: false,
            left: false,
        };
        let segment = ManuallyDrop::new(segment);
        let out = usize::from(my_rank > rank);
        Ok(Self { rank, pid, me, segment, out, socket, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a job; returns its ticket.
    pub(crate) fn submit(&self, job: Job) -> Result<u64> {
        let mut state = self.state();
        if state.left {
            return Err(Error::Remote(format!("rank {} has left the connection", self.rank)));
        }
        let ticket = state.outgoing.submit(job);
        state.outgoing.progress(self.segment.ring(self.out), &self.me)?;
        Ok(ticket)
    }

    pub(crate) fn done(&self, ticket: u64) -> bool {
        self.state().outgoing.done(ticket)
    }

    /// The ticket of the last job.
    pub(crate) fn accepted(&self) -> u64 {
        self.state().outgoing.accepted()
    }

    /// Drops pending jobs.
    pub(crate) fn cancel(&self) {
        self.state().outgoing.cancel();
    }

    /// Makes progress in both directions.
    pub(crate) fn progress(&self) -> Result<()> {
        let mut state = self.state();
        state.incoming.progress(self.segment.ring(1 - self.out), &self.me)?;
        state.outgoing.progress(self.segment.ring(self.out), &self.me)
    }

    /// Whether all of the other rank's requests so far were carried out.
    pub(crate) fn is_settled(&self) -> bool {
        self.state().incoming.is_settled(self.segment.ring(1 - self.out))
    }

    /// Checks the other rank for failure.
    pub(crate) fn check(&self) -> Result<()> {
        let mut state = self.state();
        if !state.left {
            let mut message = [0; TEXT_BYTES];
            match (&self.socket).read(&mut message) {
                Ok(length) => match message[..length].split_first() {
                    Some((&LEAVES, _)) => {
                        log::debug(format_args!("rank {} has left", self.rank));
                        state.left = true;
                    }
                    Some((_, text)) => {
                        let text = String::from_utf8_lossy(text);
                        return Err(Error::Remote(format!("rank {} failed: {text}", self.rank)));
                    }
                    None => return Err(self.ended()),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(self.ended()),
            }
        }
        // Acknowledgements before it left are in the ring.
        state.outgoing.progress(self.segment.ring(self.out), &self.me)?;
        if state.left && state.outgoing.waits_for_owner(self.segment.ring(self.out)) {
            return Err(Error::Remote(format!(
                "rank {} has left the connection before it carried out all that was asked of it",
                self.rank
            )));
        }
        Ok(())
    }

    fn ended(&self) -> Error {
        Error::Remote(format!(
            "rank {}, of process {}, closed its connection unexpectedly: most likely its process \
             has ended",
            self.rank, self.pid
        ))
    }

    fn tell(&self, message: &[u8]) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.told, true) {
            // The other rank may have ended. The only message fits into the socket's buffer.
            // `MSG_NOSIGNAL`: a program that is not Rust's may die of SIGPIPE.
            let _ = send(&self.socket, message, SendFlags::NOSIGNAL);
        }
    }

    /// Tells the other rank that this one leaves.
    pub(crate) fn leave(&self) {
        self.tell(&[LEAVES]);
    }

    /// Tells the other rank that this one has failed.
    pub(crate) fn tell_failure(&self, error: &Error) {
        let mut message = vec![FAILED];
        message.extend(error.to_string().bytes().take(TEXT_BYTES - 1));
        self.tell(&message);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Copies from and to the slots may be in flight or, if this rank failed, never end.
        let quiet = self.me.lane.synchronize() && self.me.staging.channel.synchronize();
        if quiet {
            // SAFETY: dropped here only, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.segment) };
        }
    }
}
