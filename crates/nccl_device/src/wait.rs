//! Waits: polling loops that the host can abort, and that can have a timeout.
//!
//! Every wait of this crate (except NCCL's in `raw`) is a loop of this module. Every few thousand
//! polls the loop reads the abort flag of the device communicator, in host memory. If the flag is
//! set, the thread records what it waited for in the host's [`AbortBlock`] and exits the kernel,
//! and so does every thread of its coop: where NCCL's waits end with a barrier, these end with a
//! barrier that is also an OR-reduction, so all threads of a coop exit or none does.
//!
//! # Limits of an abort
//!
//! If only a part of a block waits (a thread, a warp) and exits, the block's other threads pass
//! the next `bar.sync` of the whole block without that part: a kernel must check
//! [`DevComm::is_aborted`] before it uses data for which the part waited. A named barrier with a
//! thread count, such as that of a warp span, and an mbarrier never complete after some of their
//! threads have exited: threads that others wait for there use [`DevComm::wait_until_or_abort`] or
//! [`Lamport::continue_after_abort`](crate::Lamport::continue_after_abort), whose waits go on after
//! an abort. And NCCL's PROXY put spins without reading the abort flag while its queue is full, so
//! a stalled network can block a kernel there.

use crate::prelude::*;
use cuda_std::clock;
use devcomm_types::{AbortBlock, STUCK_RECORDS, StuckRecord};

/// The path of this file in a [`Location`](std::panic::Location): by its folder the simulator
/// recognises locations in this crate.
#[cfg(not(target_arch = "nvptx64"))]
pub const FILE: &str = file!();

/// The number of polls between two reads of the abort flag: a read of host memory takes a
/// microsecond or two.
const POLLS_PER_CHECK: u32 = 1 << 12;

/// The longest time that a wait may take.
///
/// In the simulator a wait times out only when nothing else in the simulation can make progress;
/// the wait with the earliest deadline times out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout {
    nanos: u64,
}

impl Timeout {
    /// Returns `nanos` nanoseconds. The GPU's `%globaltimer` advances in steps of up to a
    /// microsecond.
    pub const fn nanos(nanos: u64) -> Self {
        Self { nanos }
    }

    /// Returns `micros` microseconds.
    pub const fn micros(micros: u64) -> Self {
        Self { nanos: micros.saturating_mul(1_000) }
    }

    /// Returns `millis` milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self { nanos: millis.saturating_mul(1_000_000) }
    }
}

/// A wait reached its timeout. Every thread of the coop gets this error, or none does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOut;

/// The host has aborted the kernels of the device communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

/// The result of a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    TimedOut,
    Aborted,
}

/// The time at which a wait times out, or never.
#[derive(Clone, Copy)]
pub struct Deadline {
    /// The time in nanoseconds of `%globaltimer`; 0: never.
    at: u64,
}

impl Deadline {
    pub(crate) const NEVER: Self = Self { at: 0 };

