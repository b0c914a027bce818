//! A rank's side of a connection, and the operations on it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::abi::{HANDLE_BYTES, MAX_REQUESTS, Opaque, SIGNAL_ADD, SIGNAL_INC};
use crate::config::Config;
use crate::endpoint::{Endpoint, Handle};
use crate::error::{Error, Result};
use crate::group::{Group, Member};
use crate::log;
use crate::region::{RegionId, id_of};
use crate::request::{Request, Requests};
use crate::transfer::{Data, Place, Source, Transfer};

/// What NCCL multiplies [`MAX_REQUESTS`] by.
pub(crate) const MAX_RECVS: usize = 4;
/// Polls between two looks at what only the driver knows.
const POLLS_A_CHECK: u64 = 1 << 14;

/// A rank of a connection. NCCL: `collComm`.
pub(crate) struct Comm {
    group: Arc<Group>,
    config: Config,
    rank: usize,
    me: Arc<Member>,
    n_ranks: usize,
    requests: Mutex<Requests>,
    polls: AtomicU64,
}

/// A context of a connection. NCCL: `rmaCtx`.
pub(crate) struct Context {
    pub(crate) comm: Arc<Comm>,
    n_contexts: usize,
}

/// A range of a region: the offset is in bytes.
#[derive(Clone, Copy)]
pub(crate) struct At {
    pub(crate) region: Opaque,
    pub(crate) offset: u64,
}

/// A signal as NCCL asks for it.
#[derive(Clone, Copy)]
pub(crate) struct Signalled {
    pub(crate) at: At,
    pub(crate) value: u64,
    pub(crate) operation: u32,
}

impl Comm {
    /// Meets the other ranks. `handles` is in order of rank.
    pub(crate) fn connect(
        endpoint: &Endpoint,
        handles: &[[u8; HANDLE_BYTES]],
        rank: usize,
    ) -> Result<Arc<Self>> {
        let handles = handles.iter().enumerate();
        let handles = handles
            .map(|(rank, bytes)| Handle::from_bytes(bytes, rank))
            .collect::<Result<Vec<_>>>()?;
        let mine = endpoint.handle;
        if handles.get(rank) != Some(&mine) {
            return Err(Error::Argument(format!("the handle of rank {rank} is not this rank's")));
        }
        for (other, handle) in handles.iter().enumerate() {
            if !handle.same_host(&mine) {
                return Err(Error::Unserved(format!(
                    "rank {other} is on another host than rank {rank}: this plugin serves the \
                     ranks of one host; across hosts GIN needs RDMA network cards"
                )));
            }
        }
        let config = endpoint.setup.config;
        let deadline = Instant::now() + config.timeout;
        let me = Arc::new(Member::new(&endpoint.setup, rank)?);
        let group = Group::of(handles[0].key(), handles.len())?;
        group.join(rank, Arc::clone(&me))?;
        let here = handles.iter().filter(|handle| handle.same_process(&mine)).count();
        group.wait_for(here, deadline)?;
        log::debug(format_args!("rank {rank} of {}: connected", handles.len()));
        Ok(Arc::new(Self {
            group,
            config,
            rank,
            me,
            n_ranks: handles.len(),
            requests: Mutex::default(),
            polls: AtomicU64::new(0),
        }))
    }

    pub(crate) fn register(
        &self,
        base: Opaque,
        bytes: usize,
        memory: i32,
        flags: u64,
    ) -> Result<Opaque> {
        let handle = self.me.regions.add(base, bytes, memory, flags)?;
        log::debug(format_args!(
            "rank {}: region {} at {base:?}, {bytes} bytes, memory {memory}, flags {flags}",
            self.rank,
            handle as usize - 1
        ));
        Ok(handle)
    }

    pub(crate) fn deregister(&self, handle: Opaque) -> Result<()> {
        self.me.regions.remove(handle)
    }

    /// Closes this rank's side. What others have on the way to it still completes.
    pub(crate) fn close(&self) {
        self.me.leave();
        log::debug(format_args!("rank {}: closed", self.rank));
    }

