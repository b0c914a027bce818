//! Communicators: the state that all ranks share, and each rank's state.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::rc::{Rc, Weak};

use devcomm_sys::nccl::{IN_PROGRESS, RawComm, SUCCESS};
use litemap::LiteMap;

use super::call::{CallContext, INTERNAL_ERROR, NcclError, NcclResult};
use super::collective::PendingCollective;
use super::config::Settings;
use super::one_sided::Arrived;
use super::operator::Operators;
use super::p2p::Mailbox;
use super::rendezvous::{Rendezvous, Task};
use crate::gpu::dev_comm::MulticastGroups;
use crate::gpu::ranks::Ranks;
use crate::machine::core::Core;

/// State shared by the ranks of a communicator.
pub(crate) struct Comm {
    /// Unique on the machine. NCCL: `commHash`.
    pub(super) number: u64,
    pub(super) ranks: Ranks,
    /// Multicast groups of the LSA teams, created on first use.
    lsa_multicast: OnceCell<MulticastGroups>,
    /// Each rank's communicator, until it is destroyed.
    rank_comms: Box<[Weak<RankComm>]>,
    /// Splits, and creations of windows and device communicators, in progress, by number.
    pub(super) rendezvous: RefCell<LiteMap<u64, Rc<Rendezvous>>>,
    /// Shrinks in progress, by the excluded ranks.
    pub(super) shrinks: RefCell<LiteMap<Vec<usize>, Rc<Rendezvous>>>,
    /// The grow in progress.
    pub(super) growth: RefCell<Option<Rc<Rendezvous>>>,
    /// Collectives (all-reduce, ..) that not all ranks' streams have reached, by number.
    pub(super) pending_collectives: RefCell<LiteMap<u64, PendingCollective>>,
    /// Sends and receives by (from, to).
    pub(super) mailboxes: RefCell<LiteMap<(usize, usize), Mailbox>>,
    /// Received signals that no wait has consumed.
    pub(super) signals: RefCell<LiteMap<SignalKey, Arrived>>,
}

/// Key of a signal counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SignalKey {
    pub(super) to: usize,
    pub(super) from: usize,
    pub(super) context: c_int,
    pub(super) index: c_int,
}

/// One rank's communicator: what an `ncclComm_t` refers to.
pub(crate) struct RankComm {
    pub(super) handle: u64,
    pub(super) gpu: usize,
    pub(super) settings: Settings,
    /// The communicator and the rank in it, once all ranks have joined.
    joined: OnceCell<(Rc<Comm>, usize)>,
    pub(super) life: Cell<Lifecycle>,
    pub(super) is_suspended: Cell<bool>,
    /// Incremented to cancel all operations in progress.
    pub(super) epoch: Cell<u64>,
    /// Calls that wait for other ranks.
    pub(super) tasks: RefCell<Vec<Rc<Task>>>,
    /// The number of further `ncclCommGetAsyncError` calls that return `ncclInProgress`.
    pub(super) polls_in_progress: Cell<u32>,
    /// The first asynchronous error.
    pub(super) error: RefCell<Option<NcclError>>,
    /// The number of this rank's calls so far that meet in [`Comm::rendezvous`].
    pub(super) calls: Cell<u64>,
    /// The number of collectives (all-reduce, ..) launched so far.
    pub(super) collectives: Cell<u64>,
    /// Cloned by each queued stream operation, to count them.
    pub(super) queued: Rc<()>,
    pub(super) operators: Operators,
    /// Registered buffers by handle.
    pub(super) buffers: RefCell<BTreeSet<u64>>,
    /// Whether one-sided operations are set up: the first window sets them up.
    pub(super) has_rma: Cell<bool>,
}

/// The state of a communicator, which limits the calls that it accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lifecycle {
    Live,
    /// The communicator can only be split, shrunk and destroyed.
    Revoked,
    /// The communicator can only be destroyed.
    Finalized,
    /// The communicator has been destroyed, or its creation has failed.
    Ended,
}

/// The number of `ncclCommGetAsyncError` calls that return `ncclInProgress` for a complete
/// non-blocking call. This detects programs that do not poll.
const POLLS_IN_PROGRESS: u32 = 3;

