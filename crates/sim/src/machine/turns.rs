//! The machine's thread, which chooses the client that runs next: a host thread that uses the
//! machine. [`baton`](super::baton) explains clients, their calls and their turns.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::baton::{Caller, Next, Shared};
use super::core::{Core, Progress};
use crate::base::ids::ClientId;
use crate::base::schedule::Schedule;
use crate::base::timeline::{Row, Span};

/// The number of clients' turns after which the GPUs run even if clients come first, since a client
/// may query a stream in a loop.
const MAX_SERVED: usize = 1000;

/// The calls that change nothing for which a kernel or another host thread may wait.
const QUERIES: [&str; 5] = [
    "cuStreamQuery",
    "cuStreamGetCaptureInfo",
    "cuEventQuery",
    "cuEventElapsedTime",
    "ncclCommGetAsyncError",
];

/// Runs a machine until no thread uses it.
pub(super) fn run(shared: &Arc<Shared>) {
    shared.processor.stay();
    // Also after a panic, `end` wakes the clients that wait.
    let ran = catch_unwind(AssertUnwindSafe(|| Turns::new(shared).run()));
    shared.end();
    if ran.is_err() {
        tracing::error!("a simulated machine has failed");
    }
}

struct Turns {
    shared: Arc<Shared>,
    core: Core,
    /// Whether the order of turns is random, determined by the seed.
    random: bool,
    /// Whether all clients have their turns before the GPUs run. With a list of choices this is
    /// true, so that each choice is among the threads of all kernels that the clients can launch
    /// before it.
    clients_first: bool,
    /// The client that had the last turn.
    last: Option<ClientId>,
    /// The number of clients' turns since the GPUs last ran.
    served: usize,
    /// The time since which each client waits, for the timeline.
    waiting: BTreeMap<ClientId, u64>,
}

impl Turns {
    fn new(shared: &Arc<Shared>) -> Self {
        let core = Core::new(Arc::clone(shared));
        let random = shared.simulation.random_seed().is_some();
        let waiting = BTreeMap::new();
        let clients_first = matches!(shared.simulation.schedule, Schedule::Choices(_));
        Self {
            shared: Arc::clone(shared),
            core,
            random,
            clients_first,
            last: None,
            served: 0,
            waiting,
        }
    }

    fn run(mut self) {
        loop {
            let (mut clients, all) = match self.shared.next() {
                Next::Waiting { clients, all } => (clients, all),
                Next::Write => {
                    self.core.gpus.write_timeline();
                    self.shared.has_written();
                    continue;
                }
                Next::End => break,
            };
            if self.core.gpus.timeline.is_on() {
                let now = self.core.gpus.timeline.now();
                clients.iter().for_each(|client| _ = self.waiting.entry(client.id).or_insert(now));
            }
            // A host thread that was blocked outside of the machine may have written what kernels
            // poll.
            if self.core.gpus.host.is_away.replace(!all) && all {
                self.core.gpus.host.progressed();
                self.core.gpus.recheck_waits();
            }
            for (id, event) in self.shared.take_events() {
                self.core.memory.races.host_event(id, event);
            }
            self.order(&mut clients);
            // The clients of a lagging rank wait: `all_blocked` serves them if nothing else can go
            // on.
            let late = match self.core.gpus.late_rank().0 {
                Some(rank) => clients.extract_if(.., |client| client.gpu == Some(rank)).collect(),
                None => Vec::new(),
            };
            let gpus_first = match self.random {
                true => self.core.gpus.choose(2) == 0,
                false if self.clients_first => self.served >= MAX_SERVED,
                // The GPUs run once after each round of the clients' turns, as if concurrently.
                false => self.served >= clients.len(),
            };
            if gpus_first {
                self.served = 0;
                if matches!(self.core.run_gpus(false), Progress::Streams) {
                    self.shared.notify_streams();
                }
            }
            self.core.clear_wake_time();
            if !self.serve(&clients) {
                self.all_blocked(&clients, &late, all);
            }
        }
    }

    /// Orders the clients: round robin, or at random.
    fn order(&mut self, clients: &mut [Caller]) {
        if self.random {
            for i in 0..clients.len() {
                clients.swap(i, i + self.core.gpus.choose(clients.len() - i));
            }
            return;
        }
        let next = clients.iter().position(|client| Some(client.id) > self.last);
        clients.rotate_left(next.unwrap_or(0));
    }

    /// Passes the baton to the first client whose call is ready; returns whether there is one.
    fn serve(&mut self, clients: &[Caller]) -> bool {
        for caller @ Caller { id, call, gpu } in clients {
            let is_ready = call.is_none_or(|call| {
                // SAFETY: this is the machine's thread, and the call is of a client that waits.
                self.core.memory.races.as_host(*id, *gpu, || unsafe { call.poll(&self.core) })
            });
            if is_ready {
                self.record(caller);
                if !call.is_some_and(|call| QUERIES.contains(&call.name)) {
                    self.core.gpus.host.progressed();
                }
                self.core.tick();
                self.core.gpus.recheck_waits();
                self.last = Some(*id);
                self.served += 1;
                self.shared.give_turn(*id);
                return true;
            }
        }
        false
    }

    /// Records, for the timeline, how long a client has waited in its call. Nothing is recorded of
    /// a client that has waited for its first turn, without a call, or whose rank is not known.
    fn record(&mut self, Caller { id, call, gpu }: &Caller) {
        let timeline = &self.core.gpus.timeline;
        let begin = self.waiting.remove(id).unwrap_or(timeline.now());
        if let (Some(call), Some(rank)) = (call, gpu)
            && begin < timeline.now()
        {
            let row = Row::Host(self.shared.name_of(*id).as_ref().into());
            let (rank, name, at) = (*rank, call.name.to_owned(), None);
            timeline.span(|end| Span { rank, row, begin, end, name, waits: true, at });
        }
    }

    /// Goes on when no call is ready: runs the GPUs, serves the clients of a lagging rank, advances
    /// the clock, or reports a deadlock.
    fn all_blocked(&mut self, clients: &[Caller], late: &[Caller], all: bool) {
        self.served = 0;
        let host_waits = true;
        let progress = self.core.run_gpus(host_waits);
        let (_, others_wait) = self.core.gpus.late_rank();
        let late_may_run = matches!(progress, Progress::Nothing) || others_wait;
        match progress {
            Progress::Streams => self.shared.notify_streams(),
            _ if late_may_run && self.serve(late) => {}
            Progress::Something => {}
            // While a host thread is blocked outside of the machine, the clock advances by the time
            // that passes, as a GPU's clock would.
            Progress::Nothing if !all => self.core.sleep(self.shared.wait_for_unscheduled()),
            Progress::Nothing if self.core.advance_to_deadline() => {}
            Progress::Nothing if self.core.gpus.host.resume() => {}
            Progress::Nothing => {
                // One client gets the report of the deadlock. The others then go on, and find that
                // its rank is lost.
                self.core.begin_deadlock();
                let served = self.serve(clients) || self.serve(late);
                self.core.end_deadlock();
                assert!(served, "a pending call returns on deadlock");
            }
        }
    }
}
