//! Named waits: waits that declare what they wait for, in NCCL calls and in `nccl_device`.
//!
//! An NCCL call that waits for the network parks its thread until a condition holds ([`until`]).
//! The waits in `nccl_device` itself poll, and declare each poll ([`WAITS`]). In both cases reports
//! describe the wait, and the scheduler knows that the thread only waits. When all threads wait and
//! the network is idle, waits with a timeout expire one by one; if none has one, it is a deadlock.

use std::cell::Cell;

use cuda_std::arch::Order;
use devcomm_types::WaitFor;
use devcomm_types::nccl::DevComm;
use nccl_device::raw::host::Waits;

use crate::base::error::Site;
use crate::gpu::gpus::Gpus;
use crate::gpu::nccl::{QueueKey, arrived, gpus_of};
use crate::gpu::thread::{Thread, Wait};

/// What a wait is for, its deadline, and its location.
#[derive(Clone, Copy)]
pub(crate) struct NamedWait {
    /// What it is for, with the peer's world rank.
    pub(crate) what: WaitFor,
    /// The deadline on the [GPUs' clock](Gpus::clock), for a wait with a timeout.
    pub(crate) deadline: Option<u64>,
    pub(crate) at: Site,
}

impl NamedWait {
    /// Returns a wait. A timeout that exceeds the clock never ends.
    fn new(what: WaitFor, deadline: Option<u64>, at: Site) -> Self {
        Self { what, deadline: deadline.filter(|time| *time < u64::MAX), at }
    }
}

/// The state of a thread's named wait.
#[derive(Default)]
pub(crate) struct WaitState {
    /// The wait, while [`Thread::in_named_wait`] is set.
    pub(crate) named: Cell<Option<NamedWait>>,
    /// The condition that ends the wait, if the thread is parked.
    pub(crate) until: Cell<Option<Until>>,
    /// The kernel's line of the running wait of `nccl_device`.
    pub(crate) at: Cell<Option<Site>>,
    /// Whether the wait has timed out.
    pub(crate) timed_out: Cell<bool>,
    /// The [streak](Gpus::streak) in which the thread last polled, and its polls in that streak.
    pub(crate) polls: Cell<(u64, u32)>,
}

/// The condition that ends the wait of a parked thread.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// The word has reached `least`, by NCCL's rolling comparison of `bits` bits.
    Reached { word: *const u64, least: u64, bits: u32 },
    /// The ranks of an LSA barrier have arrived over multimem.
    Arrived { inbox: *const u32, target: u32 },
    /// The operations of a queue before number `before` are complete locally; without `gets`, it is
    /// enough that a get has been sent.
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

    /// Orders the thread after what has made the condition true, as reads of this order do.
    pub(crate) fn acquire(&self, thread: &Thread, order: Order) {
        let gpus = thread.gpus();
        let (memory, mut clock) = (&gpus.memory, thread.race.borrow_mut());
        match *self {
            Self::Reached { word, .. } => {
                memory.races.read_from(memory.as_ref(), &mut clock, word.addr(), order);
            }
            Self::Arrived { inbox, .. } => {
                memory.races.read_from(memory.as_ref(), &mut clock, inbox.addr(), order);
            }
            Self::Complete { queue, before, gets } => {
                let [reads, gotten] = gpus.network.flushed(queue, before, gets);
                // Whatever the order of the wait, the network's reads have ended before it.
                memory.races.learn(&mut clock, &reads);
                if gets {
                    memory.races.find_release(&mut clock, gotten, order);
                }
            }
            Self::QueueSpace { .. } => {}
        }
    }

    /// Returns the value of the word that the condition tests; 0 if it tests no word.
    pub(crate) fn seen(&self) -> u64 {
        match *self {
            // SAFETY: the word is a signal or counter of a device communicator, or a checked word
            // in a window; both outlive the launch.
            Self::Reached { word, .. } => unsafe { word.read_volatile() },
            // SAFETY: the word is in a barrier's memory, which outlives the launch.
            Self::Arrived { inbox, .. } => unsafe { inbox.read_volatile() }.into(),
            Self::Complete { .. } | Self::QueueSpace { .. } => 0,
        }
    }
}

