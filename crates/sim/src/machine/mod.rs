//! The simulated machine: GPUs, a driver and NCCL for host threads of this process.
//!
//! One OS thread, the *machine's thread* ([`turns`]), owns all of a machine's state ([`core`]): it
//! runs the GPUs' threads and executes the calls of host threads ([`baton`]). The functions that
//! host threads call are in [`driver`] and [`host_nccl`].

pub(crate) mod baton;
pub(crate) mod core;
pub(crate) mod driver;
pub(crate) mod fault;
pub(crate) mod host_nccl;
mod processor;
mod turns;

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use devcomm_sys::driver::{CUfunction, CUmodule, CUstream, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;
use litemap::LiteMap;
use parking_lot::Mutex;

pub use self::baton::EventCount;
use self::baton::{Call, Client, Shared, THREAD_WAIT};
use self::core::Core;
pub use self::fault::{CallRecord, Effect, Fault, ThreadEffect, ThreadFault};
use crate::base::error::{Error, Result};
use crate::base::ids::ClientId;
use crate::base::simulation::Simulation;
use crate::base::timeline;
use crate::gpu::gpus::Activity;
use crate::memory::traffic::Traffic;

/// The machines of this process by number; a context's handle encodes the number.
static MACHINES: Mutex<LiteMap<u64, Weak<Shared>>> = Mutex::new(LiteMap::new());

/// A simulated machine. Clones refer to the same machine, which ends once the last clone is dropped
/// and the last attached thread has detached.
#[derive(Clone)]
pub struct Machine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    gpus: usize,
}

