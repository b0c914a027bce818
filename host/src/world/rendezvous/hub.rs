//! The hub: collects the contributions to exchanges, and records finished and lost ranks.
//! Ranks that are threads share one, and rank 0 of those that are processes has one for all.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::subset::Subset;
use super::survivors::JoinedWorld;
use super::{Transport, host_name};
use crate::communicator::peers::{Cancelled, Gathered, call_of};
use crate::device::{Health, recorder};
use crate::error::{Error, Result, StateError, ranks};
use crate::machine::{Machine, Shared};

pub(crate) struct Hub {
    state: Shared<State>,
    health: Arc<Health>,
}

struct State {
    /// The incomplete exchanges, by the keys of their subsets. Each subset has at most one: a rank
    /// contributes to the next exchange only after it has the result of the previous one.
    open: HashMap<Vec<u64>, Exchange>,
    /// The time of the last [`Hub::beat`].
    beaten: Option<Duration>,
    /// The ranks that have called [`Hub::mark_finished`].
    finished: Vec<bool>,
    /// The ranks that are lost, or have failed.
    gone: Vec<bool>,
    /// The ranks that have called [`Hub::survivors`] so far, after a loss.
    surviving: Vec<bool>,
    /// The surviving ranks and their hub, once all have called it.
    survivors: Option<(Vec<usize>, Arc<Hub>)>,
    /// Whether the waits of finished ranks are over, because all ranks have finished.
    released: bool,
}

struct Exchange {
    subset: Arc<Subset>,
    /// When the first rank contributed, by the machine's clock.
    since: Duration,
    /// The contributions of the subset's ranks so far, with their request numbers: each process
    /// numbers its own, and finds by it the exchange of a result. Threads, and rank 0, give 0.
    parts: Vec<Option<(u64, Vec<u8>)>>,
    outcome: Outcome,
}

impl Exchange {
    fn new(subset: &Arc<Subset>, since: Duration) -> Self {
        let parts = vec![None; subset.members().len()];
        Self { subset: Arc::clone(subset), since, parts, outcome: Outcome::default() }
    }

    /// Returns the first rank that has not contributed, and the rank and call that wait for it.
    fn absent(&self, waited: Duration) -> Option<(usize, String)> {
        let members = || self.subset.members().iter().copied().zip(&self.parts);
        let absent: Vec<usize> =
            members().filter(|(_, part)| part.is_none()).map(|(rank, _)| rank).collect();
        let present: Vec<usize> =
            members().filter(|(_, part)| part.is_some()).map(|(rank, _)| rank).collect();
        let call = self.parts.iter().flatten().find_map(|(_, bytes)| call_of(bytes));
        let why = absence(waited, call, &present, &absent);
        Some((*absent.first()?, why))
    }

    /// Returns a rank that has finished without contributing: then the exchange will never
    /// complete.
    fn finished_early(&self, finished: &[bool]) -> Option<usize> {
        let awaited =
            self.subset.members().iter().zip(&self.parts).filter(|(_, part)| part.is_none());
        awaited.map(|(&rank, _)| rank).find(|&rank| finished[rank])
    }
}

/// Returns why ranks that have not come to an exchange count as lost.
pub(super) fn absence(
    waited: Duration,
    call: Option<String>,
    present: &[usize],
    absent: &[usize],
) -> String {
    let call = call.unwrap_or_else(|| "an exchange".to_owned());
    let verb = if absent.len() == 1 { "has" } else { "have" };
    let (seconds, present, absent) = (waited.as_secs(), ranks(present), ranks(absent));
    format!("after {seconds} s in {call}, {present} waited and {absent} {verb} not come")
}

/// The result of an exchange, once it is complete, for the ranks that wait for it.
#[derive(Clone, Default)]
pub(crate) struct Outcome(Arc<OnceLock<Gathered>>);

