//! Puts and signals of the host.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, RawStream, RawWaitSignal, RawWindow};

use super::batch::Operation;
use super::call::{Ask, Refusal, Refused, call};
use super::collective::{at, check, data_type};
use super::comm::{Comm, Member, SignalKey};
use super::window::Window;
use crate::machine::core::Core;

/// Data, if any, and then a signal.
#[derive(Clone)]
pub(super) struct Put {
    /// From where, and to where in the peer's window.
    data: Option<(usize, Rc<Window>, usize)>,
    bytes: usize,
    signal: SignalKey,
}

/// So many signals.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    count: u64,
    signal: SignalKey,
}

/// For reports.
impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SignalKey { from, context, index, .. } = self.signal;
        write!(f, "a wait for {} signals {index} of rank {from}", self.count)?;
        if context == 0 { Ok(()) } else { write!(f, " in context {context}") }
    }
}

impl Comm {
    /// Moves the data, and signals.
    pub(super) fn put(&self, core: &Core, Put { data, bytes, signal }: &Put) {
        if let Some((from, window, offset)) = data {
            let to = match window.at(signal.to, *offset, *bytes) {
                Ok(to) => to,
                Err(refusal) => return self.fail(&refusal),
            };
            if let Err(refusal) = check(core, self.gpu(signal.from), *from, *bytes) {
                return core.fail_with(refusal);
            }
            // SAFETY: both were checked; the window keeps its memory, and no kernel runs meanwhile.
            unsafe { at(to).copy_from(at(*from), *bytes) };
        }
        *self.signals.borrow_mut().entry(*signal).or_default() += 1;
    }

    /// Takes all these signals, if they are there.
    pub(super) fn take_signals(&self, awaited: &[Awaited]) -> bool {
        let mut signals = self.signals.borrow_mut();
        let there = |awaited: &Awaited| signals.get(&awaited.signal).copied().unwrap_or(0);
        if awaited.iter().any(|awaited| there(awaited) < awaited.count) {
            return false;
        }
        for Awaited { count, signal } in awaited {
            *signals.entry(*signal).or_default() -= count;
        }
        true
    }
}

impl Ask<'_> {
    /// A communicator whose one-sided operations are set up.
    fn one_sided(&self, comm: RawComm) -> Refused<Rc<Member>> {
        let member = self.live(comm)?;
        if member.settings.rma_contexts == 0 {
            return Err(Refusal::usage(
                "one-sided operations need at least one context (numRmaCtx)",
            ));
        }
        if !member.has_rma.get() && !member.settings.rma_eager {
            let text = "one-sided operations before the first window, without rmaEagerInit";
            return Err(Refusal::usage(text));
        }
        Ok(member)
    }
}

/// The signal of `index` and `context` between a rank and `peer`.
fn signal_of(member: &Member, peer: c_int, index: c_int, context: c_int) -> Refused<SignalKey> {
    let (comm, rank) = member.place()?;
    let peer = comm.rank(peer, "peer")?;
    let (contexts, signals) = (member.settings.rma_contexts, member.settings.rma_signals);
    if !(0..signals).contains(&index) || !(0..contexts).contains(&context) {
        let text = format!(
            "signal {index} of {signals} (numRmaSig) in context {context} of {contexts} (numRmaCtx)"
        );
        return Err(Refusal::argument(text));
    }
    Ok(SignalKey { to: peer, from: rank, context, index })
}

pub(super) unsafe extern "C" fn put_signal(
    local: *const c_void,
    count: usize,
    data_type_number: c_int,
    peer: c_int,
    window: RawWindow,
    offset: usize,
    index: c_int,
    context: c_int,
    flags: c_uint,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("ncclPutSignal", comm, |ask| {
        ask.note(|| {
            format!(
                "{count} type {data_type_number} peer {peer} offset {offset} signal {index} \
                 context {context}"
            )
        });
        let member = ask.one_sided(comm)?;
        let signal = signal_of(&member, peer, index, context)?;
        let bytes = count.checked_mul(data_type(data_type_number)?.size());
        let bytes = bytes.filter(|_| flags == 0);
        let text = || Refusal::argument(format!("{count} elements with flags {flags}"));
        let (bytes, window) = (bytes.ok_or_else(text)?, ask.window(window)?);
        if !window.is_of(&member) {
            return Err(Refusal::argument("a window of another communicator"));
        }
        window.at(signal.to, offset, bytes)?;
        let from = local.expose_provenance();
        ask.reached(&member, from, bytes)?;
        let windows = ask.core.nccl.windows.borrow();
        if !windows.values().any(|own| own.is_of(&member) && own.has(from, bytes)) {
            return Err(Refusal::argument("the data lies in no window of the communicator"));
        }
        let (data, stream) = (Some((from, window, offset)), ask.stream(&member, stream)?);
        let own = Operation::Put(Put { data, bytes, signal });
        ask.launch(&member, |launches| launches.add(&member, stream, own, None))
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
    call("ncclSignal", comm, |ask| {
        ask.note(|| format!("peer {peer} signal {index} context {context}"));
        let member = ask.one_sided(comm)?;
        let signal = signal_of(&member, peer, index, context)?;
        if flags != 0 {
            return Err(Refusal::argument(format!("flags {flags}")));
        }
        let own = Operation::Put(Put { data: None, bytes: 0, signal });
        let stream = ask.stream(&member, stream)?;
        ask.launch(&member, |launches| launches.add(&member, stream, own, None))
    })
}

pub(super) unsafe extern "C" fn wait_signal(
    n: c_int,
    waits: *mut RawWaitSignal,
    comm: RawComm,
    stream: RawStream,
) -> c_int {
    call("ncclWaitSignal", comm, |ask| {
        // SAFETY: the module's: there are as many as it says.
        let waits = (0..usize::try_from(n).unwrap_or(0)).map(|i| unsafe { *waits.add(i) });
        let waits: Vec<_> = waits.collect();
        ask.note(|| {
            let wait = |wait: &RawWaitSignal| {
                let RawWaitSignal { op_count, peer, signal_index, context } = wait;
                format!("{op_count} from peer {peer} signal {signal_index} context {context}")
            };
            waits.iter().map(wait).collect::<Vec<_>>().join(", ")
        });
        let member = ask.one_sided(comm)?;
        if waits.is_empty() {
            return Err(Refusal::argument("no signals to wait for"));
        }
        let awaited = |wait: &RawWaitSignal| {
            let key = signal_of(&member, wait.peer, wait.signal_index, wait.context)?;
            let text = || Refusal::argument(format!("{} signals", wait.op_count));
            let count = u64::try_from(wait.op_count).map_err(|_| text())?;
            Ok(Awaited { count, signal: SignalKey { to: key.from, from: key.to, ..key } })
        };
        let awaited = waits.iter().map(awaited).collect::<Refused<Rc<[_]>>>()?;
        let (own, stream) = (Operation::Await(awaited), ask.stream(&member, stream)?);
        ask.launch(&member, |launches| launches.add(&member, stream, own, None))
    })
}
