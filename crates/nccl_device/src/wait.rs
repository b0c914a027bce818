//! Waits: polling that the host can end, and that can have a timeout.
//!
//! Every wait of the typed layer is a loop of this file. Every few thousand polls it reads the
//! abort flag of the device communicator, in the host's memory. When it is set the thread notes
//! what it waited for in the host's [`AbortBlock`] and exits the kernel, and so does every thread
//! of its coop: the barrier at the end of NCCL's waits is a vote here, so a coop exits as a whole.
//!
//! # What an abort leaves
//!
//! Where a part of a block waits (a thread, a warp) and leaves, the block's other threads pass the
//! next barrier of the block without it: a kernel that uses what the part should have brought
//! checks [`DevComm::is_aborted`] first. A named barrier of a number of threads, which a warp
//! span's is, does not continue without threads that have left. And NCCL's PROXY put spins without
//! looking while its queue is full, so a stalled network can block a kernel there.

use cuda_std::atomic::{Order, Scope};
use cuda_std::{clock, mem, thread, warp};
use devcomm_types::{AbortBlock, STUCK_RECORDS, StuckRecord, WaitFor};

use crate::{Coop, DevComm};

/// Polls between two reads of the abort flag, which is in the host's memory: a read costs a
/// microsecond or two.
const POLLS_PER_CHECK: u32 = 1 << 12;

/// How long a wait may take at most.
///
/// In the simulator a wait with a timeout ends when nothing else in the simulated world can happen,
/// those that end earlier first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout {
    nanos: u64,
}

impl Timeout {
    /// So many nanoseconds. The GPU's clock counts them in steps of up to a microsecond.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn nanos(nanos: u64) -> Self {
        Self { nanos }
    }

    /// So many microseconds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn micros(micros: u64) -> Self {
        Self { nanos: micros.saturating_mul(1_000) }
    }

    /// So many milliseconds.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub const fn millis(millis: u64) -> Self {
        Self { nanos: millis.saturating_mul(1_000_000) }
    }
}

/// A wait took longer than it was given. Every thread of the coop gets it, or none does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

/// The end of a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    TimedOut,
    Aborted,
}

/// When a wait is over, if ever.
#[derive(Clone, Copy)]
pub struct Deadline {
    /// Nanoseconds of the GPU's clock; 0: never.
    at: u64,
}

impl Deadline {
    pub(crate) const NEVER: Self = Self { at: 0 };

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub(crate) fn after(timeout: Timeout) -> Self {
        Self { at: clock::globaltimer().saturating_add(timeout.nanos).max(1) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn nanos(self) -> Option<u64> {
        (self.at != 0).then_some(self.at)
    }

    /// Cycles until it, not fewer than there are: two a nanosecond.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn cycles_left(self) -> u64 {
        if self.at == 0 {
            u64::MAX
        } else {
            self.at.saturating_sub(clock::globaltimer()).saturating_mul(2)
        }
    }

    #[cfg(target_arch = "nvptx64")]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn has_passed(self) -> bool {
        self.at != 0 && clock::globaltimer() >= self.at
    }
}

impl DevComm {
    /// Whether the host has ended the kernels that use this device communicator. Waits look by
    /// themselves; this is for a kernel that computes for long. It reads the host's memory, which
    /// takes a microsecond or two.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn is_aborted(&self) -> bool {
        let flag = self.as_raw().abort_flag;
        // SAFETY: the host that set the pointer keeps the word alive while kernels run.
        !flag.is_null() && unsafe { mem::load_ordered(flag, Order::Relaxed, Scope::Sys) } != 0
    }

    /// Polls until `done`, for something of the kernel's own, as the waits of this crate do: the
    /// host can end it. `coop` is who waits: its first thread polls, and all continue together.
    ///
    /// ```
    /// # use nccl_device::{Coop, DevComm, LsaPtr};
    /// /// Waits for a peer's word.
    /// # fn f(comm: &DevComm, word: LsaPtr<u32>) {
    /// // SAFETY: the word is written by ordered stores only.
    /// comm.wait_until(Coop::cta(), || unsafe { word.load_acquire(0) } != 0);
    /// # }
    /// ```
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn wait_until(&self, coop: Coop, done: impl FnMut() -> bool) {
        let what = self.polled();
        let outcome = match coop.thread_rank() {
            0 => poll(self, Deadline::NEVER, done, || what),
            _ => Outcome::Done,
        };
        finish(coop, outcome);
    }

    /// [`wait_until`](Self::wait_until) with a timeout.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn wait_until_timeout(
        &self,
        coop: Coop,
        timeout: Timeout,
        done: impl FnMut() -> bool,
    ) -> Result<(), TimedOut> {
        let what = self.polled();
        let outcome = match coop.thread_rank() {
            0 => poll(self, Deadline::after(timeout), done, || what),
            _ => Outcome::Done,
        };
        finish_timed(coop, outcome)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn polled(&self) -> WaitFor {
        let kind = devcomm_types::WaitKind::Poll;
        WaitFor { kind, index: 0, context: 0, peer: -1, wanted: 0, seen: 0 }
    }
}

/// Polls until `done`, the deadline or the host's abort.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) fn poll(
    comm: &DevComm,
    deadline: Deadline,
    mut done: impl FnMut() -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    let mut polls = 0u32;
    let mut seen = Seen::default();
    loop {
        if done() {
            return Outcome::Done;
        }
        polls = polls.wrapping_add(1);
        let look = cfg!(not(target_arch = "nvptx64")) || polls.is_multiple_of(POLLS_PER_CHECK);
        if look && comm.is_aborted() {
            note(comm, what);
            return Outcome::Aborted;
        }
        if seen.is_over(deadline, &what) {
            return Outcome::TimedOut;
        }
    }
}