impl Comm {
    /// Creates the communicator of these ranks, in rank order.
    pub(super) fn make(core: &Core, rank_comms: Vec<Rc<RankComm>>) -> Rc<Self> {
        let gpus: Rc<[u32]> = rank_comms.iter().map(|rank_comm| rank_comm.gpu as u32).collect();
        let lsa_ranks = lsa_size(&gpus, core.simulation().team() as u32);
        let (memory, network) = (Rc::clone(&core.memory), Rc::clone(&core.gpus.network));
        let comm = Rc::new(Self {
            number: core.new_handle(),
            ranks: Ranks { gpus, lsa_ranks, memory, network },
            lsa_multicast: OnceCell::new(),
            rank_comms: rank_comms.iter().map(Rc::downgrade).collect(),
            rendezvous: RefCell::default(),
            shrinks: RefCell::default(),
            growth: RefCell::default(),
            pending_collectives: RefCell::default(),
            mailboxes: RefCell::default(),
            signals: RefCell::default(),
        });
        for (rank, rank_comm) in rank_comms.iter().enumerate() {
            let _ = rank_comm.joined.set((Rc::clone(&comm), rank));
        }
        comm
    }

    pub(super) fn n_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the size of the LSA teams.
    pub(super) fn lsa_size(&self) -> usize {
        self.ranks.lsa_ranks
    }

    /// Returns a rank's GPU.
    pub(super) fn gpu(&self, rank: usize) -> usize {
        self.ranks.gpus[rank] as usize
    }

    /// Returns the multicast groups of the LSA teams.
    pub(super) fn lsa_multicast(&self) -> NcclResult<&MulticastGroups> {
        if self.lsa_multicast.get().is_none() {
            let made = MulticastGroups::of_lsa_teams(&self.ranks);
            let made = made.map_err(|error| NcclError::new(INTERNAL_ERROR, error.to_string()))?;
            let _ = self.lsa_multicast.set(made);
        }
        let none = || NcclError::new(INTERNAL_ERROR, "no multicast");
        self.lsa_multicast.get().ok_or_else(none)
    }

    /// Fails the communicator on all ranks.
    pub(super) fn fail(&self, why: &NcclError) {
        for rank_comm in self.rank_comms.iter().filter_map(Weak::upgrade) {
            rank_comm.fail(why);
            rank_comm.cancel();
        }
    }

    /// Checks a rank number.
    pub(super) fn rank(&self, rank: c_int, what: &str) -> NcclResult<usize> {
        let n = self.n_ranks();
        let known = usize::try_from(rank).ok().filter(|rank| *rank < n);
        known.ok_or_else(|| NcclError::argument(format!("{what} {rank} of {n} ranks")))
    }
}

