//! The end of a communicator: collective, or by this rank alone.

use std::sync::Arc;

use super::abort::{abort_in_background, start_abort, wait_for_abort};
use super::comm::{Communicator, End, Inner};
use super::handle::Status;
use super::watched::watched;
use crate::device::in_group::refuse_inside;
use crate::error::{Error, Result};
use crate::sys::nccl::calls;

impl Communicator {
    /// Closes what was made from the communicator, as [`destroy`](Self::destroy) does, and finishes
    /// what is outstanding on every rank. *Collective*. Afterwards only `destroy` and
    /// [`abort`](Self::abort) are of use; both do without it, too.
    ///
    /// NCCL: `ncclCommFinalize`.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost),
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded), [`Error::Nccl`];
    /// what waiting for this rank's streams gives.
    #[doc(alias = "ncclCommFinalize")]
    pub fn finalize(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        self.require_live()?;
        self.context().synchronize_streams()?;
        self.close_resources();
        let entered = self.inner.handle.enter(&[Status::Live])?;
        self.watch(&entered, calls::comm_finalize(entered.comm()))?;
        self.inner.handle.set_status(Status::Finalized);
        drop(entered);
        self.wait_in_background()
    }

    /// Ends the communicator together with the other ranks', after closing what was made from it:
    /// windows, registered buffers, operators, device communicators and graphs, the latest first.
    /// *Collective*. Idempotent.
    ///
    /// Dropping the last clone does the same.
    ///
    /// NCCL: `ncclCommFinalize`, `ncclCommDestroy`.
    ///
    /// # Errors
    ///
    /// [`WorldError::RankLost`](crate::WorldError::RankLost) and [`Error::Nccl`]; the communicator
    /// has then been aborted. What waiting for this rank's streams gives: work that does not end
    /// keeps everything as it is.
    #[doc(alias = "ncclCommDestroy")]
    pub fn destroy(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        if self.inner.handle.status() >= Status::Destroyed {
            // One that was aborted from another thread still has what was made from it.
            self.close_resources();
            return Ok(());
        }
        self.context().synchronize_streams()?;
        self.inner.resume_to_end()?;
        self.close_resources();
        self.inner.end()
    }

    /// Ends the communicator without the other ranks. Kernels of its device communicators that wait
    /// for other ranks exit, and NCCL's running operations are stopped. Then what was made from the
    /// communicator is closed. Idempotent.
    ///
    /// NCCL: `ncclCommAbort`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`]; [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) when NCCL
    /// does not come back within 5 s, because a kernel does not end: one that waits by other means
    /// than `nccl_device`.
    #[doc(alias = "ncclCommAbort")]
    pub fn abort(&self) -> Result<()> {
        refuse_inside("the end of a communicator")?;
        let aborting = start_abort(&self.inner.handle);
        // NCCL returns when the graphs with its operations are gone, and they can go when it has
        // stopped what runs.
        let _ = self.context().drain();
        self.close_resources();
        aborting.map_or(Ok(()), |aborting| wait_for_abort(&aborting?))
    }

    /// Stops the operations that are running, so that the communicator can be split, shrunk or
    /// ended; nothing else works afterwards. Every rank calls it.
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
        self.watch(&entered, calls::comm_revoke(entered.comm(), 0))?;
        self.inner.handle.set_status(Status::Revoked);
        drop(entered);
        self.wait_in_background()
    }

    /// Releases the GPU memory that NCCL can do without until [`resume`](Self::resume); nothing
    /// else works meanwhile. Every rank calls it, when all work of the communicator is done.
    ///
    /// NCCL: `ncclCommSuspend` with `NCCL_SUSPEND_MEM`.
    ///
    /// # Errors
    ///
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded),
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported), [`Error::Nccl`].
    #[doc(alias = "ncclCommSuspend")]
    pub fn suspend(&self) -> Result<()> {
        const MEMORY: i32 = 1;
        self.context().synchronize_streams()?;
        let entered = self.inner.handle.enter(&[Status::Live])?;
        self.watch(&entered, calls::comm_suspend(entered.comm(), MEMORY))?;
        self.inner.handle.set_status(Status::Suspended);
        Ok(())
    }

    /// Takes the memory of a suspended communicator back. Every rank calls it.
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
        self.watch(&entered, calls::comm_resume(entered.comm()))?;
        self.inner.handle.set_status(Status::Live);
        Ok(())
    }
}

impl Inner {
    /// Finalizes and destroys; what fails on the way is aborted.
    fn end(&self) -> Result<()> {
        if self.end == End::Foreign {
            self.handle.set_status(Status::Destroyed);
            return Ok(());
        }
        if self.context.health().is_lost() {
            // Finalizing waits for the other ranks, one of which is lost.
            abort_in_background(&self.handle);
            return Ok(());
        }
        self.resume_to_end()?;
        let finalized = matches!(self.handle.status(), Status::Finalized | Status::Revoked);
        if !finalized
            && self.end == End::Together
            && let Err(error) = self.finalize_quietly()
        {
            abort_in_background(&self.handle);
            return Err(error);
        }
        let Some(entered) = self.handle.enter_last() else { return Ok(()) };
        self.handle.set_status(Status::Destroyed);
        let (handle, call) = (Arc::clone(&self.handle), calls::comm_destroy(entered.comm()));
        let work = move || {
            let nccl = handle.nccl();
            // SAFETY: the communicator was live and taken out of its slot; nobody uses it again.
            let code = unsafe { call.make(nccl)? };
            nccl.check("ncclCommDestroy", code, Some(handle.rank()))
        };
        // There is nothing left to abort.
        watched(&self.context, work, || ())
    }

    /// Only what is there can be closed and finished.
    fn resume_to_end(&self) -> Result<()> {
        if self.handle.status() != Status::Suspended || self.context.health().is_lost() {
            return Ok(());
        }
        let entered = self.handle.enter(&[Status::Suspended])?;
        let resumed = self.watch(&entered, calls::comm_resume(entered.comm()));
        drop(entered);
        match resumed {
            Ok(()) => self.handle.set_status(Status::Live),
            Err(_) => abort_in_background(&self.handle),
        }
        resumed
    }

    fn finalize_quietly(&self) -> Result<(), Error> {
        let entered = self.handle.enter(&[Status::Live])?;
        self.watch(&entered, calls::comm_finalize(entered.comm()))?;
        self.context.poll(None, || entered.poll())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.handle.status() >= Status::Destroyed {
            return;
        }
        if self.end == End::Foreign {
            return self.handle.set_status(Status::Destroyed);
        }
        let lost = self.context.health().is_lost();
        // A GPU that does not become idle would block the end as well; but NCCL's own kernels an
        // abort can stop.
        if !lost && !self.context.can_free("the communicator") {
            return;
        }
        let _ = self.context.cuda().bind();
        if let Err(error) = self.end() {
            tracing::warn!("{error}");
        }
    }
}

impl Communicator {
    /// Fails when an operation in the background has failed, and waits for those of a non-blocking
    /// communicator.
    pub(crate) fn wait_in_background(&self) -> Result<()> {
        if self.inner.handle.is_blocking() {
            return Ok(());
        }
        self.context().poll(None, || self.inner.handle.poll())
    }

    fn close_resources(&self) {
        // What was made later may use what was made before.
        for resource in self.inner.resources.take().into_iter().rev() {
            if let Some(resource) = resource.upgrade()
                && let Err(error) = resource.close()
            {
                tracing::warn!("{error}");
            }
        }
    }
}