    #[track_caller]
    pub(crate) fn after(timeout: Timeout) -> Self {
        Self { at: clock::globaltimer().saturating_add(timeout.nanos).max(1) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn nanos(self) -> Option<u64> {
        (self.at != 0).then_some(self.at)
    }

    /// Returns the clock cycles until the deadline, at 2 GHz. If a GPU's clock is faster, a slice
    /// ends too early, and [`poll_slices`] begins another one. If it is slower, the last slice ends
    /// late by the ratio of the clocks.
    #[track_caller]
    fn cycles_left(self) -> u64 {
        if self.at == 0 {
            u64::MAX
        } else {
            self.at.saturating_sub(clock::globaltimer()).saturating_mul(2)
        }
    }

    #[cfg(target_arch = "nvptx64")]
    fn has_passed(self) -> bool {
        self.at != 0 && clock::globaltimer() >= self.at
    }
}

#[track_callers]
impl DevComm {
    /// Returns whether the host has aborted the kernels that use this device communicator. Waits
    /// check this themselves; a kernel calls it in a long computation. It reads host memory, which
    /// takes a microsecond or two.
    pub fn is_aborted(&self) -> bool {
        let flag = self.as_raw().abort_flag;
        // SAFETY: the host that set the pointer keeps the flag allocated while kernels run.
        !flag.is_null() && unsafe { mem::load_ordered(flag, Order::Relaxed, Scope::Sys) } != 0
    }

    /// Polls until `done` returns true: a wait for any condition. The host can abort it, like the
    /// other waits of this crate. The threads of `coop` call this together: the first one polls,
    /// and all continue after a barrier.
    ///
    /// ```
    /// # use nccl_device::{Coop, DevComm, LsaPtr};
    /// /// Waits until a peer has set `word`.
    /// # fn f(comm: &DevComm, word: LsaPtr<u32>) {
    /// // SAFETY: the word is written by ordered stores only.
    /// comm.wait_until(Coop::cta(), || unsafe { word.load_acquire(0) } != 0);
    /// # }
    /// ```
    pub fn wait_until(&self, coop: Coop, done: impl FnMut() -> bool) {
        let outcome = poll_by_first(self, coop, Deadline::NEVER, done, describe_poll);
        finish(coop, outcome, CoopCall::new("comm.wait_until"));
    }

    /// Does the same as [`wait_until`](Self::wait_until), with a timeout.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn wait_until_timeout(
        &self,
        coop: Coop,
        timeout: Timeout,
        done: impl FnMut() -> bool,
    ) -> Result<(), TimedOut> {
        let outcome = poll_by_first(self, coop, Deadline::after(timeout), done, describe_poll);
        finish_timed(coop, outcome, CoopCall::new("comm.wait_until_timeout"))
    }

    /// Does the same as [`wait_until`](Self::wait_until), for one thread, which goes on after an
    /// abort instead of exiting: for a thread that others of its block wait for, by an mbarrier for
    /// instance, which an abort does not end. After an abort its data is not there, but those
    /// threads can end.
    ///
    /// # Errors
    ///
    /// [`Aborted`]. The host, which has aborted, finds a record of this wait.
    pub fn wait_until_or_abort(&self, done: impl FnMut() -> bool) -> Result<(), Aborted> {
        match poll(self, Deadline::NEVER, done, describe_poll) {
            Outcome::Aborted => Err(Aborted),
            // Without a deadline no wait times out.
            Outcome::Done | Outcome::TimedOut => Ok(()),
        }
    }
}

/// Describes a wait for a condition that the kernel defines.
fn describe_poll() -> WaitFor {
    WaitFor::of(devcomm_types::WaitKind::Poll)
}

/// Does the same as [`poll`], in the first thread of the coop; the other threads do not wait here.
#[track_caller]
pub(crate) fn poll_by_first(
    comm: &DevComm,
    coop: Coop,
    deadline: Deadline,
    done: impl FnMut() -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    match coop.thread_rank() {
        0 => poll(comm, deadline, done, what),
        _ => Outcome::Done,
    }
}

/// Polls until `done` returns true, the deadline passes or the host aborts.
#[track_caller]
pub(crate) fn poll(
    comm: &DevComm,
    deadline: Deadline,
    done: impl FnMut() -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    poll_by::<true>(comm, deadline, done, what)
}

/// Does the same as [`poll`]. With `EXITS` false, for a thread that goes on after an abort and may
/// then wait many times, it reads the abort flag more often, and records only that a wait has
/// ended.
#[track_caller]
pub(crate) fn poll_by<const EXITS: bool>(
    comm: &DevComm,
    deadline: Deadline,
    mut done: impl FnMut() -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    let mut polls = 0u32;
    let mut timeout = TimeoutCheck::begin();
    loop {
        if done() {
            return Outcome::Done;
        }
        polls = polls.wrapping_add(1);
        let per_check = if EXITS { POLLS_PER_CHECK } else { POLLS_PER_CHECK / 16 };
        // In the simulator all other threads may run between two polls, so each poll checks.
        let check = cfg!(not(target_arch = "nvptx64")) || polls.is_multiple_of(per_check);
        if check && comm.is_aborted() {
            if EXITS {
                record_wait(comm, what);
            } else {
                let abort = comm.as_raw().abort_flag.cast::<AbortBlock>();
                // SAFETY: the flag is the first field of the host's `AbortBlock`, which stays
                // allocated while kernels run.
                unsafe { mem::store_volatile(&raw mut (*abort).continued, 1) };
            }
            return Outcome::Aborted;
        }
        if timeout.is_over(comm, deadline, &what) {
            return Outcome::TimedOut;
        }
    }
}

/// Does the same as [`poll`], for a `done` that itself waits, for at most the number of cycles in
/// its argument: a slice. Slices double up to `longest` cycles.
#[track_caller]
pub(crate) fn poll_slices(
    comm: &DevComm,
    deadline: Deadline,
    longest: u64,
    mut done: impl FnMut(u64) -> bool,
    what: impl Fn() -> WaitFor,
) -> Outcome {
    let mut slice = FIRST_SLICE;
    let mut timeout = TimeoutCheck::begin();
    loop {
        // In the simulator `done` checks once: other threads run between two calls.
        let cycles =
            if cfg!(target_arch = "nvptx64") { deadline.cycles_left().min(slice) } else { 0 };
        // In a longer slice NCCL reads the abort flag itself, and returns success for an aborted
        // wait.
        if done(cycles) && (slice <= SHORT_SLICE || !comm.is_aborted()) {
            return Outcome::Done;
        }
        if comm.is_aborted() {
            record_wait(comm, what);
            return Outcome::Aborted;
        }
        if timeout.is_over(comm, deadline, &what) {
            return Outcome::TimedOut;
        }
        slice = (2 * slice).min(longest);
    }
}

/// Cycles that NCCL waits before `poll_slices` first checks the clock and the abort flag: about
/// half a millisecond.
const FIRST_SLICE: u64 = 1 << 20;

/// About a millisecond, in cycles. NCCL polls fewer than 10,000 times in it, and reads the abort
/// flag itself only after that many: a poll loads a word of device memory, which takes 320 to 380
/// cycles on an H200.
pub(crate) const SHORT_SLICE: u64 = 1 << 21;

/// About two seconds, in cycles: for a wait that starts anew in each slice, so that some slice is
/// long enough for it to complete.
pub(crate) const LONG_SLICE: u64 = 1 << 32;

/// Decides by the clock, on a GPU, whether a wait has timed out.
#[cfg(target_arch = "nvptx64")]
struct TimeoutCheck;

#[cfg(target_arch = "nvptx64")]
impl TimeoutCheck {
    fn begin() -> Self {
        Self
    }

