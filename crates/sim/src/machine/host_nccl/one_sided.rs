//! Host one-sided operations: put with signal, signal, wait for signals.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawStream, RawWaitSignal, RawWindow};

use super::batch::Operation;
use super::call::{CallContext, NcclError, NcclResult, call};
use super::collective::{at, check, data_type, inaccessible};
use super::comm::{Comm, RankComm, SignalKey};
use super::window::Window;
use crate::machine::core::Core;
use crate::race::{Clock, OpAccess};

/// A copy to a peer, if `data` is set, and then a signal.
#[derive(Clone)]
pub(super) struct Put {
    /// Source address, and the target's window and offset.
    data: Option<(usize, Rc<Window>, usize)>,
    bytes: usize,
    signal: SignalKey,
}

/// Signals that have arrived.
#[derive(Default)]
pub(super) struct Arrived {
    count: u64,
    /// The clock that a wait for them joins.
    clock: Clock,
}

/// A wait for a number of signals.
#[derive(Clone, Copy, Debug)]
pub(super) struct SignalWait {
    count: u64,
    signal: SignalKey,
}

/// Text for error messages.
impl fmt::Display for SignalWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SignalKey { from, context, index, .. } = self.signal;
        write!(f, "a wait for {} of signal {index} from rank {from}", self.count)?;
        if context == 0 { Ok(()) } else { write!(f, " in context {context}") }
    }
}

impl Comm {
    /// Copies the data and counts the signal.
    pub(super) fn put(&self, core: &Core, Put { data, bytes, signal }: &Put) {
        if let Some((from, window, offset)) = data {
            let to = match window.at(signal.to, *offset, *bytes) {
                Ok(to) => to,
                Err(error) => return self.fail(&error),
            };
            if let Err(error) = check(core, self.gpu(signal.from), *from, *bytes) {
                return core.fail_operation("a put", error);
            }
            // The target may have been deregistered since the call.
            if *bytes > 0 && !core.memory.is_live(to, *bytes) {
                return core.fail_operation("a put", inaccessible(core, to, *bytes));
            }
            let accessed = core
                .op_access("a put", *from, *bytes, OpAccess::Read)
                .and_then(|()| core.op_access("a put", to, *bytes, OpAccess::Write));
            if accessed.is_err() {
                return;
            }
            // SAFETY: both were checked, and no kernel runs now.
            unsafe { at(to).copy_from(at(*from), *bytes) };
        }
        let mut signals = self.signals.borrow_mut();
        let arrived = signals.entry(*signal).or_default();
        arrived.count += 1;
        core.memory.races.join(&mut arrived.clock, &core.memory.races.done_here());
    }

    /// Consumes the signals of all `waits`, if all have arrived; returns the clock that they join.
    pub(super) fn take_signals(&self, core: &Core, waits: &[SignalWait]) -> Option<Clock> {
        let mut signals = self.signals.borrow_mut();
        let arrived = |wait: &SignalWait| signals.get(&wait.signal).map_or(0, |state| state.count);
        // A list may have several waits for one signal.
        let needed = |wait: &SignalWait| -> u64 {
            let alike = waits.iter().filter(|other| other.signal == wait.signal);
            alike.map(|other| other.count).sum()
        };
        if waits.iter().any(|wait| arrived(wait) < needed(wait)) {
            return None;
        }
        let mut known = Clock::default();
        for SignalWait { count, signal } in waits {
            let arrived = signals.entry(*signal).or_default();
            arrived.count -= count;
            core.memory.races.join(&mut known, &arrived.clock);
        }
        Some(known)
    }
}

impl CallContext<'_> {
    /// Returns a communicator whose one-sided operations are set up.
    fn one_sided(&self, comm: RawComm) -> NcclResult<Rc<RankComm>> {
        let rank_comm = self.live(comm)?;
        if rank_comm.settings.rma_contexts == 0 {
            return Err(NcclError::usage(
                "one-sided operations need at least one context (numRmaCtx)",
            ));
        }
        if !rank_comm.has_rma.get() && !rank_comm.settings.rma_eager {
            let text = "one-sided operations before the first window, without rmaEagerInit";
            return Err(NcclError::usage(text));
        }
        Ok(rank_comm)
    }
}

