//! What the GPUs know of the host's threads.

use std::cell::Cell;

/// The number of queries in vain after which the next one waits until the GPUs can do no more: late
/// threads run then, and time may advance.
const PAUSE: u64 = 1 << 8;
/// The number of queries in vain after which the next one waits until something happens: a multiple
/// of [`PAUSE`].
const MAX_QUERIES: u64 = 1 << 16;

/// The state of the host's threads.
///
/// A host thread may wait by a loop of queries, each of which returns at once. Such a thread is
/// not seen to wait: so after some queries in vain, by all threads together, a query blocks.
pub(crate) struct HostState {
    /// Whether all host threads wait for the GPUs.
    pub(crate) waits: Cell<bool>,
    /// Whether a host thread runs without the machine's baton, and may write what kernels poll.
    pub(crate) is_away: Cell<bool>,
    /// The number of queries since something last happened that have found work that is not done.
    queries: Cell<u64>,
}

impl HostState {
    pub(super) fn new() -> Self {
        Self { waits: Cell::new(true), is_away: Cell::new(false), queries: Cell::new(0) }
    }

    /// Counts a query that returns although the work is not done.
    pub(crate) fn asked_in_vain(&self) {
        self.queries.set(self.queries.get() + 1);
    }

    /// Records that something has happened other than polls and queries.
    pub(crate) fn progressed(&self) {
        self.queries.set(0);
    }

    /// Returns whether a query of work that is not done blocks now.
    pub(crate) fn is_paused(&self) -> bool {
        (self.queries.get() + 1).is_multiple_of(PAUSE)
    }

    /// Returns whether queries are [paused](Self::is_paused), but go on if nothing happens: their
    /// thread may be about to do what the GPUs wait for.
    pub(crate) fn may_resume(&self) -> bool {
        self.is_paused() && (self.queries.get() + 1 < MAX_QUERIES || self.is_away.get())
    }

    /// Lets paused queries go on, if they may; returns whether they may.
    pub(crate) fn resume(&self) -> bool {
        let may_resume = self.may_resume();
        if may_resume {
            self.asked_in_vain();
        }
        may_resume
    }
}
