//! How ranks that are processes join: rank 0 listens ([`acceptor`]), the others connect to it
//! ([`connect`]), and when all have joined, rank 0 sends each the list of all. After a loss, the
//! remaining ranks do the same again ([`survivors`](super::survivors)).
//!
//! Only rank 0's timeout counts for ranks that have joined: while it waits, it sends them a message
//! every second, and they wait for the next one. When its timeout has passed, it tells them which
//! ranks are missing.

use super::config::RendezvousConfig;
use super::survivors::single_rank;
use super::{Rendezvous, acceptor, connect};
use crate::error::Result;
#[cfg(doc)]
use crate::error::{NcclError, WorldError};

impl RendezvousConfig {
    /// Joins the other ranks.
    ///
    /// # Errors
    ///
    /// [`WorldError::RanksMissing`] after the timeout, [`NcclError::VersionsDiffer`],
    /// [`WorldError::Rendezvous`] when rank 0 refuses this rank.
    pub(crate) fn join(&self) -> Result<Rendezvous> {
        let joined = match (self.rank, self.n_ranks) {
            (_, 1) => single_rank(self),
            (0, _) => {
                let (members, connections) = acceptor::wait_for_all(self)?;
                members.start_root(connections)?
            }
            _ => {
                let (members, connection) = connect::join(self)?;
                members.start_client(connection)?
            }
        };
        Ok(Rendezvous::new(joined))
    }
}
