//! Named waits: for the network, and those of `nccl_device`'s typed layer.
//!
//! An NCCL call that waits for the network parks its thread until a condition holds ([`until`]).
//! The typed layer polls, and tells the simulator what for ([`WAITS`]). In both cases a report
//! names the wait, and the scheduler knows that the thread only waits: when all threads do and the
//! network is idle, waits with a timeout expire one after the other; without any, the run is stuck.

use std::cell::Cell;
use std::panic::Location;

use devcomm_types::WaitFor;
use nccl_device::raw::host::Waits;

use crate::error::Site;
use crate::gpus::Gpus;
use crate::nccl::{QueueKey, arrived};
use crate::thread::{Thread, Wait};

/// A wait with a name.
#[derive(Clone, Copy)]
pub(crate) struct NamedWait {
    pub(crate) what: WaitFor,
    /// Its deadline, in nanoseconds of the virtual clock, if it has a timeout.
    pub(crate) deadline: Option<u64>,
    pub(crate) at: Site,
}

/// A thread's wait.
#[derive(Default)]
pub(crate) struct WaitState {
    /// What it waits for, while [`Thread::waits`] is set.
    pub(crate) named: Cell<Option<NamedWait>>,
    /// What ends it, if the thread is parked.
    pub(crate) until: Cell<Option<Until>>,
    /// Whether it has timed out.
    pub(crate) over: Cell<bool>,
    /// The streak of passes without progress in which the thread last polled, and its polls in it.
    pub(crate) looks: Cell<(u64, u32)>,
}

/// What ends the wait of a parked thread.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// The word has reached `least`, by NCCL's rolling comparison of `bits` bits.
    Reached { word: *const u64, least: u64, bits: u32 },
    /// The ranks of an LSA barrier have arrived over multimem.
    Arrived { inbox: *const u32, target: u32 },
    /// The operations of a queue before number `before` are complete locally; without `gets`, their
    /// sources have been read.
    Complete { queue: QueueKey, before: u64, gets: bool },
    /// A queue has space for one more operation.
    QueueSpace { queue: QueueKey, depth: usize },
}

impl Until {
    pub(crate) fn holds(&self, gpus: &Gpus) -> bool {
        match *self {
            Self::Reached { least, bits, .. } => reached(self.seen(), least, bits),
            Self::Arrived { inbox, target } => arrived(inbox, target),
            Self::Complete { queue, before, gets } => gpus.network.complete(queue, gets) >= before,
            Self::QueueSpace { queue, depth } => gpus.network.posted(queue) < depth,
        }
    }

    /// The value of the word that it tests.
    pub(crate) fn seen(&self) -> u64 {
        match *self {
            // SAFETY: a signal or counter of a device communicator, or a word in a window that was
            // checked; both outlive the launch.
            Self::Reached { word, .. } => unsafe { word.read_volatile() },
            // SAFETY: as in `arrived`.
            Self::Arrived { inbox, .. } => unsafe { inbox.read_volatile() }.into(),
            Self::Complete { .. } | Self::QueueSpace { .. } => 0,
        }
    }
}

/// Whether `value` has reached `least`, both counted modulo 2 to the power of `bits`. NCCL:
/// `rollingLessEq`.
pub(crate) fn reached(value: u64, least: u64, bits: u32) -> bool {
    let mask = u64::MAX >> (64 - bits);
    value.wrapping_sub(least) & mask <= mask >> 1
}

/// Parks the thread until `until` holds. Returns whether it does: a wait with a timeout may expire
/// before.
pub(crate) fn until(
    thread: &Thread,
    until: Until,
    what: WaitFor,
    deadline: Option<u64>,
    at: Site,
) -> bool {
    let gpus = thread.gpus();
    if until.holds(gpus) {
        return true;
    }
    let state = &thread.state;
    state.named.set(Some(NamedWait { what, deadline, at }));
    state.until.set(Some(until));
    thread.waits.set(true);
    thread.suspend(Wait::Network);
    thread.waits.set(false);
    state.until.set(None);
    !state.over.replace(false) || until.holds(gpus)
}

/// The hooks of the typed layer's waits.
pub(crate) const WAITS: Waits = Waits { poll, end };

fn poll(what: &WaitFor, deadline: Option<u64>, at: &'static Location<'static>) -> bool {
    let thread = Thread::current();
    let state = &thread.state;
    state.named.set(Some(NamedWait { what: *what, deadline, at }));
    thread.waits.set(true);
    let (streak, looks) = state.looks.get();
    let now = thread.gpus().streak.get();
    state.looks.set((now, if streak == now { looks + 1 } else { 1 }));
    if !state.over.get() {
        thread.suspend(Wait::Spin { at });
    }
    // A thread that unwinds does not wait in destructors.
    state.over.replace(false) || thread.unwinding.get()
}

fn end() {
    let thread = Thread::current();
    thread.waits.set(false);
    thread.state.over.set(false);
    thread.gpus().progress();
}