/// Returns whether `value` has reached `least`, both modulo 2 to the power of `bits`. NCCL:
/// `rollingLessEq`.
pub(crate) fn reached(value: u64, least: u64, bits: u32) -> bool {
    let mask = u64::MAX >> (64 - bits);
    value.wrapping_sub(least) & mask <= mask >> 1
}

/// Parks the thread until `until` holds or the wait times out. Returns whether `until` holds.
pub(crate) fn until(
    thread: &Thread,
    until: Until,
    order: Order,
    what: WaitFor,
    deadline: Option<u64>,
    at: Site,
) -> bool {
    let gpus = thread.gpus();
    if gpus.skips_wait(at) {
        return true;
    }
    if until.holds(gpus) {
        until.acquire(thread, order);
        return true;
    }
    let state = &thread.state;
    state.named.set(Some(NamedWait::new(what, deadline, at)));
    state.until.set(Some(until));
    thread.in_named_wait.set(true);
    thread.suspend(Wait::Network);
    thread.in_named_wait.set(false);
    state.until.set(None);
    // The scheduler has woken the thread because `until` held or because the wait timed out. By now
    // both may be true.
    let holds = !state.timed_out.replace(false) || until.holds(gpus);
    if holds {
        until.acquire(thread, order);
    }
    holds
}

/// The functions that `nccl_device` calls in its own waits.
pub(crate) const WAITS: Waits = Waits { begin, poll, end };

fn begin(at: Site) {
    Thread::current().state.at.set(Some(at));
}

impl WaitState {
    /// Returns the kernel's line for an access at `at`: the line of the running wait, if the access
    /// is a poll of `nccl_device`.
    #[inline]
    pub(crate) fn line_of(&self, at: Site) -> Site {
        match self.at.get() {
            Some(wait) if is_of_nccl_device(at) => wait,
            _ => at,
        }
    }
}

/// Returns whether a location is in the source of `nccl_device`.
fn is_of_nccl_device(at: Site) -> bool {
    // `FILE` is the path of `wait.rs` in that folder.
    let folder = nccl_device::raw::host::FILE.trim_end_matches("wait.rs");
    at.file().starts_with(folder)
}

/// Declares a poll of the wait `what`, whose peer is a rank of `comm`; returns whether the wait
/// ends although its condition does not hold.
fn poll(comm: &DevComm, what: &WaitFor, deadline: Option<u64>, at: Site) -> bool {
    let thread = Thread::current();
    if thread.gpus().skips_wait(at) {
        return true;
    }
    let mut what = *what;
    // SAFETY: the kernel waits with this device communicator, which the host created.
    let gpus = unsafe { gpus_of(comm) };
    if let Some(gpu) = usize::try_from(what.peer).ok().and_then(|peer| gpus.get(peer)) {
        what.peer = *gpu as i32;
    }
    let state = &thread.state;
    state.named.set(Some(NamedWait::new(what, deadline, at)));
    thread.in_named_wait.set(true);
    let (streak, polls) = state.polls.get();
    let now = thread.gpus().streak.get();
    state.polls.set((now, if streak == now { polls + 1 } else { 1 }));
    // The wait may also have timed out before an access of the poll, where the thread may yield.
    if !state.timed_out.get() {
        thread.suspend(Wait::Spin { at, plain: false });
    }
    // Destructors of an unwinding thread do not wait.
    state.timed_out.replace(false) || thread.unwinding.get()
}

fn end() {
    let thread = Thread::current();
    thread.state.at.set(None);
    if thread.in_named_wait.replace(false) {
        thread.state.timed_out.set(false);
        thread.gpus().progress();
    }
}