/// The state of an exchange after a contribution.
pub(crate) enum ExchangeState {
    /// The last contribution was added; [`Hub::publish`] ends the waits of the other ranks.
    Complete(Complete),
    /// Other ranks have not contributed yet.
    Pending(Outcome),
    /// The exchange cannot complete because of this rank: it will never contribute, or its
    /// contribution is invalid. The text is the reason.
    Failed(usize, &'static str),
}

/// A complete exchange.
pub(crate) struct Complete {
    pub all: Gathered,
    /// The request numbers of the subset's ranks.
    pub requests: Vec<u64>,
    pub outcome: Outcome,
}

/// Why a rank that has finished without contributing counts as lost.
const FINISHED_EARLY: &str = "it had already finished when the others expected it in an exchange; \
    every rank must make the same collective calls";
const TWICE: &str = "it contributed twice to one exchange; a subset makes its collective calls one \
    after the other";
const NOT_A_MEMBER: &str = "it contributed to the exchange of a subset that it is not in";

impl Hub {
    /// Returns the hub of `n_ranks` ranks; those in this process run on `machine`.
    /// Exchanges fail after `deadline`.
    pub(crate) fn new(machine: Machine, n_ranks: usize, deadline: Option<Duration>) -> Self {
        let flags = || vec![false; n_ranks];
        let (finished, gone, surviving) = (flags(), flags(), flags());
        let (open, beaten, survivors, released) = Default::default();
        let state = State { open, beaten, finished, gone, surviving, survivors, released };
        Self { state: Shared::new(machine.clone(), state), health: Health::new(machine, deadline) }
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Adds the contribution of a rank, numbered in the world, to the exchange of a subset.
    pub(crate) fn contribute(
        &self,
        rank: usize,
        subset: &Arc<Subset>,
        request: u64,
        bytes: Vec<u8>,
    ) -> ExchangeState {
        let Some(index) = subset.rank_of(rank) else {
            return ExchangeState::Failed(rank, NOT_A_MEMBER);
        };
        let mut state = self.state.lock();
        let State { open, finished, .. } = &mut *state;
        let now = self.health.machine().now();
        let exchange =
            open.entry(subset.key().to_vec()).or_insert_with(|| Exchange::new(subset, now));
        if exchange.parts[index].replace((request, bytes)).is_some() {
            return ExchangeState::Failed(rank, TWICE);
        }
        if let Some(rank) = exchange.finished_early(finished) {
            return ExchangeState::Failed(rank, FINISHED_EARLY);
        }
        if exchange.parts.iter().any(Option::is_none) {
            return ExchangeState::Pending(exchange.outcome.clone());
        }
        let outcome = exchange.outcome.clone();
        // The exchange is open, and has all its parts.
        let parts = open.remove(subset.key()).map(|exchange| exchange.parts).unwrap_or_default();
        let (requests, all): (_, Vec<_>) = parts.into_iter().flatten().unzip();
        ExchangeState::Complete(Complete { all: Arc::new(all), requests, outcome })
    }

    /// Gives the result of an exchange to the ranks that wait for it. Called once.
    pub(crate) fn publish(&self, complete: Complete) {
        let _ = self.state.change(|_| complete.outcome.0.set(complete.all));
    }

    /// Takes back a contribution to an exchange, if that is not complete.
    pub(crate) fn withdraw(&self, rank: usize, subset: &Subset) {
        let mut state = self.state.lock();
        let Some(exchange) = state.open.get_mut(subset.key()) else { return };
        if let Some(index) = subset.rank_of(rank) {
            exchange.parts[index] = None;
        }
        if exchange.parts.iter().all(Option::is_none) {
            state.open.remove(subset.key());
        }
    }

    /// Waits for the result of an exchange, for at most `limit` and until `cancelled` fails.
    pub(crate) fn wait_for(
        &self,
        outcome: &Outcome,
        limit: Option<Duration>,
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered> {
        self.state.watch(limit, |_| match outcome.0.get() {
            Some(all) => Ok(Some(Arc::clone(all))),
            None => self.health.check().and_then(|()| cancelled()).map(|()| None),
        })
    }

    /// Excludes from all waits the time for which this process was stopped: what lies between two
    /// of these calls beyond their `interval`.
    pub(crate) fn beat(&self, interval: Duration) {
        let now = self.health.machine().now();
        let mut state = self.state.lock();
        let last = state.beaten.replace(now).unwrap_or(now);
        let stopped = now.saturating_sub(last + interval);
        state.open.values_mut().for_each(|exchange| {
            exchange.since = (exchange.since + stopped).min(now);
        });
    }

    /// Returns a rank for which others have waited in an exchange until the deadline, and the
    /// reason why it counts as lost.
    pub(crate) fn absent(&self) -> Option<(usize, String)> {
        let (now, deadline) = (self.health.machine().now(), self.health.deadline()?);
        let state = self.state.lock();
        let late = |exchange: &&Exchange| now.saturating_sub(exchange.since) >= deadline;
        let oldest = state.open.values().filter(late).min_by_key(|exchange| exchange.since)?;
        oldest.absent(now.saturating_sub(oldest.since))
    }

    /// Records that a rank has done its work. Returns true if it was the last one and none is lost:
    /// then call [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// Why the rank counts as lost: others wait for it in an exchange.
    pub(crate) fn mark_finished(&self, rank: usize) -> Result<bool, &'static str> {
        self.state.change(|State { open, finished, .. }| {
            finished[rank] = true;
            if open.values().any(|exchange| exchange.finished_early(finished).is_some()) {
                return Err(FINISHED_EARLY);
            }
            Ok(finished.iter().all(|finished| *finished) && !self.health.is_lost())
        })
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.state.lock().finished.iter().all(|finished| *finished)
    }

    /// Ends the waits of [`wait_for_all`](Self::wait_for_all).
    pub(crate) fn release(&self) {
        self.state.change(|state| state.released = true);
    }

    /// Waits until every rank has done its work.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        self.state.wait(None, |state| {
            self.health.check()?;
            Ok(state.released.then_some(()))
        })
    }

    /// Does the same as [`mark_lost`](Self::mark_lost), for a rank that others wait for: prints
    /// what the ranks of this process do, once.
    pub(crate) fn mark_absent(&self, rank: usize, why: &str) {
        if !self.health.is_lost() {
            recorder::print_all();
        }
        self.mark_lost(rank, why);
    }

    /// Records the first lost rank, and wakes all waits.
    pub(crate) fn mark_lost(&self, rank: usize, why: &str) {
        self.state.change(|state| {
            state.gone[rank] = true;
            self.health.mark_lost(rank, why);
        });
    }

    /// Waits until all ranks that are left after a loss have called this, or the deadline has
    /// passed; ranks that have not come by then are excluded. Returns the ranks and their hub.
    fn survivors(&self, rank: usize) -> Result<(Vec<usize>, Arc<Self>)> {
        self.state.change(|state| state.surviving[rank] = true);
        let limit = self.health.deadline();
        let all_here = |state: &mut State| {
            let mut settled = state.gone.iter().zip(&state.surviving).zip(&state.finished);
            settled.all(|((gone, surviving), finished)| *gone || *surviving || *finished)
        };
        let waited = self.state.wait(limit, |state| Ok(all_here(state).then_some(())));
        if let Err(error) = waited
            && !matches!(error, Error::State(StateError::DeadlinePassed { .. }))
        {
            // An interrupted rank does not take part, unless the others have its number already.
            let is_in = self.state.change(|state| {
                state.surviving[rank] = state.survivors.is_some();
                state.survivors.is_some()
            });
            if !is_in {
                return Err(error);
            }
        }
        let machine = self.health.machine();
        let survivors = self.state.change(|state| {
            let ranks = || (0..state.surviving.len()).filter(|rank| state.surviving[*rank]);
            let make = || {
                let members: Vec<usize> = ranks().filter(|rank| !state.gone[*rank]).collect();
                let hub = Self::new(machine.clone(), members.len(), limit);
                (members, Arc::new(hub))
            };
            if state.survivors.is_none() {
                state.survivors = Some(make());
            }
            state.survivors.clone()
        });
        survivors
            .filter(|(members, _)| members.contains(&rank))
            .ok_or_else(|| Error::invalid("the ranks that are left have gone on without this one"))
    }
}