    /// Runs an operation, unless the connection has failed; what fails here has failed for good.
    fn working<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.group.failed()
            && let Some(fault) = self.group.fault()
        {
            return Err(fault);
        }
        operation().map_err(|error| self.group.fail(error))
    }

    /// Records what failed outside of an operation.
    pub(crate) fn fail(&self, error: Error) {
        self.group.fail(error);
    }

    pub(crate) fn failed(&self) -> bool {
        self.group.failed()
    }

    fn peer(&self, rank: u32) -> Result<&Arc<Member>> {
        let member = self.group.member(rank as usize).ok_or_else(|| {
            Error::Argument(format!("rank {rank} of {} is out of range", self.n_ranks))
        })?;
        if member.has_left() {
            return Err(Error::Remote(format!("rank {rank} has left the connection")));
        }
        Ok(member)
    }

    /// Where the data of `owner` is.
    fn source(owner: &Member, region: RegionId, offset: u64, bytes: usize) -> Result<Source> {
        let staging = Arc::clone(&owner.staging);
        Ok(match owner.regions.range(region, offset, bytes)? {
            Place::Device(address) => Source::Device { staging, address },
            Place::Host(address) | Place::Pinned(address) => Source::Host { staging, address },
        })
    }

    fn keep(&self, submit: impl FnOnce() -> Result<Request>) -> Result<Opaque> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.require_room()?;
        requests.add(submit()?)
    }

    /// Whether a request is complete; if so, its handle means nothing any more.
    pub(crate) fn test(&self, handle: Opaque) -> Result<bool> {
        self.working(|| {
            let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            let done = match requests.get(handle)? {
                Request::Lane { rank, sequence } => match self.group.member(rank) {
                    Some(member) => member.lane.done(sequence),
                    None => return Err(Error::Internal(format!("no lane into rank {rank}"))),
                },
                Request::Link { rank, .. } => {
                    return Err(Error::Internal(format!("no link to rank {rank}")));
                }
            };
            if done {
                requests.remove(handle);
            }
            Ok(done)
        })
    }

    /// Moves on what waits, whoever it is for.
    pub(crate) fn progress(&self) -> Result<()> {
        self.working(|| {
            let check =
                self.polls.fetch_add(1, Ordering::Relaxed) % POLLS_A_CHECK == POLLS_A_CHECK - 1;
            for member in self.group.members() {
                member.lane.progress()?;
                if check {
                    member.lane.check()?;
                }
            }
            Ok(())
        })
    }
}

impl Context {
    /// `count` contexts, with room for the requests that NCCL may have on them.
    pub(crate) fn new(comm: &Arc<Comm>, count: i32) -> Result<Self> {
        let n_contexts =
            usize::try_from(count).map_err(|_| Error::Argument(format!("{count} contexts")))?;
        let room = n_contexts * comm.n_ranks * MAX_REQUESTS * MAX_RECVS;
        comm.requests.lock().unwrap_or_else(PoisonError::into_inner).grow(room);
        Ok(Self { comm: Arc::clone(comm), n_contexts })
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
            let peer = comm.peer(rank)?;
            let data = if bytes == 0 {
                Data::None
            } else {
                let source = Comm::source(&comm.me, id_of(from.region)?, from.offset, bytes)?;
                let place = peer.regions.range(id_of(to.region)?, to.offset, bytes)?;
                Data::of(source, place, bytes)
            };
            let signal = match signal {
                None => None,
                Some(Signalled { at, value, operation }) => {
                    let add = match operation {
                        SIGNAL_INC => 1,
                        SIGNAL_ADD => value,
                        other => {
                            return Err(Error::Argument(format!("signal operation {other}")));
                        }
                    };
                    Some(peer.regions.signal(id_of(at.region)?, at.offset, add)?)
                }
            };
            comm.keep(|| {
                let sequence = peer.lane.submit(Transfer { data, signal })?;
                Ok(Request::Lane { rank: rank as usize, sequence })
            })
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
            let peer = comm.peer(rank)?;
            let data = if bytes == 0 {
                Data::None
            } else {
                let source = Comm::source(peer, id_of(from.region)?, from.offset, bytes)?;
                let place = comm.me.regions.range(id_of(to.region)?, to.offset, bytes)?;
                Data::of(source, place, bytes)
            };
            comm.keep(|| {
                let sequence = comm.me.lane.submit(Transfer { data, signal: None })?;
                Ok(Request::Lane { rank: comm.rank, sequence })
            })
        })
    }
}