/// [`poll`] for a `done` that waits by itself, for at most so many cycles; of `longest` at most.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) fn poll_slices(
    comm: &DevComm,
    deadline: Deadline,
    longest: u64,
    mut done: impl FnMut(u64) -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    let mut slice = FIRST_SLICE;
    let mut seen = Seen::default();
    loop {
        // Simulated, it looks once: the simulator runs others between our looks.
        let cycles =
            if cfg!(target_arch = "nvptx64") { deadline.cycles_left().min(slice) } else { 0 };
        // In a longer slice NCCL looks at the flag itself, and says of an aborted wait that it
        // succeeded.
        if done(cycles) && (slice <= SHORT_SLICE || !comm.is_aborted()) {
            return Outcome::Done;
        }
        if comm.is_aborted() {
            note(comm, what);
            return Outcome::Aborted;
        }
        if seen.is_over(deadline, &what) {
            return Outcome::TimedOut;
        }
        slice = (2 * slice).min(longest);
    }
}

/// Cycles that NCCL waits before we look at the clock and the abort flag: half a millisecond at
/// first.
const FIRST_SLICE: u64 = 1 << 20;

/// Two milliseconds, in which NCCL polls fewer than the 10,000 times after which it looks at the
/// flag itself.
pub(crate) const SHORT_SLICE: u64 = 1 << 22;

/// Two seconds: for a wait that restarts in each slice, so that a slice gets long enough in the
/// end.
pub(crate) const LONG_SLICE: u64 = 1 << 32;

/// Who follows a wait between its polls: on a GPU nobody, and the clock says when it is over.
#[cfg(target_arch = "nvptx64")]
#[derive(Default)]
struct Seen;

#[cfg(target_arch = "nvptx64")]
impl Seen {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn is_over(&mut self, deadline: Deadline, _what: &impl Fn() -> WaitFor) -> bool {
        deadline.has_passed()
    }
}

/// The simulator runs others between two polls, knows what is waited for, and says when a wait with
/// a timeout is over.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Default)]
struct Seen {
    followed: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Seen {
    #[track_caller]
    fn is_over(&mut self, deadline: Deadline, what: &impl Fn() -> WaitFor) -> bool {
        self.followed = true;
        let at = std::panic::Location::caller();
        (crate::raw::host::waits().poll)(&what(), deadline.nanos(), at)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl Drop for Seen {
    fn drop(&mut self) {
        if self.followed {
            (crate::raw::host::waits().end)();
        }
    }
}

/// The end of a wait without a timeout, for every thread of the coop: a barrier, after which all
/// continue, or all leave.
///
/// Memory is ordered as by [`Coop::sync`].
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) fn finish(coop: Coop, mine: Outcome) {
    if coop.any(mine == Outcome::Aborted) {
        thread::exit();
    }
}

/// The end of a wait with a timeout.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
pub(crate) fn finish_timed(coop: Coop, mine: Outcome) -> Result<(), TimedOut> {
    if !coop.any(mine != Outcome::Done) {
        return Ok(());
    }
    if coop.any(mine == Outcome::Aborted) {
        thread::exit();
    }
    Err(TimedOut)
}

/// Whether a count that wraps around has reached `target`.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn has_reached(count: u32, target: u32) -> bool {
    count.wrapping_sub(target) <= u32::MAX / 2
}

/// Whether the thread leaves the kernel by a panic, which there is in the simulator alone: what
/// would wait for others, when it is dropped, must not.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub(crate) fn is_unwinding() -> bool {
    #[cfg(not(target_arch = "nvptx64"))]
    return std::thread::panicking();
    #[cfg(target_arch = "nvptx64")]
    false
}

/// Records in the host's block what a thread waited for.
#[cold]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
fn note(comm: &DevComm, what: impl Fn() -> WaitFor) {
    if !speaks_for_its_warp() {
        return;
    }
    let (block, thread) = (thread::block_idx_x(), thread::thread_idx_x());
    let warps = thread::block_dim_x().div_ceil(warp::WARP_SIZE);
    let slot = (block * warps + thread / warp::WARP_SIZE) as usize % STUCK_RECORDS;
    let abort = comm.as_raw().abort_flag.cast::<AbortBlock>();
    let WaitFor { kind, index, context, peer, wanted, seen } = what();
    // SAFETY: the flag is the first word of the host's block, which is alive while kernels run. The
    // host reads the records when the kernel has ended.
    unsafe {
        let record = (&raw mut (*abort).records).cast::<StuckRecord>().add(slot);
        mem::store(&raw mut (*record).block, block);
        mem::store(&raw mut (*record).thread, thread);
        mem::store(&raw mut (*record).index, index);
        mem::store(&raw mut (*record).context, context);
        mem::store(&raw mut (*record).peer, peer);
        mem::store(&raw mut (*record).wanted, wanted);
        mem::store(&raw mut (*record).seen, seen);
        mem::store_ordered(&raw mut (*record).kind, kind as u32, Order::Release, Scope::Sys);
    }
}

/// One thread of those of a warp that leave together, so that a record is one thread's.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn speaks_for_its_warp() -> bool {
    if cfg!(target_arch = "nvptx64") {
        warp::activemask().trailing_zeros() == warp::lane_id()
    } else {
        // Simulated threads run one after the other.
        true
    }
}
