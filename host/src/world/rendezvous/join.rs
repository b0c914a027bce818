//! How ranks that are processes find each other: rank 0 listens ([`acceptor`]), everyone else
//! introduces itself there ([`visit`]), and when all are there each learns who the others are.
//!
//! Whether all came is for rank 0 to say. While it waits it says so again and again to those who
//! are there, and they wait with it, however long ago they started; when its time is up it tells
//! everyone who is missing.

use std::sync::Arc;
use std::time::Duration;

use super::hub::{Hub, ThreadMember};
use super::tcp::{ClientMember, RootMember};
use super::wire::{Hello, MissingRanks, PROTOCOL, Peer};
use super::{Member, Rendezvous, acceptor, visit};
use crate::error::{Error, NcclError, Result, WorldError};
use crate::machine::Machine;
use crate::world::env::Launched;

/// Where and as whom to meet.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub host: String,
    pub port: u16,
    pub job: String,
    pub rank: usize,
    pub n_ranks: usize,
    /// How long rank 0 waits for the others, and they for rank 0.
    pub timeout: Duration,
    pub peer: Peer,
    /// The descriptor of a socket that listens at this port already; rank 0's alone.
    pub listener: Option<i32>,
}

impl Meeting {
    pub(crate) fn new(launched: Launched, peer: Peer) -> Self {
        let Launched { rank, n_ranks, host, port, job, timeout, listener, .. } = launched;
        Self { host, port, job, rank, n_ranks, timeout, peer, listener }
    }

    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    pub(super) fn error(&self, why: impl ToString) -> Error {
        Error::World(WorldError::Rendezvous { address: self.address(), why: why.to_string() })
    }

    pub(super) fn missing(&self, news: MissingRanks) -> Error {
        let MissingRanks { missing, waited_ms, notes } = news;
        let waited = Duration::from_millis(waited_ms);
        Error::World(WorldError::RanksMissing { missing, address: self.address(), waited, notes })
    }

    pub(super) fn hello(&self) -> Hello {
        let (job, peer) = (self.job.clone(), self.peer.clone());
        Hello { protocol: PROTOCOL, job, rank: self.rank, n_ranks: self.n_ranks, peer }
    }

    /// Meets the other ranks.
    ///
    /// # Errors
    ///
    /// [`WorldError::RanksMissing`] after the deadline, [`NcclError::VersionsDiffer`],
    /// [`WorldError::Rendezvous`] when rank 0 does not let this rank in.
    pub(crate) fn join(&self) -> Result<Rendezvous> {
        let (peers, member): (Vec<Peer>, Arc<dyn Member>) = match (self.rank, self.n_ranks) {
            (_, 1) => {
                let member = ThreadMember::new(Arc::new(Hub::new(Machine::Gpus, 1)), 0);
                (vec![self.peer.clone()], Arc::new(member))
            }
            (0, _) => {
                let (peers, streams) = acceptor::wait_for_all(self)?;
                (peers, Arc::new(RootMember::start(streams).map_err(|error| self.error(error))?))
            }
            _ => {
                let (peers, stream) = visit::join(self)?;
                let member = ClientMember::start(stream, self.rank);
                (peers, Arc::new(member.map_err(|error| self.error(error))?))
            }
        };
        same_version(&peers)?;
        let hosts = peers.into_iter().map(|peer| peer.host).collect();
        Ok(Rendezvous::new(self.rank, hosts, member))
    }
}

/// Every rank makes this comparison with the same list, so every rank gets the same error.
fn same_version(peers: &[Peer]) -> Result<()> {
    let Some(first) = peers.first() else { return Ok(()) };
    match peers.iter().position(|peer| peer.nccl != first.nccl) {
        None => Ok(()),
        Some(other) => Err(NcclError::VersionsDiffer {
            first: (0, first.version()),
            second: (other, peers[other].version()),
        }
        .into()),
    }
}
