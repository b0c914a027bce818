//! Groups: operations that NCCL starts together.
//!
//! Sends and receives that wait for each other, and collectives of several communicators on one
//! thread, must be in one group. Inside [`group`] the operations are checked and recorded; NCCL is
//! called when the closure returns. If the closure fails or panics, NCCL is not called.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::Arc;

use devcomm_sys::nccl::SimInfo;

use super::abort::start_abort_and_log;
use super::deferred::{CallState, DeferredCall, Exchanged};
use super::handle::{Handle, Status};
use super::watched::watched;
use crate::device::in_group::{add_deferred, refuse_inside, set_deferred, set_open};
use crate::device::recorder::Operation;
use crate::error::{Error, Result, StateError};
use crate::sys::nccl::batch::{BatchedCall, make_all};
use crate::sys::nccl::call::Out;

/// NCCL's function that starts the operations of a group.
const END: &str = "ncclGroupEnd";

struct Recording {
    /// How many calls had been deferred when each open group began, the outermost first.
    begun_at: Vec<usize>,
    deferred: Vec<DeferredCall>,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// An open group, passed to its closure. Not `Send`: an NCCL group belongs to one thread.
#[derive(Debug)]
pub struct Group {
    _own_thread: PhantomData<*mut ()>,
}

impl Group {
    /// Returns the number of operations recorded so far, including those of enclosing groups.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a count, not a container")]
    pub fn len(&self) -> usize {
        RECORDING.with_borrow(|recording| recording.as_ref().map_or(0, |open| open.deferred.len()))
    }
}

/// NCCL's cost estimate for a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The estimated time. NCCL documents no unit (its cost model counts microseconds). Negative if
    /// NCCL has no estimate. NCCL: `estimatedTime`.
    pub time: f32,
}

/// Starts all operations of `f` together, when it returns; if groups nest, when the outermost does.
///
/// Inside, operations return before NCCL is called: a [`Window`](crate::Window) registered in the
/// group can be used once the group has ended. Operations that cannot be deferred, such as creating
/// communicators, fail with [`StateError::InGroup`]. Other work on a stream with deferred
/// operations (copies, fills, kernels, events, graphs, waits) would come before them, and fails
/// with [`StateError::BeforeDeferred`].
///
/// ```no_run
/// # use devcomm_host::{Communicator, Result, Stream, SymmetricBuffer, group};
/// # type Memory = SymmetricBuffer<f32>;
/// # fn ring(comm: &Communicator, a: &Memory, b: &Memory, stream: &Stream) -> Result<()> {
/// let (rank, n) = (comm.rank(), comm.n_ranks());
/// group(|_| {
///     comm.send(a, (rank + 1) % n, stream)?;
///     comm.recv(b, (rank + n - 1) % n, stream)
/// })
/// # }
/// ```
///
/// NCCL: `ncclGroupStart`, `ncclGroupEnd`.
///
/// # Errors
///
/// Those of the closure, and those that the operations document.
#[doc(alias = "ncclGroupStart")]
#[doc(alias = "ncclGroupEnd")]
pub fn group<T, E: From<Error>>(f: impl FnOnce(&Group) -> Result<T, E>) -> Result<T, E> {
    let (value, deferred) = record(f)?;
    if let Some(deferred) = deferred {
        perform(deferred, None)?;
    }
    Ok(value)
}

/// Asks NCCL how long the operations that `f` enqueues would take, and starts none of them.
///
/// NCCL: `ncclGroupSimulateEnd`.
///
/// # Errors
///
/// The errors are those of [`group`]; [`StateError::InGroup`] inside another group.
#[doc(alias = "ncclGroupSimulateEnd")]
pub fn simulate<E: From<Error>>(f: impl FnOnce(&Group) -> Result<(), E>) -> Result<Estimate, E> {
    refuse_inside("a simulation")?;
    let ((), deferred) = record(f)?;
    let out = Out::new(SimInfo::new());
    perform(deferred.unwrap_or_default(), Some(out.clone()))?;
    Ok(Estimate { time: out.get().estimated_time })
}

/// Runs `f` and returns what it deferred, if this is the outermost group.
fn record<T, E: From<Error>>(
    f: impl FnOnce(&Group) -> Result<T, E>,
) -> Result<(T, Option<Vec<DeferredCall>>), E> {
    let open = Open::new();
    let value = f(&Group { _own_thread: PhantomData })?;
    Ok((value, open.close()))
}

