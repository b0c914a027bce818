//! A rank's side of a connection: how it comes up, moves on, fails and ends.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::{HANDLE_BYTES, Opaque};
use crate::endpoint::{Endpoint, Handle};
use crate::error::{Error, Result};
use crate::group::{Group, Member};
use crate::log;
use crate::region::Region;
use crate::remote::{Link, meet};
use crate::request::{ContextId, Request, Requests};

/// Polls between two looks at the clock.
const POLLS_A_LOOK: u64 = 256;
/// Time between two looks at what is not seen by polling: failed copies, and the end of another
/// process.
const CHECK_EVERY: Duration = Duration::from_millis(10);
/// How long a rank that closes carries out what other processes have asked it for before.
const SETTLE_WITHIN: Duration = Duration::from_secs(1);
/// How long what is on the way may take to come to an end, before memory goes that it may look at.
const END_WITHIN: Duration = Duration::from_secs(4);
/// How long what is on streams may take, when the connection has failed and nothing more comes.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// A rank of a connection. NCCL: `collComm`.
pub(crate) struct Comm {
    group: Arc<Group>,
    pub(crate) rank: usize,
    pub(crate) me: Arc<Member>,
    /// To the ranks of other processes, by rank.
    links: Vec<Option<Link>>,
    requests: Mutex<Requests>,
    polls: AtomicU64,
    checked: Mutex<Instant>,
    /// When what waits was dropped, after a failure.
    stopped: OnceLock<Instant>,
}

