//! What tests do to a machine: faults on request, and a record of the calls that were made.
//!
//! Every function of the driver and of NCCL that asks the machine's thread comes by here first.

use std::fmt;

use litemap::LiteMap;
use parking_lot::Mutex;

/// A call that goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The function, by the name that the driver or NCCL has for it: `cuStreamCreate`,
    /// `ncclCommSplit`.
    pub function: &'static str,
    /// The GPU whose calls are meant: that of the communicator, or else of the current context.
    /// `None`: any.
    pub gpu: Option<usize>,
    /// Which of these calls, from 0. `None`: each.
    pub nth: Option<usize>,
    /// What happens instead.
    pub effect: Effect,
}

/// What happens in a call that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// It returns this code of the driver's or NCCL's, and does nothing.
    Fail(i32),
    /// It does not return before a communicator of its GPU is aborted. It fails then, or when
    /// nothing on the machine can go on.
    Hang,
    /// It succeeds and gives NULL: memory, a communicator, a window.
    Null,
    /// It succeeds, and an error comes after it: of the communicator, where NCCL was called, with
    /// this code of NCCL's; else of the context, with this code of the driver's.
    Later(i32),
}

/// A call that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRecord {
    /// The function.
    pub function: &'static str,
    /// The GPU of its communicator or of the current context.
    pub gpu: Option<usize>,
    /// What it was called with, where that is recorded.
    pub detail: String,
    /// What it returned; `None` while it is waiting.
    pub code: Option<i32>,
}

/// The function and what it was called with, on one line.
impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.function)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " {}", self.detail) }
    }
}

/// The faults and the record of a machine.
#[derive(Default)]
pub(crate) struct Faults {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// With the calls that each has met so far.
    faults: Vec<(Fault, usize)>,
    records: Option<Vec<CallRecord>>,
    /// Aborts of communicators by GPU.
    aborts: LiteMap<usize, u64>,
}

/// A call that is being made.
#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) effect: Option<Effect>,
    record: Option<usize>,
    gpu: Option<usize>,
    /// Aborts on its GPU before it.
    aborts: u64,
}

impl Faults {
    pub(super) fn inject(&self, fault: Fault) {
        self.state.lock().faults.push((fault, 0));
    }

    pub(super) fn record(&self) {
        self.state.lock().records.get_or_insert_default();
    }

    pub(super) fn records(&self) -> Vec<CallRecord> {
        self.state.lock().records.clone().unwrap_or_default()
    }

    /// A call begins.
    pub(crate) fn enter(&self, function: &'static str, gpu: Option<usize>) -> Entry {
        let mut state = self.state.lock();
        let mut effect = None;
        for (fault, met) in &mut state.faults {
            if fault.function == function && (fault.gpu.is_none() || fault.gpu == gpu) {
                if fault.nth.is_none_or(|nth| nth == *met) {
                    effect.get_or_insert(fault.effect);
                }
                *met += 1;
            }
        }
        let record = state.records.as_mut().map(|records| {
            records.push(CallRecord { function, gpu, detail: String::new(), code: None });
            records.len() - 1
        });
        Entry { effect, record, gpu, aborts: state.aborts_on(gpu) }
    }

    /// Says what it was called with.
    pub(crate) fn detail(&self, entry: &Entry, detail: impl FnOnce() -> String) {
        self.change(entry, |record| record.detail = detail());
    }

    /// The call ends.
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

    /// A communicator of that GPU is aborted.
    pub(crate) fn release(&self, gpu: usize) {
        *self.state.lock().aborts.entry(gpu).or_default() += 1;
    }

    /// Whether a call that hangs does so no more.
    pub(crate) fn is_released(&self, entry: &Entry) -> bool {
        self.state.lock().aborts_on(entry.gpu) != entry.aborts
    }
}

impl State {
    fn aborts_on(&self, gpu: Option<usize>) -> u64 {
        gpu.and_then(|gpu| self.aborts.get(&gpu)).copied().unwrap_or(0)
    }
}