/// Returns the key of signal `index` in `context`, from `rank_comm`'s rank to `peer`.
fn signal_of(
    rank_comm: &RankComm,
    peer: c_int,
    index: c_int,
    context: c_int,
) -> NcclResult<SignalKey> {
    let (comm, rank) = rank_comm.joined()?;
    let peer = comm.rank(peer, "peer")?;
    let (contexts, signals) = (rank_comm.settings.rma_contexts, rank_comm.settings.rma_signals);
    if !(0..signals).contains(&index) || !(0..contexts).contains(&context) {
        let text = format!(
            "signal {index} of {signals} (numRmaSig) in context {context} of {contexts} (numRmaCtx)"
        );
        return Err(NcclError::argument(text));
    }
    Ok(SignalKey { to: peer, from: rank, context, index })
}

pub(super) unsafe extern "C" fn put_signal(
    local: *const c_void,
    count: usize,
    type_number: c_int,
    peer: c_int,
    window: RawWindow,
    offset: usize,
    index: c_int,
    context: c_int,
    flags: c_uint,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("ncclPutSignal", comm, |cx| {
        cx.note(|| {
            format!(
                "{count} type {type_number} peer {peer} offset {offset} signal {index} \
                 context {context}"
            )
        });
        let rank_comm = cx.one_sided(comm)?;
        let signal = signal_of(&rank_comm, peer, index, context)?;
        let bytes = count.checked_mul(data_type(type_number)?.size());
        let bytes = bytes.filter(|_| flags == 0);
        let text = || NcclError::argument(format!("{count} elements with flags {flags}"));
        let (bytes, window) = (bytes.ok_or_else(text)?, cx.window(window)?);
        if !window.is_of(&rank_comm) {
            return Err(NcclError::argument("a window of another communicator"));
        }
        window.at(signal.to, offset, bytes)?;
        let from = local.expose_provenance();
        cx.check_access(&rank_comm, from, bytes)?;
        if !cx.is_in_window(&rank_comm, from, bytes) {
            return Err(NcclError::argument("the source is not in a window of the communicator"));
        }
        let (data, stream) = (Some((from, window, offset)), cx.stream(&rank_comm, stream)?);
        let operation = Operation::Put(Put { data, bytes, signal });
        cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, operation, None))
    })
}

pub(super) unsafe extern "C" fn signal(
    peer: c_int,
    index: c_int,
    context: c_int,
    flags: c_uint,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("ncclSignal", comm, |cx| {
        cx.note(|| format!("peer {peer} signal {index} context {context}"));
        let rank_comm = cx.one_sided(comm)?;
        let signal = signal_of(&rank_comm, peer, index, context)?;
        if flags != 0 {
            return Err(NcclError::argument(format!("flags {flags}")));
        }
        let operation = Operation::Put(Put { data: None, bytes: 0, signal });
        let stream = cx.stream(&rank_comm, stream)?;
        cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, operation, None))
    })
}

pub(super) unsafe extern "C" fn wait_signal(
    n: c_int,
    waits: *mut RawWaitSignal,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("ncclWaitSignal", comm, |cx| {
        // SAFETY: the program passes a list of `n` entries, as NCCL requires.
        let waits = (0..usize::try_from(n).unwrap_or(0)).map(|i| unsafe { *waits.add(i) });
        let waits: Vec<_> = waits.collect();
        cx.note(|| {
            let show = |wait: &RawWaitSignal| {
                let RawWaitSignal { op_count, peer, signal_index, context } = wait;
                format!("{op_count} from peer {peer} signal {signal_index} context {context}")
            };
            waits.iter().map(show).collect::<Vec<_>>().join(", ")
        });
        let rank_comm = cx.one_sided(comm)?;
        if waits.is_empty() {
            return Err(NcclError::argument("no signals to wait for"));
        }
        let read = |wait: &RawWaitSignal| {
            let key = signal_of(&rank_comm, wait.peer, wait.signal_index, wait.context)?;
            let text = || NcclError::argument(format!("{} signals", wait.op_count));
            let count = u64::try_from(wait.op_count).map_err(|_| text())?;
            Ok(SignalWait { count, signal: SignalKey { to: key.from, from: key.to, ..key } })
        };
        let waits = waits.iter().map(read).collect::<NcclResult<Rc<[_]>>>()?;
        let (operation, stream) = (Operation::WaitSignals(waits), cx.stream(&rank_comm, stream)?);
        cx.launch(&rank_comm, |launches| launches.add(&rank_comm, stream, operation, None))
    })
}
