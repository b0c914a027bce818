//! How the remaining ranks go on after a loss: they join again and make a world of their own, in
//! the order of their old ranks.
//!
//! Ranks that are threads meet in the [hub](super::hub). Ranks that are processes connect to the
//! first of them: from the beginning each listens at an address that all know, and a process that
//! has ended refuses connections. The first waits for all that neither are known to be lost nor
//! refuse, at most as long as for the first rendezvous; the others wait for it half as long, and
//! then for the next one half of the rest, since its process may be stopped or its host down. Ranks
//! that come later are excluded. More than half of the ranks must be left, or half of them with
//! rank 0 or after its process has ended, so that a world that falls into two parts does not go on
//! twice.

use std::sync::Arc;
use std::time::Instant;

use super::config::RendezvousConfig;
use super::connection::Connection;
use super::listen::Listeners;
use super::tcp::{TcpClient, TcpRoot};
use super::wire::{Member, Peer};
use super::{Hub, ThreadTransport, Transport, acceptor, connect};
use crate::error::{Error, NcclError, Result};
use crate::machine::Machine;

/// The ranks of a world, as one of them uses it.
pub(crate) struct JoinedWorld {
    pub rank: usize,
    pub hosts: Vec<String>,
    pub transport: Arc<dyn Transport>,
}

/// The ranks of a world of processes, and what this one needs to join those that are left.
pub(super) struct Members {
    /// The settings, with this process's rank.
    pub config: RendezvousConfig,
    /// The members in order; `rank` is that of the world before.
    pub list: Vec<Member>,
    /// Where this process listens.
    pub listeners: Listeners,
}

impl Members {
    /// Returns the members of a world; `list` has their ranks in the world of `config`.
    pub(super) fn new(
        config: &RendezvousConfig,
        list: Vec<Member>,
        listeners: Listeners,
    ) -> Result<Self> {
        let rank = list.iter().position(|member| member.rank == config.rank);
        let rank = rank.ok_or_else(|| config.error("this rank is not one of those that joined"))?;
        same_version(&list)?;
        let config = RendezvousConfig { rank, n_ranks: list.len(), ..config.clone() };
        Ok(Self { config, list, listeners })
    }

    /// Returns the world whose rank 0 this is, with the connections to the others.
    pub(super) fn start_root(self, connections: Vec<Connection>) -> Result<JoinedWorld> {
        let (config, hosts) = (self.config.clone(), self.hosts());
        if hosts.len() == 1 {
            return Ok(single_rank(&config));
        }
        let root = TcpRoot::start(connections, self).map_err(|error| config.error(error))?;
        Ok(JoinedWorld { rank: config.rank, hosts, transport: Arc::new(root) })
    }

    /// Returns a world whose rank 0 is at the other end of `connection`.
    pub(super) fn start_client(self, connection: Connection) -> Result<JoinedWorld> {
        let (config, hosts) = (self.config.clone(), self.hosts());
        let client = TcpClient::start(connection, self).map_err(|error| config.error(error))?;
        Ok(JoinedWorld { rank: config.rank, hosts, transport: Arc::new(client) })
    }

    fn hosts(&self) -> Vec<String> {
        self.list.iter().map(|member| member.peer.host.clone()).collect()
    }

    /// Joins those that are left after the loss of rank `lost`.
    pub(super) fn join_survivors(&self, lost: usize) -> Result<JoinedWorld> {
        let own = self.config.rank;
        let mut left = self.config.timeout;
        for first in (0..own).filter(|rank| *rank != lost) {
            let (config, start) = (self.survivors_at(first), Instant::now());
            // Half of the time for each that is silent, so that some is left for the next one.
            if let Some((members, connection)) = connect::join_survivors(&config, left / 2)? {
                return members.start_client(connection);
            }
            left = left.saturating_sub(start.elapsed());
        }
        let config = self.survivors_at(own);
        let (members, connections) = acceptor::wait_for_survivors(&config, self, lost)?;
        members.start_root(connections)
    }

    /// Returns how the ranks that are left join, if rank `first` is the first of them.
    fn survivors_at(&self, first: usize) -> RendezvousConfig {
        let (host, port) = self.list[first].address.clone();
        let job = format!("{}/survivors", self.config.job);
        RendezvousConfig { host, port, job, listener: None, ..self.config.clone() }
    }
}

/// Returns the world of one rank.
pub(super) fn single_rank(config: &RendezvousConfig) -> JoinedWorld {
    let hub = Hub::new(Machine::Gpus, 1, config.deadline);
    let transport = Arc::new(ThreadTransport::new(Arc::new(hub), 0));
    JoinedWorld { rank: 0, hosts: vec![config.peer.host.clone()], transport }
}

/// Fails if NCCL's versions differ. Every rank compares the same list, and gets the same error.
fn same_version(members: &[Member]) -> Result<()> {
    let versions = || members.iter().map(|member| Peer::version(&member.peer));
    let Some(first) = versions().next() else { return Ok(()) };
    match versions().enumerate().find(|(_, version)| *version != first) {
        None => Ok(()),
        Some(second) => Err(Error::Nccl(NcclError::VersionsDiffer { first: (0, first), second })),
    }
}
