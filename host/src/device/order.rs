//! The order of operations on a GPU that must not run at the same time.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use super::context::Context;
use super::enqueues::Target;
use super::event::Event;
use super::stream::{Stream, StreamInner};
use crate::error::{Error, Result, StateError};
use crate::machine::Wakes;
use crate::sys::cuda::RawStream;

/// The whole GPU, as a number that each number from 1 to 10 divides.
const GPU: u32 = 2520;

/// The kind and the number of objects that no communicator has named.
const UNNAMED: (&str, u64) = ("unnamed object", 0);

/// An operation, for messages.
const OPERATION: &str = "an operation";

/// Whether an operation is captured, for [`LastOperations::take_turns`].
const CAPTURED: bool = true;

/// Orders the operations of one object that has a workspace, on whatever streams they are: one ends
/// before the next begins.
///
/// Operations that wait for other ranks also need room on the GPU, or they could wait for each
/// other: a part of the GPU is reserved for those of each object. Where the parts of several
/// objects are more than the GPU, their operations are ordered as the host calls them, which must
/// be the same order on all ranks. The error of a [wait](Stream::synchronize_within) whose deadline
/// has passed lists these objects.
///
/// Captured operations are ordered with those of the same capture, and when their graph is
/// launched, that launch is ordered as they would be. Launches of graphs of other libraries are not
/// known here: the program orders them, with events. What the host has waited for is not waited for
/// again.
///
/// ```no_run
/// # use devcomm_host::{Context, Result, Stream, StreamOrder};
/// # fn f(context: &Context, stream: &Stream) -> Result<()> {
/// let order = StreamOrder::concurrent(context, 2)?;
/// let turn = order.begin(stream)?;
/// // Launches a kernel on `stream` with at most half of the GPU's blocks.
/// drop(turn);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StreamOrder {
    inner: Arc<Inner>,
    context: Context,
}

#[derive(Debug)]
pub(super) struct Inner {
    /// The part of the GPU that the operations take, of [`GPU`].
    part: u32,
    /// The kind of the object, and its number among those of its communicator, from 1.
    object: OnceLock<(&'static str, u64)>,
}

impl Inner {
    fn object(&self) -> (&'static str, u64) {
        self.object.get().copied().unwrap_or(UNNAMED)
    }
}

/// The right to enqueue an operation, until it is dropped: other threads wait for it.
#[must_use = "the operation is enqueued while this lives"]
pub struct Turn<'a> {
    /// `None` within another turn of the thread.
    context: Option<&'a Context>,
}

impl fmt::Debug for Turn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turn")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(context) = self.context else { return };
        let mut state = context.orders().0.lock();
        (state.owner, state.ended) = (None, state.ended + 1);
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        if is_awaited {
            context.machine().notify();
        }
    }
}

/// The orders of a context's eager operations.
#[derive(Default)]
pub(super) struct Orders(Mutex<State>);

#[derive(Default)]
struct State {
    /// The thread that has the turn.
    owner: Option<ThreadId>,
    /// Whether another thread waits for its end.
    is_awaited: bool,
    /// The number of turns that have ended.
    ended: u64,
    /// The sum of all objects' parts of the GPU, of [`GPU`].
    parts: u64,
    eager: LastOperations,
    /// The capture by another library that operations were last captured in.
    foreign: Option<(u64, LastOperations)>,
}

/// The last operation of each object, oldest first.
#[derive(Default)]
pub(super) struct LastOperations(Vec<LastOperation>);

struct LastOperation {
    order: Arc<Inner>,
    /// The stream's handle. Several [`Stream`]s may have it.
    raw: usize,
    /// The stream, unless the operation has ended: the last handle of a stream waits for its work.
    stream: Weak<StreamInner>,
    /// The number of turns that had ended before the operation.
    turn: u64,
    /// Recorded after the operation, if `is_recorded`.
    event: Option<Event>,
    is_recorded: bool,
}

impl StreamOrder {
    /// Returns the order for operations that wait for no other rank.
    #[must_use]
    pub fn local(context: &Context) -> Self {
        Self::of(context, 0)
    }

