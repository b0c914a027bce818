//! CUDA events: record, wait, query, elapsed time.

use std::cell::{Cell, RefCell};
use std::ffi::c_uint;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{CUevent, CUevent_flags, CUresult, CUstream};

use super::graph::CapturePoint;
use super::stream::{Stream, StreamOp};
use super::{CallContext, CudaResult, call};
use crate::machine::core::Core;
use crate::race::Clock;

/// One event.
#[derive(Default)]
pub(crate) struct Event {
    timed: bool,
    /// The last record. An event may be recorded again while an earlier one is pending, for which
    /// streams may wait.
    last: RefCell<Option<Rc<Record>>>,
    /// The capture point of the last record, if the stream was being captured.
    pub(super) captured: RefCell<Option<CapturePoint>>,
}

/// One record of an event.
#[derive(Default)]
struct Record {
    /// The time at which it completed.
    completed: Cell<Option<u64>>,
    /// The accesses that are before the record, once it has completed.
    clock: RefCell<Clock>,
}

impl Event {
    /// Enqueues a record of the event on `stream`.
    pub(crate) fn record(self: &Rc<Self>, core: &Core, stream: &Stream) -> CudaResult<()> {
        if let Some(capturing) = &*stream.capturing.borrow() {
            self.captured.replace(Some(capturing.point()?));
            return Ok(());
        }
        self.captured.take();
        let record = Rc::<Record>::default();
        self.last.replace(Some(Rc::clone(&record)));
        core.enqueue(stream, Box::new(EventRecord(record)))
    }

    /// Enqueues a wait for the event on `stream`.
    pub(crate) fn wait(self: &Rc<Self>, core: &Core, stream: &Stream) -> CudaResult<()> {
        if let Some(point) = &*self.captured.borrow() {
            return point.join(stream);
        }
        if stream.capturing.borrow().is_some() {
            // A captured stream cannot wait for an event recorded outside the capture.
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION.into());
        }
        core.enqueue(stream, Box::new(EventWait(self.last.borrow().clone())))
    }
}

impl Core {
    /// Returns the event of a handle.
    pub(crate) fn event(&self, event: CUevent) -> CudaResult<Rc<Event>> {
        let found = self.events.borrow().get(&(event as u64)).cloned();
        found.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

impl CallContext<'_> {
    fn event(&self, event: CUevent) -> CudaResult<Rc<Event>> {
        self.gpu()?;
        self.core.event(event)
    }
}

pub(super) unsafe fn create(event: *mut CUevent, flags: c_uint) -> CUresult {
    call("cuEventCreate", |cx| {
        cx.gpu()?;
        let timed = flags & CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint == 0;
        let handle = cx.core.new_handle();
        let new = Event { timed, ..Event::default() };
        cx.core.events.borrow_mut().insert(handle, Rc::new(new));
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { event.write(handle as CUevent) };
        Ok(())
    })
}

/// Removes the event's handle. Streams that wait for the event still wait for its record.
pub(super) unsafe fn destroy(event: CUevent) -> CUresult {
    call("cuEventDestroy", |cx| match cx.core.events.borrow_mut().remove(&(event as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

pub(super) unsafe fn record(event: CUevent, stream: CUstream) -> CUresult {
    call("cuEventRecord", |cx| {
        let (event, stream) = (cx.event(event)?, cx.stream(stream)?);
        event.record(cx.core, &stream)
    })
}

pub(super) unsafe fn wait(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    call("cuStreamWaitEvent", |cx| {
        let (event, stream) = (cx.event(event)?, cx.stream(stream)?);
        event.wait(cx.core, &stream)
    })
}

pub(super) unsafe fn query(event: CUevent) -> CUresult {
    call("cuEventQuery", |cx| {
        let event = cx.event(event)?;
        if event.captured.borrow().is_some() {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT.into());
        }
        let Some(record) = &*event.last.borrow() else { return Ok(()) };
        if record.completed.get().is_none() {
            return Err(CUresult::CUDA_ERROR_NOT_READY.into());
        }
        cx.core.memory.races.host_learns(&record.clock.borrow());
        Ok(())
    })
}

/// Writes the virtual time between the two records, which does not predict a GPU's time.
pub(super) unsafe fn elapsed_time(ms: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    call("cuEventElapsedTime", |cx| {
        let (start, end) = (cx.event(start)?, cx.event(end)?);
        let time = |event: &Event| match &*event.last.borrow() {
            Some(record) if event.timed => Ok(record.completed.get()),
            _ => Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        };
        let (Some(start), Some(end)) = (time(&start)?, time(&end)?) else {
            return Err(CUresult::CUDA_ERROR_NOT_READY.into());
        };
        let nanoseconds = end as f64 - start as f64;
        // SAFETY: the program passes a valid out pointer, as CUDA requires.
        unsafe { ms.write((nanoseconds / 1e6) as f32) };
        Ok(())
    })
}

/// The stream operation that records an event.
struct EventRecord(Rc<Record>);

impl StreamOp for EventRecord {
    fn poll(&mut self, core: &Core) -> Poll<()> {
        self.0.completed.set(Some(core.clock()));
        self.0.clock.replace(core.memory.races.known_here());
        Poll::Ready(())
    }

    fn name(&self) -> String {
        "an event record".to_owned()
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self(Rc::clone(&self.0)))
    }
}

/// The stream operation that waits for an event's last record before the call, if there is one.
struct EventWait(Option<Rc<Record>>);

impl StreamOp for EventWait {
    fn poll(&mut self, core: &Core) -> Poll<()> {
        if let Some(record) = &self.0 {
            if record.completed.get().is_none() {
                return Poll::Pending;
            }
            core.memory.races.learn_here(&record.clock.borrow());
        }
        Poll::Ready(())
    }

    fn name(&self) -> String {
        "a wait for an event".to_owned()
    }

    fn describe(&self, _core: &Core) -> String {
        "waits for an event that has not completed".to_owned()
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self(self.0.clone()))
    }
}