    fn is_over(&mut self, _: &DevComm, deadline: Deadline, _: &impl Fn() -> WaitFor) -> bool {
        deadline.has_passed()
    }
}

/// Asks the simulator, which knows when the wait begins and ends, whether a wait has timed out.
/// Each call tells it what the thread waits for, and runs other threads.
#[cfg(not(target_arch = "nvptx64"))]
struct TimeoutCheck;

#[cfg(not(target_arch = "nvptx64"))]
impl TimeoutCheck {
    #[track_caller]
    fn begin() -> Self {
        (crate::raw::host::waits().begin)(std::panic::Location::caller());
        Self
    }

    #[track_caller]
    fn is_over(&mut self, comm: &DevComm, deadline: Deadline, what: &impl Fn() -> WaitFor) -> bool {
        let at = std::panic::Location::caller();
        (crate::raw::host::waits().poll)(comm.as_raw(), &what(), deadline.nanos(), at)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl Drop for TimeoutCheck {
    fn drop(&mut self) {
        (crate::raw::host::waits().end)();
    }
}

/// Ends a wait without a timeout, in every thread of the coop: a barrier, after which all continue,
/// or all exit the kernel.
///
/// The barrier orders memory as [`Coop::sync`] does.
#[track_caller]
pub(crate) fn finish(coop: Coop, outcome: Outcome, call: CoopCall) {
    if coop.any_in(call, outcome == Outcome::Aborted) {
        thread::exit();
    }
}

/// Ends a wait by [`finish`] if it has no deadline, or else by [`finish_timed`].
#[track_caller]
pub(crate) fn finish_by(
    deadline: Deadline,
    coop: Coop,
    outcome: Outcome,
    call: CoopCall,
) -> Result<(), TimedOut> {
    if deadline.at != 0 {
        return finish_timed(coop, outcome, call);
    }
    finish(coop, outcome, call);
    Ok(())
}

/// Ends a wait with a timeout, in every thread of the coop.
#[track_caller]
pub(crate) fn finish_timed(coop: Coop, outcome: Outcome, call: CoopCall) -> Result<(), TimedOut> {
    if !coop.any_in(call, outcome != Outcome::Done) {
        return Ok(());
    }
    if coop.any_in(call, outcome == Outcome::Aborted) {
        thread::exit();
    }
    Err(TimedOut)
}

/// Returns whether a counter that wraps around has reached `target`.
pub(crate) fn has_reached(count: u32, target: u32) -> bool {
    count.wrapping_sub(target) <= u32::MAX / 2
}

/// Returns whether the thread is unwinding from a panic, which happens in the simulator only. Then
/// a `Drop` must not wait for other threads.
pub(crate) fn is_unwinding() -> bool {
    #[cfg(not(target_arch = "nvptx64"))]
    return std::thread::panicking();
    #[cfg(target_arch = "nvptx64")]
    false
}

/// Records what a thread waited for in the host's [`AbortBlock`]. Each warp has a record; in a grid
/// of more than [`STUCK_RECORDS`] warps, several share one. The kind, which is written last, makes
/// a record valid.
#[cold]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
#[track_caller]
fn record_wait(comm: &DevComm, what: impl Fn() -> WaitFor) {
    if !is_lowest_active_lane() {
        return;
    }
    let (block, thread) = (thread::block_idx_x(), thread::thread_idx_x());
    let warps = thread::block_dim_x().div_ceil(warp::WARP_SIZE);
    let slot = (block * warps + thread / warp::WARP_SIZE) as usize % STUCK_RECORDS;
    let abort = comm.as_raw().abort_flag.cast::<AbortBlock>();
    let WaitFor { kind, index, context, peer, wanted, seen } = what();
    // SAFETY: the flag is the first field of the host's `AbortBlock`, which stays allocated while
    // kernels run. The host reads a record only after an acquire load of its kind.
    unsafe {
        let record = (&raw mut (*abort).records).cast::<StuckRecord>().add(slot);
        mem::store_volatile(&raw mut (*record).block, block);
        mem::store_volatile(&raw mut (*record).thread, thread);
        mem::store_volatile(&raw mut (*record).index, index);
        mem::store_volatile(&raw mut (*record).context, context);
        mem::store_volatile(&raw mut (*record).peer, peer);
        mem::store_volatile(&raw mut (*record).wanted, wanted);
        mem::store_volatile(&raw mut (*record).seen, seen);
        mem::store_ordered(&raw mut (*record).kind, kind as u32, Order::Release, Scope::Sys);
    }
}

/// Returns true in the lowest active lane of the warp, so that one thread writes the warp's record.
fn is_lowest_active_lane() -> bool {
    if cfg!(target_arch = "nvptx64") {
        warp::activemask().trailing_zeros() == warp::lane_id()
    } else {
        // Simulated threads run one at a time.
        true
    }
}
