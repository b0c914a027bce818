//! How ranks find each other and stay in touch: the environment, the rendezvous, local processes, the world.
//!
//! A rendezvous is what NCCL needs before it exists: one exchange of bytes between all ranks, again and again, and the
//! news that a rank is gone. Ranks that are threads meet in memory ([`hub`]), ranks that are processes over TCP
//! ([`join`], [`tcp`]), rank 0 being the hub of the others.

pub(crate) mod env;
pub(crate) mod hub;
pub(crate) mod join;
pub(crate) mod rank;
pub(crate) mod spawn;
pub(crate) mod tcp;
mod wire;
pub(crate) mod world;

use std::sync::Arc;

use crate::context::Health;
use crate::{Error, Result};

/// One rank's place in a rendezvous.
pub(crate) trait Member: Send + Sync {
    /// Gives `bytes` and gets what every rank gave, in order of ranks. Every rank takes part.
    fn all_gather(&self, bytes: &[u8]) -> Result<Arc<Vec<Vec<u8>>>>;

    /// This rank has done its work; returns when all have.
    fn finish(&self) -> Result<()>;

    /// This rank cannot go on: it is lost, to itself as well, and the others are told why.
    fn fail(&self, why: &str);

    fn health(&self) -> &Arc<Health>;
}

/// One rank's end of the rendezvous.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    rank: usize,
    /// The host of every rank.
    hosts: Arc<[String]>,
    member: Arc<dyn Member>,
}

impl Rendezvous {
    pub(crate) fn new(rank: usize, hosts: Vec<String>, member: Arc<dyn Member>) -> Self {
        Self { rank, hosts: hosts.into(), member }
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

    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Arc<Vec<Vec<u8>>>> {
        // What all ranks give goes back in one frame.
        let limit = wire::MAX_PAYLOAD / self.n_ranks() - size_of::<u32>();
        if bytes.len() > limit {
            return Err(Error::invalid(format!(
                "{} bytes in an exchange of {} ranks; at most {limit} a rank fit",
                bytes.len(),
                self.n_ranks()
            )));
        }
        self.member.all_gather(bytes)
    }

    pub(crate) fn barrier(&self) -> Result<()> {
        self.member.all_gather(&[]).map(drop)
    }

    /// Everyone gets the bytes that `root` gives; what the others give does not matter.
    pub(crate) fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        if root >= self.n_ranks() {
            let n_ranks = self.n_ranks();
            return Err(Error::invalid(format!("rank {root} is not one of {n_ranks} ranks")));
        }
        let given = if self.rank == root { bytes } else { &[] };
        let all = self.member.all_gather(given)?;
        all.get(root).cloned().ok_or_else(|| Error::invalid("an exchange left out its root"))
    }

    pub(crate) fn finish(&self) -> Result<()> {
        self.member.finish()
    }

    pub(crate) fn fail(&self, why: &str) {
        self.member.fail(why);
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
