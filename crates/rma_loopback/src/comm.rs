//! A rank's side of a connection: setup, progress, failure and close.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::{HANDLE_BYTES, Opaque};
use crate::connection::{Connection, LocalRank};
use crate::endpoint::{Endpoint, Handle};
use crate::error::{Error, Result};
use crate::log;
use crate::region::{Region, id_of};
use crate::remote::{Link, connect_links};
use crate::request::{ContextId, Request, Requests};

/// The number of calls of `progress` for each call of `check`, which reads the clock.
const POLLS_PER_CHECK: u64 = 256;
/// Interval of the checks for failed copies and for the end of another process.
const CHECK_EVERY: Duration = Duration::from_millis(10);
/// The longest time for which a closing rank executes earlier requests of other processes.
const FINISH_WITHIN: Duration = Duration::from_secs(1);
/// The longest time that a rank waits for operations in flight before it drops pending ones.
const END_WITHIN: Duration = Duration::from_secs(4);
/// The longest time that a rank waits for idle streams after the connection has failed.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// A rank of a connection. NCCL: `collComm`.
pub(crate) struct Comm {
    connection: Arc<Connection>,
    pub(crate) rank: usize,
    pub(crate) me: Arc<LocalRank>,
    /// Links to the ranks of other processes, by rank.
    links: Vec<Option<Link>>,
    requests: Mutex<Requests>,
    /// The number of calls of `progress`.
    polls: AtomicU64,
    /// The time of the last `check`; the thread that checks holds the lock.
    checked: Mutex<Instant>,
    /// The time at which pending operations were dropped, after a failure: no later wait for idle
    /// streams goes beyond [`STOP_WITHIN`] from then.
    stopped: OnceLock<Instant>,
}

