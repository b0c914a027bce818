//! Communicators: what their ranks share, and each rank's end.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::rc::{Rc, Weak};

use devcomm_sys::nccl::{IN_PROGRESS, RawComm, SUCCESS};
use litemap::LiteMap;

use super::call::{Ask, INTERNAL_ERROR, Refusal, Refused};
use super::collective::Round;
use super::config::Settings;
use super::meeting::{Meeting, Task};
use super::operator::Operators;
use super::p2p::Mailbox;
use crate::dev_comm::Groups;
use crate::machine::core::Core;
use crate::ranks::Ranks;

/// What the ranks of a communicator share.
pub(crate) struct Comm {
    /// Of all communicators of the machine. NCCL: `commHash`.
    pub(super) number: u64,
    pub(super) ranks: Ranks,
    /// Multicast addresses of the LSA teams, once somebody has asked for them.
    lsa_multicast: OnceCell<Groups>,
    /// Each rank's end, as long as it is there.
    members: Box<[Weak<Member>]>,
    /// Calls that all ranks make together, by their number.
    pub(super) meetings: RefCell<LiteMap<u64, Rc<Meeting>>>,
    /// Shrinks by the ranks that are left out.
    pub(super) shrinks: RefCell<LiteMap<Vec<usize>, Rc<Meeting>>>,
    /// The growth that is being prepared.
    pub(super) growth: RefCell<Option<Rc<Meeting>>>,
    /// Collectives that not all ranks have come to, by their number.
    pub(super) rounds: RefCell<LiteMap<u64, Round>>,
    /// Sends and receives by (from, to).
    pub(super) mailboxes: RefCell<LiteMap<(usize, usize), Mailbox>>,
    /// Signals that have come and were not waited for.
    pub(super) signals: RefCell<LiteMap<SignalKey, u64>>,
}

/// Where signals are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SignalKey {
    pub(super) to: usize,
    pub(super) from: usize,
    pub(super) context: c_int,
    pub(super) index: c_int,
}

/// One rank's end of a communicator.
pub(crate) struct Member {
    pub(super) handle: u64,
    pub(super) gpu: usize,
    pub(super) settings: Settings,
    /// The communicator and the rank; not known before all ranks have come.
    place: OnceCell<(Rc<Comm>, usize)>,
    pub(super) life: Cell<Life>,
    pub(super) is_suspended: Cell<bool>,
    /// Grows when what is under way is to end.
    pub(super) epoch: Cell<u64>,
    /// Calls that wait for other ranks.
    pub(super) tasks: RefCell<Vec<Rc<Task>>>,
    /// So often what does not block is still found to be going on.
    pub(super) looks: Cell<u32>,
    /// What failed in the background.
    pub(super) error: RefCell<Option<Refusal>>,
    /// Calls that all ranks make together so far.
    pub(super) calls: Cell<u64>,
    /// Collectives that were launched so far.
    pub(super) collectives: Cell<u64>,
    /// What is in the queue of a stream has a clone.
    pub(super) queued: Rc<()>,
    pub(super) operators: Operators,
    /// Registered buffers by handle.
    pub(super) buffers: RefCell<BTreeSet<u64>>,
    /// Whether one-sided operations are set up: from the first window on.
    pub(super) has_rma: Cell<bool>,
}

/// What a communicator can still be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Live,
    /// Split, shrink and its end.
    Revoked,
    /// Its end.
    Finalized,
    Ended,
}

/// Looks that find an operation going on that does not block: it is over at once, and a program
/// that does not look would not notice.
const LOOKS: u32 = 3;

