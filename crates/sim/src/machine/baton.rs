//! Schedules host threads: one at a time uses the machine.
//!
//! A host thread that uses the machine is a *client*. It calls the machine by posting a closure,
//! which the machine's own thread polls until it is ready. Between two calls one client runs at a
//! time: it holds the baton. So the clients' effects on the machine, and on each other through it,
//! have one order, which the machine chooses.
//!
//! A client that blocks outside the machine (on another thread, say) loses the baton after a
//! moment: from then on the order is the operating system's.
//!
//! # Safety
//!
//! A posted closure is neither `'static` nor `Send`. Its address is in [`Entry::call`] only while
//! its thread is blocked in [`Client::call`], which returns after the machine's thread has taken
//! the address out; only that thread runs the closure. So the closure outlives its use, and no two
//! threads use it at once.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use litemap::LiteMap;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::core::Core;
use super::fault::Faults;
use crate::error::Error;

/// Interval at which the machine checks whether the running client is blocked.
const LOOK: Duration = Duration::from_millis(10);
/// A client found blocked by this many checks in a row loses the baton.
const ASLEEP: u32 = 10;

/// A client's number, in order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientId(u32);

/// Counts of a machine's events so far, to wait for the next one without missing any (an event
/// count).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCount {
    told: u64,
    ended: u64,
}

impl EventCount {
    /// Whether a thread has [notified](crate::Machine::notify) since.
    pub(crate) fn is_notify(self, since: Self) -> bool {
        self.told != since.told
    }
}

/// State shared by clients and the machine's thread.
pub(crate) struct Shared {
    /// Unique among the machines of this process.
    pub(crate) number: u64,
    turns: Mutex<Turns>,
    /// Wakes the machine's thread: a client has called, registered or left.
    asked: Condvar,
    /// Notifications by threads.
    told: AtomicU64,
    /// Completed stream operations.
    ended: AtomicU64,
    /// The virtual clock in nanoseconds.
    clock: AtomicU64,
    /// The first failure.
    failure: OnceLock<Arc<Error>>,
    pub(crate) faults: Faults,
}

#[derive(Default)]
struct Turns {
    clients: LiteMap<ClientId, Entry>,
    next: u32,
    /// No new client is accepted: the machine ends with the last one.
    closed: bool,
    /// The machine's thread has ended.
    ended: bool,
}

struct Entry {
    name: Arc<str>,
    state: State,
    /// Wakes the client: it has the baton.
    turn: Arc<Condvar>,
    /// Its thread's id in the operating system.
    thread: i32,
    /// Consecutive checks that found it blocked.
    asleep: u32,
    call: Option<Call>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Registered; its thread has not attached yet, and the machine waits for it.
    Coming,
    /// Waits for the baton, in a call or for its first turn.
    Waiting,
    /// Holds the baton.
    Running,
    /// Runs without the baton.
    Outside,
}

/// A posted call.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// The function, for reports.
    pub(crate) name: &'static str,
    poll: *mut (dyn FnMut(&Core, &Call) -> bool + 'static),
}

// SAFETY: the module's.
unsafe impl Send for Call {}

impl Call {
    /// Polls it; returns whether it is ready.
    ///
    /// # Safety
    ///
    /// The call was [taken](Shared::next) from a client that has not been answered since, and this
    /// is the machine's thread.
    pub(crate) unsafe fn poll(&self, core: &Core) -> bool {
        // SAFETY: the closure is alive while its client waits, and this thread alone runs it.
        unsafe { (*self.poll)(core, self) }
    }
}

/// What the machine's thread does next.
pub(crate) enum Next {
    /// The waiting clients with their calls; `None` for one that waits for its first turn. `all`:
    /// no client runs outside.
    Waiting { clients: Vec<(ClientId, Option<Call>)>, all: bool },
    /// End.
    End,
}

