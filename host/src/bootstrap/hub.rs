//! The meeting point in memory: where exchanges are put together and lost ranks are recorded.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::Member;
use crate::Result;
use crate::context::Health;

/// What every rank gave, in order of ranks.
pub(crate) type Gathered = Arc<Vec<Vec<u8>>>;

pub(crate) struct Hub {
    state: Mutex<State>,
    changed: Condvar,
    health: Arc<Health>,
}

struct State {
    /// Number of exchanges completed.
    round: u64,
    /// What the ranks have given in the current exchange.
    parts: Vec<Option<Vec<u8>>>,
    /// The last exchange completed. A rank that still has to fetch it has not given its part of the next one, so it cannot
    /// be overwritten too early.
    last: Gathered,
    finished: Vec<bool>,
    /// Whether everyone may leave.
    released: bool,
}

/// What became of an exchange when a rank gave its part.
pub(crate) enum Given {
    /// It was the last part missing; [`Hub::publish`] hands the parts to those who wait.
    Complete(Gathered),
    /// Others are still to give.
    Pending,
    /// This rank has finished and will never give: the exchange cannot complete.
    Missed(usize),
}

impl State {
    fn all_finished(&self) -> bool {
        self.finished.iter().all(|finished| *finished)
    }

    /// A rank that has finished while another waits for it in an exchange: the exchange will never complete.
    fn missed(&self) -> Option<usize> {
        if self.parts.iter().all(Option::is_none) {
            return None;
        }
        (0..self.parts.len()).find(|&rank| self.finished[rank] && self.parts[rank].is_none())
    }
}

/// Why a rank is lost that others expect although it has finished.
pub(crate) const MISSED: &str = "it had already finished when the others expected it in an exchange; every rank must make the same collective calls";

impl Hub {
    pub(crate) fn new(n_ranks: usize) -> Self {
        let state = State {
            round: 0,
            parts: vec![None; n_ranks],
            last: Arc::default(),
            finished: vec![false; n_ranks],
            released: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), health: Arc::default() }
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// The state is consistent whenever the lock is free, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one rank's part. A rank gives again only after it has got the result of its last exchange.
    pub(crate) fn give(&self, rank: usize, bytes: Vec<u8>) -> Given {
        let mut state = self.lock();
        state.parts[rank] = Some(bytes);
        if let Some(missed) = state.missed() {
            return Given::Missed(missed);
        }
        if state.parts.iter().any(Option::is_none) {
            return Given::Pending;
        }
        Given::Complete(Arc::new(state.parts.iter_mut().filter_map(Option::take).collect()))
    }

    pub(crate) fn publish(&self, all: Gathered) {
        let mut state = self.lock();
        state.last = all;
        state.round += 1;
        self.changed.notify_all();
    }

    /// The number of the exchange that is open.
    pub(crate) fn round(&self) -> u64 {
        self.lock().round
    }

    /// Waits for the exchange `round` to complete.
    pub(crate) fn wait_for(&self, round: u64) -> Result<Gathered> {
        let mut state = self.lock();
        loop {
            if state.round > round {
                return Ok(Arc::clone(&state.last));
            }
            self.health.check()?;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Notes that a rank has done its work. True if it was the last one; [`release`](Self::release) then lets everyone go.
    ///
    /// # Errors
    ///
    /// A rank, if others wait for it in an exchange.
    pub(crate) fn finished(&self, rank: usize) -> Result<bool, usize> {
        let mut state = self.lock();
        state.finished[rank] = true;
        let all = state.all_finished() && !self.health.is_lost();
        state.missed().map_or(Ok(all), Err)
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.lock().all_finished()
    }

    pub(crate) fn release(&self) {
        self.lock().released = true;
        self.changed.notify_all();
    }

    /// Waits until every rank has done its work.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            self.health.check()?;
            if state.released {
                return Ok(());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records a lost rank, the first one only, and wakes everyone.
    pub(crate) fn lose(&self, rank: usize, why: &str) {
        // Under the lock, so that nobody falls asleep between looking at the health and waiting.
        let _state = self.lock();
        self.health.lose(rank, why);
        self.changed.notify_all();
    }
}

/// A rank that is a thread of this process.
pub(crate) struct ThreadMember {
    hub: Arc<Hub>,
    rank: usize,
}

impl ThreadMember {
    pub(crate) fn new(hub: Arc<Hub>, rank: usize) -> Self {
        Self { hub, rank }
    }
}

impl Member for ThreadMember {
    fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        self.hub.health.check()?;
        let round = self.hub.round();
        match self.hub.give(self.rank, bytes.to_vec()) {
            Given::Complete(all) => self.hub.publish(all),
            Given::Pending => {}
            Given::Missed(rank) => self.hub.lose(rank, MISSED),
        }
        self.hub.wait_for(round)
    }

    fn finish(&self) -> Result<()> {
        match self.hub.finished(self.rank) {
            Ok(true) => self.hub.release(),
            Ok(false) => {}
            Err(missed) => self.hub.lose(missed, MISSED),
        }
        self.hub.wait_for_all()
    }

    fn fail(&self, why: &str) {
        self.hub.lose(self.rank, why);
    }

    fn health(&self) -> &Arc<Health> {
        &self.hub.health
    }
}
