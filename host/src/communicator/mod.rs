//! Communicators: ranks that share windows, device communicators and collectives.

mod create;
pub(crate) mod end;
pub(crate) mod handle;
mod teams;
pub(crate) mod watched;

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use devcomm_types::Element;

pub use self::create::ShrinkMode;
pub use self::end::AbortHandle;
use self::handle::{Entered, Handle, Status};
pub use self::teams::CftTeamMode;
use self::watched::watched;
use crate::bootstrap::Rendezvous;
use crate::dev_comm::{Facilities, Report, agree};
use crate::group::{Made, Noted, is_open, note, refuse_inside};
use crate::sys::nccl::Nccl;
use crate::sys::nccl::call::{Call, CommPtr, Out};
use crate::sys::nccl::calls;
use crate::{
    Context, DevCommRequirements, DevCommResource, Error, Library, Properties, Result, Stream,
    SymmetricBuffer, Window, WindowFlags,
};
use devcomm_sys::nccl::CommProperties;

/// One rank's end of a communicator. Clones are the same one; what is made from it keeps it alive.
///
/// It stays on the thread it was made on, whose current CUDA context is the rank's device. Methods marked *collective* are
/// called by every rank, in the same order. [`destroy`](Self::destroy) ends it together with the other ranks' and closes what
/// was made from it first; dropped last, it does that by itself. After a lost rank it is aborted.
///
/// NCCL: `ncclComm_t`.
#[doc(alias = "ncclComm_t")]
#[derive(Clone)]
pub struct Communicator {
    inner: Rc<Inner>,
}

pub(crate) struct Inner {
    handle: Arc<Handle>,
    end: End,
    rank: usize,
    n_ranks: usize,
    context: Context,
    library: Library,
    rendezvous: Option<Rendezvous>,
    /// What was made from it and is closed with it, in the order in which it was made.
    resources: RefCell<Vec<Weak<dyn Resource>>>,
}

/// Who ends a communicator, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The part of the program that made it.
    Foreign,
    /// We, when all ranks have finished.
    Together,
    /// We, without waiting for the other ranks: they belong to the same thread.
    OneByOne,
}

/// Something that a communicator closes at its end.
pub(crate) trait Resource {
    /// Closes it, once.
    fn close(&self) -> Result<()>;
}

/// Memory that NCCL holds for a communicator. NCCL: `ncclCommMemStat_t`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "ncclCommMemStat_t")]
pub enum MemoryStat {
    /// Bytes that a suspended communicator gives back. NCCL: `ncclStatGpuMemSuspend`.
    Suspendable = 0,
    /// 1 while the communicator is suspended. NCCL: `ncclStatGpuMemSuspended`.
    Suspended = 1,
    /// Bytes that it keeps all the time. NCCL: `ncclStatGpuMemPersist`.
    Persistent = 2,
    /// All bytes. NCCL: `ncclStatGpuMemTotal`.
    Total = 3,
}

