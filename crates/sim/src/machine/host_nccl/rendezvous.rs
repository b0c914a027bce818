//! Calls that need all ranks: each waits at a rendezvous until every rank has called.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::RawComm;
use litemap::LiteMap;

use super::call::{NcclError, NcclResult};
use super::comm::{Comm, Lifecycle, RankComm};
use super::dev_comm::{self, Creation};
use super::window::{self, Registration};
use crate::base::ids::ClientId;
use crate::machine::core::Core;
use crate::race::Clock;

/// One rank's call of a function that needs all ranks.
pub(super) struct Task {
    /// The NCCL function.
    pub(super) name: &'static str,
    /// The communicator of the call; for a rank that has none yet, the one that the call creates.
    pub(super) rank_comm: Rc<RankComm>,
    /// The communicator that the call creates, and where to write its handle.
    pub(super) created: Option<(Rc<RankComm>, *mut RawComm)>,
    pub(super) kind: TaskKind,
    /// Whether the call has begun; in a group it begins at the group's end.
    has_started: Cell<bool>,
    /// The thread that calls, and its clock when it arrives.
    host: RefCell<Option<(ClientId, Clock)>>,
    rendezvous: RefCell<Option<Rc<Rendezvous>>>,
    result: RefCell<Option<NcclResult<()>>>,
}

/// The effect of the call.
pub(super) enum TaskKind {
    /// Creates a communicator; `id` is the unique id's number.
    Join {
        id: u64,
        rank: usize,
        n_ranks: usize,
    },
    /// Splits a communicator by color and key.
    Split {
        color: c_int,
        key: c_int,
    },
    /// Creates a communicator without the excluded ranks.
    Shrink {
        excluded: Vec<usize>,
    },
    /// Creates a communicator of existing and new ranks.
    Grow {
        growth: Rc<Rendezvous>,
        rank: usize,
        n_ranks: usize,
    },
    Window(Registration),
    DevComm(Creation),
}

/// A meeting of the ranks' calls.
#[derive(Default)]
pub(super) struct Rendezvous {
    /// The number of calls; 0 until the first rank that joins or grows has passed it.
    expected: Cell<usize>,
    /// The calls that have arrived, by rank.
    tasks: RefCell<LiteMap<usize, Rc<Task>>>,
}

impl Rendezvous {
    fn of(n: usize) -> Rc<Self> {
        Rc::new(Self { expected: Cell::new(n), tasks: RefCell::default() })
    }

    /// Checks a rank's rank count; the first rank sets it.
    fn expect(&self, n: usize) -> NcclResult<()> {
        match self.expected.get() {
            0 => self.expected.set(n),
            expected if expected == n => {}
            expected => {
                let text = format!("a communicator of {n} ranks, but other ranks pass {expected}");
                return Err(NcclError::argument(text));
            }
        }
        Ok(())
    }

    /// Removes the rendezvous, which is complete, and returns its calls.
    fn close(self: &Rc<Self>, core: &Core) -> Vec<Rc<Task>> {
        let is_this = |other: &Rc<Self>| Rc::ptr_eq(other, self);
        for join in core.nccl.joins.borrow_mut().iter_mut().map(|(_, join)| join) {
            join.take_if(|other| is_this(other));
        }
        let tasks: Vec<_> = self.tasks.take().into_iter().map(|(_, task)| task).collect();
        for (comm, _) in tasks.iter().filter_map(|task| task.rank_comm.joined().ok()) {
            comm.rendezvous.borrow_mut().retain(|_, other| !is_this(other));
            comm.shrinks.borrow_mut().retain(|_, other| !is_this(other));
            comm.growth.borrow_mut().take_if(|other| is_this(other));
        }
        tasks
    }
}

impl Task {
    pub(super) fn new(
        name: &'static str,
        rank_comm: Rc<RankComm>,
        created: Option<(Rc<RankComm>, *mut RawComm)>,
        kind: TaskKind,
    ) -> Rc<Self> {
        let (has_started, host, rendezvous, result) = Default::default();
        Rc::new(Self { name, rank_comm, created, kind, has_started, host, rendezvous, result })
    }

    /// Returns whether the call blocks its caller.
    pub(super) fn is_blocking(&self) -> bool {
        self.rank_comms().all(|rank_comm| rank_comm.settings.blocking)
    }

