//! One pair of ranks in two processes.

use std::io::{ErrorKind, Read};
use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{SendFlags, send};

use super::incoming::Incoming;
use super::outgoing::{Job, Outgoing};
use super::segment::Segment;
use crate::error::{Error, Result};
use crate::group::Member;
use crate::log;

/// First byte of the last message: this rank leaves.
const LEAVES: u8 = b'L';
/// First byte of the last message: this rank has failed, and the rest says how.
const FAILED: u8 = b'F';
/// Bytes of an error's text that are sent.
const TEXT_BYTES: usize = 1000;

/// This rank's side of a pair.
pub(crate) struct Link {
    /// The other rank.
    rank: usize,
    /// Its process.
    pid: u64,
    me: Arc<Member>,
    segment: ManuallyDrop<Segment>,
    /// The direction from this rank to the other.
    out: usize,
    socket: UnixStream,
    state: Mutex<State>,
}

struct State {
    outgoing: Outgoing,
    incoming: Incoming,
    /// The last message was sent.
    told: bool,
    /// The other has left, in peace.
    left: bool,
}

impl Link {
    /// The link of `me`, number `my_rank`, to `rank`, which lives in process `pid`.
    pub(crate) fn new(
        me: Arc<Member>,
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

    /// Takes a job, and returns its ticket.
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

    /// Drops the jobs that wait.
    pub(crate) fn cancel(&self) {
        self.state().outgoing.cancel();
    }

    /// Moves both directions on.
    pub(crate) fn progress(&self) -> Result<()> {
        let mut state = self.state();
        state.incoming.progress(self.segment.ring(1 - self.out), &self.me)?;
        state.outgoing.progress(self.segment.ring(self.out), &self.me)
    }

    /// Whether all that the other has asked for so far is carried out.
    pub(crate) fn is_settled(&self) -> bool {
        self.state().incoming.is_settled(self.segment.ring(1 - self.out))
    }

    /// Looks whether the other is well.
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
        // What it acknowledged before it left is in the ring.
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
            "rank {}, of process {}, closed its connection without a word: most likely its process \
             has ended",
            self.rank, self.pid
        ))
    }

    fn tell(&self, message: &[u8]) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.told, true) {
            // The other may be gone. It fits into the socket's buffer, being the only message.
            // A program that is not Rust's may die of a broken pipe.
            let _ = send(&self.socket, message, SendFlags::NOSIGNAL);
        }
    }

    /// Tells the other that this rank leaves.
    pub(crate) fn leave(&self) {
        self.tell(&[LEAVES]);
    }

    /// Tells the other that this rank has failed.
    pub(crate) fn tell_failure(&self, error: &Error) {
        let mut message = vec![FAILED];
        message.extend(error.to_string().bytes().take(TEXT_BYTES - 1));
        self.tell(&message);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Copies from and to the slots may be on the way, or, where this rank failed, never come to
        // an end.
        let quiet = self.me.lane.settle() && self.me.staging.channel.settle();
        if quiet {
            // SAFETY: dropped here only, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.segment) };
        }
    }
}