    /// Returns the order for operations that wait for other ranks; those of `objects` objects can
    /// run at the same time. The launches of one object that are on the GPU at the same time take
    /// at most 1/`objects` of it. With 2 objects, a launch has at most one block per
    /// multiprocessor, of which two fit there. Four must fit if launches are
    /// [dependent](crate::Launch::dependent): then the kernels call `grid::wait_for_previous`
    /// before `grid::launch_next`, so that one launch waits while another runs. With 1, an
    /// operation may fill the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] unless there are 1 to 10 objects.
    pub fn concurrent(context: &Context, objects: u32) -> Result<Self> {
        if !(1..=10).contains(&objects) {
            return Err(Error::invalid(format!(
                "1 to 10 operations can be concurrent, not {objects}"
            )));
        }
        Ok(Self::of(context, GPU / objects))
    }

    fn of(context: &Context, part: u32) -> Self {
        context.orders().0.lock().parts += u64::from(part);
        let inner = Arc::new(Inner { part, object: OnceLock::new() });
        Self { inner, context: context.clone() }
    }

    /// Names the object, once: by its kind, and its number among those of its communicator.
    pub(crate) fn name(&self, kind: &'static str, number: u64) {
        let _ = self.inner.object.set((kind, number));
    }

    /// Returns the kind of the object, and its number among those of its communicator.
    pub(crate) fn object(&self) -> (&'static str, u64) {
        self.inner.object()
    }

    /// Returns whether an operation may fill the GPU.
    pub(crate) fn fills_gpu(&self) -> bool {
        self.inner.part == GPU
    }

    /// Returns whether the GPU has no room for operations of all its objects at the same time.
    pub(crate) fn is_crowded(&self) -> bool {
        self.context.orders().0.lock().parts > GPU.into()
    }

    /// Makes the next operation on `stream` wait for the last one of this object and, if the GPU
    /// has no room for both, for operations of other objects. It is to be enqueued while the result
    /// lives.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a stream of another context; [`StateError::Capturing`] while
    /// another thread captures a stream, or when an operation to wait for is on a stream that is
    /// being captured; [`StateError::BeforeDeferred`] in a group that has deferred operations on
    /// the stream; the driver's errors.
    pub fn begin(&self, stream: &Stream) -> Result<Turn<'_>> {
        if !stream.context().is(&self.context) {
            return Err(Error::invalid("the stream is of another context than the operation"));
        }
        if let Some(turn) = self.begin_again(stream)? {
            return Ok(turn);
        }
        let turn = self.context.turn()?;
        self.context.take_turn(std::slice::from_ref(&self.inner), stream)?;
        Ok(turn)
    }

    /// Begins in the usual case: nothing is captured, no thread has a turn, and the only earlier
    /// operation is one of this object on the same stream.
    fn begin_again(&self, stream: &Stream) -> Result<Option<Turn<'_>>> {
        let enqueue = stream.begin_enqueue(OPERATION)?;
        if self.context.is_capturing() || enqueue.target != Target::Gpu {
            return Ok(None);
        }
        let mut state = self.context.orders().0.lock();
        let turn = state.ended;
        let follows =
            state.owner.is_none() && state.eager.follow_on_the_stream(&self.inner, stream, turn);
        if !follows {
            return Ok(None);
        }
        state.owner = Some(thread::current().id());
        Ok(Some(Turn { context: Some(&self.context) }))
    }
}

impl Drop for StreamOrder {
    fn drop(&mut self) {
        let mut state = self.context.orders().0.lock();
        state.parts -= u64::from(self.inner.part);
        let removed = state.lists().map(|last| last.remove(&self.inner)).collect::<Vec<_>>();
        drop(state);
        // The lock is released first: this may drop an event.
        drop(removed);
    }
}

impl State {
    fn lists(&mut self) -> impl Iterator<Item = &mut LastOperations> {
        std::iter::once(&mut self.eager).chain(self.foreign.iter_mut().map(|(_, last)| last))
    }
}

