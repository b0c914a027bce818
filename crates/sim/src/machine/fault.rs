//! Fault injection and call recording, for tests.
//!
//! Every driver and NCCL call begins with [`Faults::enter`].

use std::fmt;
use std::time::Duration;

use litemap::LiteMap;
use parking_lot::Mutex;

/// A fault to inject into a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The name of the driver's or NCCL's function: `cuStreamCreate`, `ncclCommSplit`. Functions
    /// that work without a machine, such as `cuInit` and `cuDriverGetVersion`, take no fault.
    pub function: &'static str,
    /// The GPU of the call's communicator, or else of the current context. `None`: any GPU.
    pub gpu: Option<usize>,
    /// Index of the matching call, from 0. `None`: every matching call.
    pub nth: Option<usize>,
    /// The effect.
    pub effect: Effect,
}

/// The effect of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// The call returns this code of the driver or NCCL, and does nothing.
    Fail(i32),
    /// The call blocks until a communicator of its GPU is aborted or revoked or the machine is
    /// deadlocked, and then fails.
    Hang,
    /// The call succeeds and returns NULL as its memory, communicator or window.
    Null,
    /// The call succeeds, and an asynchronous error with this code follows: of the communicator for
    /// an NCCL function, of the context for a driver function.
    Later(i32),
}

/// A fault to inject into a host thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadFault {
    /// The thread's name: `rank 1`.
    pub thread: String,
    /// Index of the entry, from 0: the thread [enters](crate::Machine::enter) the machine before
    /// each call of the driver and of NCCL, and before each wait.
    pub nth: usize,
    /// The effect.
    pub effect: ThreadEffect,
}

/// The effect of a fault of a host thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ThreadEffect {
    /// The thread panics: it unwinds.
    Die,
    /// The thread is absent for this time on the virtual clock, and then goes on.
    Sleep(Duration),
}

/// A recorded call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// The function.
    pub function: &'static str,
    /// The GPU of the call's communicator, or else of the current context.
    pub gpu: Option<usize>,
    /// The arguments, for functions that record them.
    pub detail: String,
    /// The return code; `None` while the call is pending.
    pub code: Option<i32>,
}

/// The function and its arguments, on one line.
impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.function)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " {}", self.detail) }
    }
}

/// Injected faults and recorded calls of a machine.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Faults, each with the number of calls that it has matched.
    faults: Vec<(Fault, usize)>,
    records: Option<Vec<CallRecord>>,
    /// Number of aborted and revoked communicators per GPU.
    aborts: LiteMap<usize, u64>,
    threads: Vec<ThreadFault>,
    /// The number of times that each thread has entered the machine while calls were recorded.
    entries: LiteMap<String, usize>,
}

/// A call in progress.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) effect: Option<Effect>,
    record: Option<usize>,
    gpu: Option<usize>,
    /// `State::aborts` of the call's GPU when the call began.
    aborts: u64,
}

impl Faults {
    pub(super) fn inject(&self, fault: Fault) {
        self.state.lock().faults.push((fault, 0));
    }

    pub(super) fn inject_into_thread(&self, fault: ThreadFault) {
        self.record();
        self.state.lock().threads.push(fault);
    }

    /// Returns the number of times that a thread has entered the machine.
    pub(super) fn entries(&self, thread: &str) -> usize {
        self.state.lock().entries.get(thread).copied().unwrap_or(0)
    }

    /// Returns whether entries are counted: they are once calls are recorded.
    pub(super) fn counts_entries(&self) -> bool {
        self.state.lock().records.is_some()
    }

    /// Counts an entry of a thread; returns the effect of a fault, if one was injected into it.
    pub(super) fn count_entry(&self, thread: &str) -> Option<ThreadEffect> {
        let mut state = self.state.lock();
        let nth = state.entries.entry(thread.to_owned()).or_insert(0);
        let now = *nth;
        *nth += 1;
        let mut faults = state.threads.iter();
        faults.find(|fault| fault.thread == thread && fault.nth == now).map(|fault| fault.effect)
    }

    pub(super) fn record(&self) {
        self.state.lock().records.get_or_insert_default();
    }

    pub(super) fn records(&self) -> Vec<CallRecord> {
        self.state.lock().records.clone().unwrap_or_default()
    }

    /// Returns whether a fault has been injected into calls of this function.
    pub(crate) fn injects_into(&self, function: &str) -> bool {
        self.state.lock().faults.iter().any(|(fault, _)| fault.function == function)
    }

    /// Begins a call.
    pub(crate) fn enter(&self, function: &'static str, gpu: Option<usize>) -> Entry {
        let mut state = self.state.lock();
        let mut effect = None;
        for (fault, matched) in &mut state.faults {
            if fault.function == function && (fault.gpu.is_none() || fault.gpu == gpu) {
                if fault.nth.is_none_or(|nth| nth == *matched) {
                    effect.get_or_insert(fault.effect);
                }
                *matched += 1;
            }
        }
        let record = state.records.as_mut().map(|records| {
            records.push(CallRecord { function, gpu, detail: String::new(), code: None });
            records.len() - 1
        });
        Entry { effect, record, gpu, aborts: state.aborts_on(gpu) }
    }

    /// Records a call's arguments.
    pub(crate) fn detail(&self, entry: &Entry, detail: impl FnOnce() -> String) {
        self.change(entry, |record| record.detail = detail());
    }

    /// Ends a call that returns `code`.
    pub(crate) fn leave(&self, entry: &Entry, code: i32) {
        self.change(entry, |record| record.code = Some(code));
    }

    fn change(&self, entry: &Entry, change: impl FnOnce(&mut CallRecord)) {
        let mut state = self.state.lock();
        let record = entry.record.and_then(|index| state.records.as_mut()?.get_mut(index));
        if let Some(record) = record {
            change(record);
        }
    }

    /// Ends a GPU's hanging calls, since a communicator was aborted or revoked.
    pub(crate) fn release(&self, gpu: usize) {
        *self.state.lock().aborts.entry(gpu).or_default() += 1;
    }

    /// Returns whether a hanging call must end.
    pub(crate) fn is_released(&self, entry: &Entry) -> bool {
        self.state.lock().aborts_on(entry.gpu) != entry.aborts
    }
}

impl State {
    fn aborts_on(&self, gpu: Option<usize>) -> u64 {
        gpu.and_then(|gpu| self.aborts.get(&gpu)).copied().unwrap_or(0)
    }
}