impl Comm {
    /// The communicator of these ends, in the order of ranks.
    pub(super) fn make(core: &Core, members: Vec<Rc<Member>>) -> Rc<Self> {
        let gpus: Rc<[u32]> = members.iter().map(|member| member.gpu as u32).collect();
        let lsa_ranks = lsa_size(&gpus, core.simulation.team() as u32);
        let (memory, network) = (Rc::clone(&core.memory), Rc::clone(&core.gpus.network));
        let comm = Rc::new(Self {
            number: core.new_handle(),
            ranks: Ranks { gpus, lsa_ranks, memory, network },
            lsa_multicast: OnceCell::new(),
            members: members.iter().map(Rc::downgrade).collect(),
            meetings: RefCell::default(),
            shrinks: RefCell::default(),
            growth: RefCell::default(),
            rounds: RefCell::default(),
            mailboxes: RefCell::default(),
            signals: RefCell::default(),
        });
        for (rank, member) in members.iter().enumerate() {
            let _ = member.place.set((Rc::clone(&comm), rank));
        }
        comm
    }

    pub(super) fn n_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Ranks that reach each other by load and store.
    pub(super) fn lsa_size(&self) -> usize {
        self.ranks.lsa_ranks
    }

    /// A rank's GPU.
    pub(super) fn gpu(&self, rank: usize) -> usize {
        self.ranks.gpus[rank] as usize
    }

    /// The multicast addresses of the LSA teams.
    pub(super) fn lsa_multicast(&self) -> Refused<&Groups> {
        if self.lsa_multicast.get().is_none() {
            let made = Groups::of_lsa_teams(&self.ranks);
            let made = made.map_err(|error| Refusal::new(INTERNAL_ERROR, error.to_string()))?;
            let _ = self.lsa_multicast.set(made);
        }
        let none = || Refusal::new(INTERNAL_ERROR, "no multicast");
        self.lsa_multicast.get().ok_or_else(none)
    }

    /// The ranks broke a rule together: whatever is under way ends.
    pub(super) fn fail(&self, why: &Refusal) {
        for member in self.members.iter().filter_map(Weak::upgrade) {
            member.fail(why);
            member.cut();
        }
    }

    /// A number of another rank's, which there is.
    pub(super) fn rank(&self, rank: c_int, what: &str) -> Refused<usize> {
        let n = self.n_ranks();
        let known = usize::try_from(rank).ok().filter(|rank| *rank < n);
        known.ok_or_else(|| Refusal::argument(format!("{what} {rank} of {n} ranks")))
    }
}

