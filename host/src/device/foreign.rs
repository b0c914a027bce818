//! Memory of other libraries, which is given back when the GPU no longer uses it.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};
use devcomm_types::Element;

use super::context::Context;
use super::holds::CreationTime;
use super::slice::DeviceSlice;
use crate::error::{Error, Result};

/// The owner of memory of another library. It is dropped when the context's streams are idle, and
/// leaked if they cannot become idle.
pub(super) struct Foreign<T: Send + Sync + 'static> {
    /// `None` only while dropping.
    owner: Option<T>,
    context: Context,
    what: &'static str,
    created_at: CreationTime,
}

impl<T: Send + Sync + 'static> Foreign<T> {
    /// Returns an owner; `what` names the memory in messages, such as "cudarc's memory".
    pub(super) fn new(context: &Context, owner: T, what: &'static str) -> Arc<Self> {
        let created_at = context.creation_time();
        Arc::new(Self { owner: Some(owner), context: context.clone(), what, created_at })
    }
}

impl<T: Send + Sync + 'static> Drop for Foreign<T> {
    fn drop(&mut self) {
        let (mut owner, Self { context, what, created_at, .. }) = (self.owner.take(), self);
        context.hold(*created_at, || {
            let (owner, context) = (owner.take(), context.clone());
            Self { owner, context, what, created_at: *created_at }
        });
        if context.is_rank_lost() || owner.is_some() && !context.can_free(what) {
            return std::mem::forget(owner);
        }
        // The owner is dropped after this, and may free memory of the current context.
        context.bind_to_free();
    }
}

impl<T: Element> DeviceSlice<T> {
    /// Returns all of a slice of the crate cudarc, which is kept until the result and the
    /// operations on it are dropped and the GPU no longer uses the memory. Waits for the slice's
    /// stream, on which cudarc may still allocate the memory.
    ///
    /// cudarc does not know of later work in other streams than
    /// [its own](crate::Stream::from_cudarc): that must be waited for before cudarc uses the memory
    /// again.
    ///
    /// ```no_run
    /// # use devcomm_host::{Communicator, DeviceSlice, ReduceOp, Result, Stream};
    /// # use devcomm_host::cudarc::driver::CudaSlice;
    /// # use std::sync::Arc;
    /// # fn f(comm: &Communicator, theirs: &Arc<CudaSlice<f32>>) -> Result<()> {
    /// let slice = DeviceSlice::from_cudarc(comm.context(), theirs)?;
    /// let stream = Stream::from_cudarc(comm.context(), theirs.stream())?;
    /// comm.all_reduce(&slice, &slice, ReduceOp::Sum, &stream) // in place
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] when the memory is of another GPU than the context, or not of the
    /// GPU's primary context; [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) for a
    /// context of a simulated machine; the driver's errors.
    pub fn from_cudarc(context: &Context, slice: &Arc<CudaSlice<T>>) -> Result<Self> {
        context.machine().refuse_simulated(|| "memory of cudarc's".to_owned())?;
        context.require_cudarc(slice.context(), "memory")?;
        context.cuda().bind()?;
        let stream = slice.stream();
        // SAFETY: a stream of this context, which the slice keeps alive.
        unsafe { context.cuda().foreign_stream(stream.cu_stream(), None) }.synchronize()?;
        let (address, _read) = slice.device_ptr(stream);
        let owner = Foreign::new(context, Arc::clone(slice), "cudarc's memory");
        Ok(Self::owned(context, address, slice.len(), owner))
    }
}

impl Context {
    /// Fails unless `theirs` is the CUDA context of this GPU that this crate uses.
    pub(super) fn require_cudarc(
        &self,
        theirs: &cudarc::driver::CudaContext,
        what: &str,
    ) -> Result<()> {
        if self.cuda().is(theirs.cu_ctx()) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "cudarc's {what} is of GPU {} and another context than that of GPU {}",
            theirs.ordinal(),
            self.ordinal()
        )))
    }
}
