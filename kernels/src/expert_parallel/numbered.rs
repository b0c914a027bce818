//! Messages of two words that have the number of their launch in them, within the LSA team: any
//! number of threads may read them, and nobody empties them.
//!
//! A slot is 16 bytes: a word, the number, the other word, the number, so that both halves say when
//! they have arrived. Two banks of slots take turns, as in a session of Lamport messages, whose
//! number it is, and whose order of launches lets a rank overwrite a bank.

use cuda_std::atomic::Scope;
use cuda_std::mem;
use cuda_std::vector::Vec16;
use devcomm_types::Team;
use nccl_device::{ANY_RANKS, DevComm, LsaPtr, Window};

/// Banks of slots.
const BANKS: usize = 2;

/// Words of a slot.
const SLOT: usize = 4;

/// Returns the words of a window with `capacity` slots for each of `ranks` ranks, all 0 before the
/// first launch.
#[must_use]
pub const fn words(ranks: usize, capacity: usize) -> usize {
    BANKS * ranks * capacity * SLOT
}

/// The slots of a window.
#[derive(Clone, Copy)]
pub(super) struct NumberedSlots<const N: usize> {
    window: Window<u32>,
    /// The memory of this rank and, of two, of the other: more addresses would take registers.
    local: LsaPtr<u32>,
    peer: Option<LsaPtr<u32>>,
    team: Team,
    /// Slots for a source rank in a bank.
    capacity: u32,
}

impl<const N: usize> NumberedSlots<N> {
    /// Makes the slots of a window. Reads nothing that a kernel writes.
    ///
    /// # Safety
    ///
    /// The team has `N` ranks, or that is [`ANY_RANKS`], and each rank's part of the window the
    /// [`words`].
    #[track_caller]
    pub(super) unsafe fn new(comm: &DevComm, window: Window<u32>, capacity: u32) -> Self {
        let team = comm.lsa_team();
        let peer = if N == 2 { Some(window.lsa(team.next())) } else { None };
        Self { window, local: window.local(), peer, team, capacity }
    }

    /// Returns the messages of a launch, given how many launches there were before it.
    pub(super) fn of(self, launch: u32) -> Numbered<N> {
        Numbered { slots: self, launch }
    }
}

/// The messages of a launch.
#[derive(Clone, Copy)]
pub(super) struct Numbered<const N: usize> {
    slots: NumberedSlots<N>,
    launch: u32,
}

impl<const N: usize> Numbered<N> {
    /// Returns the number that says that a slot has this launch's message.
    fn number(&self) -> u32 {
        self.launch.wrapping_add(1)
    }

    fn slot(&self, part: LsaPtr<u32>, source: usize, slot: u32) -> *mut u32 {
        let NumberedSlots { team, capacity, .. } = self.slots;
        let ranks = if N == ANY_RANKS { team.n_ranks as usize } else { N };
        let place = (self.launch as usize % BANKS * ranks + source) * capacity as usize;
        part.as_ptr().wrapping_add(SLOT * (place + slot as usize))
    }

    /// Sends two words to a slot of the rank that is `distance` after this one, modulo their
    /// number.
    ///
    /// # Safety
    ///
    /// `distance` is from 1 to that number less 1, `slot` below the capacity, and no other thread
    /// sends to it.
    #[track_caller]
    pub(super) unsafe fn send(&self, distance: usize, slot: u32, [a, b]: [u32; 2]) {
        let NumberedSlots { window, peer, team, .. } = self.slots;
        let part = match peer {
            Some(peer) => peer,
            None => window.lsa(team.rotated(distance as i32)),
        };
        let (to, number) = (self.slot(part, team.rank as usize, slot), self.number());
        let message = Vec16::<u32>::from_bits([a, number, b, number]);
        // SAFETY: the slot is below the capacity, and only this thread sends to it.
        unsafe { mem::store_vec_relaxed(to, message, Scope::Sys) };
    }

    /// Loads what a rank has sent to a slot in this launch, if it has arrived.
    ///
    /// # Safety
    ///
    /// `source` is another rank, and `slot` below the capacity.
    #[track_caller]
    pub(super) unsafe fn peek(&self, source: usize, slot: u32) -> Option<[u32; 2]> {
        let from = self.slot(self.slots.local, source, slot);
        // SAFETY: the slot is below the capacity, as the caller guarantees.
        let [a, first, b, second] = unsafe { mem::load_vec_relaxed(from, Scope::Sys) }.to_bits();
        (first == self.number() && second == self.number()).then_some([a, b])
    }
}
