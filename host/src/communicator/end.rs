//! Ends a communicator: collectively (finalize, destroy) or by this rank alone (abort).

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::abort::{REVOKE_FLAGS, abort_and_log, start_abort, start_abort_and_log, wait_for_abort};
use super::comm::{Communicator, End, Inner, Tracked};
use super::handle::Status;
use super::watched::watched;
use crate::device::KeepAlive;
use crate::device::in_group::refuse_inside;
use crate::device::issuer::Resource;
use crate::device::recorder::Operation;
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::calls;

/// NCCL: `NCCL_SUSPEND_MEM`.
pub(crate) const SUSPEND_MEMORY: i32 = 1;
/// How long a drop waits until a non-blocking communicator is ready for its end, if the job has no
/// deadline.
const READY_LIMIT: Duration = Duration::from_secs(10);

impl Communicator {
    /// Closes what was created from the communicator, as [`destroy`](Self::destroy) does, and
    /// completes outstanding operations on every rank. *Collective*. Afterwards only `destroy` and
    /// [`abort`](Self::abort) are allowed; neither requires a `finalize` before.
    ///
    /// NCCL: `ncclCommFinalize`.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`];
    /// the errors of waiting for this rank's streams.
    #[doc(alias = "ncclCommFinalize")]
    pub fn finalize(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        let _ending = self.inner.handle.begin_end(self.context().deadline())?;
        self.require_live()?;
        self.context().synchronize_streams()?;
        self.close_resources();
        self.inner.finalize_only(self.context().deadline())
    }

    /// Ends the communicator together with the other ranks, after closing what was created from it:
    /// windows, registered buffers, operators, device communicators and graphs, newest first.
    /// *Collective*. Idempotent, also for several threads at once.
    ///
    /// Dropping the last clone does the same; in the function of a [`Rank`](crate::Rank), when that
    /// function has ended.
    ///
    /// NCCL: `ncclCommFinalize`, `ncclCommDestroy`.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) and [`Error::Nccl`], after which the
    /// communicator is aborted. The errors of waiting for this rank's streams, after which nothing
    /// is closed or ended.
    #[doc(alias = "ncclCommDestroy")]
    pub fn destroy(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        let _ending = self.inner.handle.begin_end(self.context().deadline())?;
        if self.inner.handle.status() >= Status::Destroyed {
            // After an abort from another thread, the resources are still open.
            self.close_resources();
            return Ok(());
        }
        self.context().synchronize_streams()?;
        self.inner.resume_to_end()?;
        self.close_resources();
        self.inner.end(self.context().deadline())
    }

    /// Ends the communicator without the other ranks. Kernels that use its device communicators and
    /// wait for other ranks exit, and NCCL's running operations are stopped. Then what was created
    /// from the communicator is closed. Idempotent.
    ///
    /// NCCL: `ncclCommAbort`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`]; [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) when NCCL
    /// does not return within 5 s because a kernel does not end, such as one that waits in a loop
    /// of its own and not in `nccl_device`.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        let aborting = start_abort(&self.inner.handle);
        // `ncclCommAbort` first stops the running operations, so that the streams become idle, and
        // then waits until the graphs with its operations are destroyed.
        let _ = self.context().drain_aborted();
        self.close_resources();
        aborting?;
        wait_for_abort(&self.inner.handle)
    }

    /// Stops running operations. Afterwards, the communicator can only be split, shrunk or ended.
    /// Every rank calls it.
    ///
    /// NCCL: `ncclCommRevoke`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported), [`Error::Nccl`].
    #[doc(alias = "ncclCommRevoke")]
    pub fn revoke(&self) -> Result<()> {
        let entered = self.inner.handle.enter(&[Status::Live])?;
        // Also while an operation of a non-blocking communicator is in progress: that is stopped.
        self.perform_watched(&entered, calls::comm_revoke(entered.comm(), REVOKE_FLAGS))?;
        self.inner.handle.set_revoked();
        self.inner.handle.set_status(Status::Revoked);
        drop(entered);
        self.wait_until_ready("ncclCommRevoke")
    }

    /// Releases the GPU memory that NCCL does not need until [`resume`](Self::resume); until then
    /// nothing else works. Every rank calls it, when all work of the communicator is done.
    ///
    /// NCCL: `ncclCommSuspend` with `NCCL_SUSPEND_MEM`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`StateError::InProgress`] while an operation of a non-blocking communicator is in progress,
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported), [`Error::Nccl`].
    #[doc(alias = "ncclCommSuspend")]
    pub fn suspend(&self) -> Result<()> {
        self.context().synchronize_streams()?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        entered.require_ready("ncclCommSuspend")?;
        self.perform_watched(&entered, calls::comm_suspend(entered.comm(), SUSPEND_MEMORY))?;
        self.inner.handle.set_status(Status::Suspended);
        drop(entered);
        self.wait_until_ready("ncclCommSuspend")
    }

    /// Restores the memory of a suspended communicator. Every rank calls it.
    ///
    /// NCCL: `ncclCommResume`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded) for one that is not
    /// suspended, [`Error::Nccl`].
    #[doc(alias = "ncclCommResume")]
    pub fn resume(&self) -> Result<()> {
        let entered = self.inner.handle.enter(&[Status::Suspended])?;
        entered.require_ready("ncclCommResume")?;
        self.perform_watched(&entered, calls::comm_resume(entered.comm()))?;
        self.inner.handle.set_status(Status::Live);
        drop(entered);
        self.wait_until_ready("ncclCommResume")
    }
}

