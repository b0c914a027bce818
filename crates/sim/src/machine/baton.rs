//! Schedules host threads: at any time one has the machine's *baton*, the permission to run.
//!
//! A host thread that uses the machine is a *client*. It calls the machine by posting a closure,
//! which the machine's thread polls until the closure has a result. Between two calls, only the
//! client that has the baton runs: it has its *turn*. So the clients' calls, and their effects on
//! each other, have one order, which the machine chooses.
//!
//! A client that blocks outside the machine (on another thread, for example) loses the baton after
//! a tenth of a second. From then on the order depends on the operating system.
//!
//! # Safety
//!
//! A posted closure is neither `'static` nor `Send`. Its client is blocked in [`Client::call`]
//! until the machine's thread has removed the closure's address from [`Entry::call`], or polls no
//! more ([`Shared::end`]). Only the machine's thread runs the closure. So the closure outlives its
//! use, and no two threads use it at the same time.

mod client;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LockResult, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use litemap::LiteMap;

pub(crate) use self::client::Client;
use super::core::Core;
use super::fault::Faults;
use super::processor::Processor;
use crate::base::error::Error;
use crate::base::ids::ClientId;
use crate::base::simulation::Simulation;
use crate::race::HostEvent;

/// The interval at which the machine checks whether the running client is blocked.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// The longest time that the last client waits for the timeline.
const WRITING_TIME: Duration = Duration::from_secs(10);
/// A client that this number of consecutive checks finds blocked loses the baton.
const MAX_BLOCKED_CHECKS: u32 = 10;

/// The number of a machine's events so far, to wait for the next one without missing any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCount {
    notifications: u64,
    completions: u64,
}

impl EventCount {
    /// Returns whether a thread has [notified](crate::Machine::notify) the machine after `since`.
    pub(crate) fn is_notify(self, since: Self) -> bool {
        self.notifications != since.notifications
    }
}

/// State shared by clients and the machine's thread.
pub(crate) struct Shared {
    /// Unique among the machines of this process.
    pub(crate) number: u64,
    pub(crate) simulation: Simulation,
    /// The clients, in a lock of the standard library. `parking_lot` has one table for all waits
    /// of a process: a forked child's copy lists threads that the child does not have, in memory
    /// that its own threads reuse.
    turns: Mutex<Turns>,
    /// The events of clients between their calls, in order.
    events: Mutex<Vec<(ClientId, HostEvent)>>,
    /// Wakes the machine's thread when a client has called, attached or detached.
    changed: Condvar,
    /// Wakes the client that waits for the timeline.
    has_written: Condvar,
    /// Number of notifications by threads. A thread that acquires a count sees what was written
    /// before it.
    notifications: AtomicU64,
    /// Number of times that stream operations completed.
    completions: AtomicU64,
    /// The virtual clock in nanoseconds.
    clock: AtomicU64,
    /// The first failure.
    failure: OnceLock<Arc<Error>>,
    pub(crate) faults: Faults,
    pub(super) processor: Processor,
}

#[derive(Default)]
struct Turns {
    clients: LiteMap<ClientId, Entry>,
    next: u32,
    /// Whether the last client's end ends the machine: [`Shared::close`] was called.
    closed: bool,
    /// Whether the machine's thread is to write the timeline.
    writes: bool,
    /// Whether the machine's thread has ended.
    ended: bool,
}

struct Entry {
    name: Arc<str>,
    state: State,
    /// Wakes the client when it gets the baton.
    turn: Arc<Condvar>,
    /// The operating system's id of the client's thread.
    thread: i32,
    /// Consecutive checks that found the client blocked.
    blocked_checks: u32,
    call: Option<Call>,
    /// The operation that its program performs in the call.
    operation: Option<Arc<str>>,
    /// The GPU whose context was current at its last call.
    gpu: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The thread has not attached yet; the machine waits for it.
    Registered,
    /// Waits for the baton, in a call or for its first turn.
    Waiting,
    /// Has the baton.
    Running,
    /// Has lost the baton and runs unscheduled.
    Unscheduled,
}

/// The name of a call that waits for another thread.
pub(super) const THREAD_WAIT: &str = "a wait for another thread";

/// A call that a client has posted.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// The function, for reports.
    pub(crate) name: &'static str,
    poll: *mut (dyn FnMut(&Core, &Call) -> bool + 'static),
}

