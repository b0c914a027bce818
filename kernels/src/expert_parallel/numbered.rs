//! The messages of a session within the LSA team: [`Lamport`] messages for rows, and *numbered*
//! ones, of two words that have the number of their launch in them: any number of threads may read
//! them, and no thread empties them.
//!
//! A slot of a numbered message is 16 bytes: a word, the number, the other word, the number, so
//! that both halves say when they have arrived. Two banks of slots take turns, as in the session of
//! Lamport messages, which has the number, and whose order of launches lets ranks reuse a bank.

use super::prelude::*;

const BANKS: usize = 2;

/// Words of a slot.
const SLOT: usize = 4;

/// Returns how many words, all 0 before the first launch, `capacity` slots for each rank take.
#[must_use]
pub const fn words(ranks: usize, capacity: usize) -> usize {
    BANKS * ranks * capacity * SLOT
}

/// The memory of a session.
#[repr(C)]
#[derive(Clone, Copy, KernelParam)]
pub struct Messages {
    /// The memory of [`Lamport`] messages.
    pub memory: LamportMemory,
    /// The slots of numbered messages: [`words()`] words.
    pub numbered: Window<u32>,
}

impl Messages {
    /// Returns what begins a launch without the absent ranks. The launch uses `used` slots for rows
    /// and `capacity` numbered ones from each rank, as every launch with this memory does: the
    /// second bank lies that far after the first. Reads nothing that a kernel writes.
    ///
    /// The team has `N` ranks, or `N` is [`ANY_RANKS`], and the memory has the slots.
    #[track_caller]
    pub(super) unsafe fn slots<'a, const N: usize>(
        self,
        comm: &'a DevComm,
        used: u32,
        capacity: u32,
    ) -> impl FnOnce(Ranks) -> Session<'a, N> {
        let numbered = self.numbered;
        // More addresses would take registers.
        let peer = if N == 2 { Some(numbered.lsa(comm.lsa_team().next())) } else { None };
        let (local, memory) = (numbered.local(), LamportMemory { capacity: used, ..self.memory });
        // SAFETY: the memory has the slots, as the caller guarantees.
        let slots = unsafe { LamportSlots::new(comm, &memory) };
        move |absent| {
            // SAFETY: the slots are those of a session, as the caller guarantees.
            let rows = unsafe { slots.begin(used) };
            Session { comm, rows, absent, numbered, local, peer, capacity }
        }
    }
}

/// The messages of a launch.
pub(super) struct Session<'a, const N: usize> {
    comm: &'a DevComm,
    pub(super) rows: Lamport<'a, N>,
    /// The ranks that neither send nor receive.
    pub(super) absent: Ranks,
    numbered: Window<u32>,
    /// The slots for numbered messages of this rank, and of its peer in a team of two.
    local: LsaPtr<u32>,
    peer: Option<LsaPtr<u32>>,
    /// Such slots for a source rank in a bank.
    capacity: u32,
}

#[track_callers]
impl<const N: usize> Session<'_, N> {
    /// Sends a numbered message, two words for a rank's number, to a slot of all peers that are not
    /// absent. The slot is below the capacity, and no other thread sends to it.
    pub(super) unsafe fn tell(&self, slot: u32, message: impl Fn(u32) -> [u32; 2]) {
        let team = self.comm.lsa_team();
        for distance in 1..rolled::<N>(self.comm) {
            let to = team.rotated(distance as i32);
            if !self.absent.contains(to as usize) {
                let ([a, b], number) = (message(to as u32), self.number());
                let part = self.peer.unwrap_or_else(|| self.numbered.lsa(to));
                let to = self.slot(part, team.rank as usize, slot);
                let message = Vec16::<u32>::from_bits([a, number, b, number]);
                // SAFETY: the slot is below the capacity, and only this thread sends to it.
                unsafe { mem::store_vec_relaxed(to, message, Scope::Sys) };
            }
        }
    }

    /// Loads what a rank has sent to a slot below the capacity in this launch, if it has arrived.
    pub(super) unsafe fn told(&self, source: usize, slot: u32) -> Option<[u32; 2]> {
        let from = self.slot(self.local, source, slot);
        // SAFETY: the slot is below the capacity, as the caller guarantees.
        let [a, first, b, second] = unsafe { mem::load_vec_relaxed(from, Scope::Sys) }.to_bits();
        (first == self.number() && second == self.number()).then_some([a, b])
    }

    /// Returns the number that says that a slot has this launch's message; not 0, which slots hold
    /// before the first launch. Successive launches of a bank have different numbers.
    fn number(&self) -> u32 {
        self.rows.launch().wrapping_add(1).max(1)
    }

    /// Returns the address of a slot of a source rank in a rank's memory, in this launch's bank.
    fn slot(&self, part: LsaPtr<u32>, source: usize, slot: u32) -> *mut u32 {
        let bank = self.rows.launch() as usize % BANKS;
        let place = (bank * ranks::<N>(self.comm) + source) * self.capacity as usize;
        part.as_ptr().wrapping_add(SLOT * (place + slot as usize))
    }
}
