//! A simulated machine: GPUs, a driver and an NCCL, for the host threads of this process.
//!
//! One OS thread owns all of it, the *machine's thread* ([`turns`]): it runs the threads of the
//! GPUs, and answers what host threads ask ([`baton`]). The functions of the two tables are in
//! [`driver`](crate::driver) and [`host_nccl`](crate::host_nccl); what they change is in [`core`].

pub(crate) mod baton;
pub(crate) mod core;
pub(crate) mod fault;
mod turns;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use devcomm_sys::driver::{CUfunction, CUstream, Driver};
use devcomm_sys::nccl::Functions;
use devcomm_types::HostBody;
use litemap::LiteMap;
use parking_lot::Mutex;

pub use self::baton::News;
use self::baton::{Call, Client, ClientId, Shared};
use self::core::Core;
pub use self::fault::{CallRecord, Effect, Fault};
use crate::error::{Error, Result};
use crate::gpus::Activity;
use crate::simulation::Simulation;

/// The machines of this process by number: a context's handle names its machine.
static MACHINES: Mutex<LiteMap<u64, Weak<Shared>>> = Mutex::new(LiteMap::new());

/// A simulated machine. Clones are the same machine; it ends with the last of them and the last
/// thread that uses it.
#[derive(Clone)]
pub struct Machine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    gpus: usize,
}