// SAFETY: only the machine's thread uses the pointer, as the module explains.
unsafe impl Send for Call {}

impl Call {
    /// Polls the call; returns whether it has a result.
    ///
    /// # Safety
    ///
    /// The caller is the machine's thread, and the call is of a client that [waits](Shared::next).
    pub(crate) unsafe fn poll(&self, core: &Core) -> bool {
        // SAFETY: the closure is alive while its client waits, and this thread alone runs it.
        unsafe { (*self.poll)(core, self) }
    }
}

/// A client that waits.
pub(crate) struct Caller {
    pub(crate) id: ClientId,
    /// `None` while it waits for its first turn.
    pub(crate) call: Option<Call>,
    /// The GPU whose context is current on its thread.
    pub(crate) gpu: Option<usize>,
}

/// The next action of the machine's thread.
pub(crate) enum Next {
    /// Serve the waiting clients. `all`: whether no client is [unscheduled](State::Unscheduled).
    Waiting { clients: Vec<Caller>, all: bool },
    /// Write the timeline, and call [`Shared::has_written`].
    Write,
    /// End the machine.
    End,
}

impl Shared {
    pub(crate) fn new(number: u64, simulation: Simulation) -> Self {
        Self {
            number,
            simulation,
            turns: Mutex::default(),
            events: Mutex::default(),
            changed: Condvar::new(),
            has_written: Condvar::new(),
            notifications: AtomicU64::new(0),
            completions: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            failure: OnceLock::new(),
            faults: Faults::default(),
            processor: Processor::choose(),
        }
    }