impl Context {
    /// Waits until no other thread enqueues operations that are ordered.
    pub(super) fn turn(&self) -> Result<Turn<'_>> {
        let own = thread::current().id();
        let take = || {
            let mut state = self.orders().0.lock();
            match state.owner {
                Some(owner) if owner == own => Some(Turn { context: None }),
                Some(_) => {
                    state.is_awaited = true;
                    None
                }
                None => {
                    state.owner = Some(own);
                    Some(Turn { context: Some(self) })
                }
            }
        };
        if let Some(turn) = take() {
            return Ok(turn);
        }
        let mut turn = None;
        self.machine().poll(Wakes::Notified, self.deadline(), || {
            turn = take();
            if turn.is_none() {
                self.check_health()?;
            }
            Ok(turn.is_some())
        })?;
        turn.ok_or_else(|| Error::invalid("a wait for a turn that ended without it"))
    }

    /// Returns how many turns have ended.
    pub(super) fn ended_turns(&self) -> u64 {
        self.orders().0.lock().ended
    }

    /// Forgets the operations on the stream of the turns before `turns`, which have ended.
    pub(super) fn forget_ended(&self, stream: RawStream, turns: u64) {
        let has_ended = |used: &mut LastOperation| used.turn < turns && used.raw == stream as usize;
        let ended: Vec<_> = self.orders().0.lock().eager.0.extract_if(.., has_ended).collect();
        // The lock is released first: this may drop an event.
        drop(ended);
    }

    /// Forgets the operations on a stream that is idle, and not used again.
    pub(super) fn forget_stream(&self, stream: &Arc<StreamInner>) {
        let is_on = |used: &mut LastOperation| used.stream.as_ptr() == Arc::as_ptr(stream);
        let mut state = self.orders().0.lock();
        let ended: Vec<_> = state.lists().flat_map(|last| last.0.extract_if(.., is_on)).collect();
        drop(state);
        // The lock is released first: this may drop an event.
        drop(ended);
    }

    /// Returns the objects with operations that wait for other ranks and may not have ended, in the
    /// order in which the host has called these.
    pub(super) fn objects_in_progress(&self) -> Vec<String> {
        let state = self.orders().0.lock();
        let waiting = state.eager.0.iter().filter(|used| used.order.part > 0);
        let waiting: Vec<_> =
            waiting.map(|used| (used.order.object(), used.stream.upgrade())).collect();
        // The lock is released first, as the driver is called.
        drop(state);
        let may_run = |(_, stream): &(_, Option<Arc<StreamInner>>)| {
            stream.as_ref().is_some_and(|stream| stream.may_run())
        };
        let name = |((kind, number), _)| format!("{kind} {number}");
        waiting.into_iter().filter(may_run).map(name).collect()
    }

    /// Orders an operation of these objects on `stream`. The caller has the [turn](Self::turn).
    pub(super) fn take_turn(&self, objects: &[Arc<Inner>], stream: &Stream) -> Result<()> {
        let state = &self.orders().0;
        let enqueue = stream.begin_enqueue(OPERATION)?;
        match enqueue.target {
            Target::Graph => {
                let own = self.with_capture(|own| std::mem::take(&mut own.last_operations));
                let mut last = own.unwrap_or_default();
                let taken = last.take_turns(objects, stream, self.ended_turns(), CAPTURED);
                self.with_capture(|own| own.last_operations = last);
                taken
            }
            Target::Gpu => {
                let mut locked = state.lock();
                let (turn, mut last) = (locked.ended, std::mem::take(&mut locked.eager));
                drop(locked);
                let taken = last.take_turns(objects, stream, turn, !CAPTURED);
                state.lock().eager = last;
                taken
            }
            Target::ForeignGraph(id) => {
                let mut locked = state.lock();
                let (turn, before) = (locked.ended, locked.foreign.take());
                drop(locked);
                let of_capture = before.filter(|(other, _)| *other == id);
                let mut last = of_capture.map(|(_, last)| last).unwrap_or_default();
                let taken = last.take_turns(objects, stream, turn, CAPTURED);
                state.lock().foreign = Some((id, last));
                taken
            }
        }
    }
}

