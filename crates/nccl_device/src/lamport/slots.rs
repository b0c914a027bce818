//! The slots of a memory, with which a launch begins its session.

use super::{ANY_RANKS, BANKS, LAUNCHES, Lamport, LamportMemory, lamport_words};
use crate::LsaPtr;
use crate::prelude::*;

/// The slots of Lamport messages among the `N` ranks of the LSA team, or [`ANY_RANKS`].
#[derive(Clone, Copy)]
pub struct LamportSlots<'a, const N: usize> {
    pub(super) comm: &'a DevComm,
    pub(super) window: Window<u32>,
    pub(super) state: *mut u32,
    /// The slots of this rank and of the ranks after it; none with [`ANY_RANKS`].
    pub(super) parts: [LsaPtr<u32>; N],
    /// The number of slots for a source rank in a bank.
    pub(super) capacity: u32,
}

#[track_callers]
impl<'a, const N: usize> LamportSlots<'a, N> {
    /// Returns the [`lamport_words`] of `N` ranks.
    #[must_use]
    pub const fn words(capacity: usize) -> usize {
        lamport_words(N, capacity)
    }

    /// Returns the slots of a memory. This reads nothing that a kernel writes: a dependent launch
    /// calls it before it waits.
    ///
    /// # Safety
    ///
    /// The team has `N` ranks, and the memory is for them, of this capacity in each rank.
    pub unsafe fn new(comm: &'a DevComm, memory: &LamportMemory) -> Self {
        let (team, LamportMemory { slots: window, state, capacity, .. }) =
            (comm.lsa_team(), *memory);
        #[cfg(not(target_arch = "nvptx64"))]
        super::simulated::check_ranks(N, team);
        let mut parts = [window.local(); N];
        let mut distance = 1;
        while distance < N {
            parts[distance] = window.lsa(team.rotated(distance as i32));
            distance += 1;
        }
        Self { comm, window, state, parts, capacity }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        if N == ANY_RANKS { self.comm.lsa_team().n_ranks as usize } else { N }
    }

    /// Returns the slots of the rank that is `distance` after this one.
    pub(super) fn part(&self, distance: usize) -> LsaPtr<u32> {
        match (N, distance) {
            (ANY_RANKS, 0) => self.window.local(),
            (ANY_RANKS, _) => self.window.lsa(self.comm.lsa_team().rotated(distance as i32)),
            _ => self.parts[distance],
        }
    }

    /// Begins a launch that uses `used` slots for each source rank. Traps if there are fewer.
    ///
    /// # Safety
    ///
    /// One launch at a time uses the memory, the same one in all ranks. Each thread that sends or
    /// receives calls this or [`join`](Self::join), and one coop of each block calls
    /// [`Lamport::end`].
    pub unsafe fn begin(self, used: u32) -> Lamport<'a, N> {
        assert!(used <= self.capacity, "a launch uses more slots than there are");
        // SAFETY: this launch alone uses the memory, as the caller guarantees.
        let session = unsafe { self.join() };
        #[cfg(not(target_arch = "nvptx64"))]
        let session = Lamport { used, ..session };
        session
    }

    /// Returns the session of a launch that other threads of the grid [`begin`](Self::begin).
    ///
    /// # Safety
    ///
    /// The contract is that of [`begin`](Self::begin); the thread uses only slots that those
    /// threads have begun with.
    pub unsafe fn join(self) -> Lamport<'a, N> {
        // SAFETY: the caller's contract; the word changes only after all blocks ended the session.
        let launch =
            unsafe { mem::load_ordered(self.state.add(LAUNCHES), Order::Relaxed, Scope::Gpu) };
        Lamport {
            slots: self,
            launch,
            bank: launch % BANKS,
            #[cfg(not(target_arch = "nvptx64"))]
            used: self.capacity,
        }
    }
}