impl Inner {
    /// Returns the same communicator, to be dropped later than `self`.
    fn moved(&self) -> Self {
        let (handle, library) = (Arc::clone(&self.handle), self.library.clone());
        let (context, peers) = (self.context.clone(), None);
        let default_stream = self.default_stream.clone();
        let resources = Mutex::new(std::mem::take(&mut *self.resources.lock()));
        let (end, rank, n_ranks, created) = (self.end, self.rank, self.n_ranks, self.created);
        let (failed_exchanges, windows, objects) = Default::default();
        Self {
            handle,
            end,
            rank,
            n_ranks,
            context,
            library,
            created,
            peers,
            failed_exchanges,
            objects,
            windows,
            default_stream,
            resources,
        }
    }

    /// Finalizes and destroys; aborts if that fails before NCCL's end. Waits for at most `limit`
    /// until a non-blocking communicator is ready.
    fn end(&self, limit: Option<Duration>) -> Result<()> {
        if self.end == End::Foreign {
            self.handle.set_status(Status::Destroyed);
            return Ok(());
        }
        if self.context.is_rank_lost() {
            // Finalizing waits for the other ranks, one of which is lost.
            abort_and_log(&self.handle);
            return Ok(());
        }
        self.resume_to_end()?;
        let kept = self.complete(limit).inspect_err(|_| abort_and_log(&self.handle))?;
        let Some(comm) = self.handle.take_to_destroy()? else { return Ok(()) };
        let (handle, call) = (Arc::clone(&self.handle), calls::comm_destroy(comm));
        let work = move || {
            let nccl = handle.nccl();
            // SAFETY: the communicator was taken out of its slot while no call used it.
            let code = unsafe { call.make(nccl)? };
            nccl.check("ncclCommDestroy", code, Some(handle.rank()))
        };
        // There is nothing left to abort.
        let destroyed = watched(&self.context, "ncclCommDestroy", work, || ());
        if destroyed.is_err() {
            // NCCL may still use the memory.
            std::mem::forget(kept);
        }
        destroyed
    }

    /// Prepares the communicator to be destroyed, which NCCL refuses while an operation is in
    /// progress: with the other ranks, if NCCL can still finalize it. Returns the memory that was
    /// kept for them.
    fn complete(&self, limit: Option<Duration>) -> Result<Vec<KeepAlive>> {
        let status = self.handle.status();
        // NCCL refuses to finalize a revoked communicator, and destroys it without that.
        let is_together = self.end == End::Together && status != Status::Revoked;
        match is_together && status != Status::Finalized {
            true => self.finalize_only(limit)?,
            false => self.wait_until_ready_within("ncclCommDestroy", limit)?,
        }
        // All ranks have come to the end, and the work of each has ended.
        if is_together { self.handle.release_kept() } else { Ok(Vec::new()) }
    }

    /// Resumes a suspended communicator, so that its resources can be closed.
    fn resume_to_end(&self) -> Result<()> {
        if self.handle.status() != Status::Suspended || self.context.is_rank_lost() {
            return Ok(());
        }
        let entered = self.handle.enter(&[Status::Suspended])?;
        let resumed = self.perform_watched(&entered, calls::comm_resume(entered.comm()));
        if resumed.is_ok() {
            self.handle.set_status(Status::Live);
        }
        drop(entered);
        resumed
            .and_then(|()| self.wait_until_ready("ncclCommResume"))
            .inspect_err(|_| abort_and_log(&self.handle))
    }