impl Communicator {
    /// This rank, below [`n_ranks`](Self::n_ranks).
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Whether both are clones of one.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.handle(), other.handle())
    }

    /// Number of ranks.
    #[must_use]
    pub fn n_ranks(&self) -> usize {
        self.inner.n_ranks
    }

    /// The ordinal of this rank's GPU among the visible ones.
    #[must_use]
    pub fn device(&self) -> usize {
        self.inner.context.ordinal()
    }

    /// This rank's GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The NCCL in use.
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// NCCL's handle (`ncclComm_t`), for use with other libraries; NULL after its end.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.inner.handle.address()
    }

    /// Whether it has neither been ended nor aborted.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.inner.handle.status() < Status::Destroyed
    }

    /// What NCCL itself says about (rank, number of ranks, CUDA device).
    ///
    /// NCCL: `ncclCommUserRank`, `ncclCommCount`, `ncclCommCuDevice`.
    ///
    /// # Errors
    ///
    /// [`Error::CommunicatorEnded`], [`Error::Nccl`].
    #[doc(alias = "ncclCommUserRank")]
    #[doc(alias = "ncclCommCount")]
    #[doc(alias = "ncclCommCuDevice")]
    pub fn identity(&self) -> Result<(i32, i32, i32)> {
        Ok((
            self.ask(Out::new(0), calls::comm_rank)?,
            self.ask(Out::new(0), calls::comm_count)?,
            self.ask(Out::new(0), calls::comm_device)?,
        ))
    }

    /// What the communicator can do. NCCL: `ncclCommQueryProperties`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] from an older library, [`Error::CommunicatorEnded`], [`Error::Nccl`].
    #[doc(alias = "ncclCommQueryProperties")]
    pub fn properties(&self) -> Result<Properties> {
        self.bind()?;
        self.ask(Out::new(CommProperties::new()), calls::properties).map(Properties::from)
    }

    /// One number on the memory that NCCL holds for this communicator on this GPU: bytes, or 0 and 1.
    ///
    /// NCCL: `ncclCommMemStats`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], [`Error::CommunicatorEnded`], [`Error::Nccl`].
    #[doc(alias = "ncclCommMemStats")]
    pub fn memory_stat(&self, stat: MemoryStat) -> Result<u64> {
        self.bind()?;
        let entered = self.inner.handle.enter(&[Status::Live, Status::Suspended])?;
        let out = Out::new(0);
        entered.make(calls::mem_stat(entered.comm(), stat as i32, out.clone()))?;
        Ok(out.get())
    }

    /// Fails if an operation of this communicator failed in the background. NCCL: `ncclCommGetAsyncError`.
    ///
    /// # Errors
    ///
    /// [`Error::CommunicatorEnded`], [`Error::Nccl`].
    #[doc(alias = "ncclCommGetAsyncError")]
    pub fn async_error(&self) -> Result<()> {
        self.inner.handle.poll().map(drop)
    }

    /// Whether a non-blocking communicator has done what was asked of it last. A blocking one always has.
    ///
    /// NCCL: `ncclCommGetAsyncError`, which says `ncclInProgress` until then.
    ///
    /// # Errors
    ///
    /// As [`async_error`](Self::async_error).
    pub fn is_ready(&self) -> Result<bool> {
        self.inner.handle.poll()
    }

    /// Waits until a non-blocking communicator has done what was asked of it last.
    ///
    /// # Errors
    ///
    /// [`Error::DeadlinePassed`] after `limit`; [`Error::RankLost`]; as [`async_error`](Self::async_error).
    pub fn wait(&self, limit: Duration) -> Result<()> {
        self.context().poll(Some(limit), || self.is_ready())
    }

    /// Allocates `len` elements of device memory, zeroed, known to this rank only. Not collective.
    ///
    /// NCCL: `ncclMemAlloc`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a length of 0, [`Error::RankLost`], [`Error::Nccl`].
    #[doc(alias = "ncclMemAlloc")]
    pub fn mem_alloc<T: Element>(&self, len: usize) -> Result<SymmetricBuffer<T>> {
        self.bind()?;
        SymmetricBuffer::new(self.library(), self.context(), len)
    }

    /// Allocates a symmetric window of `len` elements, zeroed, and registers it with every rank. *Collective*; the ranks may
    /// ask for different lengths, and then keep to what the owner of each copy has.
    ///
    /// NCCL: `ncclMemAlloc`, `ncclCommWindowRegister` with `NCCL_WIN_COLL_SYMMETRIC`.
    ///
    /// # Errors
    ///
    /// As [`mem_alloc`](Self::mem_alloc) and [`register_window`](Self::register_window).
    #[doc(alias = "ncclCommWindowRegister")]
    pub fn window<T: Element>(&self, len: usize) -> Result<Window<T>> {
        self.register_window(&self.mem_alloc(len)?, WindowFlags::COLL_SYMMETRIC)
    }

    /// Makes a device communicator. *Collective*, with the same requirements on every rank: they are compared first, and
    /// what one rank cannot have fails on all of them.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] from a library older than [`DEV_COMM_VERSION`](crate::DEV_COMM_VERSION),
    /// [`Error::DevCommRefused`] and, for a communicator of a [`World`](crate::World), [`Error::RequirementsDiffer`], both
    /// on every rank; [`Error::Capturing`], [`Error::RankLost`], [`Error::CommunicatorEnded`], [`Error::Nccl`].
    #[doc(alias = "ncclDevCommCreate")]
    pub fn create_dev_comm(&self, requirements: DevCommRequirements) -> Result<DevCommResource> {
        self.context().refuse_capturing("a device communicator is made")?;
        let report = Report::new(
            &requirements,
            &self.properties()?,
            &Facilities::of(self.context().machine()),
        );
        match self.rendezvous() {
            Some(rendezvous) => {
                let all = rendezvous.all_gather(&report.to_bytes()?)?;
                let all =
                    all.iter().enumerate().map(|(rank, bytes)| Report::from_bytes(rank, bytes));
                agree(&all.collect::<Result<Vec<_>>>()?)?;
            }
            None => report.alone(self.rank())?,
        }
        DevCommResource::new(self, &requirements)
    }

    /// Waits until every rank is here; the GPUs are not waited for. *Collective*.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`]; [`Error::InvalidInput`] if the communicator was not made by a [`World`](crate::World).
    pub fn barrier(&self) -> Result<()> {
        match &self.inner.rendezvous {
            Some(rendezvous) => rendezvous.barrier(),
            None => Err(Error::invalid("a communicator made without a world has no barrier")),
        }
    }

    /// Fails unless every rank reaches every other by load and store.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralLsaTeams`] names the ranks and hosts of each group; otherwise as [`properties`](Self::properties).
    pub fn require_single_lsa_team(&self) -> Result<()> {
        let teams = self.properties()?.n_lsa_teams;
        let hosts = self.inner.rendezvous.as_ref().map_or(&[][..], Rendezvous::hosts);
        match describe_lsa_teams(self.n_ranks(), teams, hosts) {
            None => Ok(()),
            Some(teams) => Err(Error::SeveralLsaTeams { teams }),
        }
    }
}

