//! Streams whose waits end when the job does, and events for timing.

use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use crate::sys::cuda::{EventHandle, StreamHandle};
use crate::{Context, Error, Result};

/// Work in order on one GPU. Clones are the same stream. Dropping the last one waits for its work.
#[derive(Clone)]
pub struct Stream {
    inner: Rc<StreamInner>,
}

pub(crate) struct StreamInner {
    handle: StreamHandle,
    context: Context,
}

impl Stream {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let handle = context.cuda().create_stream()?;
        Ok(Self { inner: Rc::new(StreamInner { handle, context: context.clone() }) })
    }

    /// Waits until all work in the stream is done.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] soon after a rank is lost while work is left; the driver's error when a
    /// kernel failed.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.wait(None)
    }

    /// As [`synchronize`](Self::synchronize), for at most `limit`.
    ///
    /// # Errors
    ///
    /// Also [`Error::DeadlinePassed`]. The GPU is then taken to be stuck: what it may still use is
    /// not freed before the process ends.
    pub fn synchronize_within(&self, limit: Duration) -> Result<()> {
        let result = self.inner.wait(Some(limit));
        if matches!(result, Err(Error::DeadlinePassed { .. })) {
            self.context().mark_stuck();
        }
        result
    }

    /// Whether all work in the stream is done.
    ///
    /// # Errors
    ///
    /// The driver's error when a kernel failed.
    pub fn is_idle(&self) -> Result<bool> {
        self.context().cuda().bind()?;
        self.handle().is_idle()
    }

    /// Marks this point of the stream in `event`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for an event of another context; the driver's.
    pub fn record(&self, event: &Event) -> Result<()> {
        if !event.context.is(self.context()) {
            return Err(Error::invalid("the event was made by another context than the stream"));
        }
        self.context().cuda().bind()?;
        self.handle().record(&event.handle)
    }

    /// The driver's handle (`CUstream`, which is `cudaStream_t`), for use with other libraries.
    #[must_use]
    pub fn as_raw(&self) -> *mut std::ffi::c_void {
        self.handle().raw().cast()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn handle(&self) -> &StreamHandle {
        &self.inner.handle
    }

    pub(crate) fn downgrade(&self) -> Weak<StreamInner> {
        Rc::downgrade(&self.inner)
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:p}, {:?})", self.as_raw(), self.context())
    }
}

impl StreamInner {
    /// Polls the stream, because the driver's own wait would never return once a rank that the
    /// running kernel waits for is dead.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<()> {
        self.context.cuda().bind()?;
        let start = Instant::now();
        loop {
            match self.handle.is_idle() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    // Such an error stays with the context: nothing will run or finish in it again.
                    self.context.mark_stuck();
                    return Err(error);
                }
            }
            self.context.health().check()?;
            let waited = start.elapsed();
            if self.context.is_stuck() || limit.is_some_and(|limit| waited >= limit) {
                return Err(Error::DeadlinePassed { waited });
            }
            pause(waited);
        }
    }
}

/// Short waits are polled without sleeping, long ones leave the processor to others.
fn pause(waited: Duration) {
    if waited < Duration::from_millis(1) {
        std::thread::yield_now();
    } else {
        std::thread::sleep((waited / 16).min(Duration::from_millis(1)));
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // Memory is freed once the streams that are known are idle; this one is about to be unknown.
        if self.wait(Some(self.context.patience())).is_err() {
            self.context.mark_stuck();
        }
    }
}

/// A point in a stream, for timing.
pub struct Event {
    handle: EventHandle,
    context: Context,
}

impl Event {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        Ok(Self { handle: context.cuda().create_event()?, context: context.clone() })
    }

    /// Milliseconds between `start` and this event, by the GPU's clock (resolution about 0.5 us).
    ///
    /// # Errors
    ///
    /// The driver's, when one of the two was not recorded or the stream has not passed it yet.
    pub fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        self.context.cuda().bind()?;
        self.handle.elapsed_ms(&start.handle)
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:?})", self.context)
    }
}
