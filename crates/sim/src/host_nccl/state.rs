//! What NCCL keeps for a machine, and what calls wait for.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::RawComm;
use litemap::LiteMap;

use super::call::{Begun, Refusal, Refused, Wait};
use super::comm::Member;
use super::dev_comm::Made;
use super::group::Group;
use super::meeting::Meeting;
use super::memory::Memory;
use super::window::Window;
use crate::machine::baton::ClientId;
use crate::machine::core::Core;

/// What NCCL keeps for the machine.
#[derive(Default)]
pub(crate) struct State {
    /// The ranks' ends of all communicators by handle.
    pub(super) members: RefCell<LiteMap<u64, Rc<Member>>>,
    /// The ranks that meet by a unique id, by its number. `None`: they have met.
    pub(super) joins: RefCell<LiteMap<u64, Option<Rc<Meeting>>>>,
    /// The groups that are open.
    pub(super) groups: RefCell<LiteMap<ClientId, Group>>,
    pub(super) memory: Memory,
    /// Each rank's end of a window, by handle.
    pub(super) windows: RefCell<LiteMap<usize, Rc<Window>>>,
    pub(super) dev_comms: RefCell<LiteMap<usize, Made>>,
    /// How many windows, buffers and device communicators there have been.
    ids: Cell<u32>,
    /// What the clients wait for that have begun a call.
    waits: RefCell<LiteMap<ClientId, Box<dyn Wait>>>,
}

impl State {
    /// The number of a new window, buffer or device communicator, for reports.
    pub(super) fn next_id(&self) -> u32 {
        self.ids.replace(self.ids.get() + 1)
    }

    /// A call has begun.
    pub(super) fn begun(
        &self,
        core: &Core,
        client: ClientId,
        begun: Refused<Begun>,
    ) -> Poll<Refused<c_int>> {
        match begun {
            Ok(Begun::Done(code)) => Poll::Ready(Ok(code)),
            Err(refusal) => Poll::Ready(Err(refusal)),
            Ok(Begun::Waits(wait)) => {
                self.waits.borrow_mut().insert(client, wait);
                self.poll_wait(core, client)
            }
        }
    }

    /// Whether the client's call has ended. What it waited for is dropped here: on the machine's
    /// thread.
    pub(super) fn poll_wait(&self, core: &Core, client: ClientId) -> Poll<Refused<c_int>> {
        let Some(mut wait) = self.waits.borrow_mut().remove(&client) else { return Poll::Pending };
        let polled = wait.poll(core);
        if polled.is_pending() {
            self.waits.borrow_mut().insert(client, wait);
        }
        polled
    }

    /// The client is told that its call does not end.
    pub(super) fn give_up(&self, core: &Core, client: ClientId, why: &Refusal) {
        let wait = self.waits.borrow_mut().remove(&client);
        if let Some(mut wait) = wait {
            wait.give_up(core, why);
        }
    }

    /// An error that was asked for comes after a call.
    pub(super) fn fail_later(&self, comm: RawComm, code: c_int, after: &str) {
        if let Some(member) = self.members.borrow().get(&(comm as u64)) {
            member.fail(&Refusal::new(code, format!("it fails after {after}, on request")));
        }
    }
}
