//! Groups: what is called in one is begun together at its end.

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::{IN_PROGRESS, SUCCESS, SimInfo};
use litemap::Entry;

use super::batch::Launches;
use super::call::{Ask, Begun, Refusal, Refused, Wait, call, question};
use super::comm::Member;
use super::meeting::Task;
use super::state::State;
use crate::machine::baton::{Client, ClientId};
use crate::machine::core::Core;

/// A group of a thread's that is open.
#[derive(Default)]
pub(super) struct Group {
    /// How many are open within it, itself included.
    depth: usize,
    /// The first call in it that failed.
    failed: Option<Refusal>,
    /// Calls that wait for other ranks.
    tasks: Vec<Rc<Task>>,
    /// What goes to streams.
    pub(super) launches: Launches,
}

impl State {
    /// A call failed: if a group is open, it does nothing at its end.
    pub(super) fn spoil_group(&self, client: ClientId, refusal: &Refusal) {
        if let Some(group) = self.groups.borrow_mut().get_mut(&client) {
            group.failed.get_or_insert_with(|| refusal.clone());
        }
    }

    /// Ends a group; gives it, if it is the outermost one.
    fn close_group(&self, client: ClientId) -> Refused<Option<Group>> {
        let mut groups = self.groups.borrow_mut();
        match groups.entry(client) {
            Entry::Vacant(_) => Err(Refusal::usage("no group is open on this thread")),
            Entry::Occupied(mut open) if open.get().depth > 1 => {
                open.get_mut().depth -= 1;
                Ok(None)
            }
            Entry::Occupied(open) => Ok(Some(open.remove())),
        }
    }
}

impl Group {
    /// Makes nothing of what was called in it.
    fn discard(self, core: &Core, why: &Refusal) {
        for task in self.tasks {
            task.withdraw(core, why);
        }
    }
}

impl Ask<'_> {
    /// Begins a call that waits for other ranks: now, or at the end of the open group.
    pub(super) fn start(&self, task: Rc<Task>) -> Refused<Begun> {
        if let Some(group) = self.core.nccl.groups.borrow_mut().get_mut(&self.client) {
            group.tasks.push(task);
            return Ok(Begun::Done(SUCCESS));
        }
        let tasks = vec![task];
        Ok(begin(self.core, Together { tasks, launches: Launches::default(), code: SUCCESS }))
    }

    /// Launches operations of a communicator: now, or at the end of the open group.
    pub(super) fn launch(
        &self,
        member: &Rc<Member>,
        add: impl FnOnce(&mut Launches),
    ) -> Refused<Begun> {
        if let Some(group) = self.core.nccl.groups.borrow_mut().get_mut(&self.client) {
            add(&mut group.launches);
            return Ok(Begun::Done(SUCCESS));
        }
        let mut launches = Launches::default();
        add(&mut launches);
        launches.enqueue(self.core)?;
        Ok(Begun::Done(member.code()))
    }
}

/// Has the ranks of `together` arrive.
fn begin(core: &Core, mut together: Together) -> Begun {
    together.tasks.iter().for_each(|task| task.arrive(core));
    if !together.tasks.iter().all(|task| task.is_blocking()) {
        together.code = IN_PROGRESS;
        together.tasks.retain(|task| task.is_blocking());
    }
    Begun::Waits(Box::new(together))
}

/// What a call or a group waits for before it is over.
struct Together {
    tasks: Vec<Rc<Task>>,
    /// Launched when all ranks have met.
    launches: Launches,
    code: c_int,
}

impl Wait for Together {
    fn poll(&mut self, core: &Core) -> Poll<Refused<c_int>> {
        let results = self.tasks.iter().map(|task| task.result());
        let Some(results) = results.collect::<Option<Vec<_>>>() else { return Poll::Pending };
        if let Some(refusal) = results.into_iter().find_map(Result::err) {
            return Poll::Ready(Err(refusal));
        }
        let launched = std::mem::take(&mut self.launches).enqueue(core);
        Poll::Ready(launched.map(|is_busy| if is_busy { IN_PROGRESS } else { self.code }))
    }

    fn give_up(&mut self, core: &Core, why: &Refusal) {
        for task in self.tasks.iter().filter(|task| task.result().is_none()) {
            task.withdraw(core, why);
        }
    }
}

pub(super) unsafe extern "C" fn start() -> c_int {
    question("ncclGroupStart", null_mut(), |ask| {
        let mut groups = ask.core.nccl.groups.borrow_mut();
        groups.entry(ask.client).or_default().depth += 1;
        Ok(())
    })
}

/// Ends a group by `begin`. A fault in the call itself ends it, too.
fn end_with(name: &'static str, begin: impl FnOnce(&Ask<'_>, Group) -> Refused<Begun>) -> c_int {
    let is_closed = Cell::new(false);
    let code = call(name, null_mut(), |ask| {
        is_closed.set(true);
        match ask.core.nccl.close_group(ask.client)? {
            None => Ok(Begun::Done(SUCCESS)),
            Some(Group { failed: Some(refusal), tasks, .. }) => {
                let group = Group { tasks, ..Group::default() };
                group.discard(ask.core, &refusal);
                Err(refusal)
            }
            Some(group) => begin(ask, group),
        }
    });
    if !is_closed.get() {
        Client::with(|client| {
            let id = client.id();
            client.call(name, |core, _| {
                if let Ok(Some(group)) = core.nccl.close_group(id) {
                    group.discard(core, &Refusal::new(code, "the end of the group failed"));
                }
                Poll::Ready(())
            })
        });
    }
    code
}

pub(super) unsafe extern "C" fn end() -> c_int {
    end_with("ncclGroupEnd", |ask, group| {
        let Group { tasks, launches, .. } = group;
        Ok(begin(ask.core, Together { tasks, launches, code: SUCCESS }))
    })
}

/// What the group would take: a simulated machine has no time to tell, and says 0.
pub(super) unsafe extern "C" fn simulate_end(info: *mut SimInfo) -> c_int {
    end_with("ncclGroupSimulateEnd", |ask, group| {
        group.discard(ask.core, &Refusal::usage("the group was simulated"));
        // SAFETY: the module's.
        let Some(info) = (unsafe { info.as_mut() }) else { return Ok(Begun::Done(SUCCESS)) };
        if info.size != size_of::<SimInfo>() || info.magic != SimInfo::new().magic {
            return Err(Refusal::argument("a ncclSimInfo_t that was not initialized"));
        }
        info.estimated_time = 0.0;
        Ok(Begun::Done(SUCCESS))
    })
}
