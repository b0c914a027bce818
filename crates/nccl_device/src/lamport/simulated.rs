//! Checks and reports of simulated runs. A GPU has none of this.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::{Mutex, PoisonError};

use super::{ANY_RANKS, EMPTY, Lamport, SLOT};
use crate::prelude::*;

/// A message that was sent.
#[derive(Clone, Copy)]
struct Sent {
    launch: u32,
    at: &'static Location<'static>,
}

/// The last message to each slot, by the address at which its sender sees the slot. Another
/// simulation may have left it: only the slot says whether it still has the message.
static LAST: Mutex<BTreeMap<usize, Sent>> = Mutex::new(BTreeMap::new());

/// Checks that a team has as many ranks as slots are for.
#[track_caller]
pub(super) fn check_ranks(slots_for: usize, team: Team) {
    let ranks = team.n_ranks as usize;
    assert!(
        slots_for == ANY_RANKS || slots_for == ranks,
        "the slots are for {slots_for} ranks, but the team has {ranks}"
    );
}

impl<const N: usize, const EXITS: bool> Lamport<'_, N, EXITS> {
    /// Checks that the session has a slot.
    #[track_caller]
    pub(super) fn check_slot(&self, slot: u32) {
        assert!(slot < self.used, "slot {slot}, but the session began with {}", self.used);
    }

    /// Checks that a slot, to which the caller sends, is empty: the receiver has emptied it two
    /// launches ago, in a kernel that has ended.
    #[track_caller]
    pub(super) fn check_empty(&self, distance: usize, slot: u32) {
        self.check_slot(slot);
        let (to, comm) = (self.slot(distance, self.me(), slot), self.slots.comm);
        let sent = Sent { launch: self.launch, at: Location::caller() };
        let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).insert(to.addr(), sent);
        let Some(Sent { launch, at }) = last else { return };
        // After an abort slots keep the messages that no thread has received.
        if read(to) == [EMPTY; SLOT] || comm.is_aborted() {
            return;
        }
        let rank = self.world_rank(comm.lsa_team().rotated(distance as i32));
        if launch == self.launch {
            panic!(
                "slot {slot} of rank {rank} gets a second message in this launch, which lasts \
                 until all blocks have ended their session: the first one was sent at {at}"
            );
        }
        panic!(
            "slot {slot} of rank {rank} still has the message that was sent at {at} in launch \
             {launch}; this is launch {}",
            self.launch
        );
    }

    /// Checks that the threads of the coop have begun the same launch: one that begins it after
    /// another has ended it may have begun the next one.
    #[track_caller]
    pub(super) fn check_end(&self, coop: Coop) {
        let call = CoopCall::new("session.end").arg("begun in launch", self.launch.into());
        (raw::host::checks().call_without_wait)(&coop.as_raw(), call);
    }

    /// Adds the first message that is missing to the description of a wait.
    pub(super) fn first_missing(
        &self,
        messages: impl Iterator<Item = (usize, u32)>,
        what: WaitFor,
    ) -> WaitFor {
        let is_missing = |&(source, slot): &_| read(self.slot(0, source, slot)).contains(&EMPTY);
        messages.into_iter().find(is_missing).map_or(what, |(source, index)| WaitFor {
            index,
            peer: self.world_rank(source as i32),
            ..what
        })
    }

    /// Returns the rank of the device communicator that has this LSA rank.
    fn world_rank(&self, rank: i32) -> i32 {
        let comm = self.slots.comm;
        comm.lsa_team().to_world(comm.rank(), rank)
    }
}

/// Returns what a slot holds that the simulator has checked, as no access of the kernel.
fn read(slot: *const u32) -> [u32; SLOT] {
    // SAFETY: a thread has stored to the slot, or loaded it.
    unsafe { slot.cast::<[u32; SLOT]>().read_volatile() }
}