impl Machine {
    /// Makes a machine.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] where the settings make no sense.
    pub fn new(simulation: &Simulation) -> Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let simulation = simulation.checked()?;
        let gpus = simulation.gpus;
        let shared = Arc::new(Shared::new(NUMBER.fetch_add(1, Ordering::Relaxed)));
        MACHINES.lock().insert(shared.number, Arc::downgrade(&shared));
        let its = Arc::clone(&shared);
        thread::Builder::new()
            .name("devcomm-machine".to_owned())
            .spawn(move || turns::run(&its, &simulation))
            .map_err(|error| Error::Settings(format!("a thread cannot be started: {error}")))?;
        Ok(Self { inner: Arc::new(Inner { shared, gpus }) })
    }

    /// How many GPUs it has.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.inner.gpus
    }

    /// The driver's functions. They find their machine by the thread that calls them.
    #[must_use]
    pub fn driver() -> &'static Driver {
        &crate::driver::DRIVER
    }

    /// NCCL's functions, of version 2.32.3. They find their machine by the thread that calls them.
    #[must_use]
    pub fn nccl() -> &'static Functions {
        &crate::host_nccl::NCCL
    }

    /// Announces a thread that will use the machine: until it has attached, no other gets its turn.
    /// `name` stands for it in reports.
    pub fn ticket(&self, name: impl Into<String>) -> Ticket {
        let shared = Arc::clone(&self.inner.shared);
        let id = shared.register(name.into());
        Ticket { shared, id, used: false }
    }

    /// Makes the calling thread one that uses this machine, if it is none yet, until it ends.
    pub fn enter(&self) {
        join(&self.inner.shared);
    }

    /// The machine's clock, which is virtual: it moves with what the machine does.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.inner.shared.clock())
    }

    /// How much has happened on the machine so far.
    #[must_use]
    pub fn news(&self) -> News {
        self.inner.shared.news()
    }

    /// Waits until something has happened on the machine since [`news`](Self::news) was `since`, or
    /// the clock has reached `deadline`.
    ///
    /// Whoever waits for a condition takes the news first, looks at the condition then, and waits
    /// if it does not hold: what happens in between is not missed.
    ///
    /// # Errors
    ///
    /// Nothing can happen any more and nobody waits with a deadline: who waits for what.
    pub fn wait(&self, since: News, deadline: Option<Duration>) -> Result<(), String> {
        self.wait_until(deadline, |core, _| core.news() != since)
    }

    /// As [`wait`](Self::wait), but only for what a thread has [said](Self::notify).
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_for_word(&self, since: News, deadline: Option<Duration>) -> Result<(), String> {
        self.wait_until(deadline, |core, _| core.news().is_word(since))
    }

    /// As [`wait_for_word`](Self::wait_for_word), or until something has happened and this stream
    /// of the current context has nothing to do.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_for_stream(
        &self,
        stream: CUstream,
        since: News,
        deadline: Option<Duration>,
    ) -> Result<(), String> {
        self.wait_until(deadline, |core, gpu| {
            let is_busy = |gpu| core.stream(gpu, stream).is_ok_and(|stream| !stream.is_idle());
            let now = core.news();
            now.is_word(since) || (now != since && !gpu.is_some_and(is_busy))
        })
    }

    fn wait_until(
        &self,
        deadline: Option<Duration>,
        has_come: impl Fn(&Core, Option<usize>) -> bool,
    ) -> Result<(), String> {
        self.enter();
        let deadline = deadline.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let waited = Client::with(|client| {
            let gpu = client.gpu.get();
            client.call("a wait", |core, _| {
                if has_come(core, gpu) || deadline.is_some_and(|end| core.clock() >= end) {
                    return Poll::Ready(Ok(()));
                }
                if let Some(end) = deadline {
                    core.wake_at(end);
                    return Poll::Pending;
                }
                core.deadlock().map_or(Poll::Pending, |report| Poll::Ready(Err(report)))
            })
        });
        waited.flatten().unwrap_or_else(|| Err("the simulated machine is gone".to_owned()))
    }

    /// Something has happened outside the machine that a thread in [`wait`](Self::wait) may be
    /// waiting for.
    pub fn notify(&self) {
        self.inner.shared.notify();
    }

    /// What went wrong first: why the driver's functions failed, or a wait was told that nothing
    /// can go on.
    #[must_use]
    pub fn failure(&self) -> Option<Arc<Error>> {
        self.inner.shared.failure()
    }

    /// What its GPUs have done so far.
    #[must_use]
    pub fn activity(&self) -> Activity {
        let here = |client: &Client| Arc::ptr_eq(client.shared(), &self.inner.shared);
        let is_here = Client::with(here).unwrap_or(false);
        let _visit = (!is_here).then(|| self.ticket("a look").attach());
        let look = |core: &Core, _: &Call| Poll::Ready(core.gpus.activity());
        Client::with(|client| client.call("a look", look)).flatten().unwrap_or_default()
    }

    /// Makes calls go wrong from now on. For tests.
    pub fn inject(&self, fault: Fault) {
        self.inner.shared.faults.inject(fault);
    }

    /// Records calls from now on. For tests.
    pub fn record_calls(&self) {
        self.inner.shared.faults.record();
    }

    /// The calls since [`record_calls`](Self::record_calls), of all threads, in their order.
    #[must_use]
    pub fn calls(&self) -> Vec<CallRecord> {
        self.inner.shared.faults.records()
    }

    /// The function that runs `body` on the GPU of the current context; one for each body.
    ///
    /// Null if the calling thread has no context.
    #[must_use]
    pub fn bind(&self, body: &HostBody) -> CUfunction {
        let bound = Client::with(|client| {
            let gpu = client.gpu.get()?;
            client.call("a binding", |core, _| Poll::Ready(core.bind(gpu, body)))
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

/// The machine of that number, if it is still there.
pub(crate) fn find(number: u64) -> Option<Arc<Shared>> {
    MACHINES.lock().get(&number).and_then(Weak::upgrade)
}

/// Makes the calling thread one that uses this machine until it ends, if it does not use it
/// already.
pub(crate) fn join(machine: &Arc<Shared>) {
    let here = |client: &Client| Arc::ptr_eq(client.shared(), machine);
    if !Client::with(here).unwrap_or(false) {
        let name = thread::current().name().unwrap_or("a thread").to_owned();
        Client::attach(machine, machine.register(name));
    }
}

/// A thread that will use a machine.
#[must_use = "the machine waits for the thread"]
pub struct Ticket {
    shared: Arc<Shared>,
    id: ClientId,
    used: bool,
}

impl Ticket {
    /// Makes the calling thread the announced one, and waits for its turn.
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

/// The calling thread uses a machine; dropping this ends that.
#[must_use = "the thread leaves the machine when this is dropped"]
pub struct Attached {
    _private: (),
}

impl Drop for Attached {
    fn drop(&mut self) {
        Client::detach();
    }
}