/// Returns the LSA team size: the largest size such that each team's ranks are consecutive and
/// their GPUs can access each other's memory.
fn lsa_size(gpus: &[u32], team: u32) -> usize {
    let runs = gpus.chunk_by(|a, b| a / team == b / team);
    runs.fold(0, |size, run| gcd(size, run.len()))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl RankComm {
    pub(super) fn new(core: &Core, gpu: usize, settings: Settings) -> Rc<Self> {
        let rank_comm = Rc::new(Self {
            handle: core.new_handle(),
            gpu,
            settings,
            joined: OnceCell::new(),
            life: Cell::new(Lifecycle::Live),
            is_suspended: Cell::default(),
            epoch: Cell::default(),
            tasks: RefCell::default(),
            polls_in_progress: Cell::default(),
            error: RefCell::default(),
            calls: Cell::default(),
            collectives: Cell::default(),
            queued: Rc::default(),
            operators: Operators::default(),
            buffers: RefCell::default(),
            has_rma: Cell::default(),
        });
        core.nccl.rank_comms.borrow_mut().insert(rank_comm.handle, Rc::clone(&rank_comm));
        rank_comm
    }

    pub(super) fn raw(&self) -> RawComm {
        self.handle as RawComm
    }

    /// Returns the communicator and the rank in it.
    pub(super) fn joined(&self) -> NcclResult<(&Rc<Comm>, usize)> {
        let joined = self.joined.get().map(|(comm, rank)| (comm, *rank));
        joined.ok_or_else(|| NcclError::argument("not all ranks have joined the communicator yet"))
    }

    /// Returns the rank's name in error messages.
    pub(super) fn name(&self) -> String {
        match (&self.settings.name, self.joined.get()) {
            (Some(name), Some((_, rank))) => format!("rank {rank} of {name:?}"),
            (None, Some((comm, rank))) => format!("rank {rank} of {} ranks", comm.n_ranks()),
            (_, None) => "a joining rank".to_owned(),
        }
    }

    /// Returns the asynchronous state of the communicator. NCCL: `ncclCommGetAsyncError`.
    pub(super) fn status(&self, core: &Core) -> c_int {
        if let Some(error) = &*self.error.borrow() {
            return error.code;
        }
        let is_finalizing = self.life.get() == Lifecycle::Finalized && self.is_running();
        if is_finalizing || !self.tasks.borrow().is_empty() {
            return IN_PROGRESS;
        }
        let polls_in_progress = self.polls_in_progress.get();
        if polls_in_progress == 0 {
            return SUCCESS;
        }
        // The next poll sees another state: waiting threads must poll again.
        self.polls_in_progress.set(polls_in_progress - 1);
        core.notify();
        IN_PROGRESS
    }

    /// Returns whether operations may run: a graph may launch some of a destroyed communicator.
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.life.get(), Lifecycle::Live | Lifecycle::Finalized)
    }

    /// Returns whether operations of the communicator are queued on streams.
    pub(super) fn is_running(&self) -> bool {
        Rc::strong_count(&self.queued) > 1
    }

    /// Returns the return code of a completed call. For a non-blocking communicator it is
    /// `ncclInProgress`, which the next few calls of `ncclCommGetAsyncError` will report too.
    pub(super) fn code(&self) -> c_int {
        if self.settings.blocking {
            return SUCCESS;
        }
        self.polls_in_progress.set(POLLS_IN_PROGRESS);
        IN_PROGRESS
    }

    /// Records an error; the first one is kept.
    pub(super) fn fail(&self, why: &NcclError) {
        self.error.borrow_mut().get_or_insert_with(|| why.clone());
    }

    /// Cancels all operations in progress.
    pub(super) fn cancel(&self) {
        self.epoch.set(self.epoch.get() + 1);
    }

    /// Cancels all operations and calls in progress.
    pub(super) fn stop(&self, core: &Core, why: &str) {
        self.cancel();
        for task in self.tasks.take() {
            task.cancel(core, &NcclError::new(INTERNAL_ERROR, why));
        }
        core.notify();
    }

    /// Destroys the rank's communicator. Idempotent.
    pub(super) fn end(self: &Rc<Self>, core: &Core) {
        self.life.set(Lifecycle::Ended);
        self.stop(core, "the communicator was destroyed during the call");
        core.nccl.rank_comms.borrow_mut().remove(&self.handle);
        if let Some((comm, rank)) = self.joined.get() {
            let mut windows = core.nccl.windows.borrow_mut();
            core.defer_drop(take(&mut windows, |own| own.is_of(self)));
            let mut dev_comms = core.nccl.dev_comms.borrow_mut();
            core.defer_drop(take(&mut dev_comms, |own| own.is_of(comm, *rank)));
        }
        core.notify();
    }
}

/// Removes and returns the chosen entries.
fn take<V>(map: &mut LiteMap<usize, V>, is_chosen: impl Fn(&V) -> bool) -> Vec<(usize, V)> {
    let (chosen, kept) =
        std::mem::take(map).into_iter().partition::<Vec<_>, _>(|(_, value)| is_chosen(value));
    map.extend(kept);
    chosen
}

impl CallContext<'_> {
    /// Returns a communicator that has no call in progress and has not failed.
    pub(super) fn ready(&self, comm: RawComm) -> NcclResult<Rc<RankComm>> {
        let rank_comm = self.rank_comm(comm)?;
        self.core.check()?;
        if let Some(error) = &*rank_comm.error.borrow() {
            return Err(error.clone());
        }
        if !rank_comm.tasks.borrow().is_empty() {
            return Err(NcclError::argument("the communicator is still busy with its last call"));
        }
        Ok(rank_comm)
    }

    /// Returns a joined communicator that is not suspended, revoked or finalized.
    pub(super) fn live(&self, comm: RawComm) -> NcclResult<Rc<RankComm>> {
        let rank_comm = self.ready(comm)?;
        rank_comm.joined()?;
        match rank_comm.life.get() {
            Lifecycle::Live if rank_comm.is_suspended.get() => {
                Err(NcclError::usage("the communicator is suspended"))
            }
            Lifecycle::Live => Ok(rank_comm),
            life => Err(NcclError::usage(format!("the communicator is {life:?}").to_lowercase())),
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