/// Another rank, or this one.
pub(crate) enum Peer<'a> {
    Here(&'a Arc<Member>),
    Elsewhere(&'a Link),
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
        let group = Group::of(handles[0].key(), handles.len())?;
        let joined = Self::join(endpoint, &handles, rank, &group);
        // Ranks of this process need not wait for one that does not come.
        joined.map_err(|error| group.fail(error))
    }

    fn join(
        endpoint: &Endpoint,
        handles: &[Handle],
        rank: usize,
        group: &Arc<Group>,
    ) -> Result<Arc<Self>> {
        let deadline = Instant::now() + endpoint.setup.config.timeout;
        let me = Arc::new(Member::new(&endpoint.setup, rank)?);
        group.join(rank, Arc::clone(&me))?;
        let mut links = handles.iter().map(|_| None).collect::<Vec<_>>();
        let met = meet(endpoint, handles, rank, &me, group, deadline, &mut links);
        let elsewhere = links.iter().flatten().count();
        met.and_then(|()| group.wait_for(handles.len() - elsewhere, deadline)).map_err(
            |error| {
                let first = group.fail(error);
                links.iter().flatten().for_each(|link| link.tell_failure(&first));
                first
            },
        )?;
        log::debug(format_args!(
            "rank {rank} of {}: connected, {elsewhere} of them in other processes",
            handles.len()
        ));
        Ok(Arc::new(Self {
            group: Arc::clone(group),
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
            self.group.members().map(|member| member.device().number).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|other| *other != own.number);
        let region = Region::new(base, bytes, memory, flags, own, &others)?;
        let handle = self.me.regions.add(region);
        log::debug(format_args!(
            "rank {}: region {} at {base:?}, {bytes} bytes, memory {memory}, flags {flags}",
            self.rank,
            handle as usize - 1
        ));
        Ok(handle)
    }

    pub(crate) fn deregister(&self, handle: Opaque) -> Result<()> {
        self.forget(vec![self.me.regions.remove(handle)?]);
        Ok(())
    }

    /// Drops regions, when no copy uses their memory any more.
    fn forget(&self, regions: Vec<Region>) {
        let lanes: Vec<_> =
            self.group.members().map(|member| (member, member.lane.accepted())).collect();
        let links: Vec<_> =
            self.links.iter().flatten().map(|link| (link, link.accepted())).collect();
        let quiet = self.ends("a region was deregistered", || {
            lanes.iter().all(|(member, last)| member.lane.done(*last))
                && links.iter().all(|(link, last)| link.done(*last))
        });
        if !quiet && regions.iter().any(Region::is_mapped_here) {
            // A copy that never ends still has the address: the mapping stays.
            std::mem::forget(regions);
        }
    }

    /// Waits until operations are `done`, because of `why`, and moves on what waits. Where that
    /// does not come, the connection has failed: what waits is dropped. Whether nothing uses the
    /// memory of those operations any more; the host does not in any case.
    fn ends(&self, why: &str, done: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + END_WITHIN;
        while !done() {
            if self.progress().is_err() {
                return self.stop();
            }
            if Instant::now() > deadline {
                let rank = self.rank;
                let late = Error::Timeout(format!(
                    "operations of rank {rank} did not end within {END_WITHIN:?} after {why}: what \
                     waits is dropped"
                ));
                log::error(self.fail(late));
                return self.stop();
            }
            std::thread::yield_now();
        }
        true
    }

    /// Drops what waits in this process, after a failure. Whether all streams came to a good end
    /// soon after.
    fn stop(&self) -> bool {
        let deadline = *self.stopped.get_or_init(Instant::now) + STOP_WITHIN;
        self.links.iter().flatten().for_each(Link::cancel);
        self.group.members().for_each(|member| member.lane.cancel());
        let idle =
            |member: &Arc<Member>| Ok(member.lane.is_idle()? && member.staging.channel.is_idle()?);
        loop {
            let all = self.group.members().map(idle).collect::<Result<Vec<bool>>>();
            match all {
                Ok(all) if all.iter().all(|idle| *idle) => return true,
                Ok(_) if Instant::now() < deadline => std::thread::yield_now(),
                _ => return false,
            }
        }
    }

    /// Carries out what other processes have asked for, before this rank's progress ends.
    pub(crate) fn settle(&self) {
        let deadline = Instant::now() + SETTLE_WITHIN;
        while !self.links.iter().flatten().all(Link::is_settled) && Instant::now() < deadline {
            if self.progress().is_err() {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Closes this rank's side. What others have on the way to it still completes.
    pub(crate) fn close(&self) {
        self.settle();
        self.me.leave();
        self.forget(self.me.regions.clear());
        self.links.iter().flatten().for_each(Link::leave);
        log::debug(format_args!("rank {}: closed", self.rank));
    }

    /// Runs an operation, unless the connection has failed; what fails here has failed for good,
    /// and other processes hear of it.
    pub(crate) fn working<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let result = match self.group.fault() {
            Some(fault) => Err(fault.clone()),
            None => operation(),
        };
        result.map_err(|error| self.fail(error))
    }

    /// Records a failure, and returns the first.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let first = self.group.fail(error);
        for link in self.links.iter().flatten() {
            link.tell_failure(&first);
        }
        first
    }

    pub(crate) fn failed(&self) -> bool {
        self.group.fault().is_some()
    }

    pub(crate) fn peer(&self, rank: u32) -> Result<Peer<'_>> {
        let rank = rank as usize;
        if let Some(Some(link)) = self.links.get(rank) {
            return Ok(Peer::Elsewhere(link));
        }
        let member = self.group.member(rank).ok_or_else(|| {
            Error::Argument(format!("rank {rank} of {} is out of range", self.n_ranks()))
        })?;
        if member.has_left() {
            return Err(Error::Remote(format!("rank {rank} has left the connection")));
        }
        Ok(Peer::Here(member))
    }

    fn requests(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for the requests of a new context.
    pub(crate) fn make_room(&self, more: usize) -> ContextId {
        self.requests().grow(more)
    }

    /// Ends the requests of a context, and leaves their room to the next.
    pub(crate) fn leave_room(&self, context: ContextId, less: usize) {
        let live = self.requests().of(context);
        self.ends("a context was destroyed", || {
            live.iter().all(|request| self.is_done(*request).unwrap_or(false))
        });
        self.requests().leave(context, less);
    }

    /// Keeps the request that `submit` makes for a context.
    pub(crate) fn keep(
        &self,
        context: ContextId,
        submit: impl FnOnce() -> Result<Request>,
    ) -> Result<Opaque> {
        let mut requests = self.requests();
        requests.require_room()?;
        requests.add(context, submit()?)
    }

    /// Whether a request is complete; if so, its handle means nothing any more.
    pub(crate) fn test(&self, handle: Opaque) -> Result<bool> {
        self.working(|| {
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
        let lost = || Error::Internal(format!("{request:?} is of no rank"));
        match request {
            Request::Lane { rank, sequence } => {
                Ok(self.group.member(rank).ok_or_else(lost)?.lane.done(sequence))
            }
            Request::Link { rank, ticket } => {
                let link = self.links.get(rank).and_then(Option::as_ref);
                Ok(link.ok_or_else(lost)?.done(ticket))
            }
        }
    }

    /// Moves on what waits, whoever it is for.
    pub(crate) fn progress(&self) -> Result<()> {
        self.working(|| {
            for member in self.group.members() {
                member.lane.progress()?;
            }
            for link in self.links.iter().flatten() {
                link.progress()?;
            }
            let polls = self.polls.fetch_add(1, Ordering::Relaxed);
            if polls % POLLS_A_LOOK == POLLS_A_LOOK - 1 { self.check() } else { Ok(()) }
        })
    }

    /// Looks at what polling does not see, now and then.
    fn check(&self) -> Result<()> {
        let Ok(mut checked) = self.checked.try_lock() else { return Ok(()) };
        if checked.elapsed() < CHECK_EVERY {
            return Ok(());
        }
        *checked = Instant::now();
        for member in self.group.members() {
            member.lane.check()?;
        }
        self.me.staging.channel.is_idle()?;
        self.links.iter().flatten().try_for_each(Link::check)
    }
}
