//! Makes a communicator's NCCL calls: now or when a group ends, on this thread or on one that is
//! leaked if the call hangs.

use std::sync::Arc;

use super::abort::start_abort_and_log;
use super::comm::{Communicator, Inner, Tracked};
use super::deferred::{CallState, DeferredCall, SharedState, Uses};
use super::group::defer;
use super::handle::{Entered, Handle, Status};
use super::peers::Peers;
use super::watched::watched;
use crate::device::in_group::{is_open, refuse_inside};
use crate::device::issuer::{Owner, Resource};
use crate::device::recorder::Operation;
use crate::device::{Context, KeepAlive, OnStream, Stream, StreamOrder};
use crate::error::{Error, Result, StateError, WorldError};
use crate::sys::nccl::Nccl;
use crate::sys::nccl::call::{Call, CommPtr, Out, Written};

impl Communicator {
    pub(super) fn handle(&self) -> &Arc<Handle> {
        &self.inner.handle
    }

    /// Runs `f`, a query that returns at once, with NCCL and this communicator.
    pub(super) fn with_comm<R>(&self, f: impl FnOnce(&Nccl, CommPtr) -> Result<R>) -> Result<R> {
        self.bind()?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.require_ready("a query of a window")?;
        f(self.inner.handle.nccl(), entered.comm())
    }

    /// Fails unless the communicator is live.
    pub(super) fn require_live(&self) -> Result<()> {
        self.inner.handle.require(&[Status::Live])
    }

    /// Fails once the communicator is aborted, as another thread may do.
    pub(super) fn refuse_aborted(&self) -> Result<()> {
        let handle = &self.inner.handle;
        if handle.is_aborted() { Err(handle.ended()) } else { Ok(()) }
    }

    pub(super) fn refuse_suspended(&self) -> Result<()> {
        self.inner.handle.refuse_suspended()
    }

    pub(super) fn peers(&self) -> Option<&dyn Peers> {
        self.inner.peers.as_deref()
    }

    /// Adds a resource to be closed with the communicator.
    pub(super) fn adopt(&self, resource: &Arc<impl Resource + 'static>) {
        let resource: Arc<dyn Resource> = Arc::clone(resource) as _;
        self.inner.adopt(Arc::downgrade(&resource));
    }

    /// Adds a resource that the communicator owns until it is closed.
    pub(super) fn own(&self, resource: &Arc<impl Resource + 'static>) {
        self.inner.add(Tracked::Owned(Arc::clone(resource) as _));
    }

    /// Returns a reference with which streams and graphs keep the communicator alive.
    pub(super) fn owner(&self) -> Arc<dyn Owner> {
        Arc::clone(&self.inner) as _
    }

    /// Fails for a stream or memory of another context: memory is freed when the streams of its own
    /// context are idle.
    pub(super) fn require_own(&self, context: &Context, what: &str) -> Result<()> {
        if context.is(self.context()) {
            return Ok(());
        }
        let rank = self.rank();
        Err(Error::invalid(format!(
            "rank {rank}: {what} is of another context than the communicator"
        )))
    }

    /// Returns `stream`, or the context's default stream.
    pub(super) fn stream<'a>(&'a self, stream: &'a impl OnStream) -> &'a Stream {
        let default = || self.inner.default_stream.get_or_init(|| self.context().default_stream());
        stream.named().unwrap_or_else(default)
    }

    /// Returns the communicator's address for a call that is made later, after another
    /// [`enter`](Handle::enter), which fails if the communicator has ended meanwhile.
    fn comm(&self) -> Result<CommPtr> {
        Ok(self.inner.handle.enter(&[Status::Live])?.comm())
    }

