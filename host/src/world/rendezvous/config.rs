//! The settings of a rendezvous.

use std::io;
use std::time::Duration;

use super::relay::Ends;
use super::token::{Token, nonce};
use super::wire::{Hello, MissingRanks, PROTOCOL, Peer};
use crate::error::{Error, WorldError};
use crate::world::env::Launched;

/// The address of a job's rendezvous, and this process's rank.
#[derive(Clone, Debug)]
pub(crate) struct RendezvousConfig {
    pub host: String,
    pub port: u16,
    pub job: String,
    pub rank: usize,
    pub n_ranks: usize,
    /// How long rank 0 waits for the others, and they for rank 0.
    pub timeout: Duration,
    /// How long a call may wait for the other ranks, and how long each may be silent.
    pub deadline: Option<Duration>,
    pub peer: Peer,
    /// The job's secret.
    pub token: Option<Token>,
    /// The descriptor of a socket that already listens on this port; for rank 0 only.
    pub listener: Option<i32>,
}

impl RendezvousConfig {
    pub(crate) fn new(launched: Launched, peer: Peer) -> Self {
        let Launched { rank, n_ranks, host, port, job, timeout, deadline, .. } = launched;
        let (token, listener) = (launched.token, launched.listener);
        Self { host, port, job, rank, n_ranks, timeout, deadline, peer, token, listener }
    }

    pub(super) fn address(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// Returns the error of an address that the job cannot have.
    pub(super) fn unresolved(&self, error: &io::Error) -> Error {
        self.error(format!(
            "MASTER_ADDR, or what the launcher says instead, has no address: {error}"
        ))
    }

    pub(super) fn error(&self, why: impl ToString) -> Error {
        Error::World(WorldError::Rendezvous { address: self.address(), why: why.to_string() })
    }

    pub(super) fn missing(&self, ranks: MissingRanks) -> Error {
        let MissingRanks { missing, waited_ms, notes } = ranks;
        let waited = Duration::from_millis(waited_ms);
        Error::World(WorldError::RanksMissing { missing, address: self.address(), waited, notes })
    }

    /// Returns the first message of a rank that has connected to rank 0, and listens at `port` for
    /// the remaining ranks after a loss.
    pub(super) fn hello(&self, ends: Ends, port: u16) -> io::Result<Hello> {
        let Self { rank, n_ranks, .. } = *self;
        let (job, peer) = (self.job.clone(), self.peer.clone());
        let nonce = self.token.as_ref().map(|_| nonce()).transpose()?;
        Ok(Hello { protocol: PROTOCOL, job, rank, n_ranks, peer, port, ends, nonce })
    }
}
