//! Contexts and their operations: put, get, signal.

use std::sync::Arc;

use crate::abi::{MAX_REQUESTS, Opaque, SIGNAL_ADD, SIGNAL_INC};
use crate::comm::{Comm, Peer};
use crate::connection::LocalRank;
use crate::error::{Error, Result};
use crate::region::id_of;
use crate::remote::{RemoteKind, RemoteOp, RemoteSignal};
use crate::request::{ContextId, Request};
use crate::transfer::{Buffer, Data, Source, Transfer};

/// The plugin's `max_recvs`, a power of two by which NCCL multiplies [`MAX_REQUESTS`].
pub(crate) const MAX_RECVS: usize = 4;

/// Contexts of a connection. NCCL: `rmaCtx`.
pub(crate) struct Context {
    pub(crate) comm: Arc<Comm>,
    id: ContextId,
    n_contexts: usize,
    /// Maximum outstanding requests of the contexts.
    requests: usize,
}

impl AsRef<Comm> for Context {
    fn as_ref(&self) -> &Comm {
        &self.comm
    }
}

/// A location in a region: NCCL's handle, and an offset in bytes.
#[derive(Clone, Copy)]
pub(crate) struct RegionOffset {
    region: Opaque,
    offset: u64,
}

impl RegionOffset {
    pub(crate) fn new(region: Opaque, offset: u64) -> Self {
        Self { region, offset }
    }
}

/// NCCL's parameters of a signal.
#[derive(Clone, Copy)]
pub(crate) struct SignalRequest {
    pub(crate) at: RegionOffset,
    pub(crate) value: u64,
    pub(crate) operation: u32,
}

impl SignalRequest {
    fn to_remote(self) -> Result<RemoteSignal> {
        let add = match self.operation {
            SIGNAL_INC => 1,
            SIGNAL_ADD => self.value,
            other => return Err(Error::Argument(format!("no signal operation {other}"))),
        };
        Ok(RemoteSignal { region: id_of(self.at.region)?, offset: self.at.offset, add })
    }
}

impl Context {
    /// Returns `count` contexts, with capacity for their requests.
    pub(crate) fn new(comm: &Arc<Comm>, count: i32) -> Result<Self> {
        let n_contexts = usize::try_from(count)
            .map_err(|_| Error::Argument(format!("cannot create {count} contexts")))?;
        let requests = n_contexts * comm.n_ranks() * MAX_REQUESTS * MAX_RECVS;
        let id = comm.reserve_requests(requests);
        Ok(Self { comm: Arc::clone(comm), id, n_contexts, requests })
    }

    fn require(&self, context: i32) -> Result<()> {
        if usize::try_from(context).is_ok_and(|context| context < self.n_contexts) {
            return Ok(());
        }
        Err(Error::Argument(format!("no context {context} of {}", self.n_contexts)))
    }

    /// Puts `bytes` bytes from `from` on this rank to `to` on `rank`, then signals there.
    pub(crate) fn put(
        &self,
        context: i32,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: u32,
        signal: Option<SignalRequest>,
    ) -> Result<Opaque> {
        let comm = &*self.comm;
        comm.guarded(|| {
            self.require(context)?;
            let signal = signal.map(SignalRequest::to_remote).transpose()?;
            match comm.peer(rank)? {
                Peer::Local(peer) => {
                    let data = match bytes {
                        0 => Data::None,
                        _ => Data::of(
                            comm.me.source(from, bytes, peer)?,
                            peer.range(to, bytes)?,
                            bytes,
                        ),
                    };
                    let signal = peer.regions.signal_of(signal)?;
                    comm.track(self.id, || {
                        let sequence = peer.inbound.submit(Transfer { data, signal });
                        Ok(Request::Inbound { rank: rank as usize, sequence })
                    })
                }
                Peer::Remote(link) => {
                    let (region, kind) = match bytes {
                        // Without bytes the owner reads no region.
                        0 => (0, RemoteKind::Put(None)),
                        _ => {
                            (id_of(to.region)?, RemoteKind::Put(Some(comm.me.range(from, bytes)?)))
                        }
                    };
                    let op = RemoteOp { kind, bytes, region, offset: to.offset, signal };
                    let rank = rank as usize;
                    comm.track(self.id, || Ok(Request::Link { rank, sequence: link.submit(op)? }))
                }
            }
        })
    }

    /// Gets `bytes` bytes from `from` on `rank` to `to` on this rank.
    pub(crate) fn get(
        &self,
        context: i32,
        from: RegionOffset,
        bytes: usize,
        to: RegionOffset,
        rank: u32,
    ) -> Result<Opaque> {
        let comm = &*self.comm;
        comm.guarded(|| {
            self.require(context)?;
            let buffer = comm.me.range(to, bytes)?;
            match comm.peer(rank)? {
                Peer::Local(peer) => {
                    let data = match bytes {
                        0 => Data::None,
                        _ => Data::of(peer.source(from, bytes, &comm.me)?, buffer, bytes),
                    };
                    comm.track(self.id, || {
                        let sequence = comm.me.inbound.submit(Transfer { data, signal: None });
                        Ok(Request::Inbound { rank: comm.rank, sequence })
                    })
                }
                Peer::Remote(link) => {
                    let (region, kind) = (id_of(from.region)?, RemoteKind::Get(buffer));
                    let op = RemoteOp { kind, bytes, region, offset: from.offset, signal: None };
                    let rank = rank as usize;
                    comm.track(self.id, || Ok(Request::Link { rank, sequence: link.submit(op)? }))
                }
            }
        })
    }
}

impl LocalRank {
    fn range(&self, at: RegionOffset, bytes: usize) -> Result<Buffer> {
        self.regions.range(id_of(at.region)?, at.offset, bytes)
    }

    /// Returns a source on this rank for a copy to `target`.
    fn source(&self, at: RegionOffset, bytes: usize, target: &LocalRank) -> Result<Source> {
        let device = target.device().number;
        self.regions.source(id_of(at.region)?, at.offset, bytes, &self.staging, device)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // NCCL next frees memory that the requests use.
        self.comm.release_requests(self.id, self.requests);
        // Its thread makes no progress for other processes any more.
        self.comm.finish_incoming();
    }
}
