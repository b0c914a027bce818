//! The rendezvous: how ranks connect to each other, gather bytes and detect a lost rank.
//!
//! It bootstraps NCCL communicators, and is used later for requirements, splits and barriers. Ranks
//! that are threads share a hub in memory ([`hub`]). Ranks that are processes use TCP ([`join`],
//! [`tcp`]), with the hub in rank 0.
//!
//! The ranks of another library's communicator may exchange over a store of keys and values that
//! the caller passes ([`side_channel`]).
//!
//! The one operation is an *exchange*: an all-gather of bytes on the host. A subset of the ranks
//! can exchange ([`Rendezvous::subset`]), at the same time as other subsets; [`subset`] says how
//! the exchanges are distinguished. Lost and finished ranks are always those of the whole world.

mod acceptor;
mod config;
mod connect;
mod connection;
mod heartbeat;
mod hub;
mod join;
mod listen;
mod probe;
mod relay;
mod seal;
mod service;
mod side_channel;
mod strangers;
mod subset;
mod survivors;
mod tcp;
mod token;
mod wire;

use std::sync::{Arc, OnceLock};

pub(super) use self::config::RendezvousConfig;
pub(super) use self::hub::{Hub, ThreadTransport};
pub use self::side_channel::SideChannel;
use self::subset::{Subset, SubsetIds};
pub(super) use self::survivors::JoinedWorld;
pub(super) use self::token::Token;
pub(super) use self::wire::Peer;
use crate::communicator::peers::{
    Cancelled, Gathered, NEVER, Peers, Terms, contribution, same_call,
};
use crate::device::Health;
use crate::device::recorder::{Operation, Recorder};
use crate::error::{Error, Result, StateError};
use crate::machine::CallLock;

/// How one rank communicates with the others.
pub(crate) trait Transport: Send + Sync {
    /// Gathers the `bytes` of every rank of the subset, in order of its ranks. All of them call
    /// this. If `cancelled` fails, this rank takes its contribution back.
    fn all_gather(
        &self,
        subset: &Arc<Subset>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Gathered>;

    /// Reports that this rank has done its work, and waits until all ranks have.
    fn finish(&self) -> Result<()>;

    /// Reports that this rank cannot continue: it counts as lost, for itself too, and the others
    /// get the reason.
    fn fail(&self, why: &str);

    fn health(&self) -> &Arc<Health>;

    /// Joins the ranks that remain after the loss of rank `lost`, all of which call this.
    fn join_survivors(&self, lost: usize) -> Result<JoinedWorld>;
}

/// The rendezvous of the world or of a subset, as one rank uses it.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    /// This rank's number in the subset.
    rank: usize,
    subset: Arc<Subset>,
    /// The host of every rank of the subset.
    hosts: Arc<[String]>,
    /// Whether the ranks compare the arguments of NCCL's collectives before they start.
    checked: bool,
    subsets: Arc<SubsetIds>,
    transport: Arc<dyn Transport>,
    recorder: Arc<Recorder>,
    /// The rendezvous of the ranks that were left after a loss.
    survivors: Arc<OnceLock<Rendezvous>>,
    /// Held during an exchange of this rank in the subset.
    exchanging: Arc<CallLock>,
    /// Held while this rank joins those that are left after a loss.
    joining: Arc<CallLock>,
}

impl Rendezvous {
    /// Returns the rendezvous of a world.
    pub(crate) fn new(world: JoinedWorld) -> Self {
        Self::of_world(world, Recorder::new())
    }

    fn of_world(world: JoinedWorld, recorder: Arc<Recorder>) -> Self {
        let JoinedWorld { rank, hosts, transport } = world;
        recorder.rename(format!("rank {rank} of {}", hosts.len()));
        let subset = Subset::world(hosts.len());
        Self::of_subset(rank, subset, hosts, transport, recorder)
    }

    /// Returns the rendezvous of a subset, whose calls are not compared.
    fn of_subset(
        rank: usize,
        subset: Subset,
        hosts: Vec<String>,
        transport: Arc<dyn Transport>,
        recorder: Arc<Recorder>,
    ) -> Self {
        let (subset, hosts, checked) = (Arc::new(subset), hosts.into(), false);
        let (subsets, survivors, exchanging, joining) = Default::default();
        Self {
            rank,
            subset,
            hosts,
            checked,
            subsets,
            transport,
            recorder,
            survivors,
            exchanging,
            joining,
        }
    }

    /// Returns the rendezvous of the ranks that are left after a loss, all of which call this, on
    /// the rendezvous of the world. From now on [`finish`](Self::finish) and [`fail`](Self::fail)
    /// apply to the new world.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if no rank is lost, or for a second call;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) if this rank is the lost one;
    /// [`WorldError::Rendezvous`](crate::WorldError::Rendezvous) if the ranks do not meet.
    pub(crate) fn survivors(&self) -> Result<Self> {
        // A second thread of this rank waits here, and then finds that there is a world already.
        let _alone = self.joining.lock(self.health().machine(), None, || Ok(()))?;
        let lost = self.require_loss()?;
        let _joining = self.recorder.begin(Operation::Survivors);
        let joined = self.transport.join_survivors(lost)?;
        let world = Self::of_world(joined, Arc::clone(&self.recorder)).checked(self.checked);
        let _ = self.survivors.set(world.clone());
        Ok(world)
    }