impl Shared {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            number,
            turns: Mutex::default(),
            asked: Condvar::new(),
            told: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            failure: OnceLock::new(),
            faults: Faults::default(),
        }
    }

    /// Records a failure; the first one is kept.
    pub(crate) fn failed(&self, error: Error) {
        self.failure.get_or_init(|| Arc::new(error));
    }

    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.failure.get().cloned()
    }

    pub(crate) fn event_count(&self) -> EventCount {
        let [told, ended] = [&self.told, &self.ended].map(|count| count.load(Ordering::Acquire));
        EventCount { told, ended }
    }

    /// Counts a notification.
    pub(crate) fn notify(&self) {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.asked.notify_one();
    }

    /// Counts completed stream operations.
    pub(crate) fn notify_streams(&self) {
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }

    pub(crate) fn advance(&self, to: u64) {
        self.clock.fetch_max(to, Ordering::AcqRel);
    }

    /// Registers a client that will attach.
    pub(crate) fn register(self: &Arc<Self>, name: String) -> ClientId {
        let mut turns = self.turns.lock();
        let id = ClientId(turns.next);
        turns.next += 1;
        let entry = Entry {
            name: name.into(),
            state: State::Coming,
            turn: Arc::default(),
            thread: 0,
            asleep: 0,
            call: None,
        };
        turns.clients.insert(id, entry);
        id
    }

    /// Removes a client.
    pub(crate) fn remove(&self, id: ClientId) {
        self.turns.lock().clients.remove(&id);
        self.notify();
    }

    /// Stops accepting clients.
    pub(crate) fn close(&self) {
        self.turns.lock().closed = true;
        self.asked.notify_one();
    }

    /// The machine's thread has ended: pending calls fail.
    pub(crate) fn end(&self) {
        let mut turns = self.turns.lock();
        turns.ended = true;
        turns.clients.values().for_each(|entry| _ = entry.turn.notify_one());
    }

    /// Waits until no client runs and one has posted a call.
    pub(crate) fn next(&self) -> Next {
        let mut turns = self.turns.lock();
        loop {
            let is_any = |state| turns.clients.values().any(|entry| entry.state == state);
            if turns.clients.is_empty() && turns.closed {
                return Next::End;
            }
            if is_any(State::Running) {
                if self.asked.wait_for(&mut turns, LOOK).timed_out() {
                    turns.check_for_sleepers();
                }
            } else if is_any(State::Coming) || !is_any(State::Waiting) {
                self.asked.wait(&mut turns);
            } else {
                let all = !is_any(State::Outside);
                let waiting = turns.clients.iter().filter(|(_, e)| e.state == State::Waiting);
                let clients = waiting.map(|(id, entry)| (*id, entry.call)).collect();
                return Next::Waiting { clients, all };
            }
        }
    }

    /// Waits a moment for clients that run outside.
    pub(crate) fn wait_for_unscheduled(&self) {
        self.asked.wait_for(&mut self.turns.lock(), LOOK);
    }

    /// Passes the baton to a client whose call was answered.
    pub(crate) fn give_turn(&self, id: ClientId) {
        let mut turns = self.turns.lock();
        if let Some(entry) = turns.clients.get_mut(&id) {
            entry.state = State::Running;
            entry.asleep = 0;
            entry.call = None;
            entry.turn.notify_one();
        }
    }

    /// The waiting clients and the names of their calls, for reports.
    pub(crate) fn callers(&self) -> Vec<(Arc<str>, &'static str)> {
        let turns = self.turns.lock();
        let callers = turns.clients.values().filter_map(|e| Some((e.name.clone(), e.call?.name)));
        callers.collect()
    }
}

impl Turns {
    /// Takes the baton from a client that is blocked elsewhere.
    fn check_for_sleepers(&mut self) {
        let clients = self.clients.iter_mut().map(|(_, entry)| entry);
        for entry in clients.filter(|entry| entry.state == State::Running) {
            entry.asleep = if sleeps(entry.thread) { entry.asleep + 1 } else { 0 };
            if entry.asleep >= ASLEEP {
                entry.state = State::Outside;
                tracing::warn!(
                    "{} waits for something outside the simulated machine: from here on a run is \
                     no function of its seed",
                    entry.name
                );
            }
        }
    }
}

/// Whether a thread of this process sleeps; `false` where the system does not tell.
fn sleeps(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
}

thread_local! {
    static CURRENT: RefCell<Option<Client>> = const { RefCell::new(None) };
}

/// A thread's handle to the machine.
pub(crate) struct Client {
    shared: Arc<Shared>,
    id: ClientId,
    turn: Arc<Condvar>,
    /// The GPU whose context is current.
    pub(crate) gpu: Cell<Option<usize>>,
}

impl Client {
    /// Attaches this thread as client `id` and waits for its first turn. Detaches it from its
    /// previous machine.
    pub(crate) fn attach(shared: &Arc<Shared>, id: ClientId) {
        // First: it may hold the baton.
        Self::detach();
        let mut turns = shared.turns.lock();
        let Some(entry) = turns.clients.get_mut(&id) else { return };
        let turn = Arc::clone(&entry.turn);
        // SAFETY: it takes no arguments and cannot fail.
        entry.thread = unsafe { libc::gettid() };
        entry.state = State::Waiting;
        let shared = Arc::clone(shared);
        shared.asked.notify_one();
        let client = Self { shared, id, turn, gpu: Cell::new(None) };
        client.wait_for_turn(turns);
        CURRENT.set(Some(client));
    }

    /// Detaches this thread.
    pub(crate) fn detach() {
        // During the destruction of thread-locals it may be gone.
        let client = CURRENT.try_with(RefCell::take).ok().flatten();
        drop(client);
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

    /// Lets the machine's thread poll `f` until it is ready. `None` if the machine has ended.
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
        // SAFETY: the two differ only in a lifetime; the module's contract covers the use of the
        // pointer.
        let poll: *mut (dyn FnMut(&Core, &Call) -> bool + 'static) =
            unsafe { std::mem::transmute(poll) };
        let mut turns = self.shared.turns.lock();
        if turns.ended {
            return None;
        }
        if let Some(entry) = turns.clients.get_mut(&self.id) {
            entry.call = Some(Call { name, poll });
            entry.state = State::Waiting;
        }
        self.shared.asked.notify_one();
        self.wait_for_turn(turns);
        result
    }

    fn wait_for_turn(&self, mut turns: MutexGuard<'_, Turns>) {
        while !turns.ended
            && turns.clients.get(&self.id).is_some_and(|entry| entry.state == State::Waiting)
        {
            self.turn.wait(&mut turns);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.remove(self.id);
    }
}
