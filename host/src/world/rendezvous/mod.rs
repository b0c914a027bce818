//! The rendezvous: how ranks find each other, exchange bytes and learn that one is lost.
//!
//! NCCL needs it before there is a communicator, and requirements, splits and barriers use it
//! later. Ranks that are threads meet in memory ([`hub`]), ranks that are processes over TCP
//! ([`join`], [`tcp`]), with rank 0 as the hub.
//!
//! Some of the ranks can exchange among themselves ([`Rendezvous::subset`]), other subsets doing so
//! at the same time; what keeps their exchanges apart is in [`subset`]. Whether all ranks are
//! alive, and when all have done their work, stays a matter of the world.

mod acceptor;
mod connect;
mod hub;
mod join;
mod subset;
mod tcp;
mod wire;

use std::rc::Rc;
use std::sync::Arc;

pub(super) use self::hub::{Hub, ThreadTransport};
pub(super) use self::join::RendezvousConfig;
use self::subset::{Subset, SubsetIds};
pub(super) use self::wire::Peer;
use crate::communicator::peers::{Gathered, Peers};
use crate::device::Health;
use crate::error::{Error, Result};

/// How one rank reaches the others.
pub(crate) trait Transport: Send + Sync {
    /// Gives `bytes` and gets what every rank of the subset gave, in order of its ranks. All of
    /// them take part.
    fn all_gather(&self, subset: &Arc<Subset>, bytes: &[u8]) -> Result<Gathered>;

    /// This rank has done its work; returns when all have.
    fn finish(&self) -> Result<()>;

    /// This rank cannot continue: it counts as lost, for itself as well, and the others get the
    /// reason.
    fn fail(&self, why: &str);

    fn health(&self) -> &Arc<Health>;
}

/// One rank's end of the rendezvous, or of a part of it.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    /// This rank in the subset.
    rank: usize,
    subset: Arc<Subset>,
    /// The host of every rank of the subset.
    hosts: Arc<[String]>,
    subsets: Arc<SubsetIds>,
    transport: Arc<dyn Transport>,
}

impl Rendezvous {
    /// That of the world, of which `hosts` are all.
    pub(crate) fn new(rank: usize, hosts: Vec<String>, transport: Arc<dyn Transport>) -> Self {
        let subset = Arc::new(Subset::world(hosts.len()));
        Self { rank, subset, hosts: hosts.into(), subsets: Arc::default(), transport }
    }

    /// The rendezvous of some ranks of this one, which are ranks 0, 1, ... there in the order of
    /// `members`; this rank is one of them. Nothing is exchanged. All members make it, with the
    /// same list, and those who make several of the same ranks do so in the same order; they
    /// exchange in it in the same order, too.
    ///
    /// Its exchanges are its members' alone and may overlap with those of any other subset. A lost
    /// rank is lost to all subsets, and errors name it by its rank in the world;
    /// [`finish`](Self::finish) and [`fail`](Self::fail) mean the world.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `members` are not different ranks of this rendezvous with this
    /// rank among them.
    pub(crate) fn subset(&self, members: &[usize]) -> Result<Self> {
        let subset = Arc::new(self.subsets.next(&self.subset, self.rank, members)?);
        let hosts: Vec<String> = members.iter().map(|&member| self.hosts[member].clone()).collect();
        let rank = members.iter().position(|&member| member == self.rank);
        let rank = rank.ok_or_else(|| Error::invalid("this rank is not in its own group"))?;
        let transport = Arc::clone(&self.transport);
        Ok(Self { rank, subset, hosts: hosts.into(), subsets: Arc::default(), transport })
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

    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        // What all ranks give goes back in one frame.
        let limit = wire::MAX_PAYLOAD / self.n_ranks() - size_of::<u32>();
        if bytes.len() > limit {
            return Err(Error::invalid(format!(
                "{} bytes in an exchange of {} ranks; at most {limit} a rank fit",
                bytes.len(),
                self.n_ranks()
            )));
        }
        if self.n_ranks() == 1 {
            self.health().check()?;
            return Ok(Arc::new(vec![bytes.to_vec()]));
        }
        self.transport.all_gather(&self.subset, bytes)
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// All ranks get the bytes that `root` gives; those of the others are ignored.
    pub(crate) fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        if root >= self.n_ranks() {
            let n_ranks = self.n_ranks();
            return Err(Error::invalid(format!("rank {root} is not one of {n_ranks} ranks")));
        }
        let given = if self.rank == root { bytes } else { &[] };
        let all = self.all_gather(given)?;
        all.get(root).cloned().ok_or_else(|| Error::invalid("an exchange left out its root"))
    }

    pub(crate) fn finish(&self) -> Result<()> {
        self.transport.finish()
    }

    pub(crate) fn fail(&self, why: &str) {
        self.transport.fail(why);
    }
}

impl Peers for Rendezvous {
    fn hosts(&self) -> &[String] {
        self.hosts()
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Gathered> {
        self.all_gather(bytes)
    }

    fn subset(&self, members: &[usize]) -> Result<Rc<dyn Peers>> {
        self.subset(members).map(|subset| Rc::new(subset) as _)
    }
}

/// This host's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown-host".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests;
