//! Host threads and their turns.
//!
//! A host thread that uses the machine is a *client*. It calls the machine by posting a closure,
//! which the machine's own thread polls until it is ready. Between two calls one client runs at a
//! time: it has the baton. So what the clients do to the machine, and to each other by way of it,
//! has one order, which the machine chooses.
//!
//! A client that sleeps without having called the machine (it waits for another thread, say) loses
//! the baton after a moment: from then on the order is the operating system's.
//!
//! # Safety
//!
//! A posted closure is not `'static` and not `Send`. Its address is in [`Entry::call`] only while
//! its thread is blocked in [`Client::call`], which returns when the machine's thread has taken
//! the address out, and no thread runs the closure but that one. So it outlives its use, and no two
//! threads use it at a time.

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

/// How often the machine looks whether the client that runs has fallen asleep.
const LOOK: Duration = Duration::from_millis(10);
/// So many looks in a row at a sleeping client take the baton from it.
const ASLEEP: u32 = 10;

/// A client's number, in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClientId(u32);

/// How much has happened on a machine so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    told: u64,
    ended: u64,
}

impl News {
    /// Whether a thread has said something since.
    pub(crate) fn is_word(self, since: Self) -> bool {
        self.told != since.told
    }
}

/// What clients and the machine's thread share.
pub(crate) struct Shared {
    /// Of all machines in this process.
    pub(crate) number: u64,
    turns: Mutex<Turns>,
    /// Tells the machine's thread that a client has asked, come or gone.
    asked: Condvar,
    /// How often a thread has said that something has happened.
    told: AtomicU64,
    /// How often an operation of a stream has ended.
    ended: AtomicU64,
    /// The virtual clock in nanoseconds.
    clock: AtomicU64,
    /// What went wrong first.
    failure: OnceLock<Arc<Error>>,
    pub(crate) faults: Faults,
}

#[derive(Default)]
struct Turns {
    clients: LiteMap<ClientId, Entry>,
    next: u32,
    /// No new client comes: the machine ends with the last one.
    closed: bool,
    /// The machine's thread is gone.
    ended: bool,
}

struct Entry {
    name: Arc<str>,
    state: State,
    /// Tells the client that it has the baton.
    turn: Arc<Condvar>,
    /// The operating system's number of its thread.
    thread: i32,
    /// Looks in a row at which it slept.
    asleep: u32,
    call: Option<Call>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Its thread has not started yet; the machine waits for it.
    Coming,
    /// It waits for the baton, with a call or for its first turn.
    Waiting,
    /// It has the baton.
    Running,
    /// It runs, and has lost the baton.
    Outside,
}

/// A call that is waiting.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// The function, for reports.
    pub(crate) name: &'static str,
    poll: *mut (dyn FnMut(&Core, &Call) -> bool + 'static),
}

// SAFETY: the module's.
unsafe impl Send for Call {}

impl Call {
    /// Polls it; whether it is ready.
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

/// What the machine's thread is to do next.
pub(crate) enum Next {
    /// The clients that wait, with their calls; `None` for one that wants its first turn. If
    /// `all`, no client runs outside.
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

    /// Something has gone wrong.
    pub(crate) fn failed(&self, error: Error) {
        self.failure.get_or_init(|| Arc::new(error));
    }

    pub(crate) fn failure(&self) -> Option<Arc<Error>> {
        self.failure.get().cloned()
    }

    pub(crate) fn news(&self) -> News {
        let [told, ended] = [&self.told, &self.ended].map(|count| count.load(Ordering::Acquire));
        News { told, ended }
    }

    /// Something has happened.
    pub(crate) fn notify(&self) {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.asked.notify_one();
    }

    /// Operations of streams have ended.
    pub(crate) fn streams_moved(&self) {
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Acquire)
    }

    pub(crate) fn advance(&self, to: u64) {
        self.clock.fetch_max(to, Ordering::AcqRel);
    }

