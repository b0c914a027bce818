//! CUDA events: points in streams.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::Context;
use super::idle::ASYNC_ERROR_INTERVAL;
use super::issuer::KeepAlive;
use super::recorder::Operation;
use crate::error::Result;
use crate::sys::cuda::stream::EventHandle;

/// A point in a stream, for timing and for other streams to wait for.
///
/// Clones are the same event.
#[derive(Clone)]
pub struct Event {
    inner: Arc<EventInner>,
}

struct EventInner {
    handle: EventHandle,
    context: Context,
    timed: bool,
}

impl Context {
    /// Returns a new event for timing.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn event(&self) -> Result<Event> {
        Event::new(self, true)
    }

    /// Returns a new event without timing, for other streams to wait for; it costs less than a
    /// timed one.
    ///
    /// # Errors
    ///
    /// The driver's errors.
    pub fn event_without_timing(&self) -> Result<Event> {
        Event::new(self, false)
    }
}

impl Event {
    fn new(context: &Context, timed: bool) -> Result<Self> {
        let (handle, context) = (context.cuda().create_event(timed)?, context.clone());
        Ok(Self { inner: Arc::new(EventInner { handle, context, timed }) })
    }

    pub(crate) fn handle(&self) -> &EventHandle {
        &self.inner.handle
    }

    /// Returns whether the stream's work before the event is done; true for an event that was never
    /// recorded.
    ///
    /// # Errors
    ///
    /// The driver's error when a kernel failed; its `CUDA_ERROR_CAPTURED_EVENT` if the stream was
    /// captured at the last record: such an event is a point of the graph, also after the capture.
    pub fn is_reached(&self) -> Result<bool> {
        self.inner.context.cuda().bind()?;
        self.inner.handle.is_reached()
    }

    /// Waits until the stream's work before the event is done. That is what the driver has: not
    /// operations that a non-blocking communicator has still to enqueue. That kernels were aborted
    /// is an error of [`Stream::synchronize`](super::Stream::synchronize), not of this.
    ///
    /// # Errors
    ///
    /// [`StateError::DeadlinePassed`](crate::StateError::DeadlinePassed) if the GPU is stuck;
    /// [`WorldError::RankLost`](crate::WorldError::RankLost); [`Error::Nccl`](crate::Error::Nccl)
    /// if one of NCCL's operations in a stream of this context fails, or the network that a kernel
    /// there uses (GIN);
    /// [`StateError::CommunicatorEnded`](crate::StateError::CommunicatorEnded);
    /// [`StateError::Capturing`](crate::StateError::Capturing); the errors of
    /// [`is_reached`](Self::is_reached).
    pub fn synchronize(&self) -> Result<()> {
        self.inner.context.refuse_capturing("an event is waited for")?;
        let (context, machine) = (&self.inner.context, self.inner.context.machine());
        let _wait =
            context.recorder().begin(Operation::Event { event: self.handle().raw() as usize });
        let mut checked = machine.now();
        let waited = context.poll(None, || {
            let reached = self.is_reached()?;
            if !reached {
                context.refuse_stuck()?;
            }
            if !reached && machine.is_due(checked, ASYNC_ERROR_INTERVAL) {
                checked = machine.now();
                context.check_async_errors().map_err(|error| context.prefer_cause(error))?;
            }
            Ok(reached)
        });
        waited.inspect_err(|error| context.mark_reported(error))
    }

    /// Returns the driver's handle (`CUevent`, which is `cudaEvent_t`).
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.context().share_handles();
        self.inner.handle.raw().cast()
    }

    /// Returns the milliseconds from `start` to this event, by the GPU's clock, whose resolution is
    /// about 0.5 us.
    ///
    /// # Errors
    ///
    /// The driver's error, when one of the two has no timing, was not recorded or is not reached
    /// yet.
    pub fn elapsed_ms(&self, start: &Self) -> Result<f32> {
        self.inner.context.cuda().bind()?;
        self.inner.handle.elapsed_ms(&start.inner.handle)
    }

    /// Returns whether both are clones of one event.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Returns a reference that keeps the event alive.
    pub(crate) fn keep_alive(&self) -> KeepAlive {
        Arc::clone(&self.inner) as _
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.inner.timed
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }
}

impl Drop for EventInner {
    fn drop(&mut self) {
        // The driver's event is destroyed after this, which needs a current context.
        self.context.bind_to_free();
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event({:?})", self.inner.context)
    }
}

#[cfg(all(test, feature = "simulator"))]
mod tests {
    use devcomm_sim::Simulation;

    use super::*;
    use crate::machine::Machine;

    #[test]
    fn an_event_of_a_graph_is_not_reached_but_an_error_until_it_is_recorded_again() {
        let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
        let _entered = machine.enter_if_outside();
        let context = Context::on(&machine, 0).unwrap();
        let (event, stream) = (context.event().unwrap(), context.stream().unwrap());
        let graph = stream.capture(|| stream.record(&event)).unwrap();
        graph.launch(&stream).unwrap();
        for error in [event.is_reached().unwrap_err(), event.synchronize().unwrap_err()] {
            assert!(error.to_string().contains("CUDA_ERROR_CAPTURED_EVENT"), "{error}");
        }
        stream.record(&event).unwrap();
        event.synchronize().unwrap();
        assert!(event.is_reached().unwrap());
    }

    #[test]
    fn a_wait_for_an_event_is_recorded() {
        let machine = Machine::simulate(&Simulation::new(1), None).unwrap();
        let _entered = machine.enter_if_outside();
        let context = Context::on(&machine, 0).unwrap();
        let (event, stream) = (context.event().unwrap(), context.stream().unwrap());
        stream.record(&event).unwrap();
        event.synchronize().unwrap();
        let text = context.recorder().to_string();
        let wait = format!("wait for event {:#x}: returned after", event.handle().raw() as usize);
        assert!(text.contains(&wait), "{text}");
    }
}