/// Ranks of an LSA team: the largest number such that all teams are runs of so many neighbours that
/// reach each other.
fn lsa_size(gpus: &[u32], team: u32) -> usize {
    let runs = gpus.chunk_by(|a, b| a / team == b / team);
    runs.fold(0, |size, run| gcd(size, run.len()))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Member {
    pub(super) fn new(core: &Core, gpu: usize, settings: Settings) -> Rc<Self> {
        let member = Rc::new(Self {
            handle: core.new_handle(),
            gpu,
            settings,
            place: OnceCell::new(),
            life: Cell::new(Life::Live),
            is_suspended: Cell::default(),
            epoch: Cell::default(),
            tasks: RefCell::default(),
            looks: Cell::default(),
            error: RefCell::default(),
            calls: Cell::default(),
            collectives: Cell::default(),
            queued: Rc::default(),
            operators: Operators::default(),
            buffers: RefCell::default(),
            has_rma: Cell::default(),
        });
        core.nccl.members.borrow_mut().insert(member.handle, Rc::clone(&member));
        member
    }

    pub(super) fn raw(&self) -> RawComm {
        self.handle as RawComm
    }

    /// The communicator and the rank in it.
    pub(super) fn place(&self) -> Refused<(&Rc<Comm>, usize)> {
        let place = self.place.get().map(|(comm, rank)| (comm, *rank));
        place.ok_or_else(|| Refusal::argument("not all ranks have joined the communicator yet"))
    }

    /// How reports call it.
    pub(super) fn name(&self) -> String {
        match (&self.settings.name, self.place.get()) {
            (Some(name), Some((_, rank))) => format!("rank {rank} of {name:?}"),
            (None, Some((comm, rank))) => format!("rank {rank} of {} ranks", comm.n_ranks()),
            (_, None) => "a rank that joins".to_owned(),
        }
    }

    /// What the communicator is doing, and what has failed. NCCL: `ncclCommGetAsyncError`.
    pub(super) fn status(&self, core: &Core) -> c_int {
        if let Some(error) = &*self.error.borrow() {
            return error.code;
        }
        let is_finalizing = self.life.get() == Life::Finalized && self.is_running();
        if is_finalizing || !self.tasks.borrow().is_empty() {
            return IN_PROGRESS;
        }
        let looks = self.looks.get();
        if looks == 0 {
            return SUCCESS;
        }
        // The next look sees something else: whoever waits shall look again.
        self.looks.set(looks - 1);
        core.notify();
        IN_PROGRESS
    }

    /// Whether what was launched with it may run: not what a graph launches after its end.
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.life.get(), Life::Live | Life::Finalized)
    }

    /// Whether streams still have operations of it.
    pub(super) fn is_running(&self) -> bool {
        Rc::strong_count(&self.queued) > 1
    }

    /// What a call that is over has returned.
    pub(super) fn code(&self) -> c_int {
        if self.settings.blocking {
            return SUCCESS;
        }
        self.looks.set(LOOKS);
        IN_PROGRESS
    }

    /// The first error counts.
    pub(super) fn fail(&self, why: &Refusal) {
        self.error.borrow_mut().get_or_insert_with(|| why.clone());
    }

    /// Ends what is under way.
    pub(super) fn cut(&self) {
        self.epoch.set(self.epoch.get() + 1);
    }

    /// Ends all. Once more it does nothing.
    pub(super) fn end(self: &Rc<Self>, core: &Core) {
        self.life.set(Life::Ended);
        self.cut();
        let why = Refusal::new(INTERNAL_ERROR, "the communicator was ended meanwhile");
        for task in self.tasks.take() {
            task.withdraw(core, &why);
        }
        core.nccl.members.borrow_mut().remove(&self.handle);
        if let Some((comm, rank)) = self.place.get() {
            let mut windows = core.nccl.windows.borrow_mut();
            core.retire(take(&mut windows, |own| own.is_of(self)));
            let mut made = core.nccl.dev_comms.borrow_mut();
            core.retire(take(&mut made, |own| own.is_of(comm, *rank)));
        }
        core.notify();
    }
}

/// Takes out what is chosen.
fn take<V>(map: &mut LiteMap<usize, V>, is_chosen: impl Fn(&V) -> bool) -> Vec<(usize, V)> {
    let (chosen, kept) =
        std::mem::take(map).into_iter().partition::<Vec<_>, _>(|(_, value)| is_chosen(value));
    map.extend(kept);
    chosen
}

impl Ask<'_> {
    /// A communicator that has done what was asked of it last, and has not failed.
    pub(super) fn ready(&self, comm: RawComm) -> Refused<Rc<Member>> {
        let member = self.member(comm)?;
        self.core.check()?;
        if let Some(error) = &*member.error.borrow() {
            return Err(error.clone());
        }
        if !member.tasks.borrow().is_empty() {
            return Err(Refusal::argument("the communicator is still busy with its last call"));
        }
        Ok(member)
    }

    /// A communicator that is good for everything.
    pub(super) fn live(&self, comm: RawComm) -> Refused<Rc<Member>> {
        let member = self.ready(comm)?;
        member.place()?;
        match member.life.get() {
            Life::Live if member.is_suspended.get() => {
                Err(Refusal::usage("the communicator is suspended"))
            }
            Life::Live => Ok(member),
            life => Err(Refusal::usage(format!("the communicator is {life:?}").to_lowercase())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::lsa_size;

    #[test]
    fn lsa_teams_are_runs_of_neighbours_of_one_size() {
        for (gpus, team, size) in [
            (&[0, 1, 2, 3][..], 4, 4),
            (&[0, 1, 2, 3], 2, 2),
            (&[1, 0, 3, 2], 2, 2),
            (&[0, 2, 1, 3], 2, 1),
            (&[0, 1, 2], 2, 1),
            (&[0, 1, 2, 4, 5, 6], 4, 3),
            (&[3], 4, 1),
        ] {
            assert_eq!(lsa_size(gpus, team), size, "{gpus:?} in teams of {team}");
        }
    }
}
