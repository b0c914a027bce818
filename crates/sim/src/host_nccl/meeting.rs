//! Calls that ranks make together: each waits until all have come.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::RawComm;
use litemap::LiteMap;

use super::call::{Refusal, Refused};
use super::comm::{Comm, Life, Member};
use super::dev_comm::{self, Creation};
use super::window::{self, Registration};
use crate::machine::core::Core;

/// One rank's call.
pub(super) struct Task {
    /// NCCL's function.
    pub(super) name: &'static str,
    /// Whose call it is: of a communicator that is there, or else of the one that is made.
    pub(super) member: Rc<Member>,
    /// The end of a communicator that it makes, and where its handle is.
    pub(super) made: Option<(Rc<Member>, *mut RawComm)>,
    pub(super) what: What,
    /// Whether it has begun: a call of a group has not before the group's end.
    has_begun: Cell<bool>,
    meeting: RefCell<Option<Rc<Meeting>>>,
    result: RefCell<Option<Refused<()>>>,
}

/// What ranks do together.
pub(super) enum What {
    /// They make a communicator, by a unique id's number.
    Join {
        id: u64,
        rank: usize,
        n_ranks: usize,
    },
    /// They divide a communicator, by color and key.
    Split {
        color: c_int,
        key: c_int,
    },
    /// They make a communicator without some.
    Shrink {
        excluded: Vec<usize>,
    },
    /// They make a communicator with new ranks.
    Grow {
        growth: Rc<Meeting>,
        rank: usize,
        n_ranks: usize,
    },
    Window(Registration),
    DevComm(Creation),
}

/// Where ranks meet.
#[derive(Default)]
pub(super) struct Meeting {
    expected: Cell<usize>,
    tasks: RefCell<LiteMap<usize, Rc<Task>>>,
}

impl Meeting {
    fn of(n: usize) -> Rc<Self> {
        Rc::new(Self { expected: Cell::new(n), tasks: RefCell::default() })
    }

    /// The first rank says how many there will be.
    fn expect(&self, n: usize) -> Refused<()> {
        match self.expected.get() {
            0 => self.expected.set(n),
            expected if expected == n => {}
            expected => {
                let text = format!("a communicator of {n} ranks, where others say {expected}");
                return Err(Refusal::argument(text));
            }
        }
        Ok(())
    }

    /// All are there: nobody else comes to it.
    fn close(self: &Rc<Self>, core: &Core) -> Vec<Rc<Task>> {
        let is_this = |other: &Rc<Self>| Rc::ptr_eq(other, self);
        for join in core.nccl.joins.borrow_mut().iter_mut().map(|(_, join)| join) {
            join.take_if(|other| is_this(other));
        }
        let tasks: Vec<_> = self.tasks.take().into_iter().map(|(_, task)| task).collect();
        for (comm, _) in tasks.iter().filter_map(|task| task.member.place().ok()) {
            comm.meetings.borrow_mut().retain(|_, other| !is_this(other));
            comm.shrinks.borrow_mut().retain(|_, other| !is_this(other));
            comm.growth.borrow_mut().take_if(|other| is_this(other));
        }
        tasks
    }
}

impl Task {
    pub(super) fn new(
        name: &'static str,
        member: Rc<Member>,
        made: Option<(Rc<Member>, *mut RawComm)>,
        what: What,
    ) -> Rc<Self> {
        let (has_begun, meeting, result) =
            (Cell::default(), RefCell::default(), RefCell::default());
        Rc::new(Self { name, member, made, what, has_begun, meeting, result })
    }

    /// Whether its caller waits for it.
    pub(super) fn is_blocking(&self) -> bool {
        self.members().all(|member| member.settings.blocking)
    }

    /// What it came to, once it is over.
    pub(super) fn result(&self) -> Option<Refused<()>> {
        self.result.borrow().clone()
    }

    fn registration(&self) -> Option<&Registration> {
        if let What::Window(own) = &self.what { Some(own) } else { None }
    }

    fn creation(&self) -> Option<&Creation> {
        if let What::DevComm(own) = &self.what { Some(own) } else { None }
    }

    /// The communicators that are busy with it.
    fn members(&self) -> impl Iterator<Item = &Rc<Member>> {
        let made = self.made.iter().map(|(made, _)| made);
        made.filter(|made| !Rc::ptr_eq(made, &self.member)).chain([&self.member])
    }

    /// The rank is there. The last one to come does for all what is to be done.
    pub(super) fn arrive(self: &Rc<Self>, core: &Core) {
        self.has_begun.set(true);
        self.members().for_each(|member| member.tasks.borrow_mut().push(Rc::clone(self)));
        let (meeting, rank) = match self.find_meeting(core) {
            Ok(found) => found,
            Err(refusal) => return self.finish(core, Err(refusal)),
        };
        if meeting.tasks.borrow().contains_key(&rank) {
            let text = format!("rank {rank} is there already");
            return self.finish(core, Err(Refusal::argument(text)));
        }
        self.meeting.replace(Some(Rc::clone(&meeting)));
        meeting.tasks.borrow_mut().insert(rank, Rc::clone(self));
        if meeting.tasks.borrow().len() == meeting.expected.get() {
            let tasks = meeting.close(core);
            let result = complete(core, &tasks);
            tasks.iter().for_each(|task| task.finish(core, result.clone()));
        }
    }

