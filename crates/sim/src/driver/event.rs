//! Events: points in streams.

use std::cell::{Cell, RefCell};
use std::ffi::c_uint;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::driver::{CUevent, CUevent_flags, CUresult, CUstream};

use super::graph::Point;
use super::stream::{Stream, StreamOp};
use super::{Ask, Refused, ask};
use crate::machine::core::Core;

/// One event. A record has a number, since an event may be recorded anew while the last record is
/// still ahead of its stream.
#[derive(Default)]
pub(crate) struct Event {
    timed: bool,
    /// Records so far.
    recorded: Cell<u64>,
    /// The last one that its stream has passed, and when.
    reached: Cell<(u64, u64)>,
    /// Where it was recorded in a capture, if that was its last record.
    pub(super) captured: RefCell<Option<Point>>,
}

impl Event {
    /// `stream` passes it, in its turn.
    pub(crate) fn record(self: &Rc<Self>, core: &Core, stream: &Stream) {
        if let Some(joined) = &*stream.joined.borrow() {
            self.captured.replace(Some(joined.point()));
            return;
        }
        self.captured.take();
        let number = self.recorded.get() + 1;
        self.recorded.set(number);
        core.enqueue(stream, Box::new(Record { event: Rc::clone(self), number }));
    }

    /// `stream` waits for it, in its turn.
    pub(crate) fn wait(self: &Rc<Self>, core: &Core, stream: &Stream) -> Refused<()> {
        if let Some(point) = &*self.captured.borrow() {
            return point.join(stream);
        }
        if stream.joined.borrow().is_some() {
            // What is outside a capture cannot be waited for within.
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION.into());
        }
        let number = self.recorded.get();
        core.enqueue(stream, Box::new(Await { event: Rc::clone(self), number }));
        Ok(())
    }

    fn is_reached(&self) -> bool {
        self.reached.get().0 == self.recorded.get()
    }
}

impl Core {
    /// The event of a handle.
    pub(crate) fn event(&self, event: CUevent) -> Refused<Rc<Event>> {
        let found = self.events.borrow().get(&(event as u64)).cloned();
        found.ok_or_else(|| CUresult::CUDA_ERROR_INVALID_HANDLE.into())
    }
}

impl Ask<'_> {
    fn event(&self, event: CUevent) -> Refused<Rc<Event>> {
        self.gpu()?;
        self.core.event(event)
    }
}

pub(super) unsafe fn create(event: *mut CUevent, flags: c_uint) -> CUresult {
    ask("cuEventCreate", |ask| {
        ask.gpu()?;
        let timed = flags & CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint == 0;
        let handle = ask.core.new_handle();
        let made = Event { timed, ..Event::default() };
        ask.core.events.borrow_mut().insert(handle, Rc::new(made));
        // SAFETY: the module's.
        unsafe { event.write(handle as CUevent) };
        Ok(())
    })
}

/// Streams that wait for it go on waiting.
pub(super) unsafe fn destroy(event: CUevent) -> CUresult {
    ask("cuEventDestroy", |ask| match ask.core.events.borrow_mut().remove(&(event as u64)) {
        Some(_) => Ok(()),
        None => Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into()),
    })
}

pub(super) unsafe fn record(event: CUevent, stream: CUstream) -> CUresult {
    ask("cuEventRecord", |ask| {
        let (event, stream) = (ask.event(event)?, ask.stream(stream)?);
        event.record(ask.core, &stream);
        Ok(())
    })
}

pub(super) unsafe fn wait(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    ask("cuStreamWaitEvent", |ask| {
        let (event, stream) = (ask.event(event)?, ask.stream(stream)?);
        event.wait(ask.core, &stream)
    })
}

pub(super) unsafe fn query(event: CUevent) -> CUresult {
    ask("cuEventQuery", |ask| {
        let event = ask.event(event)?;
        if event.captured.borrow().is_some() {
            return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT.into());
        }
        match event.is_reached() {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_NOT_READY.into()),
        }
    })
}

/// Of the machine's clock, which says nothing about a GPU.
pub(super) unsafe fn elapsed_time(ms: *mut f32, start: CUevent, end: CUevent) -> CUresult {
    ask("cuEventElapsedTime", |ask| {
        let (start, end) = (ask.event(start)?, ask.event(end)?);
        if [&start, &end].iter().any(|event| !event.timed || event.recorded.get() == 0) {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE.into());
        }
        if !start.is_reached() || !end.is_reached() {
            return Err(CUresult::CUDA_ERROR_NOT_READY.into());
        }
        let nanoseconds = end.reached.get().1 as f64 - start.reached.get().1 as f64;
        // SAFETY: the module's.
        unsafe { ms.write((nanoseconds / 1e6) as f32) };
        Ok(())
    })
}

/// The stream passes an event.
struct Record {
    event: Rc<Event>,
    number: u64,
}

impl StreamOp for Record {
    fn poll(&mut self, core: &Core) -> Poll<()> {
        self.event.reached.set((self.number, core.clock()));
        Poll::Ready(())
    }

    fn describe(&self, _core: &Core) -> String {
        "an event is next".to_owned()
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self { event: Rc::clone(&self.event), number: self.number })
    }
}

/// The stream waits for an event of another.
struct Await {
    event: Rc<Event>,
    number: u64,
}

impl StreamOp for Await {
    fn poll(&mut self, _core: &Core) -> Poll<()> {
        if self.event.reached.get().0 < self.number {
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    fn describe(&self, _core: &Core) -> String {
        "a stream waits for an event that its stream has not reached".to_owned()
    }

    fn duplicate(&self) -> Box<dyn StreamOp> {
        Box::new(Self { event: Rc::clone(&self.event), number: self.number })
    }
}
