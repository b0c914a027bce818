//! NCCL groups: calls made in a group begin together at its end.

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::{IN_PROGRESS, SUCCESS, SimInfo};
use litemap::Entry;

use super::batch::Launches;
use super::call::{
    CallContext, CallProgress, NcclError, NcclResult, PendingCall, call, call_ungrouped,
};
use super::comm::RankComm;
use super::rendezvous::Task;
use super::state::State;
use crate::base::ids::ClientId;
use crate::machine::baton::Client;
use crate::machine::core::Core;

/// A thread's open group.
#[derive(Default)]
pub(super) struct Group {
    /// Nesting depth.
    depth: usize,
    /// The error of the first failed call.
    failed: Option<NcclError>,
    /// Calls that wait for other ranks.
    tasks: Vec<Rc<Task>>,
    /// Batches to enqueue.
    pub(super) launches: Launches,
}

impl State {
    /// Records a failed call in the open group, if any, whose end then only returns the error.
    pub(super) fn fail_group(&self, client: ClientId, error: &NcclError) {
        if let Some(group) = self.groups.borrow_mut().get_mut(&client) {
            group.failed.get_or_insert_with(|| error.clone());
        }
    }

    /// Closes a group level; returns the group if it was the outermost.
    fn close_group(&self, client: ClientId) -> NcclResult<Option<Group>> {
        let mut groups = self.groups.borrow_mut();
        match groups.entry(client) {
            Entry::Vacant(_) => Err(NcclError::usage("no group is open on this thread")),
            Entry::Occupied(mut open) if open.get().depth > 1 => {
                open.get_mut().depth -= 1;
                Ok(None)
            }
            Entry::Occupied(open) => Ok(Some(open.remove())),
        }
    }
}

impl Group {
    /// Cancels the group's calls.
    fn discard(self, core: &Core, why: &NcclError) {
        for task in self.tasks {
            task.cancel(core, why);
        }
    }
}

impl CallContext<'_> {
    /// Begins a call that waits for other ranks: now, or at the end of the open group.
    pub(super) fn start(&self, task: Rc<Task>) -> NcclResult<CallProgress> {
        if let Some(group) = self.core.nccl.groups.borrow_mut().get_mut(&self.client) {
            group.tasks.push(task);
            return Ok(CallProgress::Done(SUCCESS));
        }
        let tasks = vec![task];
        Ok(begin(
            self.core,
            GroupCompletion { tasks, launches: Launches::default(), code: SUCCESS },
        ))
    }

    /// Launches operations of a communicator: now, or at the end of the open group.
    pub(super) fn launch(
        &self,
        rank_comm: &Rc<RankComm>,
        add: impl FnOnce(&mut Launches),
    ) -> NcclResult<CallProgress> {
        if let Some(group) = self.core.nccl.groups.borrow_mut().get_mut(&self.client) {
            add(&mut group.launches);
            return Ok(CallProgress::Done(SUCCESS));
        }
        let mut launches = Launches::default();
        add(&mut launches);
        launches.enqueue(self.core)?;
        Ok(CallProgress::Done(rank_comm.code()))
    }
}

/// Begins the calls of `completion`: each arrives at its rendezvous.
fn begin(core: &Core, mut completion: GroupCompletion) -> CallProgress {
    completion.tasks.iter().for_each(|task| task.arrive(core));
    if !completion.tasks.iter().all(|task| task.is_blocking()) {
        // Calls of non-blocking communicators go on without their caller.
        completion.code = IN_PROGRESS;
        completion.tasks.retain(|task| task.is_blocking());
    }
    CallProgress::Waits(Box::new(completion))
}

/// A call or a group that has begun.
struct GroupCompletion {
    tasks: Vec<Rc<Task>>,
    /// Launched once all ranks have arrived.
    launches: Launches,
    code: c_int,
}

impl PendingCall for GroupCompletion {
    fn poll(&mut self, core: &Core) -> Poll<NcclResult<c_int>> {
        let results = self.tasks.iter().map(|task| task.result());
        let Some(results) = results.collect::<Option<Vec<_>>>() else { return Poll::Pending };
        if let Some(error) = results.into_iter().find_map(Result::err) {
            return Poll::Ready(Err(error));
        }
        let launched = std::mem::take(&mut self.launches).enqueue(core);
        Poll::Ready(launched.map(|is_busy| if is_busy { IN_PROGRESS } else { self.code }))
    }

    fn cancel(&mut self, core: &Core, why: &NcclError) {
        for task in self.tasks.iter().filter(|task| task.result().is_none()) {
            task.cancel(core, why);
        }
    }
}

pub(super) unsafe extern "C" fn start() -> c_int {
    call_ungrouped("ncclGroupStart", null_mut(), |cx| {
        let mut groups = cx.core.nccl.groups.borrow_mut();
        groups.entry(cx.client).or_default().depth += 1;
        Ok(())
    })
}

/// Closes a group level; the outermost runs `begin`. An injected fault cancels the group's calls.
fn end_with(
    name: &'static str,
    begin: impl FnOnce(&CallContext<'_>, Group) -> NcclResult<CallProgress>,
) -> c_int {
    let is_closed = Cell::new(false);
    let code = call(name, null_mut(), |cx| {
        is_closed.set(true);
        match cx.core.nccl.close_group(cx.client)? {
            None => Ok(CallProgress::Done(SUCCESS)),
            Some(Group { failed: Some(error), tasks, .. }) => {
                let group = Group { tasks, ..Group::default() };
                group.discard(cx.core, &error);
                Err(error)
            }
            Some(group) => begin(cx, group),
        }
    });
    if !is_closed.get() {
        Client::with(|client| {
            let id = client.id();
            client.call(name, |core, _| {
                if let Ok(Some(group)) = core.nccl.close_group(id) {
                    group.discard(core, &NcclError::new(code, "the end of the group failed"));
                }
                Poll::Ready(())
            })
        });
    }
    code
}

pub(super) unsafe extern "C" fn end() -> c_int {
    end_with("ncclGroupEnd", |cx, group| {
        let Group { tasks, launches, .. } = group;
        Ok(begin(cx.core, GroupCompletion { tasks, launches, code: SUCCESS }))
    })
}

/// Writes an estimated time of 0: the simulator does not estimate times.
pub(super) unsafe extern "C" fn simulate_end(info: *mut SimInfo) -> c_int {
    end_with("ncclGroupSimulateEnd", |cx, group| {
        group.discard(cx.core, &NcclError::usage("the group was simulated"));
        // SAFETY: the program passes NULL or a valid out pointer, as NCCL requires.
        let Some(info) = (unsafe { info.as_mut() }) else { return Ok(CallProgress::Done(SUCCESS)) };
        if info.size != size_of::<SimInfo>() || info.magic != SimInfo::new().magic {
            return Err(NcclError::argument("the ncclSimInfo_t was not initialized"));
        }
        info.estimated_time = 0.0;
        Ok(CallProgress::Done(SUCCESS))
    })
}
