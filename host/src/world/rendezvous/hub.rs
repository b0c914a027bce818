//! The hub in memory: it collects what ranks give to an exchange, and records lost ranks.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::Transport;
use super::subset::Subset;
use crate::communicator::peers::Gathered;
use crate::device::Health;
use crate::error::Result;
use crate::machine::{Machine, Shared};

pub(crate) struct Hub {
    state: Shared<State>,
    health: Arc<Health>,
}

struct State {
    /// The exchanges that some have given to and some have not, by the keys of their subsets. There
    /// is one at most a subset: a rank gives again only after it has got the result of its last
    /// exchange.
    open: HashMap<Vec<u64>, Exchange>,
    finished: Vec<bool>,
    /// Whether all ranks have finished.
    released: bool,
}

struct Exchange {
    subset: Arc<Subset>,
    /// What the subset's ranks have given, with their tickets.
    parts: Vec<Option<(u64, Vec<u8>)>>,
    outcome: Outcome,
}

impl Exchange {
    fn new(subset: &Arc<Subset>) -> Self {
        let parts = vec![None; subset.members().len()];
        Self { subset: Arc::clone(subset), parts, outcome: Outcome::default() }
    }

    /// A rank that has finished and is waited for here: the exchange will never complete.
    fn missed(&self, finished: &[bool]) -> Option<usize> {
        let awaited =
            self.subset.members().iter().zip(&self.parts).filter(|(_, part)| part.is_none());
        awaited.map(|(&rank, _)| rank).find(|&rank| finished[rank])
    }
}

/// Where the result of an exchange appears for the ranks that wait for it.
#[derive(Clone, Default)]
pub(crate) struct Outcome(Arc<OnceLock<Gathered>>);

/// The state of an exchange after a rank gave its part.
pub(crate) enum GiveResult {
    /// It was the last part missing; [`Hub::publish`] hands the parts to those who wait.
    Complete(Complete),
    /// Others are still to give.
    Pending(Outcome),
    /// This rank will never give, or should not have given, for this reason: the exchange cannot
    /// complete.
    Failed(usize, &'static str),
}

/// An exchange with all its parts.
pub(crate) struct Complete {
    pub all: Gathered,
    /// The tickets with which the subset's ranks gave.
    pub tickets: Vec<u64>,
    pub outcome: Outcome,
}

/// Why a rank is lost that others expect although it has finished.
const MISSED: &str = "it had already finished when the others expected it in an exchange; every \
    rank must make the same collective calls";
const TWICE: &str =
    "it gave twice to one exchange; the collective calls of a group are made one after the other";
const NOT_A_MEMBER: &str = "it gave to the exchange of a group that it is not in";

impl Hub {
    /// Of ranks of which those of this process run on `machine`.
    pub(crate) fn new(machine: Machine, n_ranks: usize) -> Self {
        let finished = vec![false; n_ranks];
        let state = State { open: HashMap::new(), finished, released: false };
        Self { state: Shared::new(machine.clone(), state), health: Health::new(machine) }
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Takes the part of one rank of the world in the open exchange of a subset.
    pub(crate) fn give(
        &self,
        rank: usize,
        subset: &Arc<Subset>,
        ticket: u64,
        bytes: Vec<u8>,
    ) -> GiveResult {
        let Some(place) = subset.rank_of(rank) else {
            return GiveResult::Failed(rank, NOT_A_MEMBER);
        };
        let mut state = self.state.lock();
        let State { open, finished, .. } = &mut *state;
        let exchange = open.entry(subset.key().to_vec()).or_insert_with(|| Exchange::new(subset));
        if exchange.parts[place].replace((ticket, bytes)).is_some() {
            return GiveResult::Failed(rank, TWICE);
        }
        if let Some(missed) = exchange.missed(finished) {
            return GiveResult::Failed(missed, MISSED);
        }
        if exchange.parts.iter().any(Option::is_none) {
            return GiveResult::Pending(exchange.outcome.clone());
        }
        let outcome = exchange.outcome.clone();
        let parts = open.remove(subset.key()).map(|exchange| exchange.parts).unwrap_or_default();
        let (tickets, all): (_, Vec<_>) = parts.into_iter().flatten().unzip();
        GiveResult::Complete(Complete { all: Arc::new(all), tickets, outcome })
    }

    pub(crate) fn publish(&self, complete: Complete) {
        let _ = self.state.change(|_| complete.outcome.0.set(complete.all));
    }

    /// Waits for the result of an exchange.
    pub(crate) fn wait_for(&self, outcome: &Outcome) -> Result<Gathered> {
        self.state.wait(|_| match outcome.0.get() {
            Some(all) => Ok(Some(Arc::clone(all))),
            None => self.health.check().map(|()| None),
        })
    }

    /// Notes that a rank has done its work. True if it was the last one; [`release`](Self::release)
    /// then ends their waits.
    ///
    /// # Errors
    ///
    /// Why the rank is lost: others wait for it in an exchange.
    pub(crate) fn finished(&self, rank: usize) -> Result<bool, &'static str> {
        let mut state = self.state.lock();
        state.finished[rank] = true;
        if state.open.values().any(|exchange| exchange.missed(&state.finished).is_some()) {
            return Err(MISSED);
        }
        Ok(state.finished.iter().all(|finished| *finished) && !self.health.is_lost())
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.state.lock().finished.iter().all(|finished| *finished)
    }

    pub(crate) fn release(&self) {
        self.state.change(|state| state.released = true);
    }

    /// Waits until every rank has done its work.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.state.wait(|state| {
            self.health.check()?;
            Ok(state.released.then_some(()))
        })
    }

    /// Records a lost rank, the first one only, and wakes all waits.
    pub(crate) fn mark_lost(&self, rank: usize, why: &str) {
        self.state.change(|_| self.health.mark_lost(rank, why));
    }
}

/// A rank that is a thread of this process.
pub(crate) struct ThreadTransport {
    hub: Arc<Hub>,
    rank: usize,
}

impl ThreadTransport {
    pub(crate) fn new(hub: Arc<Hub>, rank: usize) -> Self {
        Self { hub, rank }
    }
}

impl Transport for ThreadTransport {
    fn all_gather(&self, subset: &Arc<Subset>, bytes: &[u8]) -> Result<Gathered> {
        self.hub.health.check()?;
        match self.hub.give(self.rank, subset, 0, bytes.to_vec()) {
            GiveResult::Complete(complete) => {
                let all = Arc::clone(&complete.all);
                self.hub.publish(complete);
                Ok(all)
            }
            GiveResult::Pending(outcome) => self.hub.wait_for(&outcome),
            GiveResult::Failed(rank, why) => {
                self.hub.mark_lost(rank, why);
                self.hub.wait_for(&Outcome::default())
            }
        }
    }

    fn finish(&self) -> Result<()> {
        match self.hub.finished(self.rank) {
            Ok(true) => self.hub.release(),
            Ok(false) => {}
            Err(why) => self.hub.mark_lost(self.rank, why),
        }
        self.hub.wait_for_all()
    }

    fn fail(&self, why: &str) {
        self.hub.mark_lost(self.rank, why);
    }

    fn health(&self) -> &Arc<Health> {
        &self.hub.health
    }
}