impl Machine {
    /// Creates a machine.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] for invalid settings.
    pub fn new(simulation: &Simulation) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let simulation = simulation.checked()?;
        simulation.timeline.as_deref().map_or(Ok(()), timeline::check)?;
        let gpus = simulation.gpus;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared::new(number, simulation));
        MACHINES.lock().insert(shared.number, Arc::downgrade(&shared));
        let machine = Arc::clone(&shared);
        thread::Builder::new()
            .name("devcomm-machine".to_owned())
            .spawn(move || turns::run(&machine))
            .map_err(|error| Error::Settings(format!("a thread cannot be started: {error}")))?;
        Ok(Self { inner: Arc::new(Inner { shared, gpus }) })
    }

    /// Returns the number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.inner.gpus
    }

    /// Returns the driver's functions. They act on the machine that the calling thread is attached
    /// to.
    #[must_use]
    pub fn driver() -> &'static Driver {
        &crate::machine::driver::DRIVER
    }

    /// Returns NCCL's functions, version 2.32.3. They act on the machine that the calling thread is
    /// attached to.
    #[must_use]
    pub fn nccl() -> &'static Functions {
        &crate::machine::host_nccl::NCCL
    }

    /// Reserves a turn for a thread that will attach: until then, no other thread gets a turn.
    /// `name` is the thread's name in reports.
    pub fn ticket(&self, name: impl Into<String>) -> Ticket {
        let shared = Arc::clone(&self.inner.shared);
        let id = shared.register(name.into());
        Ticket { shared, id, used: false }
    }

    /// Attaches the calling thread to this machine until the thread ends. Idempotent. Faults that
    /// are injected into threads take effect here.
    ///
    /// # Panics
    ///
    /// Panics for a [`ThreadEffect::Die`], unless the thread unwinds.
    pub fn enter(&self) {
        let shared = &self.inner.shared;
        join(shared);
        if !shared.faults.counts_entries() || thread::panicking() {
            return;
        }
        let name = Client::with(|client| shared.name_of(client.id()));
        match name.and_then(|name| shared.faults.count_entry(&name)) {
            None => {}
            // No panic hook runs here, so that nothing is printed.
            Some(ThreadEffect::Die) => resume_unwind(Box::new("an injected fault".to_owned())),
            Some(ThreadEffect::Sleep(time)) => {
                let end = self.now() + time;
                let _ = self.wait_until("a wait for a time", Some(end), |_, _| false);
            }
        }
    }

    /// Returns the time of the virtual clock, which advances with the machine's work.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.inner.shared.clock())
    }

    /// Returns the machine's event count, for [`wait`](Self::wait).
    #[must_use]
    pub fn event_count(&self) -> EventCount {
        self.inner.shared.event_count()
    }

    /// Sets the operation that the calling thread's program performs, which reports of deadlocks
    /// name; returns the previous one. Does nothing on a thread that is attached to no machine.
    pub fn set_operation(operation: Option<Arc<str>>) -> Option<Arc<str>> {
        Client::with(|client| client.operation.replace(operation)).flatten()
    }

    /// Returns whether the calling thread is attached to a machine.
    #[must_use]
    pub fn is_attached() -> bool {
        Client::with(|_| ()).is_some()
    }

    /// Waits until an event has happened on the machine after [`event_count`](Self::event_count)
    /// returned `since`, or until the clock has reached `deadline`.
    ///
    /// To wait for a condition, read the event count, test the condition, and wait if it does not
    /// hold: no event in between is missed.
    ///
    /// # Errors
    ///
    /// Returns a deadlock report: every thread waits, and no wait has a deadline. A thread that is
    /// to [`notify`](Self::notify) counts only if it is attached, or has a
    /// [`ticket`](Self::ticket).
    pub fn wait(&self, since: EventCount, deadline: Option<Duration>) -> Result<(), String> {
        self.enter();
        self.wait_until("a wait for an event", deadline, |core, _| core.event_count() != since)
    }

    /// Waits as [`wait`](Self::wait) does, but only for [notifications](Self::notify) by threads.
    ///
    /// # Errors
    ///
    /// The errors are those of [`wait`](Self::wait).
    pub fn wait_for_notify(
        &self,
        since: EventCount,
        deadline: Option<Duration>,
    ) -> Result<(), String> {
        self.enter();
        self.wait_until(THREAD_WAIT, deadline, |core, _| core.event_count().is_notify(since))
    }

    /// Waits as [`wait_for_notify`](Self::wait_for_notify) does, or until this stream of the
    /// current context is idle.
    ///
    /// # Errors
    ///
    /// The errors are those of [`wait`](Self::wait).
    pub fn wait_for_stream(
        &self,
        stream: CUstream,
        since: EventCount,
        deadline: Option<Duration>,
    ) -> Result<(), String> {
        self.enter();
        self.wait_until("a wait for a stream", deadline, |core, gpu| {
            let is_busy = |gpu| {
                let Ok(stream) = core.stream(gpu, stream) else { return false };
                if stream.is_idle() {
                    core.memory.races.host_learns(&stream.clock());
                }
                !stream.is_idle()
            };
            let now = core.event_count();
            now.is_notify(since) || (now != since && !gpu.is_some_and(is_busy))
        })
    }

    fn wait_until(
        &self,
        name: &'static str,
        deadline: Option<Duration>,
        has_happened: impl Fn(&Core, Option<usize>) -> bool,
    ) -> Result<(), String> {
        join(&self.inner.shared);
        // A deadline that exceeds the clock never comes.
        let deadline = deadline.and_then(|time| u64::try_from(time.as_nanos()).ok());
        let deadline = deadline.filter(|time| *time < u64::MAX);
        let waited = Client::with(|client| {
            let gpu = client.gpu.get();
            client.call(name, |core, _| {
                if has_happened(core, gpu) || deadline.is_some_and(|end| core.clock() >= end) {
                    return Poll::Ready(Ok(()));
                }
                // With a deadline there is no deadlock: the clock advances to it.
                if let Some(end) = deadline {
                    core.wake_at(end);
                    return Poll::Pending;
                }
                core.deadlock().map_or(Poll::Pending, |report| Poll::Ready(Err(report)))
            })
        });
        waited.flatten().unwrap_or_else(|| Err("the simulated machine has ended".to_owned()))
    }

    /// Wakes threads in [`wait`](Self::wait), after an event outside the machine. The machine does
    /// not wait for the call of a thread that is not attached: a [`ticket`](Self::ticket) tells of
    /// one. It also counts as an [`exchange`](Self::exchange).
    pub fn notify(&self) {
        self.exchange();
        self.inner.shared.notify();
    }

    /// Tells the detection of races that the calling thread sends messages to other threads or
    /// receives theirs: the work that it starts from now on is ordered after the work that other
    /// threads had waited for when they called this before.
    pub fn exchange(&self) {
        self.inner.shared.exchange();
    }

    /// Returns the first failure: the error with which driver calls fail, or the reported deadlock.
    #[must_use]
    pub fn failure(&self) -> Option<Arc<Error>> {
        self.inner.shared.failure()
    }

    /// Lets the machine end, and free its memory, once no thread is attached to it, although
    /// handles to it still exist. Calls after its end fail.
    pub fn end(&self) {
        MACHINES.lock().remove(&self.inner.shared.number);
        self.inner.shared.close();
    }

    /// Returns the GPUs' activity so far.
    #[must_use]
    pub fn activity(&self) -> Activity {
        self.query(|core| core.gpus.activity()).unwrap_or_default()
    }

    /// Counts what kernels send to other ranks from now on. For tests.
    pub fn record_traffic(&self) {
        let _: Option<()> = self.query(|core| core.gpus.traffic.begin());
    }

    /// Returns the traffic of kernels since [`record_traffic`](Self::record_traffic), by sender and
    /// receiver, without pairs that have sent nothing. The ranks are those of a communicator with
    /// all GPUs.
    #[must_use]
    pub fn traffic(&self) -> BTreeMap<(usize, usize), Traffic> {
        self.query(|core| core.gpus.traffic.all()).unwrap_or_default()
    }

    /// Runs `query` on the machine's thread.
    fn query<R>(&self, query: impl Fn(&Core) -> R) -> Option<R> {
        let is_here = |client: &Client| Arc::ptr_eq(client.shared(), &self.inner.shared);
        let is_attached = Client::with(is_here).unwrap_or(false);
        let call = || {
            let query = |core: &Core, _: &Call| Poll::Ready(query(core));
            Client::with(|client| client.call("a query", query)).flatten()
        };
        if is_attached {
            return call();
        }
        Client::aside(|| {
            let _attached = self.ticket("a query").attach();
            call()
        })
    }

    /// Injects a fault into calls from now on. For tests.
    pub fn inject(&self, fault: Fault) {
        self.inner.shared.faults.inject(fault);
    }

    /// Injects a fault into a host thread, and records calls from now on. For tests.
    pub fn inject_into_thread(&self, fault: ThreadFault) {
        self.inner.shared.faults.inject_into_thread(fault);
    }

    /// Returns the number of times that a host thread of this name has [entered](Self::enter) the
    /// machine while calls were recorded.
    #[must_use]
    pub fn entries(&self, thread: &str) -> usize {
        self.inner.shared.faults.entries(thread)
    }

    /// Records calls from now on. For tests.
    pub fn record_calls(&self) {
        self.inner.shared.faults.record();
    }

    /// Returns the calls of all threads since [`record_calls`](Self::record_calls), in order.
    #[must_use]
    pub fn calls(&self) -> Vec<CallRecord> {
        self.inner.shared.faults.records()
    }

    /// Returns a new module, for [`bind`](Self::bind): what the driver's functions that load one
    /// return on a GPU.
    #[must_use]
    pub fn load_module(&self) -> CUmodule {
        // This is no call of the machine, so that no other thread gets a turn.
        static MODULES: AtomicU64 = AtomicU64::new(1);
        std::ptr::without_provenance_mut(MODULES.fetch_add(1, Ordering::Relaxed) as usize)
    }

    /// Returns the function of a module that runs `body` on the current context's GPU; the same one
    /// for the same body. NULL if the calling thread has no context.
    #[must_use]
    pub fn bind(&self, module: CUmodule, body: &HostBody) -> CUfunction {
        let bound = Client::with(|client| {
            let (gpu, module) = (client.gpu.get()?, module as u64);
            client.call("a binding", |core, _| Poll::Ready(core.bind(gpu, module, body)))
        });
        bound.flatten().unwrap_or(std::ptr::null_mut())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        MACHINES.lock().remove(&self.shared.number);
        self.shared.close();
    }
}