/// How the other parts of the crate make calls.
impl Communicator {
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.inner.handle
    }

    /// Runs `f` with NCCL and this communicator, for a question that is answered at once.
    pub(crate) fn with_comm<R>(&self, f: impl FnOnce(&Nccl, CommPtr) -> Result<R>) -> Result<R> {
        self.bind()?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.require_ready("a question about a window")?;
        f(self.inner.handle.nccl(), entered.comm())
    }

    /// Fails when it was ended.
    pub(crate) fn require_live(&self) -> Result<()> {
        self.inner.handle.enter(&[Status::Live]).map(drop)
    }

    /// Fails while it is suspended: what was made from it can neither be used nor closed.
    pub(crate) fn refuse_suspended(&self) -> Result<()> {
        let suspended = self.inner.handle.status() == Status::Suspended;
        if suspended { Err(self.inner.handle.ended()) } else { Ok(()) }
    }

    pub(crate) fn rendezvous(&self) -> Option<&Rendezvous> {
        self.inner.rendezvous.as_ref()
    }

    /// Has `resource` closed with the communicator.
    pub(crate) fn adopt(&self, resource: Weak<dyn Resource>) {
        let mut resources = self.inner.resources.borrow_mut();
        resources.retain(|resource| resource.strong_count() > 0);
        resources.push(resource);
    }

    /// Fails for a stream or memory of another context: memory waits for the streams of its own before it is freed.
    pub(crate) fn require_own(&self, context: &Context, what: &str) -> Result<()> {
        if context.is(self.context()) {
            return Ok(());
        }
        let rank = self.rank();
        Err(Error::invalid(format!(
            "{what} of another context than the communicator's, on rank {rank}"
        )))
    }

    /// The communicator's address for a call that may be deferred.
    fn comm(&self) -> Result<CommPtr> {
        Ok(self.inner.handle.enter(&[Status::Live])?.comm())
    }

    /// Enqueues an operation to a stream, now or when the open group ends. `keep` is what it uses.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream,
        keep: Vec<Rc<dyn std::any::Any>>,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        self.require_own(stream.context(), "a stream")?;
        self.bind()?;
        if is_open() {
            let (call, stream) = (call(self.comm()?), Some(stream.clone()));
            let made = Rc::new(Cell::new(Made::Waiting));
            note(Noted { communicator: self.clone(), call, stream, keep, made });
            return Ok(());
        }
        let entered = self.inner.handle.enter(&[Status::Live])?;
        let call = call(entered.comm());
        entered.require_ready(call.operation)?;
        entered.make(call)?;
        drop(entered);
        stream.enqueued(self, keep);
        Ok(())
    }

    /// Makes a call that talks to the other ranks, now or when the open group ends. `keep` is what it uses and what it
    /// makes, which is not dropped before `made` says what has become of it.
    pub(crate) fn talk(
        &self,
        made: &Rc<Cell<Made>>,
        keep: Rc<dyn std::any::Any>,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        self.bind()?;
        if is_open() {
            let (call, made, keep) = (call(self.comm()?), Rc::clone(made), vec![keep]);
            note(Noted { communicator: self.clone(), call, stream: None, keep, made });
        } else {
            let entered = self.inner.handle.enter(&[Status::Live])?;
            let call = call(entered.comm());
            entered.require_ready(call.operation)?;
            let done = self.inner.watch(&entered, call);
            drop(entered);
            if let Err(error) = done.and_then(|()| self.wait_in_background()) {
                made.set(Made::No);
                self.keep_if_lost(keep);
                return Err(error);
            }
            made.set(Made::Yes);
        }
        Ok(())
    }

    /// Never drops what a call uses that may not have come back.
    pub(crate) fn keep_if_lost<T>(&self, keep: T) {
        if self.context().health().is_lost() {
            std::mem::forget(keep);
        }
    }

    /// Makes a call that concerns this rank only, now.
    pub(crate) fn call(&self, call: impl FnOnce(CommPtr) -> Call) -> Result<()> {
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.make(call(entered.comm()))
    }

    /// Makes a call that closes something, which a communicator that is good for nothing else allows too.
    pub(crate) fn release(&self, call: impl FnOnce(CommPtr) -> Call) -> Result<()> {
        let entered = self.inner.handle.enter(&[Status::Live, Status::Revoked])?;
        entered.make(call(entered.comm()))
    }

    fn ask<T: Copy>(&self, out: Out<T>, call: impl FnOnce(CommPtr, Out<T>) -> Call) -> Result<T> {
        let entered =
            self.inner.handle.enter(&[Status::Live, Status::Revoked, Status::Finalized])?;
        entered.make(call(entered.comm(), out.clone()))?;
        Ok(out.get())
    }

    fn watch(&self, entered: &Entered<'_>, call: Call) -> Result<()> {
        refuse_inside(call.operation)?;
        self.bind()?;
        self.inner.watch(entered, call)
    }

    /// Makes this rank's context current, which NCCL needs, unless a lost rank makes the call pointless.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context().health().check()?;
        self.context().cuda().bind()
    }
}

