//! A simulated machine's NCCL state, including its pending calls.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::rc::Rc;
use std::task::Poll;

use devcomm_sys::nccl::RawComm;
use litemap::LiteMap;

use super::call::{CallProgress, NcclError, NcclResult, PendingCall};
use super::comm::RankComm;
use super::dev_comm::RankDevComm;
use super::group::Group;
use super::memory::Memory;
use super::rendezvous::Rendezvous;
use super::window::Window;
use crate::base::ids::ClientId;
use crate::base::owner::Owner;
use crate::machine::core::Core;

/// A machine's NCCL state.
#[derive(Default)]
pub(crate) struct State {
    /// All ranks' communicators by handle.
    pub(super) rank_comms: RefCell<LiteMap<u64, Rc<RankComm>>>,
    /// Rendezvous of joining ranks, by unique id number; `None` once complete.
    pub(super) joins: RefCell<LiteMap<u64, Option<Rc<Rendezvous>>>>,
    /// Open groups by client (a thread of the program).
    pub(super) groups: RefCell<LiteMap<ClientId, Group>>,
    pub(super) memory: Memory,
    /// Each rank's windows by handle.
    pub(super) windows: RefCell<LiteMap<usize, Rc<Window>>>,
    pub(super) dev_comms: RefCell<LiteMap<usize, RankDevComm>>,
    /// Number of windows, buffers and device communicators created so far.
    ids: Cell<u32>,
    /// The pending call of each client.
    waits: RefCell<LiteMap<ClientId, Box<dyn PendingCall>>>,
}

impl State {
    /// Returns the number of a new window, buffer or device communicator, for error messages.
    pub(crate) fn next_id(&self) -> u32 {
        self.ids.replace(self.ids.get() + 1)
    }

    /// Returns the owner of the memory of the window with this handle.
    pub(crate) fn owner(&self, handle: usize) -> Option<Owner> {
        self.windows.borrow().get(&handle).map(|window| window.owner())
    }

    /// Registers a call that has begun.
    pub(super) fn register_call(
        &self,
        core: &Core,
        client: ClientId,
        begin: NcclResult<CallProgress>,
    ) -> Poll<NcclResult<c_int>> {
        match begin {
            Ok(CallProgress::Done(code)) => Poll::Ready(Ok(code)),
            Err(error) => Poll::Ready(Err(error)),
            Ok(CallProgress::Waits(wait)) => {
                self.waits.borrow_mut().insert(client, wait);
                self.poll_wait(core, client)
            }
        }
    }

    /// Polls the client's pending call, and drops it once it is ready.
    pub(super) fn poll_wait(&self, core: &Core, client: ClientId) -> Poll<NcclResult<c_int>> {
        let Some(mut wait) = self.waits.borrow_mut().remove(&client) else { return Poll::Pending };
        let polled = wait.poll(core);
        if polled.is_pending() {
            self.waits.borrow_mut().insert(client, wait);
        }
        polled
    }

    /// Abandons the client's pending call.
    pub(super) fn cancel(&self, core: &Core, client: ClientId, why: &NcclError) {
        let wait = self.waits.borrow_mut().remove(&client);
        if let Some(mut wait) = wait {
            wait.cancel(core, why);
        }
    }

    /// Sets an injected asynchronous error, after the call `after`.
    pub(super) fn fail_later(&self, core: &Core, comm: RawComm, code: c_int, after: &str) {
        if let Some(rank_comm) = self.rank_comms.borrow().get(&(comm as u64)) {
            let is_first = rank_comm.error.borrow().is_none();
            rank_comm.fail(&NcclError::new(code, format!("injected fault after {after}")));
            if is_first {
                // Waiting threads must poll again.
                core.notify();
            }
        }
    }
}