/// Returns the machine with number `number`, if it exists.
pub(crate) fn find(number: u64) -> Option<Arc<Shared>> {
    MACHINES.lock().get(&number).and_then(Weak::upgrade)
}

/// Attaches the calling thread to this machine until the thread ends. Idempotent.
pub(crate) fn join(machine: &Arc<Shared>) {
    let is_here = |client: &Client| Arc::ptr_eq(client.shared(), machine);
    if !Client::with(is_here).unwrap_or(false) {
        let name = thread::current().name().unwrap_or("a thread").to_owned();
        Client::attach(machine, machine.register(name));
    }
}

/// A reserved turn for a thread that will attach to a machine.
#[must_use = "the machine waits for the thread"]
pub struct Ticket {
    shared: Arc<Shared>,
    id: ClientId,
    used: bool,
}

impl Ticket {
    /// Attaches the calling thread and waits for its turn.
    pub fn attach(mut self) -> Attached {
        self.used = true;
        Client::attach(&self.shared, self.id);
        Attached { _private: () }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.used {
            self.shared.remove(self.id);
        }
    }
}

/// Keeps the calling thread attached to a machine until dropped.
#[must_use = "dropping it detaches the thread from the machine"]
pub struct Attached {
    _private: (),
}

impl Drop for Attached {
    fn drop(&mut self) {
        Client::detach();
    }
}