    /// Closes what was created from the communicator, and returns the first error.
    pub(super) fn close_resources(&self) -> Result<()> {
        self.context.free_postponed();
        // Newest first: a resource may use an older one. What a graph has held comes last.
        let resources = std::iter::from_fn(|| self.resources.lock().pop());
        Self::close_each(resources, |resource| resource.close())
    }

    /// Closes resources in this order, and returns the first error.
    pub(super) fn close_each(
        resources: impl Iterator<Item = Tracked>,
        close: impl Fn(&dyn Resource) -> Result<()>,
    ) -> Result<()> {
        let mut result = Ok(());
        for tracked in resources {
            let closed = tracked.open().map_or(Ok(()), |object| close(&*object));
            match &result {
                Ok(()) => result = closed,
                Err(_) => log(closed),
            }
        }
        result
    }

    fn close_resources_and_log(&self) {
        log(self.close_resources());
    }

    /// Finalizes without closing resources. Waits for at most `limit` until a non-blocking
    /// communicator is ready for that.
    fn finalize_only(&self, limit: Option<Duration>) -> Result<()> {
        const OPERATION: &str = "ncclCommFinalize";
        self.wait_until_ready_within(OPERATION, limit)?;
        let entered = self.handle.enter(&[Status::Live])?;
        self.perform_watched(&entered, calls::comm_finalize(entered.comm()))?;
        self.handle.set_status(Status::Finalized);
        drop(entered);
        self.wait_until_ready(OPERATION)
    }

    /// Does the same as [`Communicator::wait_until_ready`].
    fn wait_until_ready(&self, operation: &'static str) -> Result<()> {
        self.wait_until_ready_within(operation, self.context.deadline())
    }

    fn wait_until_ready_within(
        &self,
        operation: &'static str,
        limit: Option<Duration>,
    ) -> Result<()> {
        if self.handle.is_blocking() {
            return Ok(());
        }
        let recorder = self.context.recorder();
        let _wait = recorder.begin(Operation::Ready);
        match self.context.poll(limit, || self.handle.poll()) {
            Err(Error::State(StateError::DeadlinePassed { waited })) => {
                recorder.print();
                start_abort_and_log(&self.handle);
                Err(StateError::NotReturned { operation, waited }.into())
            }
            Err(interrupted @ Error::State(StateError::Interrupted)) => {
                start_abort_and_log(&self.handle);
                Err(interrupted)
            }
            result => result,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.cuda().is_forked() {
            return;
        }
        if self.handle.status() >= Status::Destroyed {
            // Waits for an abort in progress, which uses the context.
            return abort_and_log(&self.handle);
        }
        if self.end == End::Foreign
            // Otherwise, the streams are waited for: what is in progress may not be there yet.
            && self.handle.poll().unwrap_or(true)
            && !self.resources.get_mut().iter().any(|tracked| tracked.open().is_some())
        {
            self.handle.set_status(Status::Destroyed);
            return;
        }
        let lost = self.context.is_rank_lost();
        if !lost && self.end == End::Together && self.context.postpones_ends() {
            // The other ranks may wait for this one in another call.
            return self.context.postpone_end(self.created, self.moved());
        }
        // A GPU that does not become idle would also block `ncclCommDestroy`. After a loss, the
        // abort stops NCCL's own kernels.
        if !lost && !self.context.can_free("the communicator") {
            return;
        }
        self.context.bind_to_free();
        if !lost {
            // The communicator owns the resources that are left.
            log(self.resume_to_end());
            self.close_resources_and_log();
        }
        log(self.end(self.context.deadline().or(Some(READY_LIMIT))));
    }
}

fn log(result: Result<()>) {
    if let Err(error) = result {
        tracing::warn!("{error}");
    }
}

impl Communicator {
    /// Waits until `operation` of a non-blocking communicator is done; fails if it failed. After
    /// the job's deadline or an interrupt, aborts the communicator.
    pub(crate) fn wait_until_ready(&self, operation: &'static str) -> Result<()> {
        self.inner.wait_until_ready(operation)
    }

    fn close_resources(&self) {
        self.inner.close_resources_and_log();
    }
}