impl Inner {
    /// Makes a call that may never return.
    fn watch(&self, entered: &Entered<'_>, call: Call) -> Result<()> {
        let (handle, operation) = (Arc::clone(&self.handle), call.operation);
        let work = move || {
            // SAFETY: the communicator is entered and live; what the call uses is not freed if it does not come back.
            let code = unsafe { call.make(handle.nccl())? };
            handle.nccl().check(operation, code, Some(handle.rank()))
        };
        entered.verdict(watched(&self.context, work, || end::abort_aside(&self.handle)))
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.n_ranks())
    }
}

/// The ranks and hosts of each group that shares memory, or `None` if there is one group. NCCL's groups are of one size
/// and take consecutive ranks.
fn describe_lsa_teams(n_ranks: usize, n_teams: usize, hosts: &[String]) -> Option<Vec<String>> {
    if n_teams <= 1 {
        return None;
    }
    let size = (n_ranks / n_teams).max(1);
    let ranks: Vec<usize> = (0..n_ranks).collect();
    let describe = |team: &[usize]| {
        let mut names: Vec<&str> =
            team.iter().filter_map(|&rank| hosts.get(rank).map(String::as_str)).collect();
        names.dedup();
        let place =
            if names.is_empty() { String::new() } else { format!(" on {}", names.join(", ")) };
        format!("{}{place}", crate::error::ranks(team))
    };
    Some(ranks.chunks(size).map(describe).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_cannot_share_memory_are_named_with_their_hosts() {
        let hosts: Vec<String> = ["a", "a", "b", "b"].map(str::to_owned).into();
        assert_eq!(describe_lsa_teams(4, 1, &hosts), None);
        let teams = describe_lsa_teams(4, 2, &hosts).unwrap();
        assert_eq!(teams, ["ranks 0, 1 on a", "ranks 2, 3 on b"]);
        let error =
            Error::SeveralLsaTeams { teams: describe_lsa_teams(2, 2, &hosts[1..3]).unwrap() };
        assert!(error.to_string().ends_with("rank 0 on a; rank 1 on b"), "{error}");
    }
}