    /// Enqueues an operation to a stream, now or when the open group ends, and keeps alive what it
    /// uses. `terms` describe it: count, type, peer.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        uses: Uses,
        terms: &str,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        let compares = false;
        self.start(stream, uses, terms, call, compares)
    }

    /// Does the same as [`enqueue`](Self::enqueue), for a collective: in a checked world, the ranks
    /// first compare it and its `terms`.
    pub(super) fn enqueue_collective(
        &self,
        stream: &Stream,
        uses: Uses,
        terms: &str,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        self.start(stream, uses, terms, call, self.compares())
    }

    /// Returns whether collectives that start now are compared.
    fn compares(&self) -> bool {
        // While a stream is captured, nothing starts, and the ranks may capture at other times.
        self.peers().is_some_and(|peers| peers.is_checked()) && !self.context().is_capturing()
    }

    /// Names an object that all ranks have made: by its kind, and its number among those of this
    /// kind.
    #[doc(hidden)]
    pub fn name(&self, order: &StreamOrder, kind: &'static str) {
        let mut objects = self.inner.objects.lock();
        let number = objects.entry(kind).or_insert(0);
        *number += 1;
        order.name(kind, *number);
    }

    /// Fails unless the communicator is live. In a checked world, compares a collective that a
    /// kernel does, with its terms, with those that the other ranks are about to start. Where not
    /// all objects' operations fit on a GPU together, it also compares whose operation it is.
    #[doc(hidden)]
    pub fn compare_kernel(
        &self,
        order: &StreamOrder,
        collective: impl FnOnce() -> String,
    ) -> Result<()> {
        self.compare_numbers(order, || (collective(), Vec::new())).map(drop)
    }

    /// Does the same as [`compare_kernel`](Self::compare_kernel), with numbers that may differ
    /// between ranks: those of each rank in a checked world, and `None` elsewhere.
    #[doc(hidden)]
    pub fn compare_numbers(
        &self,
        order: &StreamOrder,
        collective: impl FnOnce() -> (String, Vec<u64>),
    ) -> Result<Option<Vec<Vec<u64>>>> {
        self.require_live()?;
        if !self.compares() {
            return Ok(None);
        }
        let ((collective, mut numbers), (kind, number)) = (collective(), order.object());
        let call_of = |number| format!("{collective}, of {kind} {number}");
        let call = match order.fills_gpu() {
            true => call_of(number),
            // Calls in another order are allowed while there is room.
            false => format!("{collective}, of {kind}"),
        };
        numbers.extend([number, order.is_crowded().into()]);
        let mut all = self.exchange(&*call, &numbers)?;
        let objects = all.iter_mut().map(|own| (own.pop() == Some(1), own.pop().unwrap_or(0)));
        let objects: Vec<_> = objects.collect();
        let must_agree = objects.iter().any(|(is_crowded, _)| *is_crowded);
        if must_agree && objects.iter().any(|(_, number)| *number != objects[0].1) {
            let calls = objects.iter().map(|(_, number)| call_of(*number)).collect();
            return Err(WorldError::CallsDiffer { calls }.into());
        }
        Ok(Some(all))
    }

    fn start(
        &self,
        stream: &Stream,
        uses: Uses,
        terms: &str,
        call: impl FnOnce(CommPtr) -> Call,
        compares: bool,
    ) -> Result<()> {
        self.require_own(stream.context(), "a stream")?;
        self.bind()?;
        let call = call(self.comm()?);
        let description = format!("{} of {terms}", call.operation);
        if is_open() {
            let (communicator, stream) = (self.clone(), Some(stream.clone()));
            let state = SharedState::new();
            defer(DeferredCall { communicator, call, description, compares, stream, uses, state });
            return Ok(());
        }
        if compares {
            self.compare(&description)?;
        }
        let enqueue = stream.begin_enqueue(call.operation)?;
        uses.require_open(self.rank())?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.require_ready(call.operation)?;
        let in_progress = self.context().recorder().begin(Operation::Nccl(description.into()));
        entered.perform(call)?;
        drop((in_progress, entered));
        stream.register_operation(&enqueue, &self.owner(), uses.kept());
        Ok(())
    }

    /// Compares a collective with those that the other ranks are about to start.
    pub(super) fn compare(&self, collective: &str) -> Result<()> {
        self.exchange::<u8>(collective, &[]).map(drop)
    }

    /// Makes a call that waits for the other ranks, now or when the open group ends. `kept`, which
    /// the call uses or writes to, stays alive until `state` is set.
    pub(super) fn call_collective(
        &self,
        state: &SharedState,
        kept: KeepAlive,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        let called = self.call_or_defer(state, kept, call);
        called.inspect_err(|_| state.set(CallState::Failed))
    }

    fn call_or_defer(
        &self,
        state: &SharedState,
        kept: KeepAlive,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        self.bind()?;
        if is_open() {
            let (call, state, uses) = (call(self.comm()?), state.clone(), Uses::keeping(kept));
            let (description, compares) = (call.operation.to_owned(), false);
            let (communicator, stream) = (self.clone(), None);
            defer(DeferredCall { communicator, call, description, compares, stream, uses, state });
        } else {
            let entered = self.inner.handle.enter(&[Status::Live])?;
            let call = call(entered.comm());
            let operation = call.operation;
            entered.require_ready(operation)?;
            let done = self.inner.perform_watched(&entered, call);
            drop(entered);
            if let Err(error) = done.and_then(|()| self.wait_until_ready(operation)) {
                self.leak_if_unfinished(&error, kept);
                return Err(error);
            }
            state.set(CallState::Made);
        }
        Ok(())
    }

    /// Leaks what a call that has failed with `error` uses, if NCCL may still use it.
    pub(super) fn leak_if_unfinished<T>(&self, error: &Error, kept: T) {
        let may_go_on = match error {
            Error::State(StateError::NotReturned { .. } | StateError::Interrupted) => true,
            // Another thread has aborted it: what was in progress ends with the abort.
            Error::State(StateError::CommunicatorEnded { .. }) => !self.handle().is_blocking(),
            _ => false,
        };
        if may_go_on || self.context().is_rank_lost() {
            std::mem::forget(kept);
        }
    }

    /// Makes a call that involves this rank only, now.
    pub(super) fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(CommPtr) -> Call,
    ) -> Result<()> {
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.require_ready(name)?;
        entered.perform(call(entered.comm()))
    }

    /// Makes a call that closes a resource, now.
    pub(super) fn release(&self, call: impl FnOnce(CommPtr) -> Call) -> Result<()> {
        self.inner.handle.release(call)
    }

    /// Makes a query, which returns at once.
    pub(super) fn query<T: Written>(
        &self,
        out: Out<T>,
        call: impl FnOnce(CommPtr, Out<T>) -> Call,
    ) -> Result<T> {
        let entered =
            self.inner.handle.enter(&[Status::Live, Status::Revoked, Status::Finalized])?;
        entered.perform(call(entered.comm(), out.clone()))?;
        Ok(out.get())
    }

    /// Does the same as [`Inner::perform_watched`], unless a group is open or a rank is lost.
    pub(super) fn perform_watched(&self, entered: &Entered<'_>, call: Call) -> Result<()> {
        refuse_inside(call.operation)?;
        self.bind()?;
        self.inner.perform_watched(entered, call)
    }

    /// Makes this rank's CUDA context current, as NCCL requires; fails if a rank is lost.
    pub(super) fn bind(&self) -> Result<()> {
        self.context().check_health()?;
        self.context().cuda().bind()
    }
}

impl Inner {
    /// Makes a call that may never return; if a rank is lost meanwhile, aborts the communicator.
    pub(super) fn perform_watched(&self, entered: &Entered<'_>, call: Call) -> Result<()> {
        let (used, operation) = (entered.begin_off_thread(&self.handle), call.operation);
        let work = move || {
            let handle = used.handle();
            // SAFETY: the communicator is live and locked, and stays allocated until `used` is
            // dropped; what the call uses is leaked if the call does not return.
            let code = unsafe { call.make(handle.nccl())? };
            handle.nccl().check(operation, code, Some(handle.rank()))
        };
        let abort = || start_abort_and_log(&self.handle);
        entered.or_aborted(watched(&self.context, operation, work, abort))
    }
}