/// A rank of the connection, in this process or in another.
pub(crate) enum Peer<'a> {
    Local(&'a Arc<LocalRank>),
    Remote(&'a Link),
}

impl Comm {
    /// Connects to the other ranks. `handles` is in rank order.
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
                return Err(Error::Unsupported(format!(
                    "rank {other} is on another host than rank {rank}: this plugin serves the \
                     ranks of one host; across hosts GIN needs RDMA network cards"
                )));
            }
        }
        let locals = handles.iter().filter(|handle| handle.same_process(&mine)).count();
        let connection = Connection::of(handles[0].key(), handles.len(), locals)?;
        let joined = Self::join(endpoint, &handles, rank, &connection);
        // An error also ends the waits of this process's other ranks.
        joined.map_err(|error| connection.fail(error))
    }

    fn join(
        endpoint: &Endpoint,
        handles: &[Handle],
        rank: usize,
        connection: &Arc<Connection>,
    ) -> Result<Arc<Self>> {
        let deadline = Instant::now() + endpoint.setup.config.timeout;
        let me = Arc::new(LocalRank::new(&endpoint.setup, rank)?);
        connection.join(rank, Arc::clone(&me))?;
        let mut links = handles.iter().map(|_| None).collect::<Vec<_>>();
        let linked = connect_links(endpoint, handles, rank, &me, connection, deadline, &mut links);
        let n_remote = links.iter().flatten().count();
        linked.and_then(|()| connection.wait_for(handles.len() - n_remote, deadline)).map_err(
            |error| {
                let first = connection.fail(error);
                links.iter().flatten().for_each(|link| link.send_failure(&first));
                first
            },
        )?;
        log::debug(format_args!(
            "rank {rank} of {}: connected, {n_remote} of them in other processes",
            handles.len()
        ));
        Ok(Arc::new(Self {
            connection: Arc::clone(connection),
            rank,
            me,
            links,
            requests: Mutex::default(),
            polls: AtomicU64::new(0),
            checked: Mutex::new(Instant::now()),
            stopped: OnceLock::new(),
        }))
    }

    pub(crate) fn n_ranks(&self) -> usize {
        self.links.len()
    }

    pub(crate) fn register(
        &self,
        base: Opaque,
        bytes: usize,
        memory: i32,
        flags: u64,
    ) -> Result<Opaque> {
        let own = self.me.device();
        let mut others: Vec<i32> =
            self.connection.locals().map(|local| local.device().number).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|other| *other != own.number);
        let region = Region::new(base, bytes, memory, flags, own, &others)?;
        let handle = self.me.regions.add(region);
        log::debug(format_args!(
            "rank {}: region {} at {base:?}, {bytes} bytes, memory {memory}, flags {flags}",
            self.rank,
            id_of(handle)?
        ));
        Ok(handle)
    }

    pub(crate) fn deregister(&self, handle: Opaque) -> Result<()> {
        self.drop_regions(vec![self.me.regions.remove(handle)?]);
        Ok(())
    }

    /// Drops regions once no copy uses their memory.
    fn drop_regions(&self, regions: Vec<Region>) {
        let queues: Vec<_> =
            self.connection.locals().map(|local| (local, local.inbound.accepted())).collect();
        let links: Vec<_> =
            self.links.iter().flatten().map(|link| (link, link.accepted())).collect();
        let unused = self.progress_until("a region was deregistered", || {
            queues.iter().all(|(local, last)| local.inbound.done(*last))
                && links.iter().all(|(link, last)| link.done(*last))
        });
        if !unused && regions.iter().any(Region::is_mapped_here) {
            // A copy may still use the plugin's mapping of a region, which is leaked.
            std::mem::forget(regions);
        }
    }

    /// Makes progress until operations are `done`; `why` is for the log. If they do not end within
    /// [`END_WITHIN`], the connection fails and pending operations are dropped. Returns whether no
    /// stream still uses the memory of those operations; the host no longer does in either case.
    fn progress_until(&self, why: &str, done: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + END_WITHIN;
        while !done() {
            if self.progress().is_err() {
                return self.drop_pending();
            }
            if Instant::now() > deadline {
                let rank = self.rank;
                let late = Error::Timeout(format!(
                    "operations of rank {rank} did not end within {END_WITHIN:?} after {why}: \
                     pending ones are dropped"
                ));
                log::error(self.fail(late));
                return self.drop_pending();
            }
            std::thread::yield_now();
        }
        true
    }

    /// Drops pending operations of this process, after a failure. Returns whether all streams
    /// become idle within [`STOP_WITHIN`].
    fn drop_pending(&self) -> bool {
        let deadline = *self.stopped.get_or_init(Instant::now) + STOP_WITHIN;
        self.links.iter().flatten().for_each(Link::cancel);
        self.connection.locals().for_each(|local| local.inbound.cancel());
        let is_idle = loop {
            let all = self.connection.locals().map(|rank| rank.is_idle());
            match all.collect::<Result<Vec<bool>>>() {
                Ok(all) if all.iter().all(|idle| *idle) => break true,
                Ok(_) if Instant::now() < deadline => std::thread::yield_now(),
                _ => break false,
            }
        };
        self.connection.locals().for_each(|rank| rank.set_stuck(!is_idle));
        is_idle
    }

    /// Executes the requests that other processes have published, before this rank closes.
    pub(crate) fn finish_incoming(&self) {
        let deadline = Instant::now() + FINISH_WITHIN;
        while !self.links.iter().flatten().all(Link::is_settled) && Instant::now() < deadline {
            if self.progress().is_err() {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Closes this rank's side. Earlier operations of other ranks into it still complete.
    pub(crate) fn close(&self) {
        self.finish_incoming();
        self.me.mark_closed();
        self.drop_regions(self.me.regions.clear());
        self.links.iter().flatten().for_each(Link::send_closed);
        log::debug(format_args!("rank {}: closed", self.rank));
    }

    /// Runs an operation, unless the connection has failed. An error fails the connection, and is
    /// sent to the other processes.
    pub(crate) fn guarded<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = match self.connection.fault() {
            Some(fault) => Err(fault.clone()),
            None => operation(),
        };
        result.map_err(|error| self.fail(error))
    }

    /// Fails the connection in all processes; returns its first error.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.connection.fail(error);
        for link in self.links.iter().flatten() {
            link.send_failure(&first);
        }
        first
    }

    pub(crate) fn failed(&self) -> bool {
        self.connection.fault().is_some()
    }

    pub(crate) fn peer(&self, rank: u32) -> Result<Peer<'_>> {
        let rank = rank as usize;
        if let Some(Some(link)) = self.links.get(rank) {
            return Ok(Peer::Remote(link));
        }
        let local = self.connection.local(rank).ok_or_else(|| {
            Error::Argument(format!("rank {rank} of {} is out of range", self.n_ranks()))
        })?;
        if local.is_closed() {
            return Err(Error::Remote(format!("rank {rank} has closed its connection")));
        }
        Ok(Peer::Local(local))
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves capacity for the requests of a new context.
    pub(crate) fn reserve_requests(&self, count: usize) -> ContextId {
        self.requests().reserve(count)
    }

    /// Waits for the requests of a context to end, and releases their capacity.
    pub(crate) fn release_requests(&self, context: ContextId, count: usize) {
        let outstanding = self.requests().outstanding_of(context);
        self.progress_until("a context was destroyed", || {
            // No error comes: these requests are to ranks that `peer` has found.
            outstanding.iter().all(|request| self.is_done(*request).unwrap_or(false))
        });
        self.requests().release(context, count);
    }

    /// Stores the request that `submit` creates for a context; returns its handle.
    pub(crate) fn track(
        &self,
        context: ContextId,
        submit: impl FnOnce() -> Result<Request>,
    ) -> Result<Opaque> {
        let mut requests = self.requests();
        requests.require_room()?;
        requests.add(context, submit()?)
    }

    /// Returns whether a request is complete; if so, its handle becomes invalid.
    pub(crate) fn test(&self, handle: Opaque) -> Result<bool> {
        self.guarded(|| {
            let mut requests = self.requests();
            let request = requests.get(handle)?;
            let done = self.is_done(request)?;
            if done {
                requests.remove(handle);
            }
            Ok(done)
        })
    }

    fn is_done(&self, request: Request) -> Result<bool> {
        let lost = || Error::Internal(format!("{request:?} belongs to no rank"));
        match request {
            Request::Inbound { rank, sequence } => {
                Ok(self.connection.local(rank).ok_or_else(lost)?.inbound.done(sequence))
            }
            Request::Link { rank, sequence } => {
                let link = self.links.get(rank).and_then(Option::as_ref);
                Ok(link.ok_or_else(lost)?.done(sequence))
            }
        }
    }

    /// Makes progress on all pending operations.
    pub(crate) fn progress(&self) -> Result<()> {
        self.guarded(|| {
            for link in self.links.iter().flatten() {
                link.progress()?;
            }
            // This also enqueues the transfers that the links have just submitted.
            self.me.inbound.progress()?;
            for local in self.connection.locals() {
                local.inbound.progress_for_absent()?;
            }
            let polls = self.polls.fetch_add(1, Ordering::Relaxed);
            if polls % POLLS_PER_CHECK == POLLS_PER_CHECK - 1 { self.check() } else { Ok(()) }
        })
    }

    /// Checks for failed copies and for the end of another process.
    fn check(&self) -> Result<()> {
        let Ok(mut checked) = self.checked.try_lock() else { return Ok(()) };
        if checked.elapsed() < CHECK_EVERY {
            return Ok(());
        }
        *checked = Instant::now();
        for local in self.connection.locals() {
            local.inbound.check()?;
        }
        self.me.staging.stream.is_idle()?;
        self.links.iter().flatten().try_for_each(Link::check)
    }
}