    /// Returns the call's result, once complete.
    pub(super) fn result(&self) -> Option<NcclResult<()>> {
        self.result.borrow().clone()
    }

    fn registration(&self) -> Option<&Registration> {
        if let TaskKind::Window(own) = &self.kind { Some(own) } else { None }
    }

    fn creation(&self) -> Option<&Creation> {
        if let TaskKind::DevComm(own) = &self.kind { Some(own) } else { None }
    }

    /// Returns the communicators that are busy with this call.
    fn rank_comms(&self) -> impl Iterator<Item = &Rc<RankComm>> {
        let created = self.created.iter().map(|(created, _)| created);
        created.filter(|created| !Rc::ptr_eq(created, &self.rank_comm)).chain([&self.rank_comm])
    }

    /// Begins the rank's call. The last rank to call completes the call on all ranks.
    pub(super) fn arrive(self: &Rc<Self>, core: &Core) {
        self.has_started.set(true);
        let races = &core.memory.races;
        self.host.replace(races.current_host().map(|id| (id, races.host())));
        self.rank_comms().for_each(|rank_comm| rank_comm.tasks.borrow_mut().push(Rc::clone(self)));
        let (rendezvous, rank) = match self.find_rendezvous(core) {
            Ok(found) => found,
            Err(error) => return self.finish(core, Err(error)),
        };
        if rendezvous.tasks.borrow().contains_key(&rank) {
            let text = format!("rank {rank} has already joined");
            return self.finish(core, Err(NcclError::argument(text)));
        }
        self.rendezvous.replace(Some(Rc::clone(&rendezvous)));
        rendezvous.tasks.borrow_mut().insert(rank, Rc::clone(self));
        if rendezvous.tasks.borrow().len() == rendezvous.expected.get() {
            let tasks = rendezvous.close(core);
            meet(core, &tasks);
            let result = complete(core, &tasks);
            tasks.iter().for_each(|task| task.finish(core, result.clone()));
        }
    }

    /// Returns the rendezvous and the rank's index in it.
    fn find_rendezvous(&self, core: &Core) -> NcclResult<(Rc<Rendezvous>, usize)> {
        match &self.kind {
            TaskKind::Join { id, rank, n_ranks } => {
                let mut joins = core.nccl.joins.borrow_mut();
                let join = joins.entry(*id).or_insert_with(|| Some(Rc::default())).clone();
                let used =
                    || NcclError::usage("this unique id was already used to create a communicator");
                let join = join.ok_or_else(used)?;
                join.expect(*n_ranks)?;
                Ok((join, *rank))
            }
            TaskKind::Grow { growth, rank, n_ranks } => {
                growth.expect(*n_ranks)?;
                Ok((Rc::clone(growth), *rank))
            }
            TaskKind::Shrink { excluded } => {
                let (comm, rank) = self.rank_comm.joined()?;
                let mut shrinks = comm.shrinks.borrow_mut();
                let n = comm.n_ranks() - excluded.len();
                let rendezvous =
                    shrinks.entry(excluded.clone()).or_insert_with(|| Rendezvous::of(n));
                Ok((Rc::clone(rendezvous), rank))
            }
            TaskKind::Split { .. } | TaskKind::Window(_) | TaskKind::DevComm(_) => {
                let (comm, rank) = self.rank_comm.joined()?;
                let number = self.rank_comm.calls.replace(self.rank_comm.calls.get() + 1);
                let mut rendezvous = comm.rendezvous.borrow_mut();
                let rendezvous =
                    rendezvous.entry(number).or_insert_with(|| Rendezvous::of(comm.n_ranks()));
                Ok((Rc::clone(rendezvous), rank))
            }
        }
    }