/// Guard of an open group: ends the recording, also if the closure fails or panics.
struct Open;

impl Open {
    fn new() -> Self {
        RECORDING.with_borrow_mut(|recording| {
            let open = recording.get_or_insert(Recording { begun_at: vec![], deferred: vec![] });
            open.begun_at.push(open.deferred.len());
        });
        set_open(true);
        Self
    }

    /// Returns the deferred calls, if this is the outermost group.
    fn close(self) -> Option<Vec<DeferredCall>> {
        std::mem::forget(self);
        RECORDING.with_borrow_mut(|recording| {
            let open = recording.as_mut()?;
            open.begun_at.pop();
            if !open.begun_at.is_empty() {
                return None;
            }
            set_open(false);
            set_deferred(std::iter::empty());
            recording.take().map(|open| open.deferred)
        })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let dropped = RECORDING.with_borrow_mut(|recording| {
            let Some(open) = recording.as_mut() else { return Vec::new() };
            // `new` has pushed it. A group inside this one drops only calls of its own, so that the
            // list is not shorter than when this one began.
            let begun_at = open.begun_at.pop().unwrap_or(0);
            let dropped = open.deferred.split_off(begun_at);
            set_deferred(open.deferred.iter().filter_map(|deferred| deferred.stream.clone()));
            if open.begun_at.is_empty() {
                set_open(false);
                *recording = None;
            }
            dropped
        });
        for deferred in dropped {
            deferred.state.set(CallState::Failed);
        }
    }
}

/// Defers a call to the end of the open group.
pub(super) fn defer(deferred: DeferredCall) {
    deferred.stream.iter().for_each(add_deferred);
    RECORDING.with_borrow_mut(|recording| match recording {
        Some(open) => open.deferred.push(deferred),
        // Callers have found a group open.
        None => deferred.state.set(CallState::Failed),
    });
}

/// Fails if two sends or receives of one communicator access the same memory, and one of them
/// receives: NCCL does both at the same time. What a rank receives from itself where it sends it
/// changes nothing.
fn require_apart(deferred: &[DeferredCall]) -> Result<()> {
    let all = || deferred.iter().filter_map(|call| Some((call, call.uses.exchanged.as_ref()?)));
    let place = |(call, memory): (&DeferredCall, &Exchanged)| {
        (call.communicator.created(), memory.bytes.start, memory.bytes.end)
    };
    let sent: BTreeSet<_> =
        all().filter(|(_, memory)| memory.is_own && !memory.is_received).map(place).collect();
    let changes = |exchange: &(&DeferredCall, &Exchanged)| {
        let memory = exchange.1;
        let is_in_place = memory.is_received && memory.is_own && sent.contains(&place(*exchange));
        !memory.bytes.is_empty() && !is_in_place
    };
    let mut all: Vec<_> = all().filter(changes).collect();
    all.sort_by_key(|exchange| place(*exchange));
    // The send and the receive whose memory ends last, of those that begin earlier.
    let mut last = [None::<(&DeferredCall, &Exchanged)>; 2];
    for (call, memory) in all {
        let is_same = |other: &DeferredCall| other.communicator.is(&call.communicator);
        for (other, before) in last.into_iter().flatten().filter(|(other, _)| is_same(other)) {
            let receives = memory.is_received || before.is_received;
            if receives && memory.bytes.start < before.bytes.end {
                return Err(Error::invalid(format!(
                    "the buffers of {} and of {} in one group overlap: NCCL does both at the same \
                     time, so each has memory of its own",
                    other.description, call.description
                )));
            }
        }
        let last = &mut last[usize::from(memory.is_received)];
        if last.is_none_or(|(other, before)| !is_same(other) || before.bytes.end < memory.bytes.end)
        {
            *last = Some((call, memory));
        }
    }
    Ok(())
}

/// Compares, in a checked world, the collectives with those of the other ranks: one communicator
/// after the other, in an order that their common ranks share.
fn compare(deferred: &[DeferredCall]) -> Result<()> {
    let mut calls: Vec<_> = deferred.iter().filter(|deferred| deferred.compares).collect();
    calls.sort_by_key(|deferred| deferred.communicator.created());
    calls.into_iter().try_for_each(|call| call.communicator.compare(&call.description))
}

