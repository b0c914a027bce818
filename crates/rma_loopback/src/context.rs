//! The operations of a context.

use std::sync::Arc;

use crate::abi::{MAX_REQUESTS, Opaque, SIGNAL_ADD, SIGNAL_INC};
use crate::comm::{Comm, Peer};
use crate::error::{Error, Result};
use crate::group::Member;
use crate::region::id_of;
use crate::remote::{Asked, Job, RemoteSignal};
use crate::request::{ContextId, Request};
use crate::transfer::{Data, Place, Source, Transfer};

/// What NCCL multiplies [`MAX_REQUESTS`] by.
pub(crate) const MAX_RECVS: usize = 4;

/// Contexts of a connection. NCCL: `rmaCtx`.
pub(crate) struct Context {
    pub(crate) comm: Arc<Comm>,
    id: ContextId,
    n_contexts: usize,
    /// Requests that NCCL may have outstanding on them.
    room: usize,
}

impl AsRef<Comm> for Context {
    fn as_ref(&self) -> &Comm {
        &self.comm
    }
}

/// A place in a region, named as NCCL names it: the offset is in bytes.
#[derive(Clone, Copy)]
pub(crate) struct At {
    region: Opaque,
    offset: u64,
}

impl At {
    pub(crate) fn new(region: Opaque, offset: u64) -> Self {
        Self { region, offset }
    }
}

/// A signal as NCCL asks for it.
#[derive(Clone, Copy)]
pub(crate) struct Signalled {
    pub(crate) at: At,
    pub(crate) value: u64,
    pub(crate) operation: u32,
}

impl Signalled {
    fn lower(self) -> Result<RemoteSignal> {
        let add = match self.operation {
            SIGNAL_INC => 1,
            SIGNAL_ADD => self.value,
            other => return Err(Error::Argument(format!("signal operation {other}"))),
        };
        Ok(RemoteSignal { region: id_of(self.at.region)?, offset: self.at.offset, add })
    }
}

impl Context {
    /// `count` contexts, with room for the requests that NCCL may have on them.
    pub(crate) fn new(comm: &Arc<Comm>, count: i32) -> Result<Self> {
        let n_contexts =
            usize::try_from(count).map_err(|_| Error::Argument(format!("{count} contexts")))?;
        let room = n_contexts * comm.n_ranks() * MAX_REQUESTS * MAX_RECVS;
        let id = comm.make_room(room);
        Ok(Self { comm: Arc::clone(comm), id, n_contexts, room })
    }

    fn require(&self, context: i32) -> Result<()> {
        if usize::try_from(context).is_ok_and(|context| context < self.n_contexts) {
            return Ok(());
        }
        Err(Error::Argument(format!("context {context} of {}", self.n_contexts)))
    }

    /// Puts `bytes` from `from` of this rank to `to` of `rank`, then signals there.
    pub(crate) fn put(
        &self,
        context: i32,
        from: At,
        bytes: usize,
        to: At,
        rank: u32,
        signal: Option<Signalled>,
    ) -> Result<Opaque> {
        let comm = &*self.comm;
        comm.working(|| {
            self.require(context)?;
            let signal = signal.map(Signalled::lower).transpose()?;
            match comm.peer(rank)? {
                Peer::Here(peer) => {
                    let data = match bytes {
                        0 => Data::None,
                        _ => Data::of(
                            comm.me.source(from, bytes, peer)?,
                            peer.range(to, bytes)?,
                            bytes,
                        ),
                    };
                    let signal = peer.regions.signal_of(signal)?;
                    comm.keep(self.id, || {
                        let sequence = peer.lane.submit(Transfer { data, signal })?;
                        Ok(Request::Lane { rank: rank as usize, sequence })
                    })
                }
                Peer::Elsewhere(link) => {
                    let (region, asked) = match bytes {
                        0 => (0, Asked::Put(None)),
                        _ => (id_of(to.region)?, Asked::Put(Some(comm.me.range(from, bytes)?))),
                    };
                    let job = Job { asked, bytes, region, offset: to.offset, signal };
                    let rank = rank as usize;
                    comm.keep(self.id, || Ok(Request::Link { rank, ticket: link.submit(job)? }))
                }
            }
        })
    }

    /// Gets `bytes` from `from` of `rank` to `to` of this rank.
    pub(crate) fn get(
        &self,
        context: i32,
        from: At,
        bytes: usize,
        to: At,
        rank: u32,
    ) -> Result<Opaque> {
        let comm = &*self.comm;
        comm.working(|| {
            self.require(context)?;
            let place = comm.me.range(to, bytes)?;
            match comm.peer(rank)? {
                Peer::Here(peer) => {
                    let data = match bytes {
                        0 => Data::None,
                        _ => Data::of(peer.source(from, bytes, &comm.me)?, place, bytes),
                    };
                    comm.keep(self.id, || {
                        let sequence = comm.me.lane.submit(Transfer { data, signal: None })?;
                        Ok(Request::Lane { rank: comm.rank, sequence })
                    })
                }
                Peer::Elsewhere(link) => {
                    let (region, asked) = (id_of(from.region)?, Asked::Get(place));
                    let job = Job { asked, bytes, region, offset: from.offset, signal: None };
                    let rank = rank as usize;
                    comm.keep(self.id, || Ok(Request::Link { rank, ticket: link.submit(job)? }))
                }
            }
        })
    }
}

impl Member {
    fn range(&self, at: At, bytes: usize) -> Result<Place> {
        self.regions.range(id_of(at.region)?, at.offset, bytes)
    }

    /// Data of this rank, to be copied to `target`.
    fn source(&self, at: At, bytes: usize, target: &Member) -> Result<Source> {
        let device = target.device().number;
        self.regions.source(id_of(at.region)?, at.offset, bytes, &self.staging, device)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // NCCL frees next what the requests read and write.
        self.comm.leave_room(self.id, self.room);
        self.comm.settle();
    }
}