    /// Completes the call with `result`.
    fn finish(self: &Rc<Self>, core: &Core, result: NcclResult<()>) {
        let in_background = self.has_started.get() && !self.is_blocking();
        for rank_comm in self.rank_comms() {
            rank_comm.tasks.borrow_mut().retain(|task| !Rc::ptr_eq(task, self));
            // Only for its effect: the next polls of the communicator find it in progress.
            let _ = rank_comm.code();
            if let (Err(why), true) = (&result, in_background) {
                rank_comm.fail(why);
            }
        }
        if let (Err(_), false, Some((created, out))) = (&result, in_background, &self.created) {
            created.life.set(Lifecycle::Ended);
            core.nccl.rank_comms.borrow_mut().remove(&created.handle);
            // SAFETY: the call or its group's end still blocks, so the output pointer is valid.
            unsafe { out.write(null_mut()) };
        }
        self.result.borrow_mut().get_or_insert(result);
        core.notify();
    }

    /// Cancels the rank's call.
    pub(super) fn cancel(self: &Rc<Self>, core: &Core, why: &NcclError) {
        if let Some(rendezvous) = self.rendezvous.take() {
            rendezvous.tasks.borrow_mut().retain(|_, task| !Rc::ptr_eq(task, self));
        }
        self.finish(core, Err(why.clone()));
    }
}

/// Orders the threads of all ranks after what each rank did before its call.
fn meet(core: &Core, tasks: &[Rc<Task>]) {
    let races = &core.memory.races;
    let mut known = Clock::default();
    let hosts = || tasks.iter().filter_map(|task| task.host.borrow().clone());
    hosts().for_each(|(_, clock)| races.join(&mut known, &clock));
    hosts().for_each(|(id, _)| races.thread_learns(id, &known));
}

/// Runs a call that all ranks have made.
fn complete(core: &Core, tasks: &[Rc<Task>]) -> NcclResult<()> {
    let Some(first) = tasks.first() else { return Ok(()) };
    if let Some(other) = tasks.iter().find(|task| task.name != first.name) {
        let (a, b) = (first.rank_comm.name(), other.rank_comm.name());
        let text = format!("{a} calls {}, but {b} calls {}", first.name, other.name);
        let error = NcclError::usage(text);
        if let Ok((comm, _)) = first.rank_comm.joined() {
            comm.fail(&error);
        }
        return Err(error);
    }
    match &first.kind {
        TaskKind::Join { .. } | TaskKind::Grow { .. } | TaskKind::Shrink { .. } => {
            let created = tasks.iter().filter_map(|task| task.created.as_ref());
            create_comm(core, created.map(|(created, _)| Rc::clone(created)).collect())
        }
        TaskKind::Split { .. } => split(core, tasks),
        TaskKind::Window(_) => window::complete(core, &with_arguments(tasks, Task::registration)),
        TaskKind::DevComm(_) => dev_comm::complete(core, &with_arguments(tasks, Task::creation)),
    }
}

/// Returns all tasks, each with its arguments.
fn with_arguments<'a, T>(
    tasks: &'a [Rc<Task>],
    arguments: impl Fn(&'a Task) -> Option<&'a T>,
) -> Vec<(&'a Task, &'a T)> {
    tasks.iter().filter_map(|task| Some((&**task, arguments(task)?))).collect()
}

/// Creates a communicator.
fn create_comm(core: &Core, rank_comms: Vec<Rc<RankComm>>) -> NcclResult<()> {
    for (rank, rank_comm) in rank_comms.iter().enumerate() {
        let first = rank_comms[..rank].iter().position(|other| other.gpu == rank_comm.gpu);
        if let Some(other) = first {
            let gpu = rank_comm.gpu;
            return Err(NcclError::usage(format!(
                "ranks {other} and {rank} are both on GPU {gpu}"
            )));
        }
    }
    Comm::make(core, rank_comms);
    Ok(())
}

/// Creates a communicator for each color, ranked by key.
fn split(core: &Core, tasks: &[Rc<Task>]) -> NcclResult<()> {
    let mut colors = LiteMap::<c_int, Vec<(c_int, Rc<RankComm>)>>::new();
    for task in tasks {
        if let (TaskKind::Split { color, key }, Some((created, _))) = (&task.kind, &task.created) {
            colors.entry(*color).or_default().push((*key, Rc::clone(created)));
        }
    }
    for (_, mut rank_comms) in colors {
        // The sort is stable: ranks with equal keys keep their order.
        rank_comms.sort_by_key(|(key, _)| *key);
        create_comm(core, rank_comms.into_iter().map(|(_, rank_comm)| rank_comm).collect())?;
    }
    Ok(())
}