/// The transport of a rank that is a thread of this process.
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
    fn all_gather(
        &self,
        subset: &Arc<Subset>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered> {
        self.hub.health.check()?;
        match self.hub.contribute(self.rank, subset, 0, bytes.to_vec()) {
            ExchangeState::Complete(complete) => {
                let all = Arc::clone(&complete.all);
                self.hub.publish(complete);
                Ok(all)
            }
            ExchangeState::Pending(outcome) => {
                let waited = self.hub.wait_for(&outcome, self.hub.health.deadline(), cancelled);
                // Any other error means that the world has failed, and with it the exchange.
                if cancelled().is_err() {
                    self.hub.withdraw(self.rank, subset);
                }
                if let Err(Error::State(StateError::DeadlinePassed { .. })) = waited
                    && let Some((rank, why)) = self.hub.absent()
                {
                    self.hub.mark_absent(rank, &why);
                    self.hub.health.check()?;
                }
                waited
            }
            ExchangeState::Failed(rank, why) => {
                self.hub.mark_lost(rank, why);
                // Fails, since a rank is lost now: there is no such outcome.
                self.hub.wait_for(&Outcome::default(), None, cancelled)
            }
        }
    }

    fn finish(&self) -> Result<()> {
        match self.hub.mark_finished(self.rank) {
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

    fn join_survivors(&self, _lost: usize) -> Result<JoinedWorld> {
        let (members, hub) = self.hub.survivors(self.rank)?;
        // `survivors` fails for a rank that is not a member.
        let rank = members.iter().position(|member| *member == self.rank).unwrap_or_default();
        let hosts = vec![host_name(); members.len()];
        Ok(JoinedWorld { rank, hosts, transport: Arc::new(Self::new(hub, rank)) })
    }
}
