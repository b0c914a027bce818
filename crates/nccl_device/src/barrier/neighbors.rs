//! A barrier of each rank with its two neighbours.

use cuda_std::atomic::{Order, Scope};
use cuda_std::mem::{load_ordered, store_ordered};
use devcomm_types::{WaitFor, WaitKind};

use super::arrival::{Arrive, Arrived};
use super::{Arrival, FenceLevel};
use crate::wait::{Deadline, Outcome, finish, finish_timed, has_reached, is_unwinding, poll};
use crate::{Coop, DevComm, MemoryOrder, Team, TimedOut, Timeout, Window};

/// A barrier of each rank of a team with its two neighbours, [`Team::prev`] and [`Team::next`]: for
/// stencils, which exchange borders with these alone, and rings.
///
/// It synchronises with no ranks beyond: those may be one synchronisation ahead or behind per step
/// of distance. As the other barriers it is a guard: dropping it closes the session.
///
/// ```
/// # use nccl_device::{Coop, DevComm, MemoryOrder, NeighborBarrier, Window};
/// # unsafe fn kernel(comm: DevComm, flags: Window<u32>, steps: u32) {
/// // SAFETY: words of the window for this barrier alone, 0 before the first launch.
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

/// The barrier's words in each rank: what its previous and its next rank have reached, and what it
/// has itself when no session is open.
const FROM_PREV: usize = 0;
const FROM_NEXT: usize = 1;
const EPOCH: usize = 2;

impl<'a> NeighborBarrier<'a> {
    /// Words of a window that a barrier takes.
    pub const WORDS: usize = 3;

    /// Opens a session, for the threads of `coop`, on the barrier of the [`WORDS`](Self::WORDS)
    /// words of `words` from element `first` on. So does the same coop in every other rank of the
    /// team.
    ///
    /// # Safety
    ///
    /// The team's members reach each other by load and store, and each has the words in its part of
    /// the window. They were 0 before the first launch, and are used by this barrier alone, one
    /// session at a time.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub unsafe fn new(
        coop: Coop,
        comm: &'a DevComm,
        team: Team,
        words: Window<u32>,
        first: usize,
    ) -> Self {
        // SAFETY: the caller's; peers do not touch this word.
        let epoch = unsafe { words.local().load(first + EPOCH) };
        Self { comm, coop, team, words, first, epoch }
    }

    /// Signals this coop's arrival to the neighbours. [`Arrival::wait`] waits for theirs; dropping
    /// the arrival waits too.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn arrive(&mut self, order: MemoryOrder) -> Arrival<'_, Self> {
        self.tell(order);
        Arrival::new(self, Arrived { order, fence: FenceLevel::None })
    }

    /// Arrives and waits.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn sync(&mut self, order: MemoryOrder) {
        self.tell(order);
        let outcome = self.wait_for_both(order, Deadline::NEVER);
        finish(self.coop, outcome);
    }

    /// [`sync`](Self::sync) with a timeout. After a timeout the barrier counts as passed, without
    /// its guarantees: a later one waits for the neighbours' arrival at both.
    ///
    /// # Errors
    ///
    /// [`TimedOut`], in every thread of the coop.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    pub fn sync_timeout(&mut self, order: MemoryOrder, timeout: Timeout) -> Result<(), TimedOut> {
        self.tell(order);
        let outcome = self.wait_for_both(order, Deadline::after(timeout));
        finish_timed(self.coop, outcome)
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn tell(&mut self, order: MemoryOrder) {
        self.epoch = self.epoch.wrapping_add(1);
        self.coop.sync();
        if self.coop.thread_rank() == 0 {
            order.fence_before_arrival();
            // SAFETY: the constructor's contract; this rank alone writes these words.
            let tell =
                |word| unsafe { store_ordered(word, self.epoch, Order::Relaxed, Scope::Sys) };
            tell(self.word(self.team.next(), FROM_PREV));
            tell(self.word(self.team.prev(), FROM_NEXT));
        }
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn wait_for_both(&self, order: MemoryOrder, deadline: Deadline) -> Outcome {
        if self.coop.thread_rank() > 0 {
            return Outcome::Done;
        }
        let mut from_next = false;
        loop {
            let (peer, word) = match from_next {
                false => (self.team.prev(), FROM_PREV),
                true => (self.team.next(), FROM_NEXT),
            };
            let own = self.word(self.team.rank, word);
            // SAFETY: as in `tell`.
            let seen = || unsafe { load_ordered(own, order.of_load(), Scope::Sys) };
            let what = || WaitFor {
                kind: WaitKind::Flag,
                index: (self.first + word) as u32,
                context: 0,
                peer: self.team.to_world(self.comm.rank(), peer),
                wanted: self.epoch.into(),
                seen: seen().into(),
            };
            let outcome = poll(self.comm, deadline, || has_reached(seen(), self.epoch), what);
            if from_next || outcome != Outcome::Done {
                return outcome;
            }
            from_next = true;
        }
    }

    /// One of the barrier's words in the part of a rank of the team.
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn word(&self, rank: i32, word: usize) -> *mut u32 {
        self.words.peer(self.team, rank).as_ptr().wrapping_add(self.first + word)
    }
}

impl Arrive for NeighborBarrier<'_> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn complete(&mut self, _arrived: Arrived, order: MemoryOrder) {
        let outcome = self.wait_for_both(order, Deadline::NEVER);
        finish(self.coop, outcome);
    }

    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    #[track_caller]
    fn complete_until(
        &mut self,
        _arrived: Arrived,
        order: MemoryOrder,
        deadline: Deadline,
    ) -> Result<(), TimedOut> {
        let outcome = self.wait_for_both(order, deadline);
        finish_timed(self.coop, outcome)
    }
}

impl Drop for NeighborBarrier<'_> {
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn drop(&mut self) {
        if is_unwinding() {
            return;
        }
        if self.coop.thread_rank() == 0 {
            // SAFETY: as in `new`.
            unsafe { self.words.local().store(self.first + EPOCH, self.epoch) };
        }
        self.coop.sync();
    }
}
