//! How ranks find each other and stay in touch.
//!
//! A rendezvous is what NCCL needs before it exists: one exchange of bytes between all ranks, again
//! and again, and the news that a rank is gone. Ranks that are threads meet in memory ([`hub`]),
//! ranks that are processes over TCP ([`join`], [`tcp`]), rank 0 being the hub of the others.
//!
//! Some of the ranks can exchange among themselves ([`Rendezvous::subset`]), other groups doing so
//! at the same time; what keeps their exchanges apart is in [`group`]. Whether all ranks are alive,
//! and when all have done their work, stays a matter of the world.

mod acceptor;
mod group;
mod hub;
mod join;
mod tcp;
mod visit;
mod wire;

use std::rc::Rc;
use std::sync::Arc;

use self::group::{Group, Subsets};
pub(super) use self::hub::{Hub, ThreadMember};
pub(super) use self::join::Meeting;
pub(super) use self::wire::Peer;
use crate::communicator::peers::{Gathered, Peers};
use crate::device::Health;
use crate::error::{Error, Result};

/// One rank's place in a rendezvous.
pub(crate) trait Member: Send + Sync {
    /// Gives `bytes` and gets what every rank of the group gave, in order of its ranks. All of them
    /// take part.
    fn all_gather(&self, group: &Arc<Group>, bytes: &[u8]) -> Result<Gathered>;

    /// This rank has done its work; returns when all have.
    fn finish(&self) -> Result<()>;

    /// This rank cannot go on: it is lost, to itself as well, and the others are told why.
    fn fail(&self, why: &str);

    fn health(&self) -> &Arc<Health>;
}

/// One rank's end of the rendezvous, or of a part of it.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    /// This rank in the group.
    rank: usize,
    group: Arc<Group>,
    /// The host of every rank of the group.
    hosts: Arc<[String]>,
    subsets: Arc<Subsets>,
    member: Arc<dyn Member>,
}

impl Rendezvous {
    /// That of the world, of which `hosts` are all.
    pub(crate) fn new(rank: usize, hosts: Vec<String>, member: Arc<dyn Member>) -> Self {
        let group = Arc::new(Group::world(hosts.len()));
        Self { rank, group, hosts: hosts.into(), subsets: Arc::default(), member }
    }

    /// The rendezvous of some ranks of this one, who are ranks 0, 1, ... there in the order of
    /// `members`; this rank is one of them. Nothing is exchanged. All members make it, with the
    /// same list, and those who make several of the same ranks do so in the same order; they
    /// exchange in it in the same order, too.
    ///
    /// Its exchanges are its members' alone and may overlap with those of any other group. A lost
    /// rank is lost to all groups, and errors name it by its rank in the world;
    /// [`finish`](Self::finish) and [`fail`](Self::fail) mean the world.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if `members` are not different ranks of this rendezvous with this
    /// rank among them.
    pub(crate) fn subset(&self, members: &[usize]) -> Result<Self> {
        let group = Arc::new(self.subsets.next(&self.group, self.rank, members)?);
        let hosts: Vec<String> = members.iter().map(|&member| self.hosts[member].clone()).collect();
        let rank = members.iter().position(|&member| member == self.rank);
        let rank = rank.ok_or_else(|| Error::invalid("this rank is not in its own group"))?;
        let member = Arc::clone(&self.member);
        Ok(Self { rank, group, hosts: hosts.into(), subsets: Arc::default(), member })
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
        self.member.health()
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
        self.member.all_gather(&self.group, bytes)
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// Everyone gets the bytes that `root` gives; what the others give does not matter.
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
        self.member.finish()
    }

    pub(crate) fn fail(&self, why: &str) {
        self.member.fail(why);
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

/// This machine's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "unknown-host".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests;
