//! A barrier between each rank and its two neighbours.

use crate::prelude::*;
use cuda_std::mem::{load_ordered, store_ordered};

use super::arrival::{Arrive, Arrived};
use super::{Arrival, FenceLevel};
use crate::wait::{has_reached, is_unwinding};

/// A barrier between each rank of a team and its two neighbours, [`Team::prev`] and [`Team::next`]:
/// for rings, and for stencils, which exchange borders with these two ranks only.
///
/// Other ranks are not synchronised: a rank at distance `d` may be `d` synchronisations ahead or
/// behind. Like the other barriers it is a guard: dropping it closes the session.
///
/// ```
/// # use nccl_device::{Coop, DevComm, MemoryOrder, NeighborBarrier, Window};
/// # unsafe fn kernel(comm: DevComm, flags: Window<u32>, steps: u32) {
/// // SAFETY: only this barrier uses these words of the window, 0 before the first launch.
/// let mut barrier =
///     unsafe { NeighborBarrier::new(Coop::cta(), &comm, comm.lsa_team(), flags, 0) };
/// for _ in 0..steps {
///     // Store the borders to the neighbours.
///     barrier.sync(MemoryOrder::AcqRel);
///     // Compute with what they stored here.
/// }
/// # }
/// ```
pub struct NeighborBarrier<'a> {
    comm: &'a DevComm,
    coop: Coop,
    team: Team,
    words: Window<u32>,
    first: usize,
    epoch: u32,
}

/// Offsets of the barrier's words: the epochs that the previous and the next rank have reached, and
/// this rank's own epoch while no session is open. An epoch counts synchronisations.
const FROM_PREV: usize = 0;
const FROM_NEXT: usize = 1;
const EPOCH: usize = 2;

#[track_callers]
impl<'a> NeighborBarrier<'a> {
    /// The number of window elements that a barrier uses.
    pub const WORDS: usize = 3;

    /// Opens a session for the threads of `coop`, on the barrier in the [`WORDS`](Self::WORDS)
    /// elements of `words` from `first` on. Every thread of the coop calls this, in every rank of
    /// the team.
    ///
    /// # Safety
    ///
    /// The team's ranks can load and store each other's memory, and each rank's part of the window
    /// has these elements. They were 0 before the first launch. Only this barrier uses them, one
    /// session at a time.
    pub unsafe fn new(
        coop: Coop,
        comm: &'a DevComm,
        team: Team,
        words: Window<u32>,
        first: usize,
    ) -> Self {
        // SAFETY: the caller's contract; peers do not access this word.
        let epoch = unsafe { words.local().load(first + EPOCH) };
        Self { comm, coop, team, words, first, epoch }
    }

    /// Signals this coop's arrival to the neighbours. [`Arrival::wait`] waits for theirs; dropping
    /// the arrival waits too.
    pub fn arrive(&mut self, order: MemoryOrder) -> Arrival<'_, Self> {
        self.signal_neighbors(order);
        Arrival::new(self, Arrived { order, fence: FenceLevel::None })
    }

    /// Arrives and waits.
    pub fn sync(&mut self, order: MemoryOrder) {
        // Without a deadline the wait does not time out.
        let _ = self.sync_until(order, Deadline::NEVER);
    }

    /// Does the same as [`sync`](Self::sync), with a timeout. After a timeout the barrier counts as
    /// passed, without its guarantees: the next synchronisation also waits for the arrivals that
    /// this one missed.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    pub fn sync_timeout(&mut self, order: MemoryOrder, timeout: Timeout) -> Result<(), TimedOut> {
        self.sync_until(order, Deadline::after(timeout))
    }

    fn sync_until(&mut self, order: MemoryOrder, deadline: Deadline) -> Result<(), TimedOut> {
        self.signal_neighbors(order);
        self.wait_until(order, deadline)
    }

    fn wait_until(&self, order: MemoryOrder, deadline: Deadline) -> Result<(), TimedOut> {
        let outcome = self.wait_for_both(order, deadline);
        finish_by(deadline, self.coop, outcome, CoopCall::new("neighbor_barrier.sync"))
    }

    fn signal_neighbors(&mut self, order: MemoryOrder) {
        self.epoch = self.epoch.wrapping_add(1);
        self.coop.sync_in(CoopCall::new("neighbor_barrier.sync"));
        if self.coop.thread_rank() == 0 {
            order.fence_before_arrival();
            // SAFETY: the constructor's contract; only this rank writes these words.
            let store =
                |word| unsafe { store_ordered(word, self.epoch, Order::Relaxed, Scope::Sys) };
            store(self.word(self.team.next(), FROM_PREV));
            store(self.word(self.team.prev(), FROM_NEXT));
        }
    }

    fn wait_for_both(&self, order: MemoryOrder, deadline: Deadline) -> Outcome {
        if self.coop.thread_rank() > 0 {
            return Outcome::Done;
        }
        // A loop has one copy of the polling code, which is inlined.
        let mut from_next = false;
        loop {
            let (peer, word) = match from_next {
                false => (self.team.prev(), FROM_PREV),
                true => (self.team.next(), FROM_NEXT),
            };
            let own = self.word(self.team.rank, word);
            // SAFETY: the kernel gave the constructor words that only this barrier uses.
            let seen = || unsafe { load_ordered(own, order.of_load(), Scope::Sys) };
            let what = || WaitFor {
                index: (self.first + word) as u32,
                peer: self.team.to_world(self.comm.rank(), peer),
                wanted: self.epoch.into(),
                seen: seen().into(),
                ..WaitFor::of(WaitKind::Flag)
            };
            let outcome = poll(self.comm, deadline, || has_reached(seen(), self.epoch), what);
            if from_next || outcome != Outcome::Done {
                return outcome;
            }
            from_next = true;
        }
    }

    /// Returns the address of one of the barrier's words in the memory of team rank `rank`.
    fn word(&self, rank: i32, word: usize) -> *mut u32 {
        self.words.peer(self.team, rank).as_ptr().wrapping_add(self.first + word)
    }
}

impl Arrive for NeighborBarrier<'_> {
    fn complete(
        &mut self,
        _arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        self.wait_until(order, deadline)
    }
}

impl Drop for NeighborBarrier<'_> {
    fn drop(&mut self) {
        if is_unwinding() {
            return;
        }
        if self.coop.thread_rank() == 0 {
            // SAFETY: only the coop's barrier uses the word, as the caller of `new` guarantees.
            unsafe { self.words.local().store(self.first + EPOCH, self.epoch) };
        }
        self.coop.sync_in(CoopCall::new("neighbor_barrier.sync"));
    }
}
