//! The meeting point in memory: where exchanges are put together and lost ranks are recorded.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::Member;
use super::group::Group;
use crate::communicator::peers::Gathered;
use crate::device::Health;
use crate::error::Result;
use crate::machine::{Machine, Shared};

pub(crate) struct Hub {
    state: Shared<State>,
    health: Arc<Health>,
}

struct State {
    /// The exchanges that some have given to and some have not, by the keys of their groups. There
    /// is one at most a group: a rank gives again only after it has got the result of its last
    /// exchange.
    open: HashMap<Vec<u64>, Exchange>,
    finished: Vec<bool>,
    /// Whether everyone may leave.
    released: bool,
}

struct Exchange {
    group: Arc<Group>,
    /// What the group's ranks have given, with their tickets.
    parts: Vec<Option<(u64, Vec<u8>)>>,
    outcome: Outcome,
}

impl Exchange {
    fn new(group: &Arc<Group>) -> Self {
        let parts = vec![None; group.members().len()];
        Self { group: Arc::clone(group), parts, outcome: Outcome::default() }
    }

    /// A rank that has finished and is waited for here: the exchange will never complete.
    fn missed(&self, finished: &[bool]) -> Option<usize> {
        let awaited =
            self.group.members().iter().zip(&self.parts).filter(|(_, part)| part.is_none());
        awaited.map(|(&rank, _)| rank).find(|&rank| finished[rank])
    }
}

/// Where the result of an exchange appears for the ranks that wait for it.
#[derive(Clone, Default)]
pub(crate) struct Outcome(Arc<OnceLock<Gathered>>);

/// What became of an exchange when a rank gave its part.
pub(crate) enum Given {
    /// It was the last part missing; [`Hub::publish`] hands the parts to those who wait.
    Complete(Complete),
    /// Others are still to give.
    Pending(Outcome),
    /// This rank will never give, or should not have given, for this reason: the exchange cannot
    /// complete.
    Spoilt(usize, &'static str),
}

/// An exchange with all its parts.
pub(crate) struct Complete {
    pub all: Gathered,
    /// The tickets with which the group's ranks gave.
    pub tickets: Vec<u64>,
    pub outcome: Outcome,
}

/// Why a rank is lost that others expect although it has finished.
const MISSED: &str = "it had already finished when the others expected it in an exchange; every rank must make the same collective calls";
const TWICE: &str =
    "it gave twice to one exchange; the collective calls of a group are made one after the other";
const STRANGER: &str = "it gave to the exchange of a group that it is not in";

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

    /// Takes the part of one rank of the world in the open exchange of a group.
    pub(crate) fn give(
        &self,
        rank: usize,
        group: &Arc<Group>,
        ticket: u64,
        bytes: Vec<u8>,
    ) -> Given {
        let Some(place) = group.place_of(rank) else { return Given::Spoilt(rank, STRANGER) };
        let mut state = self.state.lock();
        let State { open, finished, .. } = &mut *state;
        let exchange = open.entry(group.key().to_vec()).or_insert_with(|| Exchange::new(group));
        if exchange.parts[place].replace((ticket, bytes)).is_some() {
            return Given::Spoilt(rank, TWICE);
        }
        if let Some(missed) = exchange.missed(finished) {
            return Given::Spoilt(missed, MISSED);
        }
        if exchange.parts.iter().any(Option::is_none) {
            return Given::Pending(exchange.outcome.clone());
        }
        let outcome = exchange.outcome.clone();
        let parts = open.remove(group.key()).map(|exchange| exchange.parts).unwrap_or_default();
        let (tickets, all): (_, Vec<_>) = parts.into_iter().flatten().unzip();
        Given::Complete(Complete { all: Arc::new(all), tickets, outcome })
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
    /// then lets everyone go.
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

    /// Records a lost rank, the first one only, and wakes everyone.
    pub(crate) fn lose(&self, rank: usize, why: &str) {
        self.state.change(|_| self.health.lose(rank, why));
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
    fn all_gather(&self, group: &Arc<Group>, bytes: &[u8]) -> Result<Gathered> {
        self.hub.health.check()?;
        match self.hub.give(self.rank, group, 0, bytes.to_vec()) {
            Given::Complete(complete) => {
                let all = Arc::clone(&complete.all);
                self.hub.publish(complete);
                Ok(all)
            }
            Given::Pending(outcome) => self.hub.wait_for(&outcome),
            Given::Spoilt(rank, why) => {
                self.hub.lose(rank, why);
                self.hub.wait_for(&Outcome::default())
            }
        }
    }

    fn finish(&self) -> Result<()> {
        match self.hub.finished(self.rank) {
            Ok(true) => self.hub.release(),
            Ok(false) => {}
            Err(why) => self.hub.lose(self.rank, why),
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