/// Makes deferred calls in one NCCL group.
fn perform(deferred: Vec<DeferredCall>, simulation: Option<Out<SimInfo>>) -> Result<()> {
    let Some(first) = deferred.first() else { return Ok(()) };
    let nccl = Arc::clone(first.communicator.handle().nccl());
    let context = first.communicator.context().clone();
    if deferred.iter().any(|deferred| !deferred.communicator.handle().nccl().is(&nccl)) {
        deferred.iter().for_each(|deferred| deferred.state.set(CallState::Failed));
        return Err(Error::invalid("a group has communicators of different NCCL libraries"));
    }
    let launched = simulation.is_none();
    let compared =
        require_apart(&deferred).and_then(|()| if launched { compare(&deferred) } else { Ok(()) });
    let calls: Vec<_> = deferred.iter().map(|deferred| &*deferred.description).collect();
    let calls = format!("{END} of {}", calls.join("; "));
    let mut handles: Vec<Arc<Handle>> = Vec::new();
    let mut rest = Vec::with_capacity(deferred.len());
    let mut batch = Vec::with_capacity(deferred.len());
    for DeferredCall { communicator, call, stream, uses, state, .. } in deferred {
        let handle = communicator.handle();
        if !handles.iter().any(|other| Arc::ptr_eq(other, handle)) {
            handles.push(Arc::clone(handle));
        }
        let binder = communicator.context().cuda().binder();
        batch.push(BatchedCall { call, binder, rank: handle.rank() });
        rest.push((communicator, stream, uses, state));
    }
    // All threads use this order, so that two with the same communicators do not wait for each
    // other.
    handles.sort_by_key(|handle| Arc::as_ptr(handle).addr());
    let is_collective = rest.iter().any(|(_, stream, ..)| stream.is_none());
    let _group = context.recorder().begin(Operation::Nccl(calls.into()));
    let run = || {
        if is_collective && !launched {
            return Err(StateError::InGroup { what: "the simulation of a collective call" }.into());
        }
        for (communicator, _, uses, _) in &rest {
            uses.require_open(communicator.rank())?;
        }
        let entered: Vec<_> =
            handles.iter().map(|handle| handle.enter(&[Status::Live])).collect::<Result<_>>()?;
        entered.iter().try_for_each(|entered| entered.require_ready("a group"))?;
        let result = if is_collective {
            let nccl = Arc::clone(&nccl);
            let entered = entered.iter().zip(&handles);
            let used: Vec<_> =
                entered.map(|(entered, handle)| entered.begin_off_thread(handle)).collect();
            let work = move || {
                let _used = used;
                // SAFETY: all communicators are live and locked, and stay allocated until `used` is
                // dropped; `rest` keeps what the calls use, and is leaked if a call never returns.
                unsafe { make_all(&nccl, batch, simulation) }
            };
            watched(&context, END, work, || {
                handles.iter().for_each(start_abort_and_log);
            })
        } else {
            // SAFETY: all communicators are live and locked, and `rest` keeps what the calls use.
            unsafe { make_all(&nccl, batch, simulation) }
        };
        entered.iter().fold(result, |result, entered| entered.or_aborted(result))
    };
    let begun = || {
        let begin = rest.iter().map(|(communicator, stream, ..)| match stream {
            Some(stream) => stream.begin_enqueue(END),
            None => communicator.context().begin_enqueue(),
        });
        begin.collect::<Result<Vec<_>>>()
    };
    let (mut result, enqueues) = match compared.and_then(|()| begun()) {
        Ok(enqueues) => (run(), enqueues),
        Err(error) => (Err(error), Vec::new()),
    };
    if is_collective {
        // For non-blocking communicators, NCCL may still be writing the results.
        let mut all = rest.iter().map(|(communicator, ..)| communicator);
        result = result.and_then(|()| all.try_for_each(|comm| comm.wait_until_ready(END)));
    }
    for (.., state) in &rest {
        state.set(if result.is_ok() { CallState::Made } else { CallState::Failed });
    }
    if result.is_ok() && launched {
        for ((communicator, stream, uses, _), enqueue) in rest.iter().zip(&enqueues) {
            let Some(stream) = stream else { continue };
            stream.register_operation(enqueue, &communicator.owner(), uses.kept());
        }
    }
    // These are dropped before `rest`, whose drop may wait for a thread that ends an object and
    // waits for these.
    drop(enqueues);
    if let Err(error) = &result {
        for (communicator, _, uses, _) in rest {
            communicator.leak_if_unfinished(error, uses);
        }
    }
    result
}