    /// Records the machine's first failure; ignores later ones.
    pub(crate) fn record_failure(&self, error: Error) {
        self.failure.get_or_init(|| Arc::new(error));
    }

    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.failure.get().cloned()
    }

    pub(crate) fn event_count(&self) -> EventCount {
        let [notifications, completions] =
            [&self.notifications, &self.completions].map(|count| count.load(Ordering::Acquire));
        EventCount { notifications, completions }
    }

    /// Counts a notification.
    pub(crate) fn notify(&self) {
        self.notifications.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_one();
    }

    /// Counts a completion of stream operations.
    pub(crate) fn notify_streams(&self) {
        self.completions.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }

    /// Advances the clock to `to`, unless it is later already.
    pub(crate) fn advance(&self, to: u64) {
        self.clock.fetch_max(to, Ordering::AcqRel);
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        unpoisoned(self.turns.lock())
    }

    /// Registers a client whose thread will attach.
    pub(crate) fn register(self: &Arc<Self>, name: String) -> ClientId {
        let mut turns = self.turns();
        let id = ClientId(turns.next);
        turns.next += 1;
        let entry = Entry {
            name: name.into(),
            state: State::Registered,
            turn: Arc::default(),
            thread: 0,
            blocked_checks: 0,
            call: None,
            operation: None,
            gpu: None,
        };
        turns.clients.insert(id, entry);
        drop(turns);
        self.event(id, HostEvent::Start(self.current()));
        id
    }

    /// Returns the client that is the calling thread.
    fn current(&self) -> Option<ClientId> {
        Client::with(|client| (client.shared().number == self.number).then(|| client.id()))
            .flatten()
    }

    fn event(&self, id: ClientId, event: HostEvent) {
        unpoisoned(self.events.lock()).push((id, event));
    }

    /// Records that the calling thread sends messages to other threads, or receives theirs.
    pub(crate) fn exchange(&self) {
        if let Some(id) = self.current() {
            self.event(id, HostEvent::Message);
        }
    }

    /// Returns what has happened to clients since the last call.
    pub(crate) fn take_events(&self) -> Vec<(ClientId, HostEvent)> {
        std::mem::take(&mut *unpoisoned(self.events.lock()))
    }

    /// Removes a client.
    pub(crate) fn remove(&self, id: ClientId) {
        let mut turns = self.turns();
        turns.clients.remove(&id);
        self.event(id, HostEvent::End);
        let is_last = turns.clients.is_empty() && !turns.ended;
        turns.writes |= is_last && self.simulation.timeline.is_some();
        // The lock is still held, so `next` never finds the removal without the notification.
        self.notify();
        // The process may end after its last client, so that one waits for the timeline.
        let is_pending = |turns: &mut Turns| turns.writes && !turns.ended;
        drop(self.has_written.wait_timeout_while(turns, WRITING_TIME, is_pending));
    }

    /// Lets the machine end with its last client.
    pub(crate) fn close(&self) {
        self.turns().closed = true;
        self.changed.notify_one();
    }

    /// Records that the machine's thread has written the timeline.
    pub(crate) fn has_written(&self) {
        self.turns().writes = false;
        self.has_written.notify_all();
    }

    /// Fails pending and later calls, since the machine's thread ends.
    pub(crate) fn end(&self) {
        let mut turns = self.turns();
        turns.ended = true;
        self.has_written.notify_all();
        turns.clients.values().for_each(|entry| entry.turn.notify_one());
    }

    /// Waits until no client has the baton and one waits for it.
    pub(crate) fn next(&self) -> Next {
        let mut turns = self.turns();
        loop {
            let is_any = |state| turns.clients.values().any(|entry| entry.state == state);
            if turns.writes {
                return Next::Write;
            }
            if turns.clients.is_empty() && turns.closed {
                return Next::End;
            }
            if is_any(State::Running) {
                let timeout;
                (turns, timeout) = unpoisoned(self.changed.wait_timeout(turns, CHECK_INTERVAL));
                if timeout.timed_out() {
                    let blocked = turns.check_blocked();
                    blocked.into_iter().for_each(|id| self.event(id, HostEvent::Unseen));
                }
            } else if is_any(State::Registered) || !is_any(State::Waiting) {
                turns = unpoisoned(self.changed.wait(turns));
            } else {
                let all = !is_any(State::Unscheduled);
                let waiting = turns.clients.iter().filter(|(_, e)| e.state == State::Waiting);
                let caller =
                    |(id, e): (&ClientId, &Entry)| Caller { id: *id, call: e.call, gpu: e.gpu };
                let clients = waiting.map(caller).collect();
                return Next::Waiting { clients, all };
            }
        }
    }

    /// Waits until an unscheduled client may have called, for [`CHECK_INTERVAL`] at most; returns
    /// how long it has waited.
    pub(crate) fn wait_for_unscheduled(&self) -> Duration {
        let start = Instant::now();
        drop(self.changed.wait_timeout(self.turns(), CHECK_INTERVAL));
        start.elapsed()
    }

    /// Passes the baton to a client whose call is ready.
    pub(crate) fn give_turn(&self, id: ClientId) {
        let mut turns = self.turns();
        if let Some(entry) = turns.clients.get_mut(&id) {
            entry.state = State::Running;
            entry.blocked_checks = 0;
            entry.call = None;
            entry.turn.notify_one();
        }
    }

    /// Returns the name of a client.
    pub(crate) fn name_of(&self, id: ClientId) -> Arc<str> {
        self.turns().clients.get(&id).map_or_else(|| "".into(), |entry| entry.name.clone())
    }

    /// Returns what the waiting clients do, for reports.
    pub(crate) fn callers(&self) -> Vec<String> {
        let describe = |Entry { name, call, operation, .. }: &Entry| {
            let call = call.as_ref()?.name;
            Some(match operation.as_ref().filter(|_| call == THREAD_WAIT) {
                Some(operation) => format!("host: {name} is in {call}: {operation}"),
                None => format!("host: {name} is in {call}"),
            })
        };
        self.turns().clients.values().filter_map(describe).collect()
    }
}

impl Turns {
    /// Takes the baton from a client that is blocked outside the machine, and returns the client.
    fn check_blocked(&mut self) -> Option<ClientId> {
        let mut blocked = None;
        let clients = self.clients.iter_mut();
        for (id, entry) in clients.filter(|(_, entry)| entry.state == State::Running) {
            entry.blocked_checks =
                if is_blocked(entry.thread) { entry.blocked_checks + 1 } else { 0 };
            if entry.blocked_checks >= MAX_BLOCKED_CHECKS {
                entry.state = State::Unscheduled;
                blocked = Some(*id);
                tracing::warn!(
                    "{} is blocked outside the simulated machine: from here on the run is not \
                     determined by the seed",
                    entry.name
                );
            }
        }
        blocked
    }
}

/// Returns what a lock or a wait returns, also after a panic of a thread that held the lock.
fn unpoisoned<T>(locked: LockResult<T>) -> T {
    locked.unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether `/proc` shows that a thread of this process is blocked (state `S`).
fn is_blocked(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
}