impl LastOperations {
    /// Returns the objects whose operations were captured.
    pub(super) fn objects(&self) -> Vec<Arc<Inner>> {
        self.0.iter().map(|used| Arc::clone(&used.order)).collect()
    }

    fn remove(&mut self, order: &Arc<Inner>) -> Option<LastOperation> {
        let at = self.0.iter().position(|used| Arc::ptr_eq(&used.order, order))?;
        Some(self.0.remove(at))
    }

    /// Follows the only operation, if it is one of the same object on the same stream; returns
    /// whether it did.
    fn follow_on_the_stream(&mut self, order: &Arc<Inner>, stream: &Stream, turn: u64) -> bool {
        let [used] = self.0.as_mut_slice() else { return false };
        let follows = Arc::ptr_eq(order, &used.order) && used.is_on(stream);
        if follows {
            (used.stream, used.turn, used.is_recorded) = (stream.weak(), turn, false);
        }
        follows
    }

    /// Makes `stream` wait for the last operations of these objects and, from the oldest on, for
    /// those of others until what is left of the GPU has room. The operation that comes next on
    /// `stream` is then the last one of these objects. `turn` is the number of ended turns.
    fn take_turns(
        &mut self,
        objects: &[Arc<Inner>],
        stream: &Stream,
        turn: u64,
        captured: bool,
    ) -> Result<()> {
        // The part of the GPU that the operation takes: a graph may run all its objects' operations
        // at once.
        let part = objects.iter().map(|order| order.part).sum::<u32>().min(GPU);
        let is_own =
            |used: &LastOperation| objects.iter().any(|order| Arc::ptr_eq(order, &used.order));
        let others = self.0.iter().filter(|used| !is_own(used)).map(|used| used.order.part);
        let mut taken = others.sum::<u32>();
        let mut at = 0;
        while at < self.0.len() {
            let used = &mut self.0[at];
            let must_follow = match is_own(used) {
                true => true,
                false if used.order.part == 0 || taken + part <= GPU => false,
                // The GPU has no room for both.
                false => {
                    taken -= used.order.part;
                    true
                }
            };
            if must_follow && !used.is_on(stream) {
                let has_ended = used.precede(stream, captured)?;
                if has_ended && !is_own(used) {
                    self.0.remove(at);
                    continue;
                }
            }
            at += 1;
        }
        for order in objects {
            let event = self.remove(order).and_then(|used| used.event);
            let (raw, weak) = (stream.handle().raw() as usize, stream.weak());
            let (order, is_recorded) = (Arc::clone(order), false);
            self.0.push(LastOperation { order, raw, stream: weak, turn, event, is_recorded });
        }
        Ok(())
    }
}

impl LastOperation {
    fn is_on(&self, stream: &Stream) -> bool {
        self.raw == stream.handle().raw() as usize
    }

    /// Makes later work of `stream` wait for this operation. Returns whether it has ended.
    fn precede(&mut self, stream: &Stream, captured: bool) -> Result<bool> {
        let context = stream.context();
        let Some(own) = self.stream.upgrade() else { return Ok(true) };
        if !self.is_recorded {
            context.cuda().bind()?;
            if !captured && own.handle.capture()?.is_some() {
                return Err(StateError::Capturing {
                    what: "an operation waits for another one on the captured stream",
                }
                .into());
            }
            // A new event for each capture: one that was recorded in it stays part of it.
            let event = match self.event.take().filter(|_| !captured) {
                Some(event) => event,
                None => context.event_without_timing()?,
            };
            context.cuda().bind()?;
            own.handle.record(event.handle())?;
            (self.event, self.is_recorded) = (Some(event), true);
        }
        let Some(event) = &self.event else { return Ok(false) };
        if !captured && event.is_reached()? {
            return Ok(true);
        }
        context.cuda().bind()?;
        stream.handle().wait_for(event.handle())?;
        Ok(false)
    }
}
