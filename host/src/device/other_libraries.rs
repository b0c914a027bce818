//! Objects that other libraries use, in streams that this crate does not know and in graphs of
//! their own.

use std::any::Any;
use std::time::Duration;

use super::context::Context;
use super::drops::{SHORT_TIMEOUT, TIMEOUT};
use super::stream::Stream;
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, StateError};

/// A value that is dropped when all work of the GPU is done.
struct AfterWork<T: Any + Send> {
    /// `None` only while dropping.
    value: Option<T>,
    context: Context,
}

impl Stream {
    /// Gives `owner` to the graph, if another library captures this stream. The driver drops it, on
    /// a thread of its own, after the graph and all executable graphs made of it are destroyed.
    /// Returns `owner` if the stream is not captured.
    ///
    /// `owner` keeps alive the memory that captured work uses. Its destructor must not call the
    /// driver, and therefore not this crate.
    ///
    /// CUDA: `cuUserObjectCreate`, `cuGraphRetainUserObject`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`is_capturing`](Self::is_capturing); [`Error::InvalidInput`] for a
    /// capture that has been invalidated.
    pub fn give_to_capture<T: Send + 'static>(&self, owner: T) -> Result<Option<T>> {
        self.context().cuda().bind()?;
        match self.handle().capture()? {
            Some(capture) => capture.give(Box::new(owner)).map(|()| None),
            None => Ok(Some(owner)),
        }
    }
}

impl Context {
    /// Drops `value` when all work of the GPU is done that this process has enqueued, also that of
    /// other libraries in streams that this crate does not know: for memory that was handed to
    /// them.
    ///
    /// It waits as the drop of a [`SymmetricBuffer`](crate::SymmetricBuffer) does: in a rank's
    /// function at most 100 ms, after which `value` is dropped later, and elsewhere at most 10 s,
    /// after which `value` is never dropped; neither is it when a rank is lost.
    ///
    /// CUDA: `cuCtxSynchronize`.
    #[doc(alias = "cudaDeviceSynchronize")]
    pub fn drop_after_work<T: Any + Send>(&self, value: T) {
        drop(AfterWork { value: Some(value), context: self.clone() });
    }

    /// Waits, for at most `limit`, until all work of the GPU is done.
    fn wait_for_all_work(&self, limit: Duration) -> Result<()> {
        self.refuse_capturing("memory is freed")?;
        self.check_health()?;
        if self.is_stuck() {
            return Err(StateError::DeadlinePassed { waited: Duration::ZERO }.into());
        }
        // The driver's call has no limit. A thread that it does not return from is leaked, with the
        // context.
        let (binder, context) = (self.cuda().binder(), self.clone());
        let wait = move || {
            let waited = binder.synchronize();
            drop(context);
            waited
        };
        let health = self.health();
        self.machine().spawn("devcomm-wait", wait)?.wait(Some(limit), || health.check())?
    }
}

impl<T: Any + Send> Drop for AfterWork<T> {
    fn drop(&mut self) {
        let (value, context) = (self.value.take(), self.context.clone());
        let postpones = context.postpones_frees();
        match context.wait_for_all_work(if postpones { SHORT_TIMEOUT } else { TIMEOUT }) {
            Ok(()) => drop(value),
            Err(_) if postpones => context.postpone_free(Self { value, context: context.clone() }),
            Err(why) => {
                tracing::warn!("what other libraries may still use is never freed: {why}");
                std::mem::forget(value);
            }
        }
    }
}