    /// Returns the lost rank, after whose loss this one may go on with the others; it has not done
    /// so yet.
    pub(crate) fn require_loss(&self) -> Result<usize> {
        let lost = self.health().lost_rank();
        let lost = lost.ok_or_else(|| Error::invalid("no rank is lost"))?;
        if lost == self.rank {
            // Fails, since a rank is lost: this one.
            self.health().check()?;
        }
        if self.survivors.get().is_some() {
            return Err(Error::invalid("the ranks that are left have a world already"));
        }
        Ok(lost)
    }

    /// Returns this rendezvous with collectives whose arguments are compared, or not.
    pub(crate) fn checked(self, checked: bool) -> Self {
        Self { checked, ..self }
    }

    /// Returns the rendezvous of the ranks `members` of this one, which become ranks 0, 1, ... in
    /// the order of the list; this rank is one of them. Making it exchanges nothing. All members
    /// must make it with the same list, make several subsets of the same ranks in the same order,
    /// and make the exchanges of a subset in the same order.
    ///
    /// Exchanges of different subsets may overlap. A lost rank is lost for all subsets, and errors
    /// contain its rank in the world; [`finish`](Self::finish) and [`fail`](Self::fail) apply to
    /// the world.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `members` are not different ranks of this rendezvous with this
    /// rank among them.
    pub(crate) fn subset(&self, members: &[usize]) -> Result<Self> {
        let subset = self.subsets.next(&self.subset, self.rank, members)?;
        let hosts: Vec<String> = members.iter().map(|&member| self.hosts[member].clone()).collect();
        let rank = members.iter().position(|&member| member == self.rank);
        let rank = rank.ok_or_else(|| Error::invalid("this rank is not in its own subset"))?;
        let (transport, recorder) = (Arc::clone(&self.transport), Arc::clone(&self.recorder));
        let subset = Self::of_subset(rank, subset, hosts, transport, recorder);
        Ok(subset.checked(self.checked))
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn n_ranks(&self) -> usize {
        self.hosts.len()
    }

    pub(crate) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        self.transport.health()
    }

    /// Returns the record of this rank's operations, in the world and in subsets.
    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    #[cfg(test)]
    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        self.gather(bytes, NEVER)
    }

    /// Fails if a contribution to an exchange is too long.
    fn require_fit(&self, contribution: &[u8]) -> Result<()> {
        let (length, n_ranks) = (contribution.len(), self.n_ranks());
        let limit = wire::max_contribution(n_ranks);
        match length <= limit {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{length} bytes in an exchange of {n_ranks} ranks; at most {limit} per rank are \
                 allowed"
            ))),
        }
    }

    fn gather(&self, bytes: &[u8], cancelled: Cancelled<'_>) -> Result<Gathered> {
        if self.n_ranks() == 1 {
            self.health().check()?;
            return Ok(Arc::new(vec![bytes.to_vec()]));
        }
        // Another thread of this rank may be in an exchange: this one waits for its end.
        let may_wait = || self.health().check().and_then(|()| cancelled());
        let _exchanging = self.exchanging.lock(self.health().machine(), None, may_wait)?;
        let gathered = self.transport.all_gather(&self.subset, bytes, cancelled);
        // An interrupted exchange may have ended on the other ranks, which have this rank's bytes
        // and continue. So this rank can no longer take part.
        gathered.inspect_err(|error| {
            if let Error::State(StateError::Interrupted) = error {
                self.fail(&error.to_string());
            }
        })
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        Peers::all_gather(self, "barrier".into(), &[], NEVER).map(drop)
    }

    /// Returns the bytes of rank `root` on all ranks; those of other ranks are ignored.
    pub(crate) fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        let n_ranks = self.n_ranks();
        let no_rank = (root >= n_ranks)
            .then(|| Error::invalid(format!("rank {root} is not one of {n_ranks} ranks")));
        let contribution = if self.rank == root { bytes } else { &[] };
        let call = format!("broadcast from rank {root}");
        let terms = Terms { failure: no_rank.as_ref(), ..call.as_str().into() };
        let all = Peers::all_gather(self, terms, contribution, NEVER);
        no_rank.map_or(Ok(()), Err)?;
        let root_bytes = all?.into_iter().nth(root);
        root_bytes.ok_or_else(|| Error::invalid("an exchange without its root's bytes"))
    }

    /// Waits until the functions of all ranks have ended.
    pub(crate) fn finish(&self) -> Result<()> {
        if let Some(survivors) = self.survivors.get() {
            return survivors.finish();
        }
        let _finish = self.recorder.begin(Operation::Finish);
        self.transport.finish()
    }

    pub(crate) fn fail(&self, why: &str) {
        match self.survivors.get() {
            None => self.transport.fail(why),
            Some(survivors) => survivors.fail(why),
        }
    }
}

impl Peers for Rendezvous {
    fn hosts(&self) -> &[String] {
        self.hosts()
    }

    fn is_checked(&self) -> bool {
        self.checked
    }

    fn all_gather(
        &self,
        terms: Terms<'_>,
        bytes: &[u8],
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<Vec<u8>>> {
        let operation = Operation::Exchange(terms.call.to_owned(), self.n_ranks());
        let _exchange = self.recorder.begin(operation);
        let own = contribution(terms, bytes);
        let Err(too_long) = self.require_fit(&own) else {
            return same_call(&self.gather(&own, cancelled)?);
        };
        // The others are told, and this rank stays in step with them.
        let failed = Terms { failure: Some(&too_long), ..terms.call.into() };
        let told = self.gather(&contribution(failed, &[]), cancelled);
        told.and(Err(too_long))
    }

    fn subset(&self, members: &[usize]) -> Result<Arc<dyn Peers>> {
        self.subset(members).map(|subset| Arc::new(subset) as _)
    }
}

/// Returns this host's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown-host".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests;