    /// Where it meets the others, and its place there.
    fn find_meeting(&self, core: &Core) -> Refused<(Rc<Meeting>, usize)> {
        match &self.what {
            What::Join { id, rank, n_ranks } => {
                let mut joins = core.nccl.joins.borrow_mut();
                let join = joins.entry(*id).or_insert_with(|| Some(Rc::default())).clone();
                let used = || Refusal::usage("a communicator was made with this unique id before");
                let join = join.ok_or_else(used)?;
                join.expect(*n_ranks)?;
                Ok((join, *rank))
            }
            What::Grow { growth, rank, n_ranks } => {
                growth.expect(*n_ranks)?;
                Ok((Rc::clone(growth), *rank))
            }
            What::Shrink { excluded } => {
                let (comm, rank) = self.member.place()?;
                let mut shrinks = comm.shrinks.borrow_mut();
                let n = comm.n_ranks() - excluded.len();
                let meeting = shrinks.entry(excluded.clone()).or_insert_with(|| Meeting::of(n));
                Ok((Rc::clone(meeting), rank))
            }
            What::Split { .. } | What::Window(_) | What::DevComm(_) => {
                let (comm, rank) = self.member.place()?;
                let number = self.member.calls.replace(self.member.calls.get() + 1);
                let mut meetings = comm.meetings.borrow_mut();
                let meeting = meetings.entry(number).or_insert_with(|| Meeting::of(comm.n_ranks()));
                Ok((Rc::clone(meeting), rank))
            }
        }
    }

    /// It is over.
    fn finish(self: &Rc<Self>, core: &Core, result: Refused<()>) {
        let in_background = self.has_begun.get() && !self.is_blocking();
        for member in self.members() {
            member.tasks.borrow_mut().retain(|task| !Rc::ptr_eq(task, self));
            let _ = member.code();
            if let (Err(why), true) = (&result, in_background) {
                member.fail(why);
            }
        }
        if let (Err(_), false, Some((made, out))) = (&result, in_background, &self.made) {
            made.life.set(Life::Ended);
            core.nccl.members.borrow_mut().remove(&made.handle);
            // SAFETY: the caller waits, or its group's end does, and keeps the place of the result.
            unsafe { out.write(null_mut()) };
        }
        self.result.borrow_mut().get_or_insert(result);
        core.notify();
    }

    /// The rank does not wait for the others any more.
    pub(super) fn withdraw(self: &Rc<Self>, core: &Core, why: &Refusal) {
        if let Some(meeting) = self.meeting.take() {
            meeting.tasks.borrow_mut().retain(|_, task| !Rc::ptr_eq(task, self));
        }
        self.finish(core, Err(why.clone()));
    }
}

/// All ranks have come: does what they came for.
fn complete(core: &Core, tasks: &[Rc<Task>]) -> Refused<()> {
    let Some(first) = tasks.first() else { return Ok(()) };
    if let Some(other) = tasks.iter().find(|task| task.name != first.name) {
        let (a, b) = (first.member.name(), other.member.name());
        let text = format!("{a} calls {}, but {b} calls {}", first.name, other.name);
        let refusal = Refusal::usage(text);
        if let Ok((comm, _)) = first.member.place() {
            comm.fail(&refusal);
        }
        return Err(refusal);
    }
    match &first.what {
        What::Join { .. } | What::Grow { .. } | What::Shrink { .. } => {
            let made = tasks.iter().filter_map(|task| task.made.as_ref());
            unite(core, made.map(|(made, _)| Rc::clone(made)).collect())
        }
        What::Split { .. } => split(core, tasks),
        What::Window(_) => window::complete(core, &with(tasks, Task::registration)),
        What::DevComm(_) => dev_comm::complete(core, &with(tasks, Task::creation)),
    }
}

/// All tasks with what they are for.
fn with<'a, T>(
    tasks: &'a [Rc<Task>],
    of: impl Fn(&'a Task) -> Option<&'a T>,
) -> Vec<(&'a Task, &'a T)> {
    tasks.iter().filter_map(|task| Some((&**task, of(task)?))).collect()
}

/// Makes a communicator.
fn unite(core: &Core, members: Vec<Rc<Member>>) -> Refused<()> {
    for (rank, member) in members.iter().enumerate() {
        let same = members[..rank].iter().position(|other| other.gpu == member.gpu);
        if let Some(other) = same {
            let gpu = member.gpu;
            return Err(Refusal::usage(format!("ranks {other} and {rank} are both on GPU {gpu}")));
        }
    }
    Comm::make(core, members);
    Ok(())
}

/// Makes a communicator for each color, whose ranks are in the order of their keys.
fn split(core: &Core, tasks: &[Rc<Task>]) -> Refused<()> {
    let mut colors = LiteMap::<c_int, Vec<(c_int, Rc<Member>)>>::new();
    for task in tasks {
        if let (What::Split { color, key }, Some((made, _))) = (&task.what, &task.made) {
            colors.entry(*color).or_default().push((*key, Rc::clone(made)));
        }
    }
    for (_, mut members) in colors {
        // Stable: ranks keep their order where keys are equal.
        members.sort_by_key(|(key, _)| *key);
        unite(core, members.into_iter().map(|(_, member)| member).collect())?;
    }
    Ok(())
}
