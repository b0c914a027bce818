//! A host thread's end of the baton.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Condvar};
use std::task::Poll;

use super::{Call, Shared, State, unpoisoned};
use crate::base::ids::ClientId;
use crate::machine::core::Core;
use crate::machine::processor::Allowed;
use crate::race::HostEvent;

thread_local! {
    static CURRENT: RefCell<Option<Client>> = const { RefCell::new(None) };
}

/// A thread's handle to the machine.
pub(crate) struct Client {
    shared: Arc<Shared>,
    id: ClientId,
    /// The process that has attached the thread: in a child that it forks there is no machine.
    process: u32,
    turn: Arc<Condvar>,
    /// The processors that this thread may run on between calls.
    allowed: Allowed,
    /// The GPU whose context is current on this thread.
    pub(crate) gpu: Cell<Option<usize>>,
    /// The operation that the program performs, for reports.
    pub(crate) operation: RefCell<Option<Arc<str>>>,
}

impl Client {
    /// Detaches this thread from its previous machine, attaches it as client `id`, and waits for
    /// its first turn.
    pub(crate) fn attach(shared: &Arc<Shared>, id: ClientId) {
        // The thread detaches first, since it may have the previous machine's baton.
        Self::detach();
        let mut turns = shared.turns();
        let Some(entry) = turns.clients.get_mut(&id) else { return };
        // SAFETY: gettid takes no arguments and cannot fail.
        entry.thread = unsafe { libc::gettid() };
        let turn = Arc::clone(&entry.turn);
        drop(turns);
        let (shared, allowed) = (Arc::clone(shared), Allowed::of_this_thread());
        let (gpu, operation) = Default::default();
        let process = std::process::id();
        let client = Self { shared, id, process, turn, allowed, gpu, operation };
        client.wait_for_turn(None);
        CURRENT.set(Some(client));
    }

    /// Detaches this thread.
    pub(crate) fn detach() {
        // The thread-local may already be destroyed.
        let client = CURRENT.try_with(RefCell::take).ok().flatten();
        drop(client);
    }

    /// Runs `f` as if this thread were attached to no machine. `f` may attach it to another one and
    /// detach it: the thread is then attached as before.
    pub(crate) fn aside<R>(f: impl FnOnce() -> R) -> R {
        let client = CURRENT.try_with(RefCell::take).ok().flatten();
        let result = f();
        if client.is_some() {
            CURRENT.set(client);
        }
        result
    }

    /// Calls `f` with this thread's client, if it is attached.
    pub(crate) fn with<R>(f: impl FnOnce(&Self) -> R) -> Option<R> {
        CURRENT.try_with(|current| current.borrow().as_ref().map(f)).ok().flatten()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn id(&self) -> ClientId {
        self.id
    }

    /// Lets the machine's thread poll `f` until it is ready. Returns `None` if the machine ended.
    pub(crate) fn call<R>(
        &self,
        name: &'static str,
        mut f: impl FnMut(&Core, &Call) -> Poll<R>,
    ) -> Option<R> {
        let mut result = None;
        let mut poll = |core: &Core, call: &Call| match f(core, call) {
            Poll::Ready(ready) => {
                result = Some(ready);
                true
            }
            Poll::Pending => false,
        };
        let poll: *mut (dyn FnMut(&Core, &Call) -> bool + '_) = &raw mut poll;
        // SAFETY: the types differ only in a lifetime; the pointer is used as the module explains.
        let poll: *mut (dyn FnMut(&Core, &Call) -> bool + 'static) =
            unsafe { std::mem::transmute(poll) };
        self.wait_for_turn(Some(Call { name, poll })).then_some(result).flatten()
    }

    /// Posts a call, if any, and waits for the baton. Returns false if the machine ended before it.
    fn wait_for_turn(&self, call: Option<Call>) -> bool {
        self.shared.processor.wait(&self.allowed, || {
            let mut turns = self.shared.turns();
            if turns.ended {
                return false;
            }
            if let Some(entry) = turns.clients.get_mut(&self.id) {
                (entry.call, entry.gpu) = (call, self.gpu.get());
                entry.operation = self.operation.borrow().clone();
                if entry.state == State::Unscheduled {
                    self.shared.event(self.id, HostEvent::Unseen);
                }
                entry.state = State::Waiting;
            }
            self.shared.changed.notify_one();
            while !turns.ended
                && turns.clients.get(&self.id).is_some_and(|entry| entry.state == State::Waiting)
            {
                turns = unpoisoned(self.turn.wait(turns));
            }
            true
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A thread that no child has may have held the machine's locks at the fork.
        if self.process == std::process::id() {
            self.shared.remove(self.id);
        }
    }
}