    /// A client that will come.
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

    /// No more clients come.
    pub(crate) fn close(&self) {
        self.turns.lock().closed = true;
        self.asked.notify_one();
    }

    /// The machine's thread is gone: whoever waits for it gets no answer.
    pub(crate) fn end(&self) {
        let mut turns = self.turns.lock();
        turns.ended = true;
        turns.clients.values().for_each(|entry| _ = entry.turn.notify_one());
    }

    /// Waits until no client runs, and one has asked for something.
    pub(crate) fn next(&self) -> Next {
        let mut turns = self.turns.lock();
        loop {
            let is_any = |state| turns.clients.values().any(|entry| entry.state == state);
            if turns.clients.is_empty() && turns.closed {
                return Next::End;
            }
            if is_any(State::Running) {
                if self.asked.wait_for(&mut turns, LOOK).timed_out() {
                    turns.look_for_sleepers();
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

    /// Waits a moment: a client that runs outside may ask for something, or end.
    pub(crate) fn wait_for_outsiders(&self) {
        self.asked.wait_for(&mut self.turns.lock(), LOOK);
    }

    /// Gives a client the baton; its call has been answered.
    pub(crate) fn give_turn(&self, id: ClientId) {
        let mut turns = self.turns.lock();
        if let Some(entry) = turns.clients.get_mut(&id) {
            entry.state = State::Running;
            entry.asleep = 0;
            entry.call = None;
            entry.turn.notify_one();
        }
    }

    /// Who waits in which call, for reports.
    pub(crate) fn callers(&self) -> Vec<(Arc<str>, &'static str)> {
        let turns = self.turns.lock();
        let callers = turns.clients.values().filter_map(|e| Some((e.name.clone(), e.call?.name)));
        callers.collect()
    }
}

impl Turns {
    /// Takes the baton from a client that sleeps.
    fn look_for_sleepers(&mut self) {
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

/// Whether a thread of this process sleeps. Where the system does not say, no thread does.
fn sleeps(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')))
}

thread_local! {
    static CURRENT: RefCell<Option<Client>> = const { RefCell::new(None) };
}

/// This thread's end of the machine.
pub(crate) struct Client {
    shared: Arc<Shared>,
    id: ClientId,
    turn: Arc<Condvar>,
    /// The GPU whose context is current.
    pub(crate) gpu: Cell<Option<usize>>,
}

impl Client {
    /// Makes this thread the client `id`, and waits for its first turn. It is no other client any
    /// more.
    pub(crate) fn attach(shared: &Arc<Shared>, id: ClientId) {
        // First: it could have the baton.
        Self::detach();
        let mut turns = shared.turns.lock();
        let Some(entry) = turns.clients.get_mut(&id) else { return };
        let turn = Arc::clone(&entry.turn);
        // SAFETY: it takes nothing and cannot fail.
        entry.thread = unsafe { libc::gettid() };
        entry.state = State::Waiting;
        let shared = Arc::clone(shared);
        shared.asked.notify_one();
        let client = Self { shared, id, turn, gpu: Cell::new(None) };
        client.wait_for_turn(turns);
        CURRENT.set(Some(client));
    }

    /// This thread is no client any more.
    pub(crate) fn detach() {
        // Once more in the drop of a thread's locals it is gone already.
        let client = CURRENT.try_with(RefCell::take).ok().flatten();
        drop(client);
    }

    /// What `f` makes of this thread's client, if it is one.
    pub(crate) fn with<R>(f: impl FnOnce(&Self) -> R) -> Option<R> {
        CURRENT.try_with(|current| current.borrow().as_ref().map(f)).ok().flatten()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn id(&self) -> ClientId {
        self.id
    }

    /// Has the machine's thread poll `f` until it is ready. `None` if the machine is gone.
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
        // SAFETY: the two differ in a lifetime; that nobody uses the pointer behind it is the
        // module's.
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
